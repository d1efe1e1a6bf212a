"""Logits processors, logit bias and stopping criteria: what they see, when they are called, what they may do."""

from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LogitsProcessorList, StoppingCriteriaList
from numpy.typing import NDArray

from laguna_gguf import LagunaError, SpecSession
from laguna_gguf.errors import ConfigError, DecodeError
from session_tools import FULL, GREEDY, Peek, Scratch, check_state, spread, take, take_plain, text_ids
from surface_tools import EOS, EOT, LETTERS, LETTERS_ONLY, PROMPT, Rivals, Text, forced, letters_only

Ids = NDArray[np.intc]
Logits = NDArray[np.single]


def criteria(length: int) -> StoppingCriteriaList:
    return StoppingCriteriaList([lambda ids, _: len(ids) >= length])


# What they see.


def test_each_token_once(rivals: Rivals) -> None:
    """Callbacks are called for the emitted tokens only, in order, with the text before them and the right logits."""
    prompt = text_ids(20, 3)
    seen: list[tuple[list[list[int]], list[Logits]]] = []

    def watched(llama: llama_cpp.Llama) -> list[int]:
        ids: list[list[int]] = []
        logits: list[Logits] = []

        def see(input_ids: Ids, scores: Logits) -> Logits:
            ids.append(input_ids.tolist())
            logits.append(scores.copy())
            return scores

        seen.append((ids, logits))
        return take(llama, prompt, 25, seed=4, logits_processor=LogitsProcessorList([see]))

    tokens = rivals.check(watched)
    assert len(seen) == 4  # the rehearsal, Llama, the session in two ways
    for ids, logits in seen[1:]:
        assert ids == [prompt + tokens[:i] for i in range(25)]
        assert spread(np.stack(logits), np.stack(seen[1][1])) <= 1e-4


def test_views_stay_as_they_were(rivals: Rivals) -> None:
    """A callback may keep the ids it was given without a copy."""
    kept: list[Ids] = []

    def keep(ids: Ids, _: Logits) -> bool:
        kept.append(ids)
        return False

    prompt = text_ids(20, 3)
    tokens = take_plain(rivals.judge, prompt, 40, **GREEDY)
    with forced(rivals.session, [Text(prompt, tokens)], (3, 0)):
        take(rivals.session, prompt, 30, **GREEDY, stopping_criteria=StoppingCriteriaList([keep]))
    assert [ids.tolist() for ids in kept] == [prompt + tokens[:i] for i in range(30)]


def test_criteria_see_the_logits_of_their_token(rivals: Rivals) -> None:
    """Also the last time, after the end of a completion, and without logits_all (where Llama has none to show)."""
    best: list[int] = []

    def keep(_: Ids, logits: Logits) -> bool:
        best.append(int(logits.argmax()))
        return False

    prompt, options = text_ids(20, 3), {"stopping_criteria": StoppingCriteriaList([keep])}
    expected = take_plain(rivals.judge, prompt, 40, **GREEDY)
    for schedule in ((FULL, 2), (0,)):
        best.clear()
        with forced(rivals.session, [Text(prompt, expected)], schedule):
            answer = rivals.session(prompt, temperature=0.0, max_tokens=12, **options)
        n = answer["usage"]["completion_tokens"]
        assert best == [*expected[:n], expected[n - 1]]


# Stopping.


@pytest.mark.parametrize("length", [20, 21, 22, 25, 29])
def test_stopping_criteria(rivals: Rivals, length: int) -> None:
    prompt = text_ids(20, 3)
    options: dict[str, Any] = {"stopping_criteria": criteria(length)}
    rivals.check(lambda llama: llama(prompt, temperature=0.0, max_tokens=20, **options))
    rivals.check(lambda llama: llama(prompt, seed=3, max_tokens=20, stream=True, **options))
    tokens = rivals.check(lambda llama: take(llama, prompt, 99, **GREEDY, **options))
    assert len(tokens) == length - 20


