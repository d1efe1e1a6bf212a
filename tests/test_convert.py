"""convert_dflash: values against numpy, one output for every layout, target checks, and no half-written files."""

import json
import os
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest

from convert_tools import N_VOCAB, write_target_dir, write_target_gguf, write_tokenizer
from fixtures import (
    FloatArray,
    dialect_tensors,
    drafter_config,
    drafter_tensors,
    write_drafter_dir,
    write_drafter_gguf,
)
from laguna_gguf import _native
from laguna_gguf.convert import convert_dflash, dflash, writer
from laguna_gguf.dflash.checkpoint import read_checkpoint
from laguna_gguf.dflash.config import DrafterConfig
from laguna_gguf.errors import CheckpointError, ConfigError, TargetMismatchError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target_gguf(tmp_path / "target.gguf")


def bf16_bits(x: FloatArray) -> np.ndarray:
    """Round to nearest even by integer arithmetic on the float's bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def q8_0_bytes(x: FloatArray) -> bytes:
    """ggml's reference: scale max|x| / 127, values rounded half away from zero."""
    out = b""
    for block in x.reshape(-1, 32):
        d = np.float32(np.abs(block).max() / np.float32(127))
        inverse = np.float32(1) / d if d else np.float32(0)
        scaled = block * inverse
        q = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
        out += np.float16(d).tobytes() + q.tobytes()
    return out


def expected_bytes(name: str, x: FloatArray, outtype: str) -> bytes:
    if "norm" in name or outtype == "f32":
        return x.tobytes()
    if outtype == "f16":
        return x.astype(np.float16).tobytes()
    return bf16_bits(x).tobytes() if outtype == "bf16" else q8_0_bytes(x)


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_values_are_rounded_as_computed_independently(tmp_path: Path, target: Path, outtype: str) -> None:
    tensors = write_drafter_dir(tmp_path / "d")
    report = convert_dflash(tmp_path / "d", tmp_path / "out.gguf", outtype=outtype, target=target)
    expected = dialect_tensors(tensors, drafter_config(), "A")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert [t.name for t in reader.tensors] == [entry["name"] for entry in report["tensors"]]
    assert {t.name for t in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        assert tuple(tensor.shape)[::-1] == expected[tensor.name].shape, tensor.name
        assert tensor.data.tobytes() == expected_bytes(tensor.name, expected[tensor.name], outtype), tensor.name
        kind = gguf.GGMLQuantizationType.F32 if "norm" in tensor.name else gguf.GGMLQuantizationType[outtype.upper()]
        assert tensor.tensor_type == kind
    assert report["outtype"] == outtype
    assert report["bytes"] == sum(int(t.n_bytes) for t in reader.tensors)
    assert report["file_bytes"] == (tmp_path / "out.gguf").stat().st_size


def test_ties_round_to_even(tmp_path: Path, target: Path) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config)
    tensors["fc.weight"][0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20]
    convert_dflash(write_drafter_gguf(tmp_path / "in.gguf", tensors, config), tmp_path / "out.gguf")
    stored = read_checkpoint(tmp_path / "out.gguf").tensors["fc"].data.view(np.uint16)[:4]
    assert (stored.astype(np.uint32) << 16).view(np.float32).tolist() == [1.0, 1.015625, -1.0, 1.0078125]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_layout_gives_the_same_file(tmp_path: Path, target: Path, dtype: str) -> None:
    outputs = set()
    for layout in ("fused", "split", "prefixed", "sharded"):
        write_drafter_dir(tmp_path / layout / "drafter", layout=layout, dtype=dtype)  # type: ignore[arg-type]
        convert_dflash(tmp_path / layout / "drafter", tmp_path / f"{layout}.gguf", target=target)
        outputs.add((tmp_path / f"{layout}.gguf").read_bytes())
    assert len(outputs) == 1


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_gguf_sources_are_rewritten_as_dialect_a(tmp_path: Path, dialect: Literal["A", "B", "C"]) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config, dtype="bf16")
    source = write_drafter_gguf(tmp_path / "in.gguf", tensors, config, dialect=dialect)
    report = convert_dflash(source, tmp_path / "out.gguf")
    assert report["dialect"] == dialect
    assert report["defaults"] == {"causal": True}
    out = read_checkpoint(tmp_path / "out.gguf")
    assert (out.dialect, out.defaults, out.config.target_layer_ids) == ("A", {}, (1, 4, 7))
    for name, tensor in dialect_tensors(tensors, config, "A").items():
        stored = out.tensors[name.removesuffix(".weight")]
        values = _native.dequantize(stored.data, stored.ggml_type, stored.ne[0])
        assert np.array_equal(values.reshape(tensor.shape), tensor)


def test_gguf_source_without_tokenizer_needs_a_target(tmp_path: Path, target: Path) -> None:
    config = drafter_config()
    source = write_drafter_gguf(tmp_path / "in.gguf", drafter_tensors(config), config, dialect="B", tokenizer=False)
    with pytest.raises(ConfigError, match="target"):
        convert_dflash(source, tmp_path / "out.gguf")
    convert_dflash(source, tmp_path / "out.gguf", target=target)


