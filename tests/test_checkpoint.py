"""Reading weights: layouts and dialects give the same tensors; damaged and foreign checkpoints are refused by name."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fixtures import (
    FloatArray,
    dialect_tensors,
    drafter_config,
    drafter_tensors,
    layout_tensors,
    save_tensors,
    write_drafter_dir,
    write_drafter_gguf,
)
from laguna_gguf import _native
from laguna_gguf.dflash.checkpoint import Checkpoint, read_checkpoint
from laguna_gguf.dflash.names import internal_shapes
from laguna_gguf.errors import CheckpointError, ConfigError
from malformed import builder as b
from malformed.builder import GgufBuilder

Tensors = dict[str, FloatArray]


def as_floats(checkpoint: Checkpoint) -> Tensors:
    return {
        name: _native.dequantize(t.data, t.ggml_type, t.ne[0]).reshape(t.ne[::-1])
        for name, t in checkpoint.tensors.items()
    }


def expected_floats(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    return {n.removesuffix(".weight"): t for n, t in dialect_tensors(tensors, config, "A").items()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor), name


def write_dir(path: Path, change: Callable[[Tensors], object], **overrides: Any) -> Path:
    """A directory whose fused tensors were changed; config overrides apply to the config only."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(drafter_config(**overrides)))
    tensors = drafter_tensors(drafter_config())
    change(tensors)
    save_tensors(path, tensors)
    return path


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["fused", "split", "prefixed", "sharded"])
def test_every_layout_gives_the_same_tensors(tmp_path: Path, layout: Any, dtype: str) -> None:
    tensors = write_drafter_dir(tmp_path / "d", layout=layout, dtype=dtype)
    checkpoint = read_checkpoint(tmp_path / "d")
    assert_same(as_floats(checkpoint), expected_floats(tensors, drafter_config()))
    assert checkpoint.dialect == "hf"
    assert checkpoint.context_length == 4096
    ggml_type = {"f32": 0, "f16": 1, "bf16": 30}[dtype]
    for name, tensor in checkpoint.tensors.items():
        assert tensor.ggml_type == (0 if "norm" in name else ggml_type)
        assert tensor.data.dtype == np.uint8
        assert tensor.data.flags.c_contiguous
    assert {n: t.ne for n, t in checkpoint.tensors.items()} == internal_shapes(checkpoint.config)


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_every_dialect_gives_the_same_tensors(tmp_path: Path, dialect: Literal["A", "B", "C"]) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config)
    path = write_drafter_gguf(tmp_path / "d.gguf", tensors, config, dialect=dialect, tokenizer=dialect == "A")
    checkpoint = read_checkpoint(path)
    assert checkpoint.dialect == dialect
    assert_same(as_floats(checkpoint), expected_floats(tensors, config))
    assert checkpoint.config.target_layer_ids == (1, 4, 7)
    assert (checkpoint.config.mask_token_id, checkpoint.config.sliding_window) == (12, 32)
    assert checkpoint.defaults == {"causal": True}


def test_sanitize_fuses_split_qkv_and_rejects_mixed(tmp_path: Path) -> None:
    config = drafter_config()
    tensors = write_drafter_dir(tmp_path / "split", layout="split")
    checkpoint = read_checkpoint(tmp_path / "split")
    found = as_floats(checkpoint)
    for layer in range(3):
        parts = [found[f"blk.{layer}.attn_{letter}"] for letter in "qkv"]
        assert np.array_equal(np.concatenate(parts), tensors[f"layers.{layer}.self_attn.qkv_proj.weight"])
    assert set(checkpoint.tensors) == set(expected_floats(tensors, config))

    def both(t: Tensors) -> None:
        t["layers.1.self_attn.q_proj.weight"] = np.zeros((64, 64), np.float32)

    def incomplete(t: Tensors) -> None:
        split = layout_tensors(t, config, "split")
        t.clear()
        t.update({name: v for name, v in split.items() if name != "layers.2.self_attn.k_proj.weight"})

    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.qkv_proj"):
        read_checkpoint(write_dir(tmp_path / "both", both))
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.k_proj"):
        read_checkpoint(write_dir(tmp_path / "incomplete", incomplete))


def test_layers_may_differ_in_layout(tmp_path: Path) -> None:
    config = drafter_config()
    original = drafter_tensors(config)

    def mixed(t: Tensors) -> None:
        split = layout_tensors(t, config, "split")
        t.update({name: v for name, v in split.items() if name.startswith("layers.1.")})
        del t["layers.1.self_attn.qkv_proj.weight"]

    assert_same(as_floats(read_checkpoint(write_dir(tmp_path / "d", mixed))), expected_floats(original, config))


