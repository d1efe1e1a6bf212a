"""Rewrite a GGUF file with its half-precision tensors in F32: exact, and free of half-precision kernels."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from laguna_gguf import _native

_HALF = (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)


def upcast(source: str | Path, outfile: str | Path) -> Path:
    """Copy every key and tensor of `source`; F16 and BF16 tensors become F32. Returns `outfile`."""
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(outfile), reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    file = _native.GgufFile(str(source))  # maps the data: the reader above would hold it as well
    for tensor in file.tensors():
        ggml_type = gguf.GGMLQuantizationType(tensor.ggml_type)
        data = tensor.data().reshape(-1)
        if ggml_type in _HALF:
            values = gguf.quants.dequantize(data.view(np.uint16 if ggml_type == _HALF[1] else np.float16), ggml_type)
        elif ggml_type == gguf.GGMLQuantizationType.F32:
            values = data.view(np.float32)
        else:
            raise ValueError(f"{tensor.name} is {ggml_type.name}; only F32, F16 and BF16 can be up-cast exactly")
        writer.add_tensor(tensor.name, np.ascontiguousarray(values.reshape(tensor.ne[::-1]), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(outfile)
