"""Budgets of planned chats: pins, the gate of the automatic mode, and the target's context."""

import pytest

from chat_templates import render, words
from laguna_gguf.errors import BudgetError, SelectionError
from laguna_gguf.pflash.candidates import cut_chunks, make_candidates, merge
from laguna_gguf.pflash.chat_budget import chat_budget
from laguna_gguf.pflash.query import QueryPlan, plan
from laguna_gguf.pflash.selection import select

CHUNK = 16


def planned(*messages: tuple[str, str], **options: object) -> tuple[QueryPlan, int]:
    text = render("qwen", [dict(role=role, content=content) for role, content in messages])
    offsets = words("qwen")(text)
    return plan(text, offsets, **options), len(offsets) - 1


CHAT = [
    ("system", "rule " * 30),
    ("developer", "note " * 100),
    ("user", "fact " * 1000 + "Why?"),
    ("assistant", "Because."),
    ("user", "And then?"),
]


def test_everything_pinned_fits() -> None:
    chat, n = planned(*CHAT)
    result = chat_budget(chat, n, CHUNK, 0.1, n_target_tokens=n)
    assert result.required == chat.kept and not result.dropped_pins
    assert 130 < result.budget.kept < 130 + 6 * CHUNK
    assert result.budget.tokens == pytest.approx(result.budget.kept + 0.1 * (n - result.budget.kept), abs=2)
    assert result.droppable_target_tokens == n - result.budget.kept
    half = chat_budget(chat, n, CHUNK, 0.1, n_target_tokens=n // 2)
    assert half.droppable_target_tokens == pytest.approx(result.droppable_target_tokens / 2, abs=1)


def test_droppable_pins_are_given_up_for_the_context() -> None:
    chat, n = planned(*CHAT)
    whole = chat_budget(chat, n, CHUNK, 0.1, n_target_tokens=n)
    fits = chat_budget(chat, n, CHUNK, 0.1, n_target_tokens=n, target_n_ctx=whole.budget.kept + 50, max_tokens=50)
    assert fits.required == chat.kept
    tight = chat_budget(chat, n, CHUNK, 0.1, n_target_tokens=n, target_n_ctx=whole.budget.kept + 49, max_tokens=50)
    assert tight.dropped_pins and tight.required == chat.pins
    assert tight.budget.kept < whole.budget.kept - 80
    assert tight.droppable_target_tokens > whole.droppable_target_tokens
    for result in (fits, tight):
        assert result.budget.kept <= result.budget.tokens and result.budget.ceiling(n) <= whole.budget.kept


def test_what_can_never_fit() -> None:
    chat, n = planned(*CHAT)
    with pytest.raises(BudgetError, match="the system prompt alone takes about 3"):
        chat_budget(chat, n, CHUNK, 0.1, n_target_tokens=n, target_n_ctx=20)
    with pytest.raises(BudgetError, match="what must be kept"):
        chat_budget(chat, n, CHUNK, 0.1, n_target_tokens=n, target_n_ctx=45)
    with pytest.raises(BudgetError):
        chat_budget(chat, n, CHUNK, 0.1, n_target_tokens=n, target_n_ctx=4096, max_tokens=4096)


def choose(chat: QueryPlan, n: int, keep_ratio: float, size: int = CHUNK) -> list[tuple[int, int]]:
    result = chat_budget(chat, n, size, keep_ratio, n_target_tokens=n)
    spans = cut_chunks(n, size, chat.query, result.required)
    rows = make_candidates(
        [1 / n] * n,
        spans,
        "sum",
        chat.query,
        result.required,
        suffix_candidates=chat.suffix_candidates,
    )
    return [spans[ordinal] for ordinal in select(rows, result.budget.tokens, mode="budget_only").ordinals]


def test_an_explicit_query_far_from_the_end_of_its_turn() -> None:
    """What follows it would have to be kept, and is not among what the budget counts as kept."""
    far, n = planned(("system", "Be kind."), ("user", "Who was it? " + "fact " * 1000), pflash_query="Who was it?")
    assert not far.suffix_candidates
    with pytest.raises(SelectionError) as caught:
        choose(far, n, 0.1)
    assert caught.value.stop_reason == "mandatory_query_exceeds_budget"
    near, n = planned(
        ("system", "Be kind."), ("user", "fact " * 1000 + "Who was it? Think."), pflash_query="Who was it?"
    )
    assert choose(near, n, 0.1)


def test_a_chat_of_many_long_turns() -> None:
    """Pins of a chat are not limited in number, as required spans of a caller are, and a role header in every chunk
    does not keep everything."""
    turns = [(role, "word " * 300) for _ in range(69) for role in ("user", "assistant")]
    chat, n = planned(("system", "Be kind."), *turns, ("user", "Why?"))
    assert len(chat.kept) > 130
    for size in (CHUNK, 128, 1024):
        kept = choose(chat, n, 0.1, size)
        assert 0.05 * n < sum(end - begin for begin, end in kept) < 0.2 * n
        assert all(any(b <= begin and end <= e for b, e in merge(kept)) for begin, end in chat.kept)
