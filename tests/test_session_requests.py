"""Several requests in one session and several sessions in one process: nothing is carried over."""

from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from laguna_gguf import LagunaError, SpecSession
from laguna_gguf.errors import SessionBusyError
from session_tools import (
    FULL,
    GREEDY,
    SAMPLED,
    ForcedDrafts,
    Scratch,
    check_state,
    spec_session,
    take,
    take_plain,
    text_ids,
)

# Several requests, several sessions.


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts without and with a common prefix, greedy and sampled."""
    return [(text_ids(50, 1), GREEDY), (text_ids(50, 1)[:30] + text_ids(9, 2), SAMPLED), (text_ids(7, 3), GREEDY)]


@pytest.mark.parametrize("between", ["nothing", "reset", "error", "drafter", "abandoned"])
def test_requests_do_not_influence_each_other(tiny_target: Path, tiny_drafter: Path, between: str) -> None:
    session = spec_session(tiny_target, tiny_drafter)
    for prompt, sampler in requests():
        fresh = spec_session(tiny_target, tiny_drafter)
        assert take(session, prompt, 30, seed=3, **sampler) == take(fresh, prompt, 30, seed=3, **sampler)
        assert session._input_ids.tolist() == fresh._input_ids.tolist()
        if between == "reset":
            session.reset()
        elif between == "error":
            with pytest.raises(LagunaError):
                next(session.generate([9999]))
            stream = session.generate(text_ids(20, 8))
            next(stream)
            with pytest.raises(LagunaError):
                stream.send([-1])
        elif between == "drafter":
            session.drafter.reset()
        elif between == "abandoned":
            list(islice(session.generate(text_ids(30, 7), **GREEDY), 5))


def test_two_sessions_in_turns(tiny_target: Path, tiny_drafter: Path, scratch: Scratch) -> None:
    sessions = [spec_session(tiny_target, tiny_drafter, n_ubatch=n) for n in (16, 512)]
    prompts = [text_ids(40, 5), text_ids(33, 6)]
    expected = [take(spec_session(tiny_target, tiny_drafter), prompt, 40, seed=2, **SAMPLED) for prompt in prompts]
    streams = []
    for session, prompt in zip(sessions, prompts, strict=True):
        session.set_seed(2)
        streams.append(session.generate(prompt, **SAMPLED))
    for pair in islice(zip(*streams, strict=True), 40):
        for token, tokens in zip(pair, expected, strict=True):
            assert token == tokens.pop(0)
    for session, stream in zip(sessions, streams, strict=True):
        stream.close()
        check_state(session, scratch, session._input_ids.tolist())


@pytest.mark.parametrize("pause", [1, 2, 5])
def test_new_call_takes_over(session: SpecSession, plain: llama_cpp.Llama, pause: int) -> None:
    prompt, other = text_ids(40, 9), text_ids(20, 10)
    expected = take_plain(plain, prompt, 20, **GREEDY)
    ForcedDrafts(session, prompt, expected, (FULL,)).remove()
    old = session.generate(prompt, **GREEDY)
    assert list(islice(old, pause)) == expected[:pause]
    new = session.generate(other, **GREEDY)
    tokens = list(islice(new, 4))
    with pytest.raises(SessionBusyError):
        next(old)
    with pytest.raises(StopIteration):
        next(old)
    tokens += islice(new, 6)
    new.close()
    assert tokens == take_plain(plain, other, 10, **GREEDY)
    assert session._input_ids.tolist() == other + tokens[:-1]


def test_dropped_generator_changes_nothing(session: SpecSession, scratch: Scratch, plain: llama_cpp.Llama) -> None:
    """The old generator may be collected in the middle of the new one."""
    prompt, other = text_ids(40, 9), text_ids(20, 10)
    expected = take_plain(plain, prompt, 20, **GREEDY)
    forced = ForcedDrafts(session, prompt, expected, (FULL,))
    old = session.generate(prompt, **GREEDY)
    assert list(islice(old, 4)) == expected[:4]
    forced.remove()
    new = session.generate(other, **GREEDY)
    tokens = list(islice(new, 3))
    del old
    tokens += islice(new, 3)
    new.close()
    assert tokens == take_plain(plain, other, 6, **GREEDY)
    check_state(session, scratch, other + tokens[:-1])
