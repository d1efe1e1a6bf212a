#!/usr/bin/env python3
"""Convert a Laguna DFlash drafter checkpoint to GGUF (a thin command around laguna_gguf.convert_dflash).

Exit status: 0 converted, 1 refused or failed (one reason on stderr), 2 usage.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from laguna_gguf.convert import OUTTYPES, convert_dflash
from laguna_gguf.errors import LagunaError

_PLACEHOLDERS = ("ftype", "outtype")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits with status 2 on wrong usage."""
    parser = argparse.ArgumentParser(prog="convert_dflash.py", description="Convert a Laguna DFlash drafter to GGUF.")
    parser.add_argument("model", help="drafter: Hugging Face directory, or a GGUF file of any dialect")
    parser.add_argument("--outfile", metavar="FILE",
                        help="file to write; {ftype} becomes the output type, {FTYPE} in upper case")
    parser.add_argument("--outtype", choices=list(OUTTYPES), default="bf16", help="type of the matrices (default bf16)")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--target-model-dir", metavar="DIR", help="directory of the target, which the drafter is "
                        "checked against and whose tokenizer is copied")
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


def print_report(report: dict[str, Any], *, mapping: bool) -> None:
    """Print what was (or would be) written to stdout."""
    if mapping:
        for tensor in report["tensors"]:
            shape = "x".join(str(n) for n in tensor["shape"])
            print(f"{tensor['name']:32} {tensor['type']:5} {shape:>14} {tensor['bytes']:>13,} bytes  <- "
                  f"{', '.join(tensor['sources'])}")
    for field, value in report["defaults"].items():
        print(f"default: {field} = {value}")
    for name, outtype in report["fallbacks"].items():
        print(f"rows of {name} do not fit {report['outtype']}: {outtype}")
    for name in report["dropped"]:
        print(f"dropped: {name}")
    print(f"tokenizer: {report['tokenizer']}")
    verb = "would write" if report["dry_run"] else "wrote"
    print(f"{verb} {report['outfile']}: {len(report['tensors'])} tensors, {report['bytes']:,} bytes, "
          f"{report['outtype']}, from {report['source']} ({report['dialect']})")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.ERROR, format="%(name)s: %(message)s")
    outfile = fill_placeholders(arguments.outfile or "drafter-{FTYPE}.gguf", arguments.outtype)
    try:
        report = convert_dflash(
            arguments.model,
            outfile,
            outtype=arguments.outtype,
            target=arguments.target_gguf or arguments.target_model_dir,
            dry_run=arguments.dry_run,
        )
    except LagunaError as error:
        print(f"convert_dflash.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print_report(report, mapping=arguments.dry_run or arguments.verbose)
    return 0


if __name__ == "__main__":
    sys.exit(main())
