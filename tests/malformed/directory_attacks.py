"""Checkpoint directories that lie, one a name: each changes a sound directory in place; README.md says why."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUGE = 2**63
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def read_header(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The JSON header of model.safetensors and the data after it."""
    content = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(folder: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """Write them back; `length` overrides the stated one."""
    stated = len(header) if length is None else length
    (folder / SINGLE).write_bytes(struct.pack("<Q", stated) + header + data)


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        header, data = read_header(folder)
        change(header)
        write_header(folder, json.dumps(header).encode(), data)

    return apply


def _raw_header(change: Callable[[bytes], bytes], length: int | None = None) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        header, data = read_header(folder)
        write_header(folder, change(json.dumps(header).encode()), data, length)

    return apply


def _entry(**fields: Any) -> Callable[[Path], None]:
    return _header(lambda header: header["fc.weight"].update(fields))


def _shift(header: dict[str, Any]) -> None:
    """The second tensor begins inside the first."""
    first, second = sorted((e for k, e in header.items() if k != "__metadata__"), key=lambda e: e["data_offsets"])[:2]
    begin, end = second["data_offsets"]
    size = first["data_offsets"][1] - first["data_offsets"][0]
    second["data_offsets"] = [begin - size, end - size]


def _index(weight_map: Any) -> Callable[[Path], None]:
    """A sharded directory: its only file becomes a shard."""

    def apply(folder: Path) -> None:
        header, _ = read_header(folder)
        keys = [key for key in header if key != "__metadata__"]
        (folder / SINGLE).rename(folder / "a.safetensors")
        found = weight_map(keys) if callable(weight_map) else weight_map
        (folder / INDEX).write_text(json.dumps({"weight_map": found}))

    return apply


def _outside(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / SINGLE).read_bytes()
        _index(lambda keys: dict.fromkeys(keys, name))(folder)
        (folder.parent / "outside.safetensors").write_bytes(content)

    return apply


def _config(text: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda folder: _written(folder / CONFIG, text((folder / CONFIG).read_text()))


def _written(path: Path, text: str) -> None:
    path.write_text(text)


def _fifo(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return apply


def _link(name: str, to: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return apply


DIRECTORY_ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "st-empty": (lambda folder: _written(folder / SINGLE, ""), "header"),
    "st-length-0": (_raw_header(lambda h: h, 0), "header of 0"),
    "st-length-huge": (_raw_header(lambda h: h, HUGE), "header of"),
    "st-length-past-end": (_raw_header(lambda h: h, 1 << 30), "header of"),
    "st-not-json": (_raw_header(lambda h: b"{" + h), "JSON"),
    "st-not-object": (_raw_header(lambda h: b"[1]"), "damaged"),
    "st-not-utf8": (_raw_header(lambda h: h.replace(b"fc", b"\xff\xfe")), "safetensors"),
    "st-deep": (_raw_header(lambda h: h[:-1] + b', "x": ' + b"[" * 200000 + b"]" * 200000 + b"}"), "JSON"),
    "st-key-twice": (_raw_header(lambda h: b"{" + h[1:-1] + b", " + h[1:]), "duplicate key"),
    "st-many-keys": (
        _raw_header(lambda h: h[:-1] + b"".join(b', "k%d": 0' % i for i in range(300_000)) + b', "k299999": 0}'),
        "duplicate key",
    ),
    "st-offset-past-end": (_entry(data_offsets=[0, 1 << 40]), "damaged"),
    "st-offset-reversed": (_entry(data_offsets=[64, 0]), "damaged"),
    "st-offset-wraps": (_entry(data_offsets=[2**64 - 64, 2**64 - 1]), "damaged"),
    "st-offset-negative": (_entry(data_offsets=[-4, 0]), "damaged"),
    "st-overlap": (_header(_shift), "damaged"),
    "st-shape-wraps": (_entry(shape=[2**32, 2**32, 2**32]), "damaged"),
    "st-shape-lies": (_entry(shape=[1, 1]), "damaged"),
    "st-shape-negative": (_entry(shape=[-8, -8]), "damaged"),
    "st-dtype-unknown": (_entry(dtype="F4"), "damaged"),
    "st-dtype-integer": (_entry(dtype="I32"), "dtype I32"),
    "st-truncated": (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-100]), "damaged"),  # type: ignore[dict-item,func-returns-value,return-value]
    "st-fifo": (_fifo(SINGLE), "neither"),
    "st-device": (_link(SINGLE, "/dev/zero"), "neither"),
    "index-parent": (_outside("../outside.safetensors"), "plain file name"),
    "index-absolute": (_outside("/etc/passwd"), "plain file name"),
    "index-inside": (_outside("sub/../a.safetensors"), "plain file name"),
    "index-dots": (_outside(".."), "plain file name"),
    "index-drive": (_outside("C:a.safetensors"), "plain file name"),
    "index-null": (_outside("a\0.safetensors"), "plain file name"),
    "index-number": (_index(lambda keys: dict.fromkeys(keys, 7)), "plain file name"),
    "index-list": (_index(["a.safetensors"]), "weight_map"),
    "index-empty": (_index({}), "weight_map"),
    "index-missing-shard": (_index(lambda keys: dict.fromkeys(keys, "b.safetensors")), "missing shard"),
    "index-extra-tensor": (_index(lambda keys: dict.fromkeys([*keys, "more.weight"], "a.safetensors")), "missing"),
    "index-less-tensors": (_index(lambda keys: dict.fromkeys(keys[1:], "a.safetensors")), "not listed"),
    "index-many-shards": (_index({f"t{i}": f"{i}.safetensors" for i in range(5000)}), "shards"),
    "config-not-json": (_config(lambda text: text[:-1]), "JSON"),
    "config-key-twice": (_config(lambda text: "{" + text[1:-1] + ', "hidden_size": 64}'), "duplicate key"),
    "config-deep": (_config(lambda text: text[:-1] + ', "x": ' + "[" * 200000 + "]" * 200000 + "}"), "JSON"),
    "config-huge": (_config(lambda text: text + " " * (17 << 20)), "at most"),
    "config-nan": (_config(lambda text: text.replace("1e-06", "NaN")), "rms_norm_eps"),
    "config-huge-number": (
        _config(lambda text: text.replace('"head_dim": 16', '"head_dim": 1' + "0" * 4000)),
        "head_dim",
    ),
    "config-very-long-number": (_config(lambda text: text.replace("320", "9" * 10000)), "JSON"),
    "config-fifo": (_fifo(CONFIG), "config.json"),
    "config-device": (_link(CONFIG, "/dev/zero"), "config.json"),
    "config-loop": (_link(CONFIG, CONFIG), "config.json"),
}
