"""Drafter logits against the numpy reference: windows, wraps, positions, draft lengths, shapes, ties."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo_pair.target_gguf import random_target
from drafter_tools import (
    MAX_DRAFT,
    MODES,
    SAME,
    TOLERANCE,
    VISIBLE,
    Features,
    PairFactory,
    chunks,
    draft_logits,
    random_features,
)
from fixtures import drafter_config, write_drafter_dir
from laguna_gguf import load_drafter
from reference.dflash_numpy import ReferenceDrafter, Window, spread
from reference.laguna_numpy import ReferenceTarget
from tiny_models import TINY_TARGET, write_tiny_target


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
