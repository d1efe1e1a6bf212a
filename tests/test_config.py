"""DrafterConfig: the published configurations load, every deviation is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures import REMOVE, drafter_config
from laguna_gguf.dflash.config import DrafterConfig, parse_config
from laguna_gguf.errors import CheckpointError, ConfigError, LagunaError, TargetMismatchError
from malformed import builder as b
from malformed.builder import GgufBuilder

XS_2_1: dict[str, Any] = {
    "architectures": ["DFlashLagunaForCausalLM"],
    "model_type": "laguna",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100352,
    "draft_vocab_size": 100352,
    "max_position_embeddings": 262144,
    "rope_theta": 500000.0,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5,
    "gating": "per-head",
    "num_experts": 0,
    "attention_bias": False,
    "eagle_aux_hidden_state_layer_ids": [2, 14, 26, 34, 40],
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 12,
        "num_target_layers": 40,
        "target_layer_ids": [1, 13, 25, 33, 39],
        "causal": True,
    },
}
S_2_1: dict[str, Any] = XS_2_1 | {
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 6,
    "num_attention_heads": 72,
    "max_position_embeddings": 1048576,
    "layer_types": ["sliding_attention"] * 6,
    "sliding_windows": [512] * 6,
    "eagle_aux_hidden_state_layer_ids": [2, 11, 20, 30, 39, 48],
    "dflash_config": XS_2_1["dflash_config"] | {"num_target_layers": 48, "target_layer_ids": [1, 10, 19, 29, 38, 47]},
}


def test_published_configs_load() -> None:
    xs = DrafterConfig.from_json(XS_2_1)
    assert (xs.hidden_size, xs.num_hidden_layers, xs.num_attention_heads) == (2048, 5, 64)
    assert (xs.sliding_window, xs.block_size, xs.mask_token_id, xs.causal) == (512, 16, 12, True)
    assert xs.target_layer_ids == (1, 13, 25, 33, 39)
    s = DrafterConfig.from_json(S_2_1)
    assert (s.num_target_layers, s.target_layer_ids[-1]) == (48, 47)
    xs.validate_target(40, 2048, 100352)
    s.validate_target(48, 3072, 100352)


def test_from_json_reads_a_file_its_directory_and_a_dict(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(XS_2_1))
    expected = DrafterConfig.from_json(XS_2_1)
    for source in (tmp_path / "config.json", str(tmp_path / "config.json"), tmp_path):
        assert DrafterConfig.from_json(source) == expected


def test_defaults_are_reported() -> None:
    config, defaults = parse_config(drafter_config(causal=REMOVE, draft_vocab_size=REMOVE))
    assert config.causal is True
    assert defaults == {"causal": True, "draft_vocab_size": 320, "sliding_windows": [32] * 3}
    assert parse_config(drafter_config(sliding_windows=[32] * 3))[1] == {}


def test_gating_true_and_absent_lists_are_accepted() -> None:
    DrafterConfig.from_json(drafter_config(gating=True))
    DrafterConfig.from_json(drafter_config(eagle_aux_hidden_state_layer_ids=REMOVE))
    DrafterConfig.from_json(drafter_config(rope_parameters=None, num_experts=REMOVE, attention_bias=REMOVE))
    DrafterConfig.from_json(drafter_config(num_hidden_layers=2))  # against the weights, not here


BAD_FIELDS: list[tuple[str, Any]] = [
    ("architectures", ["DFlashDraftModel"]),
    ("architectures", ["LagunaForCausalLM"]),
    ("architectures", "DFlashLagunaForCausalLM"),
    ("architectures", REMOVE),
    ("model_type", "qwen3"),
    ("model_type", REMOVE),
    ("dflash_config", REMOVE),
    ("dflash_config", [1]),
    ("rope_parameters", {"rope_theta": 5e5}),
    ("rope_parameters", {}),
    ("rope_scaling", {"type": "yarn"}),
    ("num_experts", 8),
    ("num_experts", False),
    ("attention_bias", True),
    ("gating", "per-element"),
    ("gating", False),
    ("gating", REMOVE),
    ("layer_types", ["sliding_attention", "full_attention", "sliding_attention"]),
    ("layer_types", ["sliding_attention"] * 2),
    ("layer_types", REMOVE),
    ("sliding_windows", [32, 32]),
    ("sliding_windows", [32, 32, 64]),
    ("sliding_window", 1),
    ("sliding_window", 0),
    ("sliding_window", (1 << 20) + 1),
    ("sliding_window", None),
    ("sliding_window", REMOVE),
    ("draft_vocab_size", 319),
    ("causal", False),
    ("causal", 1),
    ("causal", None),
    ("block_size", 1),
    ("block_size", 4097),
    ("block_size", True),
    ("block_size", 16.0),
    ("block_size", "16"),
    ("block_size", REMOVE),
    ("mask_token_id", -1),
    ("mask_token_id", 320),
    ("mask_token_id", None),
    ("mask_token_id", REMOVE),
    ("target_layer_ids", []),
    ("target_layer_ids", [1, 4, 4]),
    ("target_layer_ids", [4, 1, 7]),
    ("target_layer_ids", [-1, 4, 7]),
    ("target_layer_ids", [1, 4, 8]),
    ("target_layer_ids", [1, 4, True]),
    ("target_layer_ids", [1, 4, 7.0]),
    ("target_layer_ids", "147"),
    ("target_layer_ids", REMOVE),
    ("num_target_layers", 0),
    ("num_target_layers", None),
    ("num_target_layers", REMOVE),
    ("eagle_aux_hidden_state_layer_ids", [1, 4, 7]),
    ("eagle_aux_hidden_state_layer_ids", [2, 5]),
    ("hidden_size", 0),
    ("hidden_size", -64),
    ("hidden_size", 1 << 40),
    ("hidden_size", REMOVE),
    ("intermediate_size", 0),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 1025),
    ("num_attention_heads", 0),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 0),
    ("head_dim", 15),
    ("head_dim", 1026),
    ("vocab_size", 0),
    ("rms_norm_eps", 0.0),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", float("inf")),
    ("rms_norm_eps", "1e-6"),
    ("rope_theta", 0),
    ("rope_theta", float("inf")),
    ("rope_theta", 10**400),
    ("rope_theta", REMOVE),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_rejects_by_field_name(field: str, value: Any) -> None:
    config = drafter_config(**{field: value}) if field != "num_hidden_layers" else drafter_config() | {field: value}
    with pytest.raises(ConfigError, match=field):
        DrafterConfig.from_json(config)


def test_message_has_found_and_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(drafter_config(gating="per-element")))
    with pytest.raises(ConfigError, match=r"'per-element'.*needed 'per-head'") as caught:
        DrafterConfig.from_json(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_config_rejects_bad_contract() -> None:
    """The validation list of the seed issue: each is a typed load error, and XS 2.1 without sliding_windows loads."""
    DrafterConfig.from_json(XS_2_1)
    dflash = XS_2_1["dflash_config"]
    bad: list[dict[str, Any]] = [
        {"dflash_config": dflash | {"causal": False}},
        {"draft_vocab_size": 32000},
        {"dflash_config": dflash | {"target_layer_ids": [1, 25, 13, 33, 39]}},
        {"gating": "per-element"},
        {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]},
    ]
    for change in bad:
        with pytest.raises(ConfigError):
            DrafterConfig.from_json(XS_2_1 | change)
    with pytest.raises(TargetMismatchError, match="num_target_layers"):
        DrafterConfig.from_json(XS_2_1).validate_target(48, 2048, 100352)


@pytest.mark.parametrize(
    ("shape", "field"),
    [((7, 64, 320), "num_target_layers"), ((8, 32, 320), "hidden_size"), ((8, 64, 321), "vocab_size")],
)
def test_validate_target(shape: tuple[int, int, int], field: str) -> None:
    config = DrafterConfig.from_json(drafter_config())
    config.validate_target(8, 64, 320)
    with pytest.raises(TargetMismatchError, match=field):
        config.validate_target(*shape)


@pytest.mark.parametrize("text", ["{", "[1]", "null", '{"a": NaN,}', "[" * 100000, "\x00"])
def test_rejects_files_that_are_not_a_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LagunaError, match=r"config\.json"):
        DrafterConfig.from_json(tmp_path)


def test_rejects_missing_files_and_duplicate_keys(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "a\0b"):
        with pytest.raises(LagunaError) as caught:
            DrafterConfig.from_json(path)
        assert isinstance(caught.value, ValueError)
    (tmp_path / "config.json").write_text('{"model_type": "laguna", "model_type": "laguna"}')
    with pytest.raises(CheckpointError, match="duplicate key 'model_type'"):
        DrafterConfig.from_json(tmp_path)


def test_other_families_are_named() -> None:
    for architecture, name in (
        ("DFlashDraftModel", "Qwen"),
        ("LlamaForCausalLMEagle3", "EAGLE"),
        ("LagunaForCausalLM", "target"),
    ):
        with pytest.raises(ConfigError, match=name):
            DrafterConfig.from_json(drafter_config(architectures=[architecture]))


# GGUF metadata


def common(arch: str) -> GgufBuilder:
    builder = GgufBuilder().key("general.architecture", b.STRING, arch)
    for key, value in {
        "block_count": 3,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
    }.items():
        builder.key(f"{arch}.{key}", b.U32, value)
    builder.key(f"{arch}.attention.layer_norm_rms_epsilon", b.F32, 1e-6)
    return builder.key(f"{arch}.rope.freq_base", b.F32, 500000.0)


def published_a() -> GgufBuilder:
    """Like the published files: no window, no causal, no number of target layers."""
    builder = common("dflash").key("dflash.decoder_arch", b.STRING, "laguna").key("dflash.block_size", b.U32, 16)
    builder.key("tokenizer.ggml.mask_token_id", b.U32, 12).array_key("dflash.target_layers", b.I32, [2, 5, 8])
    return builder.array_key("tokenizer.ggml.tokens", b.STRING, [f"t{i}" for i in range(320)])


def dialect_b() -> GgufBuilder:
    builder = common("dflash-draft").key("dflash-draft.dflash.laguna", b.BOOL, 1)
    builder.key("dflash-draft.dflash.block_size", b.U32, 16).key("dflash-draft.dflash.mask_token_id", b.U32, 12)
    builder.key("dflash-draft.dflash.n_target_features", b.U32, 192).key("dflash-draft.vocab_size", b.U32, 320)
    return builder.array_key("dflash-draft.dflash.target_layer_ids", b.U32, [1, 4, 7])


def dialect_c() -> GgufBuilder:
    builder = dialect_b().tensor("dflash.fc.weight", (192, 64)).tensor("blk.0.attn_gate.weight", (64, 4))
    builder.keys = [k for k in builder.keys if b"dflash.laguna" not in k]
    return builder


@pytest.mark.parametrize("make", [published_a, dialect_b, dialect_c])
def test_from_gguf_defaults(tmp_path: Path, make: Any) -> None:
    config = DrafterConfig.from_gguf(make().write(tmp_path / "d.gguf"))
    assert config == replace(DrafterConfig.from_json(drafter_config(sliding_window=512)), num_target_layers=None)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 500000.0)
    assert (config.sliding_window, config.causal, config.num_target_layers) == (512, True, None)
    assert (config.vocab_size, config.mask_token_id, config.block_size) == (320, 12, 16)
    config.validate_target(8, 64, 320)
    config.validate_target(12, 64, 320)
    with pytest.raises(TargetMismatchError, match="target_layer_ids"):
        config.validate_target(7, 64, 320)


def test_from_gguf_explicit_keys(tmp_path: Path) -> None:
    builder = published_a().key("dflash.attention.sliding_window", b.U32, 32).key("dflash.num_target_layers", b.U32, 8)
    builder.array_key("dflash.attention.sliding_window_pattern", b.BOOL, [1, 1, 1])
    builder.key("dflash.attention.causal", b.BOOL, 1)
    config = DrafterConfig.from_gguf(builder.write(tmp_path / "d.gguf"))
    assert config == DrafterConfig.from_json(drafter_config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.key("dflash.attention.causal", b.BOOL, 0), "causal"),
        (lambda x: x.key("dflash.attention.sliding_window", b.U32, 1), "sliding_window"),
        (lambda x: x.key("dflash.attention.sliding_window", b.STRING, "512"), "sliding_window"),
        (lambda x: x.array_key("dflash.attention.sliding_window_pattern", b.BOOL, [1, 0, 1]), "layer_types"),
        (lambda x: x.array_key("dflash.attention.sliding_window_pattern", b.BOOL, [1]), "layer_types"),
        (lambda x: x.key("dflash.num_target_layers", b.U32, 7), "target_layer_ids"),
        (lambda x: x.key("dflash.expert_count", b.U32, 8), "num_experts"),
        (lambda x: x.key("dflash.rope.scaling.type", b.STRING, "yarn"), "rope_parameters"),
        (lambda x: x.key("dflash.rope.dimension_count", b.U32, 8), "head_dim"),
    ],
)
def test_from_gguf_rejects_by_field_name(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_gguf(change(published_a()).write(tmp_path / "d.gguf"))


def test_from_gguf_rejects_missing_or_mistyped_keys(tmp_path: Path) -> None:
    full = published_a()
    for i, key in enumerate(full.keys):
        if b"context_length" in key or b"value_length" in key:
            continue
        broken = GgufBuilder(keys=full.keys[:i] + full.keys[i + 1 :])
        with pytest.raises(ConfigError):
            DrafterConfig.from_gguf(broken.write(tmp_path / "d.gguf"))
    first = published_a()
    first.keys = [k for k in first.keys if b"target_layers" not in k]
    with pytest.raises(ConfigError, match="target_layer_ids"):  # the +1 numbering has no 0
        DrafterConfig.from_gguf(first.array_key("dflash.target_layers", b.I32, [0, 5, 8]).write(tmp_path / "d.gguf"))


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (common("dflash"), "Qwen"),
        (common("dflash").key("dflash.decoder_arch", b.STRING, "qwen3"), "Qwen"),
        (common("dflash-draft"), "Qwen"),
        (common("dflash-draft").tensor("dflash.fc.weight", (4, 4)), "Qwen"),
        (common("laguna"), "target"),
        (common("eagle3"), "EAGLE-3"),
        (common("llama"), "llama"),
        (GgufBuilder(), "general.architecture"),
    ],
)
def test_from_gguf_names_other_models(tmp_path: Path, builder: GgufBuilder, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_gguf(builder.write(tmp_path / "d.gguf"))


WEIRD: list[Any] = [None, True, -1, 0, 1.5, "x", [], {}, [[]], [{}], [None], 10**30, float("nan"), {"a": []}]


@pytest.mark.parametrize("field", [*drafter_config(), *drafter_config()["dflash_config"]])
def test_no_json_value_raises_anything_else(field: str) -> None:
    for value in WEIRD:
        data = drafter_config()
        (data["dflash_config"] if field in data["dflash_config"] else data)[field] = value
        try:
            DrafterConfig.from_json(data)
        except ConfigError as error:
            assert field in str(error) or field == "vocab_size"


def test_config_is_frozen_and_hashable() -> None:
    config = DrafterConfig.from_json(drafter_config())
    assert hash(config) == hash(DrafterConfig.from_json(drafter_config()))
    with pytest.raises(AttributeError):
        config.block_size = 4  # type: ignore[misc]
    assert json.loads(json.dumps(config.as_dict()))["target_layer_ids"] == [1, 4, 7]
