"""`laguna-gguf compress`: the part of a long text that matters."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from laguna_gguf.argument_types import fraction, positive
from laguna_gguf.commands.output import console, note, print_json
from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.arguments import add_curve, add_drafter
from laguna_gguf.pflash.candidates import merge
from laguna_gguf.pflash.compress import PFlash
from laguna_gguf.pflash.compressed import Compressed
from laguna_gguf.pflash.demo import demo_scorer

_FIELDS = ("text", "spans", "budget", "retained_tokens", "stop_reason", "retained_mass", "timings")
_LONG = 2048  # tokens from which a progress bar is worth its line
_EXCERPT = 48


def add_parser(subparsers: Any) -> None:
    """Add `compress` to the command line."""
    parser = subparsers.add_parser(
        "compress",
        help="keep the part of a long text that matters to its question",
        description="Compress a text with a small drafter: whole segments are kept, within an exact token budget, by "
        "the attention that the question pays them. Without --query the end of the text is the question. More settings "
        "are read from the environment (PFLASH_...).",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("drafter")
    add_drafter(group, "Qwen3.5 or Qwen3-0.6B GGUF; default: the demo drafter of the package")
    group.add_argument("-ngl", "--gpu-layers", dest="n_gpu_layers", type=int, default=0, metavar="N", help="default 0")
    group.add_argument("-t", "--threads", type=positive, metavar="N", help="default: all cores")
    group.add_argument("-ub", "--ubatch-size", type=positive, default=512, metavar="N", help="default 512")
    group.add_argument("-fa", "--flash-attn", choices=("on", "off"), default="off", help="less memory on long inputs")
    group = parser.add_argument_group("text")
    group.add_argument("-f", "--file", default="-", metavar="FILE", help="the text; default -, standard input")
    ratio = group.add_mutually_exclusive_group(required=True)
    ratio.add_argument(
        "--prefill-keep-ratio",
        type=fraction,
        metavar="R",
        help="share of what may be dropped that is kept, 0 to 1",
    )
    add_curve(ratio)
    group.add_argument("--query", metavar="TEXT", help="what is asked; its last occurrence in the text is always kept")
    group.add_argument(
        "--required",
        action="append",
        default=[],
        metavar="TEXT",
        help="keep the last occurrence of this too; repeatable",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    group.add_argument("--explain", action="store_true", help="a table of the kept segments on stderr")
    group.add_argument("-v", "--verbose", action="store_true", help="llama.cpp's log and tracebacks on stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, compress, print. Returns the exit code."""
    text = _read_text(args.file)
    with _open(args) as pflash:
        ids = pflash.tokenize(text)
        query = pflash.find(ids, args.query) if args.query is not None else None
        required = [pflash.find(ids, needed) for needed in args.required]
        if query is not None:
            required.append(query)
            query = (max(query[0], query[1] - pflash.settings.select_query_tokens), query[1])
        with _progress(pflash, len(ids)):
            result = pflash.compress(
                text,
                keep_ratio=args.prefill_curve.ratio(len(ids)) if args.prefill_curve else args.prefill_keep_ratio,
                query=query,
                required=merge(required),
                suffix_candidates=query is not None,  # a question may stand before what it asks about
            )
        if args.explain:
            _explain(pflash, result)
    if args.json:
        print_json({name: getattr(result, name) for name in _FIELDS})
    else:
        print(result.text, flush=True)
    return 0


def _read_text(file: str) -> str:
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    if not data.strip():
        raise ConfigError("the text is empty; needed something to compress")
    return data.removesuffix(b"\n").decode("utf-8", "surrogateescape")


def _open(args: argparse.Namespace) -> PFlash:
    drafter, head, probe = args.prefill_drafter, args.scoring_head, args.segment_probe
    if drafter is None:
        demo = demo_scorer()
        note("using the demo drafter: constructed and briefly trained, it shows the way, not the quality of Qwen3.5")
        drafter, head, probe = demo.drafter, head or demo.scoring_head, probe or demo.segment_probe
    return PFlash(
        drafter,
        scoring_head=head,
        segment_probe=probe,
        sessions=0,
        n_gpu_layers=args.n_gpu_layers,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        n_batch=args.ubatch_size,
        n_ubatch=args.ubatch_size,
        flash_attn=args.flash_attn == "on",
        verbose=args.verbose,
    )


@contextlib.contextmanager
def _progress(pflash: PFlash, n_tokens: int) -> Iterator[None]:
    """A progress bar on stderr while a long text is read, when somebody is looking."""
    stream = console(sys.stderr)
    if n_tokens < _LONG or not stream.is_terminal:
        yield
        return
    columns = (TextColumn("reading {task.total:.0f} tokens"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stream, transient=True) as bar:
        task = bar.add_task("", total=n_tokens)
        pflash.on_progress = lambda done, _: bar.update(task, completed=done)
        yield


def _explain(pflash: PFlash, result: Compressed) -> None:
    trace = result.trace
    ranges = trace["segments"] or [
        (begin, min(begin + trace["chunk_size"], trace["input_tokens"]))
        for begin in range(0, trace["input_tokens"], trace["chunk_size"])
    ]
    is_sum = trace["candidate_score"] == "sum"
    forced = set(trace["forced_chunks"])
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, width in (("tokens", 14), ("n", 5), ("mass", 6), ("lift", 6)):
        table.add_column(heading, justify="right", min_width=width, no_wrap=True)
    table.add_column("kept for", min_width=8, no_wrap=True)
    table.add_column("begins with", no_wrap=True, overflow="ellipsis")
    for ordinal in trace["selected_chunks"]:
        begin, end = ranges[ordinal]
        mass = trace["chunk_scores"][ordinal] * (1 if is_sum else end - begin)
        lift = mass / (end - begin) * trace["input_tokens"]
        why = "pinned" if ordinal in forced else "mass"
        excerpt = _excerpt(pflash, trace["input_ids"][begin:end])
        table.add_row(f"{begin}..{end}", str(end - begin), f"{mass:.4f}", f"{lift:.2f}", why, excerpt)
    stream = console(sys.stderr)
    stream.print(table)
    note(
        f"kept {result.retained_tokens} of {trace['input_tokens']} tokens, budget {result.budget}, "
        f"{result.retained_mass:.1%} of the mass, {result.stop_reason}; "
        f"{result.timings['compress_ms'] / 1e3:.1f} s"
    )


def _excerpt(pflash: PFlash, ids: Sequence[int]) -> Text:
    words = " ".join(pflash.detokenize(ids[:_EXCERPT]).split())
    printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in words)
    return Text(printable if len(printable) <= _EXCERPT else printable[: _EXCERPT - 1] + "…")
