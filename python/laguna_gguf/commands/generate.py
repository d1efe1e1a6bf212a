"""`laguna-gguf generate`: the user's own models on one prompt."""

import argparse
import contextlib
import secrets
import sys
from pathlib import Path
from typing import Any

import llama_cpp

from laguna_gguf.commands import arguments
from laguna_gguf.commands.generation import Generation, generate
from laguna_gguf.commands.output import TokenWriter, note, print_json
from laguna_gguf.commands.plan import planned_keywords
from laguna_gguf.dflash.session import SpecSession
from laguna_gguf.dflash.stats import Counters, SpecStats
from laguna_gguf.dflash.synthetic import SyntheticStats
from laguna_gguf.dflash.target import check_target_file
from laguna_gguf.llama_text import tokenizable


def add_parser(subparsers: Any) -> None:
    """Add `generate` to the command line."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text with a target and a drafter",
        description="Generate text from a prompt. The text is that of the target alone; the drafter makes it faster.",
        allow_abbrev=False,
    )
    arguments.add_models(parser)
    arguments.add_prompt(parser)
    arguments.add_sampling(parser)
    arguments.add_runtime(parser)
    arguments.add_drafting(parser)
    arguments.add_output(parser)
    parser.set_defaults(run=run, check=lambda args: arguments.check(parser, args))


def run(args: argparse.Namespace) -> int:
    """Plan, load, generate, report. Returns the exit code."""
    prompt = _read_prompt(args)
    if args.draft_model is not None:
        check_target_file(args.model)  # before the plan, which would be that of a mistake
    shared = planned_keywords(args)

    shared |= {
        "n_threads": args.threads,
        "n_threads_batch": args.threads_batch or args.threads,
        "verbose": args.verbose,
    }
    seed = secrets.randbelow(2**32 - 1) if args.seed < 0 else args.seed
    sampling = {
        "temp": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
    }
    with contextlib.closing(_open_session(args, shared)) as session:
        if args.temp > 0:
            note(f"seed {seed}")
        session.set_seed(seed)
        writer = TokenWriter(None if args.json else sys.stdout, args.color)
        tokens = session.tokenize(prompt, add_bos=True, special=True)
        result = generate(session, tokens, args.n_predict, sampling, writer)
        stats = _stats(session, result)
    if args.json:
        print_json(_report(result, stats))
    else:
        print(flush=True)
        _print_summary(result, stats)
    return 0


def _read_prompt(args: argparse.Namespace) -> bytes:
    if args.prompt is not None:
        return tokenizable(args.prompt.encode("utf-8", "surrogateescape"))
    data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    # As llama.cpp does: editors end files with a newline that is seldom meant as part of the prompt.
    return tokenizable(data.removesuffix(b"\n"))


def _open_session(args: argparse.Namespace, shared: dict[str, Any]) -> llama_cpp.Llama:
    if args.draft_model is None:
        return llama_cpp.Llama(args.model, **shared)
    return SpecSession(
        args.model,
        args.draft_model,
        draft_max=0 if args.no_draft else args.spec_draft_n_max,
        draft_min=0 if args.no_draft else args.spec_draft_n_min,
        window=args.spec_draft_window,
        spec_synth_len=args.spec_synth_len,
        **shared,
    )


def _stats(session: llama_cpp.Llama, result: Generation) -> SpecStats:
    if isinstance(session, SpecSession):
        return session.stats
    n_rounds = max(0, len(result.tokens) - 1)
    plain = Counters(
        rounds=n_rounds,
        plain_rounds=n_rounds,
        generated_tokens=n_rounds,
        prompt_ms=result.prompt_ms,
        verify_ms=result.predicted_ms,
        round_ms=result.predicted_ms,
    )
    return plain.snapshot(nonfinite=0, draft_max_now=0)


def _report(result: Generation, stats: SpecStats) -> dict[str, Any]:
    n = len(result.tokens)
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "timings": {
            "prompt_n": result.prompt_n,
            "prompt_ms": result.prompt_ms,
            "predicted_n": n,
            "predicted_ms": result.predicted_ms,
            # llama-server's definition, which counts the first token though its time is the prompt's
            "predicted_per_second": 1000 * n / result.predicted_ms if result.predicted_ms > 0 else 0.0,
            "draft_n": stats.drafted_tokens,
            "draft_n_accepted": stats.accepted_tokens,
        },
        "stats": stats.as_dict(),
        **({"synthetic": True} if isinstance(stats, SyntheticStats) else {}),
    }


def _print_summary(result: Generation, stats: SpecStats) -> None:
    parts = [
        f"prompt {result.prompt_n} tokens in {result.prompt_ms:.0f} ms",
        f"generated {len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s ({result.finish_reason})",
    ]
    if stats.drafted_tokens:
        parts.append(
            f"{stats.mean_accepted_length:.2f} tokens a round, "
            f"{stats.accepted_tokens} of {stats.drafted_tokens} drafts accepted"
        )
    if isinstance(stats, SyntheticStats):
        parts.append("SYNTHETIC acceptance, the text is not the model's")
    note("; ".join(parts))