@pytest.mark.parametrize(
    "name",
    [
        "fc",
        "hidden_norm",
        "norm",
        "aux_hidden_norms.1",
        "layers.0.self_attn.qkv_proj",
        "layers.2.self_attn.g_proj",
        "layers.1.mlp.down_proj",
        "layers.1.input_layernorm",
    ],
)
def test_rejects_missing_tensors_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"missing {name}"):
        read_checkpoint(write_dir(tmp_path / "d", lambda t: t.pop(f"{name}.weight")))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "embed_tokens.weight",
        "layers.3.input_layernorm.weight",
        "aux_hidden_norms.3.weight",
        "layers.0.self_attn.o_proj.bias",
        "layers.0.mlp.up_proj.weight_scale",
        "model.model.fc.weight",
    ],
)
def test_rejects_unknown_tensors_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="unknown"):
        read_checkpoint(write_dir(tmp_path / "d", lambda t: t.update({name: np.ones(64, np.float32)})))


def test_rejects_a_tensor_with_and_without_prefix(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="prefix"):
        read_checkpoint(write_dir(tmp_path / "d", lambda t: t.update({"model.norm.weight": t["norm.weight"]})))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (64, 128)),
        ("fc.weight", (192, 64)),
        ("norm.weight", (63,)),
        ("norm.weight", (64, 1)),
        ("aux_hidden_norms.0.weight", (16,)),
        ("layers.0.self_attn.qkv_proj.weight", (64, 128)),
        ("layers.1.self_attn.g_proj.weight", (64, 64)),
        ("layers.1.mlp.down_proj.weight", (96, 64)),
        ("layers.2.self_attn.q_norm.weight", (64,)),
    ],
)
def test_rejects_wrong_shapes_by_name(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=name.removesuffix(".weight")):
        read_checkpoint(write_dir(tmp_path / "d", lambda t: t.update({name: np.ones(shape, np.float32)})))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["fc.weight", "aux_hidden_norms.2.weight", "layers.1.self_attn.qkv_proj.weight"])
def test_rejects_values_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    def poison(t: Tensors) -> None:
        t[name].reshape(-1)[-1] = value

    with pytest.raises(CheckpointError, match=name.removesuffix(".weight")):
        read_checkpoint(write_dir(tmp_path / "d", poison))


def test_captured_layers_may_differ_from_layers_only_with_the_weights(tmp_path: Path) -> None:
    tensors = write_drafter_dir(tmp_path / "ok", target_layer_ids=[1, 7])
    assert tensors["fc.weight"].shape == (64, 128)
    assert read_checkpoint(tmp_path / "ok").tensors["enc.aux_norm"].ne == (64, 2)
    write_drafter_gguf(tmp_path / "ok.gguf", tensors, drafter_config(target_layer_ids=[1, 7]))
    assert read_checkpoint(tmp_path / "ok.gguf").tensors["fc"].ne == (128, 64)
    for ids in ([1, 7], [1, 2, 4, 7]):
        with pytest.raises(ConfigError, match="target_layer_ids"):
            read_checkpoint(write_dir(tmp_path / f"bad{len(ids)}", lambda t: None, target_layer_ids=ids))


def test_rejects_dtypes_that_are_not_weights(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    path = tmp_path / "d" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(CheckpointError, match="I32"):
        read_checkpoint(tmp_path / "d")


def test_rejects_quantisation_of_unknown_kind(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d", quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method: found 'awq'"):
        read_checkpoint(tmp_path / "d")


# Containers


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "c:x", 7])
def test_rejects_shard_names_that_leave_the_directory(tmp_path: Path, name: Any) -> None:
    write_drafter_dir(tmp_path / "d", layout="sharded")
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "d" / "model-00001-of-00003.safetensors").read_bytes())
    edit_index(tmp_path / "d", lambda m: m.update({"fc.weight": name}))
    with pytest.raises(CheckpointError, match="plain file name"):
        read_checkpoint(tmp_path / "d")


