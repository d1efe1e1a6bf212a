"""GGUF files whose numbers lie, one a name; README.md says what each is after."""

import struct
from collections.abc import Callable

from malformed import builder as b
from malformed.builder import GgufBuilder

HUGE = 2**64 - 1

ATTACKS: dict[str, tuple[Callable[[], GgufBuilder], str]] = {
    "magic": (lambda: GgufBuilder(magic=b"GGML"), "not a GGUF"),
    "version-1": (lambda: GgufBuilder(version=1), "version 1"),
    "version-4": (lambda: GgufBuilder(version=4), "version 4"),
    "big-endian": (lambda: GgufBuilder(version=3 << 24), "big-endian"),
    "keys-huge": (lambda: GgufBuilder(n_keys=1 << 63), "keys"),
    "keys-plausible": (lambda: GgufBuilder(n_keys=60000), "do not fit"),
    "tensors-huge": (lambda: GgufBuilder(n_tensors=1 << 63), "tensors"),
    "tensors-plausible": (lambda: GgufBuilder(n_tensors=100000), "do not fit"),
    "key-length": (lambda: _with_key(b.string("k", HUGE) + bytes(20)), "bytes long"),
    "key-length-past-end": (lambda: _with_key(b.string("k", 5000) + bytes(20)), "truncated"),
    "key-empty": (lambda: GgufBuilder().key("", b.U8, 1), "empty key"),
    "key-duplicate": (lambda: GgufBuilder().key("k", b.U8, 1).key("k", b.U8, 1), "duplicate key"),
    "value-type": (lambda: GgufBuilder().raw_key("k", 13, bytes(16)), "value type 13"),
    "string-huge": (lambda: GgufBuilder().raw_key("k", b.STRING, b.string("v", HUGE)), "bytes long"),
    "string-past-end": (lambda: GgufBuilder().raw_key("k", b.STRING, b.string("v", 1000)), "truncated"),
    "array-huge": (lambda: GgufBuilder().array_key("k", b.U64, [1], HUGE), "elements"),
    "array-wraps": (lambda: GgufBuilder().array_key("k", b.U64, [1], (1 << 61) + 1), "elements"),
    "array-past-end": (lambda: GgufBuilder().array_key("k", b.U8, [1], 1000), "elements"),
    "array-of-strings-huge": (lambda: GgufBuilder().array_key("k", b.STRING, ["v"], 1 << 40), "elements"),
    "array-string-past-end": (
        lambda: GgufBuilder().raw_key("k", b.ARRAY, struct.pack("<IQ", b.STRING, 1) + b.string("v", 99)),
        "truncated",
    ),
    "array-element-type": (
        lambda: GgufBuilder().raw_key("k", b.ARRAY, struct.pack("<IQ", 99, 1) + bytes(8)),
        "type 99",
    ),
    "array-nested": (
        lambda: GgufBuilder().raw_key("k", b.ARRAY, struct.pack("<IQ", b.ARRAY, 1) + b.array(b.U8, [1])),
        "arrays of arrays",
    ),
    "bool": (lambda: GgufBuilder().key("k", b.BOOL, 2), "bool value 2"),
    "bool-array": (lambda: GgufBuilder().array_key("k", b.BOOL, [0, 1, 255]), "bool array"),
    "alignment-type": (lambda: GgufBuilder().key("general.alignment", b.U64, 32), "general.alignment"),
    "alignment-string": (lambda: GgufBuilder().key("general.alignment", b.STRING, "32"), "general.alignment"),
    "alignment-array": (lambda: GgufBuilder().array_key("general.alignment", b.U32, [32]), "general.alignment"),
    "alignment-0": (lambda: GgufBuilder().key("general.alignment", b.U32, 0), "power of two"),
    "alignment-3": (lambda: GgufBuilder().key("general.alignment", b.U32, 3), "power of two"),
    "alignment-huge": (
        lambda: GgufBuilder().key("general.alignment", b.U32, 1 << 31).tensor("t", (1,)),
        "power of two",
    ),
    "tensor-duplicate": (lambda: GgufBuilder().tensor("t", (1,)).tensor("t", (1,)), "duplicate tensor"),
    "tensor-name-long": (lambda: GgufBuilder().tensor("t" * 64, (1,)), "bytes long"),
    "dims-5": (lambda: GgufBuilder().tensor("t", (1, 1, 1, 1, 1)), "5 dimensions"),
    "dim-0": (lambda: GgufBuilder().tensor("t", (4, 0)), "dimension 1 is 0"),
    "dim-negative": (lambda: GgufBuilder().tensor("t", (HUGE,)), "63 bits"),
    "dims-wrap": (lambda: GgufBuilder().tensor("t", ((1 << 42) + 1, 1 << 22)), "63 bits"),
    "dims-wrap-to-zero": (lambda: GgufBuilder().tensor("t", (1 << 32, 1 << 32)), "63 bits"),
    "bytes-wrap": (lambda: GgufBuilder().tensor("t", ((1 << 62) + 1,)), "overflows"),
    "type-unknown": (lambda: GgufBuilder().tensor("t", (4,), 999), "type 999"),
    "type-negative": (lambda: GgufBuilder().tensor("t", (4,), 2**32 - 1), "type 4294967295"),
    "type-removed": (lambda: GgufBuilder().tensor("t", (32,), 4), "type 4"),
    "row-not-blocks": (lambda: GgufBuilder().tensor("t", (33,), b.GGML_Q8_0, bytes(64)), "not divisible"),
    "offset-misaligned": (lambda: GgufBuilder().tensor("t", (4,), data=bytes(64), offset=4), "alignment"),
    "offset-past-end": (lambda: GgufBuilder().tensor("t", (4,), offset=4096), "truncated"),
    "offset-wraps": (lambda: GgufBuilder().tensor("t", (4,), offset=2**64 - 32), "truncated"),
    "data-short": (lambda: GgufBuilder().tensor("t", (1024,), data=bytes(100)), "truncated"),
    "data-missing": (lambda: GgufBuilder().tensor("t", (1 << 40,)), "truncated"),
    "overlap": (lambda: GgufBuilder().tensor("t", (16,)).tensor("u", (16,), offset=32), "overlap"),
    "same-place": (lambda: GgufBuilder().tensor("t", (16,)).tensor("u", (16,), offset=0), "overlap"),
    "split-count-string": (lambda: GgufBuilder().key("split.count", b.STRING, "2"), "split.count"),
    "split-count-huge": (lambda: GgufBuilder().key("split.count", b.U64, HUGE).key("split.no", b.U16, 0), "split"),
    "split-no-outside": (lambda: GgufBuilder().key("split.count", b.U16, 2).key("split.no", b.U16, 2), "split.no 2"),
    "split-name": (lambda: GgufBuilder().key("split.count", b.U16, 2).key("split.no", b.U16, 0), "00001-of-00002"),
}


def _with_key(raw: bytes) -> GgufBuilder:
    builder = GgufBuilder()
    builder.keys.append(raw)
    return builder
