"""The strict selector, the split and the segmenter: known cases, refusals, an independent reference, properties."""

import math
import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laguna_gguf.errors import SelectionError
from laguna_gguf.pflash.selection import Candidate, Selection, segments, select, split
from reference.selection_slow import segments_slow, select_slow, split_slow

SIX_THREE_ONE = [(0, 0, 1, 6, False), (1, 1, 2, 3, False), (2, 2, 3, 1, False)]
OVERSIZED = [(0, 0, 600, 0.9, False), (1, 600, 800, 0.5, False), (2, 800, 1000, 0.4, False)]

CASES = {
    "two mandatory chunks fill the budget exactly": (
        [(0, 0, 64, 0.5, False), (1, 64, 96, 0.1, True), (2, 96, 101, 0.1, True)],
        dict(mode="budget_only", budget=37),
        dict(ordinals=[1, 2], retained_tokens=37, stop_reason="budget_reached"),
    ),
    "top_p keeps the crossing chunk": (
        SIX_THREE_ONE,
        dict(mode="top_p", top_p=0.8, budget=12),
        dict(ordinals=[0, 1], retained_mass=0.9, stop_reason="top_p_reached"),
    ),
    "budget_only ignores top_p": (
        SIX_THREE_ONE,
        dict(mode="budget_only", top_p=0.1, budget=12),
        dict(ordinals=[0, 1, 2], retained_mass=1.0, stop_reason="candidates_exhausted"),
    ),
    "mandatory scores stay out of the mass": (
        [(9, 3, 4, 1e30, True), *SIX_THREE_ONE],
        dict(mode="top_p", top_p=0.8, budget=12),
        dict(ordinals=[0, 1, 9], retained_mass=0.9, stop_reason="top_p_reached"),
    ),
    "skip oversized off": (
        OVERSIZED,
        dict(mode="budget_only", budget=500, skip_oversized=False),
        dict(ordinals=[], retained_tokens=0, stop_reason="budget_reached"),
    ),
    "skip oversized on": (
        OVERSIZED,
        dict(mode="budget_only", budget=500, skip_oversized=True),
        dict(ordinals=[1, 2], retained_tokens=400, stop_reason="budget_reached"),
    ),
    "ordinals come out in source order": (
        [(42, 3, 6, 3, False), (7, 0, 3, 1, False), (99, 6, 9, 2, False)],
        dict(mode="budget_only", budget=9),
        dict(ordinals=[7, 42, 99], retained_tokens=9, stop_reason="candidates_exhausted"),
    ),
    "ties go to the lower ordinal, wherever it stands": (
        [(5, 0, 2, 1, False), (3, 2, 4, 1, False), (4, 4, 6, 1, False)],
        dict(mode="budget_only", budget=4),
        dict(ordinals=[3, 4], retained_mass=2 / 3, stop_reason="budget_reached"),
    ),
    "scores below zero count as zero": (
        [(0, 0, 2, -5, False), (1, 2, 4, -1, False), (2, 4, 6, 0, False)],
        dict(mode="top_p", top_p=0.5, budget=6),
        dict(ordinals=[0, 1], retained_mass=2 / 3, stop_reason="top_p_reached"),
    ),
    "everything kept is the whole mass": (
        [(i, i, i + 1, 0.1, False) for i in range(10)],
        dict(mode="top_p", top_p=1.0, budget=10),
        dict(ordinals=list(range(10)), retained_mass=1.0, stop_reason="candidates_exhausted"),
    ),
    "scores that cannot be added": (
        [(0, 0, 1, 1.7e308, False), (1, 1, 2, 1.7e308, False), (2, 2, 3, 0, False)],
        dict(mode="top_p", top_p=1.0, budget=10),
        dict(ordinals=[0, 1], retained_mass=1.0, stop_reason="top_p_reached"),
    ),
    "nothing optional": (
        [(0, 0, 1, 1, True)],
        dict(mode="top_p", budget=10),
        dict(ordinals=[0], retained_mass=1.0, stop_reason="candidates_exhausted"),
    ),
}


