"""inspect: kinds, dialects, what is applied and what is wrong, for every file that users may hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert_tools import N_VOCAB, write_target_dir, write_target_gguf
from fixtures import drafter_config, drafter_tensors, write_drafter_dir, write_drafter_gguf
from laguna_gguf.commands.inspect import printable
from laguna_gguf.convert import convert_dflash
from laguna_gguf.errors import CheckpointError
from laguna_gguf.inspect import inspect
from malformed import builder as b
from malformed.builder import GgufBuilder


def sound(path: Path) -> dict[str, Any]:
    report = inspect(path)
    assert (report["sound"], report["problems"]) == (True, [])
    json.dumps(report)
    return report


def problem(path: Path) -> str:
    report = inspect(path)
    assert report["sound"] is False
    json.dumps(report)
    return "\n".join(report["problems"])


# Drafters


def test_drafters(tmp_path: Path) -> None:
    write_drafter_dir(tmp_path / "d")
    target = write_target_gguf(tmp_path / "target.gguf")
    convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=target)
    for path, dialect in ((tmp_path / "d", "hf"), (tmp_path / "out.gguf", "A")):
        report = sound(path)
        assert (report["kind"], report["family"], report["dialect"]) == ("drafter", "laguna-dflash", dialect)
        assert report["config"]["target_layer_ids"] == [1, 4, 7]
        assert report["captured_layers"] == {"outputs": [1, 4, 7], "inputs": [2, 5, 8]}
        assert report["shapes"]["fc"] == [192, 64]
        assert report["tensors"]["count"] == 40
    assert inspect(tmp_path / "d")["defaults"] == {"sliding_windows": [32] * 3}


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_dialects_and_defaults(tmp_path: Path, dialect: Any) -> None:
    config = drafter_config()
    path = write_drafter_gguf(tmp_path / "x.gguf", drafter_tensors(config), config, dialect=dialect)
    report = sound(path)
    assert (report["dialect"], report["defaults"]) == (dialect, {"causal": True})
    assert report["captured_layers"]["inputs"] == [2, 5, 8]
    key = ("dflash" if dialect == "A" else "dflash-draft") + ".attention.sliding_window"
    changed = path.read_bytes().replace(key.encode(), key.replace("sliding_window", "sliding_wind0w").encode())
    (tmp_path / "y.gguf").write_bytes(changed)
    report = sound(tmp_path / "y.gguf")
    assert report["defaults"] == {"sliding_window": 512, "causal": True}
    assert report["config"]["sliding_window"] == 512


def test_a_drafter_with_wrong_tensors_still_shows_its_configuration(tmp_path: Path) -> None:
    config = drafter_config()
    tensors = drafter_tensors(config)
    write_drafter_dir(tmp_path / "d", gating="per-element")
    assert "gating" in problem(tmp_path / "d")
    path = write_drafter_gguf(tmp_path / "x.gguf", tensors, config)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_gate.weight", b"blk.1.attn_gaze.weight"))
    message = problem(path)
    assert "missing blk.1.attn_gate" in message and "unknown blk.1.attn_gaze" in message
    report = inspect(path)
    assert report["config"]["hidden_size"] == 64
    assert report["captured_layers"]["outputs"] == [1, 4, 7]


def _gguf(arch: str, keys: dict[str, str] | None = None, tensors: tuple[str, ...] = ()) -> GgufBuilder:
    builder = GgufBuilder().key("general.architecture", b.STRING, arch)
    for key, value in (keys or {}).items():
        builder.key(key, b.STRING, value)
    for name in tensors:
        builder.tensor(name, (4, 4))
    return builder


@pytest.mark.parametrize(
    ("make", "family", "words"),
    [
        (lambda: _gguf("dflash", {"dflash.decoder_arch": "qwen3"}), "dflash", "Qwen"),
        (lambda: _gguf("dflash"), "dflash", "Qwen"),
        (lambda: _gguf("dflash-draft", tensors=("dflash.fc.weight",)), "dflash", "Qwen"),
        (lambda: _gguf("dflash", {"dflash.decoder_arch": "qwen3"}, ("selector_hidden.weight",)), "dflash2", "DFlash2"),
        (lambda: _gguf("eagle3"), "eagle3", "EAGLE-3"),
        (lambda: _gguf("eagle"), "eagle", "EAGLE"),
        (lambda: _gguf("dspark"), "dspark", "DSpark"),
        (lambda: _gguf("dflash", {"dflash.decoder_arch": "laguna", "dflash.markov_rank": "8"}), "dspark", "DSpark"),
        (lambda: _gguf("dflash-draft", tensors=("dflash.fc.weight", "dflash.dspark.w1.weight")), "dspark", "DSpark"),
    ],
)
def test_drafters_of_other_families_are_named(
    tmp_path: Path, make: Callable[[], GgufBuilder], family: str, words: str
) -> None:
    path = make().write(tmp_path / "x.gguf")
    message = problem(path)
    report = inspect(path)
    assert (report["kind"], report["family"], report["dialect"]) == ("drafter", family, None)
    assert words in message and "needed" in message


@pytest.mark.parametrize(
    ("config", "family", "words"),
    [
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}}, "dflash", "Qwen"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 256}}, "dspark", "DSpark"),
        ({"architectures": ["DSparkDraftModel"]}, "dspark", "DSpark"),
        ({"architectures": ["DFlash2DraftModel"], "model_type": "qwen3"}, "dflash2", "DFlash2"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3", "EAGLE-3"),
        ({"architectures": ["X"], "speculators_model_type": "eagle3"}, "eagle3", "EAGLE-3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle", "EAGLE"),
        ({"architectures": 7, "dflash_config": 3}, "dflash", "Qwen"),
    ],
)
def test_directories_of_other_families_are_named(
    tmp_path: Path, config: dict[str, Any], family: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = problem(tmp_path)
    assert (inspect(tmp_path)["kind"], inspect(tmp_path)["family"]) == ("drafter", family)
    assert words in message and "architectures" in message and "needed" in message


# Targets


def test_a_target_and_the_drafters_that_fit(tmp_path: Path) -> None:
    report = sound(write_target_gguf(tmp_path / "target.gguf"))
    assert (report["kind"], report["dialect"]) == ("target", None)
    assert report["config"] == {"n_layer": 8, "n_embd": 64, "n_vocab": N_VOCAB}
    assert report["tokenizer"] == {
        "model": "gpt2",
        "pre": "laguna",
        "n_tokens": N_VOCAB,
        "chat_template": True,
        "eog_ids": {"2": "tökén2"},
    }
    needs = {"num_target_layers": 8, "hidden_size": 64, "vocab_size": N_VOCAB}
    assert report["drafters"] == {"needs": needs, "published": []}


def test_a_whole_target(tiny_target: Path) -> None:
    report = sound(tiny_target)
    config = report["config"]
    assert (config["n_layer"], config["n_embd"], config["n_expert"], config["n_expert_used"]) == (8, 64, 4, 2)
    assert config["sliding_window"] == 32 and isinstance(config["n_head"], list)
    assert report["notes"] == []
    assert "</assistant>" in report["tokenizer"]["eog_ids"].values()


@pytest.mark.parametrize(("layers", "width", "name"), [(40, 2048, "XS-2.1"), (48, 3072, "S-2.1"), (70, 3072, None)])
def test_published_sizes(tmp_path: Path, layers: int, width: int, name: str | None) -> None:
    folder = write_target_dir(tmp_path / "t", num_hidden_layers=layers, hidden_size=width, vocab_size=100352)
    published = sound(folder)["drafters"]["published"]
    assert published == [] if name is None else any(name in known for known in published)


def test_target_directories(tmp_path: Path) -> None:
    report = sound(write_target_dir(tmp_path / "t", sliding_window=512, num_experts=256, num_experts_per_tok=8))
    assert report["config"] == {
        "n_layer": 8,
        "n_embd": 64,
        "n_vocab": N_VOCAB,
        "sliding_window": 512,
        "n_expert": 256,
        "n_expert_used": 8,
    }
    assert report["tokenizer"] == {"file": True, "eog_ids": {"2": "<eos>", "24": "</assistant>"}}
    assert "vocab_size" in problem(write_target_dir(tmp_path / "u", vocab_size="many"))


def test_targets_with_gaps(tmp_path: Path) -> None:
    assert "tokenizer.ggml.tokens" in problem(_gguf("laguna").write(tmp_path / "bare.gguf"))
    builder = _gguf("laguna", tensors=("output.weight",))
    builder.array_key("tokenizer.ggml.tokens", b.STRING, ["a", "</assistant>"])
    builder.key("laguna.block_count", b.U32, 2).key("laguna.embedding_length", b.U32, 4)
    path = builder.write(tmp_path / "head.gguf")
    assert "token_embd.weight" in problem(path)
    assert "</assistant> (id 1)" in inspect(path)["notes"][0]


# Scoring heads and probes

SHA = "0" * 64
HEAD_KEYS = {
    "general.architecture": "pflash_scoring_head",
    "scoringhead.schema": "qwen3_5_0_8b_nope_qk_mass_v1",
    "scoringhead.base_model": "Qwen/Qwen3.5-0.8B",
    "scoringhead.runtime_gguf_sha256": SHA,
    "scoringhead.feature_tap": "post_block14_residual_before_block15",
}
HEAD_TENSORS = {"attn_q.weight": (32, 64), "attn_k.weight": (32, 16)}
PROBE_KEYS: dict[str, Any] = {
    "general.architecture": "segmentprobe",
    "segmentprobe.schema": "qwen3_5_0_8b_segment_probe_v1",
    "segmentprobe.base_model": "Qwen/Qwen3.5-0.8B",
    "segmentprobe.runtime_gguf_sha256": SHA,
    "segmentprobe.feature_tap": "post_block14_residual_before_block15",
    "segmentprobe.threshold": 0.5,
    "segmentprobe.norm_eps": 1e-5,
    "segmentprobe.min_segment": 4,
    "segmentprobe.max_segment": 64,
    "segmentprobe.conv_taps": 5,
}
PROBE_TENSORS: dict[str, tuple[int, ...]] = {
    "norm.weight": (32,),
    "norm.bias": (32,),
    "fc1.weight": (32, 8),
    "fc1.bias": (8,),
    "fc2.weight": (8,),
    "fc2.bias": (1,),
    "conv.weight": (5,),
    "conv.bias": (1,),
}
SUBUNIT = {f"subunit.{name}": PROBE_TENSORS[name] for name in ("fc2.weight", "fc2.bias", "conv.weight", "conv.bias")}


def scoring_file(path: Path, keys: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    builder = GgufBuilder()
    for key, value in keys.items():
        builder.key(key, {str: b.STRING, float: b.F32, int: b.U32}[type(value)], value)
    prefix = "scoringhead" if keys["general.architecture"] == "pflash_scoring_head" else "segmentprobe"
    for name, ne in tensors.items():
        builder.tensor(f"{prefix}.{name}", ne)
    return builder.write(path)


def test_scoring_head_and_probe(tmp_path: Path) -> None:
    report = sound(scoring_file(tmp_path / "head.gguf", HEAD_KEYS, HEAD_TENSORS))
    assert report["kind"] == "scoring_head"
    assert (report["config"]["n_embd"], report["config"]["query_rows"], report["config"]["key_rows"]) == (32, 64, 16)
    assert report["config"]["runtime_gguf_sha256"] == SHA
    report = sound(scoring_file(tmp_path / "probe.gguf", PROBE_KEYS, PROBE_TENSORS))
    assert report["kind"] == "segment_probe"
    assert report["config"]["parameters"] == 32 * 2 + 32 * 8 + 8 + 8 + 1 + 5 + 1
    assert (report["config"]["subunit"], report["config"]["gelu"]) == (False, "tanh")
    both = PROBE_KEYS | {"segmentprobe.schema": "qwen3_5_0_8b_segment_probe_v2", "segmentprobe.gelu": "erf"}
    report = sound(scoring_file(tmp_path / "both.gguf", both, PROBE_TENSORS | SUBUNIT))
    assert (report["config"]["subunit"], report["config"]["gelu"]) == (True, "erf")


@pytest.mark.parametrize(
    ("keys", "tensors", "named"),
    [
        ({"scoringhead.schema": "v0"}, {}, "scoringhead.schema"),
        ({"scoringhead.base_model": "other"}, {}, "base_model"),
        ({"scoringhead.feature_tap": "post_block13"}, {}, "feature_tap"),
        ({"scoringhead.runtime_gguf_sha256": "12"}, {}, "runtime_gguf_sha256"),
        ({}, {"attn_k.weight": None}, "attn_k.weight"),
        ({}, {"attn_k.weight": (33, 16)}, "attn_k.weight"),
        ({}, {"attn_q.weight": (32, 63)}, "attn_q.weight"),
        ({}, {"attn_q.weight": (32,)}, "2 dimensions"),
        ({}, {"extra": (1,)}, "unknown"),
    ],
)
def test_heads_that_are_wrong(tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], named: str) -> None:
    merged = {name: ne for name, ne in (HEAD_TENSORS | tensors).items() if ne is not None}
    message = problem(scoring_file(tmp_path / "x.gguf", HEAD_KEYS | keys, merged))
    assert named in message and "needed" in message


@pytest.mark.parametrize(
    ("keys", "tensors", "named"),
    [
        ({"segmentprobe.threshold": 1.0}, {}, "threshold"),
        ({"segmentprobe.threshold": 1}, {}, "threshold"),
        ({"segmentprobe.norm_eps": -1.0}, {}, "norm_eps"),
        ({"segmentprobe.min_segment": 0}, {}, "min_segment"),
        ({"segmentprobe.max_segment": 3}, {}, "max_segment"),
        ({"segmentprobe.conv_taps": 4}, {}, "odd"),
        ({"segmentprobe.conv_taps": 3}, {}, "conv.weight"),
        ({"segmentprobe.gelu": "relu"}, {}, "gelu"),
        ({}, {"fc1.weight": (16, 8)}, "fc1.weight"),
        ({}, {"fc2.weight": (9,)}, "fc2.weight"),
        ({}, {"norm.bias": None}, "norm.bias"),
        ({}, {"subunit.fc2.weight": (8,)}, "subunit.conv.weight"),
    ],
)
def test_probes_that_are_wrong(tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any], named: str) -> None:
    merged = {name: ne for name, ne in (PROBE_TENSORS | tensors).items() if ne is not None}
    message = problem(scoring_file(tmp_path / "x.gguf", PROBE_KEYS | keys, merged))
    assert named in message and "needed" in message


def test_a_head_with_values_that_are_not_finite(tmp_path: Path) -> None:
    path = scoring_file(tmp_path / "x.gguf", HEAD_KEYS, HEAD_TENSORS)
    content = bytearray(path.read_bytes())
    content[-4:] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    assert "attn_k.weight" in problem(path)


# Damage


def test_damaged_files(tmp_path: Path) -> None:
    target = write_target_gguf(tmp_path / "target.gguf")
    (tmp_path / "cut.gguf").write_bytes(target.read_bytes()[:-9000])
    assert inspect(tmp_path / "cut.gguf")["sound"] is False
    (tmp_path / "empty").mkdir()
    assert inspect(tmp_path / "empty")["sound"] is False
    (tmp_path / "config.json").write_text("[1]")
    assert "not an object" in problem(tmp_path)
    for missing in (tmp_path / "none", "a\0b"):
        with pytest.raises(CheckpointError):
            inspect(missing)


def test_other_models_are_sound_but_nothing_of_ours(tmp_path: Path) -> None:
    report = sound(_gguf("llama").write(tmp_path / "x.gguf"))
    assert (report["kind"], report["architecture"]) == ("other", "llama")
    for odd in ({"general.architecture": 7}, {}):
        builder = GgufBuilder().key("x", b.U8, 1)
        for key, value in odd.items():
            builder.key(key, b.U32, value)
        assert sound(builder.write(tmp_path / "y.gguf"))["kind"] == "other"


def test_text_of_files_cannot_drive_a_terminal() -> None:
    assert printable("a\x1b[2Jb\udcff\n") == "a�[2Jb��"