def test_metadata(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "my-drafter-2.1")
    convert_dflash(tmp_path / "my-drafter-2.1", tmp_path / "out.gguf", target=target)
    file = _native.GgufFile(str(tmp_path / "out.gguf"))
    expected = {
        "general.architecture": "dflash",
        "general.name": "my-drafter-2.1",
        "general.file_type": 32,
        "dflash.decoder_arch": "laguna",
        "dflash.block_count": 3,
        "dflash.embedding_length": 64,
        "dflash.feed_forward_length": 96,
        "dflash.attention.head_count": 4,
        "dflash.attention.head_count_kv": 2,
        "dflash.attention.key_length": 16,
        "dflash.attention.value_length": 16,
        "dflash.context_length": 4096,
        "dflash.rope.freq_base": 500000.0,
        "dflash.block_size": 16,
        "dflash.num_target_layers": 8,
        "dflash.attention.sliding_window": 32,
        "dflash.attention.causal": True,
        "tokenizer.ggml.mask_token_id": 12,
    }
    assert {key: file.get(key) for key in expected} == expected
    assert file.get("dflash.target_layers").tolist() == [2, 5, 8]
    assert file.get("dflash.attention.sliding_window_pattern").tolist() == [True] * 3
    assert DrafterConfig.from_gguf(tmp_path / "out.gguf") == DrafterConfig.from_json(drafter_config())


def test_target_tokenizer_is_copied_exactly(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=target)
    copied, original = gguf.GGUFReader(tmp_path / "out.gguf").fields, gguf.GGUFReader(target).fields
    keys = [key for key in original if key.startswith("tokenizer.") and key != "tokenizer.ggml.mask_token_id"]
    assert len(keys) == 9
    for key in keys:
        assert copied[key].types == original[key].types, key
        same = [bytes(a) == bytes(b) for a, b in zip(copied[key].parts, original[key].parts, strict=True)]
        assert all(same), key


def test_tokenizer_from_directories(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    convert_dflash(tmp_path / "d", tmp_path / "a.gguf", target=write_target_dir(tmp_path / "t"))
    write_drafter_dir(tmp_path / "own", bos_token_id=2, eos_token_id=[2, 24])
    write_tokenizer(tmp_path / "own")
    report = convert_dflash(tmp_path / "own", tmp_path / "b.gguf")
    assert report["tokenizer"] == str(tmp_path / "own")
    for name in ("a.gguf", "b.gguf"):
        file = _native.GgufFile(str(tmp_path / name))
        tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
        assert len(tokens) == len(types) == N_VOCAB
        assert (tokens[0], types[0]) == ("[PAD0]", 5)
        assert (tokens[30], types[30]) == ("t30", 1)
        assert (tokens[12], types[12]) == ("<|MASK|>", 3)
        assert (tokens[24], types[24]) == ("</assistant>", 3)
        assert (tokens[25], types[25]) == ("<tool>", 4)
        assert (tokens[319], types[319]) == ("<last>", 3)
        assert file.get("tokenizer.ggml.merges") == ["t 30", "t 3\u01201"]
        ids = {key: file.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "mask")}
        assert ids == {"bos": 2, "eos": 2, "eot": 24, "mask": 12}
        assert file.get("tokenizer.ggml.add_bos_token") is True
        assert file.get("tokenizer.ggml.model") == "gpt2"
        assert file.get("tokenizer.ggml.pre") == "laguna"
        assert file.get("tokenizer.chat_template") == "{{ messages }}"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda d: d["model"].update(type="Unigram"), ConfigError),
        (lambda d: d.update(pre_tokenizer={"type": "Metaspace"}), ConfigError),
        (lambda d: d["model"]["vocab"].update(big=320), TargetMismatchError),
        (lambda d: d["model"]["vocab"].update(bad="1"), CheckpointError),
        (lambda d: d["added_tokens"].append({"id": 3}), CheckpointError),
        (lambda d: d["model"].update(vocab=[1]), CheckpointError),
        (lambda d: d["model"]["vocab"].update(bad=[1]), CheckpointError),
        (lambda d: d["model"]["vocab"].update({"\ud800": 231}), CheckpointError),
        (lambda d: d["model"].update(merges=["a b", 7]), CheckpointError),
        (lambda d: d["model"].update(merges=[["a", 7]]), CheckpointError),
        (lambda d: d.update(post_processor={"type": "TemplateProcessing", "single": [[], 1]}), CheckpointError),
    ],
)
def test_rejects_tokenizers(tmp_path: Path, change: Any, error: type[Exception]) -> None:
    write_drafter_dir(tmp_path / "d")
    folder = write_target_dir(tmp_path / "t")
    data = json.loads((folder / "tokenizer.json").read_text())
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(error):
        convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=folder)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("shape", "field"),
    [({"n_layer": 7}, "num_target_layers"), ({"n_embd": 32}, "hidden_size"), ({"n_vocab": 321}, "vocab_size")],
)
def test_rejects_targets_of_another_shape(tmp_path: Path, shape: dict[str, int], field: str) -> None:
    write_drafter_dir(tmp_path / "d")
    with pytest.raises(TargetMismatchError, match=field):
        convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=write_target_gguf(tmp_path / "t.gguf", **shape))
    names = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_vocab": "vocab_size"}
    folder = write_target_dir(tmp_path / "t", **{names[k]: v for k, v in shape.items()})
    with pytest.raises(TargetMismatchError, match=field):
        convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=folder)


