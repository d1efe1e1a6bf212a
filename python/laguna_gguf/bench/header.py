"""What a measurement ran on: machine, files, settings, versions."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp

from laguna_gguf.devices import ggml_build, list_devices
from laguna_gguf.dflash.arguments import CACHE_TYPES
from laguna_gguf.dflash.config import DrafterConfig


def header(
    llama: llama_cpp.Llama, target: Path, drafter: Path | None, config: DrafterConfig | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Plain types, ready for json. `settings` are keywords of Llama (n_batch, type_k, ...) and what else was chosen.

    Sizes in bytes; file names without their folders.
    """
    model, types = llama._model, {type_id: name for name, type_id in CACHE_TYPES.items()}
    version, commit = ggml_build()
    return {
        "model_filename": target.name,
        "model_type": model.desc(),
        "model_size": model.size(),
        "model_n_params": model.n_params(),
        "drafter_filename": drafter.name if drafter else None,
        "drafter_layers": config.num_hidden_layers if config else None,
        "drafter_block_size": config.block_size if config else None,
        "devices": [asdict(device) for device in list_devices()],
        "n_ctx": llama.n_ctx(),
        "n_threads": llama.n_threads,
        "n_threads_batch": llama.n_threads_batch,
        **{
            key: types.get(value, value) if key.startswith("type_") else value
            for key, value in settings.items()
            if key not in ("n_ctx", "n_threads", "n_threads_batch", "verbose")
        },
        "laguna_gguf": importlib.metadata.version("laguna-gguf"),
        "llama_cpp_python": llama_cpp.__version__,
        "ggml": f"{version} ({commit})",
        "system_info": llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(),
    }