# Changing the logits.


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_processors_with_a_state(rivals: Rivals, stream: bool) -> None:
    """A processor that counts its calls, as many do: an extra call for a rejected row would change the text."""

    def counting() -> LogitsProcessorList:
        calls = iter(range(10**6))

        def process(_: Ids, scores: Logits) -> Logits:
            out = np.full_like(scores, -np.inf)
            allowed = LETTERS[next(calls) % 5 :: 5]
            out[allowed] = scores[allowed]
            return out

        return LogitsProcessorList([process])

    rivals.check(lambda llama: llama(PROMPT, seed=2, max_tokens=30, stream=stream, logits_processor=counting()))


def test_processors_in_place_and_several(rivals: Rivals) -> None:
    def in_place(_: Ids, scores: Logits) -> Logits:
        scores[LETTERS] += 3.0
        return scores

    processors = LogitsProcessorList([in_place, letters_only, in_place])
    rivals.check(lambda llama: llama(PROMPT, seed=2, max_tokens=30, logits_processor=processors))
    rivals.check(lambda llama: llama(PROMPT, seed=2, max_tokens=30, logits_processor=LogitsProcessorList()))


def test_bias_and_processor_together(rivals: Rivals) -> None:
    """Llama 0.3.36 then applies neither, and leaves the bias in the caller's list; a session applies both."""
    processors = LogitsProcessorList([letters_only])
    bias = {LETTERS[3]: 100.0}
    text = rivals.session(PROMPT, seed=1, logits_processor=processors, logit_bias=bias)["choices"][0]["text"]
    assert text == "d" * 16
    assert processors == [letters_only]
    plain = rivals.plain(PROMPT, seed=1, logits_processor=LogitsProcessorList([letters_only]), logit_bias=bias)
    assert plain["choices"][0]["text"] != text


# Errors.


class Mine(Exception):
    """Raised by a caller's own callback."""


def raise_at(length: int, error: BaseException) -> Callable[[Ids, Logits], Any]:
    """A processor or criterion that raises behind `length` tokens."""

    def callback(ids: Ids, scores: Logits) -> Any:
        if len(ids) == length:
            raise error
        return scores if scores.strides[0] != 4 else False  # the candidates of a processor are not contiguous

    return callback


@pytest.mark.parametrize("error", [Mine("x"), ValueError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("at", [0, 1, 4, 8])
def test_exceptions_arrive(rivals: Rivals, kind: str, at: int, error: BaseException) -> None:
    """Llama loses those of processors (ctypes prints them) and goes on; here they end the call, and nothing else."""
    session, prompt = rivals.session, text_ids(30, 7)
    expected = take_plain(rivals.judge, prompt, 20, **GREEDY)
    callback = raise_at(30 + at, error)
    lists: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([callback]),
        "stopping_criteria": StoppingCriteriaList([callback]),
    }
    with forced(session, [Text(prompt, expected)], (FULL,)), pytest.raises(type(error)) as raised:
        take(session, prompt, 20, **GREEDY | {kind: lists[kind]})
    assert raised.value is error
    assert session._input_ids.tolist() == prompt + expected[:at]
    rivals.check(lambda llama: take(llama, prompt, 12, **GREEDY), schedules=[(FULL,)])


EXCLUDE = {
    "all": lambda _, scores: np.full_like(scores, -np.inf),
    "not numbers": lambda _, scores: scores * np.nan,
    "nothing returned": lambda _, scores: None,
}


@pytest.mark.parametrize("exclude", EXCLUDE.values(), ids=EXCLUDE)
@pytest.mark.parametrize("grammar", [None, 'root ::= "ab"'])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 1}, {"mirostat_mode": 2}], ids=str)
def test_nothing_left_to_sample(
    rivals: Rivals, exclude: Callable[[Ids, Logits], Any], grammar: str | None, options: dict[str, Any]
) -> None:
    """With a grammar, Llama ends the process here."""
    if grammar is not None:
        options = options | {"grammar": llama_cpp.LlamaGrammar.from_string(grammar, verbose=False)}
    with pytest.raises(DecodeError, match="no token is left"):
        rivals.session(PROMPT, logits_processor=LogitsProcessorList([exclude]), **options)
    rivals.check(lambda llama: llama(PROMPT, seed=1), schedules=[None])


