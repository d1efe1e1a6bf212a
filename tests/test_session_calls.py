"""Bad calls and proposals: a typed error that Llama's callers catch too, and the session still usable."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from laguna_gguf import LagunaError, SpecSession
from laguna_gguf.errors import DecodeError
from session_tools import (
    FULL,
    GREEDY,
    OPTIONS,
    ForcedDrafts,
    Scratch,
    check_state,
    spec_session,
    still_usable,
    take,
    take_plain,
    text_ids,
)


@pytest.fixture(scope="module")
def session(tiny_target: Path, tiny_drafter: Path) -> SpecSession:
    return spec_session(tiny_target, tiny_drafter)


# Calls.

Call = Callable[[SpecSession], object]
BAD_CALLS: dict[str, Call] = {
    "longer than the context": lambda s: next(s.generate([40] * 513)),
    "longer than the context, appended": lambda s: next(s.generate([40] * 500, reset=False)),
    "completion of a long text": lambda s: s("x" * 2000),
    "completion as long as the context": lambda s: s([40] * 512),
    "streamed completion of a long text": lambda s: list(s("x" * 2000, stream=True)),
    "chat with a long text": lambda s: s.create_chat_completion([{"role": "user", "content": "x" * 2000}]),
    "logprobs without logits_all": lambda s: s("x", logprobs=2),
    "eval past the end": lambda s: s.eval([40] * 513),
    "id too high": lambda s: next(s.generate([40, 320])),
    "id too low": lambda s: next(s.generate([-1, 40])),
    "id far too high": lambda s: next(s.generate([2**70])),
    "completion with a bad id": lambda s: s([40, 320]),
    "eval of a bad id": lambda s: s.eval([40, -5]),
    "floats": lambda s: next(s.generate([1.5, 2.0])),  # type: ignore[list-item]
    "text instead of ids": lambda s: next(s.generate("abc")),  # type: ignore[arg-type]
    "a single id": lambda s: next(s.generate(40)),  # type: ignore[arg-type]
    "two dimensions": lambda s: next(s.generate(np.zeros((2, 2), np.intc))),  # type: ignore[arg-type]
    "empty prompt": lambda s: next(s.generate([])),
    "empty list": lambda s: s([]),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(session: SpecSession, plain: llama_cpp.Llama, call: Call) -> None:
    take(session, text_ids(60, 5), 3, **GREEDY)
    kept = session._input_ids.tolist()
    with pytest.raises(LagunaError) as error:
        call(session)
    assert isinstance(error.value, ValueError)
    assert session._input_ids.tolist() == kept
    still_usable(session, plain)
    session.reset()
    still_usable(session, plain)


def test_prompts_that_are_no_lists(session: SpecSession) -> None:
    prompt = text_ids(20, 6)
    expected = take(session, prompt, 5, **GREEDY)
    for same in (tuple(prompt), np.array(prompt), np.array(prompt, np.uint16), iter(prompt)):
        assert take(session, same, 5, **GREEDY) == expected  # type: ignore[arg-type]


class Broken(Exception):
    """Raised by a caller's own callback."""


def test_error_in_a_callback(
    session: SpecSession, plain: llama_cpp.Llama, tiny_target: Path, tiny_drafter: Path
) -> None:
    """An exception of a stopping criterion passes through; what was accepted before stays."""
    prompt = text_ids(30, 7)
    expected = take_plain(plain, prompt, 20, **GREEDY)
    forced = ForcedDrafts(session, prompt, expected, (FULL,))

    def criterion(ids: Any, _: Any) -> bool:
        if len(ids) == 34:
            raise Broken
        return False

    with pytest.raises(Broken):
        for _ in session.generate(prompt, **GREEDY, stopping_criteria=llama_cpp.StoppingCriteriaList([criterion])):
            pass
    forced.remove()
    check_state(session, Scratch(tiny_target, tiny_drafter), prompt + expected[:4])
    still_usable(session, plain)


def test_callers_value_error_stays_its_own(session: SpecSession) -> None:
    def criterion(ids: Any, _: Any) -> bool:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as error:
        session("x", stopping_criteria=llama_cpp.StoppingCriteriaList([criterion]))
    assert not isinstance(error.value, LagunaError)


# Proposals.


