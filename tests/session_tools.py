"""Sessions and plain Llamas on tiny models: forced acceptance, states from scratch, comparison up to near ties."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from captured_llama import LAYERS, CapturedLlama, new_capture
from laguna_gguf import SpecSession, load_drafter
from tiny_models import TINY_TARGET

OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "n_threads": 1,
    "n_threads_batch": 1,
    "type_k": 0,
    "type_v": 0,
    "flash_attn": False,
    "verbose": False,
}
"""f32 KV cache and no flash attention: results are then independent of batch shapes up to rounding."""

GREEDY: dict[str, Any] = {"temp": 0.0}
SAMPLED: dict[str, Any] = {"temp": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.0}

FULL = 99
"""In a schedule of accepted counts: all of the round's drafts."""
MIXED = (0, 3, FULL, 1, 0, 2, FULL, FULL, 1, 4)

PROBE = 15
"""Drafts of a comparison of drafter logits: as many as a block has."""
ANCHOR = 41


def plain_llama(target: Path, **options: Any) -> llama_cpp.Llama:
    """The judge: llama_cpp.Llama with the options of the session."""
    return llama_cpp.Llama(str(target), **(OPTIONS | options))


def spec_session(target: Path, drafter: Path, **options: Any) -> SpecSession:
    """A session with 7 drafts a round unless told otherwise."""
    return SpecSession(str(target), drafter, **(OPTIONS | {"draft_max": 7} | options))


def text_ids(n_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids without control tokens."""
    return np.random.default_rng(seed).integers(25, TINY_TARGET.n_vocab, n_tokens).tolist()


def take(llama: llama_cpp.Llama, prompt: Sequence[int], n: int, *, seed: int = 1, **sampler: Any) -> list[int]:
    """n generated tokens; the generator is closed after the last one."""
    llama.set_seed(seed)
    stream = llama.generate(prompt, **sampler)
    tokens = list(islice(stream, n))
    stream.close()
    return tokens


def take_plain(llama: llama_cpp.Llama, prompt: Sequence[int], n: int, *, seed: int = 1, **sampler: Any) -> list[int]:
    """The same from an empty context: with a sliding cache, Llama loses keys when it reuses a prefix."""
    llama.reset()
    return take(llama, prompt, n, seed=seed, **sampler)


class ForcedDrafts:
    """Replaces a session's drafts by ones that are right for as many tokens as a schedule says, and wrong after.

    The session's own drafter runs all the same, and decides how many drafts there are.
    """

    def __init__(
        self, session: SpecSession, prompt: Sequence[int], continuation: Sequence[int], schedule: Sequence[int]
    ) -> None:
        self.session = session
        self.prompt = list(prompt)
        self.continuation = list(continuation)
        self.schedule = schedule
        self.drafted: list[int] = []
        """Drafts of each round so far."""
        session.draft = self  # type: ignore[method-assign]

    def __call__(self, anchor: int, wanted: int | None) -> list[int]:
        draft = SpecSession.draft(self.session, anchor, wanted)
        coming = self.continuation[self.session.n_tokens - len(self.prompt) + 1 :]
        right = min(self.schedule[len(self.drafted) % len(self.schedule)], len(draft), len(coming))
        self.drafted.append(len(draft))
        draft[:right] = coming[:right]
        if right < min(len(draft), len(coming)):
            draft[right] = (coming[right] + 1) % TINY_TARGET.n_vocab
        return draft

    def remove(self) -> None:
        """Give the session its own drafts back."""
        del self.session.draft


def still_usable(session: SpecSession, plain: llama_cpp.Llama) -> None:
    """The next request is right."""
    prompt = text_ids(30, 4)
    expected = take_plain(plain, prompt, 12, **GREEDY)
    forced = ForcedDrafts(session, prompt, expected, (2,))
    assert take(session, prompt, 12, **GREEDY) == expected
    forced.remove()


# States.


def spread(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest |difference| in units of the expected values' standard deviation."""
    return float(np.abs(np.asarray(got, np.float64) - expected).max() / expected.std())


class Scratch:
    """What a target and a drafter say after given tokens, computed from nothing through llama.cpp's own calls."""

    def __init__(self, target: Path, drafter: Path, *, layers: Sequence[int] = LAYERS) -> None:
        self._capture = new_capture(layers)
        self._llm = CapturedLlama(target, self._capture, n_ctx=1024, swa_full=True)
        self._drafter = load_drafter(drafter, target=self._llm, n_threads=1)
        self._tokens: list[int] = []
        self._logits: NDArray[np.float32] = np.zeros((0, 0), np.float32)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The target's logits for the token after these."""
        if self._tokens == list(tokens):
            return self._logits[-1]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._llm.ctx), True)
        self._capture.begin()
        for start in range(0, len(tokens), 512):
            self._logits = self._llm.decode_all(tokens[start : start + 512], start)
        self._tokens = list(tokens)
        return self._logits[-1]

    def draft_logits(self, tokens: Sequence[int], anchor: int = ANCHOR, n: int = PROBE) -> NDArray[np.float32]:
        """The drafter's logits for the n tokens after the anchor that follows these tokens."""
        self.logits(tokens)
        self._drafter.reset()
        self._drafter.append_context(self._capture.rows())
        block = self._drafter.draft(anchor, n, return_logits=True)
        assert block.logits is not None
        return block.logits


