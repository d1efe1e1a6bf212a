"""The `laguna-gguf` command: parses arguments, runs a subcommand, turns errors into one line and an exit code.

Exit codes: 0 done, 1 refused or failed, 2 usage. Data goes to stdout, everything else to stderr.
"""

import argparse
import importlib.metadata
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from laguna_gguf.commands import bench, compress, demo, generate, inspect, serve, trace
from laguna_gguf.commands.output import PROGRAM, note

logger = logging.getLogger(__name__)

_INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Usage errors raise SystemExit(2), as argparse does."""
    args = build_parser().parse_args(argv)
    if hasattr(args, "check"):
        args.check(args)
    logging.basicConfig(
        stream=sys.stderr,
        format=f"{PROGRAM}: %(levelname)s: %(message)s",
        level=logging.DEBUG if args.verbose else logging.WARNING,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) is gone; without this Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        logger.debug("failed", exc_info=True)
        note(f"error: {_reason(error)}")
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; parsed arguments have `run`, and `check` where arguments can contradict."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="DFlash speculative decoding for Laguna models on stock llama.cpp.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print versions and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, generate, serve, bench, compress, inspect, trace):
        command.add_parser(subparsers)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        version = importlib.metadata.version
        print(f"{PROGRAM} {version('laguna-gguf')} (llama-cpp-python {version('llama-cpp-python')})")
        parser.exit()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
