"""One way to run a prompt, timed: plain llama_cpp.Llama, a SpecSession at one depth, or Llama with prompt lookup."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, Protocol

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from numpy.typing import NDArray

from laguna_gguf.dflash.depth import make_depth
from laguna_gguf.dflash.session import SpecSession
from laguna_gguf.dflash.synthetic import make_synthetic


@dataclass(frozen=True)
class Run:
    """One generation. Token ids; ms from the first token to the last; counts of the rounds in between, and the time
    that they spent drafting and verifying, where it is known."""

    tokens: list[int]
    ms: float
    rounds: int
    drafted: int
    accepted: int
    draft_ms: float = 0.0
    verify_ms: float = 0.0


class Generator(Protocol):
    """A way of decoding, also one outside this process. The attributes are those of `Engine`."""

    name: str
    label: str
    plain: bool
    synthetic: bool

    def generate(self, prompt: Sequence[int], n: int, seed: int = 0) -> Run: ...


class Engine:
    """Runs prompts on a `llama_cpp.Llama` from an empty context."""

    name = "llama_cpp.Llama"
    label = ""
    """What stands behind the test's name; empty for llama_cpp.Llama."""
    plain = True
    """Whether it decodes without drafts, and may be what others are compared with."""
    synthetic = False
    """Whether drafts are accepted at random."""

    def __init__(self, llama: llama_cpp.Llama, temperature: float = 0.0) -> None:
        self.llama = llama
        # the target's plain distribution: no truncation, no penalties
        self._sampling: dict[str, Any] = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def generate(self, prompt: Sequence[int], n: int, seed: int = 0) -> Run:
        """n tokens after a prompt, end-of-generation tokens or not."""
        self.begin(n)
        self.llama.set_seed(seed)
        stream = self.llama.generate(prompt, **self._sampling)
        tokens = [next(stream)]
        began = perf_counter()
        tokens += islice(stream, n - 1)
        ms = (perf_counter() - began) * 1e3
        stream.close()
        return self._run(tokens, ms)

    def process(self, prompt: Sequence[int], before: Sequence[int] = ()) -> float:
        """Milliseconds that the prompt takes behind `before`, whose own time does not count."""
        self.begin(0)
        if before:
            self.llama.eval(before)
            llama_cpp.llama_synchronize(self.llama.ctx)
        began = perf_counter()
        self.llama.eval(prompt)
        llama_cpp.llama_synchronize(self.llama.ctx)
        return (perf_counter() - began) * 1e3

    def begin(self, n: int) -> None:
        """An empty context, for n tokens to come (0: not known)."""
        self.llama.reset()

    def _run(self, tokens: list[int], ms: float) -> Run:
        return Run(tokens, ms, rounds=len(tokens) - 1, drafted=0, accepted=0)


class SessionEngine(Engine):
    """A SpecSession at one depth. Several engines may share a session; each keeps what its own depth policy learnt."""

    def __init__(
        self,
        session: SpecSession,
        draft_max: int | str,
        temperature: float = 0.0,
        spec_synth_len: float | None = None,
    ) -> None:
        """Raises ConfigError for a depth or length that the session cannot have."""
        super().__init__(session, temperature)
        self.draft_max = draft_max
        self.session = session
        block_size = session.drafter.config.block_size
        self._depth = make_depth(draft_max, 0, block_size, int(session.context_params.n_ubatch))
        if self._depth.largest == 0:  # nothing to accept
            spec_synth_len = None
        self.plain = self._depth.largest == 0
        self._synthetic = make_synthetic(spec_synth_len, self._depth.largest, session.model)
        self.synthetic = self._synthetic is not None
        self.name = f"SpecSession(draft_max={draft_max!r})"
        self.label = "dflash auto" if draft_max == "auto" else f"dflash n={draft_max}"
        if spec_synth_len is not None:
            self.label += f" synthetic={spec_synth_len:g}"

    def begin(self, n: int) -> None:
        self.session.depth, self.session.synthetic = self._depth, self._synthetic
        self.session.reset()
        self.session.reset_stats()
        self.session.next_max_tokens = n

    def _run(self, tokens: list[int], ms: float) -> Run:
        stats = self.session.stats
        return Run(
            tokens,
            ms,
            stats.rounds,
            stats.drafted_tokens,
            stats.accepted_tokens,
            stats.draft_ms,
            stats.verify_ms,
        )


class CountingLookup(LlamaPromptLookupDecoding):
    """llama_cpp's prompt lookup, which keeps no statistics."""

    def __init__(self, num_pred_tokens: int) -> None:
        super().__init__(num_pred_tokens=num_pred_tokens)
        self.lengths: list[int] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        draft = super().__call__(input_ids, **kwargs)
        self.lengths.append(len(draft))
        return draft


class LookupEngine(Engine):
    """llama_cpp.Llama with its LlamaPromptLookupDecoding, made with `draft_model=` the given one."""

    def __init__(self, llama: llama_cpp.Llama, lookup: CountingLookup, temperature: float = 0.0) -> None:
        super().__init__(llama, temperature)
        self._lookup = lookup
        self.plain = False
        self.name = "LlamaPromptLookupDecoding"
        self.label = f"lookup n={lookup.num_pred_tokens}"

    def begin(self, n: int) -> None:
        super().begin(n)
        self._lookup.lengths.clear()

    def _run(self, tokens: list[int], ms: float) -> Run:
        rounds, generated = len(self._lookup.lengths), len(tokens) - 1
        return Run(tokens, ms, rounds, sum(self._lookup.lengths), max(generated - rounds, 0))


class _Borrowed:
    """A llama_cpp LlamaModel that belongs to somebody else: closing it does nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def close(self) -> None:
        """The owner closes it."""


@contextlib.contextmanager
def same_model(llama: llama_cpp.Llama) -> Iterator[None]:
    """Every `llama_cpp.Llama` made in this block shares the model of `llama`, which must outlive it.

    Llama has no keyword for that and always loads its file; a second copy of a large target would not fit beside the
    first one.
    """
    names = vars(llama_cpp.llama.internals)
    original = names["LlamaModel"]
    names["LlamaModel"] = lambda **_: _Borrowed(llama._model)
    try:
        yield
    finally:
        names["LlamaModel"] = original
