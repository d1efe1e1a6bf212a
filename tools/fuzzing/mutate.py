"""Ways to damage a file: bytes, GGUF fields, JSON values, safetensors headers, shard names."""

import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

Random = np.random.Generator
Mutator = Callable[[bytes, Random], bytes]

INTEGERS = [
    0, 1, 2, 3, 4, 5, 7, 12, 31, 32, 63, 64, 255, 256, 4095, 65535, 65536, 2**20, 2**24, 2**30, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**42 + 1, 2**53, 2**61 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1,
]  # fmt: skip
NAMES = ["../x.safetensors", "/etc/passwd", "a/../b", "..", ".", "", "C:\\x", "a\\b", "model\0.safetensors", "x" * 5000,
         "model.safetensors.index.json", "config.json", "/dev/zero", "\udcff"]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), 2**31, 2**53, 2**63, 2**64,
    10**30, "", "8", "laguna", "\0", "\ud800", "x" * 1000, [], [0], [1, 2, 3], [[]], {}, {"a": 1}, [None] * 100,
    "DFlashLagunaForCausalLM", "sliding_attention", "F32", "BF16", "F8_E4M3", "U8", "I64",
]  # fmt: skip
_HEADER = 24


def pick(rng: Random, items: list[Any]) -> Any:
    """One item; numpy's choice would convert them."""
    return items[int(rng.integers(len(items)))]


# Bytes


def flip(data: bytes, rng: Random) -> bytes:
    """A few bytes changed, mostly near the start, where the structure is."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        limit = len(out) if rng.random() < 0.4 else min(len(out), 600)
        if limit:
            out[int(rng.integers(limit))] = int(rng.integers(256))
    return bytes(out)


def truncate(data: bytes, rng: Random) -> bytes:
    """The first part."""
    return data[: int(rng.integers(len(data) + 1))]


def span(data: bytes, rng: Random) -> bytes:
    """A piece removed, doubled, zeroed, or random bytes put in."""
    if not data:
        return data
    begin = int(rng.integers(len(data)))
    end = min(len(data), begin + int(rng.integers(1, 65)))
    piece = data[begin:end]
    replacement = pick(rng, [b"", piece * 2, bytes(len(piece)), piece + rng.bytes(int(rng.integers(1, 40)))])
    return data[:begin] + replacement + data[end:]


# GGUF


def gguf_fields(data: bytes) -> list[tuple[int, int]]:
    """(offset, width) of every count, length, type, dimension, offset and number of a sound GGUF file."""
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    fields = [(4, 4), (8, 8), (16, 8)]
    at = _HEADER
    if len(data) < _HEADER:
        raise ValueError("no header")
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)

    def number(offset: int, width: int) -> int:
        if offset + width > len(data):
            raise ValueError("an earlier mutation has made this unreadable")
        return int.from_bytes(data[offset : offset + width], "little")

    def string() -> None:
        nonlocal at
        fields.append((at, 8))
        at += 8 + number(at, 8)

    for _ in range(n_keys):
        string()
        kind, count = number(at, 4), 1
        fields.append((at, 4))
        at += 4
        if kind == 9:
            kind, count = number(at, 4), number(at + 4, 8)
            fields += [(at, 4), (at + 4, 8)]
            at += 12
        for _ in range(count):
            if kind == 8:
                string()
            else:
                width = widths.get(kind, len(data))
                number(at, width)
                fields.append((at, width))
                at += width
    for _ in range(n_tensors):
        string()
        n_dims = number(at, 4)
        fields.append((at, 4))
        for _ in range(n_dims):
            at += 8
            number(at - 4, 8)
            fields.append((at - 4, 8))
        at += 4
        number(at, 12)
        fields += [(at, 4), (at + 4, 8)]
        at += 12
    return fields


def gguf_field(data: bytes, rng: Random) -> bytes:
    """One to three fields set to a value that programs stumble over, or to one of their neighbours'."""
    try:
        fields = gguf_fields(data)
    except ValueError:  # damaged by an earlier mutation
        return flip(data, rng)
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at, width = pick(rng, fields)
        old = int.from_bytes(out[at : at + width], "little")
        new = pick(rng, [*INTEGERS, old + 1, old - 1, old * 2, old ^ (1 << int(rng.integers(8 * width)))])
        out[at : at + width] = (new % (1 << (8 * width))).to_bytes(width, "little")
    return bytes(out)


