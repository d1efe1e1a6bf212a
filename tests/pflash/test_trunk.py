"""The drafter's trunk in llama.cpp: the tap against transformers, micro-batches, growth, refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from laguna_gguf.errors import CheckpointError, ConfigError, DecodeError, ScorerError
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.trunk import Trunk
from random_drafter import TINY_QWEN3, TINY_QWEN35, random_tensors, write_drafter
from scorer_fixtures import EXACT, random_ids
from tap_model import TAP_SEED, TAP_SHAPE, weights_checksum

DATA = Path(__file__).parents[1] / "data" / "qwen35_tap.npz"


def test_tap_is_that_of_transformers(tmp_path: Path) -> None:
    stored = np.load(DATA)
    tensors = random_tensors(TAP_SHAPE, TAP_SEED)
    np.testing.assert_allclose(weights_checksum(tensors), stored["checksum"], rtol=1e-12)
    trunk = Trunk(str(write_drafter(tmp_path / "d.gguf", TAP_SHAPE, tensors)), **EXACT)
    taps = trunk.taps(stored["ids"])
    assert taps.dtype == np.float32 and taps.shape == stored["taps"].shape
    assert np.abs(taps - stored["taps"]).max() <= 1e-4 * stored["taps"].std()


@pytest.mark.parametrize("n_ubatch", [64, 96, 256])
def test_micro_batches_of_64_and_more_change_nothing(qwen35: Path, n_ubatch: int) -> None:
    ids = random_ids(500)
    whole = Trunk(str(qwen35), **EXACT).taps(ids)
    assert np.array_equal(Trunk(str(qwen35), n_ubatch=n_ubatch, **EXACT).taps(ids), whole)


def test_single_row_batches_change_rounding_only(qwen35: Path) -> None:
    ids = random_ids(40)
    whole = Trunk(str(qwen35), **EXACT).taps(ids)
    single = Trunk(str(qwen35), n_ubatch=1, **EXACT).taps(ids)
    assert np.abs(single - whole).max() <= 1e-3 * whole.std()


def test_graph_ends_at_the_tap(tmp_path: Path, qwen35: Path) -> None:
    """Weights behind the tap are never computed with."""
    tensors = random_tensors(TINY_QWEN35)
    for name in tensors:
        if name.startswith(("blk.15.", "blk.16.", "output_norm")):
            tensors[name] = np.full_like(tensors[name], np.nan)
    broken = write_drafter(tmp_path / "broken.gguf", tensors=tensors)
    ids = random_ids(30)
    assert np.array_equal(Trunk(str(broken), **EXACT).taps(ids), Trunk(str(qwen35), **EXACT).taps(ids))


def test_context_grows_up_to_the_files(tmp_path: Path) -> None:
    shape = replace(TINY_QWEN35, context_length=2300)
    trunk = Trunk(str(write_drafter(tmp_path / "d.gguf", shape)), **EXACT)
    assert trunk.limit == 2300
    ids = random_ids(2300)
    short = trunk.taps(ids[:100])
    long = trunk.taps(ids)
    assert np.array_equal(long[:100], short)
    with pytest.raises(ConfigError, match="2301 tokens exceed the drafter's context of 2300"):
        trunk.taps(random_ids(2301))
    assert np.array_equal(trunk.taps(ids[:100]), short)


def test_sequences_survive_growth(qwen35: Path) -> None:
    trunk = Trunk(str(qwen35), n_sequences=2, **EXACT)
    ids = random_ids(2100)
    rows: list[np.ndarray] = []
    trunk.context.reserve(1000, 1)
    trunk.run(1, ids[:1000], lambda *_: None)
    trunk.context.reserve(2100)
    assert trunk.context.positions == [0, 1000]
    trunk.run(1, ids[1000:], lambda capture, *_: rows.append(capture.rows()[:, 0]))
    assert np.array_equal(np.concatenate(rows), trunk.taps(ids)[1000:])


def test_configured_context_is_the_limit(qwen35: Path) -> None:
    trunk = Trunk(str(qwen35), n_ctx=200, **EXACT)
    assert trunk.limit == 200 and len(trunk.taps(random_ids(200))) == 200
    with pytest.raises(ConfigError, match="exceed the drafter's context of 200"):
        trunk.taps(random_ids(201))


def test_qwen3_is_tapped_after_block_12(qwen3: Path) -> None:
    trunk = Trunk(str(qwen3), **EXACT)
    assert trunk.file.block == 13 and not trunk.model.is_recurrent
    assert trunk.taps(random_ids(20)).shape == (20, TINY_QWEN3.n_embd)


@pytest.mark.parametrize("ids", [[], [-1], [TINY_QWEN35.n_vocab], [[1, 2]], [1.5], None, ["a"], [2**40]])
def test_ids_are_checked(qwen35: Path, ids: object) -> None:
    with pytest.raises(ConfigError):
        Trunk(str(qwen35), **EXACT).taps(ids)


def test_weights_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_QWEN35)
    tensors["blk.3.ffn_down.weight"][5, 5] = np.nan
    trunk = Trunk(str(write_drafter(tmp_path / "nan.gguf", tensors=tensors)), **EXACT)
    with pytest.raises(ScorerError, match="not finite"):
        trunk.taps(random_ids(20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 15}, "needs at least 16 blocks"),
        ({"full_attention_interval": 5}, "block 15 is not a full-attention block"),
        ({"arch": "qwen3", "n_layer": 13, "n_rot": 32}, "needs at least 14 blocks"),
    ],
)
def test_files_that_cannot_score_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    path = write_drafter(tmp_path / "d.gguf", replace(TINY_QWEN35, **changes))
    with pytest.raises(CheckpointError, match=message):
        Trunk(str(path), **EXACT)


@pytest.mark.parametrize("name", ["attn_qkv.weight", "attn_gate.weight"])
def test_blocks_that_llama_cpp_would_crash_on_are_refused(tmp_path: Path, name: str) -> None:
    for layer in (0, 16):
        tensors = random_tensors(TINY_QWEN35)
        del tensors[f"blk.{layer}.{name}"]
        with pytest.raises(CheckpointError, match=f"tensor blk.{layer}.{name} is missing"):
            Trunk(str(write_drafter(tmp_path / "d.gguf", tensors=tensors)), **EXACT)


@pytest.mark.parametrize(
    "metadata",
    [{"rope.dimension_count": 7}, {"rope.dimension_count": 34}, {"attention.value_length": 0}, {"ssm.inner_size": 16}],
)
def test_lengths_that_llama_cpp_would_crash_on_are_refused(tmp_path: Path, metadata: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(metadata))} is"):
        DrafterFile(write_drafter(tmp_path / "d.gguf", metadata=metadata))


def test_qwen3_turns_whole_heads(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "d.gguf", TINY_QWEN3, metadata={"rope.dimension_count": 16})
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count is 16"):
        DrafterFile(path)


def test_prediction_blocks_do_not_count(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "d.gguf", replace(TINY_QWEN35, n_layer=16), metadata={"nextn_predict_layers": 1})
    with pytest.raises(CheckpointError, match="has 15 blocks"):
        DrafterFile(path)


def test_prediction_blocks_are_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As in published Qwen3.5 files: a block of full attention behind the model's own, for multi-token prediction."""
    shape = replace(TINY_QWEN35, n_layer=16)
    tensors = random_tensors(shape)
    expected = Trunk(write_drafter(tmp_path / "plain.gguf", shape, tensors), **EXACT).taps(random_ids(50))
    extra = {name.replace(".15.", ".16."): tensor for name, tensor in tensors.items() if ".15." in name}
    extra["blk.16.nextn.eh_proj.weight"] = np.zeros((shape.n_embd, 2 * shape.n_embd), np.float32)
    extra |= {f"blk.16.nextn.{name}.weight": np.ones(shape.n_embd, np.float32) for name in ("enorm", "hnorm")}
    metadata = {"block_count": 17, "nextn_predict_layers": 1}
    path = write_drafter(tmp_path / "mtp.gguf", shape, tensors | extra, metadata=metadata)
    assert np.array_equal(Trunk(path, **EXACT).taps(random_ids(50)), expected)
    assert capfd.readouterr().err == ""


