"""One drafter in every form gives the same logits; every change to its configuration or tensors is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from convert_tools import write_target_gguf
from fixtures import (
    REMOVE,
    FloatArray,
    Layout,
    drafter_config,
    drafter_tensors,
    save_tensors,
    write_drafter_dir,
    write_drafter_gguf,
)
from laguna_gguf import LagunaError, _native, load_drafter
from laguna_gguf.convert import convert_dflash
from laguna_gguf.dflash.checkpoint import read_checkpoint
from laguna_gguf.errors import CheckpointError, ConfigError
from laguna_gguf.inspect import inspect
from malformed import builder as b
from malformed.drafters import build, drafter_parts
from tiny_models import TINY_TARGET, write_tiny_target

Dialect = Literal["A", "B", "C"]
DIALECTS: tuple[Dialect, ...] = ("A", "B", "C")
LAYOUTS: tuple[Layout, ...] = ("fused", "split", "prefixed", "sharded")
N_ROWS = 40
"""More than the window of 32."""


def logits(path: Path, target: Path, *, n_embd: int = 64) -> NDArray[np.float32]:
    """Logits [15, n_vocab] after random context rows."""
    drafter = load_drafter(path, target=target, n_threads=1)
    rng = np.random.default_rng(3)
    drafter.append_context(rng.standard_normal((N_ROWS, 3, n_embd)).astype(np.float32))
    found = drafter.draft(7, 15, return_logits=True).logits
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_form_of_a_drafter_gives_the_same_logits_bit_for_bit(
    tmp_path: Path, tiny_target: Path, dtype: str
) -> None:
    config = drafter_config()
    tensors = write_drafter_dir(tmp_path / "reference", dtype=dtype)
    reference = logits(tmp_path / "reference", tiny_target)
    assert np.isfinite(reference).all() and reference.std() > 0.1
    forms: dict[str, Path] = {}
    for layout in LAYOUTS:
        forms[layout] = tmp_path / layout
        write_drafter_dir(forms[layout], layout=layout, dtype=dtype)
    if dtype == "f32":
        for dialect in DIALECTS:
            forms[dialect] = write_drafter_gguf(tmp_path / f"{dialect}.gguf", tensors, config, dialect=dialect)
    forms["converted"] = tmp_path / "converted.gguf"
    convert_dflash(tmp_path / "sharded", forms["converted"], outtype=dtype, target=tiny_target)
    forms["back"] = tmp_path / "back"
    convert_dflash(forms["converted"], forms["back"], outtype="hf")
    for name, path in forms.items():
        assert np.array_equal(logits(path, tiny_target), reference), name


WIDTH = 256
ROUNDING = {"f32": 0.0, "f16": 4e-3, "bf16": 3e-2, "q8_0": 0.15, "q6_k": 0.15, "q5_k": 0.15, "q4_k": 0.15}
"""Largest difference to an f32 file with exactly the values that the type stores, in units of the logits' standard
deviation: ggml's kernels round the activations too, to the type or (K types) to 8 bits a block."""


def test_types_differ_by_their_own_rounding_only(tmp_path: Path) -> None:
    wide = replace(TINY_TARGET, n_embd=WIDTH)
    target = write_tiny_target(tmp_path / "wide-F32.gguf", wide)
    overrides: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 512, "num_attention_heads": 16}
    write_drafter_dir(tmp_path / "d", **overrides)
    config = drafter_config(**overrides)
    measured = {}
    for outtype in ROUNDING:
        path = tmp_path / f"{outtype}.gguf"
        convert_dflash(tmp_path / "d", path, outtype=outtype, target=target)
        exact = build_f32(tmp_path / f"{outtype}-F32.gguf", path, config)
        reference = logits(exact, target, n_embd=WIDTH)
        measured[outtype] = np.abs(logits(path, target, n_embd=WIDTH) - reference).max() / reference.std()
    assert all(measured[outtype] <= ROUNDING[outtype] for outtype in ROUNDING), measured


