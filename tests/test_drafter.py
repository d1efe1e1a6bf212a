"""The native drafter against the numpy reference: logits, windows, positions, rollback, ties, bad arguments.

All weights are f32 and all norms random in [0.5, 1.5]; with the unit norms of published checkpoints most mistakes
vanish.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray

from captured_llama import CapturedLlama, new_capture, prompt
from demo_pair.target_gguf import random_target
from fixtures import drafter_config, drafter_tensors, write_drafter_dir
from laguna_gguf import Drafter, LagunaError, load_drafter
from laguna_gguf.errors import CaptureError, ConfigError, RollbackError, TargetMismatchError
from reference.dflash_numpy import Array, ReferenceDrafter, Window, spread
from reference.laguna_numpy import ReferenceTarget
from tiny_models import TINY_TARGET, write_tiny_target

TOLERANCE = 1e-3
"""Largest difference to the reference, in units of the reference logits' standard deviation."""
SAME = 1e-5
"""The same between two native drafters that hold the same rows in another place of the ring."""
VISIBLE = 1e-2
"""What a mistake must move the logits by to be seen for certain."""

MAX_DRAFT = 15
MODES: tuple[Window, ...] = ("per_query", "anchored")
Features = NDArray[np.float32]


def random_features(n_rows: int, *, n_captured: int = 3, n_embd: int = 64, seed: int = 0) -> Features:
    """Rows like captured residuals: each layer with a scale of its own."""
    rng = np.random.default_rng(seed)
    scale = np.linspace(1.0, 4.0, n_captured)[:, None]
    return (rng.standard_normal((n_rows, n_captured, n_embd)) * scale).astype(np.float32)


def chunks(features: Features, size: int) -> Iterator[Features]:
    """Consecutive pieces of `size` rows."""
    for begin in range(0, len(features), size):
        yield features[begin : begin + size]


@dataclass
class Pair:
    """A native drafter and the reference with the same weights, fed the same rows."""

    drafter: Drafter
    reference: ReferenceDrafter
    window: int

    def reset(self) -> None:
        self.drafter.reset()
        self.reference.reset()

    def append(self, features: Features, start: int | None = None) -> None:
        self.drafter.append_context(features, start)
        self.reference.append(features, start)

    def check(self, anchor: int = 7, n: int = MAX_DRAFT, modes: tuple[Window, ...] = MODES) -> None:
        """Both drafts agree in position, tokens and logits."""
        assert self.drafter.position == self.reference.position
        for mode in modes:
            block = self.drafter.draft(anchor, n, window=mode, return_logits=True)
            _, logits = self.reference.draft(anchor, n, mode)
            assert block.logits is not None
            assert block.logits.dtype == np.float32 and block.logits.shape == logits.shape
            assert spread(block.logits, logits) <= TOLERANCE, (mode, self.drafter.position, n)
            assert block.tokens.dtype == np.int32
            np.testing.assert_array_equal(block.tokens, block.logits.argmax(axis=1))


PairFactory = Callable[..., Pair]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> ReferenceTarget:
    return ReferenceTarget(tiny_target)


@pytest.fixture(scope="module")
def make_pair(tiny_target: Path, target: ReferenceTarget, tmp_path_factory: pytest.TempPathFactory) -> PairFactory:
    """Pair of given config.json overrides, reset; loaded once a module for each distinct request."""
    loaded: dict[str, Pair] = {}

    def make(**overrides: Any) -> Pair:
        key = repr(sorted(overrides.items()))
        if key not in loaded:
            path = tmp_path_factory.mktemp("drafter") / "model"
            tensors = write_drafter_dir(path, seed=5, **overrides)
            config = drafter_config(**overrides)
            reference = ReferenceDrafter(config, tensors, target.embedding, target.lm_head)
            loaded[key] = Pair(load_drafter(path, target=tiny_target, n_threads=1), reference, config["sliding_window"])
        loaded[key].reset()
        return loaded[key]

    return make


def draft_logits(drafter: Drafter, n: int = MAX_DRAFT, *, anchor: int = 7, window: str | None = None) -> Features:
    """Logits [n, n_vocab] of one draft."""
    logits = drafter.draft(anchor, n, window=window, return_logits=True).logits
    assert logits is not None
    return logits


