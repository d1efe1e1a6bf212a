"""The same calls on a llama_cpp.Llama and on a SpecSession, and what they answer compared whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from laguna_gguf import LagunaError, SpecSession
from session_tools import FULL, MIXED, ForcedDrafts

PROMPT = "a short story of the sea"
EOS, EOT = 2, 24
LETTERS = list(range(25 + 97, 25 + 123))
"""Ids of lower-case letters in the toy vocabulary."""
REHEARSED = 44
"""Tokens of a request that forced drafts may be taken from, its own and those that would have come after them."""


def letters_only(_: NDArray[np.intc], logits: NDArray[np.single]) -> NDArray[np.single]:
    """A logits processor that keeps the text in a..z."""
    out = np.full_like(logits, -np.inf)
    out[LETTERS] = logits[LETTERS]
    return out


LETTERS_ONLY: dict[str, Any] = {"logits_processor": llama_cpp.LogitsProcessorList([letters_only])}


def ends_at(length: int, token: int) -> llama_cpp.LogitsProcessorList:
    """A logits processor that makes `token` follow exactly `length` evaluated tokens."""

    def process(ids: NDArray[np.intc], logits: NDArray[np.single]) -> NDArray[np.single]:
        out = letters_only(ids, logits)
        if len(ids) == length:
            out[token] = 1e4
        return out

    return llama_cpp.LogitsProcessorList([process])


def difference(got: Any, expected: Any, where: str = "answer") -> str | None:
    """Where two answers differ, ids and times aside; floats may by what batch shapes do to them. None: nowhere."""
    if type(got) is not type(expected):
        return f"{where}: {got!r}, not {expected!r}"
    if isinstance(expected, dict):
        if list(got) != list(expected):
            return f"{where}: keys {list(got)}, not {list(expected)}"
        pairs = [(f"{where}[{key!r}]", got[key], expected[key]) for key in expected if key not in ("id", "created")]
    elif isinstance(expected, (list, tuple)):
        if len(got) != len(expected):
            return f"{where}: {len(got)} items, not {len(expected)}"
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(got, expected, strict=True))]
    else:
        is_float = isinstance(expected, (float, np.floating))
        equal = got == (pytest.approx(expected, rel=1e-4, abs=1e-4) if is_float else expected)
        return None if equal else f"{where}: {got!r}, not {expected!r}"
    return next(filter(None, (difference(a, b, path) for path, a, b in pairs)), None)


def whole(answer: Any) -> Any:
    """An answer, or the list of a streamed one's chunks."""
    return list(answer) if isinstance(answer, Iterator) else answer


Call = Callable[[Any], Any]
"""What is done on a Llama and on a session alike."""


@dataclass
class Text:
    """A request as `generate` got it, and what it generates if nobody stops it."""

    prompt: list[int]
    tokens: list[int]


def rehearse(judge: llama_cpp.Llama, call: Call) -> list[Text]:
    """Make a call on another Llama and note what each of its requests says, also beyond where it ends."""
    texts: list[Text] = []
    generate = judge.generate

    def go_on(tokens: Sequence[int], *, reset: bool = True, **options: Any) -> Any:
        text = Text([*([] if reset else judge._input_ids.tolist()), *tokens], [])
        texts.append(text)
        options.pop("stopping_criteria", None)
        stream = generate(tokens, reset=reset, **options)
        try:
            for token in stream:
                text.tokens.append(token)
                yield token
        finally:
            n_read = len(text.tokens)
            room = judge.n_ctx() - judge.n_tokens
            text.tokens += islice(stream, max(0, min(REHEARSED - n_read, room)))
            judge.n_tokens = len(text.prompt) + n_read - 1
            judge._requires_eval = True

    judge.generate = go_on  # type: ignore[method-assign]
    try:
        whole(call(judge))
    except Exception:
        pass  # the rivals have to raise it, too
    finally:
        del judge.generate
    return texts


@contextmanager
def forced(session: SpecSession, texts: Sequence[Text], schedule: Sequence[int]) -> Iterator[None]:
    """Forced drafts (see ForcedDrafts) for the requests of a session, which come in the order of `texts`."""
    generate = session.generate
    coming = iter(texts)

    def force(tokens: Sequence[int], **options: Any) -> Any:
        text = next(coming, None)
        if text is not None:
            ForcedDrafts(session, text.prompt, text.tokens, schedule)
        return generate(tokens, **options)

    session.generate = force  # type: ignore[method-assign]
    try:
        yield
    finally:
        del session.generate
        if "draft" in vars(session):
            del session.draft


SCHEDULES: tuple[Sequence[int] | None, ...] = (None, MIXED)
"""The drafter's own drafts; some or all of each round accepted."""
WHOLE_ROUNDS = ((FULL,), MIXED)
"""For what ends inside an accepted run."""


class Rivals:
    """A Llama and a SpecSession on the same target, and another Llama that knows what comes next."""

    def __init__(self, plain: llama_cpp.Llama, session: SpecSession, judge: llama_cpp.Llama) -> None:
        self.plain, self.session, self.judge = plain, session, judge

    @staticmethod
    def begin(llama: llama_cpp.Llama) -> None:
        """An empty context, and the seed that completions without one draw theirs from."""
        llama.reset()
        llama.set_seed(1)

    def check(self, call: Call, *, schedules: Sequence[Sequence[int] | None] = SCHEDULES) -> Any:
        """Answer of a call on empty contexts: the same from both, as are the tokens they hold afterwards."""
        texts: list[Text] = []
        if any(schedules):
            self.begin(self.judge)
            texts = rehearse(self.judge, call)
        self.begin(self.plain)
        expected = self.outcome(call, self.plain)
        for schedule in schedules:
            self.begin(self.session)
            with nullcontext() if schedule is None else forced(self.session, texts, schedule):
                got = self.outcome(call, self.session)
            why = outcome_difference(got, expected)
            assert why is None or self.llama_says_so_too(call, got), (schedule, why)
            if why is not None:
                continue
            assert self.session._input_ids.tolist() == self.plain._input_ids.tolist(), schedule
            assert self.session._seed == self.plain._seed
        if isinstance(expected, Exception):
            raise expected
        return expected

    def llama_says_so_too(self, call: Call, got: Any) -> bool:
        """Whether Llama answers so when it evaluates prompts in other pieces.

        A random draw can lie so close to the border of two tokens that rounding decides (about one in 100,000 does);
        Llama then differs from itself by n_batch, and a verify decode is one more batch shape.
        """
        n_batch = self.plain.n_batch
        try:
            for size in (1, 3, 7, 20, 64):
                self.plain.n_batch = size
                self.begin(self.plain)
                if outcome_difference(got, self.outcome(call, self.plain)) is None:
                    return self.session._input_ids.tolist() == self.plain._input_ids.tolist()
            return False
        finally:
            self.plain.n_batch = n_batch
            self.begin(self.plain)
            self.outcome(call, self.plain)

    @staticmethod
    def outcome(call: Call, llama: llama_cpp.Llama) -> Any:
        """The answer, or the exception that was raised."""
        try:
            return whole(call(llama))
        except Exception as error:
            return error


def outcome_difference(got: Any, expected: Any) -> str | None:
    """`difference`, also of exceptions: callers of Llama must catch them too, whether the package's or a callback's."""
    if not isinstance(expected, Exception):
        return difference(got, expected)
    equal = isinstance(got, type(expected)) and (isinstance(got, LagunaError) or str(got) == str(expected))
    return None if equal else f"{got!r}, not {expected!r}"