def build_f32(path: Path, quantised: Path, config: dict[str, Any]) -> Path:
    """A dialect A file in f32 with the values that another one stores."""
    keys, _ = drafter_parts("A", **{k: config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads")})
    values = {
        f"{name}.weight": _native.dequantize(t.data, t.ggml_type, t.ne[0]).reshape(t.ne[::-1])
        for name, t in read_checkpoint(quantised).tensors.items()
    }
    return build(keys, values).write(path)


# What is refused. Every case goes through inspect, load_drafter and convert_dflash.


def assert_refused(source: Path, error: type[LagunaError], words: tuple[str, ...]) -> None:
    """All three ways in refuse with the words in the message; nothing is left in the folder."""
    before = sorted(source.parent.rglob("*"))
    out = source.parent / "out.gguf"
    for action in (load_drafter, lambda path: convert_dflash(path, out, target=source.parent / "target.gguf")):
        with pytest.raises(error) as caught:
            action(source)
        for word in words:
            assert word in str(caught.value), word
    with pytest.raises(error):
        convert_dflash(source, source.parent / "hf", outtype="hf", target=source.parent / "target.gguf")
    report = inspect(source)
    assert report["sound"] is False and words[0] in report["problems"][0]
    assert sorted(source.parent.rglob("*")) == before


CONFIG_MUTATIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "architectures": ({"architectures": ["DFlashDraftModel"]}, ("architectures", "DFlashDraftModel", "needed")),
    "model_type": ({"model_type": "qwen3"}, ("model_type", "qwen3", "'laguna'")),
    "rope_parameters": ({"rope_parameters": {"rope_theta": 1e4}}, ("rope_parameters", "10000", "needed")),
    "rope_scaling": ({"rope_scaling": {"type": "yarn"}}, ("rope_scaling", "yarn", "needed")),
    "num_experts": ({"num_experts": 8}, ("num_experts", "8", "needed 0")),
    "gating": ({"gating": "per-element"}, ("gating", "per-element", "'per-head'")),
    "attention_bias": ({"attention_bias": True}, ("attention_bias", "True", "needed False")),
    "layer_types": (
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ("layer_types", "full_attention", "sliding_attention"),
    ),
    "layer_types-count": ({"layer_types": ["sliding_attention"]}, ("layer_types", "needed 3")),
    "sliding_windows": ({"sliding_windows": [32, 32]}, ("sliding_windows", "[32, 32]", "needed 3")),
    "sliding_windows-mixed": ({"sliding_windows": [32, 64, 32]}, ("sliding_windows", "64", "needed 32")),
    "sliding_window": ({"sliding_window": 1}, ("sliding_window", "1", "2..")),
    "sliding_window-huge": ({"sliding_window": 1 << 21}, ("sliding_window", "2097152", "..1048576")),
    "draft_vocab_size": ({"draft_vocab_size": 319}, ("draft_vocab_size", "319", "320")),
    "causal": ({"causal": False}, ("causal", "False", "needed true")),
    "block_size": ({"block_size": 1}, ("block_size", "1", "2..")),
    "block_size-huge": ({"block_size": 4097}, ("block_size", "4097", "..4096")),
    "mask_token_id": ({"mask_token_id": 320}, ("mask_token_id", "320", "0..319")),
    "target_layer_ids-empty": ({"target_layer_ids": []}, ("target_layer_ids", "[]", "non-empty")),
    "target_layer_ids-order": ({"target_layer_ids": [4, 1, 7]}, ("target_layer_ids", "[4, 1, 7]", "increasing")),
    "target_layer_ids-twice": ({"target_layer_ids": [1, 4, 4]}, ("target_layer_ids", "[1, 4, 4]", "increasing")),
    "target_layer_ids-beyond": ({"target_layer_ids": [1, 4, 8]}, ("target_layer_ids", "8", "0..7")),
    "target_layer_ids-count": ({"target_layer_ids": [1, 7]}, ("target_layer_ids", "2", "num_hidden_layers = 3")),
    "eagle_aux_hidden_state_layer_ids": (
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]},
        ("eagle_aux_hidden_state_layer_ids", "[1, 4, 7]", "[2, 5, 8]"),
    ),
    "head_dim": ({"head_dim": 15}, ("head_dim", "15", "even")),
    "head_dim-huge": ({"head_dim": 2048}, ("head_dim", "2048", "..1024")),
    "num_key_value_heads": ({"num_key_value_heads": 3}, ("num_attention_heads", "4", "multiple")),
    "num_hidden_layers": ({"num_hidden_layers": 1025}, ("num_hidden_layers", "1025", "..1024")),
    "rms_norm_eps": ({"rms_norm_eps": 0}, ("rms_norm_eps", "0", "> 0")),
    "rms_norm_eps-tiny": ({"rms_norm_eps": 1e-300}, ("rms_norm_eps", "1e-300", "float32")),
    "rope_theta-huge": ({"rope_theta": 1e39}, ("rope_theta", "1e+39", "float32")),
    "rope_theta": ({"rope_theta": "5e5"}, ("rope_theta", "5e5", "a number")),
    "num_target_layers": ({"num_target_layers": 0}, ("num_target_layers", "0", "1..")),
    "hidden_size-missing": ({"hidden_size": REMOVE}, ("hidden_size", "missing", "needed")),
    "dflash_config-missing": ({"dflash_config": REMOVE}, ("dflash_config", "None", "an object")),
    "vocab_size": ({"vocab_size": True}, ("vocab_size", "True", "whole number")),
}


