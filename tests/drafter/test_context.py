"""The drafter's context: rollback, reset, holes, wild values, memory, always as from scratch."""

from pathlib import Path

import numpy as np
import pytest

from captured_llama import CapturedLlama, new_capture, prompt
from drafter_tools import (
    MAX_DRAFT,
    MODES,
    SAME,
    PairFactory,
    chunks,
    draft_logits,
    random_features,
    rollback_or_refuse,
)
from laguna_gguf.errors import CaptureError, ConfigError, RollbackError, TargetMismatchError
from reference.dflash_numpy import spread


def test_drafting_changes_no_state(make_pair: PairFactory) -> None:
    pair = make_pair()
    features = random_features(70, seed=3)
    pair.append(features[:50])
    first = draft_logits(pair.drafter)
    for n in (1, 15, 3):
        for mode in MODES:
            pair.drafter.draft(n, n, window=mode)
    assert pair.drafter.position == 50
    np.testing.assert_array_equal(draft_logits(pair.drafter), first)
    pair.append(features[50:])
    drafted_between = draft_logits(pair.drafter)
    pair.check()
    pair.drafter.reset()
    pair.drafter.append_context(features[:50])
    pair.drafter.append_context(features[50:])
    np.testing.assert_array_equal(draft_logits(pair.drafter), drafted_between)


def test_reset_leaves_nothing_behind(make_pair: PairFactory) -> None:
    pair = make_pair()
    features = random_features(12, seed=10)
    pair.append(features)
    fresh = draft_logits(pair.drafter)
    pair.reset()
    pair.append(random_features(100, seed=11), 77)
    pair.reset()
    assert pair.drafter.position == 0
    pair.append(features)
    np.testing.assert_array_equal(draft_logits(pair.drafter), fresh)
    pair.check()


@pytest.mark.parametrize("start", [0, 50])
@pytest.mark.parametrize("to", [0, 1, 12, 19, 20])
def test_rollback_and_append_again_equals_fresh(make_pair: PairFactory, start: int, to: int) -> None:
    pair = make_pair()
    features, other = random_features(20, seed=12), random_features(40, seed=13)
    pair.append(features, start)
    pair.drafter.rollback(start + to)
    pair.reference.rollback(start + to)
    pair.check()
    for piece in chunks(other, 9):
        pair.append(piece)
        pair.check()
    rolled_back = draft_logits(pair.drafter)
    pair.drafter.reset()
    pair.drafter.append_context(np.concatenate([features[:to], other]), start)
    assert spread(draft_logits(pair.drafter), rolled_back) <= SAME


@pytest.mark.parametrize("size", [3, 1000], ids=["in_chunks", "at_once"])
@pytest.mark.parametrize("window", [6, 32])
def test_rollback_across_the_wrap_is_exact_or_refused(make_pair: PairFactory, window: int, size: int) -> None:
    pair = make_pair(sliding_window=window)
    features = random_features(130, seed=14)
    for depth in range(1, 70):
        pair.reset()
        for piece in chunks(features[:120], size):
            pair.append(piece)
        rollback_or_refuse(pair, 120 - depth)
        pair.check(n=3)
        if depth % 9 == 1:
            for piece in chunks(features[120:], 4):
                pair.append(piece)
                pair.check()


@pytest.mark.parametrize("size", [50, 2000], ids=["in_chunks", "at_once"])
def test_rollback_too_deep(make_pair: PairFactory, size: int) -> None:
    pair = make_pair(sliding_window=6)
    for piece in chunks(random_features(2000, seed=15), size):
        pair.append(piece)
    before = draft_logits(pair.drafter)
    for position in (1000, 1, -1, 2001, 2**40, -(2**70)):
        with pytest.raises(RollbackError):
            pair.drafter.rollback(position)
        assert pair.drafter.position == 2000
    np.testing.assert_array_equal(draft_logits(pair.drafter), before)
    pair.append(random_features(4))
    pair.check()


def test_rollback_below_the_first_position(make_pair: PairFactory) -> None:
    pair = make_pair()
    pair.append(random_features(10), 100)
    with pytest.raises(RollbackError):
        pair.drafter.rollback(99)
    pair.check()
    pair.drafter.rollback(100)
    pair.reference.rollback(100)
    pair.check()


@pytest.mark.parametrize("start", [0, 9, 11, 1000])
def test_hole_is_refused(make_pair: PairFactory, start: int) -> None:
    pair = make_pair()
    pair.append(random_features(10))
    with pytest.raises(RollbackError):
        pair.drafter.append_context(random_features(3), start)
    pair.check()
    pair.append(random_features(3), 10)
    pair.check()


def test_no_rows_is_no_change(make_pair: PairFactory) -> None:
    pair = make_pair()
    pair.append(random_features(10))
    pair.drafter.append_context(random_features(0))
    pair.check()


def test_strided_features(make_pair: PairFactory) -> None:
    pair = make_pair()
    wide = random_features(60, n_captured=6, n_embd=128)
    pair.append(wide[::-2, ::2, 64:])
    pair.check()


def test_features_are_copied(make_pair: PairFactory) -> None:
    pair = make_pair()
    features = random_features(10)
    pair.append(features)
    features[:] = 0.0
    pair.check()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_features_leave_nothing_behind(make_pair: PairFactory, value: float) -> None:
    pair = make_pair()
    pair.append(random_features(20))
    bad = random_features(20)
    bad[3, 1, 7] = value
    with pytest.raises(ConfigError):
        pair.drafter.append_context(bad)
    pair.check()


def test_huge_features_do_not_overflow(make_pair: PairFactory) -> None:
    pair = make_pair()
    pair.append(random_features(20))
    pair.append(random_features(5) * np.float32(1e12))
    pair.append(random_features(5) * np.float32(1e-12))
    pair.check()


def test_captured_rows_need_no_copy(make_pair: PairFactory, tiny_target: Path) -> None:
    pair = make_pair()
    capture = new_capture()
    llm = CapturedLlama(tiny_target, capture, n_ubatch=16)
    capture.begin()
    llm.decode_all(prompt(60))
    native = pair.drafter._native
    native.append_captured(capture, 0, 25, 0)
    native.append_captured(capture, 25, 10, 25)
    for first_row, n_rows in ((-1, 2), (0, 61), (60, 1), (5, -1)):
        with pytest.raises(CaptureError):
            native.append_captured(capture, first_row, n_rows, 35)
    with pytest.raises(RollbackError):
        native.append_captured(capture, 36, 5, 36)
    with pytest.raises(TargetMismatchError):
        other = new_capture((1, 4))
        native.append_captured(other, 0, 0, 35)
    assert pair.drafter.position == 35
    pair.reference.append(capture.rows()[:35])
    pair.check()


def test_memory_is_flat(make_pair: PairFactory) -> None:
    pair = make_pair()
    features = random_features(16)
    pair.drafter.append_context(random_features(100))
    sizes = []
    for _ in range(2):
        for n in range(1, MAX_DRAFT + 1):
            pair.drafter.append_context(features[:n])
            pair.drafter.draft(n, n)
        sizes.append(pair.drafter.memory())
    assert sizes[0] == sizes[1]
    assert sizes[0]["context_cache"] <= 4 * (32 + 64) * 2 * 32 * 3, "a cache of about W rows of f32 keys and values"


def test_two_drafters_share_nothing(make_pair: PairFactory) -> None:
    one, other = make_pair(), make_pair(sliding_window=6)
    for row, features in enumerate(chunks(random_features(40), 4)):
        one.append(features)
        other.append(features[:2], None if row else 17)
        one.check(n=3)
        other.check(n=3)