def test_rejects_a_drafter_as_target(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=target)
    for other in (tmp_path / "d", tmp_path / "out.gguf"):
        with pytest.raises(TargetMismatchError, match="drafter"):
            convert_dflash(tmp_path / "d", tmp_path / "out2.gguf", target=other)


def test_needs_a_tokenizer(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    with pytest.raises(ConfigError, match="target"):
        convert_dflash(tmp_path / "d", tmp_path / "out.gguf")
    with pytest.raises(CheckpointError):
        convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=tmp_path / "nothing.gguf")


@pytest.mark.parametrize("outtype", ["q9", "", "q4_k_m", "hf16"])
def test_rejects_unknown_outtypes(tmp_path: Path, target: Path, outtype: str) -> None:
    write_drafter_dir(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"outtype.*bf16"):
        convert_dflash(tmp_path / "d", tmp_path / "out.gguf", outtype=outtype, target=target)


def test_rows_that_do_not_fit_take_the_next_larger_type(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d", intermediate_size=40)
    report = convert_dflash(tmp_path / "d", tmp_path / "out.gguf", outtype="q8_0", target=target)
    assert report["fallbacks"] == {f"blk.{i}.ffn_down.weight": "f16" for i in range(3)}
    types = {t.name: _native.type_name(t.ggml_type) for t in _native.GgufFile(str(tmp_path / "out.gguf")).tensors()}
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("f16", "q8_0")


@pytest.mark.parametrize(("outtype", "value"), [("f16", 7e4), ("bf16", 3.4e38), ("q8_0", 1e8)])
def test_values_that_overflow_are_an_error_not_an_infinity(
    tmp_path: Path, target: Path, outtype: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config)
    tensors["layers.2.mlp.down_proj.weight"][3, 5] = value
    source = write_drafter_gguf(tmp_path / "in.gguf", tensors, config)
    (tmp_path / "out.gguf").write_bytes(b"earlier")
    with pytest.raises(CheckpointError, match=r"blk\.2\.ffn_down"):
        convert_dflash(source, tmp_path / "out.gguf", outtype=outtype, target=target)
    assert (tmp_path / "out.gguf").read_bytes() == b"earlier"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.gguf", "out.gguf", "target.gguf"]


@pytest.mark.parametrize("step", ["encode_tensor", "fsync", "replace"])
def test_a_failure_at_any_step_leaves_no_file(
    tmp_path: Path, target: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_drafter_dir(tmp_path / "d")
    (tmp_path / "kept.gguf").write_bytes(b"earlier")

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    module: Any = dflash if step == "encode_tensor" else writer.os
    monkeypatch.setattr(module, step, fail)
    for name in ("new.gguf", "kept.gguf"):
        with pytest.raises(CheckpointError, match="No space left"):
            convert_dflash(tmp_path / "d", tmp_path / name, target=target)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "kept.gguf", "target.gguf"]
    assert (tmp_path / "kept.gguf").read_bytes() == b"earlier"


def test_an_earlier_file_is_replaced_even_when_it_is_the_source(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    out = tmp_path / "out.gguf"
    convert_dflash(tmp_path / "d", out, outtype="f32", target=target)
    convert_dflash(out, out, outtype="q8_0")
    types = [t.ggml_type for t in _native.GgufFile(str(out)).tensors()]
    assert (types.count(8), types.count(0)) == (25, 15)


def test_rejects_outfiles_that_cannot_be_written(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    for out in (tmp_path, tmp_path / "no" / "out.gguf", "a\0b"):
        with pytest.raises(ConfigError, match="outfile"):
            convert_dflash(tmp_path / "d", out, target=target)


def test_dry_run_reports_the_same_and_writes_nothing(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    out = tmp_path / "out.gguf"
    dry = convert_dflash(tmp_path / "d", out, target=target, dry_run=True)
    assert not out.exists()
    real = convert_dflash(tmp_path / "d", out, target=target)
    assert dry | {"file_bytes": 0, "dry_run": 0} == real | {"file_bytes": 0, "dry_run": 0}
    assert {"source", "dialect", "outfile", "outtype", "tensors", "bytes", "defaults", "dropped"} <= real.keys()
    json.dumps(real)


def test_outfile_gets_ordinary_permissions(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=target)
    (tmp_path / "plain").touch()
    assert os.stat(tmp_path / "out.gguf").st_mode == os.stat(tmp_path / "plain").st_mode
