"""Below completions: generate, proposals, eval and sample, saved states, prompt caches, tokenizers, the end."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer

from laguna_gguf import LagunaError, SpecSession
from laguna_gguf.errors import ConfigError, DecodeError, UnsupportedError
from session_tools import GREEDY, SAMPLED, Scratch, check_state, plain_llama, spec_session, take, text_ids
from surface_tools import PROMPT, Rivals, Text, difference, forced, whole

Llama = llama_cpp.Llama


# generate.


@pytest.mark.parametrize(
    "sampler",
    [
        GREEDY,
        SAMPLED,
        {"mirostat_mode": 1},
        {"temp": -1.0},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3},
        {"typical_p": 0.7, "min_p": 0.2},
    ],
    ids=str,
)
def test_generate(rivals: Rivals, sampler: dict[str, Any]) -> None:
    for seed in range(3):
        rivals.check(lambda llama, s=seed: take(llama, text_ids(30, s), 40, seed=s, **sampler))


def test_end_of_text_does_not_end_generate(rivals: Rivals) -> None:
    """As with Llama, only the consumer ends it; a grammar then goes on with end-of-text tokens."""
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "ab"', verbose=False)
    tokens = rivals.check(lambda llama: take(llama, text_ids(9), 12, temp=0.0, grammar=grammar))
    assert tokens[:2] == [25 + 97, 25 + 98] and set(tokens[2:]) <= {2, 24}


def test_proposals(scored: Rivals) -> None:
    """Tokens sent in are tried as drafts by both, right or not (Llama needs logits_all, or its process ends)."""
    prompt = text_ids(20, 8)
    coming = take(scored.judge, prompt, 40, **GREEDY)

    def propose(llama: Llama) -> list[int]:
        stream = llama.generate(prompt, **GREEDY)
        tokens = [next(stream)]
        for i, proposal in enumerate(([40, 41], [], coming[3:6], [9])):
            tokens.append(stream.send(proposal))
            if i % 2:
                tokens.append(next(stream))
        stream.close()
        return tokens

    tokens = scored.check(propose, schedules=[None])
    assert tokens == coming[:7]


def test_without_reset(rivals: Rivals) -> None:
    """reset=False goes on behind what is there."""

    def go_on(llama: Llama) -> list[list[int]]:
        turns = [take(llama, text_ids(20, 1), 3, **GREEDY)]
        turns.append(list(islice(llama.generate(text_ids(5, 2), reset=False, **GREEDY), 20)))
        turns.append(list(islice(llama.generate(text_ids(1, 3), reset=False, temp=0.9), 9)))
        llama.eval(text_ids(4, 5))
        turns.append(list(islice(llama.generate([], reset=False, **GREEDY), 9)))
        return turns

    rivals.check(go_on)


# eval and sample.


def test_eval_and_sample(rivals: Rivals) -> None:
    def loop(llama: Llama) -> list[int]:
        llama._sampler = None  # Llama.sample takes the chain of the last generate, whatever its own arguments say
        llama.eval(text_ids(20, 1))
        tokens = []
        for _ in range(12):
            tokens.append(llama.sample(temp=0.0, repeat_penalty=1.1))
            llama.eval(tokens[-1:])
        return tokens

    rivals.check(loop, schedules=[None])


def test_sample_after_generate(rivals: Rivals) -> None:
    """After a round that was cut, the logits are those of the last token, not of a rejected one."""
    prompt = text_ids(20, 1)
    for n in (1, 2, 4, 5, 9):

        def closed(llama: Llama, n: int = n) -> list[int]:
            tokens = take(llama, prompt, n, **GREEDY)
            return [*tokens, llama.sample(), llama.sample(idx=llama.n_tokens - 1)]

        tokens = rivals.check(closed)
        assert tokens[-1] == tokens[-2] == tokens[-3]  # the newest token again: it is not evaluated


def test_sample_at_other_positions(scored: Rivals) -> None:
    def several(llama: Llama) -> list[int]:
        llama._sampler = None
        llama.eval(text_ids(12, 1))
        return [llama.sample(temp=0.0, idx=i) for i in range(12)]

    scored.check(several, schedules=[None])


def test_sample_without_logits(rivals: Rivals) -> None:
    """Llama's process ends at each of these."""
    session = rivals.session
    session.reset()
    with pytest.raises(DecodeError, match="eval"):
        session.sample()
    session.eval(text_ids(100, 1))
    for idx in (-1, 0, 50, 100, 2**40):
        with pytest.raises(DecodeError, match="idx"):
            session.sample(idx=idx)
    expected = session.sample(temp=0.0)
    state = session.save_state()
    session.reset()
    session.load_state(state)
    assert session.sample(temp=0.0) == expected


