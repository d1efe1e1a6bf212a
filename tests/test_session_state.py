"""What a session holds between and during calls: always what a computation from scratch would hold."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fixtures import write_drafter_dir
from laguna_gguf import LagunaError, SpecSession
from laguna_gguf.errors import SessionBusyError
from session_tools import (
    FULL,
    GREEDY,
    MIXED,
    STATE_TOLERANCE,
    ForcedDrafts,
    Peek,
    Scratch,
    check_state,
    spec_session,
    spread,
    take,
    take_plain,
    text_ids,
)
from tiny_models import TINY_TARGET

# Any order of calls.

LENGTH = st.integers(1, 60) | st.just(310)
SEED = st.integers(0, 5)


class SessionMachine(RuleBasedStateMachine):
    """Prompts, partly accepted rounds, closed and abandoned generators, eval, reset, saved states, in any order.

    `tokens` is what the session must hold; the scratch computation says what follows from it.
    """

    session: SpecSession
    scratch: Scratch
    plain: llama_cpp.Llama

    @initialize()
    def begin(self) -> None:
        self.session.reset()
        self.tokens: list[int] = []
        self.generated = 0
        self.state: tuple[llama_cpp.LlamaState, list[int]] | None = None

    def run(self, prompt: list[int], n: int, accept: int) -> None:
        """Generate n tokens with forced drafts and close the generator, wherever in a round that is."""
        expected = take_plain(self.plain, prompt, n + 10, **GREEDY)
        forced = ForcedDrafts(self.session, prompt, expected, (accept, accept + 1))
        assert take(self.session, prompt, n, **GREEDY) == expected[:n]
        forced.remove()
        self.tokens = prompt + expected[: n - 1]

    @rule(n_prompt=LENGTH, seed=SEED, n=st.integers(1, 20), accept=st.integers(0, 7))
    def new_prompt(self, n_prompt: int, seed: int, n: int, accept: int) -> None:
        self.run(text_ids(n_prompt, seed), n, accept)

    @precondition(lambda self: 0 < len(self.tokens) < 300)
    @rule(n_more=st.integers(0, 40), seed=SEED, n=st.integers(1, 20), accept=st.integers(0, 7))
    def appended_prompt(self, n_more: int, seed: int, n: int, accept: int) -> None:
        self.run(self.tokens + text_ids(n_more, seed), n, accept)

    @precondition(lambda self: len(self.tokens) > 2)
    @rule(share=st.floats(0, 1), n_more=st.integers(0, 40), seed=SEED, n=st.integers(1, 9), accept=st.integers(0, 7))
    def edited_prompt(self, share: float, n_more: int, seed: int, n: int, accept: int) -> None:
        kept = self.tokens[: max(1, int(share * len(self.tokens)))]
        self.run((kept + text_ids(n_more, seed))[-400:], n, accept)

    @precondition(lambda self: 0 < len(self.tokens) < 300)
    @rule(n=st.integers(2, 12), other=st.sampled_from(["eval", "reset", "prompt"]))
    def abandoned_generator(self, n: int, other: str) -> None:
        prompt = list(self.tokens)
        expected = take_plain(self.plain, prompt, n + 10, **GREEDY)
        forced = ForcedDrafts(self.session, prompt, expected, (FULL,))
        stream = self.session.generate(prompt, **GREEDY)
        assert list(islice(stream, n)) == expected[:n]
        forced.remove()
        self.tokens = prompt + expected[: n - 1]
        if other == "eval":
            self.eval(2, 1)
        elif other == "reset":
            self.reset()
        else:
            self.run([*self.tokens[: len(prompt) - 1], 77, 78], 2, 0)
        with pytest.raises(SessionBusyError):
            next(stream)

    @precondition(lambda self: len(self.tokens) < 300)
    @rule(n=st.integers(1, 40), seed=SEED)
    def eval(self, n: int, seed: int) -> None:
        more = text_ids(n, seed + 100)
        self.session.eval(more)
        self.tokens = self.tokens + more

    @rule()
    def reset(self) -> None:
        self.session.reset()
        self.tokens = []

    @precondition(lambda self: len(self.tokens) > 0)
    @rule()
    def save(self) -> None:
        self.state = self.session.save_state(), list(self.tokens)

    @precondition(lambda self: self.state is not None)
    @rule()
    def load(self) -> None:
        assert self.state is not None
        self.session.load_state(self.state[0])
        self.tokens = list(self.state[1])

    @rule()
    def refused_call(self) -> None:
        with pytest.raises(LagunaError):
            next(self.session.generate([1, 2, 3] * 400))
        with pytest.raises(LagunaError):
            self.session.eval([320])

    @rule()
    def check(self) -> None:
        check_state(self.session, self.scratch, self.tokens)

    def teardown(self) -> None:
        if hasattr(self, "tokens"):
            self.check()


@pytest.mark.parametrize(
    ("window", "options"),
    [
        (32, {"draft_max": 7, "swa_full": False, "n_ubatch": 16}),
        (6, {"draft_max": 15}),
        (200, {"draft_max": 7, "swa_full": False, "n_ubatch": 16}),
        (200, {"draft_max": 0, "swa_full": False}),
    ],
    ids=str,
)
def test_any_order_of_calls(
    tiny_target: Path, tmp_path: Path, plain: llama_cpp.Llama, window: int, options: dict[str, Any]
) -> None:
    """`window` is the drafter's; 200 is more rows than a prompt is decoded whole for."""
    drafter = tmp_path / "drafter"
    write_drafter_dir(drafter, sliding_window=window)
    members = {"session": spec_session(tiny_target, drafter, **options), "plain": plain}
    machine = type("Machine", (SessionMachine,), members | {"scratch": Scratch(tiny_target, drafter)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=6,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# Closing at every yield.


@pytest.mark.parametrize("n", range(1, 20))
def test_close_at_every_yield(session: SpecSession, scratch: Scratch, plain: llama_cpp.Llama, n: int) -> None:
    prompt = text_ids(40, 9)
    expected = take_plain(plain, prompt, 40, **GREEDY)
    ForcedDrafts(session, prompt, expected, (3, FULL, 0))
    stream = session.generate(prompt, **GREEDY)
    assert list(islice(stream, n)) == expected[:n]
    assert session.n_tokens == 40 + n - 1
    stream.close()
    assert session.n_tokens == 40 + n - 1
    assert 40 <= session.drafter.position <= 40 + n - 1
    check_state(session, scratch, prompt + expected[: n - 1])
    assert take(session, prompt + expected[:n], 5, **GREEDY) == expected[n : n + 5]


def test_state_within_a_round(session: SpecSession, plain: llama_cpp.Llama) -> None:
    """Callbacks and suspended consumers see the tokens up to the one before the newest, as with Llama."""
    prompt = text_ids(40, 9)
    expected = take_plain(plain, prompt, 30, **GREEDY)
    ForcedDrafts(session, prompt, expected, MIXED)
    stream = session.generate(prompt, **GREEDY)
    for i, token in enumerate(islice(stream, 20)):
        assert token == expected[i]
        assert session.n_tokens == 40 + i
        assert session._input_ids.tolist() == prompt + expected[:i]
        assert list(session.eval_tokens) == prompt + expected[:i]
        assert 40 <= session.drafter.position <= 40 + i
    stream.close()


def test_drafter_of_a_plain_session(tiny_target: Path, tiny_drafter: Path, scratch: Scratch) -> None:
    """With draft_max=0 nothing is captured until the drafter is asked for."""
    session = spec_session(tiny_target, tiny_drafter, draft_max=0)
    prompt = text_ids(45, 1)
    tokens = prompt + take(session, prompt, 12, **GREEDY)[:-1]
    assert session.stats.plain_rounds == session.stats.rounds == 11
    assert session.drafter.position == len(tokens)
    check_state(session, scratch, tokens)
    session.eval(text_ids(3, 2))
    check_state(session, scratch, tokens + text_ids(3, 2))


# Saved states.


@pytest.mark.parametrize("n_other", [0, 20, 59, 60, 61, 150])
@pytest.mark.parametrize("draft_max", [7, 0])
def test_saved_state(
    tiny_target: Path, tiny_drafter: Path, scratch: Scratch, plain: llama_cpp.Llama, n_other: int, draft_max: int
) -> None:
    """A state comes back whole, whatever target and drafter held meanwhile."""
    session = spec_session(tiny_target, tiny_drafter, draft_max=draft_max)
    prompt = text_ids(50, 1)
    tokens = prompt + take(session, prompt, 11, **GREEDY)
    assert session.n_tokens == 60
    state = session.save_state()
    if n_other:
        take(session, text_ids(n_other, 2), 1, **GREEDY)
        assert session.drafter.position == n_other
    session.load_state(state)
    assert take(session, tokens, 20, **GREEDY) == take_plain(plain, tokens, 20, **GREEDY)
    session.load_state(state)
    check_state(session, scratch, tokens[:60])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("draft_max", [7, 0])
def test_state_saved_within_a_round(
    tiny_target: Path, tiny_drafter: Path, scratch: Scratch, plain: llama_cpp.Llama, draft_max: int, n: int
) -> None:
    """The target then holds rows that were not yielded yet, and rejected ones: they do not come back."""
    prompt = text_ids(50, 1)
    expected = take_plain(plain, prompt, 20, **GREEDY)
    saving = spec_session(tiny_target, tiny_drafter)
    ForcedDrafts(saving, prompt, expected, (4,))
    stream = saving.generate(prompt, **GREEDY)
    assert list(islice(stream, n)) == expected[:n]
    state = saving.save_state()
    tokens = prompt + expected[:n] + text_ids(2, 3)
    session = spec_session(tiny_target, tiny_drafter, draft_max=draft_max)
    session.load_state(state)
    peek = Peek()
    take(session, tokens, 1, **GREEDY, logits_processor=peek)
    assert spread(peek.seen[0], scratch.logits(tokens)) <= STATE_TOLERANCE
    session.load_state(state)
    session.eval(tokens[session.n_tokens :])
    check_state(session, scratch, tokens)


# Going back.


@pytest.mark.parametrize("swa_full", [True, False], ids=["swa_full", "swa_ring"])
@pytest.mark.parametrize("shared", [1, 30, 150, 350, 390, 399])
def test_deep_rewind(tiny_target: Path, tiny_drafter: Path, scratch: Scratch, shared: int, swa_full: bool) -> None:
    """A prompt that shares a prefix with what is there gives the text of a new session, far behind the window too."""
    options: dict[str, Any] = {"swa_full": swa_full, "n_ubatch": 16, "n_ctx": 1024}
    session = spec_session(tiny_target, tiny_drafter, **options)
    history = text_ids(400, 1)
    take(session, history, 30, **GREEDY)
    prompt = history[:shared] + text_ids(3, 2)
    tokens = take(session, prompt, 30, **GREEDY)
    assert tokens == take(spec_session(tiny_target, tiny_drafter, **options), prompt, 30, **GREEDY)
    check_state(session, scratch, prompt + tokens[:-1])


@pytest.mark.parametrize("n_more", [1, 2, 20, 40])
def test_rewind_into_the_captured_rows(session: SpecSession, scratch: Scratch, n_more: int) -> None:
    """The drafter saw the last window of a prompt only; a prompt that branches off in there needs rows before it."""
    history = text_ids(100, 1)
    for shared in (20, 60, 68, 69, 70, 85, 98, 99):
        session.reset()
        take(session, history, 1, **GREEDY)
        tokens = history[:shared] + text_ids(n_more, 2)
        take(session, tokens, 1, **GREEDY)
        check_state(session, scratch, tokens)


def test_rewind_around_the_end_of_the_ring(tiny_target: Path, tiny_drafter: Path, scratch: Scratch) -> None:
    """Lost keys are noticed exactly: one row too few in the window would already show in the logits."""
    session = spec_session(tiny_target, tiny_drafter, draft_max=0, swa_full=False, n_ubatch=16, n_batch=16)
    memory = llama_cpp.llama_get_memory(session.ctx)
    history = text_ids(400, 1)
    decisions = []
    for more in range(-4, 5):
        take(session, history, 1, **GREEDY)
        lowest = llama_cpp.llama_memory_seq_pos_min(memory, 0)
        tokens = [*history[: lowest + TINY_TARGET.window - 1 + more], 40]
        peek = Peek()
        take(session, tokens, 1, **GREEDY, logits_processor=peek)
        decisions.append(llama_cpp.llama_memory_seq_pos_min(memory, 0) == lowest)
        assert spread(peek.seen[0], scratch.logits(tokens)) <= STATE_TOLERANCE
    assert decisions == [False] * 4 + [True] * 5


def test_rewind_by_a_whole_prefix(session: SpecSession, scratch: Scratch, plain: llama_cpp.Llama) -> None:
    """The same prompt again, and a prompt that is a prefix of what is there."""
    prompt = text_ids(100, 3)
    expected = take_plain(plain, prompt, 20, **GREEDY)
    for _ in range(3):
        assert take(session, prompt, 20, **GREEDY) == expected
    check_state(session, scratch, prompt + expected[:19])
    take(session, prompt[:50], 1, **GREEDY)
    check_state(session, scratch, prompt[:50])


def test_prefix_is_reused(session: SpecSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follow-up prompt costs its new tokens only."""
    history = text_ids(300, 4)
    tokens = take(session, history, 10, **GREEDY)
    decoded: list[int] = []
    decode = session._target.decode

    def count(tokens: Sequence[int], **options: Any) -> None:
        decoded.append(len(tokens))
        decode(tokens, **options)

    monkeypatch.setattr(session._target, "decode", count)
    take(session, history + tokens + [30, 31], 1, **GREEDY)
    assert sum(decoded) == 3
    decoded.clear()
    take(session, session._input_ids.tolist(), 1, **GREEDY)
    assert sum(decoded) == 0
