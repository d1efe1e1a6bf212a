"""Quantised Hugging Face directories: the values of every form, what decides how a module is read, and refusals."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import ml_dtypes
import numpy as np
import pytest

from fixtures import (
    FloatArray,
    Layout,
    dialect_tensors,
    drafter_config,
    save_tensors,
    write_drafter_dir,
)
from laguna_gguf import _native, convert_dflash, load_drafter
from laguna_gguf.dflash.checkpoint import Checkpoint, read_checkpoint
from laguna_gguf.dflash.config import DrafterConfig
from laguna_gguf.dflash.quantised import QuantisedWeight, parse_declared, resolve
from laguna_gguf.dflash.safetensors_dir import SafetensorsDir
from laguna_gguf.dflash.tensor_data import BF16, F32, TensorData
from quantised_fixtures import (
    FORMS,
    FP8_ARGS,
    INT4_ARGS,
    NVFP4_ARGS,
    Form,
    QuantisedDrafter,
    compressed_tensors,
    is_matrix,
    quantised_drafter,
    weights,
)
from reference import quantised_pack as pack
from reference.dflash_numpy import spread
from reference.quantised_pack import Stored

FIXTURES = sorted((Path(__file__).parent / "data").glob("compressed_tensors_*.npz"))


def floats(tensor: TensorData) -> FloatArray:
    return _native.dequantize(tensor.data, tensor.ggml_type, tensor.ne[0]).reshape(tensor.ne[::-1])


def assert_values(checkpoint: Checkpoint, drafter: QuantisedDrafter) -> None:
    """Every weight has exactly the values that its packed form stands for."""
    expected = dialect_tensors(drafter.values, drafter.config, "A")
    assert {f"{name}.weight" for name in checkpoint.tensors} == expected.keys()
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(floats(tensor), expected[f"{name}.weight"], err_msg=name)


def resolved_fc(directory: Path, config: dict[str, Any]) -> QuantisedWeight:
    """The weight `fc` of a directory with no other tensors, of any size."""
    drafter = DrafterConfig.from_json(drafter_config())
    declared = parse_declared(config, directory)
    weight = resolve(SafetensorsDir(directory).tensors, drafter, declared, directory).weights["fc"]
    assert isinstance(weight, QuantisedWeight)
    return weight


# Values


@pytest.mark.parametrize("layout", ["fused", "split", "prefixed"])
@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_the_format(tmp_path: Path, name: str, layout: Layout) -> None:
    form = FORMS[name]
    drafter = quantised_drafter(form, layout=layout)
    checkpoint = read_checkpoint(drafter.write(tmp_path / "d"))
    assert_values(checkpoint, drafter)
    assert set(checkpoint.quantised.values()) == {form.label}
    assert set(checkpoint.quantised) == {n for n in checkpoint.tensors if "norm" not in n}
    assert checkpoint.dropped == []


@pytest.fixture(scope="module")
def draft(tiny_target: Path) -> Callable[[Path], FloatArray]:
    """Logits [15, n_vocab] of the drafter in a directory, after 20 context rows."""
    rng = np.random.default_rng(0)
    features = (rng.standard_normal((20, 3, 64)) * np.linspace(1, 4, 3)[:, None]).astype(np.float32)
    target = llama_cpp.Llama(str(tiny_target), n_ctx=64, n_threads=1, verbose=False)

    def logits(path: Path) -> FloatArray:
        drafter = load_drafter(path, target=target, n_threads=1)
        drafter.append_context(features)
        found = drafter.draft(7, 15, return_logits=True).logits
        assert found is not None
        return found

    return logits


def write_values(path: Path, drafter: QuantisedDrafter) -> Path:
    """A plain directory with the values that a quantised one stands for."""
    write_drafter_dir(path)
    save_tensors(path, drafter.values)
    return path


@pytest.mark.parametrize("name", FORMS)
def test_logits_differ_by_the_rounding_of_the_type_only(
    tmp_path: Path, draft: Callable[[Path], FloatArray], name: str
) -> None:
    drafter = quantised_drafter(FORMS[name])
    found = draft(drafter.write(tmp_path / "quantised"))
    np.testing.assert_array_equal(found, draft(write_values(tmp_path / "values", drafter)))
    write_drafter_dir(tmp_path / "plain", seed=2)
    distance = spread(found, np.asarray(draft(tmp_path / "plain"), np.float64))
    assert FORMS[name].logits / 3 < distance <= FORMS[name].logits


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem.removeprefix("compressed_tensors_"))
def test_values_are_those_of_compressed_tensors(tmp_path: Path, path: Path) -> None:
    with np.load(path) as made:
        fields = dict(made)
    suffixes = [key.removesuffix(".shape") for key in fields if key.endswith(".shape")]
    stored = {
        f"fc.{suffix}": Stored(
            str(fields[f"{suffix}.dtype"]), tuple(fields[f"{suffix}.shape"].tolist()), fields[suffix].tobytes()
        )
        for suffix in suffixes
    }
    pack.write_safetensors(tmp_path / "model.safetensors", stored)
    arguments = json.loads(str(fields["args"]))
    weight = resolved_fc(tmp_path, {"quantization_config": compressed_tensors(arguments, format=str(fields["format"]))})
    values = floats(weight.tensor(0, weight.shape[0]))
    np.testing.assert_array_equal(values, fields["values"])
    # Its decompressor rounds to the type of the scales, once: the float32 product is exact before.
    decompressed, dtype = fields["decompressed"], str(fields["decompressed.dtype"])
    rounded = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
    np.testing.assert_array_equal(values.astype(rounded).view(decompressed.dtype), decompressed)
    part = floats(weight.tensor(5, 17))
    np.testing.assert_array_equal(part, fields["values"][5:17])


def test_there_is_a_fixture_of_every_form() -> None:
    assert [path.stem.removeprefix("compressed_tensors_") for path in FIXTURES] == [
        "fp8_block", "fp8_channel", "fp8_tensor", "int4", "int4_channel", "int4_zero_points", "int8", "nvfp4",
    ]  # fmt: skip


def test_the_two_global_scales_are_reciprocal(tmp_path: Path) -> None:
    """A constant matrix of 6 * 448 * 0.5: confusing one with the other would be off by a factor of 4."""
    value = np.full((64, 192), 6 * 448 * 0.5, np.float32)
    drafter = quantised_drafter(FORMS["nvfp4"])
    drafter.stored |= {f"fc.{k}": t for k, t in pack.nvfp4(value, reciprocal=True).tensors.items()}
    assert np.frombuffer(drafter.stored["fc.weight_global_scale"].data, "<f4") == 2
    np.testing.assert_array_equal(floats(read_checkpoint(drafter.write(tmp_path / "ct")).tensors["fc"]), value)
    drafter = quantised_drafter(FORMS["modelopt-nvfp4"])
    drafter.stored |= {f"fc.{k}": t for k, t in pack.nvfp4(value, reciprocal=False).tensors.items()}
    assert np.frombuffer(drafter.stored["fc.weight_scale_2"].data, "<f4") == 0.5
    np.testing.assert_array_equal(floats(read_checkpoint(drafter.write(tmp_path / "mo")).tensors["fc"]), value)


def test_weights_are_bf16_only_where_that_is_exact(tmp_path: Path, draft: Callable[[Path], FloatArray]) -> None:
    """Scales that are powers of two keep e4m3 values inside bf16; others need f32."""
    form = replace(FORMS["fp8-tensor"], pack=lambda w: pack.fp8(w, block=None, power_of_two=True))
    drafter = quantised_drafter(form)
    exact = read_checkpoint(drafter.write(tmp_path / "exact"))
    assert {exact.tensors[name].ggml_type for name in exact.quantised} == {BF16}
    assert_values(exact, drafter)
    as_stored = {name: pack.bf16(v) if is_matrix(name) else pack.f32(v) for name, v in drafter.values.items()}
    plain = QuantisedDrafter(drafter_config(), as_stored, drafter.values, {}).write(tmp_path / "values")
    np.testing.assert_array_equal(draft(tmp_path / "exact"), draft(plain))
    inexact = read_checkpoint(quantised_drafter(FORMS["fp8-tensor"]).write(tmp_path / "inexact"))
    assert {inexact.tensors[name].ggml_type for name in inexact.quantised} == {F32}


def test_values_are_made_when_asked_for(tmp_path: Path) -> None:
    """Reading costs a piece (1 million values), holding nothing; one tensor costs itself and a piece."""
    rng = np.random.default_rng(0)
    n_out, n_in = 1024, 4096  # 16 MiB in float32
    module = {
        "fc.weight_packed": Stored("U8", (n_out, n_in // 2), rng.bytes(n_out * n_in // 2)),
        "fc.weight_scale": Stored("F8_E4M3", (n_out, n_in // 16), bytes([48] * (n_out * n_in // 16))),
        "fc.weight_global_scale": pack.f32([3.0]),
    }
    pack.write_safetensors(tmp_path / "model.safetensors", module)
    tracemalloc.start()
    try:
        weight = resolved_fc(tmp_path, FORMS["nvfp4"].config)
        tensor = weight.tensor(0, n_out)
        held, peak = tracemalloc.get_traced_memory()
        assert tensor.n_bytes == 16 << 20
        assert held < 1 << 20 and peak < 20 << 20
        tracemalloc.reset_peak()
        data = tensor.data
        assert data.nbytes == tensor.n_bytes
        held, peak = tracemalloc.get_traced_memory()
        assert held < 17 << 20 and peak < 36 << 20
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(data, tensor.data)
    np.testing.assert_array_equal(data[: 64 * n_in * 4], weight.tensor(0, 64).data)


def test_conversion_starts_from_the_dequantised_values(tmp_path: Path, tiny_target: Path) -> None:
    drafter = quantised_drafter(FORMS["nvfp4"])
    drafter.stored["layers.0.mlp.up_proj.input_scale"] = pack.f32([1.0])
    report = convert_dflash(drafter.write(tmp_path / "d"), tmp_path / "out.gguf", outtype="f32", target=tiny_target)
    assert report["dropped"] == ["layers.0.mlp.up_proj.input_scale"]
    assert_values(read_checkpoint(tmp_path / "out.gguf"), drafter)


# What decides how a module is read


PLAIN_CONFIGS: list[dict[str, Any]] = [
    *(form.config for form in FORMS.values()),
    {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
    {"quantization_config": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}},
]


@pytest.mark.parametrize("config", PLAIN_CONFIGS)
def test_plain_tensors_load_whatever_is_declared(tmp_path: Path, config: dict[str, Any]) -> None:
    """Published drafters carry the configuration of a quantised model and hold plain bf16."""
    tensors = write_drafter_dir(tmp_path / "d", dtype="bf16", **config)
    checkpoint = read_checkpoint(tmp_path / "d")
    assert checkpoint.quantised == {}
    assert {t.ggml_type for name, t in checkpoint.tensors.items() if "norm" not in name} == {BF16}
    np.testing.assert_array_equal(floats(checkpoint.tensors["fc"]), tensors["fc.weight"])


def test_fc_and_other_modules_may_stay_plain(tmp_path: Path) -> None:
    drafter = quantised_drafter(FORMS["nvfp4"], plain=("fc", "g_proj"))
    drafter.config["quantization_config"]["ignore"] = ["fc", r"re:.*g_proj$"]
    checkpoint = read_checkpoint(drafter.write(tmp_path / "d"))
    assert_values(checkpoint, drafter)
    assert "fc" not in checkpoint.quantised and "blk.1.attn_gate" not in checkpoint.quantised
    assert "blk.1.attn_q" in checkpoint.quantised


MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {"format": "float-quantized", "targets": ["Linear"], "weights": FP8_ARGS},
        "group_1": {
            "format": "nvfp4-pack-quantized",
            "targets": [r"re:.*mlp\.(gate|up)_proj$", "layers.1.mlp.down_proj"],
            "weights": NVFP4_ARGS,
        },
        "group_2": {"format": "pack-quantized", "targets": ["re:.*o_proj", "re:.*q_proj"], "weights": INT4_ARGS},
        "activations": {"targets": ["Attention"], "weights": None},
    },
    "ignore": ["lm_head", "model.fc"],
}


@pytest.mark.parametrize("layout", ["fused", "split", "prefixed"])
def test_groups_are_resolved_by_module(tmp_path: Path, layout: Layout) -> None:
    """A name beats an expression, which beats a class; targets for split projections also mean the fused one."""
    int4 = ("o_proj", "q_proj") if layout == "split" else ("o_proj", "qkv_proj")
    drafter = quantised_drafter(
        (FORMS["nvfp4"], ("gate_proj", "up_proj", "layers.1.mlp.down_proj")),
        (FORMS["int4"], int4),
        (FORMS["fp8-channel"], ("down_proj", "g_proj", "k_proj", "v_proj")),
        layout=layout,
        plain=("fc",),
        quantization_config=MIXED,
    )
    checkpoint = read_checkpoint(drafter.write(tmp_path / "d"))
    assert_values(checkpoint, drafter)
    labels = checkpoint.quantised
    assert "fc" not in labels
    assert labels["blk.0.ffn_down"] == "fp8 channel" and labels["blk.1.ffn_down"] == "nvfp4 group 16"
    assert labels["blk.2.attn_output"] == labels["blk.2.attn_q"] == "int4 group 32"
    assert labels["blk.2.attn_k"] == ("fp8 channel" if layout == "split" else "int4 group 32")


def test_modelopt_layers_have_schemes_of_their_own(tmp_path: Path) -> None:
    layers = {
        **{f"model.layers.{i}.mlp.{n}_proj": {"quant_algo": "NVFP4"} for i in range(3) for n in ("gate", "up", "down")},
        **{f"model.layers.{i}.self_attn": {"quant_algo": "FP8"} for i in range(3)},
    }
    drafter = quantised_drafter(
        (FORMS["modelopt-nvfp4"], "mlp"),
        (FORMS["modelopt-fp8"], "self_attn"),
        plain=("fc",),
        quantization_config={
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        },
    )
    checkpoint = read_checkpoint(drafter.write(tmp_path / "d"))
    assert_values(checkpoint, drafter)
    assert checkpoint.quantised["blk.0.ffn_up"] == "nvfp4 group 16"
    assert checkpoint.quantised["blk.0.attn_k"] == "fp8 tensor"


def test_mlx_modules_may_differ(tmp_path: Path) -> None:
    eight = Form(lambda w: pack.mlx(w, bits=8, group_size=16), {}, 0, "")
    drafter = quantised_drafter(
        (FORMS["mlx-4"], ("mlp", "o_proj", "qkv_proj", "g_proj")),
        (eight, "fc"),
        plain=("g_proj",),
        quantization={
            "group_size": 32,
            "bits": 4,
            "fc": {"bits": 8, "group_size": 16},
            **{f"layers.{i}.self_attn.g_proj": False for i in range(3)},
        },
    )
    checkpoint = read_checkpoint(drafter.write(tmp_path / "d"))
    assert_values(checkpoint, drafter)
    assert checkpoint.quantised["fc"] == "mlx 8 bits group 16"


def test_modelopt_blocks_have_two_more_axes(tmp_path: Path) -> None:
    form = replace(
        FORMS["modelopt-fp8"],
        pack=lambda w: pack.fp8(w, block=(128, 128)),
        config={"quantization_config": {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}},
    )
    drafter = quantised_drafter(form)
    for name, tensor in drafter.stored.items():
        if name.endswith("weight_scale"):
            high, wide = tensor.shape
            drafter.stored[name] = replace(tensor, shape=(high, 1, wide, 1))
    assert_values(read_checkpoint(drafter.write(tmp_path / "d")), drafter)


SIDE_TENSORS = [
    "fc.input_scale",
    "layers.0.mlp.up_proj.input_global_scale",
    "layers.1.mlp.down_proj.output_scale",
    "layers.1.self_attn.k_scale",
    "layers.1.self_attn.v_scale",
    "layers.2.self_attn.attn.k_scale",
    "layers.2.self_attn.k_proj.k_scale",
    "model.layers.2.self_attn.v_proj.v_scale",
]


@pytest.mark.parametrize("name", ["nvfp4", "fp8-tensor"])
def test_scales_of_activations_are_dropped_and_listed(tmp_path: Path, name: str) -> None:
    drafter = quantised_drafter(FORMS[name])
    drafter.stored |= {side: pack.f32([0.5]) for side in SIDE_TENSORS}
    checkpoint = read_checkpoint(drafter.write(tmp_path / "d"))
    assert checkpoint.dropped == sorted(SIDE_TENSORS)
    assert_values(checkpoint, drafter)


# Expressions and defaults


def test_ordinary_expressions_are_accepted(tmp_path: Path) -> None:
    ignore = [
        "re:.*lm_head", r"re:model\.layers\.\d+\.block_sparse_moe\.gate$", "re:.*self_attn.*(q|k|v)_norm.*",
        "re:^(?!.*(mlp|self_attn|fc)).*$", r"re:.*experts\.\d{1,3}\.[a-z_]+$",
    ]  # fmt: skip
    drafter = quantised_drafter(FORMS["nvfp4"], quantization_config=compressed_tensors(NVFP4_ARGS, ignore=ignore))
    assert_values(read_checkpoint(drafter.write(tmp_path / "d")), drafter)


def test_a_config_of_weights_only_needs_no_fields_beyond_the_groups(tmp_path: Path) -> None:
    """The method and the strategy can be inferred, as compressed-tensors does."""
    config = {"config_groups": {"g": {"targets": ["Linear"], "weights": weights(4, "int", group_size=32)}}}
    drafter = quantised_drafter(FORMS["int4"], quantization_config=config)
    assert_values(read_checkpoint(drafter.write(tmp_path / "d")), drafter)
