"""`laguna-gguf demo`: the shipped model pair, plain decoding against speculative, without any download."""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from laguna_gguf.argument_types import positive
from laguna_gguf.bench.text import repetition
from laguna_gguf.commands import arguments
from laguna_gguf.commands.generation import Generation, generate
from laguna_gguf.commands.output import TokenWriter, console, print_json
from laguna_gguf.dflash.session import SpecSession
from laguna_gguf.dflash.stats import SpecStats
from laguna_gguf.errors import CheckpointError
from laguna_gguf.memory_plan import GGML_TYPE_F32

DATA_DIR = Path(__file__).resolve().parent.parent / "data"
TARGET_FILE = "demo-target-q8_0.gguf"
DRAFTER_FILE = "demo-drafter-q8_0.gguf"
PROMPTS_FILE = "heldout_prompts.json"

DRAFT_MAX = 3
"""Best fixed number of drafts for this pair on two cores."""

N_PROMPTS = 4
N_PREDICT = 128
N_REPEATS = 3
"""Timed runs of each kind and prompt, of which the median counts: one run takes only a fraction of a second."""

N_CTX = 1024
MAX_THREADS = 2
"""More threads than this slow such a small model down."""

GREEDY = {"temp": 0.0, "top_k": 40, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


@dataclass(frozen=True)
class Outcome:
    """Plain and speculative decoding of one prompt. Times are medians over the repeats, in ms."""

    name: str
    prompt: str
    plain: Generation
    plain_ms: float
    speculative: Generation
    speculative_ms: float
    stats: SpecStats

    @property
    def first_difference(self) -> int | None:
        """Index of the first token where the two differ; None when they are identical."""
        pair = zip(self.plain.tokens, self.speculative.tokens, strict=False)
        for index, (a, b) in enumerate(pair):
            if a != b:
                return index
        shorter = min(len(self.plain.tokens), len(self.speculative.tokens))
        return None if len(self.plain.tokens) == len(self.speculative.tokens) else shorter

    @property
    def plain_rate(self) -> float:
        """Tokens a second after the first token."""
        return _rate(self.plain, self.plain_ms)

    @property
    def speculative_rate(self) -> float:
        """Tokens a second after the first token."""
        return _rate(self.speculative, self.speculative_ms)


def add_parser(subparsers: Any) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="show it on the small model pair that comes with the package",
        description="Decode held-out prompts with the small model pair that comes with the package, plainly and with "
        "drafts, and compare text and speed. Nothing is downloaded.",
        allow_abbrev=False,
    )
    parser.add_argument("-t", "--threads", type=positive, metavar="N", help="default: at most 2, 1 when busy")
    arguments.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns the exit code: 0 also when a text differs, which the output then says."""
    prompts = _load_prompts()
    n_threads = args.threads or min(MAX_THREADS, _idle_cores())
    with (
        contextlib.closing(_open_session(0, n_threads, args.verbose)) as plain,
        contextlib.closing(_open_session(DRAFT_MAX, n_threads, args.verbose)) as speculative,
    ):
        outcomes = _run_prompts(prompts, plain, speculative, None if args.json else args.color)
    if args.json:
        print_json(report(outcomes))
    else:
        _print_table(outcomes, n_threads)
    return 0


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The JSON object of `demo --json`: per prompt, and pooled over all prompts."""
    pooled = _pool(outcomes)
    return {
        "prompts": [
            {
                "name": o.name,
                "prompt": o.prompt,
                "text": o.speculative.text,
                "identical": o.first_difference is None,
                "first_difference": o.first_difference,
                "repeated": repetition(o.speculative.tokens),
                "plain": {
                    "tokens": len(o.plain.tokens),
                    "ms": o.plain_ms,
                    "tokens_per_second": o.plain_rate,
                },
                "speculative": {
                    "tokens": len(o.speculative.tokens),
                    "ms": o.speculative_ms,
                    "tokens_per_second": o.speculative_rate,
                    "tau": o.stats.mean_accepted_length,
                    "rounds": o.stats.rounds,
                    "drafted_tokens": o.stats.drafted_tokens,
                    "accepted_tokens": o.stats.accepted_tokens,
                    "acceptance_rate": o.stats.acceptance_rate,
                },
            }
            for o in outcomes
        ],
        "draft_max": DRAFT_MAX,
        "identical": all(o.first_difference is None for o in outcomes),
        "tau": pooled["tau"],
        "speedup": pooled["speedup"],
    }


def _load_prompts() -> list[tuple[str, str]]:
    for name in (TARGET_FILE, DRAFTER_FILE, PROMPTS_FILE):
        if not (DATA_DIR / name).is_file():
            raise CheckpointError(f"{name} is not part of this installation; reinstall the package, or use `generate`")
    entries = json.loads((DATA_DIR / PROMPTS_FILE).read_text("utf-8"))["prompts"]
    # The first ones, not the best ones; the figures over all of them are in CARD.md.
    return [(entry["file"], entry["prompt"]) for entry in entries[:N_PROMPTS]]


