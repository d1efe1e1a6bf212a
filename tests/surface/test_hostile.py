"""Any order of calls, exceptions and interrupts: after each one, a session holds and says what a Llama does."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from llama_cpp import LogitsProcessorList, StoppingCriteriaList

from laguna_gguf import LagunaError
from laguna_gguf.errors import SessionBusyError
from session_tools import Scratch, check_state, plain_llama, spec_session, text_ids
from surface_tools import LETTERS, LETTERS_ONLY, Rivals, difference, forced, rehearse, whole

GRAMMAR = llama_cpp.LlamaGrammar.from_string("root ::= ([a-f] [0-9])* [x-z]", verbose=False)

PROMPTS = st.tuples(
    st.sampled_from(["new", "again", "appended", "edited", "shortened", "text"]), st.integers(1, 60), st.integers(0, 5)
)
SAMPLERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.3, -1.0]),
        "top_k": st.sampled_from([0, 1, 5, 100]),
        "top_p": st.sampled_from([0.3, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "typical_p": st.sampled_from([0.5, 1.0]),
        "repeat_penalty": st.sampled_from([0.8, 1.4]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "presence_penalty": st.sampled_from([-0.5, 0.7]),
        "mirostat_mode": st.sampled_from([1, 2]),
    },
)
COMPLETIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 5)},
    optional={
        "max_tokens": st.sampled_from([1, 2, 9, 25, 40]),
        "stop": st.sampled_from(["e", ["ab", "t"], [""], "zzz"]),
        "stream": st.just(True),
        "grammar": st.just(GRAMMAR),
        "logit_bias": st.just({LETTERS[4]: 3.0, 2: -100.0}),
        "suffix": st.just("end"),
    },
)
LETTERS_TOO = st.sampled_from([{}, LETTERS_ONLY])
SCHEDULES = st.sampled_from([None, (99,), (0, 3, 99), (2, 5), (7, 0)])


class Mine(Exception):
    """Raised by a caller's own callback."""


