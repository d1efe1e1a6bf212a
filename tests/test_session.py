"""SpecSession as a drop-in: completions, streams and chats are llama_cpp.Llama's own, in f32."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from laguna_gguf import LagunaError, SpecSession
from session_tools import (
    FULL,
    GREEDY,
    MIXED,
    SAMPLED,
    ForcedDrafts,
    Peek,
    Scratch,
    check_state,
    plain_llama,
    spec_session,
    spread,
    take,
    take_plain,
    text_ids,
)

EOS, EOT = 2, 24
PROMPT = "a short story of the sea"
LETTERS = range(25 + 64, 25 + 90)
"""Ids of lower-case letters in the toy vocabulary."""


@pytest.fixture(scope="module")
def session(tiny_target: Path, tiny_drafter: Path) -> SpecSession:
    return spec_session(tiny_target, tiny_drafter)


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> llama_cpp.Llama:
    return plain_llama(tiny_target)


def letters_only(_: NDArray[np.intc], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """A logits processor that keeps the text in a..z."""
    out = np.full_like(logits, -np.inf)
    out[list(LETTERS)] = logits[list(LETTERS)]
    return out


def ends_at(length: int, token: int) -> llama_cpp.LogitsProcessorList:
    """A logits processor that makes `token` follow exactly `length` evaluated tokens."""

    def process(ids: NDArray[np.intc], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        out = letters_only(ids, logits)
        if len(ids) == length:
            out[token] = 1e4
        return out

    return llama_cpp.LogitsProcessorList([process])


def same(got: Any, expected: Any) -> bool:
    """Equal apart from ids and times; floats up to what batch shapes do to them."""
    if isinstance(expected, dict):
        return list(got) == list(expected) and all(
            key in ("id", "created") or same(got[key], value) for key, value in expected.items()
        )
    if isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(expected, (float, np.floating)):
        return bool(got == pytest.approx(expected, rel=1e-4, abs=1e-4))
    return type(got) is type(expected) and got == expected


def answers(llama: llama_cpp.Llama, prompt: str | Sequence[int], **options: Any) -> Any:
    """A completion, or all chunks of a streamed one."""
    answer = llama.create_completion(prompt, **options)
    return list(answer) if options.get("stream") else answer


def check(
    session: SpecSession,
    plain: llama_cpp.Llama,
    prompt: str | Sequence[int] = PROMPT,
    *,
    schedules: Iterable[Sequence[int]] = (MIXED, (FULL,)),
    **options: Any,
) -> Any:
    """The same completion from both, with drafts that are right beyond its end; returns it."""
    plain.reset()
    whole = {key: value for key, value in options.items() if key not in ("stop", "stream", "echo", "logprobs")}
    n_prompt = plain.create_completion(prompt, **whole | {"max_tokens": 80})["usage"]["prompt_tokens"]
    ids = plain._input_ids.tolist()
    plain.reset()
    expected = answers(plain, prompt, **options)
    for schedule in schedules:
        forced = ForcedDrafts(session, ids[:n_prompt], ids[n_prompt:], schedule)
        got = answers(session, prompt, **options)
        forced.remove()
        assert same(got, expected), (got, expected)
        assert session._input_ids.tolist() == plain._input_ids.tolist()
    return expected


LETTERS_ONLY: dict[str, Any] = {"logits_processor": llama_cpp.LogitsProcessorList([letters_only])}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "max_tokens": 1},
        {"temperature": 0.0, "max_tokens": 2},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.2, "seed": 8, "top_k": 10, "top_p": 0.8, "min_p": 0.1, "max_tokens": 40},
        {"temperature": 0.0, "repeat_penalty": 1.4, "max_tokens": 40},
        {"seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"seed": 3, "mirostat_mode": 2, "mirostat_tau": 4.0},
        {"temperature": 0.0, "logit_bias": {"200": 5.0, "100": -100.0}},
        {"temperature": 0.0, "suffix": "fin"},
        {"temperature": 0.0, "model": "another name"},
        {"temperature": 0.7, "seed": 1, **LETTERS_ONLY},
    ],
    ids=lambda options: "-".join(options),
)
def test_completion(session: SpecSession, plain: llama_cpp.Llama, options: dict[str, Any], stream: bool) -> None:
    check(session, plain, stream=stream, **options)


@pytest.mark.parametrize("prompt", [text_ids(50, 1), text_ids(1, 2), "", "x", "é ☺ naïve", "<user>\nhi\n</user>\n"])
def test_prompts(session: SpecSession, plain: llama_cpp.Llama, prompt: str | list[int]) -> None:
    check(session, plain, prompt, temperature=0.0, max_tokens=30)


def test_call_and_echo(session: SpecSession, plain: llama_cpp.Llama) -> None:
    assert check(session, plain, echo=True, seed=4, **LETTERS_ONLY)["choices"][0]["text"].startswith(PROMPT)
    plain.reset()
    assert same(session(PROMPT, max_tokens=9, seed=4), plain(PROMPT, max_tokens=9, seed=4))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 9, 13])
@pytest.mark.parametrize("n_chars", [1, 2, 4])
def test_stop_strings(session: SpecSession, plain: llama_cpp.Llama, at: int, n_chars: int, stream: bool) -> None:
    """A stop string anywhere in an accepted run, of one token or split over several."""
    options: dict[str, Any] = {"seed": 5, "max_tokens": 30, **LETTERS_ONLY}
    text = plain.create_completion(PROMPT, **options)["choices"][0]["text"]
    stop = text[at : at + n_chars]
    answer = check(session, plain, stop=["0123", stop], stream=stream, **options)
    got = "".join(chunk["choices"][0]["text"] for chunk in answer) if stream else answer["choices"][0]["text"]
    assert got == text[: text.index(stop)]
    last = answer[-1] if stream else answer
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("eog", [EOS, EOT])
@pytest.mark.parametrize("at", [0, 1, 3, 8])
def test_end_inside_an_accepted_run(
    session: SpecSession, plain: llama_cpp.Llama, tiny_target: Path, tiny_drafter: Path, at: int, eog: int, stream: bool
) -> None:
    prompt = text_ids(20, 3)
    processor = ends_at(20 + at, eog)
    continuation = take_plain(plain, prompt, 30, **GREEDY, logits_processor=processor)
    assert continuation[at] == eog
    plain.reset()
    options: dict[str, Any] = {"temperature": 0.0, "stream": stream, "logits_processor": processor}
    expected = answers(plain, prompt, **options)
    for schedule in (MIXED, (FULL,)):
        forced = ForcedDrafts(session, prompt, continuation, schedule)
        assert same(answers(session, prompt, **options), expected)
        forced.remove()
        assert session._input_ids.tolist() == prompt + continuation[:at]
    check_state(session, Scratch(tiny_target, tiny_drafter), prompt + continuation[:at])


def test_stopping_criteria(session: SpecSession, plain: llama_cpp.Llama) -> None:
    def criteria(length: int) -> llama_cpp.StoppingCriteriaList:
        return llama_cpp.StoppingCriteriaList([lambda ids, logits: len(ids) >= length])

    prompt = text_ids(20, 3)
    for length in (20, 21, 22, 25, 29):
        check(session, plain, prompt, temperature=0.0, max_tokens=20, stopping_criteria=criteria(length))
        tokens = take_plain(plain, prompt, 99, **GREEDY, stopping_criteria=criteria(length))
        assert len(tokens) == length - 20
        assert take(session, prompt, 99, **GREEDY, stopping_criteria=criteria(length)) == tokens
        assert session._input_ids.tolist() == plain._input_ids.tolist()


def test_stopping_criteria_see_the_logits_of_their_token(session: SpecSession, plain: llama_cpp.Llama) -> None:
    """The logits are those that the newest token was sampled from."""
    best: list[int] = []

    def keep(_: NDArray[np.intc], logits: NDArray[np.float32]) -> bool:
        best.append(int(logits.argmax()))
        return False

    prompt = text_ids(20, 3)
    expected = take_plain(plain, prompt, 30, **GREEDY)
    forced = ForcedDrafts(session, prompt, expected, MIXED)
    tokens = take(session, prompt, 20, **GREEDY, stopping_criteria=llama_cpp.StoppingCriteriaList([keep]))
    forced.remove()
    assert tokens == expected[:20] == best


def test_callbacks_see_each_token_once(session: SpecSession, plain: llama_cpp.Llama) -> None:
    """Processors are called for the emitted tokens only, in order, with the tokens before them and their logits."""
    prompt = text_ids(20, 3)
    expected = take_plain(plain, prompt, 30, **GREEDY)
    seen = [Peek(), Peek()]
    forced = ForcedDrafts(session, prompt, expected, MIXED)
    for llama, peek in zip((plain, session), seen, strict=True):
        llama.reset()
        assert take(llama, prompt, 25, **GREEDY, logits_processor=peek) == expected[:25]
        assert peek.lengths == list(range(20, 45))
    forced.remove()
    assert spread(np.stack(seen[1].seen), np.stack(seen[0].seen)) <= 1e-4


@pytest.mark.parametrize("n_chunks", [1, 2, 5, 9])
def test_abandoned_stream(
    session: SpecSession, plain: llama_cpp.Llama, tiny_target: Path, tiny_drafter: Path, n_chunks: int
) -> None:
    """A consumer that goes away leaves exactly what it was given."""
    prompt = text_ids(20, 3)
    expected = take_plain(plain, prompt, 30, **GREEDY, **LETTERS_ONLY)
    forced = ForcedDrafts(session, prompt, expected, (FULL,))
    stream = session.create_completion(prompt, stream=True, temperature=0.0, **LETTERS_ONLY)
    assert len(list(islice(stream, n_chunks))) == n_chunks
    del stream
    forced.remove()
    check_state(session, Scratch(tiny_target, tiny_drafter), prompt + expected[: n_chunks - 1])
    check(session, plain, temperature=0.0)


def test_grammar(session: SpecSession, plain: llama_cpp.Llama) -> None:
    """A grammar that the drafts break, and one that ends the text."""
    for text in ('root ::= "ab" [c-h]* "z"', "root ::= [aeiou] [k-n] [aeiou] [x-z]", "root ::= ([a-f] [0-9])+"):
        grammar = llama_cpp.LlamaGrammar.from_string(text, verbose=False)
        for options in ({"temperature": 0.0}, {"temperature": 1.5, "seed": 6}):
            for stream in (False, True):
                check(session, plain, grammar=grammar, stream=stream, max_tokens=25, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 3},
        {"logprobs": 2, "echo": True},
        {"logprobs": 1, "stream": True},
        {"logprobs": 2, "stop": ["e"]},
        {"logprobs": 2, "stop": ["e"], "stream": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("draft_max", [0, 7])
def test_logprobs(tiny_target: Path, tiny_drafter: Path, options: dict[str, Any], draft_max: int) -> None:
    session = spec_session(tiny_target, tiny_drafter, logits_all=True, draft_max=draft_max)
    plain = plain_llama(tiny_target, logits_all=True)
    prompt: Any = PROMPT
    for seed in (1, 2):
        check(session, plain, prompt, seed=seed, **LETTERS_ONLY, **options)
    n = plain.n_tokens
    np.testing.assert_allclose(session.scores[:n], plain.scores[:n], atol=1e-4)


def test_cache(tiny_target: Path, tiny_drafter: Path) -> None:
    """Llama's prompt cache saves and loads states between completions."""
    session, plain = spec_session(tiny_target, tiny_drafter), plain_llama(tiny_target)
    for llama in (session, plain):
        llama.set_cache(llama_cpp.LlamaRAMCache())
    for prompt in (text_ids(40, 1), text_ids(30, 2), text_ids(40, 1) + text_ids(5, 3), text_ids(30, 2)):
        answer = plain.create_completion(prompt, temperature=0.0)
        forced = ForcedDrafts(session, prompt, plain._input_ids[len(prompt) :].tolist(), (FULL,))
        assert same(session.create_completion(prompt, temperature=0.0), answer)
        forced.remove()
        assert session.drafter.position == session.n_tokens


