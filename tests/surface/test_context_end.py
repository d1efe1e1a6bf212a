"""How many tokens are wanted and how many fit: drafts never reach beyond either."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from laguna_gguf import LagunaError, SpecSession
from session_tools import (
    FULL,
    GREEDY,
    MIXED,
    SAMPLED,
    ForcedDrafts,
    Scratch,
    check_state,
    plain_llama,
    spec_session,
    take,
    take_plain,
    text_ids,
)
from surface_tools import LETTERS_ONLY, PROMPT, WHOLE_ROUNDS, Rivals


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10, 17, 20])
def test_drafts_are_clamped_to_max_tokens(rivals: Rivals, max_tokens: int) -> None:
    """A round drafts one token less than are still wanted at most, since it gives one more than it drafts."""
    session, prompt = rivals.session, text_ids(20, 3)
    forced = ForcedDrafts(session, prompt, take_plain(rivals.judge, prompt, 40, **GREEDY, **LETTERS_ONLY), (FULL,))
    session.reset()
    session.reset_stats()
    answer = session.create_completion(prompt, max_tokens=max_tokens, temperature=0.0, **LETTERS_ONLY)
    forced.remove()
    assert answer["usage"]["completion_tokens"] == max_tokens
    left, needed = max_tokens - 1, []
    while left:
        needed.append(min(7, left - 1))
        left -= needed[-1] + 1
    assert forced.drafted == needed
    assert session.stats.drafted_tokens == session.stats.accepted_tokens == sum(needed)
    assert session.stats.generated_tokens == max_tokens - 1
    # Nothing of the limit is left over for the next call.
    forced = ForcedDrafts(session, prompt, (), (0,))
    take(session, prompt, 2, **GREEDY)
    forced.remove()
    assert forced.drafted == [7]


@pytest.fixture(scope="module")
def short(tiny_target: Path, tiny_drafter: Path) -> Rivals:
    """A context of 256."""
    plain, judge = (plain_llama(tiny_target, n_ctx=256) for _ in range(2))
    return Rivals(plain, spec_session(tiny_target, tiny_drafter, n_ctx=256), judge)


@pytest.mark.parametrize(
    ("free", "max_tokens"),
    [(1, None), (2, 0), (3, -1), (8, None), (9, 10**6), (16, None), (16, float("inf")), (30, 0), (50, 40)],
)
def test_no_limit_but_the_context(short: Rivals, max_tokens: Any, free: int) -> None:
    """The last 1..16 tokens of the context, and a longer way to its end."""
    prompt = text_ids(256 - free, free)
    answer = short.check(
        lambda llama: llama(prompt, max_tokens=max_tokens, temperature=0.0, **LETTERS_ONLY), schedules=WHOLE_ROUNDS
    )
    assert answer["usage"]["completion_tokens"] == min(free, 40)
    assert answer["choices"][0]["finish_reason"] == "length"
    short.check(lambda llama: llama(prompt, max_tokens=max_tokens, seed=3, stream=True), schedules=[MIXED])


def test_prompts_too_long(short: Rivals) -> None:
    for n in (256, 257, 5000):
        for stream in (False, True):
            with pytest.raises(ValueError, match="exceed context window"):
                short.check(lambda llama, n=n, s=stream: llama([40] * n, stream=s), schedules=[None])
    short.check(lambda llama: llama(PROMPT, seed=1))


def until_error(llama: llama_cpp.Llama, prompt: Sequence[int]) -> list[int]:
    """Tokens until the context is full, which must be a RuntimeError as with Llama."""
    tokens: list[int] = []
    with pytest.raises(RuntimeError) as error:
        for token in llama.generate(prompt, **GREEDY):
            tokens.append(token)
    assert not isinstance(llama, SpecSession) or isinstance(error.value, LagunaError)
    return tokens


@pytest.mark.parametrize(
    "options", [{}, {"swa_full": False, "n_ubatch": 16}, {"draft_max": 0}, {"logits_all": True}], ids=str
)
def test_end_of_the_context(tiny_target: Path, tiny_drafter: Path, options: dict[str, Any], short: Rivals) -> None:
    session = spec_session(tiny_target, tiny_drafter, n_ctx=256, **options)
    scratch = Scratch(tiny_target, tiny_drafter)
    for free in (0, 1, 2, 3, 5, 8, 9, 11, 15, 16) if not options else (0, 1, 2, 9, 16, 40):
        prompt = text_ids(256 - free, free)
        short.plain.reset()
        expected = until_error(short.plain, prompt)
        assert len(expected) == free + 1
        for schedule in WHOLE_ROUNDS:
            forced = ForcedDrafts(session, prompt, expected, schedule)
            assert until_error(session, prompt) == expected
            assert session._input_ids.tolist() == prompt + expected[:-1]
            forced.remove()
        if free in (0, 1, 16):
            check_state(session, scratch, prompt + expected[:-1])
    prompt = text_ids(60, 1)
    assert take(session, prompt, 30, **GREEDY) == take_plain(short.plain, prompt, 30, **GREEDY)


def test_context_that_llama_cpp_rounds_up(tiny_target: Path, tiny_drafter: Path, short: Rivals) -> None:
    """llama.cpp gives 256 cells for n_ctx=100. A session remembers the tokens of all of them; Llama of 100 only."""
    session = spec_session(tiny_target, tiny_drafter, n_ctx=100)
    rounded = Rivals(short.plain, session, short.judge)
    assert session.n_ctx() == 256
    rounded.check(lambda llama: llama(PROMPT, temperature=0.0, max_tokens=None, **LETTERS_ONLY))
    assert session.n_tokens == 255
    for prompt in (text_ids(150, 1), text_ids(150, 1) + text_ids(9, 2)):
        rounded.check(lambda llama, p=prompt: take(llama, p, 30, seed=2, **SAMPLED))
    state = session.save_state()
    session.reset()
    session.load_state(state)
    assert take(session, prompt, 20, **GREEDY) == take_plain(short.plain, prompt, 20, **GREEDY)