def candidates(rows: list[tuple]) -> list[Candidate]:
    return [Candidate(*row) for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    rows, arguments, expected = CASES[name]
    result = select(candidates(rows), **arguments)
    assert result.retained_mass == pytest.approx(expected.pop("retained_mass", result.retained_mass))
    assert {key: getattr(result, key) for key in expected} == expected


def test_mandatory_overflow_is_refused() -> None:
    with pytest.raises(SelectionError, match="4 tokens, the budget is 3") as caught:
        select(candidates([(0, 0, 4, 1, True), (1, 4, 5, 1, False)]), 3, mode="budget_only")
    assert caught.value.stop_reason == "mandatory_query_exceeds_budget"


@pytest.mark.parametrize("mode", ["budget_only", "top_p"])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 2, 1, False), (1, 1, 3, 1, False)],
        [(0, 0, 2, 1, False), (0, 2, 3, 1, False)],
        [(0, 2, 2, 1, False)],
        [(0, 3, 2, 1, False)],
        [(0, -1, 2, 1, False)],
        [(0, 0, 2, math.nan, False)],
        [(0, 0, 2, math.inf, False)],
        [(0, 0, 2, -math.inf, True)],
        [(0, 0.5, 2, 1, False)],
        [(0, 0, 2, None, False)],
        [(0, 0, 2, 10**400, False)],
        [(0, 0, 2)],
        [7],
    ],
)
def test_invalid_candidates(mode: str, rows: list) -> None:
    with pytest.raises(SelectionError) as caught:
        select(rows, 10, mode=mode)
    assert caught.value.stop_reason == "invalid_input"
    with pytest.raises(SelectionError) as caught:
        split(rows, rows, 10, mode=mode)
    assert caught.value.stop_reason == "invalid_input"


@pytest.mark.parametrize(
    "arguments",
    [
        dict(budget=0),
        dict(budget=-3),
        dict(budget=2.5),
        dict(budget=None),
        dict(top_p=0),
        dict(top_p=1.01),
        dict(top_p=-0.1),
        dict(top_p=math.nan),
        dict(top_p="0.5"),
        dict(mode="TOP_P", top_p=2),
        dict(mode="TOP_P"),
        dict(mode="legacy"),
        dict(mode=None),
    ],
)
@pytest.mark.parametrize("mode", ["budget_only", "top_p"])
def test_invalid_arguments(mode: str, arguments: dict) -> None:
    with pytest.raises(SelectionError) as caught:
        select(candidates(SIX_THREE_ONE), **{"budget": 2, "mode": mode, **arguments})
    assert caught.value.stop_reason == "invalid_input"


def test_split_six_chunks_half_each() -> None:
    def chunks(scores: list[int]) -> list[Candidate]:
        return [Candidate(i, 100 * i, 100 * i + 100, score, i == 2) for i, score in enumerate(scores)]

    result = split(chunks([6, 5, 4, 3, 2, 1]), chunks([0, 1, 2, 3, 4, 5]), 400, fraction=0.5, mode="budget_only")
    # mandatory 2 and the head's best share 200 tokens, the other scorer's best two the rest; weight 6 + 2 + 1 of 17
    assert result == Selection([0, 2, 4, 5], 400, pytest.approx(9 / 17), "budget_reached")


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1, 2, math.nan])
def test_split_fraction(fraction: float) -> None:
    with pytest.raises(SelectionError, match="fraction"):
        split(candidates(SIX_THREE_ONE), candidates(SIX_THREE_ONE), 2, fraction=fraction, mode="budget_only")


@pytest.mark.parametrize("change", [(0, 0, 2), (4, 0, 1), (0, 0, 1, 6, True)])
def test_split_needs_the_same_candidates(change: tuple) -> None:
    others = [change + SIX_THREE_ONE[0][len(change) :], *SIX_THREE_ONE[1:]]
    others = [(o, b + 1 if o and b else b, e + 1 if o and b else e, s, m) for o, b, e, s, m in others]
    with pytest.raises(SelectionError) as caught:
        split(candidates(SIX_THREE_ONE), candidates(others), 3, mode="budget_only")
    assert caught.value.stop_reason == "invalid_input"