MESSAGES: list[dict[str, str]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "tell me of the sea"},
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.0, "stop": ["e"], **LETTERS_ONLY},
        {"temperature": 1.0, "seed": 2, "response_format": {"type": "json_object"}},
    ],
    ids=lambda options: "-".join(options),
)
def test_chat(session: SpecSession, plain: llama_cpp.Llama, options: dict[str, Any], stream: bool) -> None:
    def chat(llama: llama_cpp.Llama, messages: Any, *, max_tokens: int = 25) -> Any:
        answer = llama.create_chat_completion(messages, max_tokens=max_tokens, stream=stream, **options)
        return list(answer) if stream else answer

    for messages in (MESSAGES, [*MESSAGES, {"role": "assistant", "content": "wide"}, MESSAGES[1]]):
        plain.reset()
        n_prompt = plain.create_chat_completion(messages, max_tokens=1)["usage"]["prompt_tokens"]
        plain.reset()
        chat(plain, messages, max_tokens=40)
        ids = plain._input_ids.tolist()
        plain.reset()
        expected = chat(plain, messages)
        forced = ForcedDrafts(session, ids[:n_prompt], ids[n_prompt:], MIXED)
        assert same(chat(session, messages), expected)
        forced.remove()
        assert session._input_ids.tolist() == plain._input_ids.tolist()