def test_end_of_text_excluded_behind_a_grammar(rivals: Rivals) -> None:
    def no_end(_: Ids, scores: Logits) -> Logits:
        out = scores.copy()
        out[[EOS, EOT]] = -np.inf
        return out

    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "ab"', verbose=False)
    with pytest.raises(DecodeError, match="no token is left"):
        rivals.session(PROMPT, grammar=grammar, logits_processor=LogitsProcessorList([no_end]), temperature=0.0)


BAD_GRAMMARS = ["root ::= (((", 'foo ::= "a"', 'root ::= root "a"', 'root ::= "a\0b"', "root", "::=", "root ::= a"]
DEEP = "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000


@pytest.mark.parametrize("text", [*BAD_GRAMMARS, DEEP], ids=lambda text: repr(text[:20]))
def test_bad_grammars(rivals: Rivals, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Llama's process ends here."""
    with pytest.raises(ConfigError, match="grammar"):
        rivals.session(PROMPT, grammar=llama_cpp.LlamaGrammar.from_string(text, verbose=False))
    rivals.check(lambda llama: llama(PROMPT, seed=1), schedules=[None])


def test_parentheses_that_do_not_nest(rivals: Rivals) -> None:
    quoted = 'root ::= "' + "(" * 2000 + '" [(]* # ' + "(" * 2000 + "\n"
    grammar = llama_cpp.LlamaGrammar.from_string(quoted, verbose=False)
    rivals.check(lambda llama: llama(PROMPT, grammar=grammar, temperature=0.0), schedules=[None])


Call = Callable[[SpecSession], object]
BAD_SETTINGS: dict[str, Call] = {
    "grammar as text": lambda s: s("x", grammar='root ::= "a"'),  # type: ignore[arg-type]
    "bias on a token that is not there": lambda s: s("x", logit_bias={320: 1.0}),
    "bias on a negative token": lambda s: s("x", logit_bias={-1: 1.0}),
    "bias on a word": lambda s: s("x", logit_bias={"sea": 1.0}),
    "top_k of another type": lambda s: s("x", top_k=5.0),  # type: ignore[arg-type]
    "temperature None": lambda s: s("x", temperature=None),  # type: ignore[arg-type]
    "temperature text": lambda s: s("x", temperature="1"),  # type: ignore[arg-type]
    "seed of another type": lambda s: s("x", seed=1.5),  # type: ignore[arg-type]
    "prompt None": lambda s: s(None),  # type: ignore[arg-type]
    "prompt of bytes": lambda s: s(b"abc"),  # type: ignore[arg-type]
    "prompt as a tuple": lambda s: s((40, 41)),  # type: ignore[arg-type]
    "streamed": lambda s: list(s("x", stream=True, top_k="a")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings(rivals: Rivals, call: Call) -> None:
    rivals.session.set_seed(1)
    with pytest.raises(LagunaError):
        call(rivals.session)
    rivals.check(lambda llama: llama(PROMPT, seed=1), schedules=[None])


def test_peek_changes_nothing(rivals: Rivals, tiny_target: Any, tiny_drafter: Any) -> None:
    """A session that was watched holds what one from scratch holds."""
    prompt = text_ids(25, 1)
    expected = take_plain(rivals.judge, prompt, 40, **GREEDY)
    with forced(rivals.session, [Text(prompt, expected)], (2, FULL)):
        tokens = take(rivals.session, prompt, 20, **GREEDY, logits_processor=Peek())
    check_state(rivals.session, Scratch(tiny_target, tiny_drafter), prompt + tokens[:-1])


def test_letters_only_is_left_alone() -> None:
    """The list that these tests share was not written to."""
    assert LETTERS_ONLY["logits_processor"] == [letters_only]
