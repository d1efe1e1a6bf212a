"""Random drafters in every quantised form, with the weights that they stand for."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fixtures import FloatArray, Layout, drafter_config, drafter_tensors, layout_tensors
from reference import quantised_pack as pack
from reference.quantised_pack import Packed, Stored

Pack = Callable[[FloatArray], Packed]


def compressed_tensors(weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A quantization_config of one group that targets every Linear."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]} | fields


def weights(bits: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False} | fields


NVFP4_ARGS = weights(4, "float", strategy="tensor_group", group_size=16)
INT4_ARGS = weights(4, "int", strategy="group", group_size=32)
FP8_ARGS = weights(8, "float", strategy="channel")


@dataclass(frozen=True)
class Form:
    """A quantised form: how a matrix is packed, and what config.json says of it."""

    pack: Pack
    config: dict[str, Any]
    logits: float
    """How far the type's own rounding may move a logit of this small drafter, in standard deviations of the logits."""
    label: str
    files: dict[str, Any] = field(default_factory=dict)
    """More JSON files of the directory."""


def _ct(args: dict[str, Any], name: str) -> dict[str, Any]:
    return {"quantization_config": compressed_tensors(args, format=name)}


FORMS: dict[str, Form] = {
    "nvfp4": Form(
        lambda w: pack.nvfp4(w, reciprocal=True), _ct(NVFP4_ARGS, "nvfp4-pack-quantized"), 0.6, "nvfp4 group 16"
    ),
    "modelopt-nvfp4": Form(
        lambda w: pack.nvfp4(w, reciprocal=False),
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}},
        0.6,
        "nvfp4 group 16",
    ),
    "modelopt-file": Form(
        lambda w: pack.nvfp4(w, reciprocal=False),
        {},
        0.6,
        "nvfp4 group 16",
        {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}},
    ),
    "int4": Form(lambda w: pack.int_pack(w), _ct(INT4_ARGS, "pack-quantized"), 0.8, "int4 group 32"),
    "int4-zero-points": Form(
        lambda w: pack.int_pack(w, symmetric=False),
        _ct(INT4_ARGS | {"symmetric": False}, "pack-quantized"),
        0.6,
        "int4 group 32 with zero points",
    ),
    "int4-channel": Form(
        lambda w: pack.int_pack(w, group_size=None),
        _ct(weights(4, "int", strategy="channel"), "pack-quantized"),
        0.9,
        "int4 channel",
    ),
    "int8": Form(
        lambda w: pack.int_pack(w, bits=8),
        _ct(weights(8, "int", strategy="group", group_size=32), "pack-quantized"),
        0.06,
        "int8 group 32",
    ),
    "fp8-tensor": Form(
        lambda w: pack.fp8(w, block=None),
        _ct(weights(8, "float", strategy="tensor"), "float-quantized"),
        0.25,
        "fp8 tensor",
    ),
    "fp8-channel": Form(
        lambda w: pack.fp8(w, block=(1, w.shape[1])), _ct(FP8_ARGS, "float-quantized"), 0.25, "fp8 channel"
    ),
    "fp8-block": Form(
        lambda w: pack.fp8(w, block=(48, 40), name="weight_scale_inv"),
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]}},
        0.25,
        "fp8 block 48x40",
    ),
    "fp8-block-ct": Form(
        lambda w: pack.fp8(w, block=(128, 128)),
        _ct(weights(8, "float", strategy="block", block_structure=[128, 128]), "float-quantized"),
        0.25,
        "fp8 block 128x128",
    ),
    "modelopt-fp8": Form(
        lambda w: pack.fp8(w, block=None, scalar=True),
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        0.25,
        "fp8 tensor",
    ),
    "mlx-4": Form(lambda w: pack.mlx(w), {"quantization": {"group_size": 32, "bits": 4}}, 0.6, "mlx 4 bits group 32"),
    "mlx-8": Form(
        lambda w: pack.mlx(w, bits=8),
        {"quantization": {"group_size": 32, "bits": 8}, "quantization_config": {"group_size": 32, "bits": 8}},
        0.04,
        "mlx 8 bits group 32",
    ),
}


def is_matrix(name: str) -> bool:
    return "norm" not in name


@dataclass
class QuantisedDrafter:
    """The tensors of a quantised drafter, to be changed at will and written."""

    config: dict[str, Any]
    stored: dict[str, Stored]
    values: dict[str, FloatArray]
    """What the fused weights dequantise to, by Hugging Face name ("fc.weight")."""
    files: dict[str, Any]

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        pack.write_safetensors(path / "model.safetensors", self.stored)
        for name, content in {"config.json": self.config, **self.files}.items():
            (path / name).write_text(json.dumps(content))
        return path


def quantised_drafter(
    *forms: tuple[Form, str | tuple[str, ...]] | Form,
    layout: Layout = "fused",
    seed: int = 2,
    plain: tuple[str, ...] = (),
    **overrides: Any,
) -> QuantisedDrafter:
    """A random drafter whose matrices are packed by the first form that names a part of their name (alone: by it).

    Matrices whose name holds an entry of `plain` stay float32, as norms do. `overrides` are fields of config.json, on
    top of those of the first form.
    """
    first = forms[0] if isinstance(forms[0], Form) else forms[0][0]
    config = drafter_config(**copy.deepcopy(first.config | overrides))
    original = layout_tensors(drafter_tensors(config, seed=seed), config, layout)
    stored: dict[str, Stored] = {}
    values: dict[str, FloatArray] = {}
    for name, weight in original.items():
        form = None
        if is_matrix(name) and not any(part in name for part in plain):
            form = next(_form(entry) for entry in forms if isinstance(entry, Form) or _names(entry[1], name))
        if form is None:
            stored[name], values[name] = pack.f32(weight), weight
            continue
        packed = form.pack(weight)
        values[name] = packed.values
        stored |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in packed.tensors.items()}
    return QuantisedDrafter(config, stored, _fused(values, config), first.files)


def _form(entry: tuple[Form, Any] | Form) -> Form:
    return entry if isinstance(entry, Form) else entry[0]


def _names(parts: str | tuple[str, ...], name: str) -> bool:
    return any(part in name for part in ((parts,) if isinstance(parts, str) else parts))


def _fused(values: dict[str, FloatArray], config: dict[str, Any]) -> dict[str, FloatArray]:
    """Without prefix, q, k and v as one."""
    out = {name.removeprefix("model."): value for name, value in values.items()}
    for layer in range(config["num_hidden_layers"]):
        names = [f"layers.{layer}.self_attn.{letter}_proj.weight" for letter in "qkv"]
        if names[0] in out:
            whole = np.concatenate([out.pop(name) for name in names])
            out[f"layers.{layer}.self_attn.qkv_proj.weight"] = whole
    return out