def test_other_files_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    with pytest.raises(CheckpointError, match="architecture 'laguna'"):
        Trunk(str(tiny_target), **EXACT)
    with pytest.raises(CheckpointError, match="not found"):
        Trunk(str(tmp_path / "absent.gguf"), **EXACT)


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "attn_norm", "attn_q_norm", "attn_k_norm"])
def test_scoring_tensors_are_checked(tmp_path: Path, name: str) -> None:
    full = f"blk.15.{name}.weight"
    tensors = random_tensors(TINY_QWEN35)
    kept = {key: tensor for key, tensor in tensors.items() if key != full}
    with pytest.raises(CheckpointError, match=f"tensor {full} is missing"):
        DrafterFile(write_drafter(tmp_path / "missing.gguf", tensors=kept)).scoring_weights()
    kept[full] = np.concatenate([tensors[full], tensors[full]])
    with pytest.raises(CheckpointError, match=f"tensor {full} has shape"):
        DrafterFile(write_drafter(tmp_path / "shape.gguf", tensors=kept)).scoring_weights()
    kept[full] = np.full_like(tensors[full], np.inf)
    with pytest.raises(CheckpointError, match=f"tensor {full} holds values that are not finite"):
        DrafterFile(write_drafter(tmp_path / "inf.gguf", tensors=kept)).scoring_weights()


@pytest.mark.parametrize(
    "keywords", [{"n_ubatch": 0}, {"n_threads": -1}, {"draft_model": None}, {"type_k": 99}, {"main_gpu": "x"}]
)
def test_settings_are_checked(qwen35: Path, keywords: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(keywords)) if "main_gpu" not in keywords else "wrong type"):
        Trunk(str(qwen35), **keywords)


def test_settings_of_llama_are_taken(qwen35: Path) -> None:
    ids = random_ids(20)
    keywords = {"seed": 1, "logits_all": True, "n_gpu_layers": -1, "use_mmap": False, "yarn_ext_factor": -1.0}
    assert np.array_equal(Trunk(str(qwen35), **EXACT, **keywords).taps(ids), Trunk(str(qwen35), **EXACT).taps(ids))
    stretched = Trunk(str(qwen35), **EXACT, rope_freq_scale=0.5).taps(ids)
    assert not np.array_equal(stretched, Trunk(str(qwen35), **EXACT).taps(ids))


def test_closed_trunk_is_an_error_not_a_crash(qwen35: Path) -> None:
    trunk = Trunk(str(qwen35), **EXACT)
    trunk.taps(random_ids(5))
    trunk.close()
    trunk.close()
    with pytest.raises(DecodeError, match="closed"):
        trunk.taps(random_ids(5))


def test_vocabulary(qwen35: Path) -> None:
    model = Trunk(str(qwen35), **EXACT).model
    text = "<|im_start|>user\nWas ist größer, 3 oder 5?<|im_end|>"
    ids = model.tokenize(text)
    assert ids[0] == 1 and ids[-1] == 2  # control tokens
    assert model.detokenize_bytes(ids).decode() == text
    assert len(model.tokenize("")) == 0 and model.detokenize_bytes(ids[:0]) == b""
