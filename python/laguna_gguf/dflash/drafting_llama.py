"""What a session does with target and drafter: evaluate a text, draft, verify, commit; one caller at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.dflash.arguments import token_ids
from laguna_gguf.dflash.depth import Depth
from laguna_gguf.dflash.drafter import Drafter
from laguna_gguf.dflash.evaluation import Evaluation
from laguna_gguf.dflash.stats import Counters
from laguna_gguf.dflash.target import TargetContext
from laguna_gguf.errors import ConfigError, DecodeError, SessionBusyError


class DraftingLlama(llama_cpp.Llama):
    """The lower half of SpecSession, which makes the attributes; users see only that."""

    depth: Depth
    counters: Counters
    _target: TargetContext
    _drafter: Drafter
    _capture: _native.HiddenCapture
    _eval_callback: Any
    """Its address as llama.cpp's parameters take it."""
    _evaluation: Evaluation
    _window: str
    _limit: int
    """Length of the context."""

    _closed = False
    _turn: object | None = None
    """Identity of the generator in progress."""
    _thread: threading.Thread
    """The one that called last."""
    _lock = threading.Lock()  # of sessions that were refused; the others have one each

    # -- set-up -----------------------------------------------------------------------------------------------------

    def _fit_arrays(self) -> None:
        """Make Llama's arrays as long as the context: llama.cpp rounds n_ctx up, Llama does not."""
        if len(self.input_ids) < self._limit:
            ids = np.zeros(self._limit, dtype=np.intc)
            ids[: self.n_tokens] = self._input_ids
            self.input_ids = ids
        if self._logits_all and len(self.scores) < self._limit:
            self.scores = np.zeros((self._limit, self._n_vocab), dtype=np.single)

    @property
    def context_params(self) -> Any:
        """llama.cpp's context parameters, with the capture callback installed."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        # Llama.__init__ assigns the parameters before it creates the context: the only moment for a callback.
        params.cb_eval = self._eval_callback
        params.cb_eval_user_data = self._capture.user_data_address
        self._context_params = params

    # -- one caller at a time ----------------------------------------------------------------------------------------

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.intc]:
        return token_ids(tokens, self._n_vocab)

    def _check_open(self) -> None:
        if self._closed:
            raise DecodeError("the session is closed")

    def _check_thread(self) -> None:
        """llama.cpp's context serves one thread at a time; two at once would end the process."""
        thread = threading.current_thread()
        if self._turn is not None and self._thread is not thread and self._thread.is_alive():
            raise SessionBusyError("the session is generating in another thread; wait, or use a session a thread")
        self._thread = thread

    def _claim(self) -> object:
        """Make the calling thread's next work the one in progress; what was suspended before is over."""
        with self._lock:
            self._check_open()  # again: another thread may have closed it meanwhile
            self._check_thread()
            self._turn = object()
            return self._turn

    def owned_by(self, turn: object) -> bool:
        """Whether no other call has begun since `turn` did."""
        return self._turn is turn

    def check_turn(self, turn: object) -> None:
        """Raise SessionBusyError when another call has taken over the session."""
        if not self.owned_by(turn):
            raise SessionBusyError("another call on this session has begun (or closed it); this generator cannot go on")

    # -- prompts -----------------------------------------------------------------------------------------------------

    @property
    def _capturing(self) -> bool:
        """Whether hidden rows are wanted now. A draft needs those of one window: far from the next one, none are."""
        return self.depth.plain_ahead < self._drafter.config.sliding_window

    def _evaluate(self, tokens: NDArray[np.intc], *, keep: int, capture: bool | None = None) -> None:
        """Bring the target, and with capture the drafter, to exactly `tokens`; the first `keep` were evaluated before.

        Rows are evaluated again where something was lost on the way back (see Evaluation): nothing is lost silently.
        """
        capture = self._capturing if capture is None else capture
        end = len(tokens)
        if end > self._limit:
            raise ConfigError(f"{end} tokens exceed the context window of {self._limit}")
        began = perf_counter()
        start = self._evaluation.rewind(keep, end, capture=capture)
        self.input_ids[:end] = tokens
        self.n_tokens = start
        self._requires_eval = True
        self.on_evaluated(start)
        for first, n in self._evaluation.run(tokens, start, capture=capture, all_logits=self._logits_all):
            self.n_tokens = first + n
            if self._logits_all:
                self.scores[first : first + n] = self._target.all_logits(n)
            self.on_evaluated(self.n_tokens)
        self._requires_eval = False
        self.counters.prompt_ms += (perf_counter() - began) * 1e3

    def on_evaluated(self, n_tokens: int) -> None:
        """Progress of a prompt, for subclasses: first called with the tokens that are reused, then after each decode.

        An exception raised here ends the call; what was evaluated is kept.
        """

    # -- steps of a round (see rounds.py) ---------------------------------------------------------------------------

    def draft(self, anchor: int, wanted: int | None) -> list[int]:
        """Drafts for the next round; none when only one token is wanted, the context is nearly full, or the drafter has
        not yet seen a whole window since drafting was paused."""
        n = min(self.depth.now, self._limit - self.n_tokens - 1)
        if wanted is not None:
            n = min(n, wanted - 1)
        if n <= 0 or not self._evaluation.drafter_holds(self.n_tokens, self.n_tokens):
            return []
        began = perf_counter()
        self._drafter.flush()
        flushed = perf_counter()
        tokens = self._drafter.draft(anchor, n, window=self._window).tokens.tolist()
        self.counters.capture_ms += (flushed - began) * 1e3
        self.counters.draft_ms += (perf_counter() - flushed) * 1e3
        return tokens

    def check_proposal(self, tokens: Sequence[int]) -> list[int]:
        """Proposals from outside, cut to what one verify decode can take."""
        n = min(self._target.n_ubatch, self._limit - self.n_tokens) - 1
        return self._checked(tokens)[: max(n, 0)].tolist()

    def verify(self, anchor: int, draft: list[int]) -> None:
        """One target decode of the anchor and the drafts, every row with logits and, where wanted, captured."""
        start, rows = self.n_tokens, len(draft) + 1
        if start + rows > self._limit:
            raise DecodeError(f"the context window of {self._limit} tokens is full")
        tokens = np.array([anchor, *draft], dtype=np.intc)
        self.input_ids[start : start + rows] = tokens
        self._requires_eval = True
        self._capture.enabled = self._capturing
        decode_ms, callback_ms = self._target.decode_ms, self._capture.ms
        self._target.decode(tokens, all_logits=True)
        self.counters.verify_ms += self._target.decode_ms - decode_ms
        self.counters.capture_ms += self._capture.ms - callback_ms
        if self._logits_all:
            self.scores[start : start + rows] = self._target.all_logits(rows)

    def commit(self, start: int, n_rows: int) -> None:
        """Keep the first n_rows of the last verify, which began at `start`; forget the others."""
        self.n_tokens = start + n_rows
        self._requires_eval = self._target.position != self.n_tokens
        if not self._target.rollback(self.n_tokens):
            self._evaluate(self._input_ids.copy(), keep=0)
        elif self._capture.enabled:
            began = perf_counter()
            if self._drafter.position != start:  # nothing was captured for a while: begin again
                self._drafter.reset()
            self._drafter.append_captured(self._capture, n_rows, start, deferred=True)
            self.counters.capture_ms += (perf_counter() - began) * 1e3