# The reference itself.


def reference_drafter(
    target: ReferenceTarget, cls: type[ReferenceDrafter] = ReferenceDrafter, **overrides: Any
) -> ReferenceDrafter:
    """A reference alone; overrides are config.json fields, or `weights` (a function that edits the tensors)."""
    edit = overrides.pop("weights", None)
    config = drafter_config(**overrides)
    tensors = drafter_tensors(config, seed=5)
    if edit is not None:
        edit(tensors)
    return cls(config, tensors, target.embedding, target.lm_head)


class WithoutAuxNorm(ReferenceDrafter):
    def captured_slice(self, i: int, h: Array) -> Array:
        return h


class WithoutContextInputNorm(ReferenceDrafter):
    def context_input(self, layer: int, c: Array) -> Array:
        return c


def zero_gates(tensors: dict[str, Features]) -> None:
    for name in tensors:
        if name.endswith("g_proj.weight"):
            tensors[name] = np.zeros_like(tensors[name])


def unit_aux_norms(tensors: dict[str, Features]) -> None:
    for name in tensors:
        if name.startswith("aux_hidden_norms"):
            tensors[name] = np.ones_like(tensors[name])


def swap_query_and_key_norms(tensors: dict[str, Features]) -> None:
    for name in [name for name in tensors if name.endswith("q_norm.weight")]:
        other = name.replace("q_norm", "k_norm")
        tensors[name], tensors[other] = tensors[other], tensors[name]


@pytest.mark.parametrize(
    ("cls", "overrides", "layers"),
    [
        pytest.param(ReferenceDrafter, {"weights": zero_gates}, (1, 4, 7), id="gate_zeroed"),
        pytest.param(WithoutAuxNorm, {}, (1, 4, 7), id="aux_norm_skipped"),
        pytest.param(ReferenceDrafter, {"weights": unit_aux_norms}, (1, 4, 7), id="aux_weights_as_one"),
        pytest.param(WithoutContextInputNorm, {}, (1, 4, 7), id="context_without_input_layernorm"),
        pytest.param(ReferenceDrafter, {}, (0, 3, 6), id="ids_one_too_low"),
        pytest.param(ReferenceDrafter, {}, (2, 5, 7), id="ids_one_too_high"),
        pytest.param(ReferenceDrafter, {"sliding_window": 512}, (1, 4, 7), id="window_512"),
        pytest.param(ReferenceDrafter, {"sliding_window": 31}, (1, 4, 7), id="window_one_short"),
        pytest.param(ReferenceDrafter, {"sliding_window": 33}, (1, 4, 7), id="window_one_long"),
        pytest.param(ReferenceDrafter, {"rope_theta": 10000.0}, (1, 4, 7), id="rope_of_the_target"),
        pytest.param(ReferenceDrafter, {"weights": swap_query_and_key_norms}, (1, 4, 7), id="q_and_k_norms_swapped"),
        pytest.param(ReferenceDrafter, {"mask_token_id": 13}, (1, 4, 7), id="mask_off_by_one"),
    ],
)
def test_reference_sees_the_mistakes(
    target: ReferenceTarget, cls: type[ReferenceDrafter], overrides: dict[str, Any], layers: tuple[int, ...]
) -> None:
    residuals, _ = target.forward(np.random.default_rng(3).integers(0, 320, 90))
    right = reference_drafter(target)
    right.append(residuals[:, (1, 4, 7)])
    wrong = reference_drafter(target, cls, **overrides)
    wrong.append(residuals[:, layers])
    assert spread(wrong.draft(7, MAX_DRAFT)[1], right.draft(7, MAX_DRAFT)[1]) > VISIBLE


