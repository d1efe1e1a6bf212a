"""Command-line options of prompt compression, for every command that has them. Loads no model library."""

from __future__ import annotations

import argparse
from typing import Any

from laguna_gguf.argument_types import count, fraction
from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.keep_ratio import Curve
from laguna_gguf.pflash.prefill import COMPRESSION, DEFAULT_KEEP_RATIO, DEFAULT_THRESHOLD


def add_drafter(group: Any, drafter_help: str) -> None:
    """--prefill-drafter, --scoring-head, --segment-probe."""
    group.add_argument("--prefill-drafter", metavar="F", help=drafter_help)
    group.add_argument("--scoring-head", metavar="F", help="GGUF that replaces the drafter's own scoring rows")
    group.add_argument("--segment-probe", metavar="F", help="GGUF that finds where units of text begin")


def add_policy(group: Any, compression: str) -> None:
    """--prefill-compression with this default, --prefill-threshold, --prefill-keep-ratio, --prefill-curve."""
    group.add_argument(
        "--prefill-compression",
        choices=COMPRESSION,
        default=compression,
        help=f"auto: prompts from the threshold on; default {compression}",
    )
    group.add_argument(
        "--prefill-threshold",
        type=count,
        default=DEFAULT_THRESHOLD,
        metavar="N",
        help=f"droppable target tokens; default {DEFAULT_THRESHOLD}",
    )
    group.add_argument(
        "--prefill-keep-ratio",
        type=fraction,
        default=DEFAULT_KEEP_RATIO,
        metavar="R",
        help=f"share of what may be dropped that is kept; default {DEFAULT_KEEP_RATIO}",
    )
    add_curve(group)


def add_curve(group: Any) -> None:
    """--prefill-curve."""
    group.add_argument(
        "--prefill-curve", type=curve, metavar="'TOK:RATIO ...'", help="keep ratio by prompt length, linear between"
    )


def policy_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """The policy as keywords of `PFlash.prefill`."""
    return {
        "compression": args.prefill_compression,
        "threshold": args.prefill_threshold,
        "keep_ratio": args.prefill_keep_ratio,
        "curve": args.prefill_curve,
    }


def curve(text: str) -> Curve:
    """argparse type: a keep ratio curve."""
    try:
        return Curve.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