# The number of tokens wanted, and the end of the context.


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10, 17, 20])
def test_drafts_are_clamped_to_max_tokens(session: SpecSession, plain: llama_cpp.Llama, max_tokens: int) -> None:
    """A round drafts one token less than are still wanted at most, since it gives one more than it drafts."""
    prompt = text_ids(20, 3)
    forced = ForcedDrafts(session, prompt, take_plain(plain, prompt, 40, **GREEDY, **LETTERS_ONLY), (FULL,))
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
def test_end_of_the_context(tiny_target: Path, tiny_drafter: Path, options: dict[str, Any]) -> None:
    session = spec_session(tiny_target, tiny_drafter, n_ctx=256, **options)
    plain = plain_llama(tiny_target, n_ctx=256)
    scratch = Scratch(tiny_target, tiny_drafter)
    for free in range(17) if not options else (0, 1, 2, 9, 16, 40):
        prompt = text_ids(256 - free, free)
        plain.reset()
        expected = until_error(plain, prompt)
        assert len(expected) == free + 1
        for schedule in (MIXED, (FULL,)):
            forced = ForcedDrafts(session, prompt, expected, schedule)
            assert until_error(session, prompt) == expected
            assert session._input_ids.tolist() == prompt + expected[:-1]
            forced.remove()
        if free in (0, 1, 16):
            check_state(session, scratch, prompt + expected[:-1])
        if free in (1, 2, 9, 16, 40):
            answer = check(session, plain, prompt, max_tokens=None, temperature=0.0, **LETTERS_ONLY)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["total_tokens"] == 256
    prompt = text_ids(60, 1)
    assert take(session, prompt, 30, **GREEDY) == take_plain(plain, prompt, 30, **GREEDY)


def test_context_that_llama_cpp_rounds_up(tiny_target: Path, tiny_drafter: Path) -> None:
    """llama.cpp gives 256 cells for n_ctx=100; the session uses them as Llama does."""
    session, plain = spec_session(tiny_target, tiny_drafter, n_ctx=100), plain_llama(tiny_target, n_ctx=256)
    assert session.n_ctx() == 256
    check(session, plain, temperature=0.0, max_tokens=None, **LETTERS_ONLY)
    assert session.n_tokens == 255
    for prompt in (text_ids(150, 1), text_ids(150, 1) + text_ids(9, 2)):
        assert take(session, prompt, 30, seed=2, **SAMPLED) == take_plain(plain, prompt, 30, seed=2, **SAMPLED)
    state = session.save_state()
    session.reset()
    session.load_state(state)
    assert list(islice(session.generate(prompt, **GREEDY), 20)) == take_plain(plain, prompt, 20, **GREEDY)
