#!/usr/bin/env python3
"""Convert a Laguna DFlash drafter checkpoint to GGUF, or back to a Hugging Face directory.

A thin command around laguna_gguf.convert_dflash.

Exit status: 0 converted, 1 refused or failed (one reason on stderr), 2 usage.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from laguna_gguf.convert import HF, OUTTYPES, convert
from laguna_gguf.errors import LagunaError

_PLACEHOLDERS = ("ftype", "outtype")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits with status 2 on wrong usage."""
    parser = argparse.ArgumentParser(prog="convert_dflash.py", description="Convert a Laguna DFlash drafter to GGUF.")
    parser.add_argument(
        "model", help="drafter: Hugging Face directory, GGUF file of any dialect, or hf://org/name[/file]"
    )
    parser.add_argument(
        "--outfile",
        metavar="FILE",
        help="file (with --outtype hf: new directory) to write; {ftype} becomes the output type, {FTYPE} in upper case",
    )
    parser.add_argument(
        "--outtype",
        type=str.lower,
        choices=[*OUTTYPES, HF],
        default="bf16",
        help="type of the matrices (default bf16), or hf for a Hugging Face directory",
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-model-dir",
        metavar="DIR",
        help="directory of the target, which the drafter is checked against and whose tokenizer is copied",
    )
    target.add_argument("--target-gguf", metavar="FILE", help="the same from a GGUF file")
    parser.add_argument("--dry-run", action="store_true", help="print mapping, sizes and defaults; write nothing")
    parser.add_argument("--verbose", action="store_true", help="print the mapping, and log what is done")
    arguments = parser.parse_args(argv)
    if arguments.outfile is None and not arguments.dry_run:
        parser.error("--outfile is needed (or --dry-run)")
    return arguments


def fill_placeholders(outfile: str, outtype: str) -> str:
    """{ftype}, {outtype} -> the type; in upper case for {FTYPE}, {OUTTYPE}, as llama.cpp's converter does."""
    for name in _PLACEHOLDERS:
        outfile = outfile.replace(f"{{{name}}}", outtype).replace(f"{{{name.upper()}}}", outtype.upper())
    return outfile


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr where that is a terminal, else nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("convert", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_report(report: dict[str, Any], *, mapping: bool) -> None:
    """Print what was (or would be) written to stdout."""
    if mapping:
        width = max(len(tensor["name"]) for tensor in report["tensors"])
        for tensor in report["tensors"]:
            shape = "x".join(str(n) for n in tensor["shape"])
            print(
                f"{tensor['name']:{width}} {tensor['type']:5} {shape:>14} {tensor['bytes']:>13,} bytes  <- "
                f"{', '.join(tensor['sources'])}"
            )
    for field, value in report["defaults"].items():
        print(f"default: {field} = {value}")
    why = "as its values need it" if report["outtype"] == HF else f"as its rows do not fit {report['outtype']}"
    for name, outtype in report["fallbacks"].items():
        print(f"{name}: {outtype}, {why}")
    for name in report["dropped"]:
        print(f"dropped: {name}")
    if report["tokenizer"] is not None:
        print(f"tokenizer: {report['tokenizer']}")
    verb = "would write" if report["dry_run"] else "wrote"
    print(
        f"{verb} {report['outfile']}: {len(report['tensors'])} tensors, {report['bytes']:,} bytes, "
        f"{report['outtype']}, from {report['source']} ({report['dialect']})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.ERROR, format="%(name)s: %(message)s")
    outfile = fill_placeholders(
        arguments.outfile or ("drafter" if arguments.outtype == HF else "drafter-{FTYPE}.gguf"), arguments.outtype
    )
    try:
        with progress_bar() as progress:
            report = convert(
                arguments.model,
                outfile,
                outtype=arguments.outtype,
                target=arguments.target_gguf or arguments.target_model_dir,
                dry_run=arguments.dry_run,
                progress=progress,
            )
    except LagunaError as error:
        print(f"convert_dflash.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print_report(report, mapping=arguments.dry_run or arguments.verbose)
    return 0


if __name__ == "__main__":
    sys.exit(main())
