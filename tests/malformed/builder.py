"""A GGUF writer without any checks: every count, length, type and offset can be set to a lie."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
GGML_F32, GGML_F16, GGML_Q4_0, GGML_Q8_0, GGML_BF16 = 0, 1, 2, 8, 30


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A GGUF string; `length` overrides the declared one."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: float | str) -> bytes:
    """The bytes of one value without its type."""
    return string(str(value)) if kind == STRING else struct.pack("<" + FORMATS[kind], value)


def array(kind: int, values: list, length: int | None = None) -> bytes:
    """An array value: element type, length (or a claim), elements."""
    head = struct.pack("<IQ", kind, len(values) if length is None else length)
    return head + b"".join(scalar(kind, v) for v in values)


@dataclass
class Tensor:
    """A tensor entry; `offset` None means the next free aligned place."""

    name: str
    ne: tuple[int, ...]
    ggml_type: int = GGML_F32
    data: bytes = b""
    offset: int | None = None


@dataclass
class GgufBuilder:
    """Collects keys and tensors; `build` gives the bytes. Counts are right unless set."""

    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    n_keys: int | None = None
    n_tensors: int | None = None
    keys: list[bytes] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def raw_key(self, name: str | bytes, kind: int, payload: bytes) -> "GgufBuilder":
        """Add a key with any type number and any payload."""
        self.keys.append(string(name) + struct.pack("<I", kind) + payload)
        return self

    def key(self, name: str, kind: int, value: float | str) -> "GgufBuilder":
        """Add a well-formed scalar."""
        return self.raw_key(name, kind, scalar(kind, value))

    def array_key(self, name: str, kind: int, values: list, length: int | None = None) -> "GgufBuilder":
        """Add an array; `length` overrides the declared one."""
        return self.raw_key(name, ARRAY, array(kind, values, length))

    def tensor(
        self,
        name: str,
        ne: tuple[int, ...],
        ggml_type: int = GGML_F32,
        data: bytes | None = None,
        offset: int | None = None,
    ) -> "GgufBuilder":
        """Add a tensor; data defaults to zeros of the right size for f32."""
        if data is None:
            n = 4
            for length in ne:
                n *= length
            data = bytes(n) if n < 1 << 20 else b""
        self.tensors.append(Tensor(name, ne, ggml_type, data, offset))
        return self

    def build(self) -> bytes:
        """The file's bytes."""
        head = self.magic + struct.pack(
            "<IQQ",
            self.version,
            len(self.tensors) if self.n_tensors is None else self.n_tensors,
            len(self.keys) if self.n_keys is None else self.n_keys,
        )
        head += b"".join(self.keys)
        blob = b""
        for t in self.tensors:
            blob += bytes(-len(blob) % self.alignment)
            offset = len(blob) if t.offset is None else t.offset
            blob += t.data
            head += string(t.name) + struct.pack("<I", len(t.ne)) + struct.pack(f"<{len(t.ne)}Q", *t.ne)
            head += struct.pack("<IQ", t.ggml_type, offset)
        return head + (bytes(-len(head) % self.alignment) + blob if self.tensors else b"")

    def write(self, path: Path) -> Path:
        """Write the file; returns its path."""
        path.write_bytes(self.build())
        return path