def random_rows(rng: random.Random, n: int) -> list[tuple]:
    ordinals = rng.sample(range(3 * n), n)
    rows = []
    at = 0
    for ordinal in ordinals:
        at += rng.choice((0, 0, 0, 1, 5))
        length = rng.randint(1, 9)
        score = rng.choice((rng.randint(-1, 4), rng.random(), 0.25, 0.0))
        rows.append((ordinal, at, at + length, score, rng.random() < 0.15))
        at += length
    rng.shuffle(rows)
    return rows


def run(function, *args, **kwargs) -> tuple:
    try:
        result = function(*args, **kwargs)
    except SelectionError as error:
        return [], 0, None, error.stop_reason
    return result.ordinals, result.retained_tokens, result.retained_mass, result.stop_reason


def test_equals_the_slow_reference() -> None:
    rng = random.Random(5)
    reasons = set()
    for number in range(10_000):
        rows = random_rows(rng, rng.randint(0, 10))
        budget = rng.randint(1, 50)
        mode = rng.choice(("budget_only", "top_p"))
        # the shares of integer scores land on such cut-offs exactly; others are off by more than rounding
        top_p = rng.choice((0.25, 0.5, 0.75, 1.0, rng.uniform(0.01, 1)))
        skip = rng.random() < 0.5
        if number % 2:
            got = run(select, rows, budget, mode=mode, top_p=top_p, skip_oversized=skip)
            expected = select_slow(rows, budget, mode, top_p, skip)
        else:
            others = [(*row[:3], rng.choice((rng.random(), rng.randint(0, 3))), row[4]) for row in rows]
            fraction = rng.uniform(0.01, 0.99)
            got = run(split, rows, others, budget, fraction=fraction, mode=mode, top_p=top_p, skip_oversized=skip)
            expected = split_slow(rows, others, budget, fraction, mode, top_p, skip)
        assert got[0] == expected[0] and got[1] == expected[1] and got[3] == expected[3], (rows, budget, mode, top_p)
        assert expected[2] is None or got[2] == pytest.approx(float(expected[2]))
        reasons.add(got[3])
    assert len(reasons) == 4  # every way to end was among them


@st.composite
def row_lists(draw: st.DrawFn) -> list[Candidate]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=14))
    scores = st.one_of(st.integers(-2, 3).map(float), st.floats(-1e6, 1e6))
    rows = []
    at = 0
    for ordinal, length in enumerate(lengths):
        rows.append(Candidate(ordinal, at, at + length, draw(scores), draw(st.integers(0, 5)) == 0))
        at += length
    return draw(st.permutations(rows))


@settings(deadline=None, max_examples=200)
@given(row_lists(), st.integers(1, 300), st.sampled_from(["budget_only", "top_p"]), st.floats(0.001, 1), st.booleans())
def test_properties(rows: list[Candidate], budget: int, mode: str, top_p: float, skip: bool) -> None:
    needed = sum(row.end - row.begin for row in rows if row.mandatory)
    arguments = dict(mode=mode, top_p=top_p, skip_oversized=skip)
    if needed > budget:
        with pytest.raises(SelectionError) as caught:
            select(rows, budget, **arguments)
        assert caught.value.stop_reason == "mandatory_query_exceeds_budget"
        return
    result = select(rows, budget, **arguments)
    assert result.retained_tokens <= budget
    assert result.ordinals == sorted(result.ordinals)  # ordinals are in source order here
    kept = set(result.ordinals)
    assert {row.ordinal for row in rows if row.mandatory} <= kept
    assert result.retained_tokens == sum(row.end - row.begin for row in rows if row.ordinal in kept)
    assert 0.0 <= result.retained_mass <= 1.0
    assert select(sorted(rows), budget, **arguments) == result
    if mode == "budget_only" and not skip:
        assert kept <= set(select(rows, budget + 7, **arguments).ordinals)


def spikes(n: int, values: dict[int, float]) -> list[float]:
    return [values.get(t, 0.0) for t in range(n)]


TWENTY = spikes(20, {5: 0.95, 12: 0.99, 13: 0.97})
THIRTY = spikes(30, {9: 0.4, 20: 0.3})