@pytest.mark.parametrize("mutation", CONFIG_MUTATIONS)
def test_config_mutations(tmp_path: Path, mutation: str) -> None:
    overrides, words = CONFIG_MUTATIONS[mutation]
    write_target_gguf(tmp_path / "target.gguf")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text(json.dumps(drafter_config(**overrides)))
    save_tensors(tmp_path / "d", drafter_tensors(drafter_config()))
    assert_refused(tmp_path / "d", ConfigError, words)


def _arch(dialect: str) -> str:
    return "dflash" if dialect == "A" else "dflash-draft"


def _nested(dialect: str) -> str:
    return "dflash" if dialect == "A" else "dflash-draft.dflash"


def _ids(dialect: str, ids: list[int]) -> tuple[str, tuple[int, list[int]]]:
    return (
        ("dflash.target_layers", (b.I32, [i + 1 for i in ids]))
        if dialect == "A"
        else ("dflash-draft.dflash.target_layer_ids", (b.I32, ids))
    )


KEY_MUTATIONS: dict[str, tuple[Callable[[str], tuple[str, Any]], tuple[str, ...]]] = {
    "block_count-missing": (
        lambda d: (f"{_arch(d)}.block_count", None),
        ("num_hidden_layers", "missing", "block_count"),
    ),
    "block_count-text": (lambda d: (f"{_arch(d)}.block_count", (b.STRING, "3")), ("num_hidden_layers", "'3'", "whole")),
    "heads": (lambda d: (f"{_arch(d)}.attention.head_count_kv", (b.U32, 3)), ("num_attention_heads", "4", "multiple")),
    "value_length": (lambda d: (f"{_arch(d)}.attention.value_length", (b.U32, 32)), ("head_dim", "32", "needed 16")),
    "eps": (lambda d: (f"{_arch(d)}.attention.layer_norm_rms_epsilon", (b.F32, 0.0)), ("rms_norm_eps", "0", "> 0")),
    "theta": (lambda d: (f"{_arch(d)}.rope.freq_base", (b.STRING, "x")), ("rope_theta", "'x'", "a number")),
    "scaling": (lambda d: (f"{_arch(d)}.rope.scaling.type", (b.STRING, "yarn")), ("rope_parameters", "yarn", "none")),
    "window": (lambda d: (f"{_arch(d)}.attention.sliding_window", (b.U32, 0)), ("sliding_window", "0", "2..")),
    "pattern": (
        lambda d: (f"{_arch(d)}.attention.sliding_window_pattern", (b.BOOL, [1, 0, 1])),
        ("layer_types", "False", "needed 3"),
    ),
    "causal": (lambda d: (f"{_arch(d)}.attention.causal", (b.BOOL, 0)), ("causal", "False", "needed true")),
    "experts": (lambda d: (f"{_arch(d)}.expert_count", (b.U32, 8)), ("num_experts", "8", "needed 0")),
    "block_size": (lambda d: (f"{_nested(d)}.block_size", (b.U32, 1)), ("block_size", "1", "2..")),
    "block_size-missing": (lambda d: (f"{_nested(d)}.block_size", None), ("block_size", "missing", "needed")),
    "ids-order": (lambda d: _ids(d, [4, 1, 7]), ("target_layer_ids", "[4, 1, 7]", "increasing")),
    "ids-beyond": (lambda d: _ids(d, [1, 4, 8]), ("target_layer_ids", "8", "0..7")),
    "ids-negative": (lambda d: _ids(d, [-1, 4, 7]), ("target_layer_ids", "-1", "0..7")),
    "ids-count": (lambda d: _ids(d, [1, 7]), ("target_layer_ids", "2", "needed")),
    "ids-floats": (lambda d: (_ids(d, [])[0], (b.F32, [1.0, 4.0, 7.0])), ("target_layer_ids", "array of whole")),
    "mask": (
        lambda d: ("tokenizer.ggml.mask_token_id" if d == "A" else f"{_nested(d)}.mask_token_id", (b.U32, 320)),
        ("mask_token_id", "320", "0..319"),
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("mutation", KEY_MUTATIONS)
def test_key_mutations(tmp_path: Path, dialect: Dialect, mutation: str) -> None:
    change, words = KEY_MUTATIONS[mutation]
    keys, tensors = drafter_parts(dialect)
    name, value = change(dialect)
    if value is None:
        del keys[name]
    else:
        keys[name] = value
    if mutation == "ids-count" and dialect != "A":  # otherwise that key contradicts the ids first
        del keys[f"{_nested(dialect)}.n_target_features"]
    write_target_gguf(tmp_path / "target.gguf")
    assert_refused(build(keys, tensors).write(tmp_path / "x.gguf"), ConfigError, words)


def _renamed(name: str, to: str) -> Callable[[dict[str, FloatArray]], None]:
    return lambda tensors: tensors.update({to: tensors.pop(name)})


def _replaced(name: str, make: Callable[[FloatArray], FloatArray]) -> Callable[[dict[str, FloatArray]], None]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def _nan(tensor: FloatArray) -> FloatArray:
    changed = tensor.copy()
    changed.flat[-1] = np.nan
    return changed


AUX = {"A": "enc.aux_norm", "B": "dflash_aux_hidden_norm.1", "C": "dflash.aux_hidden_norm.1"}
HIDDEN = {"A": "enc.output_norm", "B": "dflash_hidden_norm", "C": "dflash.hidden_norm"}
FC = {"A": "fc", "B": "dflash_fc", "C": "dflash.fc"}
BLOCK = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_q_norm",
    "attn_k_norm",
    "attn_gate",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("part", ["aux", "hidden", "output_norm", *BLOCK])
def test_missing_and_unknown_tensors(tmp_path: Path, dialect: Dialect, part: str) -> None:
    named = {"aux": AUX[dialect], "hidden": HIDDEN[dialect], "output_norm": "output_norm"}
    name = named.get(part, f"blk.1.{part}")
    if dialect == "C" and part == "attn_gate":
        name = "blk.2.attn_gate"  # that of block 0 is the dialect's marker
    keys, tensors = drafter_parts(dialect)
    _renamed(f"{name}.weight", f"{name}x.weight")(tensors)
    write_target_gguf(tmp_path / "target.gguf")
    path = build(keys, tensors).write(tmp_path / "x.gguf")
    assert_refused(path, CheckpointError, (name, f"missing {name}", f"unknown {name}x"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tensor_mutations(tmp_path: Path, dialect: Dialect) -> None:
    write_target_gguf(tmp_path / "target.gguf")
    fc, hidden = FC[dialect], HIDDEN[dialect]
    cases: list[tuple[Callable[[dict[str, FloatArray]], None], tuple[str, ...]]] = [
        (_replaced(f"{fc}.weight", lambda t: t.T.copy()), (fc, "[64, 192]", "needed [192, 64]")),
        (_replaced(f"{hidden}.weight", lambda t: t[:-1]), (hidden, "[63]", "needed [64]")),
        (_replaced("blk.2.attn_k.weight", lambda t: t[:-1]), ("blk.2.attn_k", "[64, 31]", "needed [64, 32]")),
        (_replaced("blk.0.ffn_up.weight", _nan), ("blk.0.ffn_up", "finite")),
        (_replaced("blk.0.attn_norm.weight", _nan), ("blk.0.attn_norm", "finite")),
        (_renamed("blk.0.ffn_up.weight", "blk.3.ffn_up.weight"), ("blk.0.ffn_up", "unknown blk.3.ffn_up")),
        (lambda t: t.update({"lm_head.weight": np.ones((2, 4), np.float32)}), ("lm_head", "unknown")),
        (lambda t: t.update({"blk.0.attn_q.bias": np.ones(4, np.float32)}), ("blk.0.attn_q.bias", "unknown")),
    ]
    for i, (change, words) in enumerate(cases):
        keys, tensors = drafter_parts(dialect)
        change(tensors)
        assert_refused(build(keys, tensors).write(tmp_path / f"x{i}.gguf"), CheckpointError, words)


def test_directory_tensor_mutations(tmp_path: Path) -> None:
    write_target_gguf(tmp_path / "target.gguf")
    q = "layers.1.self_attn.qkv_proj"
    cases: list[tuple[Callable[[dict[str, FloatArray]], None], tuple[str, ...]]] = [
        (_renamed("aux_hidden_norms.1.weight", "aux_hidden_norms.3.weight"), ("aux_hidden_norms.1", "unknown")),
        (_renamed("norm.weight", "model.embed_tokens.weight"), ("missing norm", "unknown embed_tokens")),
        (_replaced(f"{q}.weight", lambda t: t[:-1]), (q, "[127, 64]", "needed [128, 64]")),
        (lambda t: t.update({f"{q}.bias": np.ones(4, np.float32)}), (f"{q}.bias", "unknown")),
        (
            lambda t: t.update({"layers.1.self_attn.v_proj.weight": np.ones((4, 4), np.float32)}),
            (q, "v_proj", "needed"),
        ),
        (_replaced("fc.weight", _nan), ("fc", "finite")),
    ]
    for i, (change, words) in enumerate(cases):
        folder = tmp_path / f"d{i}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(drafter_config()))
        tensors = drafter_tensors(drafter_config())
        change(tensors)
        save_tensors(folder, tensors)
        assert_refused(folder, CheckpointError, words)
