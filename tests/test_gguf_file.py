"""The native GGUF reader: what it reads, and that nothing hostile gets past it (attacks: malformed/README.md)."""

import gc
from pathlib import Path

import gguf
import numpy as np
import pytest

from laguna_gguf import _native
from laguna_gguf.errors import CheckpointError, ConfigError
from malformed import builder as b
from malformed.builder import GgufBuilder
from malformed.gguf_attacks import ATTACKS


def good() -> GgufBuilder:
    """A small valid file with every value type and three tensors."""
    builder = GgufBuilder().key("general.architecture", b.STRING, "test")
    values = {
        b.U8: 255,
        b.I8: -128,
        b.U16: 65535,
        b.I16: -32768,
        b.U32: 2**32 - 1,
        b.I32: -(2**31),
        b.F32: 0.5,
        b.BOOL: 1,
        b.U64: 2**64 - 1,
        b.I64: -(2**63),
        b.F64: 0.1,
    }
    for kind, value in values.items():
        builder.key(f"scalar.{kind}", kind, value)
        builder.array_key(f"array.{kind}", kind, [value, 0, value])
    builder.array_key("strings", b.STRING, ["a", "", "ü"]).array_key("empty", b.F32, [])
    builder.tensor("one.weight", (4,), data=np.arange(4, dtype="<f4").tobytes())
    builder.tensor("two.weight", (3, 2), data=np.arange(6, dtype="<f4").tobytes())
    return builder.tensor("q8", (32, 2), b.GGML_Q8_0, data=bytes(range(68)))


def open_bytes(tmp_path: Path, content: bytes, name: str = "x.gguf") -> _native.GgufFile:
    path = tmp_path / name
    path.write_bytes(content)
    return _native.GgufFile(str(path))


def read_all(file: _native.GgufFile) -> int:
    """Touch every value and every tensor byte."""
    total = 0
    for key in file.keys():
        file.get(key)
    for tensor in file.tensors():
        assert tensor.data().nbytes == tensor.n_bytes
        total += int(tensor.data().sum())
    return total


def test_reads_every_type_like_the_gguf_package(tmp_path: Path) -> None:
    path = good().write(tmp_path / "good.gguf")
    file = _native.GgufFile(str(path))
    assert (file.version, file.alignment, file.paths) == (3, 32, [str(path)])
    reader = gguf.GGUFReader(path)
    for key, value in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        ours, theirs = file.get(key), value.contents()
        if isinstance(ours, np.ndarray):
            ours = ours.tolist()
        assert ours == theirs, key
        if not isinstance(theirs, list):
            assert type(ours) is type(theirs), key
    assert file.get("array.7").dtype == np.bool_
    assert file.get("array.6").dtype == np.float32
    assert file.get("empty").shape == (0,)
    for tensor, theirs in zip(file.tensors(), reader.tensors, strict=True):
        assert tensor.name == theirs.name
        assert tensor.ggml_type == int(theirs.tensor_type)
        assert tensor.ne == tuple(int(n) for n in theirs.shape)
        assert tensor.data().tobytes() == theirs.data.tobytes()


def test_lookup(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, good().build())
    assert file.get("nope") is None
    assert file.get("nope", 7) == 7
    assert file.tensor("nope") is None
    two = file.tensor("two.weight")
    assert two is not None
    assert two.data().view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert file.keys()[0] == "general.architecture"


def test_views_are_read_only_and_outlive_the_file(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, good().build())
    tensor = file.tensor("two.weight")
    assert tensor is not None
    view = tensor.data()
    del file, tensor
    gc.collect()
    assert view.view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_version_2_other_alignment_and_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    builder = GgufBuilder(version=2, alignment=64).key("general.alignment", b.U32, 64)
    builder.raw_key("text", b.STRING, b.string(b"\xff\xfe")).tensor("a", (3,)).tensor("b", (1, 1, 1, 5))
    file = open_bytes(tmp_path, builder.build())
    assert (file.version, file.alignment) == (2, 64)
    assert file.get("text").encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert [t.ne for t in file.tensors()] == [(3,), (1, 1, 1, 5)]


def test_metadata_only(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, GgufBuilder().key("a", b.U8, 1).build())
    assert file.tensors() == []


@pytest.mark.parametrize("attack", ATTACKS)
def test_rejects(tmp_path: Path, attack: str) -> None:
    make, message = ATTACKS[attack]
    with pytest.raises(CheckpointError, match=message) as caught:
        open_bytes(tmp_path, make().build())
    assert "x.gguf" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_rejects_every_truncation(tmp_path: Path) -> None:
    content = good().build()
    for length in range(len(content)):
        with pytest.raises(CheckpointError):
            open_bytes(tmp_path, content[:length])


