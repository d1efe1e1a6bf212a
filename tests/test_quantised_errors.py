"""Quantised directories that contradict themselves: each is refused with the tensor or field, found and needed."""

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laguna_gguf.dflash.checkpoint import read_checkpoint
from laguna_gguf.errors import CheckpointError, ConfigError, LagunaError
from quantised_fixtures import FORMS, NVFP4_ARGS, QuantisedDrafter, compressed_tensors, quantised_drafter
from reference import quantised_pack as pack
from reference.quantised_pack import Stored


def put(name: str, tensor: Stored) -> Callable[[QuantisedDrafter], None]:
    return lambda d: d.stored.update({name: tensor})


def drop(*names: str) -> Callable[[QuantisedDrafter], None]:
    def change(d: QuantisedDrafter) -> None:
        for name in names:
            del d.stored[name]

    return change


def shape(name: str, *axes: int) -> Callable[[QuantisedDrafter], None]:
    """Other axes, and as many bytes as they need."""

    def change(d: QuantisedDrafter) -> None:
        old = d.stored[name]
        width = len(old.data) // int(np.prod(old.shape, dtype=int))
        d.stored[name] = Stored(old.dtype, axes, (old.data * 8)[: width * int(np.prod(axes, dtype=int))])

    return change


def retype(name: str, dtype: str) -> Callable[[QuantisedDrafter], None]:
    return lambda d: d.stored.update({name: replace(d.stored[name], dtype=dtype)})


def quantization(**fields: Any) -> Callable[[QuantisedDrafter], None]:
    return lambda d: d.config["quantization_config"].update(fields)


def group(**fields: Any) -> Callable[[QuantisedDrafter], None]:
    return lambda d: d.config["quantization_config"]["config_groups"]["group_0"]["weights"].update(fields)


def nan_scale(d: QuantisedDrafter) -> None:
    d.stored["fc.weight_scale"] = replace(d.stored["fc.weight_scale"], data=b"\x7f" * (64 * 12))


def norm_is_quantised(d: QuantisedDrafter) -> None:
    del d.stored["hidden_norm.weight"]
    d.stored["hidden_norm.weight_packed"] = Stored("U8", (64,), bytes(64))


@functools.cache
def packed(form: str) -> QuantisedDrafter:
    """Packed once a session; copy before a change."""
    return quantised_drafter(FORMS[form])