def test_reference_sees_shifted_positions_and_window_modes(target: ReferenceTarget) -> None:
    right, shifted = reference_drafter(target), reference_drafter(target)
    features = random_features(60)
    right.append(features)
    shifted.append(features, 1)
    # Rope is relative: a shift of the whole context alone must not matter.
    assert spread(shifted.draft(7, 5)[1], right.draft(7, 5)[1]) < 1e-9
    holed = reference_drafter(target)
    holed.append(features[:-1], 1)
    assert spread(holed.draft(7, 5)[1], right.draft(7, 5)[1]) > VISIBLE
    per_query, anchored = (right.draft(7, MAX_DRAFT, mode)[1] for mode in MODES)
    assert spread(anchored, per_query) > VISIBLE
    short = reference_drafter(target)
    short.append(features[: 32 - MAX_DRAFT])
    # The two modes differ only when cached rows + j > W - 1.
    np.testing.assert_allclose(short.draft(7, 14, "anchored")[1], short.draft(7, 14, "per_query")[1], atol=1e-12)


# Logits.


@pytest.mark.parametrize("window", [6, 32])
@pytest.mark.parametrize("size", [1, 5, 1000], ids=["row_by_row", "in_chunks", "at_once"])
def test_logits_around_every_wrap(make_pair: PairFactory, window: int, size: int) -> None:
    pair = make_pair(sliding_window=window)
    last = window - 1
    lengths = {1, 2, last - MAX_DRAFT, last - MAX_DRAFT + 1, last - 1, last, last + 1, last + 2}
    lengths |= {2 * last - 1, 2 * last, 2 * last + 1, 3 * last, 3 * last + 1, 100}
    features = random_features(100, seed=window)
    for n_rows in sorted(length for length in lengths if length > 0):
        pair.reset()
        for piece in chunks(features[:n_rows], size):
            pair.append(piece)
        pair.check()


def test_logits_at_every_length(make_pair: PairFactory) -> None:
    pair = make_pair(sliding_window=6)
    for row, features in enumerate(chunks(random_features(60, seed=1), 1)):
        pair.append(features)
        pair.check(anchor=row, n=1 + row % MAX_DRAFT)


@pytest.mark.parametrize("n", range(1, MAX_DRAFT + 1))
def test_every_draft_length(make_pair: PairFactory, n: int) -> None:
    pair = make_pair()
    pair.append(random_features(28, seed=n))
    pair.check(n=n)


def test_window_512_around_the_wrap(make_pair: PairFactory) -> None:
    pair = make_pair(sliding_window=512)
    features = random_features(520, seed=8)
    pair.append(features[:496])
    for n_rows in range(496, 521):
        pair.check()
        pair.append(features[n_rows : n_rows + 1])


@pytest.mark.parametrize("size", [100, 511, 512, 700, 2000])
def test_window_512_long_context(make_pair: PairFactory, size: int) -> None:
    pair = make_pair(sliding_window=512)
    for piece in chunks(random_features(2000, seed=9), size):
        pair.append(piece)
    pair.check()


@pytest.mark.parametrize("start", [1, 89, 4097, 131_000, 1_000_000])
def test_start_position_other_than_zero(make_pair: PairFactory, start: int) -> None:
    pair = make_pair()
    features = random_features(80, seed=start)
    pair.append(features[:20], start)
    assert pair.drafter.position == start + 20
    pair.check()
    pair.append(features[20:])
    pair.append(random_features(3), start + 80)
    pair.check()


def test_every_anchor_and_empty_context(make_pair: PairFactory) -> None:
    pair = make_pair()
    for anchor in (0, 12, 319):
        pair.check(anchor=anchor)
    pair.append(random_features(10))
    for anchor in range(0, 320, 11):
        pair.check(anchor=anchor, n=2)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 10},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 33},
        {"num_hidden_layers": 1, "target_layer_ids": [7]},
        {"num_hidden_layers": 2, "target_layer_ids": [0, 2, 6, 7]},
        {"block_size": 2},
        {"block_size": 5, "sliding_window": 2},
        {"block_size": 40, "sliding_window": 9},
        {"rope_theta": 1234.5, "rms_norm_eps": 1e-2},
    ],
    ids=lambda overrides: "-".join(f"{key}_{value}" for key, value in overrides.items()).replace(" ", ""),
)
def test_other_shapes(make_pair: PairFactory, overrides: dict[str, Any]) -> None:
    pair = make_pair(**overrides)
    n = overrides.get("block_size", 16) - 1
    features = random_features(70, n_captured=pair.reference.n_captured, seed=4)
    for piece in chunks(features, 13):
        pair.append(piece)
        pair.check(n=n)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_weights(
    make_pair: PairFactory, tiny_target: Path, target: ReferenceTarget, tmp_path: Path, dtype: str
) -> None:
    tensors = write_drafter_dir(tmp_path / "model", seed=5, dtype=dtype)
    reference = ReferenceDrafter(drafter_config(), tensors, target.embedding, target.lm_head)
    drafter = load_drafter(tmp_path / "model", target=tiny_target, n_threads=1)
    features = random_features(50)
    drafter.append_context(features)
    reference.append(features)
    # ggml rounds activations to the weights' type before the product.
    assert spread(draft_logits(drafter), reference.draft(7, MAX_DRAFT)[1]) <= 0.1