def test_tokens_taken_back_by_hand(rivals: Rivals) -> None:
    """Libraries around Llama set n_tokens and evaluate again."""

    def rewind(llama: Llama) -> list[Any]:
        take(llama, text_ids(30, 1), 10, **GREEDY)
        llama.n_tokens = 25
        llama.eval(text_ids(3, 2))
        first = take(llama, llama._input_ids.tolist(), 5, **GREEDY)
        llama.n_tokens = 7
        return [first, take(llama, text_ids(30, 1), 5, **GREEDY)]

    rivals.check(rewind)


# States and caches.


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_states_between_llama_and_session(rivals: Rivals, n: int, tiny_target: Path, tiny_drafter: Path) -> None:
    """A state saved by either, also in the middle of a round, is good in the other and in another session."""
    prompt = text_ids(50, 1)
    expected = take(rivals.judge, prompt, 40, **GREEDY)
    others = [plain_llama(tiny_target), spec_session(tiny_target, tiny_drafter, draft_max=3)]
    for saver in (rivals.plain, rivals.session):
        saver.reset()
        with forced(rivals.session, [Text(prompt, expected)], (4,)):
            stream = saver.generate(prompt, **GREEDY)
            assert list(islice(stream, n)) == expected[:n]
            state = saver.save_state()
            stream.close()
        for loader in (rivals.plain, rivals.session, *others):
            loader.reset()
            loader.load_state(state)
            assert loader._input_ids.tolist() == prompt + expected[: n - 1]
            assert loader._seed == saver._seed
            loader.eval(expected[n - 1 : n])
            assert list(islice(loader.generate([], reset=False, **GREEDY), 20)) == expected[n : n + 20]
            if isinstance(loader, SpecSession):
                check_state(loader, Scratch(tiny_target, tiny_drafter), loader._input_ids.tolist())


def damaged(state: Any, **changes: Any) -> Any:
    names = ("input_ids", "scores", "n_tokens", "llama_state", "llama_state_size", "seed")
    return llama_cpp.LlamaState(**{name: getattr(state, name) for name in names} | changes)


