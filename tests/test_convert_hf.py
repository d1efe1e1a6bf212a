"""Conversion to Hugging Face directories, round trips, K types, and output in pieces."""

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert_tools import write_target_gguf
from fixtures import FloatArray, drafter_config, drafter_tensors, write_drafter_dir, write_drafter_gguf
from laguna_gguf import _native
from laguna_gguf.convert import aside, convert, convert_dflash, hf, outtypes
from laguna_gguf.dflash.checkpoint import read_checkpoint
from laguna_gguf.dflash.config import DrafterConfig
from laguna_gguf.errors import CheckpointError, ConfigError, TargetMismatchError

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16}
"""Rows of whole blocks of 256, except those of attn_output's k and v heads, which have none."""
K_TYPES = {"q4_k": "Q4_K", "q5_k": "Q5_K", "q6_k": "Q6_K"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target_gguf(tmp_path / "target.gguf")


def stored_values(directory: Path) -> dict[str, FloatArray]:
    return {name: t.astype(np.float32) for name, t in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("layout", ["fused", "split", "prefixed", "sharded"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_round_trip_is_exact(tmp_path: Path, target: Path, layout: Any, dtype: str) -> None:
    extra = {
        "torch_dtype": {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype],
        "hidden_act": "silu",
        "initializer_range": 0.02,
    }
    tensors = write_drafter_dir(tmp_path / "d", layout=layout, dtype=dtype, **extra)
    convert_dflash(tmp_path / "d", tmp_path / "a.gguf", outtype=dtype, target=target)
    report = convert_dflash(tmp_path / "a.gguf", tmp_path / "back", outtype="HF")
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == drafter_config(**extra)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() == {t["name"] for t in report["tensors"]}
    dtypes: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
    for name, tensor in tensors.items():
        assert back[name].dtype == dtypes[dtype], name
        assert back[name].tobytes() == tensor.astype(dtypes[dtype]).tobytes(), name
    assert (report["outtype"], report["tokenizer"], report["fallbacks"]) == ("hf", None, {})
    assert report["file_bytes"] == sum(p.stat().st_size for p in (tmp_path / "back").iterdir())


def test_a_second_conversion_gives_the_same_file(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d", dtype="bf16")
    convert_dflash(tmp_path / "d", tmp_path / "a.gguf", target=target)
    convert_dflash(tmp_path / "a.gguf", tmp_path / "back", outtype="hf")
    convert_dflash(tmp_path / "back", tmp_path / "b.gguf", target=target)
    first, second = (_native.GgufFile(str(tmp_path / name)) for name in ("a.gguf", "b.gguf"))
    assert first.keys() == second.keys()
    for key in first.keys():
        assert np.array_equal(first.get(key), second.get(key)) == (key != "general.name"), key
    pairs = zip(first.tensors(), second.tensors(), strict=True)
    assert all(a.name == b.name and a.data().tobytes() == b.data().tobytes() for a, b in pairs)


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_files_that_carry_no_config_get_one_from_their_keys(
    tmp_path: Path, target: Path, dialect: Literal["A", "B", "C"]
) -> None:
    config = drafter_config()
    source = write_drafter_gguf(tmp_path / "in.gguf", drafter_tensors(config, dtype="bf16"), config, dialect=dialect)
    with pytest.raises(ConfigError, match=r"num_target_layers.*target"):
        convert_dflash(source, tmp_path / "back", outtype="hf")
    assert not (tmp_path / "back").exists()
    report = convert_dflash(source, tmp_path / "back", outtype="hf", target=target)
    assert report["defaults"]["num_target_layers"] == 8
    built = json.loads((tmp_path / "back" / "config.json").read_text())
    assert built == config | {"torch_dtype": "float32"}
    assert DrafterConfig.from_json(tmp_path / "back") == DrafterConfig.from_json(config)
    assert stored_values(tmp_path / "back").keys() == drafter_tensors(config).keys()


def test_a_target_tells_the_layers_that_a_gguf_leaves_out(tmp_path: Path, target: Path) -> None:
    config = drafter_config()
    source = write_drafter_gguf(tmp_path / "in.gguf", drafter_tensors(config), config, dialect="C")
    convert_dflash(source, tmp_path / "a.gguf", target=target)
    assert DrafterConfig.from_gguf(tmp_path / "a.gguf").num_target_layers == 8
    with pytest.raises(TargetMismatchError, match="hidden_size"):
        wrong = write_target_gguf(tmp_path / "wrong.gguf", n_embd=32)
        convert_dflash(source, tmp_path / "back", outtype="hf", target=wrong)


def test_a_carried_config_that_contradicts_the_keys_is_not_believed(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d", dtype="bf16")
    convert_dflash(tmp_path / "d", tmp_path / "a.gguf", target=target)
    content = (tmp_path / "a.gguf").read_bytes()
    for name, old, new in (
        ("size", b'"block_size": 16', b'"block_size": 15'),
        ("json", b'"block_size": ', b'"block_size", '),
    ):
        changed = content.replace(old, new)
        assert changed != content
        (tmp_path / "changed.gguf").write_bytes(changed)
        convert_dflash(tmp_path / "changed.gguf", tmp_path / name, outtype="hf")
        restored = json.loads((tmp_path / name / "config.json").read_text())
        assert restored == drafter_config() | {"torch_dtype": "bfloat16"}


def test_a_config_does_not_carry_code(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d", auto_map={"AutoModel": "somewhere--code.Model"})
    convert_dflash(tmp_path / "d", tmp_path / "a.gguf", target=target)
    convert_dflash(tmp_path / "a.gguf", tmp_path / "back", outtype="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == drafter_config()


def test_quantised_sources_become_bf16(tmp_path: Path, target: Path) -> None:
    tensors = write_drafter_dir(tmp_path / "d", dtype="bf16", torch_dtype="float32")
    convert_dflash(tmp_path / "d", tmp_path / "q.gguf", outtype="q8_0", target=target)
    convert_dflash(tmp_path / "q.gguf", tmp_path / "back", outtype="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    back = load_file(tmp_path / "back" / "model.safetensors")
    source = read_checkpoint(tmp_path / "q.gguf").tensors
    for name, tensor in back.items():
        assert tensor.dtype == ml_dtypes.bfloat16, name
        if "norm" in name:
            assert np.array_equal(tensor.astype(np.float32), tensors[name])
    fc = _native.dequantize(source["fc"].data, 8, source["fc"].ne[0])
    assert np.array_equal(back["fc.weight"], fc.astype(ml_dtypes.bfloat16))


def test_norms_keep_their_values(tmp_path: Path, target: Path) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config)
    for name in tensors:
        if "norm" not in name or name.startswith("layers.0."):
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    source = write_drafter_gguf(tmp_path / "in.gguf", tensors, config)
    convert_dflash(source, tmp_path / "bf16.gguf", target=target)
    report = convert_dflash(tmp_path / "bf16.gguf", tmp_path / "back", outtype="hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in tensors.items():
        exact = "norm" not in name or name.startswith("layers.0.")
        assert back[name].dtype == (ml_dtypes.bfloat16 if exact else np.float32), name
        assert np.array_equal(back[name].astype(np.float32), tensor), name
        assert report["fallbacks"].get(name) == (None if exact else "f32")


def test_mixed_types_take_the_one_that_holds_both(tmp_path: Path, target: Path) -> None:
    config = drafter_config()
    source = write_drafter_gguf(tmp_path / "in.gguf", drafter_tensors(config, dtype="bf16"), config)
    checkpoint = read_checkpoint(source)
    assert hf.main_type(checkpoint).name == "f32"
    for stored, expected in (({"f16"}, "f16"), ({"f16", "bf16"}, "f32"), ({"f16", "f32"}, "f32"), ({"q8_0"}, "bf16")):
        ids = [outtypes.OUTTYPES[name].ggml_type for name in sorted(stored)]
        tensors = dict(checkpoint.tensors)
        for i, name in enumerate(n for n in tensors if "norm" not in n):
            tensors[name] = outtypes.TensorData(ids[i % len(ids)], tensors[name].ne, np.zeros(0, np.uint8))
        object.__setattr__(checkpoint, "tensors", tensors)
        assert hf.main_type(checkpoint).name == expected, stored


@pytest.mark.parametrize("step", ["encode_rows", "rename", "fsync"])
def test_a_failure_leaves_no_directory(
    tmp_path: Path, target: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_drafter_dir(tmp_path / "d")

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    module: Any = hf if step == "encode_rows" else aside.os
    monkeypatch.setattr(module, step, fail)
    with pytest.raises(CheckpointError, match="No space left"):
        convert_dflash(tmp_path / "d", tmp_path / "new", outtype="hf")
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "target.gguf"]


def test_an_existing_path_is_not_overwritten(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("d", "target.gguf", "empty", "link", "no/parent"):
        for dry_run in (True, False):
            with pytest.raises(ConfigError, match="outfile"):
                convert_dflash(tmp_path / "d", tmp_path / name, outtype="hf", dry_run=dry_run)


@pytest.mark.parametrize("outtype", K_TYPES)
def test_k_types_are_ggmls_own(tmp_path: Path, target: Path, outtype: str) -> None:
    wide_target = write_target_gguf(tmp_path / "wide.gguf", n_embd=256)
    tensors = write_drafter_dir(tmp_path / "d", **WIDE)
    report = convert_dflash(tmp_path / "d", tmp_path / "k.gguf", outtype=outtype.upper(), target=wide_target)
    assert (report["outtype"], report["fallbacks"]) == (outtype, {})
    file = _native.GgufFile(str(tmp_path / "k.gguf"))
    assert (
        file.get("general.file_type")
        == gguf.LlamaFileType["MOSTLY_" + K_TYPES[outtype] + ("_S" if outtype != "q6_k" else "")]
    )
    n_rows = 16 * 16
    for name, rows in (
        ("blk.1.ffn_down", tensors["layers.1.mlp.down_proj.weight"]),
        ("blk.2.attn_q", tensors["layers.2.self_attn.qkv_proj.weight"][:n_rows]),
    ):
        stored = file.tensor(f"{name}.weight")
        assert stored is not None and _native.type_name(stored.ggml_type) == outtype
        assert stored.data().tobytes() == _native.quantize(rows, stored.ggml_type).tobytes()
        values = _native.dequantize(stored.data(), stored.ggml_type, stored.ne[0])
        error = np.abs(values - rows).max() / np.abs(rows).max()
        assert error < {"q4_k": 0.12, "q5_k": 0.06, "q6_k": 0.03}[outtype]


def test_rows_that_fit_no_k_block_take_q8_0_and_then_f16(tmp_path: Path, target: Path) -> None:
    write_drafter_dir(tmp_path / "d", intermediate_size=40)
    report = convert_dflash(tmp_path / "d", tmp_path / "k.gguf", outtype="q4_k", target=target)
    types = {t["name"]: t["type"] for t in report["tensors"]}
    assert {types[f"blk.{i}.ffn_down.weight"] for i in range(3)} == {"f16"}
    assert {t for name, t in types.items() if "ffn_down" not in name} == {"q8_0", "f32"}
    matrices = {name for name in types if "norm" not in name}
    assert report["fallbacks"] == {name: types[name] for name in matrices}
    read_checkpoint(tmp_path / "k.gguf")


def test_memory_is_that_of_a_piece(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_drafter_dir(tmp_path / "d", dtype="bf16", intermediate_size=16384, num_hidden_layers=3)
    largest = max(t.nbytes for t in tensors.values()) // 2
    assert largest == 2 << 20
    monkeypatch.setattr(outtypes, "_CHUNK_VALUES", 1 << 15)
    tracemalloc.start()
    try:
        for source, out, outtype in (("d", "out.gguf", "q8_0"), ("out.gguf", "back", "hf")):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            convert_dflash(tmp_path / source, tmp_path / out, outtype=outtype, target=target)
            assert tracemalloc.get_traced_memory()[1] - before < 1.5 * largest
    finally:
        tracemalloc.stop()


def test_pieces_do_not_change_the_file(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_drafter_dir(tmp_path / "d")
    outputs = set()
    calls: list[tuple[int, int]] = []
    for chunk in (1 << 20, 700, 1):
        monkeypatch.setattr(outtypes, "_CHUNK_VALUES", chunk)
        calls.clear()
        out = tmp_path / "out.gguf"
        report = convert(tmp_path / "d", out, outtype="q8_0", target=target, progress=lambda *a: calls.append(a))
        outputs.add(out.read_bytes())
        assert calls[-1] == (report["bytes"], report["bytes"])
        assert all(a[0] < b[0] for a, b in itertools.pairwise(calls))
    assert len(outputs) == 1
