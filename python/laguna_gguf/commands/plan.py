"""What a command is about to load: its context, the keywords of Llama, the table of what that takes."""

from __future__ import annotations

import argparse
from typing import Any

from laguna_gguf.commands.arguments import DEFAULT_CONTEXT, llama_keywords
from laguna_gguf.commands.output import note, print_plan
from laguna_gguf.memory_plan import plan_memory, trained_context


def planned_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of Llama for -c and the other options, after the plan is printed. Threads are not among them."""
    trained = trained_context(args.model)
    n_ctx = min(DEFAULT_CONTEXT, trained) if args.n_ctx is None else args.n_ctx or trained
    if n_ctx > trained:
        note(f"warning: -c {n_ctx} is more than the {trained} tokens the target was trained for")
    keywords = llama_keywords(args, n_ctx)
    print_plan(plan_memory(args.model, args.draft_model, **keywords))
    return keywords