STATES: dict[str, Callable[[Any], Any]] = {
    "cut": lambda s: damaged(s, llama_state=s.llama_state[:999], llama_state_size=999),
    "size too large": lambda s: damaged(s, llama_state_size=s.llama_state_size + 5),
    "zeros": lambda s: damaged(s, llama_state=bytes(s.llama_state_size)),
    "other scores": lambda s: damaged(s, scores=np.zeros((3, 7), np.single)),
    "ids outside": lambda s: damaged(s, input_ids=np.full(512, 400, np.intc)),
    "negative ids": lambda s: damaged(s, input_ids=np.full(512, -1, np.intc)),
    "more tokens than the context": lambda s: damaged(
        s, n_tokens=10**6, input_ids=np.zeros(10**6, np.intc), scores=s.scores[:1]
    ),
    "no state": lambda s: None,
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_damaged_states(rivals: Rivals, change: Callable[[Any], Any], tiny_target: Path, tiny_drafter: Path) -> None:
    """An error, and an empty session that is as good as new."""
    session = rivals.session
    take(session, text_ids(40, 1), 4, **GREEDY)
    state = change(session.save_state())
    with pytest.raises(LagunaError):
        session.load_state(state)
    assert session.n_tokens == 0
    check_state(session, Scratch(tiny_target, tiny_drafter), [])
    rivals.check(lambda llama: take(llama, text_ids(20, 2), 12, **GREEDY))


def test_states_that_lack_cells(rivals: Rivals) -> None:
    """What the cache of a state lacks is evaluated again: nothing is missing silently, or left from before."""
    session, prompt = rivals.session, text_ids(40, 1)
    expected = take(rivals.judge, prompt, 20, **GREEDY)
    session.reset()
    session.eval(prompt[:30])
    short = session.save_state()
    ids = short.input_ids.copy()
    ids[: len(prompt)] = prompt
    longer = damaged(short, n_tokens=len(prompt), input_ids=ids, scores=short.scores[:1])
    for state in (longer, damaged(longer, llama_state=b"", llama_state_size=0)):
        take(session, text_ids(60, 2), 3, **GREEDY)
        session.load_state(state)
        assert list(islice(session.generate([], reset=False, **GREEDY), 20)) == expected


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("n_more", [1, 25, 80])
def test_going_back_in_a_restored_context(
    tiny_target: Path, tiny_drafter: Path, rivals: Rivals, n_more: int, swa_full: bool
) -> None:
    """A state holds a sliding layer's window only, whatever swa_full says; Llama goes back beyond it unnoticed."""
    session = spec_session(tiny_target, tiny_drafter, swa_full=swa_full)
    history = text_ids(100, 1)
    session.eval(history)
    session.load_state(session.save_state())
    session.eval(text_ids(n_more, 2))
    for n in (99, 80, 60, 20):
        prompt = history[:n] + text_ids(2, 3)
        assert take(session, prompt, 12, **GREEDY) == take(rivals.judge, prompt, 12, **GREEDY)


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompt_cache(tmp_path: Path, tiny_target: Path, tiny_drafter: Path, kind: str, stream: bool) -> None:
    """Llama's prompt caches change the time of completions, not their text.

    Compared with a Llama without one: a state holds a sliding layer's window only, and Llama, unlike a session, goes
    back further than that in a restored context.
    """
    session, plain = spec_session(tiny_target, tiny_drafter), plain_llama(tiny_target)
    session.set_cache(llama_cpp.LlamaRAMCache() if kind == "ram" else llama_cpp.LlamaDiskCache(str(tmp_path)))
    loads = Counting(session, "load_state")
    prompts = (text_ids(90, 1), text_ids(30, 2), text_ids(90, 1) + text_ids(5, 3), text_ids(30, 2), text_ids(80, 1))
    for i, prompt in enumerate(prompts * 2):
        options: dict[str, Any] = {"seed": i % 3, "stream": stream, "max_tokens": 20}
        plain.reset()
        expected, got = whole(plain(prompt, **options)), whole(session(prompt, **options))
        assert difference(got, expected) is None
        assert session._input_ids.tolist() == plain._input_ids.tolist()
        assert session.drafter.position == session.n_tokens
    assert loads.calls >= 4


class Counting:
    """Counts the calls of a method from now on."""

    def __init__(self, owner: Any, name: str) -> None:
        self.calls = 0
        method = getattr(owner, name)

        def count(*args: Any, **options: Any) -> Any:
            self.calls += 1
            return method(*args, **options)

        setattr(owner, name, count)


# Tokenizers.


class Shouting(BaseLlamaTokenizer):
    """Everything in capitals."""

    def __init__(self, inner: BaseLlamaTokenizer) -> None:
        self.inner = inner

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        return self.inner.tokenize(text.upper(), add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        return self.inner.detokenize(tokens, prev_tokens, special).upper()


def test_tokenizer_override(rivals: Rivals, tiny_target: Path, tiny_drafter: Path) -> None:
    tokenizer = Shouting(rivals.judge.tokenizer())
    own = Rivals(
        plain_llama(tiny_target, tokenizer=tokenizer),
        spec_session(tiny_target, tiny_drafter, tokenizer=tokenizer),
        rivals.judge,
    )
    answer = own.check(lambda llama: llama("the sea", seed=1, echo=True, max_tokens=20), schedules=[None])
    assert answer["choices"][0]["text"].removeprefix("the sea").isupper()


def test_tokens_and_text(rivals: Rivals) -> None:
    """Llama's own calls on text and model."""

    def everything(llama: Llama) -> list[Any]:
        ids = llama.tokenize(PROMPT.encode())
        return [
            ids,
            llama.detokenize(ids),
            llama.tokenize(b"<user>hi</user>", add_bos=False, special=True),
            [llama.n_ctx(), llama.n_embd(), llama.n_vocab(), llama.token_eos(), llama.token_bos(), llama.token_nl()],
            [llama.pooling_type(), llama.chat_format, sorted(llama.metadata.items())],
            [llama.last_n_tokens_size, llama.n_batch, llama.draft_model, llama.verbose, llama._logits_all],
        ]

    rivals.check(everything, schedules=[None])


# What a session does not do.


def test_embeddings_are_refused(rivals: Rivals) -> None:
    for call in (lambda s: s.embed("x"), lambda s: s.create_embedding("x"), lambda s: s.create_embedding(["x"])):
        with pytest.raises(UnsupportedError, match="embed") as error:
            call(rivals.session)
        assert isinstance(error.value, RuntimeError)  # as Llama's
    rivals.check(lambda llama: llama(PROMPT, seed=1), schedules=[None])


def test_penalties_over_other_lengths(rivals: Rivals, tiny_target: Path, tiny_drafter: Path) -> None:
    for last_n in (0, 3, -1, 10**6):
        options: dict[str, Any] = {"last_n_tokens_size": last_n}
        plain, session = plain_llama(tiny_target, **options), spec_session(tiny_target, tiny_drafter, **options)
        rivals.judge.last_n_tokens_size = last_n
        own = Rivals(plain, session, rivals.judge)
        own.check(lambda llama: llama(PROMPT, seed=1, repeat_penalty=1.4, frequency_penalty=0.3, max_tokens=40))
        rivals.judge.last_n_tokens_size = 64


def test_keywords(tiny_target: Path, tiny_drafter: Path) -> None:
    """A misspelt keyword is an error with the nearest name; former ones of Llama's are ignored as Llama does."""
    for name, meant in (("n_ctxx", "n_ctx"), ("n_gpu_layer", "n_gpu_layers"), ("draftmax", "draft_max")):
        with pytest.raises(ConfigError, match=f"{name}.*mean {meant}\\?"):
            spec_session(tiny_target, tiny_drafter, **{name: 1})
    with pytest.raises(ConfigError, match=r"temperature_of_the_sea is no keyword of SpecSession or llama_cpp\.Llama$"):
        spec_session(tiny_target, tiny_drafter, temperature_of_the_sea=1)
    spec_session(tiny_target, tiny_drafter, f16_kv=True, mul_mat_q=True, no_perf=True, spm_infill=False).close()


def test_draft_model_says_where_to_go(tiny_target: Path, tiny_drafter: Path) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    with pytest.raises(ConfigError, match=r"draft_model.*SpecSession\(model_path, draft_model_path\)"):
        spec_session(tiny_target, tiny_drafter, draft_model=LlamaPromptLookupDecoding())
    spec_session(tiny_target, tiny_drafter, draft_model=None).close()


@pytest.mark.parametrize("value", [None, 5, 2.5, ["a"]], ids=repr)
def test_paths_that_are_none(tiny_target: Path, tiny_drafter: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="model_path"):
        SpecSession(value, tiny_drafter)
    with pytest.raises(ConfigError, match="draft_model_path"):
        SpecSession(str(tiny_target), value)


def test_strange_paths(tiny_target: Path, tiny_drafter: Path) -> None:
    for path in ("", "a\0b", "x" * 5000, "\udcff"):
        with pytest.raises(LagunaError):
            SpecSession(path, tiny_drafter)
        with pytest.raises(LagunaError):
            SpecSession(str(tiny_target), path)
    SpecSession(str(tiny_target).encode(), str(tiny_drafter).encode(), verbose=False).close()  # type: ignore[arg-type]
