#!/usr/bin/env python3
"""Whole sessions on a random pair with Laguna XS-2.1's proportions (tools/bench/medium_pair.py), made on the fly.

speed: decoding with synthetic acceptance against plain decoding, next to what no round can beat: tau times a plain step
by the time of drafting alone and verifying alone, measured in the same run on the same text.
prompt: prompt processing with hidden rows captured for the drafter against plain prompt processing.

All ways of working take turns; ratios are medians over the repetitions. --json for machines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from bench.medium_pair import MEDIUM, SMOKE, write_pair
from laguna_gguf import SpecSession
from laguna_gguf.bench.costs import measure_costs
from laguna_gguf.bench.engines import Engine, SessionEngine, same_model
from laguna_gguf.bench.measure import Case, measure_generation, measure_prompt
from laguna_gguf.bench.rows import generation_rows, prompt_rows

SHAPES = {"medium": MEDIUM, "smoke": SMOKE}
PROMPT_TOKENS = 64
CAPTURE_ALLOWED = 1.05
"""Most that prompt processing with capture may take by plain prompt processing, at 2,048 tokens and more."""


def measure_speed(
    session: SpecSession, llama: llama_cpp.Llama, args: argparse.Namespace, prompt: list[int]
) -> list[dict[str, Any]]:
    """One result a depth; the first one is plain decoding, the faster of its two ways."""
    depths = args.spec_draft_n_max
    engines: list[Any] = [Engine(llama), SessionEngine(session, 0)]
    engines += [SessionEngine(session, n, spec_synth_len=min(args.spec_synth_len, n + 1)) for n in depths]
    results = measure_generation(engines, Case(n_gen=args.n_gen), {"random": [prompt]}, args.repetitions)
    rows = {row.engine: row for row in generation_rows(Case(n_gen=args.n_gen), results)}
    plain = next(row for row in rows.values() if row.baseline)
    report = [{"n": 0, "engine": plain.engine, "t_s": plain.t_s, "std": plain.std, "speedup": 1.0}]
    for engine, result in zip(engines[2:], results[2:], strict=True):
        row, n = rows[engine.name], engine.draft_max
        text = prompt + result.runs["random"][0][0].tokens  # equal tokens wake equal experts: the same text, then
        plain_cost, cost = measure_costs(session, text, [n], args.repetitions)
        tau, alone = row.tau or 1.0, cost["draft_ms"] + cost["verify_ms"]
        report.append(
            {
                "n": n,
                "engine": row.engine,
                "t_s": row.t_s,
                "std": row.std,
                "speedup": row.ratio,
                "tau": row.tau,
                "draft_ms": cost["draft_ms"],
                "verify_ms": cost["verify_ms"],
                "plain_ms": plain_cost["verify_ms"],
                "bound": tau * plain_cost["verify_ms"] / alone,
                "draft_ms_in_rounds": row.draft_ms,
                "verify_ms_in_rounds": row.verify_ms,
                "repetition": row.repetition,
            }
        )
    return report


def measure_prompts(
    session: SpecSession, llama: llama_cpp.Llama, args: argparse.Namespace, tokens: list[int]
) -> list[dict[str, Any]]:
    """One result a prompt length: rates, and the time with capture by the time without."""
    report = []
    for n in args.n_prompt:
        engines = [Engine(llama), SessionEngine(session, 0), SessionEngine(session, 7)]
        rows = prompt_rows(
            Case(n_prompt=n), measure_prompt(engines, Case(n_prompt=n), {"": [tokens]}, args.repetitions)
        )
        plain = next(row for row in rows if row.baseline)
        captured = next(row for row in rows if row.engine == engines[-1].name)
        report.append(
            {
                "n_prompt": n,
                "engine": plain.engine,
                "plain_t_s": plain.t_s,
                "plain_std": plain.std,
                "captured_t_s": captured.t_s,
                "captured_std": captured.std,
                "time_ratio": 1 / captured.ratio,
                "time_ratio_of_best": max(plain.samples_ts) / max(captured.samples_ts),
            }
        )
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "prompt"))
    parser.add_argument("--shapes", choices=tuple(SHAPES), default="medium")
    parser.add_argument("--pair", type=Path, metavar="FOLDER", help="where the pair lies, or is to be kept")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-r", "--repetitions", type=int, default=7)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-p", "--n-prompt", type=int, nargs="+", default=[2048])
    parser.add_argument("--spec-draft-n-max", type=int, nargs="+", default=[3, 4, 5, 7])
    parser.add_argument("--spec-synth-len", type=float, default=4.0, help="tokens a round, at most n + 1")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    config = SHAPES[args.shapes]
    needed = PROMPT_TOKENS + args.n_gen if args.what == "speed" else max(args.n_prompt)
    keywords: dict[str, Any] = {
        "n_ctx": -(-(needed + 32) // 256) * 256,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_threads": args.threads,
        "n_threads_batch": args.threads,
        "swa_full": False,
        "verbose": False,
    }
    rng = np.random.default_rng(2)
    tokens = rng.integers(300, config.n_vocab, max(needed, PROMPT_TOKENS)).tolist()
    with contextlib.ExitStack() as stack:
        folder = args.pair or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target, drafter = write_pair(folder, config)
        session = stack.enter_context(contextlib.closing(SpecSession(target, drafter, **keywords)))
        with same_model(session):
            llama = stack.enter_context(contextlib.closing(llama_cpp.Llama(str(target), **keywords)))
        if args.what == "speed":
            rows = measure_speed(session, llama, args, tokens[:PROMPT_TOKENS])
        else:
            rows = measure_prompts(session, llama, args, tokens)
    if args.json:
        print(json.dumps({"what": args.what, "shapes": args.shapes, "threads": args.threads, "rows": rows}))
    elif args.what == "speed":
        _print_speed(rows)
    else:
        _print_prompts(rows)
    return 0


def _print_speed(rows: list[dict[str, Any]]) -> None:
    print("SYNTHETIC acceptance: tau was asked for, not measured")
    heads = ("t/s", "tau", "speed-up", "bound", "draft ms", "verify ms", "plain ms")
    widths = (14, 5, 9, 6, 9, 10, 9)
    print(" n", *(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for row in rows:
        rate = f"{row['t_s']:.2f} ± {row['std']:.2f}"
        if row["n"] == 0:
            print(f"{0:2} {rate:>14} {'':5} {1:9.2f}   plain, {row['engine']}")
            continue
        print(
            f"{row['n']:2} {rate:>14} {row['tau']:5.2f} {row['speedup']:9.2f} {row['bound']:6.2f} "
            f"{row['draft_ms']:9.2f} {row['verify_ms']:10.2f} {row['plain_ms']:9.2f}"
        )


def _print_prompts(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        verdict = "within" if row["time_ratio"] <= CAPTURE_ALLOWED else "above"
        print(
            f"pp{row['n_prompt']}: plain {row['plain_t_s']:.1f} ± {row['plain_std']:.1f} t/s ({row['engine']}), "
            f"captured {row['captured_t_s']:.1f} ± {row['captured_std']:.1f} t/s; {row['time_ratio']:.3f} times the "
            f"time (median; {row['time_ratio_of_best']:.3f} best by best), {verdict} the {CAPTURE_ALLOWED} allowed"
        )


if __name__ == "__main__":
    sys.exit(main())