UP = "layers.1.mlp.up_proj"
CASES: list[tuple[str, str, Callable[[QuantisedDrafter], object], type[LagunaError], str]] = [
    ("no scale", "nvfp4", drop("fc.weight_scale"), CheckpointError, r"fc\.weight_scale is missing, needed beside"),
    ("no global scale", "nvfp4", drop(f"{UP}.weight_global_scale"), CheckpointError,
     r"up_proj\.weight_global_scale is missing"),
    ("no second scale", "modelopt-nvfp4", drop(f"{UP}.weight_scale_2"), CheckpointError,
     r"up_proj\.weight_scale_2 is missing"),
    ("no weight", "nvfp4", drop("fc.weight_packed"), CheckpointError, r"fc has .*but neither weight nor weight_packed"),
    ("no module", "nvfp4", drop(*(f"fc.weight_{s}" for s in ("packed", "scale", "global_scale"))), CheckpointError,
     "missing fc"),
    ("weight twice", "nvfp4", put("fc.weight", pack.f32(np.ones((64, 192)))), CheckpointError,
     "fc has both weight and weight_packed"),
    ("name twice", "nvfp4", put("model.fc.weight_packed", pack.f32([1])), CheckpointError, r"fc\.weight_packed occurs"),
    ("both global scales", "nvfp4", put("fc.weight_scale_2", pack.f32([1])), CheckpointError,
     r"unexpected tensor fc\.weight_scale_2"),
    ("scale beside plain", "nvfp4", lambda d: (drop("fc.weight_packed")(d), put("fc.weight", pack.f32(
        np.ones((64, 192))))(d)), CheckpointError, r"fc has .*weight_scale and a weight of dtype F32"),
    ("half a group too many", "nvfp4", shape("fc.weight_packed", 64, 100), CheckpointError,
     r"fc has rows of 200, needed a multiple of group_size = 16"),
    ("scale of other rows", "nvfp4", shape("fc.weight_scale", 63, 12), CheckpointError,
     r"fc\.weight_scale has shape \[63, 12\], needed \[64, 12\]"),
    ("scale of other groups", "nvfp4", shape("fc.weight_scale", 64, 6), CheckpointError,
     r"fc\.weight_scale has shape \[64, 6\], needed \[64, 12\]"),
    ("scale of another type", "nvfp4", retype("fc.weight_scale", "U8"), CheckpointError,
     r"fc\.weight_scale has dtype U8, needed F8_E4M3"),
    ("scale is nan", "nvfp4", nan_scale, CheckpointError, r"fc\.weight_scale has values that are not finite"),
    ("two global scales", "nvfp4", put("fc.weight_global_scale", pack.f32([1, 1])), CheckpointError,
     r"fc\.weight_global_scale has shape \[2\], needed \[1\]"),
    ("global scale is 0", "nvfp4", put("fc.weight_global_scale", pack.f32([0])), CheckpointError,
     r"fc\.weight_global_scale is 0, needed a scale > 0"),
    ("global scale is negative", "modelopt-nvfp4", put("fc.weight_scale_2", pack.f32(-1)), CheckpointError,
     r"fc\.weight_scale_2 is -1"),
    ("global scale is nan", "nvfp4", put("fc.weight_global_scale", pack.f32([np.nan])), CheckpointError,
     r"fc\.weight_global_scale has values that are not finite"),
    ("global scale is infinite", "modelopt-nvfp4", put("fc.weight_scale_2", pack.f32(np.inf)), CheckpointError,
     r"fc\.weight_scale_2 has values that are not finite"),
    ("values overflow", "nvfp4", put("fc.weight_global_scale", pack.f32([1e-38])), CheckpointError,
     r"fc has values that are not finite once dequantised"),
    ("matrix of another size", "nvfp4", lambda d: d.stored.update({
        f"fc.{k}": t for k, t in pack.nvfp4(np.ones((64, 64), np.float32), reciprocal=True).tensors.items()}),
     CheckpointError, r"fc has shape \[64, 64\], needed \[64, 192\]"),
    ("one row less", "nvfp4", lambda d: d.stored.update({
        f"{UP}.{k}": t for k, t in pack.nvfp4(np.ones((95, 64), np.float32), reciprocal=True).tensors.items()}),
     CheckpointError, r"up_proj has shape \[95, 64\], needed \[96, 64\]"),
    ("packed vector", "nvfp4", shape("fc.weight_packed", 64 * 96), CheckpointError, "needed a matrix"),
    ("packed is empty", "nvfp4", shape("fc.weight_packed", 64, 0), CheckpointError, "needed a matrix"),
    ("quantised norm", "nvfp4", norm_is_quantised, CheckpointError, "norms are never quantised"),
    ("norm in fp8", "nvfp4", put("norm.weight", Stored("F8_E4M3", (64,), bytes(64))), CheckpointError,
     "tensor norm has dtype F8_E4M3"),
    ("unknown module", "nvfp4", put("lm_head.weight_packed", pack.f32([1])), CheckpointError,
     r"unknown lm_head\.weight_packed"),
    ("unknown side tensor", "nvfp4", put("lm_head.input_scale", pack.f32([1])), CheckpointError,
     r"unknown lm_head\.input_scale"),
    ("scales of a rotation", "nvfp4", put("fc.pre_quant_scale", pack.f32([1])), CheckpointError,
     r"unknown fc\.pre_quant_scale"),
    ("bias", "nvfp4", put("fc.bias", pack.f32([1])), CheckpointError, r"unknown fc\.bias"),
    ("int8 weight", "fp8-tensor", retype("fc.weight", "I8"), CheckpointError, "fc.weight has dtype I8"),
    ("words of another type", "int4", retype("fc.weight_packed", "F32"), CheckpointError,
     r"fc\.weight_packed has dtype F32"),
    ("width and shape", "int4", put("fc.weight_shape", pack.i64([64, 224])), CheckpointError,
     r"fc\.weight_packed has rows of 24 words, needed 28 for 224 values of 4 bits"),
    ("rows and shape", "int4", put("fc.weight_shape", pack.i64([63, 192])), CheckpointError,
     r"fc\.weight_shape is \[63, 192\], needed \[64,"),
    ("shape is huge", "int4", put("fc.weight_shape", pack.i64([64, 2**62])), CheckpointError, "has rows of 24 words"),
    ("shape is negative", "int4", put("fc.weight_shape", pack.i64([64, -192])), CheckpointError,
     r"fc\.weight_shape is \[64, -192\]"),
    ("shape has three", "int4", put("fc.weight_shape", pack.i64([64, 192, 1])), CheckpointError,
     r"fc\.weight_shape has shape \[3\], needed \[2\]"),
    ("no shape", "int4", drop("fc.weight_shape"), CheckpointError, r"fc\.weight_shape is missing"),
    ("group does not divide", "int4", group(group_size=40), CheckpointError, "needed a multiple of group_size = 40"),
    ("group of another size", "int4", group(group_size=16), CheckpointError,
     r"fc\.weight_scale has shape \[64, 6\], needed \[64, 12\]"),
    ("zero points undeclared", "int4-zero-points", group(symmetric=True), CheckpointError,
     r"weight_zero_point is there, but .*symmetric is true"),
    ("no zero points", "int4", group(symmetric=False), CheckpointError, "weight_zero_point is missing"),
    ("zero points not packed", "int4-zero-points", shape("fc.weight_zero_point", 64, 6), CheckpointError,
     r"fc\.weight_zero_point has shape \[64, 6\], needed \[8, 6\]"),
    ("activation order", "int4", put("fc.weight_g_idx", Stored("I32", (192,), bytes(768))), CheckpointError,
     "activation order"),
    ("two scales of fp8", "fp8-tensor", put("fc.weight_scale_inv", pack.f32([1])), CheckpointError,
     r"unexpected tensor fc\.weight_scale "),
    ("no scale of fp8", "fp8-tensor", drop("fc.weight_scale"), CheckpointError, r"fc\.weight_scale is missing"),
    ("scale of the wrong strategy", "fp8-tensor", put("fc.weight_scale", pack.f32(np.ones((64, 1)))), CheckpointError,
     r"fc\.weight_scale has shape \[64, 1\], needed \[1\]"),
    ("blocks of another size", "fp8-block", quantization(weight_block_size=[64, 64]), CheckpointError,
     r"weight_scale_inv has shape \[\d+, \d+\], needed"),
    ("scale of fp8 is nan", "fp8-channel", put("fc.weight_scale", pack.f32(np.full((64, 1), np.nan))), CheckpointError,
     r"fc\.weight_scale has values that are not finite"),
    ("no biases", "mlx-4", drop("fc.biases"), CheckpointError, r"fc\.biases is missing"),
    ("no scales", "mlx-4", drop("fc.scales"), CheckpointError, r"fc\.scales is missing"),
    ("biases of other groups", "mlx-4", shape("fc.biases", 64, 3), CheckpointError,
     r"fc\.biases has shape \[64, 3\], needed \[64, 6\]"),
    ("mlx group", "mlx-4", lambda d: d.config["quantization"].update(group_size=64), CheckpointError,
     r"scales has shape|group_size = 64"),
    ("mlx bits", "mlx-4", lambda d: d.config["quantization"].update(bits=3), ConfigError,
     r"quantization\.bits: found 3, needed 4 or 8"),
    ("mlx mode", "mlx-4", lambda d: d.config["quantization"].update(mode="mxfp4"), ConfigError, r"quantization\.mode"),
    ("not declared", "nvfp4", lambda d: d.config.pop("quantization_config"), ConfigError,
     "quantization_config: .* is stored as nvfp4, needed a scheme"),
    ("ignored", "nvfp4", quantization(ignore=["fc"]), ConfigError, "fc is stored as nvfp4, needed a scheme"),
    ("not targeted", "nvfp4", quantization(config_groups={"g": {"targets": ["Embedding"], "weights": NVFP4_ARGS}}),
     ConfigError, "needed a scheme"),
    ("declared as another", "nvfp4", lambda d: d.config.update(FORMS["int4"].config), ConfigError,
     r"config_groups\.group_0\.weights: .* is declared as int-pack, its tensors are nvfp4"),
    ("awq", "nvfp4", quantization(quant_method="awq"), ConfigError, "quant_method: found 'awq', needed one of"),
    ("gptq", "int4", quantization(quant_method="gptq"), ConfigError, "quant_method: found 'gptq'"),
    ("bitsandbytes", "fp8-tensor", quantization(quant_method="bitsandbytes"), ConfigError, "found 'bitsandbytes'"),
    ("no method", "nvfp4", lambda d: d.config.update(quantization_config={}), ConfigError, "quant_method: found None"),
    ("method is a number", "nvfp4", quantization(quant_method=3), ConfigError, "quant_method: found 3"),
    ("config is a list", "nvfp4", lambda d: d.config.update(quantization_config=[]), ConfigError,
     r"quantization_config: found \[\], needed an object"),
    ("unknown format", "nvfp4", quantization(format="mxfp4-pack-quantized"), ConfigError,
     "quantization_config.format: found 'mxfp4-pack-quantized'"),
    ("unknown format of a group", "nvfp4", lambda d: d.config["quantization_config"]["config_groups"]["group_0"].update(
        format="marlin-24"), ConfigError, r"group_0\.format: found 'marlin-24'"),
    ("sparse", "nvfp4", quantization(sparsity_config={"format": "sparse-24-bitmask"}), ConfigError, "sparsity_config"),
    ("rotated", "nvfp4", quantization(transform_config={"config_groups": {"u": {}}}), ConfigError, "transform_config"),
    ("groups are a list", "nvfp4", quantization(config_groups=[1]), ConfigError, "config_groups: found"),
    ("targets are a name", "nvfp4", quantization(config_groups={"g": {"targets": "Linear", "weights": NVFP4_ARGS}}),
     ConfigError, r"config_groups\.g\.targets: found 'Linear', needed a list"),
    ("targets are numbers", "nvfp4", quantization(config_groups={"g": {"targets": [1], "weights": NVFP4_ARGS}}),
     ConfigError, r"config_groups\.g\.targets"),
    ("bad expression", "nvfp4", quantization(ignore=["re:("]), ConfigError, "is not a regular expression"),
    ("mxfp4", "nvfp4", group(group_size=32), ConfigError, r"group_size: found 32, needed 16"),
    ("5 bits", "int4", group(num_bits=5), ConfigError, "num_bits, type: found '5, int'"),
    ("bits are no whole number", "int4", group(num_bits=4.0), ConfigError, r"num_bits: found 4\.0, needed a whole"),
    ("group size is text", "int4", group(group_size="32"), ConfigError, r"group_size: found '32'"),
    ("group size is 0", "int4", group(group_size=0), ConfigError, r"group_size: found 0"),
    ("strategy", "fp8-channel", group(strategy="token"), ConfigError, r"strategy: found 'token'"),
    ("symmetric is text", "int4", group(symmetric="no"), ConfigError, r"symmetric: found 'no'"),
    ("block is a number", "fp8-block", quantization(weight_block_size=128), ConfigError,
     "weight_block_size: found 128, needed two"),
    ("block is 0", "fp8-block", quantization(weight_block_size=[0, 128]), ConfigError, "weight_block_size: found 0"),
    ("e5m2", "fp8-block", quantization(fmt="e5m2"), ConfigError, "fmt: found 'e5m2'"),
    ("algorithm", "modelopt-nvfp4", quantization(quant_algo="NVFP4_AWQ"), ConfigError, "quant_algo: found 'NVFP4_AWQ'"),
    ("algorithm is a list", "modelopt-nvfp4", quantization(quant_algo=[]), ConfigError, r"quant_algo: found \[\]"),
    ("algorithm's group", "modelopt-nvfp4", quantization(group_size=32), ConfigError, "group_size: found 32"),
    ("excluded", "modelopt-nvfp4", quantization(exclude_modules=["*.mlp.*"]), ConfigError, "needed a scheme"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "change", "kind", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_contradictions_are_refused_by_name(
    tmp_path: Path,
    form: str,
    change: Callable[[QuantisedDrafter], object],
    kind: type[LagunaError],
    message: str,
) -> None:
    drafter = copy.deepcopy(packed(form))
    change(drafter)
    with pytest.raises(LagunaError, match=message) as caught:
        read_checkpoint(drafter.write(tmp_path / "d"))
    assert type(caught.value) is kind
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("target", ["re:(.*)*(.*)*x", "re:(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)(.|.)x" * 3,
                                    "re:.*.*.*.*.*.*.*.*.*x", "re:(?x)(.*) *x", "re:" + "a?" * 60 + "b"])  # fmt: skip
def test_expressions_that_would_take_long_are_refused(tmp_path: Path, target: str) -> None:
    drafter = quantised_drafter(FORMS["nvfp4"], quantization_config=compressed_tensors(NVFP4_ARGS, ignore=[target]))
    drafter.write(tmp_path / "d")
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"quantization_config\.ignore: matching its entries may take too long"):
        read_checkpoint(tmp_path / "d")
    assert time.process_time() - begin < 5
