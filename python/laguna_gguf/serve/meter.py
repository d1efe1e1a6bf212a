"""What one request does to the session, watched while it happens: tokens, times, drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any


class Cancelled(Exception):
    """Nobody waits for this generation any more."""


class Meter:
    """Counts of one generation, as llama-server's `timings` has them."""

    def __init__(
        self, cancelled: Callable[[], bool], draft_counts: Callable[[], tuple[int, int]], *, synthetic: bool = False
    ) -> None:
        """draft_counts: drafted and accepted tokens of the session so far. synthetic: acceptance is not real."""
        self._cancelled = cancelled
        self._synthetic = synthetic
        self._draft_counts = draft_counts
        self._drafts_before = draft_counts()
        self._began = self._first_token = self._last_token = 0.0
        self.n_prompt = 0
        self.n_predicted = 0
        """Generated tokens, one that ends the generation among them."""
        self.ended = False
        """Whether the last token ends the generation."""
        self.cut = False
        """Whether the generation was ended because it had all the tokens it may have."""
        self.compression: Mapping[str, Any] | None = None
        """`usage.timings.pflash` of a prompt that was, or might have been, compressed."""
        self._n_cached: int | None = None

    @property
    def began(self) -> bool:
        """Whether the prompt has reached the session: later errors are not about what it was made from."""
        return self._began > 0

    @property
    def n_cached(self) -> int:
        """Prompt tokens that did not have to be evaluated again."""
        return self.n_prompt if self._n_cached is None else self._n_cached

    @property
    def n_completion(self) -> int:
        """Generated tokens that are part of the text."""
        return self.n_predicted - self.ended

    def begin(self, n_prompt: int) -> None:
        """A prompt of n_prompt tokens is about to be evaluated."""
        self.n_prompt = n_prompt
        self._began = self._first_token = self._last_token = perf_counter()
        self.check()

    def evaluated(self, n_tokens: int) -> None:
        """The session holds n_tokens of the prompt; the first call says how many it held before."""
        if self._n_cached is None:
            self._n_cached = n_tokens
        self.check()

    def token(self, ends: bool) -> None:
        """One more token was generated."""
        self.check()
        self._last_token = perf_counter()
        if self.n_predicted == 0:
            self._first_token = self._last_token
            self._n_cached = self.n_cached
        self.n_predicted += 1
        self.ended = ends

    def check(self) -> None:
        """Raise Cancelled when nobody waits any more."""
        if self._cancelled():
            raise Cancelled

    @property
    def prompt_ms(self) -> float:
        """Until the first token."""
        return 1e3 * (self._first_token - self._began)

    @property
    def predicted_ms(self) -> float:
        """From the first token to the last."""
        return 1e3 * (self._last_token - self._first_token)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        usage = {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_completion,
            "total_tokens": self.n_prompt + self.n_completion,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        }
        return usage if self.compression is None else usage | {"timings": {"pflash": dict(self.compression)}}

    def timings(self) -> dict[str, float]:
        """llama-server's `timings`; rates are 0 where no time was measured."""
        n_prompt = self.n_prompt - self.n_cached
        drafted, accepted = (
            now - before for now, before in zip(self._draft_counts(), self._drafts_before, strict=True)
        )
        timings = {
            "cache_n": self.n_cached,
            **_rates("prompt", n_prompt, self.prompt_ms),
            **_rates("predicted", self.n_predicted, self.predicted_ms),
        }
        if drafted:
            timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
        return timings | {"synthetic": True} if self._synthetic else timings


def _rates(name: str, n: int, ms: float) -> dict[str, float]:
    return {
        f"{name}_n": n,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": 1e3 * n / ms if ms > 0 else 0.0,
    }
