"""`laguna-gguf inspect`: what a file or checkpoint directory is, and whether it is sound."""

import argparse
import sys
from typing import Any

from rich.markup import escape
from rich.table import Table

from laguna_gguf.commands.output import console, device_line, note, print_json, size
from laguna_gguf.devices import list_devices
from laguna_gguf.inspect import inspect


def add_parser(subparsers: Any) -> None:
    """Add `inspect` to the command line."""
    parser = subparsers.add_parser(
        "inspect",
        help="say what a model file or directory is and whether it is sound",
        description="Say what a GGUF file or a checkpoint directory is, how it is configured and what is wrong.",
        epilog="Exit status 0: sound; 1: not sound, or not readable at all.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "path", metavar="PATH", help="GGUF file, directory with config.json and safetensors, or hf://org/name[/file]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks on stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Inspect and print. Returns the exit code: 1 when the file is not sound."""
    report = inspect(args.path)
    if args.json:
        print_json(report)
    else:
        _print_report(report)
    if not report["sound"]:
        problems = report["problems"]
        note(f"not sound: {problems[0] if problems else args.path}")
        return 1
    return 0


def _print_report(report: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in report.items():
        # shapes fill pages; they are in the JSON output
        if key not in ("config", "problems", "notes", "shapes") and value not in (None, "", [], {}):
            table.add_row(key, escape(_text(key, value)))
    for key, value in report["config"].items():
        table.add_row(f"  {key}", escape(_text(key, value)))
    for message in report["notes"]:
        table.add_row("note", escape(printable(message)), style="yellow")
    for problem in report["problems"]:
        table.add_row("problem", escape(printable(problem)), style="red")
    for device in list_devices():
        table.add_row("device", escape(device_line(device)))
    console(sys.stdout).print(table)


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{k} {_text(k, v) or 'none'}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(key, v) for v in value)
    return size(value) if key == "bytes" else printable(str(value))


def printable(text: str) -> str:
    """Text of a file without what a terminal would obey, and without bytes that are not UTF-8."""
    decoded = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in decoded)
