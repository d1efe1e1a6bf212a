"""config.json of a drafter: kept as text inside our GGUF files, or built again from the GGUF's own keys."""

import dataclasses
import json
from typing import Any

from laguna_gguf.dflash.checkpoint import Checkpoint
from laguna_gguf.dflash.config import ARCHITECTURE, MODEL_TYPE, DrafterConfig, parse_config, parse_json, read_json
from laguna_gguf.errors import CheckpointError, ConfigError

CONFIG_KEY = "laguna_gguf.hf_config"
"""GGUF key with the source's config.json as JSON text. llama.cpp ignores keys that it does not know."""

_QUANTIZATION_FIELDS = ("quantization_config", "quantization", "compression_config")
"""They describe weights that a conversion no longer contains (the second is MLX's)."""
_CODE_FIELDS = ("auto_map", "custom_pipelines")
"""They name Python code that a conversion does not carry, and that a file from elsewhere should not ask to be run."""
_LEFT_OUT = frozenset(_QUANTIZATION_FIELDS + _CODE_FIELDS)
_DTYPE_FIELDS = ("torch_dtype", "dtype")
_DTYPE_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def source_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The whole config.json that a checkpoint has or carries, without quantisation and code; None when there is none.

    A carried one counts only while it says the same as the GGUF's own keys: those are what the drafter runs with.
    """
    data: Any
    try:
        if checkpoint.gguf is None:
            data = read_json(checkpoint.source / "config.json")
        else:
            text = checkpoint.gguf.get(CONFIG_KEY)
            data = parse_json(text, CONFIG_KEY) if isinstance(text, str) else None
        if not isinstance(data, dict):
            return None
        found, _ = parse_config(data)
    except (ConfigError, CheckpointError):
        return None
    wanted = checkpoint.config
    if wanted.num_target_layers is None:
        found = dataclasses.replace(found, num_target_layers=None)
    if found != wanted:
        return None
    return {key: value for key, value in data.items() if key not in _LEFT_OUT}


def config_text(checkpoint: Checkpoint) -> str | None:
    """The value of CONFIG_KEY for a new GGUF file."""
    data = source_config(checkpoint)
    return None if data is None else json.dumps(data)


def restored_config(checkpoint: Checkpoint, num_target_layers: int, dtype: str) -> dict[str, Any]:
    """config.json of an HF directory with weights of `dtype` ("f32", "f16", "bf16")."""
    data = source_config(checkpoint)
    if data is None:
        config = dataclasses.replace(checkpoint.config, num_target_layers=num_target_layers)
        data = _built_config(config, checkpoint.context_length) | {"torch_dtype": _DTYPE_NAMES[dtype]}
    return data | {field: _DTYPE_NAMES[dtype] for field in _DTYPE_FIELDS if field in data}


def _built_config(config: DrafterConfig, context_length: int | None) -> dict[str, Any]:
    """Every field of a published config.json, from the fields that matter."""
    n_layers = config.num_hidden_layers
    context = {} if context_length is None else {"max_position_embeddings": context_length}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": n_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        **context,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "layer_types": ["sliding_attention"] * n_layers,
        "gating": "per-head",
        "num_experts": 0,
        "attention_bias": False,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "num_target_layers": config.num_target_layers,
            "target_layer_ids": list(config.target_layer_ids),
            "causal": config.causal,
        },
    }