def gguf_rename(data: bytes, rng: Random) -> bytes:
    """One letter of a name changed, or one name put in another's place if it is as long."""
    try:
        fields = [at for at, width in gguf_fields(data) if width == 8]
    except ValueError:
        return flip(data, rng)
    names = [(at + 8, length) for at in fields if 0 < (length := int.from_bytes(data[at : at + 8], "little")) < 80]
    if not names:
        return data
    at, length = pick(rng, names)
    same = [other for other, n in names if n == length and other != at]
    out = bytearray(data)
    if same and rng.random() < 0.5:
        other = pick(rng, same)
        out[at : at + length] = data[other : other + length]
    elif at + length <= len(out):
        out[at + int(rng.integers(length))] = int(rng.integers(256))
    return bytes(out)


# JSON


def json_value(data: bytes, rng: Random) -> bytes:
    """A value replaced, removed, doubled or nested somewhere in a JSON document."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return flip(data, rng)
    for _ in range(int(rng.integers(1, 4))):
        document = _changed(document, rng)
    text = json.dumps(document)
    if rng.random() < 0.05:
        depth = int(rng.integers(10, 100000))
        text = text[:-1] + ', "deep": ' + "[" * depth + "]" * depth + "}"
    elif rng.random() < 0.05 and text.startswith("{"):
        text = text[:-1] + ", " + text[1:]  # every key twice
    return text.encode("utf-8", "surrogatepass")


def _changed(document: Any, rng: Random) -> Any:
    node: Any = document
    parents: list[tuple[Any, Any]] = []
    while isinstance(node, dict | list) and node and (not parents or rng.random() < 0.8):
        key = pick(rng, list(node)) if isinstance(node, dict) else int(rng.integers(len(node)))
        parents.append((node, key))
        node = node[key]
    if not parents:
        return copy.deepcopy(pick(rng, ODD))
    holder, key = parents[-1]
    action = rng.random()
    if action < 0.15:
        del holder[key]
    elif action < 0.25 and isinstance(holder, dict):
        holder[pick(rng, [f"{key}x", f"model.{key}", str(key)[1:], "\0"])] = holder.pop(key)
    elif action < 0.35 and isinstance(holder, list):
        holder += [holder[key]] * int(rng.integers(1, 50))
    elif action < 0.6 and type(holder[key]) in (int, float):
        holder[key] = pick(rng, [*INTEGERS, holder[key] + 1, -holder[key], holder[key] * 1000])
    else:
        holder[key] = copy.deepcopy(pick(rng, ODD))  # it may be changed in turn
    return document


def shard_names(data: bytes, rng: Random) -> bytes:
    """Some shards of an index get another name."""
    try:
        index = json.loads(data)
        weight_map = index["weight_map"]
        keys = list(weight_map)
        for _ in range(int(rng.integers(1, 4))):
            weight_map[pick(rng, keys)] = pick(rng, NAMES + list(weight_map.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return json_value(data, rng)
    return json.dumps(index).encode()


# Safetensors


def safetensors_header(data: bytes, rng: Random) -> bytes:
    """The header's length or JSON changed; the length is put right again half of the time."""
    if len(data) < 8:
        return data
    (length,) = struct.unpack_from("<Q", data)
    if rng.random() < 0.15 or length > len(data):
        return struct.pack("<Q", pick(rng, [*INTEGERS, length + 1, length - 1]) % 2**64) + data[8:]
    header = json_value(data[8 : 8 + length], rng)
    stated = len(header) if rng.random() < 0.7 else length
    return struct.pack("<Q", stated) + header + data[8 + length :]


BYTES: list[Mutator] = [flip, truncate, span]
BY_SUFFIX: dict[str, list[Mutator]] = {
    ".gguf": [gguf_field, gguf_field, gguf_field, gguf_rename, *BYTES],
    ".index.json": [shard_names, shard_names, json_value, flip],
    ".json": [json_value, json_value, json_value, flip, truncate],
    ".safetensors": [safetensors_header, safetensors_header, safetensors_header, *BYTES],
}


def mutated(name: str, data: bytes, rng: Random) -> bytes:
    """One to three changes that suit the file's kind."""
    mutators = next(m for suffix, m in BY_SUFFIX.items() if name.endswith(suffix))
    for _ in range(1 if rng.random() < 0.7 else int(rng.integers(2, 4))):
        data = pick(rng, mutators)(data, rng)
    return data
