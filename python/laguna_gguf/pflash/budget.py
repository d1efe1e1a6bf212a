"""How many tokens of a prompt may be kept.

A ratio is rounded to float32 where it enters and once more when it has been turned into the ratio of the whole prompt;
everything else is double. That makes budgets the same here, in the daemon and on its wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laguna_gguf.errors import BudgetError, ConfigError
from laguna_gguf.pflash.candidates import fixed_chunks, mandatory
from laguna_gguf.pflash.segmentation import Span

MAX_ATTEMPTS = 3
"""How often a prompt may be selected again because its re-encoded text was over the ceiling."""


@dataclass(frozen=True)
class Budget:
    """What may be kept of a prompt."""

    ratio: float
    """Share of the whole prompt, a float32 value."""
    kept: int
    """Drafter tokens that are kept in any case."""
    tokens: int
    """Drafter tokens that may be kept in all."""

    def ceiling(self, n_target_tokens: int) -> int:
        """The same share of a prompt that takes `n_target_tokens` with the target's tokenizer."""
        return math.floor(n_target_tokens * self.ratio)


def check_keep_ratio(keep_ratio: float) -> float:
    """The ratio as a float32 value; ConfigError unless it is a finite number in [0, 1]."""
    try:
        ratio = math.nan if isinstance(keep_ratio, bool | str) else float(keep_ratio)
    except (TypeError, ValueError, OverflowError):
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise ConfigError(f"keep_ratio is {keep_ratio!r}; needed a finite number in [0, 1]")
    return float(np.float32(ratio))


def transport_budget(n_tokens: int, keep_ratio: float) -> int:
    """Tokens of a plain share of a prompt: floor(n_tokens * float32 ratio)."""
    return math.floor(n_tokens * check_keep_ratio(keep_ratio))


def kept_tokens(
    n_tokens: int, chunk_size: int, query: Span, required: Sequence[Span] = (), *, suffix_candidates: bool = False
) -> int:
    """Tokens of the fixed chunks that must be kept (see `candidates.mandatory`); at least the query's chunk."""
    chunks = fixed_chunks(n_tokens, chunk_size)
    flags = mandatory(chunks, query, required, suffix_candidates=suffix_candidates).tolist()
    return sum(end - begin for (begin, end), flag in zip(chunks, flags, strict=True) if flag)


def droppable_budget(n_tokens: int, kept: int, keep_ratio: float) -> Budget:
    """Budget where only what may be dropped is shortened: kept + r (n - kept), as r' = min(1, (that + 1) / n)."""
    if not 0 <= kept <= n_tokens or n_tokens < 1:
        raise BudgetError(f"{kept} of {n_tokens} tokens are to be kept; needed 0 <= kept <= tokens and a prompt")
    ratio = check_keep_ratio(keep_ratio)
    whole = float(np.float32(min(1.0, (kept + ratio * (n_tokens - kept) + 1) / n_tokens)))
    return Budget(whole, kept, math.floor(n_tokens * whole))


def tightened(budget: int, ceiling: int, n_target_tokens: int) -> int:
    """Next budget after the text kept within `budget` took `n_target_tokens`, more than `ceiling`, with the target.

    The budget shrinks by (ceiling - overflow - 1) / ceiling. BudgetError when nothing would be left.
    """
    overflow = n_target_tokens - ceiling
    smaller = math.floor(budget * max(0, ceiling - overflow - 1) / ceiling) if ceiling > 0 else 0
    if smaller < 1:
        raise BudgetError(
            f"the kept text takes {n_target_tokens} target tokens and may take {ceiling}; no smaller budget is left"
        )
    return min(smaller, budget - 1)


def droppable_target_tokens(n_target_tokens: int, n_tokens: int, kept: int) -> int:
    """Target tokens that compression could drop; the automatic mode compresses from a threshold of these on."""
    return math.floor(n_target_tokens * (n_tokens - kept) / n_tokens) if n_tokens > 0 else 0
