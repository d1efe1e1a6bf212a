"""Pack small random matrices with compressed-tensors itself and keep what it made of them.

Run once, outside CI, with `pip install torch compressed-tensors numpy`:

    python tests/reference/make_compressed_tensors_fixtures.py tests/data

Writes compressed_tensors_<form>.npz: for each stored tensor `<suffix>` its raw bytes, `<suffix>.shape` and
`<suffix>.dtype` (as safetensors names it); `args`, the weights part of a config group as JSON; `format`; `version`,
that of compressed-tensors; `values`, float32 [out, in], its own dequantisation in float32; and `decompressed`, what its
decompressor returns, in its own type (16-bit ones as their bits).
"""

import json
import sys
from pathlib import Path
from typing import Any

import compressed_tensors
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}

INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
FORMS: dict[str, tuple[str, dict[str, Any], tuple[int, int], torch.dtype]] = {
    "nvfp4": (
        "nvfp4-pack-quantized",
        FLOAT | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        (38, 96),
        torch.float32,
    ),
    "int4": ("pack-quantized", INT | {"num_bits": 4, "strategy": "group", "group_size": 32}, (38, 96), torch.bfloat16),
    "int4_zero_points": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        (38, 96),
        torch.bfloat16,
    ),
    # Rows that end inside a word.
    "int4_channel": ("pack-quantized", INT | {"num_bits": 4, "strategy": "channel"}, (38, 90), torch.float16),
    "int8": ("pack-quantized", INT | {"num_bits": 8, "strategy": "group", "group_size": 32}, (38, 96), torch.bfloat16),
    "fp8_tensor": ("float-quantized", FLOAT | {"num_bits": 8, "strategy": "tensor"}, (38, 96), torch.bfloat16),
    "fp8_channel": ("float-quantized", FLOAT | {"num_bits": 8, "strategy": "channel"}, (38, 96), torch.bfloat16),
    # Blocks that the matrix cuts off on both sides.
    "fp8_block": (
        "float-quantized",
        FLOAT | {"num_bits": 8, "strategy": "block", "block_structure": [16, 40]},
        (38, 96),
        torch.float32,
    ),
}


def extrema(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of everything that shares a scale, in the shape of the scales."""
    strategy = str(args.strategy)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy in ("group", "tensor_group"):
        groups = weight.unflatten(1, (-1, args.group_size))
        return groups.amin(2), groups.amax(2)
    high, wide = args.block_structure
    blocks = [[part for part in row.split(wide, 1)] for row in weight.split(high, 0)]
    return tuple(
        torch.stack([torch.stack([f(part) for part in row]) for row in blocks]) for f in (torch.min, torch.max)
    )


def make(name: str, seed: int) -> dict[str, Any]:
    form, fields, shape, dtype = FORMS[name]
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    low, high = extrema(weight, args)
    state = {"weight": weight}
    global_scale = None
    if name == "nvfp4":
        global_scale = generate_gparam(weight.min(), weight.max())
        state["weight_global_scale"] = global_scale
    state["weight_scale"], zero_point = calculate_qparams(low, high, args, global_scale)
    if not args.symmetric:
        state["weight_zero_point"] = zero_point
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    decompressed = compressor.decompress(dict(stored), scheme)["weight"]
    out: dict[str, Any] = {
        "args": json.dumps(json.loads(args.model_dump_json())),
        "format": form,
        "version": compressed_tensors.__version__,
        "values": in_float32(stored, args, zero_point).numpy(),
        "decompressed": raw(decompressed).view("<u2" if decompressed.element_size() == 2 else "<f4").reshape(shape),
        "decompressed.dtype": DTYPES[decompressed.dtype],
    }
    for suffix, tensor in stored.items():
        out[suffix] = raw(tensor)
        out[f"{suffix}.shape"] = np.array(tensor.shape, np.int64)
        out[f"{suffix}.dtype"] = DTYPES[tensor.dtype]
    return out


def in_float32(stored: dict[str, torch.Tensor], args: QuantizationArgs, zero_point: torch.Tensor) -> torch.Tensor:
    """The library's dequantisation with float32 scales, of the values that it unpacks."""
    packed = stored.get("weight_packed")
    if packed is None:
        codes = stored["weight"].float()
    elif packed.dtype == torch.uint8:
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
    else:
        codes = unpack_from_int32(packed, args.num_bits, torch.Size(stored["weight_shape"].tolist()))
    return dequantize(
        x_q=codes,
        scale=stored["weight_scale"].float(),
        zero_point=None if args.symmetric else zero_point,
        args=args,
        dtype=torch.float32,
        global_scale=stored.get("weight_global_scale"),
    )


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def main() -> None:
    folder = Path(sys.argv[1])
    for seed, name in enumerate(FORMS):
        np.savez_compressed(folder / f"compressed_tensors_{name}.npz", **make(name, seed))


if __name__ == "__main__":
    main()
