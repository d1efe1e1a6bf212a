"""Keywords of llama_cpp.Llama that llama.cpp itself would answer with an abort."""

from __future__ import annotations

import os
from typing import Any

from laguna_gguf.errors import CheckpointError, ConfigError

MAX_THREADS = 512
"""GGML_MAX_N_THREADS."""

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7}
"""Types llama.cpp accepts for the KV cache, by the names of -ctk and -ctv; values are ggml type ids."""

_RANGES = {
    "n_threads": (0, MAX_THREADS),  # 0 and None: Llama chooses
    "n_threads_batch": (0, MAX_THREADS),
    "n_batch": (1, 1 << 24),
    "n_ubatch": (1, 1 << 24),
    "n_ctx": (0, (1 << 31) - 1),  # 0: as the model was trained
}


def check_llama_keywords(keywords: dict[str, Any]) -> None:
    """Raise ConfigError or CheckpointError, naming the keyword, for values that would end the process."""
    for name, (low, high) in _RANGES.items():
        value = keywords.get(name)
        if value is None and (name not in keywords or name.startswith("n_threads")):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} is {value!r}; needed an integer in {low}..{high}")
    for name in ("type_k", "type_v"):
        value = keywords.get(name)
        if value is not None and value not in CACHE_TYPES.values():
            known = ", ".join(f"{type_id} ({type_name})" for type_name, type_id in CACHE_TYPES.items())
            raise ConfigError(f"{name} is {value!r}; needed a ggml type id that a KV cache can have: {known}")
    lora_path = keywords.get("lora_path")
    if lora_path is not None and not os.path.isfile(lora_path):
        raise CheckpointError(f"lora_path: {lora_path} is not a file")
