"""When prompts are compressed and how much of them is kept: the policy between a server or session and PFlash."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.keep_ratio import HIGHEST, LOWEST, AdaptiveKeepRatio, Curve

if TYPE_CHECKING:
    from laguna_gguf.pflash.compress import PFlash
    from laguna_gguf.pflash.compressed import Compressed

COMPRESSION = ("off", "auto", "always")

DEFAULT_THRESHOLD = 32000
"""Droppable target tokens from which the automatic mode compresses."""
DEFAULT_KEEP_RATIO = 0.05


@dataclass(frozen=True)
class PrefillPolicy:
    """The --prefill-... options."""

    compression: str = "off"
    """off, auto (from the threshold on) or always."""
    threshold: int = DEFAULT_THRESHOLD
    keep_ratio: float = DEFAULT_KEEP_RATIO
    """Share of what may be dropped that is kept."""
    curve: Curve | None = None
    """Keep ratio by prompt length, in place of `keep_ratio`."""

    @classmethod
    def checked(cls, compression: Any, threshold: Any, keep_ratio: Any, curve: Any) -> PrefillPolicy:
        """`curve`: a Curve, the text of one, or None. ConfigError names the option."""
        if compression not in COMPRESSION:
            raise ConfigError(f"prefill_compression is {compression!r}; needed one of {', '.join(COMPRESSION)}")
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
            raise ConfigError(f"prefill_threshold is {threshold!r}; needed an integer >= 0")
        number = isinstance(keep_ratio, int | float) and not isinstance(keep_ratio, bool)
        if not number or not (math.isfinite(keep_ratio) and 0 <= keep_ratio <= 1):
            raise ConfigError(f"prefill_keep_ratio is {keep_ratio!r}; needed a number in [0, 1]")
        if curve is not None and not isinstance(curve, Curve | str):
            raise ConfigError(f"prefill_curve is {curve!r}; needed TOKENS:RATIO entries, such as 8000:0.2 64000:0.05")
        return cls(compression, threshold, float(keep_ratio), Curve.parse(curve) if isinstance(curve, str) else curve)

    def configured(self, n_tokens: int) -> float:
        """Keep ratio of a prompt of so many target tokens."""
        return self.keep_ratio if self.curve is None else self.curve.ratio(n_tokens)


class Prefill:
    """A PFlash with a policy, and the keep ratios that its sessions have reached."""

    def __init__(self, pflash: PFlash, policy: PrefillPolicy) -> None:
        self.pflash = pflash
        self.policy = policy
        self.ratios = AdaptiveKeepRatio()
        self._last: tuple[str, float] | None = None
        self._served: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def compress(
        self,
        prompt: str,
        *,
        session: str | None = None,
        pflash_query: str | None = None,
        pflash_required: Sequence[str] = (),
        target_n_ctx: int | None = None,
        max_tokens: int = 0,
    ) -> Compressed:
        """`PFlash.compress_chat` as the policy says; with a session, its keep ratio follows `accepted`.

        A configured ratio outside 0.025..0.20, the range of that law, is taken as it is.
        """
        configured = self.policy.configured(self.pflash.count_tokens(prompt) if self.policy.curve else 0)
        adapts = session is not None and LOWEST <= configured <= HIGHEST
        compressed = self.pflash.compress_chat(
            prompt,
            keep_ratio=self._ratio(session, configured, prompt) if session is not None and adapts else configured,
            session=session,
            pflash_query=pflash_query,
            pflash_required=pflash_required,
            compression=self.policy.compression,
            threshold=self.policy.threshold,
            target_n_ctx=target_n_ctx,
            max_tokens=max_tokens,
        )
        self._last = None
        if session is not None and adapts and not compressed.is_whole:
            self._last = session, configured
        return compressed

    def _ratio(self, session: str, configured: float, prompt: str) -> float:
        """A prompt that is sent again gets its ratio again, so that the same text is served."""
        identity = hash(prompt)
        before, ratio = self._served.pop(session, (None, 0.0))
        if before != identity:
            ratio = self.ratios.ratio(session, configured)
        self._served[session] = identity, ratio
        while len(self._served) > self.ratios.capacity:
            self._served.popitem(last=False)
        return ratio

    def accepted(self, acceptance: float) -> None:
        """The target accepted this share of the drafts after the prompt that was compressed last."""
        if self._last is not None:
            session, configured = self._last
            self.ratios.update(session, acceptance, configured=configured)