@pytest.mark.parametrize("free", [200, 20, 3])
@pytest.mark.parametrize("draft_max", [7, 0])
def test_proposals(tiny_target: Path, tiny_drafter: Path, plain: llama_cpp.Llama, draft_max: int, free: int) -> None:
    """Right, wrong, empty and too long ones give the same tokens; closing keeps what was yielded."""
    session = spec_session(tiny_target, tiny_drafter, draft_max=draft_max, n_ubatch=16, n_ctx=256)
    scratch = Scratch(tiny_target, tiny_drafter)
    prompt = text_ids(256 - free, 8)
    expected = take_plain(plain, prompt, min(free + 1, 40), **GREEDY)

    def proposal(kind: str, i: int) -> Sequence[int]:
        coming = expected[i + 1 :]
        right = {"right": coming[:3], "long": coming + [40] * 600, "empty": []}
        return right.get(kind) if kind in right else [*coming[:1], 41, 42, 43]

    for kind in ("right", "wrong", "long", "empty"):
        stream = session.generate(prompt, **GREEDY)
        tokens = [next(stream)]
        while len(tokens) < len(expected):
            tokens.append(stream.send(proposal(kind, len(tokens) - 1)))
        assert tokens == expected
        stream.close()
        check_state(session, scratch, prompt + expected[:-1])
    for n in range(1, min(free, 8)):
        stream = session.generate(prompt, **GREEDY)
        next(stream)
        tokens = [stream.send(expected[1:6]), *islice(stream, n - 1)]
        assert len(prompt) <= session.n_tokens == len(prompt) + n
        stream.close()
        assert tokens == expected[1 : n + 1]
        check_state(session, scratch, prompt + expected[:n])


def test_proposals_save_rounds(session: SpecSession, plain: llama_cpp.Llama) -> None:
    prompt = text_ids(20, 9)
    expected = take_plain(plain, prompt, 30, **GREEDY)
    session.reset_stats()
    stream = session.generate(prompt, **GREEDY)
    assert next(stream) == expected[0]
    assert [stream.send(expected[1:30]), *islice(stream, 28)] == expected[1:30]
    stream.close()
    assert (session.stats.rounds, session.stats.accepted_tokens, session.stats.drafted_tokens) == (1, 29, 29)


BAD_PROPOSALS = [[320], [-1], [41, 2**70], [1.5], ["a"], [None], "ab", 41, [[41, 42]], [float("nan")]]


@pytest.mark.parametrize("proposal", BAD_PROPOSALS, ids=repr)
def test_bad_proposals(session: SpecSession, plain: llama_cpp.Llama, proposal: Any) -> None:
    prompt = text_ids(20, 9)
    expected = take_plain(plain, prompt, 5, **GREEDY)
    for n in (1, 3):
        stream = session.generate(prompt, **GREEDY)
        assert list(islice(stream, n)) == expected[:n]
        with pytest.raises(LagunaError):
            stream.send(proposal)
        assert session._input_ids.tolist() == prompt + expected[: n - 1]
        still_usable(session, plain)


# Failures inside.


@pytest.mark.parametrize("step", ["decode", "rollback", "append_captured", "draft"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_failure_of_a_step(
    tiny_target: Path, tiny_drafter: Path, plain: llama_cpp.Llama, monkeypatch: pytest.MonkeyPatch, step: str, at: int
) -> None:
    """Whatever fails in the middle, the session knows what it still holds."""
    session = spec_session(tiny_target, tiny_drafter, n_batch=16)
    prompt = text_ids(50, 3)
    expected = take_plain(plain, prompt, 20, **GREEDY)
    forced = ForcedDrafts(session, prompt, expected, (2,))
    owner: Any = session._drafter if step in ("append_captured", "draft") else session._target
    real, calls = getattr(owner, step), 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise DecodeError("injected")
        return real(*args, **options)

    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(DecodeError, match="injected"):
        take(session, prompt, 20, **GREEDY)
    monkeypatch.undo()
    forced.remove()
    tokens = (prompt + expected)[: session.n_tokens]
    assert session._input_ids.tolist() == tokens
    check_state(session, Scratch(tiny_target, tiny_drafter), tokens)
    still_usable(session, plain)


def test_rollback_that_is_not_possible(
    session: SpecSession, plain: llama_cpp.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that cannot go back is evaluated again, within a round too."""
    prompt = text_ids(50, 3)
    expected = take_plain(plain, prompt, 20, **GREEDY)
    forced = ForcedDrafts(session, prompt, expected, (2,))
    real = session._target.rollback
    monkeypatch.setattr(session._target, "rollback", lambda position: real(position) and position == 0)
    assert take(session, prompt, 20, **GREEDY) == expected
    forced.remove()


class Progress(SpecSession):
    """Notes how far prompts are; gives up behind a position."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[int] = []
        self.end = 10**9
        super().__init__(*args, **kwargs)

    def on_evaluated(self, n_tokens: int) -> None:
        self.seen.append(n_tokens)
        if n_tokens >= self.end:
            raise TimeoutError


def test_progress_of_a_prompt(tiny_target: Path, tiny_drafter: Path) -> None:
    session = Progress(str(tiny_target), tiny_drafter, **(OPTIONS | {"draft_max": 3, "n_batch": 32}))
    prompt = text_ids(200, 1)
    fresh = take(spec_session(tiny_target, tiny_drafter, draft_max=3), prompt, 5, **GREEDY)
    session.end = 100
    with pytest.raises(TimeoutError):
        take(session, prompt, 5, **GREEDY)
    assert session.seen[0] == 0 and session.n_tokens == session.seen[-1] < 200
    kept, session.end = session.n_tokens, 10**9
    session.seen.clear()
    assert take(session, prompt, 5, **GREEDY) == fresh
    assert session.seen[0] == kept and session.seen[-1] == 200 and len(session.seen) > 3