def test_context_trim_keeps_window_minus_one(make_pair: PairFactory) -> None:
    pair = make_pair(sliding_window=512)
    features = random_features(600, seed=6)
    pair.append(features)
    assert pair.drafter.position == 600
    pair.check()
    whole = {mode: draft_logits(pair.drafter, window=mode) for mode in MODES}
    pair.drafter.reset()
    pair.drafter.append_context(features[89:], 89)
    assert pair.drafter.position == 600
    for mode in MODES:
        assert spread(draft_logits(pair.drafter, window=mode), whole[mode]) <= SAME


def test_draft_block_is_causal_inside_the_proposal(make_pair: PairFactory) -> None:
    pair = make_pair()
    pair.append(random_features(40, seed=7))
    tokens = [7] + [pair.reference.mask_token] * MAX_DRAFT
    logits = pair.reference.block_logits(tokens)
    native = draft_logits(pair.drafter)
    assert spread(native, logits[1:]) <= TOLERANCE
    for j in range(1, MAX_DRAFT + 1):
        changed = pair.reference.block_logits([*tokens[:j], 99, *tokens[j + 1 :]])
        np.testing.assert_allclose(changed[:j], logits[:j], atol=1e-12)
        assert all(np.abs(changed[row] - logits[row]).max() > VISIBLE for row in range(j, MAX_DRAFT + 1))
        # Rows the native drafter does not compute cannot change the ones before them either.
        assert spread(draft_logits(pair.drafter, j), native[:j]) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_shorter_draft_is_a_prefix(make_pair: PairFactory, mode: Window) -> None:
    pair = make_pair()
    for piece in chunks(random_features(96, seed=2), 24):
        pair.append(piece)
        full = pair.drafter.draft(3, MAX_DRAFT, window=mode, return_logits=True)
        assert full.logits is not None
        for n in range(1, MAX_DRAFT):
            part = pair.drafter.draft(3, n, window=mode, return_logits=True)
            assert part.logits is not None
            np.testing.assert_array_equal(part.tokens, full.tokens[:n])
            assert spread(part.logits, full.logits[:n]) <= 1e-6
            np.testing.assert_array_equal(pair.drafter.draft(3, n, window=mode).tokens, part.tokens)


def test_default_window_is_per_query(make_pair: PairFactory) -> None:
    pair = make_pair()
    pair.append(random_features(40))
    default = draft_logits(pair.drafter)
    np.testing.assert_array_equal(default, draft_logits(pair.drafter, window="per_query"))
    assert spread(draft_logits(pair.drafter, window="anchored"), default) > VISIBLE


def test_logits_only_on_request(make_pair: PairFactory) -> None:
    pair = make_pair()
    pair.append(random_features(5))
    block = pair.drafter.draft(1, 4)
    assert block.logits is None
    assert block.tokens.shape == (4,) and block.tokens.dtype == np.int32


# Ties.


def repeated_head(n_distinct: int) -> dict[str, Features]:
    """An lm_head whose rows repeat after `n_distinct`, so that every maximum is a tie."""
    head = random_target(TINY_TARGET, 1)["output.weight"]
    return {"output.weight": head[np.arange(len(head)) % n_distinct]}


