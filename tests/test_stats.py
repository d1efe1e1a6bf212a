"""SpecStats: counts that follow from forced acceptance, times, resets."""

import json
import time
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from demo_pair.target_gguf import random_target
from laguna_gguf import SpecSession, SpecStats
from laguna_gguf.dflash.stats import Counters
from session_tools import FULL, GREEDY, ForcedDrafts, plain_llama, spec_session, take, take_plain, text_ids
from tiny_models import TINY_TARGET, write_tiny_target

PROMPT = text_ids(30, 2)
TIMES = ("prompt_ms", "capture_ms", "draft_ms", "verify_ms", "sample_ms", "other_ms")


@pytest.fixture(scope="module")
def expected(tiny_target: Path) -> list[int]:
    """The plain continuation of PROMPT."""
    return take_plain(plain_llama(tiny_target), PROMPT, 80, **GREEDY)


def check_sums(stats: SpecStats) -> None:
    """What holds for every snapshot."""
    by_depth = stats.accepted_by_depth
    assert all(a >= b for a, b in pairwise(by_depth))
    assert sum(by_depth) == stats.accepted_tokens <= stats.drafted_tokens
    assert all(0 < n <= stats.rounds for n in by_depth)
    assert 0 <= stats.plain_rounds <= stats.rounds
    assert stats.accepted_tokens <= stats.generated_tokens <= stats.accepted_tokens + stats.rounds
    assert stats.mean_accepted_length == (stats.generated_tokens / stats.rounds if stats.rounds else 0.0)
    assert stats.acceptance_rate == (stats.accepted_tokens / stats.drafted_tokens if stats.drafted_tokens else 0.0)
    assert all(getattr(stats, name) >= 0 for name in TIMES)
    plain = stats.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert list(plain) == [field.name for field in fields(SpecStats)]


def run(
    session: SpecSession, expected: Sequence[int], schedule: Sequence[int], n_tokens: int, **options: Any
) -> SpecStats:
    """Stats of n_tokens, the prompt's one included, with forced acceptance."""
    session.reset_stats()
    forced = ForcedDrafts(session, PROMPT, expected, schedule)
    assert take(session, PROMPT, n_tokens, **GREEDY, **options) == expected[:n_tokens]
    forced.remove()
    check_sums(session.stats)
    return session.stats


def test_a_new_session(session: SpecSession) -> None:
    stats = session.stats
    check_sums(stats)
    assert stats == SpecStats(0, 0, 0, 0, 0.0, 0.0, (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 7)
    with pytest.raises(FrozenInstanceError):
        stats.rounds = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("schedule", "n_tokens", "rounds", "drafted", "by_depth"),
    [
        ((0,), 1, 0, 0, ()),
        ((0,), 2, 1, 7, ()),
        ((0,), 11, 10, 70, ()),
        ((2,), 1 + 3 * 5, 5, 35, (5, 5)),
        ((FULL,), 1 + 8 * 3, 3, 21, (3, 3, 3, 3, 3, 3, 3)),
        ((0, 1, 2, 3), 1 + 10, 4, 28, (3, 2, 1)),
        # The last round cut after 1, 2 and 3 accepted drafts, and after all 7 but before the bonus token.
        ((FULL,), 1 + 8 + 1, 2, 14, (2, 1, 1, 1, 1, 1, 1)),
        ((FULL,), 1 + 8 + 2, 2, 14, (2, 2, 1, 1, 1, 1, 1)),
        ((FULL,), 1 + 3, 1, 7, (1, 1, 1)),
        ((FULL,), 1 + 7, 1, 7, (1, 1, 1, 1, 1, 1, 1)),
    ],
)
def test_counts(
    session: SpecSession,
    expected: list[int],
    schedule: tuple[int, ...],
    n_tokens: int,
    rounds: int,
    drafted: int,
    by_depth: tuple[int, ...],
) -> None:
    stats = run(session, expected, schedule, n_tokens)
    assert (stats.rounds, stats.drafted_tokens, stats.accepted_by_depth) == (rounds, drafted, by_depth)
    assert stats.generated_tokens == n_tokens - 1
    assert stats.plain_rounds == 0
    uncut = schedule != (FULL,) or (n_tokens - 1) % 8 == 0
    if rounds and uncut:
        assert stats.mean_accepted_length == 1 + stats.accepted_tokens / stats.rounds


def test_counts_after_a_stop(session: SpecSession, expected: list[int]) -> None:
    """A criterion that stops at the third token of a round: two accepted, the rest of the drafts are not."""
    session.reset_stats()
    forced = ForcedDrafts(session, PROMPT, expected, (FULL,))
    stop = llama_cpp.StoppingCriteriaList([lambda ids, _: len(ids) == len(PROMPT) + 8 + 3])
    assert list(session.generate(PROMPT, **GREEDY, stopping_criteria=stop)) == expected[:11]
    forced.remove()
    stats = session.stats
    check_sums(stats)
    assert (stats.rounds, stats.generated_tokens, stats.accepted_by_depth) == (2, 10, (2, 2, 1, 1, 1, 1, 1))


def test_counts_of_completions(session: SpecSession, expected: list[int]) -> None:
    """max_tokens clamps the last round: 1 + 8 + 1 tokens need no draft in it."""
    processor = llama_cpp.LogitsProcessorList([lambda _, logits: np.where(np.arange(320) == 110, 9e9, logits)])
    session.reset_stats()
    forced = ForcedDrafts(session, PROMPT, [110] * 40, (FULL,))
    answer = session.create_completion(PROMPT, max_tokens=10, temperature=0.0, logits_processor=processor)
    forced.remove()
    assert answer["usage"]["completion_tokens"] == 10
    stats = session.stats
    check_sums(stats)
    assert (stats.rounds, stats.plain_rounds, stats.drafted_tokens, stats.accepted_tokens) == (2, 1, 7, 7)
    assert stats.generated_tokens == 9 and stats.mean_accepted_length == 4.5


