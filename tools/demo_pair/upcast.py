"""Rewrite a GGUF file with all tensors in F32: the same values, and free of half-precision and quantised kernels."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from laguna_gguf import _native

EXACT = tuple(int(gguf.GGMLQuantizationType[name]) for name in ("F32", "F16", "BF16", "Q8_0"))


def upcast(source: str | Path, outfile: str | Path) -> Path:
    """Copy every key and tensor of `source`; F16, BF16 and Q8_0 tensors become F32. Returns `outfile`."""
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(outfile), reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    file = _native.GgufFile(str(source))  # maps the data: the reader above would hold it as well
    for tensor in file.tensors():
        if tensor.ggml_type not in EXACT:
            raise ValueError(f"{tensor.name} is {_native.type_name(tensor.ggml_type)}; needed F32, F16, BF16 or Q8_0")
        values = _native.dequantize(tensor.data(), tensor.ggml_type, tensor.ne[0])
        writer.add_tensor(tensor.name, np.ascontiguousarray(values.reshape(tensor.ne[::-1])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(outfile)