@pytest.mark.parametrize("n_distinct", [1, 2, 107, 160])
def test_ties_go_to_the_lowest_id(tiny_drafter: Path, tmp_path: Path, n_distinct: int) -> None:
    path = write_tiny_target(tmp_path / "ties.gguf", replaced=repeated_head(n_distinct))
    drafter = load_drafter(tiny_drafter, target=path, n_threads=1)
    drafter.append_context(random_features(20))
    for anchor in range(0, 320, 40):
        block = drafter.draft(anchor, MAX_DRAFT, return_logits=True)
        assert block.logits is not None
        # Every row has its maximum at least twice, bit-equal.
        assert ((block.logits == block.logits.max(axis=1, keepdims=True)).sum(axis=1) >= 2).all()
        np.testing.assert_array_equal(block.tokens, block.logits.argmax(axis=1))
        assert block.tokens.max() < n_distinct
        np.testing.assert_array_equal(drafter.draft(anchor, MAX_DRAFT).tokens, block.tokens)
        # The argmax of devices whose logits stay there.
        drafter._native.argmax_on_device = True
        np.testing.assert_array_equal(drafter.draft(anchor, MAX_DRAFT).tokens, block.tokens)
        drafter._native.argmax_on_device = False


def test_ties_of_a_f16_head(tiny_drafter: Path, tmp_path: Path) -> None:
    path = write_tiny_target(tmp_path / "ties-F16.gguf", dtype="f16", replaced=repeated_head(160))
    drafter = load_drafter(tiny_drafter, target=path, n_threads=1)
    drafter.append_context(random_features(20))
    block = drafter.draft(5, MAX_DRAFT, return_logits=True)
    assert block.logits is not None
    np.testing.assert_array_equal(block.tokens, block.logits.argmax(axis=1))
    assert block.tokens.max() < 160


# State.


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


def rollback_or_refuse(pair: Pair, position: int) -> None:
    """Roll both back, or see the drafter refuse for a good reason and keep its state."""
    before, first = pair.drafter.position, pair.reference.first_position
    try:
        pair.drafter.rollback(position)
    except RollbackError:
        assert pair.drafter.position == before
        lowest_needed = position - min(position - first, pair.window - 1)
        lowest_kept = before - min(before - first, pair.window - 1)
        assert lowest_needed < lowest_kept, "refused although every row it needs must be in the cache"
    else:
        pair.reference.rollback(position)


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


# Targets.


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


# Everything in any order.


class DrafterMachine(RuleBasedStateMachine):
    """Append, draft, roll back and reset in any order; the drafter always equals the reference."""

    pair: Pair
    n_appended: int

    @initialize()
    def begin(self) -> None:
        self.pair.reset()
        self.n_appended = 0

    def features(self, n_rows: int) -> Features:
        self.n_appended += 1
        return random_features(n_rows, seed=1000 + self.n_appended)

    @rule(n_rows=st.integers(1, 20))
    def append(self, n_rows: int) -> None:
        self.pair.append(self.features(n_rows))

    @rule(n_rows=st.integers(1, 6), hole=st.sampled_from([-3, -1, 1, 7]))
    def append_with_hole(self, n_rows: int, hole: int) -> None:
        if self.pair.reference.position == self.pair.reference.first_position:
            return
        start = max(0, self.pair.drafter.position + hole)
        with pytest.raises(RollbackError):
            self.pair.drafter.append_context(self.features(n_rows), start)

    @rule(anchor=st.integers(0, 319), n=st.integers(1, MAX_DRAFT), mode=st.sampled_from(MODES))
    def draft(self, anchor: int, n: int, mode: Window) -> None:
        self.pair.check(anchor, n, (mode,))

    @rule(depth=st.integers(0, 45))
    def rollback(self, depth: int) -> None:
        position = self.pair.drafter.position - depth
        if position < self.pair.reference.first_position:
            with pytest.raises(RollbackError):
                self.pair.drafter.rollback(position)
        else:
            rollback_or_refuse(self.pair, position)

    @rule(start=st.sampled_from([0, 1, 33, 500]), n_rows=st.integers(1, 12))
    def reset(self, start: int, n_rows: int) -> None:
        self.pair.reset()
        self.pair.append(self.features(n_rows), start)

    @invariant()
    def same_position(self) -> None:
        assert self.pair.drafter.position == self.pair.reference.position


@pytest.mark.parametrize("window", [6, 32])
def test_state_machine(make_pair: PairFactory, window: int) -> None:
    machine = type("Machine", (DrafterMachine,), {"pair": make_pair(sliding_window=window)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