def test_plain_rounds(tiny_target: Path, tiny_drafter: Path, expected: list[int]) -> None:
    session = spec_session(tiny_target, tiny_drafter, draft_max=0)
    stats = run(session, expected, (FULL,), 12)
    assert (stats.rounds, stats.plain_rounds, stats.generated_tokens, stats.drafted_tokens) == (11, 11, 11, 0)
    assert (stats.mean_accepted_length, stats.acceptance_rate, stats.draft_max_now) == (1.0, 0.0, 0)


def test_counts_add_up_over_requests(session: SpecSession, expected: list[int]) -> None:
    one = run(session, expected, (2,), 7)
    forced = ForcedDrafts(session, PROMPT, expected, (2,))
    take(session, PROMPT, 7, **GREEDY)
    take(session, PROMPT, 1, **GREEDY)
    forced.remove()
    two = session.stats
    for name in ("rounds", "generated_tokens", "drafted_tokens", "accepted_tokens"):
        assert getattr(two, name) == 2 * getattr(one, name)
    check_sums(two)
    assert one.rounds == 2  # a snapshot does not change


def test_reset_between_rounds(session: SpecSession, expected: list[int]) -> None:
    """Later rounds of a running generator count for the new statistics."""
    forced = ForcedDrafts(session, PROMPT, expected, (2,))
    stream = session.generate(PROMPT, **GREEDY)
    assert list(islice(stream, 1 + 3)) == expected[:4]
    session.reset_stats()
    assert session.stats.rounds == session.stats.generated_tokens == 0
    assert list(islice(stream, 6)) == expected[4:10]
    stream.close()
    forced.remove()
    check_sums(session.stats)
    assert (session.stats.rounds, session.stats.generated_tokens, session.stats.accepted_tokens) == (2, 6, 4)


def test_stats_in_the_middle_of_a_round(session: SpecSession, expected: list[int]) -> None:
    forced = ForcedDrafts(session, PROMPT, expected, (5, 0, 3))
    for i, _ in enumerate(islice(session.generate(PROMPT, **GREEDY), 30)):
        check_sums(session.stats)
        assert session.stats.generated_tokens == i
    forced.remove()


def test_times(session: SpecSession) -> None:
    """The parts add up to less than the wall time without the consumer's own; the rate follows from them."""
    pause, n = 0.02, 12
    began = time.perf_counter()
    for _ in islice(session.generate(PROMPT, temp=0.0), n):
        time.sleep(pause)
    wall = (time.perf_counter() - began) * 1e3
    stats = session.stats
    assert all(getattr(stats, name) > 0 for name in TIMES if name != "other_ms")
    assert sum(getattr(stats, name) for name in TIMES) <= wall - 0.9 * n * pause * 1e3
    rounds = stats.capture_ms + stats.draft_ms + stats.verify_ms + stats.sample_ms + stats.other_ms
    slowest = stats.generated_tokens / rounds * 1e3
    fastest = (
        stats.generated_tokens / (rounds - stats.sample_ms) * 1e3
    )  # the prompt's token is sampled before the rounds
    assert 0.999 * slowest <= stats.tokens_per_second <= 1.001 * fastest
    session.reset_stats()
    check_sums(session.stats)
    assert all(getattr(session.stats, name) == 0 for name in TIMES)


def test_nonfinite_features(tiny_drafter: Path, tmp_path: Path) -> None:
    """Values that are not finite are counted, drafting goes on, and a reset begins at zero."""
    embedding = random_target(TINY_TARGET, 1)["token_embd.weight"]
    embedding[300] = np.inf
    target = write_tiny_target(tmp_path / "nonfinite.gguf", replaced={"token_embd.weight": embedding})
    session = spec_session(target, tiny_drafter)
    good = [token % 300 for token in PROMPT]
    take(session, good, 5, **GREEDY)
    assert session.stats.nonfinite_features == 0
    session.eval([300])
    assert session.stats.nonfinite_features >= 64
    assert session.drafter.draft(40, 3).tokens.tolist() and session.drafter.position == session.n_tokens
    session.reset_stats()
    assert session.stats.nonfinite_features == 0
    session.eval([300])
    assert session.stats.nonfinite_features >= 64
    session.reset()
    assert take(session, good, 5, **GREEDY) == take(spec_session(target, tiny_drafter), good, 5, **GREEDY)


def test_counters_alone() -> None:
    counters = Counters(
        rounds=4, generated_tokens=9, drafted_tokens=20, nonfinite_before=5, round_ms=18.0, draft_ms=3.0
    )
    for depth in (0, 1, 2, 0, 1, 0):
        counters.count_accepted(depth)
    counters.generated_tokens = 6 + 4
    stats = counters.snapshot(nonfinite=8, draft_max_now=6)
    check_sums(stats)
    assert stats.accepted_by_depth == (3, 2, 1) and stats.nonfinite_features == 3 and stats.draft_max_now == 6
    assert stats.mean_accepted_length == 2.5 and stats.acceptance_rate == 0.3
    assert stats.other_ms == 15.0 and stats.tokens_per_second == pytest.approx(10 / 18e-3)
