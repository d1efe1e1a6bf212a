"""Scoring sessions: a resumed prompt scores as from scratch, whatever came before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laguna_gguf.errors import LagunaError
from laguna_gguf.pflash.scorer import Scorer, Scores
from random_drafter import TINY_QWEN35
from scorer_fixtures import make_scorer, random_ids, write_random_probe


def close(scores: Scores, other: Scores) -> bool:
    return bool(np.abs(scores.mass - other.mass).max() <= 1e-3 * other.mass.max())


def tail(ids: np.ndarray, width: int = 8) -> dict[str, Any]:
    return {"query": (len(ids) - width, len(ids))}


def test_longer_prompt_runs_its_new_tokens_only(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(1500)
    first = scorer.score(ids[:1000], **tail(ids[:1000]), session="a")
    assert (first.resume, first.new_tokens) == (0, 1000)
    again = scorer.score(ids, **tail(ids), session="a")
    assert (again.resume, again.new_tokens) == (1000, 500)
    assert np.array_equal(again.mass, scorer.score(ids, **tail(ids)).mass)  # batches of 64 and more: not a bit differs


def test_few_new_tokens_change_rounding_only(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(300)
    scorer.score(ids[:290], **tail(ids[:290]), session="a")
    again = scorer.score(ids, **tail(ids), session="a")
    assert again.new_tokens == 10 and close(again, scorer.score(ids, **tail(ids)))


def test_identical_retry_runs_nothing(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(200)
    first = scorer.score(ids, **tail(ids), windows=[(20, 28, 0.5)], session="a")
    for _ in range(2):
        again = scorer.score(ids, **tail(ids), windows=[(20, 28, 0.5)], session="a")
        assert (again.resume, again.new_tokens) == (200, 0)
        assert np.array_equal(again.mass, first.mass)


def test_branches_behind_and_before_the_checkpoint(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(300)
    scorer.score(ids, **tail(ids), session="a")
    behind = np.concatenate([ids[:270], random_ids(50, seed=1)])
    scores = scorer.score(behind, **tail(behind), session="a")
    assert (scores.resume, scores.new_tokens) == (236, 84)
    assert close(scores, scorer.score(behind, **tail(behind)))
    before = np.concatenate([ids[:200], random_ids(60, seed=2)])
    scores = scorer.score(before, **tail(before), session="a")
    assert (scores.resume, scores.new_tokens) == (0, 260)
    assert close(scores, scorer.score(before, **tail(before)))


def test_shortened_prompt_goes_back_to_the_checkpoint(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(300)
    scorer.score(ids, **tail(ids), session="a")
    scores = scorer.score(ids[:250], **tail(ids[:250]), session="a")
    assert scores.resume == 236 and close(scores, scorer.score(ids[:250], **tail(ids[:250])))


def test_checkpoint_of_a_short_turn_is_where_it_began(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(230)
    scorer.score(ids[:200], **tail(ids[:200]), session="a")
    scorer.score(ids, **tail(ids), session="a")
    branch = np.concatenate([ids[:205], random_ids(20, seed=3)])
    scores = scorer.score(branch, **tail(branch), session="a")
    assert scores.resume == 200 and close(scores, scorer.score(branch, **tail(branch)))


def test_windows_whose_rows_are_gone_cost_a_run(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(400)
    scorer.score(ids[:300], **tail(ids[:300]), session="a")
    known = scorer.score(ids, **tail(ids), windows=[(292, 300, 0.5)], session="a")
    assert known.resume == 300
    inside = scorer.score(ids, query=(394, 398), session="a")  # part of the stored query
    assert inside.resume == 400
    late = scorer.score(ids, query=(350, 360), session="a")  # behind the checkpoint: its rows come again
    assert late.resume == 336 and close(late, scorer.score(ids, query=(350, 360)))
    early = scorer.score(ids, **tail(ids), windows=[(100, 108, 0.5)], session="a")
    assert early.resume == 0 and close(early, scorer.score(ids, **tail(ids), windows=[(100, 108, 0.5)]))


def test_eight_windows_are_kept(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(200)
    windows = [(10 * i, 10 * i + 5, 1.0) for i in range(7)]
    scorer.score(ids, **tail(ids), windows=windows, session="a")
    assert scorer.score(ids, **tail(ids), windows=windows, session="a").resume == 200
    scorer.score(ids, **tail(ids), windows=[(150, 155, 1.0)], session="a")
    assert scorer.score(ids, **tail(ids), windows=windows[:6], session="a").resume == 200
    assert scorer.score(ids, **tail(ids), windows=windows, session="a").resume == 0  # the ninth had to go


def test_least_recently_used_session_makes_room(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=2)
    prompts = {name: random_ids(120, seed=i) for i, name in enumerate("abc")}

    def resume(name: str) -> int:
        return scorer.score(prompts[name], **tail(prompts[name]), session=name).resume

    assert [resume(name) for name in "abaabcab"] == [0, 0, 120, 120, 120, 0, 0, 0]


def test_without_sessions_nothing_is_kept(qwen35: Path) -> None:
    scorer = make_scorer(qwen35)
    ids = random_ids(100)
    assert [scorer.score(ids, **tail(ids), session="a").resume for _ in range(2)] == [0, 0]
    scorer = make_scorer(qwen35, sessions=1)
    assert [scorer.score(ids, **tail(ids)).resume for _ in range(2)] == [0, 0]


def test_refused_requests_leave_sessions_alone(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=1, n_ctx=300)
    ids = random_ids(200)
    scorer.score(ids, **tail(ids), session="a")
    for query in ((0, 5), (195, 201), (-1, 3)):
        with pytest.raises(LagunaError):
            scorer.score(ids, query=query, session="a")
    with pytest.raises(LagunaError):
        scorer.score(random_ids(301), query=(290, 301), session="a")
    assert scorer.score(ids, **tail(ids), session="a").new_tokens == 0


def test_failure_empties_the_session(qwen35: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = make_scorer(qwen35, sessions=1)
    ids = random_ids(200)
    scorer.score(ids[:150], **tail(ids[:150]), session="a")
    with monkeypatch.context() as patch:
        patch.setattr(scorer.trunk.context, "decode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scorer.score(ids, **tail(ids), session="a")
    scores = scorer.score(ids, **tail(ids), session="a")
    assert scores.resume == 0 and close(scores, scorer.score(ids, **tail(ids)))


def test_context_growth_keeps_sessions_right(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=2)
    ids, other = random_ids(2050), random_ids(150, seed=9)
    scorer.score(other, **tail(other), session="b")
    scorer.score(ids[:1900], **tail(ids[:1900]), session="a")
    grown = scorer.score(ids, **tail(ids), session="a")  # 2048 tokens do not suffice any more
    assert grown.resume in (0, 1900) and close(grown, scorer.score(ids, **tail(ids)))
    longer = np.concatenate([other, ids[:100]])
    assert close(scorer.score(longer, **tail(longer), session="b"), scorer.score(longer, **tail(longer)))


def test_probe_after_a_resume_is_that_from_scratch(tmp_path: Path, qwen35: Path) -> None:
    """The convolution looks ahead, so the last scores of the first prompt change with the second."""
    scorer = make_scorer(qwen35, sessions=1, probe=write_random_probe(tmp_path / "probe.gguf", qwen35))
    ids = random_ids(400)
    scorer.score(ids[:300], **tail(ids[:300]), session="a")
    resumed, scratch = scorer.score(ids, **tail(ids), session="a"), scorer.score(ids, **tail(ids))
    assert resumed.resume == 300
    assert np.array_equal(resumed.probe, scratch.probe) and np.array_equal(resumed.subunit, scratch.subunit)


def test_qwen3_sessions(qwen3: Path) -> None:
    scorer = make_scorer(qwen3, sessions=1)
    ids = random_ids(300)
    scorer.score(ids, **tail(ids), session="a")
    branch = np.concatenate([ids[:270], random_ids(50, seed=1)])
    scores = scorer.score(branch, **tail(branch), session="a")
    assert scores.resume == 236 and close(scores, scorer.score(branch, **tail(branch)))


def test_memory_by_token(tmp_path: Path, qwen35: Path) -> None:
    """Per token only a key, the probe's values and the id are kept; taps of query windows come on top."""
    scorer = make_scorer(qwen35, sessions=1, probe=write_random_probe(tmp_path / "probe.gguf", qwen35))
    assert scorer.bytes_per_token == 4 * (2 * 32 + 2 + 1)
    ids = random_ids(2048)  # whole blocks of keys
    scorer.score(ids, **tail(ids), session="a")
    (session,) = scorer._sessions.values()
    fixed = 8 * TINY_QWEN35.n_embd * 4 + len(session.state or b"")
    assert session.n_bytes <= scorer.bytes_per_token * 2048 * 1.05 + fixed
    assert session.n_bytes >= scorer.bytes_per_token * 2048


def test_sessions_take_memory_when_they_are_used(qwen35: Path) -> None:
    scorer = make_scorer(qwen35, sessions=3)
    ids = random_ids(100)
    scratch = scorer.score(ids, **tail(ids))
    assert scorer.trunk.context.n_ready == 1
    assert close(scorer.score(ids, **tail(ids), session="a"), scratch) and scorer.trunk.context.n_ready == 4


@pytest.fixture(scope="module")
def long_lived(qwen35: Path) -> Scorer:
    return make_scorer(qwen35, sessions=2)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(2, 220), st.integers(0, 3), st.integers(1, 60)),
        min_size=1,
        max_size=5,
    )
)
def test_any_sequence_of_prompts_scores_as_from_scratch(long_lived: Scorer, steps: list[Any]) -> None:
    base = random_ids(220, seed=7)
    for name, keep, seed, extra in steps:
        ids = np.concatenate([base[:keep], random_ids(extra, seed=100 + seed)])
        query = {"query": (len(ids) - min(8, len(ids) - 1), len(ids))}
        resumed = long_lived.score(ids, **query, session=name)
        assert resumed.resume + resumed.new_tokens == len(ids)
        assert close(resumed, long_lived.score(ids, **query))
