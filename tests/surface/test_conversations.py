"""Requests that follow each other: what is reused, what is evaluated again, and that drafts are as good as ever."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from laguna_gguf import LagunaError, SpecSession
from measure_demo_pair import exact_pair, load_prompts, open_session
from session_tools import (
    GREEDY,
    MIXED,
    STATE_TOLERANCE,
    ForcedDrafts,
    Scratch,
    check_state,
    draft_logits,
    spec_session,
    spread,
    take,
    take_plain,
    text_ids,
)

SYSTEM, USER, OTHER_USER, MORE = (text_ids(n, seed) for n, seed in ((70, 1), (40, 2), (45, 3), (30, 4)))


@contextmanager
def decoded(session: SpecSession) -> Iterator[list[int]]:
    """Rows of each decode of the target while the context is open."""
    rows: list[int] = []
    decode = session._target.decode

    def count(tokens: Any, **options: Any) -> None:
        rows.append(len(tokens))
        decode(tokens, **options)

    session._target.decode = count  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del session._target.decode


# What is evaluated again. Window 32 in target and drafter: a turn needs the 31 rows before it in the drafter.

History = Callable[[list[int]], list[int]]
TURNS: dict[str, tuple[History, int]] = {
    # the next prompt, from all tokens of the first turn; rows that its prompt may cost
    "appended": (lambda said: said + MORE, 31 + 1),  # the newest token was not evaluated
    "appended and edited": (lambda said: said[:-5] + MORE, 31 + 30),
    "regenerate": (lambda said: SYSTEM + USER, 31),
    "another user": (lambda said: SYSTEM + OTHER_USER, 31 + 45),
    "edited system prompt": (lambda said: [*SYSTEM[:10], 33, *SYSTEM[11:], *USER], 100),
    "shorter": (lambda said: SYSTEM[:60], 31 + 1),
    "shorter by one": (lambda said: said[:-2], 31 + 1),
    "first token only": (lambda said: said[:1], 1),
    "nothing in common": (lambda said: OTHER_USER, 45),
    "the same again": (lambda said: said, 1),
}


@pytest.mark.parametrize(
    "options", [{"draft_max": 7}, {"draft_max": 7, "swa_full": False}, {"draft_max": 0}, {"draft_max": "auto"}], ids=str
)
@pytest.mark.parametrize("turn", TURNS)
def test_second_turns(
    tiny_target: Path,
    tiny_drafter: Path,
    judge: llama_cpp.Llama,
    scratch: Scratch,
    turn: str,
    options: dict[str, Any],
) -> None:
    follow, at_most = TURNS[turn]
    if options["draft_max"] == "auto":
        at_most = max(at_most, 31)  # drafting may have been paused
    session = spec_session(tiny_target, tiny_drafter, **options)
    prompt = SYSTEM + USER
    for n in (1, 6, 25) if options["draft_max"] == 7 else (6,):
        expected = take_plain(judge, prompt, 40, **GREEDY)
        forced = ForcedDrafts(session, prompt, expected, MIXED)
        assert take(session, prompt, n, **GREEDY) == expected[:n]
        forced.remove()
        following = follow(prompt + expected[:n])
        expected = take_plain(judge, following, 30, **GREEDY)
        with decoded(session) as rows:
            stream = session.generate(following, **GREEDY)
            first = next(stream)
        assert sum(rows) <= at_most
        assert session._input_ids.tolist() == following
        forced = ForcedDrafts(session, following, expected, MIXED)
        assert [first, *islice(stream, 19)] == expected[:20]
        stream.close()
        forced.remove()
        assert len(following) <= session.drafter.position <= session.n_tokens
        check_state(session, scratch, following + expected[:19])


@pytest.mark.parametrize("back", [1, 31, 32, 33, 100, 250, 330])
def test_rewind_past_the_ring(tiny_target: Path, tiny_drafter: Path, judge: llama_cpp.Llama, back: int) -> None:
    """A ring of 256 cells has lost what a prompt far behind needs: all of it is evaluated again, and only then."""
    session = spec_session(tiny_target, tiny_drafter, swa_full=False, n_ubatch=16)
    history = text_ids(400, 1)
    take(session, history, 30, **GREEDY)
    prompt = history[: len(history) - back] + MORE
    with decoded(session) as rows:
        tokens = take(session, prompt, 1, **GREEDY)
    kept = sum(rows) < len(prompt)
    assert kept == (back < 200)
    assert tokens == take_plain(judge, prompt, 1, **GREEDY)
    check_state(session, Scratch(tiny_target, tiny_drafter), prompt)


def test_more_than_the_context(tiny_target: Path, tiny_drafter: Path, judge: llama_cpp.Llama) -> None:
    """A conversation that has grown too long is refused and still there; without its oldest turn it goes on."""
    session = spec_session(tiny_target, tiny_drafter)
    said: list[int] = []
    for turn in range(40):
        prompt = said + text_ids(35, turn)
        if len(prompt) + 20 > session.n_ctx():
            break
        expected = take_plain(judge, prompt, 20, **GREEDY)
        forced = ForcedDrafts(session, prompt, expected, MIXED)
        assert take(session, prompt, 20, **GREEDY) == expected
        forced.remove()
        said = prompt + expected
    assert turn > 6
    before = session._input_ids.tolist()
    with pytest.raises(LagunaError, match="exceed"):
        session(said + text_ids(60, 9))
    with pytest.raises(LagunaError, match="exceed"):
        next(session.generate(said + text_ids(60, 9)))
    assert session._input_ids.tolist() == before
    prompt = said[55:] + text_ids(35, 50)
    assert take(session, prompt, 20, **GREEDY) == take_plain(judge, prompt, 20, **GREEDY)
    check_state(session, Scratch(tiny_target, tiny_drafter), session._input_ids.tolist())


# Acceptance, on the shipped pair in f32: rounds and accepted drafts of a turn are those of the same prompt on a new
# session, to the last one.


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Path, Path]]:
    with exact_pair() as paths:
        yield paths


def run_turn(session: SpecSession, prompt: list[int], n: int = 60) -> tuple[list[int], list[int]]:
    """Tokens of a turn, and its rounds, drafted and accepted tokens."""
    session.reset_stats()
    tokens = take(session, prompt, n, **GREEDY)
    stats = session.stats
    return tokens, [stats.rounds, stats.drafted_tokens, stats.accepted_tokens]


def test_acceptance_of_later_turns(pair: tuple[Path, Path]) -> None:
    session, fresh = (open_session(*pair, 15, exact=True, n_threads=1) for _ in range(2))
    first, second, third = (
        session.tokenize(prompt["prompt"].encode(), add_bos=i == 0, special=True)[:80]
        for i, prompt in enumerate(load_prompts()[:3])
    )
    said, _ = run_turn(session, first)
    turns: dict[str, list[int]] = {
        "appended": first + said + second,
        "the same again": first + said + second,
        "regenerate": first,
        "edited": first[:50] + third[:40],
        "another user": first + third,
        "shorter": first[:50],
    }
    accepted = 0
    for name, prompt in turns.items():
        tokens, counts = run_turn(session, prompt)
        fresh.reset()
        expected, scratch_counts = run_turn(fresh, prompt)
        assert tokens == expected, name
        assert counts == scratch_counts, name
        assert session.drafter.position == session.n_tokens == len(prompt) + len(tokens) - 1
        assert spread(draft_logits(session), draft_logits(fresh)) <= STATE_TOLERANCE, name
        accepted += counts[2]
    assert accepted > 100
    state = session.save_state()
    session.reset()
    session.load_state(state)
    prompt = session._input_ids.tolist() + second
    fresh.reset()
    assert run_turn(session, prompt) == run_turn(fresh, prompt)
    session.close()
    fresh.close()


def test_drafter_between_calls(tiny_target: Path, tiny_drafter: Path) -> None:
    """Reading the drafter brings it up to the tokens; on a plain session, too, and as often as it is read."""
    for draft_max in (7, 0, "auto"):
        session = spec_session(tiny_target, tiny_drafter, draft_max=draft_max)
        scratch = Scratch(tiny_target, tiny_drafter)
        assert session.drafter.position == 0
        tokens = SYSTEM + take(session, SYSTEM, 9, **GREEDY)[:-1]
        for more in ([], USER, MORE):
            session.eval(more)
            tokens = tokens + more
            assert session.drafter.position == session.drafter.position == len(tokens)
            check_state(session, scratch, tokens)
        session.drafter.reset()
        features = np.zeros((2, 3, 64), np.float32)
        session.drafter.append_context(features)  # a caller may feed it: the session has its own back at the next call
        assert session.drafter.position == len(tokens)
        check_state(session, scratch, tokens)
        session.reset()
        assert session.drafter.position == 0