def test_survives_random_corruption(tmp_path: Path) -> None:
    content = good().build()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(1500):
        mutated = bytearray(content)
        for position in rng.integers(0, len(content), rng.integers(1, 4)):
            mutated[position] = rng.integers(0, 256)
        try:
            read_all(open_bytes(tmp_path, bytes(mutated)))
        except CheckpointError:
            refused += 1
    assert refused > 300


def test_rejects_what_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for path in (tmp_path, tmp_path / "missing.gguf", tmp_path / "empty.gguf"):
        with pytest.raises(CheckpointError, match=path.name):
            _native.GgufFile(str(path))
    with pytest.raises(CheckpointError, match="null byte"):
        _native.GgufFile("a\0b")


def shards(count: int) -> list[GgufBuilder]:
    return [
        GgufBuilder()
        .key("split.no", b.U16, i)
        .key("split.count", b.U16, count)
        .key("split.tensors.count", b.I32, count)
        .tensor(f"t{i}", (4,), data=np.full(4, i, "<f4").tobytes())
        for i in range(count)
    ]


def write_shards(folder: Path, builders: list[GgufBuilder]) -> list[Path]:
    return [s.write(folder / f"m-{i + 1:05d}-of-{len(builders):05d}.gguf") for i, s in enumerate(builders)]


def test_any_shard_opens_all(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards(3))
    for path in paths:
        file = _native.GgufFile(str(path))
        assert file.paths == [str(p) for p in paths]
        assert file.get("split.no") == 0
        assert [t.data().view("<f4")[0] for t in file.tensors()] == [0, 1, 2]


def test_shards_through_symlinks(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for i, shard in enumerate(shards(2)):
        (snapshot / f"m-{i + 1:05d}-of-00002.gguf").symlink_to(shard.write(blobs / f"hash{i}"))
    assert len(_native.GgufFile(str(snapshot / "m-00002-of-00002.gguf")).tensors()) == 2


def test_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards(3))
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf"):
        _native.GgufFile(str(paths[0]))


def test_rejects_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, shards(3))
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(CheckpointError, match="m-00003-of-00003"):
        _native.GgufFile(str(paths[0]))
    twice = shards(2)
    twice[1].tensors[0].name = "t0"
    with pytest.raises(CheckpointError, match="more than one shard"):
        _native.GgufFile(str(write_shards(tmp_path, twice)[0]))
    missing = shards(2)
    missing[1].tensors.clear()
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count"):
        _native.GgufFile(str(write_shards(tmp_path, missing)[0]))


def test_type_table() -> None:
    assert (_native.type_name(0), _native.type_name(30), _native.type_name(8), _native.type_name(12)) == (
        "f32",
        "bf16",
        "q8_0",
        "q4_k",
    )
    assert _native.type_size(8) == (32, 34)
    assert _native.type_size(0) == (1, 4)
    for unknown in (-1, 4, 5, 999):
        with pytest.raises(ConfigError, match=str(unknown)):
            _native.type_size(unknown)
        with pytest.raises(ConfigError):
            _native.type_name(unknown)


def test_quantize_q8_0_is_the_reference() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(_native.quantize(rows, 8), expected)
    back = _native.dequantize(expected, 8, 64)
    assert np.array_equal(back, gguf.quants.dequantize(expected, gguf.GGMLQuantizationType.Q8_0))


def test_quantize_refuses_instead_of_asserting() -> None:
    rows = np.zeros((2, 256), np.float32)
    for ggml_type, message in ((16, "quantised"), (26, "quantised"), (999, "type id")):
        with pytest.raises(ConfigError, match=message):
            _native.quantize(rows, ggml_type)
    with pytest.raises(ConfigError, match="multiple of 32"):
        _native.quantize(np.zeros((2, 33), np.float32), 8)
    with pytest.raises(ConfigError, match="n_rows"):
        _native.quantize(np.zeros(32, np.float32), 8)
    with pytest.raises(ConfigError, match="finite"):
        _native.quantize(np.full((1, 32), np.nan, np.float32), 8)
    assert _native.quantize(np.zeros((0, 32), np.float32), 8).shape == (0, 34)


@pytest.mark.parametrize("ggml_type", [0, 1, 30, 8, 12])
def test_all_finite(ggml_type: int) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    data = _native.quantize(rows, ggml_type)
    assert _native.all_finite(data, ggml_type, 256)
    bad = data.copy()
    bad[2, : 4 if ggml_type == 0 else 2] = 0xFF  # a NaN, or a NaN block scale
    assert not _native.all_finite(bad, ggml_type, 256)
    with pytest.raises(ConfigError):
        _native.all_finite(data.reshape(-1)[:-1], ggml_type, 256)
