"""From masses to candidates and budgets: chunks, scores, what must be kept, and the arithmetic of ratios."""

import math
import random

import numpy as np
import pytest

from laguna_gguf.errors import BudgetError, ConfigError, LagunaError, QueryError, SelectionError
from laguna_gguf.pflash import budget, candidates
from laguna_gguf.pflash.legacy import select_chunks


@pytest.mark.parametrize(("n", "size"), [(1, 128), (499, 128), (500, 512), (2999, 512), (3000, 1024), (262_144, 1024)])
def test_chunk_size_by_length(n: int, size: int) -> None:
    assert candidates.chunk_size_for(n) == size


def test_fixed_chunks() -> None:
    assert candidates.fixed_chunks(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert candidates.fixed_chunks(3, 4) == [(0, 3)]
    assert candidates.fixed_chunks(8, 4) == [(0, 4), (4, 8)]


def test_cut_chunks() -> None:
    spans = candidates.cut_chunks(20, 8, (18, 20), [(3, 5), (8, 9)])
    assert spans == [(0, 3), (3, 5), (5, 8), (8, 9), (9, 16), (16, 18), (18, 20)]
    assert candidates.cut_chunks(8, 8, (0, 8), []) == [(0, 8)]


def test_scores_of_ranges() -> None:
    mass = [0.1, 0.2, 0.3, 0.15, 0.25]
    spans = [(0, 2), (2, 3), (4, 5), (0, 5)]
    assert candidates.range_scores(mass, spans, "sum") == pytest.approx([0.3, 0.3, 0.25, 1.0])
    assert candidates.range_scores(mass, spans, "density") == pytest.approx([0.15, 0.3, 0.25, 0.2])
    assert candidates.range_scores(mass, spans, "mean") == pytest.approx([0.15, 0.3, 0.25, 0.2])
    assert candidates.lifts(mass, spans) == pytest.approx([0.75, 1.5, 1.25, 1.0])
    assert candidates.range_scores(mass, [], "sum").size == 0


def test_mixed_windows() -> None:
    rows = [[0.2, 0.3, 0.5], [0.6, 0.4, 0.0], [0, 0, 1], [1, 0, 0]]  # two query rows of two heads
    assert candidates.mix(rows, [1, 1, 1, 1]) == pytest.approx([0.45, 0.175, 0.375])
    assert candidates.mix(rows[:2], [1, 0.5]) == pytest.approx([0.5 / 1.5, 0.5 / 1.5, 0.5 / 1.5])


def test_small_masses_survive_large_neighbours() -> None:
    """Sums are not differences of a running total, which would lose them."""
    mass = [1.0, 1e-17, 1e-17, 1e-18]
    assert candidates.range_scores(mass, [(1, 3), (3, 4)], "sum") == pytest.approx([2e-17, 1e-18], rel=1e-12)


def test_what_must_be_kept() -> None:
    spans = [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]
    kept = candidates.mandatory(spans, (9, 10), [(3, 4), (7, 9)])
    assert kept.tolist() == [True, True, True, True, True]  # the last two end behind the query
    kept = candidates.mandatory(spans, (9, 10), [(3, 4)], suffix_candidates=True)
    assert kept.tolist() == [True, False, True, False, False]
    assert candidates.mandatory(spans, (11, 12)).tolist() == [False, False, True, True, True]
    assert candidates.mandatory(spans, (8, 12), suffix_candidates=True).tolist() == [False, False, True, False, False]
    assert candidates.mandatory([], (0, 1)).tolist() == []


def test_overlaps_against_every_pair() -> None:
    rng = random.Random(1)
    for _ in range(300):
        edges = sorted(rng.sample(range(60), 2 * rng.randint(0, 6)))
        pins = list(zip(edges[::2], edges[1::2], strict=True))
        spans = [(b, b + rng.randint(1, 9)) for b in rng.sample(range(60), rng.randint(0, 12))]
        expected = [any(b < e2 and b2 < e for b2, e2 in pins) for b, e in spans]
        assert candidates.overlaps(spans, pins).tolist() == expected


def test_merge() -> None:
    assert candidates.merge([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == [(0, 3), (5, 9)]


def probe(n: int, *peaks: int) -> np.ndarray:
    scores = np.zeros(n, dtype=np.float32)
    scores[list(peaks)] = 0.99
    return scores


def test_probe_segments() -> None:
    limits = dict(threshold=0.9, min_segment=2, max_segment=30)
    scores = probe(40, 5, 10, 15, 20, 35, 37)
    # boundaries in and behind the query do not count and do not cut
    assert candidates.probe_segments(scores, (34, 40), required=[(12, 13)], **limits) == [
        *[(0, 5), (5, 10), (10, 12), (12, 13), (13, 15), (15, 20), (20, 34), (34, 40)]
    ]
    assert scores[35] > 0.9  # the caller's array is not written to
    assert candidates.probe_segments(probe(40, 5, 10, 15, 35, 37), (34, 40), **limits) is None
    assert candidates.probe_segments(probe(40, 5, 10, 15), (34, 40), at_least=0, **limits) is not None
    behind = candidates.probe_segments(probe(40, 5, 10, 15, 37), (33, 35), suffix_candidates=True, **limits)
    assert behind == [(0, 5), (5, 10), (10, 15), (15, 33), (33, 35), (35, 37), (37, 40)]


def test_make_candidates() -> None:
    rows = candidates.make_candidates([0.25, 0.25, 0.5, 0.0], [(0, 2), (2, 3), (3, 4)], "density", (3, 4))
    assert rows == [(0, 0, 2, 0.25, False), (1, 2, 3, 0.5, False), (2, 3, 4, 0.0, True)]


@pytest.mark.parametrize(
    "spans",
    [
        [(i, i + 1) for i in range(65)],
        [(0, 4), (3, 6)],
        [(4, 6), (0, 2)],
        [(-1, 2)],
        [(4, 4)],
        [(4, 3)],
        [(90, 101)],
        [(1, 2, 3)],
        [(1.5, 2)],
        [7],
        ["ab"],
    ],
)
def test_required_spans_refused(spans: list) -> None:
    with pytest.raises(SelectionError) as caught:
        candidates.check_required(spans, 100)
    assert caught.value.stop_reason == "invalid_input"


def test_required_spans() -> None:
    spans = [(i, i + 1) for i in range(64)]
    assert candidates.check_required(np.array(spans), 64) == spans
    assert candidates.check_required([], 64) == []


@pytest.mark.parametrize("query", [(0, 2), (-3, 2), (5, 5), (6, 5), (5, 11), (1, 6), (1,), None, (1.5, 2)])
def test_query_refused(query: object) -> None:
    with pytest.raises(QueryError):
        candidates.check_query(query, 10, limit=4)


def test_query_accepted() -> None:
    assert candidates.check_query((6, 10), 10, limit=4) == (6, 10)
    assert candidates.check_query(np.array([1, 2]), 10, limit=4) == (1, 2)


def test_ratios_are_rounded_once() -> None:
    assert budget.transport_budget(120_000, 16384 / 120_000) == 16384
    as_text = f"{16384 / 120_000:.9g}"  # how the ratio travels on a text wire
    assert math.floor(120_000 * float(as_text)) == 16383
    assert budget.transport_budget(120_000, float(as_text)) == 16384
    assert budget.check_keep_ratio(0.1) == float(np.float32(0.1)) != 0.1


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, math.inf, None, "much", "0.5", True, 1e300, 10**400])
def test_bad_ratios(ratio: object) -> None:
    with pytest.raises(ConfigError, match="keep_ratio"):
        budget.check_keep_ratio(ratio)


def test_budget_over_what_may_be_dropped() -> None:
    full = budget.droppable_budget(1000, 128, 0.1)
    # 128 + 0.1 * 872 + 1 = 216.2
    assert (full.tokens, full.kept) == (216, 128) and full.ceiling(500) == 108
    assert budget.droppable_budget(1000, 128, 0.0).tokens == 128  # 129 / 1000 is less as a float32
    assert budget.droppable_budget(1000, 1000, 0.0).tokens == 1000
    assert budget.droppable_budget(1000, 128, 1.0) == budget.Budget(1.0, 128, 1000)
    for n, kept in ((0, 0), (10, 11), (10, -1)):
        with pytest.raises(BudgetError):
            budget.droppable_budget(n, kept, 0.1)


def test_budget_always_covers_what_is_kept() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        n = rng.randint(1, 262_144)
        kept = rng.randint(0, n)
        whole = budget.droppable_budget(n, kept, rng.choice((0.0, rng.random())))
        assert kept <= whole.tokens <= n and whole.ratio == float(np.float32(whole.ratio))


def test_kept_tokens() -> None:
    assert budget.kept_tokens(1000, 128, (999, 1000)) == 1000 - 7 * 128
    assert budget.kept_tokens(1000, 128, (999, 1000), [(0, 1), (100, 130)]) == 256 + 1000 - 7 * 128
    assert budget.kept_tokens(1000, 128, (300, 301)) == 1000 - 2 * 128
    assert budget.kept_tokens(1000, 128, (300, 301), suffix_candidates=True) == 128


def test_tightening() -> None:
    # over by 10 of 100: the budget shrinks by (100 - 10 - 1) / 100
    assert budget.tightened(200, 100, 110) == 178
    assert budget.tightened(3, 100, 101) == 2
    for spent in (199, 250):
        with pytest.raises(BudgetError, match="no smaller budget"):
            budget.tightened(200, 100, spent)
    with pytest.raises(BudgetError):
        budget.tightened(200, 0, 5)


def test_droppable_target_tokens() -> None:
    assert budget.droppable_target_tokens(50_000, 40_000, 8_000) == 40_000
    assert budget.droppable_target_tokens(0, 0, 0) == 0


def chunk_numbers(spans: list[tuple[int, int]]) -> list[int]:
    return [chunk for begin, end in spans for chunk in range(begin // 32, -(-end // 32))]


def test_legacy_chunks_ends_then_anchors_then_scores() -> None:
    n = 32 * 64
    ids = np.arange(n)
    ids[20 * 32 - 2 : 20 * 32 + 2] = ids[-8:-4]  # a phrase of the tail, across chunks 19 and 20
    scores = np.zeros(n)
    scores[15 * 32 : 16 * 32] = 3.0
    scores[12 * 32 : 13 * 32] = 2.0
    ends = [*range(8), *range(40, 64)]
    assert chunk_numbers(select_chunks(ids, scores, 32 / 64)) == ends
    assert chunk_numbers(select_chunks(ids, scores, 33 / 64)) == sorted([*ends, 19])
    assert chunk_numbers(select_chunks(ids, scores, 34 / 64)) == sorted([*ends, 19, 20])
    assert chunk_numbers(select_chunks(ids, scores, 36 / 64)) == sorted([*ends, 19, 20, 15, 12])
    assert select_chunks(ids, scores, 1.0) == [(0, n)]


def test_legacy_ends_shrink_with_the_budget() -> None:
    ids = np.arange(32 * 128)
    assert chunk_numbers(select_chunks(ids, np.zeros(ids.size), 0.125)) == [*range(4), *range(116, 128)]
    assert chunk_numbers(select_chunks(ids, np.zeros(ids.size), 0.0)) == [127]
    assert select_chunks(ids[:-3], np.zeros(ids.size - 3), 0.0) == [(4064, 4093)]
    assert select_chunks([5], [0.1], 0.5) == [(0, 1)]


@pytest.mark.parametrize(
    ("ids", "scores"), [([], []), ([1, 2], [0.5]), ([1, 2], [0.5, math.nan]), ([[1], [2]], [[1.0], [2.0]])]
)
def test_legacy_refuses(ids: list, scores: list) -> None:
    with pytest.raises(LagunaError):
        select_chunks(ids, scores, 0.5)