class Hostile(RuleBasedStateMachine):
    """Each rule makes the same call on both; where Llama has no like of it, its state is made the session's."""

    rivals: Rivals
    scratch: Scratch
    monkeypatch: pytest.MonkeyPatch
    excused: list[str]

    @initialize()
    def begin(self) -> None:
        self.plain, self.session, self.judge = self.rivals.plain, self.rivals.session, self.rivals.judge
        for llama in (self.plain, self.session, self.judge):
            self.rivals.begin(llama)
        self.state: llama_cpp.LlamaState | None = None

    # -- helpers ----------------------------------------------------------------------------------------------------

    def both(self, call: Callable[[Any], Any], schedule: tuple[int, ...] | None = None) -> None:
        """One call on both; the judge makes it too, to know what to draft."""
        texts = rehearse(self.judge, call)
        expected = self.outcome(call, self.plain)
        with nullcontext() if schedule is None else forced(self.session, texts, schedule):
            got = self.outcome(call, self.session)
        if isinstance(expected, BaseException):
            assert isinstance(got, type(expected)), (got, expected)
        else:
            why = difference(got, expected)
            if why is not None:
                self.excuse(why)
        self.compare()

    def excuse(self, why: str) -> None:
        """Once a test: a draw on the border of two tokens (see `Rivals.llama_says_so_too`). The state must be right."""
        self.excused.append(why)
        assert len(self.excused) <= 1, self.excused
        seed = self.session._seed
        check_state(self.session, self.scratch, self.session._input_ids.tolist())
        self.session.set_seed(seed)
        self.follow()

    @staticmethod
    def outcome(call: Callable[[Any], Any], llama: Any) -> Any:
        try:
            return whole(call(llama))
        except (Exception, KeyboardInterrupt) as error:
            return error

    def compare(self) -> None:
        assert self.session._input_ids.tolist() == self.plain._input_ids.tolist()

    def follow(self) -> None:
        """Make the Llamas hold what the session holds, from scratch."""
        for llama in (self.plain, self.judge):
            llama.reset()
            if self.session.n_tokens:
                llama.eval(self.session._input_ids.tolist())

    def prompt(self, kind: str, n: int, seed: int) -> Any:
        held = self.plain._input_ids.tolist()
        more = text_ids(n, seed)
        ids = {
            "new": more,
            "again": held,
            "appended": held + more,
            "edited": held[: len(held) * seed // 6] + more,
            "shortened": held[: len(held) - n],
        }
        return "the sea, " * (n // 5) if kind == "text" else (ids[kind] or more)[-380:]

    # -- calls ------------------------------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, sampler=SAMPLERS, options=COMPLETIONS, letters=LETTERS_TOO, schedule=SCHEDULES)
    def completion(self, prompt: Any, sampler: Any, options: Any, letters: Any, schedule: Any) -> None:
        ids = self.prompt(*prompt)
        if "logit_bias" in options or "grammar" in options:
            letters = {}
        self.both(lambda llama: llama(ids, **sampler, **options, **letters), schedule)

    @rule(prompt=PROMPTS, sampler=SAMPLERS, n=st.integers(1, 12), seed=st.integers(0, 5), schedule=SCHEDULES)
    def abandoned_stream(self, prompt: Any, sampler: Any, n: int, seed: int, schedule: Any) -> None:
        ids = self.prompt(*prompt)
        self.both(
            lambda llama: list(islice(llama(ids, stream=True, seed=seed, **sampler, **LETTERS_ONLY), n)), schedule
        )

    @rule(n=st.integers(1, 60), sampler=SAMPLERS, reset=st.booleans(), prompt=PROMPTS, schedule=SCHEDULES)
    def generate(self, n: int, sampler: Any, reset: bool, prompt: Any, schedule: Any) -> None:
        if self.plain.n_tokens > 300 and not reset:
            return
        ids = self.prompt(*prompt) if reset and prompt[0] != "text" else text_ids(prompt[1], prompt[2])
        options = {("temp" if key == "temperature" else key): value for key, value in sampler.items()}
        self.both(lambda llama: list(islice(llama.generate(ids, reset=reset, **options), n)), schedule)

    @rule(prompt=PROMPTS, n=st.integers(0, 9), error=st.sampled_from([Mine(), KeyboardInterrupt()]), schedule=SCHEDULES)
    def raising_criterion(self, prompt: Any, n: int, error: BaseException, schedule: Any) -> None:
        ids = self.prompt("new" if prompt[0] == "text" else prompt[0], *prompt[1:])
        self.both(lambda llama: llama(ids, seed=1, **raising_at(len(ids) + n, error), **LETTERS_ONLY), schedule)
        self.follow()  # the judge was not interrupted

    @rule(prompt=PROMPTS, n=st.integers(0, 9), error=st.sampled_from([Mine(), KeyboardInterrupt()]), schedule=SCHEDULES)
    def raising_processor(self, prompt: Any, n: int, error: BaseException, schedule: Any) -> None:
        """Llama loses the exception."""
        ids = self.prompt("new" if prompt[0] == "text" else prompt[0], *prompt[1:])

        def process(seen: Any, logits: Any) -> Any:
            if len(seen) == len(ids) + n:
                raise error
            return logits

        texts = rehearse(self.judge, lambda llama: llama(ids, seed=1))
        with nullcontext() if schedule is None else forced(self.session, texts, schedule):
            got = self.outcome(
                lambda llama: llama(ids, seed=1, logits_processor=LogitsProcessorList([process])), self.session
            )
        assert got is error or isinstance(got, dict)  # it may have ended before
        self.outcome(lambda llama: llama(ids, seed=1, **raising_at(len(ids) + n, error)), self.plain)
        self.compare()
        self.follow()

    @rule(prompt=PROMPTS, at=st.integers(0, 5), after=st.booleans(), n=st.integers(1, 20))
    def interrupted_decode(self, prompt: Any, at: int, after: bool, n: int) -> None:
        """Ctrl-C on either side of a llama_decode: what the session then says it holds is what it holds."""
        ids = self.prompt("new" if prompt[0] == "text" else prompt[0], *prompt[1:])
        decode, calls = llama_cpp.llama_decode, iter(range(10**6))

        def interrupt(*arguments: Any) -> int:
            here = next(calls) == at
            if here and not after:
                raise KeyboardInterrupt
            code = decode(*arguments)
            if here:
                raise KeyboardInterrupt
            return code

        with self.monkeypatch.context() as patch:
            patch.setattr(llama_cpp, "llama_decode", interrupt)
            got = self.outcome(lambda llama: list(islice(llama.generate(ids, temp=0.0), n)), self.session)
        assert isinstance(got, (KeyboardInterrupt, list))
        self.follow()

    @precondition(lambda self: 0 < self.plain.n_tokens < 300)
    @rule(n=st.integers(1, 8), other=st.sampled_from(["eval", "reset", "completion"]), schedule=SCHEDULES)
    def taken_over(self, n: int, other: str, schedule: Any) -> None:
        """A generator is left suspended while another call is made; afterwards it cannot go on."""
        ids = self.plain._input_ids.tolist()
        streams = []

        def suspend(llama: Any) -> Any:
            streams.append(llama.generate(ids, temp=0.0))
            return list(islice(streams[-1], n))

        self.both(suspend, schedule)
        streams[0].close()  # the judge's
        if other == "eval":
            self.both(lambda llama: llama.eval([40, 41]))
        elif other == "reset":
            self.both(lambda llama: llama.reset())
        else:
            self.both(lambda llama: llama([50, 51, 52], seed=2))
        with pytest.raises(SessionBusyError):
            next(streams[-1])
        streams.clear()
        self.compare()

    @precondition(lambda self: self.plain.n_tokens < 300)
    @rule(n=st.integers(1, 40), seed=st.integers(0, 5))
    def eval(self, n: int, seed: int) -> None:
        self.both(lambda llama: llama.eval(text_ids(n, seed)))

    @precondition(lambda self: self.plain.n_tokens > 0)
    @rule(temp=st.sampled_from([0.0, 0.9]))
    def sample(self, temp: float) -> None:
        def call(llama: Any) -> int:
            llama._sampler = None
            if llama._requires_eval and llama is not self.session:  # as the session does for its caller
                tokens = llama._input_ids.tolist()
                llama.n_tokens -= 1
                llama.eval(tokens[-1:])
            return llama.sample(temp=temp)

        self.both(call)

    @precondition(lambda self: self.plain.n_tokens > 1)
    @rule(share=st.floats(0, 1))
    def rewind_by_hand(self, share: float) -> None:
        n = int(share * self.plain.n_tokens)

        def rewind(llama: Any) -> None:
            llama.n_tokens = n
            llama.eval([60, 61])

        self.both(rewind)

    @rule()
    def reset(self) -> None:
        self.both(lambda llama: llama.reset())

    @rule(seed=st.integers(0, 2**33))
    def set_seed(self, seed: int) -> None:
        self.both(lambda llama: llama.set_seed(seed))

    @precondition(lambda self: self.plain.n_tokens > 0)
    @rule(saver=st.sampled_from(["plain", "session"]))
    def save(self, saver: str) -> None:
        self.state = getattr(self, saver).save_state()

    @precondition(lambda self: self.state is not None)
    @rule()
    def load(self) -> None:
        assert self.state is not None
        self.session.load_state(self.state)
        for llama in (self.plain, self.judge):
            llama.set_seed(self.state.seed)
        self.follow()  # a Llama goes wrong when it goes back in a restored context
        self.compare()

    @rule()
    def refused(self) -> None:
        before, seed = self.session._input_ids.tolist(), self.session._seed
        for call in (
            lambda s: next(s.generate([1, 2, 3] * 400)),
            lambda s: s.eval([320]),
            lambda s: s("x", top_k="a"),
            lambda s: s("x" * 3000),
            lambda s: s.sample(idx=-3),
        ):
            with pytest.raises(LagunaError):
                call(self.session)
        assert self.session._input_ids.tolist() == before
        self.session.set_seed(seed)  # a completion draws its seed before it is refused, as Llama's

    @rule()
    def check(self) -> None:
        seed = self.session._seed
        check_state(self.session, self.scratch, self.plain._input_ids.tolist())
        self.session.set_seed(seed)

    def teardown(self) -> None:
        if hasattr(self, "plain"):
            self.check()


def raising_at(length: int, error: BaseException) -> dict[str, Any]:
    def criterion(ids: Any, _: Any) -> bool:
        if len(ids) == length:
            raise error
        return False

    return {"stopping_criteria": StoppingCriteriaList([criterion])}


@pytest.mark.parametrize(
    "options",
    [
        {"draft_max": 7},
        {"draft_max": 7, "swa_full": False, "n_ubatch": 16},
        {"draft_max": 15, "logits_all": True, "n_batch": 48},
        {"draft_max": "auto", "swa_full": False},
        {"draft_max": 0},
    ],
    ids=str,
)
def test_any_order_of_calls(
    tiny_target: Path,
    tiny_drafter: Path,
    judge: llama_cpp.Llama,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    members = {
        "rivals": Rivals(plain_llama(tiny_target), spec_session(tiny_target, tiny_drafter, **options), judge),
        "scratch": Scratch(tiny_target, tiny_drafter),
        "monkeypatch": monkeypatch,
        "excused": [],
    }
    run_state_machine_as_test(
        type("Machine", (Hostile,), members),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=14,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


EXAMPLES = 5
