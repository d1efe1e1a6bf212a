"""Completions: every setting that Llama takes, whole and streamed."""

from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from session_tools import Scratch, check_state, text_ids
from surface_tools import LETTERS_ONLY, PROMPT, WHOLE_ROUNDS, Rivals, ends_at

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "one token": {"temperature": 0.0, "max_tokens": 1},
    "two tokens": {"temperature": 0.0, "max_tokens": 2},
    "part of a token": {"temperature": 0.0, "max_tokens": 7.5},
    "negative temperature": {"temperature": -1.0},
    "seed": {"temperature": 0.8, "seed": 7},
    "large seed": {"temperature": 0.8, "seed": 2**40 + 5},
    "negative seed": {"temperature": 0.8, "seed": -3},
    "top_k": {"seed": 1, "top_k": 3, "top_p": 1.0, "min_p": 0.0},
    "no top_k": {"seed": 1, "top_k": 0},
    "top_p": {"seed": 1, "top_p": 0.4, "min_p": 0.0},
    "min_p": {"seed": 1, "min_p": 0.3, "top_p": 1.0},
    "typical_p": {"seed": 1, "typical_p": 0.5},
    "all of them": {"temperature": 1.2, "seed": 8, "top_k": 10, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9},
    "repeat penalty": {"temperature": 0.0, "repeat_penalty": 1.4},
    "repeat penalty sampled": {"seed": 2, "repeat_penalty": 1.3},
    "frequency and presence": {"seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "rewarded repetition": {"temperature": 0.0, "frequency_penalty": -1.0},
    "mirostat 1": {"seed": 3, "mirostat_mode": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
    "mirostat 2": {"seed": 3, "mirostat_mode": 2, "mirostat_tau": 4.0},
    "mirostat and greedy": {"temperature": 0.0, "mirostat_mode": 2},
    "tfs_z": {"seed": 3, "tfs_z": 0.5},
    "logit bias": {"temperature": 0.0, "logit_bias": {"200": 5.0, "100": -100.0}},
    "sampled logit bias": {"seed": 4, "logit_bias": {110: 3.0}},
    "suffix": {"temperature": 0.0, "suffix": "fin"},
    "empty suffix": {"temperature": 0.0, "suffix": ""},
    "model": {"temperature": 0.0, "model": "another name"},
    "no stop": {"seed": 4, "stop": None},
    "empty stop": {"seed": 4, "stop": [""]},
    "letters": {"temperature": 0.7, "seed": 1, **LETTERS_ONLY},
}


@STREAM
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(rivals: Rivals, settings: dict[str, Any], stream: bool) -> None:
    options = {"max_tokens": 28, "seed": 11, "stream": stream} | settings
    rivals.check(lambda llama: llama.create_completion(PROMPT, **options))


@pytest.mark.parametrize("prompt", [text_ids(50, 1), text_ids(1, 2), "", "x", "é ☺ naïve", "<user>\nhi\n</user>\n"])
def test_prompts(rivals: Rivals, prompt: str | list[int]) -> None:
    rivals.check(lambda llama: llama.create_completion(prompt, temperature=0.0, max_tokens=30))
    rivals.check(lambda llama: llama(prompt, max_tokens=30, seed=5))


def test_seeds_of_the_session(rivals: Rivals) -> None:
    """Without a seed a completion draws one from the last; `set_seed` and a seed of a call give that text again."""

    def sequence(llama: llama_cpp.Llama) -> list[Any]:
        llama.set_seed(5)
        answers = [llama(PROMPT), llama(PROMPT), llama(PROMPT, seed=5), llama(PROMPT), llama(PROMPT, seed=5)]
        llama.set_seed(5)
        return [*answers, llama(PROMPT)]

    texts = [answer["choices"][0]["text"] for answer in rivals.check(sequence)]
    assert texts[0] == texts[-1] and texts[2] == texts[4] and len(set(texts)) >= 3


def test_text_in_other_places(rivals: Rivals) -> None:
    answer = rivals.check(lambda llama: llama(PROMPT, echo=True, seed=4, **LETTERS_ONLY))
    assert answer["choices"][0]["text"].startswith(PROMPT)
    rivals.check(lambda llama: llama(PROMPT, echo=True, seed=4, suffix="end"))
    rivals.check(lambda llama: llama("", echo=True, seed=4))


def test_warm_completions(rivals: Rivals) -> None:
    """A request takes over the prefix of the one before; the same prompt again takes over everything."""
    longer = PROMPT + " and of the land"
    calls = (PROMPT, PROMPT, longer, PROMPT, longer[:10], longer, "another", longer)

    def sequence(llama: llama_cpp.Llama) -> list[Any]:
        return [llama(prompt, seed=3, max_tokens=12) for prompt in calls]

    rivals.check(sequence)


@STREAM
@pytest.mark.parametrize("at", [0, 1, 2, 5, 9, 13])
@pytest.mark.parametrize("n_chars", [1, 2, 4])
def test_stop_strings(rivals: Rivals, at: int, n_chars: int, stream: bool) -> None:
    """A stop string anywhere in an accepted run, of one token or split over several."""
    options: dict[str, Any] = {"seed": 5, "max_tokens": 30, **LETTERS_ONLY}
    rivals.plain.reset()
    text = rivals.plain.create_completion(PROMPT, **options)["choices"][0]["text"]
    stop = text[at : at + n_chars]
    answer = rivals.check(
        lambda llama: llama(PROMPT, stop=["0123", stop], stream=stream, **options), schedules=WHOLE_ROUNDS
    )
    got = "".join(chunk["choices"][0]["text"] for chunk in answer) if stream else answer["choices"][0]["text"]
    assert got == text[: text.index(stop)]
    assert (answer[-1] if stream else answer)["choices"][0]["finish_reason"] == "stop"


@STREAM
def test_request_after_a_stop(rivals: Rivals, stream: bool) -> None:
    """What was drafted beyond the stop string is gone: the next turn is as from scratch."""
    options: dict[str, Any] = {"seed": 5, "max_tokens": 30, **LETTERS_ONLY}
    rivals.plain.reset()
    text = rivals.plain.create_completion(PROMPT, **options)["choices"][0]["text"]
    for at in (0, 1, 6, 11):
        stop = text[at : at + 2]

        def two_turns(llama: llama_cpp.Llama, stop: str = stop) -> list[Any]:
            first = llama(PROMPT, stop=stop, **options)
            second = llama(PROMPT + first["choices"][0]["text"] + " more", stream=stream, **options)
            return [first, list(second) if stream else second]

        rivals.check(two_turns, schedules=WHOLE_ROUNDS)


@STREAM
@pytest.mark.parametrize("eog", [2, 24], ids=["eos", "eot"])
@pytest.mark.parametrize("at", [0, 1, 3, 8])
def test_end_inside_an_accepted_run(rivals: Rivals, at: int, eog: int, stream: bool) -> None:
    prompt = text_ids(20, 3)
    processor = ends_at(20 + at, eog)
    options: dict[str, Any] = {"temperature": 0.0, "stream": stream, "logits_processor": processor}
    answer = rivals.check(lambda llama: llama(prompt, **options), schedules=WHOLE_ROUNDS)
    assert (answer[-1] if stream else answer)["choices"][0]["finish_reason"] == "stop"
    assert rivals.session.n_tokens == 20 + at


GRAMMARS = ['root ::= "ab" [c-h]* "z"', "root ::= [aeiou] [k-n] [aeiou] [x-z]", "root ::= ([a-f] [0-9])+", ""]


@STREAM
@pytest.mark.parametrize("text", GRAMMARS)
def test_grammar(rivals: Rivals, text: str, stream: bool) -> None:
    """Grammars that drafts break, that end the text, and none; each token is told to the grammar once."""
    grammar = llama_cpp.LlamaGrammar.from_string(text, verbose=False)
    for options in ({"temperature": 0.0}, {"temperature": 1.5, "seed": 6}, {"mirostat_mode": 2, "seed": 6}):
        rivals.check(lambda llama, o=options: llama(PROMPT, grammar=grammar, stream=stream, max_tokens=25, **o))


def test_grammar_with_everything_else(rivals: Rivals) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "[" ([a-z]+ ",")* [a-z]+ "]"', verbose=False)
    options: dict[str, Any] = {
        "grammar": grammar,
        "logit_bias": {25 + 11: 2.0},
        "repeat_penalty": 1.2,
        "stop": ["e"],
        "seed": 9,
        "max_tokens": 40,
    }
    for seed in range(4):
        rivals.check(lambda llama, s=seed: llama(PROMPT, **options | {"seed": s}))


@STREAM
@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 3},
        {"logprobs": 0},
        {"logprobs": 1000, "max_tokens": 3},
        {"logprobs": 2, "echo": True},
        {"logprobs": 2, "stop": ["e"]},
        {"logprobs": 2, "temperature": 0.0, "logit_bias": {"100": 9.0}, "logits_processor": None},
        {"logprobs": 1, "max_tokens": 1},
    ],
    ids=str,
)
def test_logprobs(scored: Rivals, options: dict[str, Any], stream: bool) -> None:
    """The target's own log probabilities, of every token and its rivals."""
    settings = {"seed": 1, "max_tokens": 20, "stream": stream, **LETTERS_ONLY} | options
    answer = scored.check(lambda llama: llama(PROMPT, **settings))
    chunks = answer if stream else [answer]
    found = [value for c in chunks for value in (c["choices"][0]["logprobs"] or {}).get("token_logprobs", [])]
    assert found and all(value is None or -30 < value < 0 for value in found)