class Peek(llama_cpp.LogitsProcessorList):
    """A logits processor that changes nothing and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__([self.see])
        self.seen: list[NDArray[np.float32]] = []
        self.lengths: list[int] = []

    def see(self, input_ids: NDArray[np.intc], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        self.seen.append(logits.copy())
        self.lengths.append(len(input_ids))
        return logits


def next_logits(session: llama_cpp.Llama) -> NDArray[np.float32]:
    """The target's logits for the token after a session's tokens."""
    peek = Peek()
    take(session, session._input_ids.tolist(), 1, temp=0.0, logits_processor=peek)
    return peek.seen[0]


def draft_logits(session: SpecSession, anchor: int = ANCHOR, n: int = PROBE) -> NDArray[np.float32]:
    """The drafter's logits for the n tokens after the anchor that follows a session's tokens."""
    block = session.drafter.draft(anchor, n, return_logits=True)
    assert block.logits is not None
    return block.logits


STATE_TOLERANCE = 5e-3


def check_state(session: SpecSession, scratch: Scratch, tokens: Sequence[int]) -> None:
    """A session holds exactly these tokens, and target and drafter say what they say from scratch."""
    assert session._input_ids.tolist() == list(tokens)
    if len(tokens) == 0:
        assert session.drafter.position == 0
        return
    assert session.drafter.position == session.n_tokens
    assert session.drafter.n_rows >= min(len(tokens), session.drafter.config.sliding_window - 1)
    assert spread(draft_logits(session), scratch.draft_logits(tokens)) <= STATE_TOLERANCE
    assert spread(next_logits(session), scratch.logits(tokens)) <= STATE_TOLERANCE
    assert session._input_ids.tolist() == list(tokens)
    assert spread(draft_logits(session), scratch.draft_logits(tokens)) <= STATE_TOLERANCE


# Identity.


def row_logits(target: Path, tokens: Sequence[int], n_rows: int) -> NDArray[np.float32]:
    """Logits after the last token, with all others decoded one by one and the last n_rows in one decode."""
    llm = CapturedLlama(target, None, n_ctx=1024)
    first = max(len(tokens) - n_rows, 0)
    for position in range(first):
        llm.decode_all(tokens[position : position + 1], position)
    logits = llm.decode_all(tokens[first:], first)[-1]
    llm.close()
    return logits


def batch_shape_noise(target: Path, tokens: Sequence[int]) -> float:
    """How much the number of rows in a decode changes llama.cpp's own logits after the last token."""
    one = row_logits(target, tokens, 1)
    return max(float(np.abs(row_logits(target, tokens, n) - one).max()) for n in (2, 3, 5, 8, 16))


def top_gap(logits: NDArray[np.float32]) -> float:
    """Distance between the two largest logits."""
    second, first = np.sort(logits)[-2:]
    return float(first - second)


@dataclass
class Comparison:
    """Token identity over many runs.

    A first difference is excused where the plain run's two best tokens are closer than what batch shapes do to the
    logits; more than 5 % of such runs are not.
    """

    target: Path
    runs: int = 0
    excused: int = 0

    def check(self, got: Sequence[int], plain: Sequence[int], prompt: Sequence[int]) -> None:
        """One more run."""
        self.runs += 1
        assert len(got) == len(plain)
        differs = [i for i, (a, b) in enumerate(zip(got, plain, strict=True)) if a != b]
        if differs:
            tokens = [*prompt, *plain[: differs[0]]]
            gap, noise = top_gap(row_logits(self.target, tokens, 1)), batch_shape_noise(self.target, tokens)
            assert gap <= noise, f"run {self.runs} differs at token {differs[0]}: gap {gap}, noise {noise}"
            self.excused += 1

    def finish(self) -> None:
        """After the last run."""
        assert self.runs and self.excused <= 0.05 * self.runs
