"""Targets that fit and do not, and arguments out of range."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from drafter_tools import MAX_DRAFT, TOLERANCE, PairFactory, draft_logits, random_features
from fixtures import drafter_config, drafter_tensors, write_drafter_dir
from laguna_gguf import LagunaError, load_drafter
from laguna_gguf.errors import ConfigError, TargetMismatchError
from reference.dflash_numpy import ReferenceDrafter, spread
from reference.laguna_numpy import ReferenceTarget
from tiny_models import TINY_TARGET, write_tiny_target


def test_live_target_equals_file(make_pair: PairFactory, tiny_target: Path, tmp_path: Path) -> None:
    pair = make_pair()
    write_drafter_dir(tmp_path / "model", seed=5)
    llm = llama_cpp.Llama(str(tiny_target), n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
    drafter = load_drafter(tmp_path / "model", target=llm, n_threads=1)
    features = random_features(30)
    pair.append(features)
    drafter.append_context(features)
    np.testing.assert_array_equal(draft_logits(drafter), draft_logits(pair.drafter))


def test_tied_target(tiny_drafter: Path, tmp_path: Path) -> None:
    config = replace(TINY_TARGET, tied=True)
    path = write_tiny_target(tmp_path / "tied.gguf", config, seed=4)
    target = ReferenceTarget(path)
    assert target.lm_head is target.embedding
    drafter = load_drafter(tiny_drafter, target=path, n_threads=1)
    reference = ReferenceDrafter(
        drafter_config(), drafter_tensors(drafter_config(), seed=2), target.embedding, target.lm_head
    )
    features = random_features(45)
    drafter.append_context(features)
    reference.append(features)
    assert spread(draft_logits(drafter), reference.draft(7, MAX_DRAFT)[1]) <= TOLERANCE


def test_without_target(tiny_drafter: Path) -> None:
    drafter = load_drafter(tiny_drafter, n_threads=1)
    drafter.append_context(random_features(40))
    assert drafter.position == 40
    with pytest.raises(TargetMismatchError):
        drafter.draft(1, 3)
    drafter.rollback(40)
    assert drafter.position == 40


@pytest.mark.parametrize(
    "overrides",
    [{"vocab_size": 321}, {"hidden_size": 32}, {"num_target_layers": 9}],
    ids=["vocabulary", "hidden_size", "layers"],
)
def test_wrong_target(tiny_target: Path, tmp_path: Path, overrides: dict[str, int]) -> None:
    write_drafter_dir(tmp_path / "model", **overrides)
    with pytest.raises(TargetMismatchError):
        load_drafter(tmp_path / "model", target=tiny_target, n_threads=1)


# Bad arguments.


@pytest.mark.parametrize("n", [0, -1, 16, 2**31, 2**70])
def test_n_out_of_range(make_pair: PairFactory, n: int) -> None:
    pair = make_pair()
    pair.append(random_features(4))
    with pytest.raises(ConfigError):
        pair.drafter.draft(1, n)
    pair.check()


@pytest.mark.parametrize("anchor", [-1, 320, 2**31, -(2**70)])
def test_anchor_out_of_range(make_pair: PairFactory, anchor: int) -> None:
    pair = make_pair()
    pair.append(random_features(4))
    with pytest.raises(ConfigError):
        pair.drafter.draft(anchor, 3)
    pair.check()


@pytest.mark.parametrize("window", ["", "PER_QUERY", "full", 512])
def test_unknown_window(make_pair: PairFactory, window: Any) -> None:
    pair = make_pair()
    pair.append(random_features(4))
    with pytest.raises(ConfigError):
        pair.drafter.draft(1, 3, window=window)
    pair.check()


@pytest.mark.parametrize(
    "features",
    [
        np.zeros((2, 2, 64), np.float32),
        np.zeros((2, 4, 64), np.float32),
        np.zeros((2, 3, 63), np.float32),
        np.zeros((2, 3, 65), np.float32),
        np.zeros((3, 64), np.float32),
        np.zeros((2, 192), np.float32),
        np.zeros((1, 2, 3, 64), np.float32),
        np.zeros((), np.float32),
        np.zeros((2, 3, 64), np.complex64),
        np.full((2, 3, 64), "x"),
    ],
    ids=lambda features: f"{features.dtype.kind}{features.shape}".replace(" ", ""),
)
def test_wrong_features(make_pair: PairFactory, features: Any) -> None:
    pair = make_pair()
    pair.append(random_features(4))
    with pytest.raises(LagunaError):
        pair.drafter.append_context(features)
    pair.check()


@pytest.mark.parametrize("start", [-1, 2**31 - 1, 2**31, 2**70])
def test_start_out_of_range(make_pair: PairFactory, start: int) -> None:
    pair = make_pair()
    with pytest.raises(LagunaError):
        pair.drafter.append_context(random_features(2), start)
    assert pair.drafter.position == 0
    pair.append(random_features(4))
    pair.check()