def test_logprobs_need_logits_all(rivals: Rivals) -> None:
    with pytest.raises(ValueError, match="logits_all"):
        rivals.check(lambda llama: llama("x", logprobs=2))


def test_scores(scored: Rivals) -> None:
    """With logits_all the scores of all positions are kept, those of accepted drafts too and no others'."""
    scored.check(lambda llama: (llama(PROMPT, seed=1, max_tokens=30), llama.eval_logits[-1][:4])[1])
    n = scored.plain.n_tokens
    assert scored.session._scores.shape == scored.plain._scores.shape
    assert abs(scored.session.scores[:n] - scored.plain.scores[:n]).max() < 1e-4


@pytest.mark.parametrize("n_chunks", [1, 2, 5, 9])
def test_abandoned_stream(rivals: Rivals, tiny_target: Path, tiny_drafter: Path, n_chunks: int) -> None:
    """A consumer that goes away leaves exactly what it was given, and the next call is as ever."""
    prompt = text_ids(20, 3)

    def abandon(llama: llama_cpp.Llama) -> list[Any]:
        stream = llama(prompt, stream=True, temperature=0.0, **LETTERS_ONLY)
        chunks = list(islice(stream, n_chunks))
        del stream
        assert llama.n_tokens == 20 + n_chunks - 1
        return [chunks, llama._input_ids.tolist(), llama(prompt, temperature=0.0)]

    rivals.check(abandon, schedules=WHOLE_ROUNDS)
    check_state(rivals.session, Scratch(tiny_target, tiny_drafter), rivals.session._input_ids.tolist())
