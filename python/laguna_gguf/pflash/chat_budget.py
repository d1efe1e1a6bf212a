"""What a chat must keep, what it may keep in all, and whether that fits the target's context."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from laguna_gguf.errors import BudgetError
from laguna_gguf.pflash.budget import Budget, droppable_budget, droppable_target_tokens
from laguna_gguf.pflash.candidates import fixed_chunks, mandatory
from laguna_gguf.pflash.query import EXPLICIT, QueryPlan
from laguna_gguf.pflash.recall import missing
from laguna_gguf.pflash.segmentation import Span
from laguna_gguf.pflash.turns import SYSTEM


@dataclass(frozen=True)
class ChatBudget:
    """Budget of a planned chat."""

    required: list[Span]
    """Pinned spans that are kept, sorted and merged."""
    budget: Budget
    droppable_target_tokens: int
    """What compression could drop, in target tokens; the automatic mode compresses from its threshold of these on."""
    dropped_pins: bool
    """Whether the droppable pins are scored like any other context because they would not have fitted."""


def chat_budget(
    plan: QueryPlan,
    n_tokens: int,
    chunk_size: int,
    keep_ratio: float,
    *,
    n_target_tokens: int,
    target_n_ctx: int | None = None,
    max_tokens: int = 0,
    count_kept: Callable[[list[Span]], int] | None = None,
) -> ChatBudget:
    """Budget of a chat of `n_tokens` drafter tokens and `n_target_tokens` target tokens.

    Kept in any case are the fixed chunks that hold a pin, and of the dialogue's skeleton the tokens themselves: a role
    header in every chunk would otherwise leave nothing to drop. Candidates are therefore cut at the edges of pins
    (`candidates.cut_chunks`, `candidates.probe_segments`). Text behind an explicit query counts only where it is
    pinned, so a query far from the end of its turn may find that what has to be kept exceeds the budget.

    `count_kept` counts the target tokens of spans; without it they are estimated. Where what must be kept and
    `max_tokens` of output exceed `target_n_ctx`, the droppable pins are given up; where only the budget would, it is
    cut to what fits. BudgetError when what must be kept does not fit even so, with the system prompt named where that
    alone does not.
    """
    room = math.inf if target_n_ctx is None else target_n_ctx - max(0, max_tokens)
    scale = n_target_tokens / n_tokens
    for required, dropped in ((plan.kept, False), (plan.pins, True)):
        kept = _kept_tokens(plan, n_tokens, chunk_size, [] if dropped else plan.skeleton, required)
        own = count_kept(required) if count_kept is not None and room < math.inf else 0
        if max(own, math.ceil(kept * scale)) <= room:
            budget = droppable_budget(n_tokens, kept, keep_ratio)
            if budget.ceiling(n_target_tokens) > room:
                budget = Budget(room / n_target_tokens, kept, max(kept, math.floor(room / scale)))
            droppable = droppable_target_tokens(n_target_tokens, n_tokens, kept)
            return ChatBudget(required, budget, droppable, dropped)
    system = sum(turn.end - turn.begin for turn in plan.turns if turn.role == SYSTEM)
    what, least = "what must be kept", max(own, math.ceil(kept * scale))
    if system * scale > room:
        what, least = "the system prompt alone", math.ceil(system * scale)
    raise BudgetError(
        f"{what} takes about {least} target tokens; a context of {target_n_ctx} less {max_tokens} "
        f"of output leaves {room}. Needed a larger context, fewer output tokens, or less that has to be kept"
    )


def _kept_tokens(plan: QueryPlan, n_tokens: int, chunk_size: int, skeleton: list[Span], required: list[Span]) -> int:
    structural = missing(required, missing(skeleton, plan.pins))
    chunks = fixed_chunks(n_tokens, chunk_size)
    suffix_candidates = plan.suffix_candidates or plan.rule == EXPLICIT
    flags = mandatory(chunks, plan.query, structural, suffix_candidates=suffix_candidates).tolist()
    held = [chunk for chunk, flag in zip(chunks, flags, strict=True) if flag]
    return sum(end - begin for begin, end in [*held, *missing(skeleton, held)])