@pytest.mark.parametrize(
    ("scores", "shortest", "longest", "forced", "subunit", "cuts"),
    [
        (TWENTY, 3, 100, [17], None, [0, 5, 12, 17, 20]),
        (TWENTY, 3, 100, [13], None, [0, 5, 12, 13, 20]),
        (THIRTY, 2, 12, [], None, [0, 9, 20, 30]),
        (spikes(30, {}), 2, 12, [], None, [0, 12, 24, 30]),
        (spikes(30, {10: 0.5}), 2, 12, [], spikes(30, {8: 0.6}), [0, 8, 20, 30]),
        (spikes(40, {11: 0.7, 30: 0.9}), 2, 12, [30], None, [0, 11, 23, 30, 40]),
        (TWENTY, 3, 100, [0, 20, 17, 17], None, [0, 5, 12, 17, 20]),
        ([0.99], 1, 1, [], None, [0, 1]),
        ([0.99] * 4, 1, 1, [], None, [0, 1, 2, 3, 4]),
    ],
)
def test_segments(scores, shortest, longest, forced, subunit, cuts) -> None:
    pieces = segments(
        scores, len(scores), threshold=0.9, min_segment=shortest, max_segment=longest, forced=forced, subunit=subunit
    )
    assert pieces == list(pairwise(cuts))


GOOD = dict(scores=[0.5] * 8, n=8, threshold=0.9, min_segment=2, max_segment=4, forced=())


@pytest.mark.parametrize(
    "change",
    [
        dict(n=0, scores=[]),
        dict(n=-1),
        dict(n=7),
        dict(n=8.0),
        dict(scores=[[0.5] * 8]),
        dict(scores=[0.5] * 7 + [math.nan]),
        dict(scores=["a"] * 8),
        dict(subunit=[0.5] * 9),
        dict(subunit=[math.inf] * 8),
        dict(threshold=0.0),
        dict(threshold=1.0),
        dict(threshold=math.nan),
        dict(min_segment=0),
        dict(min_segment=5),
        dict(min_segment=1.5),
        dict(max_segment=0),
        dict(forced=[-1]),
        dict(forced=[9]),
        dict(forced=[1.5]),
    ],
)
def test_segments_refuses(change: dict) -> None:
    assert segments(**GOOD) == [(0, 2), (2, 4), (4, 8)]
    with pytest.raises(SelectionError):
        segments(**{**GOOD, **change})


def test_segments_equal_the_slow_reference() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        n = rng.randint(1, 40)
        shortest = rng.randint(1, 6)
        longest = rng.randint(shortest, 14)
        scores = [rng.choice((0.0, 0.0, 0.3, 0.6, 0.9, 0.95, rng.random())) for _ in range(n)]
        subunit = [rng.choice((0.0, rng.random())) for _ in range(n)] if rng.random() < 0.5 else None
        forced = rng.sample(range(n + 1), rng.randint(0, min(3, n)))
        got = segments(
            scores, n, threshold=0.9, min_segment=shortest, max_segment=longest, forced=forced, subunit=subunit
        )
        assert got == segments_slow(scores, n, 0.9, shortest, longest, set(forced), subunit)


def test_a_long_prompt_is_selected_at_once() -> None:
    """120,000 tokens in about 4,000 segments: cut, scored, ranked. Far more time than it takes, for busy machines."""
    from laguna_gguf.pflash.candidates import make_candidates, probe_segments

    rng = np.random.default_rng(7)
    n = 120_000
    mass = rng.random(n)
    probe = (rng.random(n) ** 4).astype(np.float32)
    started = time.process_time()
    spans = probe_segments(probe, (n - 1, n), threshold=0.87, min_segment=12, max_segment=64)
    assert spans is not None
    rows = make_candidates(mass / mass.sum(), spans, "density", (n - 1, n))
    result = select(rows, 12_000, mode="budget_only", skip_oversized=True)
    seconds = time.process_time() - started
    assert 3000 < len(rows) < 5000 and 11_000 < result.retained_tokens <= 12_000
    assert seconds < 0.5


@pytest.mark.parametrize("bad", [{"threshold": "x"}, {"threshold": None}, {"scores": [1j] * 10}])
def test_segments_of_another_type(bad: dict) -> None:
    arguments = {"scores": [0.0] * 10, "n": 10, "threshold": 0.5, "min_segment": 2, "max_segment": 4} | bad
    with pytest.raises(SelectionError) as caught:
        segments(arguments.pop("scores"), arguments.pop("n"), **arguments)
    assert caught.value.stop_reason == "invalid_input"