def _idle_cores() -> int:
    """Cores that nothing else uses, at least 1: ggml's threads wait for one another at every operation of a graph, and
    one that has to share its core makes such a small model a hundred times slower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = int(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    return max(cores - busy, 1)


def _open_session(draft_max: int, n_threads: int, verbose: bool) -> SpecSession:
    return SpecSession(
        str(DATA_DIR / TARGET_FILE),
        str(DATA_DIR / DRAFTER_FILE),
        draft_max=draft_max,
        n_ctx=N_CTX,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        n_gpu_layers=0,
        # An f32 cache and no flash attention: the fewest roundings that depend on how many rows are decoded together.
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
        flash_attn=False,
        swa_full=False,
        verbose=verbose,
    )


def _tokens(session: SpecSession, prompt: str) -> list[int]:
    return session.tokenize(prompt.encode("utf-8"), add_bos=True, special=True)


def _run_prompts(
    prompts: Sequence[tuple[str, str]], plain: SpecSession, speculative: SpecSession, color: str | None
) -> list[Outcome]:
    """Both ways of decoding for each prompt; the speculative text is shown unless `color` is None."""
    # The first decode reads the weights from disk and starts the threads; neither run should pay for that.
    for session in (plain, speculative):
        generate(session, _tokens(session, prompts[0][1]), 8, GREEDY, TokenWriter(None))
    if color is not None:
        _print_introduction(color)
    outcomes = []
    for name, prompt in prompts:
        if color is not None:
            print(f"\n--- {name} ---\n...{_last_lines(prompt)}", end="")
        outcomes.append(_compare(name, prompt, plain, speculative, color))
        if color is not None:
            print()
    return outcomes


def _compare(name: str, prompt: str, plain: SpecSession, speculative: SpecSession, color: str | None) -> Outcome:
    tokens = _tokens(plain, prompt)
    plain_runs, speculative_runs, stats = [], [], None
    for repeat in range(N_REPEATS):
        plain.reset()
        plain_runs.append(generate(plain, tokens, N_PREDICT, GREEDY, TokenWriter(None)))
        show = color is not None and repeat == 0
        writer = TokenWriter(sys.stdout if show else None, color or "off")
        speculative.reset()
        speculative.reset_stats()
        speculative_runs.append(generate(speculative, tokens, N_PREDICT, GREEDY, writer))
        stats = stats or speculative.stats
    assert stats is not None
    return Outcome(
        name,
        prompt,
        plain_runs[0],
        statistics.median(r.predicted_ms for r in plain_runs),
        speculative_runs[0],
        statistics.median(r.predicted_ms for r in speculative_runs),
        stats,
    )


def _rate(generation: Generation, ms: float) -> float:
    return 1000 * (len(generation.tokens) - 1) / ms if ms > 0 else 0.0


def _pool(outcomes: Sequence[Outcome]) -> dict[str, float]:
    rounds = sum(o.stats.rounds for o in outcomes)
    plain_ms = sum(o.plain_ms for o in outcomes)
    speculative_ms = sum(o.speculative_ms for o in outcomes)
    n_plain = sum(len(o.plain.tokens) - 1 for o in outcomes)
    n_speculative = sum(len(o.speculative.tokens) - 1 for o in outcomes)
    plain_rate = 1000 * n_plain / plain_ms if plain_ms else 0.0
    speculative_rate = 1000 * n_speculative / speculative_ms if speculative_ms else 0.0
    return {
        "tokens": sum(len(o.speculative.tokens) for o in outcomes),
        "rounds": rounds,
        "tau": sum(o.stats.generated_tokens for o in outcomes) / rounds if rounds else 0.0,
        "plain_rate": plain_rate,
        "speculative_rate": speculative_rate,
        "speedup": speculative_rate / plain_rate if plain_rate else 0.0,
    }


def _last_lines(prompt: str, n: int = 4) -> str:
    return "\n".join(prompt.split("\n")[-n:])


def _print_introduction(color: str) -> None:
    out = console(sys.stdout, color)
    out.print(
        "A small Laguna model and its DFlash drafter, both trained on Python source code, shipped with this package. "
        "Each prompt is taken from a file that neither has seen. The model is far too small to write good code; "
        "what counts is that drafting gives the same text in fewer passes."
    )
    if TokenWriter(sys.stdout, color).marks:
        out.print(f"[underline green]Marked[/] text was drafted, up to {DRAFT_MAX} tokens at a time, and accepted.")


def _print_table(outcomes: Sequence[Outcome], n_threads: int) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("prompt", overflow="fold")
    for heading in ("tokens", "rounds", "tau", "tokens/s\nplain", "tokens/s\ndrafted", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("identical", no_wrap=True)
    for o in outcomes:
        table.add_row(
            escape(o.name),
            str(len(o.speculative.tokens)),
            str(o.stats.rounds),
            f"{o.stats.mean_accepted_length:.2f}",
            f"{o.plain_rate:.0f}",
            f"{o.speculative_rate:.0f}",
            f"{o.speculative_rate / o.plain_rate if o.plain_rate else 0:.2f}",
            "yes" if o.first_difference is None else f"no, at {o.first_difference}",
        )
    pooled = _pool(outcomes)
    identical = all(o.first_difference is None for o in outcomes)
    table.add_section()
    table.add_row(
        "all",
        str(pooled["tokens"]),
        str(pooled["rounds"]),
        f"{pooled['tau']:.2f}",
        f"{pooled['plain_rate']:.0f}",
        f"{pooled['speculative_rate']:.0f}",
        f"{pooled['speedup']:.2f}",
        "yes" if identical else "no",
        style="bold",
    )
    out = console(sys.stdout)
    out.print(table)
    repeated = statistics.mean(repetition(o.speculative.tokens) for o in outcomes)
    out.print(
        f"tau: tokens a round, of up to {DRAFT_MAX} drafts and one more. {n_threads} thread(s). "
        f"{100 * repeated:.0f} % of the 4-grams had occurred before in the same text; what repeats is easy to draft."
    )
    if pooled["speedup"] < 1:
        out.print(
            "Fewer target passes, but not faster here: a pass of so small a target is mostly overhead, which checking "
            "several rows multiplies. Drafting pays when the target is much slower than the drafter."
        )
    if not identical:
        out.print(
            "A difference can occur where two tokens are almost equally likely: with f16 weights several rows decoded "
            "together round differently from one. In f32 the texts are identical."
        )