def test_rejects_indexes_that_do_not_fit_their_shards(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d", layout="sharded")
    edit_index(tmp_path / "d", lambda m: m.pop("fc.weight") and None)
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        read_checkpoint(tmp_path / "d")
    edit_index(tmp_path / "d", lambda m: m.update({"fc.weight": "model-00009-of-00003.safetensors"}))
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="weight_map"):
        read_checkpoint(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        read_checkpoint(tmp_path / "d")


def test_rejects_a_missing_shard_by_name(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d", layout="sharded")
    (tmp_path / "d" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        read_checkpoint(tmp_path / "d")


def test_reads_a_cache_snapshot_of_symlinks(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "rev"
    write_drafter_dir(blobs, layout="sharded")
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(blobs.iterdir())):
        (snapshot / file.name).symlink_to(file.rename(blobs / f"{i:064x}"))
    assert len(read_checkpoint(snapshot).tensors) == 40


def test_rejects_truncated_and_lying_safetensors(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    path = tmp_path / "d" / "model.safetensors"
    content = path.read_bytes()
    n_header = struct.unpack("<Q", content[:8])[0]
    for broken in (
        b"",
        content[:7],
        content[:100],
        content[: 8 + n_header],
        content[:-1],
        content + b"x",
        struct.pack("<Q", 2**63) + content[8:],
        struct.pack("<Q", 0) + content[8:],
        content[:8] + b"\xff" * n_header + content[8 + n_header :],
    ):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            read_checkpoint(tmp_path / "d")


def test_rejects_duplicate_keys_in_a_safetensors_header(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    path = tmp_path / "d" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"aux_hidden_norms.1.weight", b"aux_hidden_norms.0.weight"))
    with pytest.raises(CheckpointError, match="duplicate"):
        read_checkpoint(tmp_path / "d")


def test_missing_sources_are_value_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_drafter_dir(tmp_path / "no-weights")
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    write_drafter_dir(tmp_path / "file")
    for path in (
        tmp_path / "nothing",
        tmp_path / "empty",
        tmp_path / "no-weights",
        tmp_path / "file" / "model.safetensors",
        tmp_path / "file" / "config.json",
        "a\0b",
    ):
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(path)
        assert isinstance(caught.value, ValueError)


# GGUF content


def gguf_with(tmp_path: Path, change: Callable[[Tensors], object]) -> Path:
    """A dialect-A file in which some tensors (by GGUF name) were changed."""
    config = drafter_config()
    tensors = dialect_tensors(drafter_tensors(config), config, "A")
    change(tensors)
    whole = write_drafter_gguf(tmp_path / "whole.gguf", drafter_tensors(config), config)
    file = _native.GgufFile(str(whole))
    builder = GgufBuilder()
    for key in file.keys():
        value = file.get(key)
        if isinstance(value, str):
            builder.key(key, b.STRING, value)
        elif isinstance(value, list):
            builder.array_key(key, b.STRING, value)
        elif isinstance(value, np.ndarray):
            builder.array_key(key, b.I32, value.tolist())
        else:
            builder.key(key, b.F32 if isinstance(value, float) else b.U32, value)
    for name, t in tensors.items():
        builder.tensor(name, t.shape[::-1], {"f": b.GGML_F32, "i": 26}[t.dtype.kind], t.tobytes())
    return builder.write(tmp_path / "changed.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc"),
        (lambda t: t.pop("enc.aux_norm.weight"), "missing enc.aux_norm"),
        (lambda t: t.pop("blk.2.attn_gate.weight"), r"missing blk\.2\.attn_gate"),
        (lambda t: t.update({"token_embd.weight": np.ones((320, 64), np.float32)}), "unknown token_embd"),
        (lambda t: t.update({"fc": t["fc.weight"]}), "with and without"),
        (lambda t: t.update({"blk.0.attn_q.weight": np.ones((64, 32), np.float32)}), r"blk\.0\.attn_q has shape"),
        (lambda t: t.update({"enc.aux_norm.weight": np.ones((64, 3), np.float32)}), r"enc\.aux_norm has shape"),
        (lambda t: t.update({"output_norm.weight": np.full(64, np.nan, np.float32)}), "output_norm has values"),
        (lambda t: t.update({"blk.1.ffn_up.weight": np.ones((96, 64), np.int32)}), r"blk\.1\.ffn_up has type i32"),
    ],
)
def test_rejects_gguf_tensors_by_name(tmp_path: Path, change: Callable[[Tensors], object], message: str) -> None:
    read_checkpoint(gguf_with(tmp_path, lambda t: None))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(gguf_with(tmp_path, change))


def test_tensor_views_stay_valid_after_the_checkpoint_is_gone(tmp_path: Path) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config)
    view = read_checkpoint(write_drafter_gguf(tmp_path / "d.gguf", tensors, config)).tensors["fc"].data
    assert np.array_equal(view.view("<f4").reshape(64, 192), tensors["fc.weight"])
