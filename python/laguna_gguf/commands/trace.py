"""`laguna-gguf trace`: a page that shows what compressions kept and why."""

import argparse
import os
from pathlib import Path
from typing import Any

from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.trace import read_traces
from laguna_gguf.pflash.trace_report import report


def add_parser(subparsers: Any) -> None:
    """Add `trace` to the command line."""
    parser = subparsers.add_parser(
        "trace",
        help="show what prompt compressions kept, as a web page",
        description="Write a self-contained web page about the compressions of a trace file (PFLASH_TRACE_PATH).",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="JSONL file with one trace a line")
    parser.add_argument(
        "-o", "--output", metavar="F", required=True, help="HTML file to write; an older one is replaced"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks on stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the traces and write the page. Returns the exit code."""
    output = Path(args.output)
    if output.exists() and output.samefile(args.file):
        raise ConfigError(f"{args.output} is the trace file itself; needed another name for the page")
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as page:
            page.writelines(report(read_traces(args.file), f"Prompt compression: {Path(args.file).name}"))
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return 0
