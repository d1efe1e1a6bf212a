"""Command-line arguments that the commands share, under llama.cpp's names and, unless said otherwise, its defaults."""

import argparse
from collections.abc import Callable
from typing import Any

from laguna_gguf.argument_types import (
    MAX_INTEGER,
    at_least_zero,
    count,
    fraction,
    gpu_layers,
    integer,
    number,
    positive,
)
from laguna_gguf.llama_arguments import CACHE_TYPES

DEFAULT_CONTEXT = 4096
"""Context when -c is not given and the model was trained for at least as much."""

_UNQUANTISED = ("f32", "f16", "bf16")


def add_models(parser: argparse.ArgumentParser, no_draft: str = "plain decoding; -md may then be left out") -> None:
    """-m, -md, --no-draft with this help."""
    group = parser.add_argument_group("models")
    group.add_argument("-m", "--model", required=True, metavar="TARGET", help="target GGUF (any shard of a split one)")
    group.add_argument(
        "-md",
        "--spec-draft-model",
        "--model-draft",
        dest="draft_model",
        metavar="DRAFTER",
        help="DFlash drafter: a GGUF, or a directory with config.json and safetensors",
    )
    group.add_argument("--no-draft", action="store_true", help=no_draft)


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """-p or -f, and -n."""
    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; control tokens in it are recognised")
    source.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file, - for stdin")
    group.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        dest="n_predict",
        type=_n_predict,
        default=-1,
        metavar="N",
        help="tokens to generate; default -1: until the context is full",
    )


def add_sampling(
    parser: argparse.ArgumentParser, title: str = "sampling (the target's; drafting changes nothing here)"
) -> None:
    """--temp and the other settings of the target's sampler."""
    group = parser.add_argument_group(title)
    group.add_argument("--temp", type=at_least_zero, default=0.8, metavar="T", help="0 is greedy; default 0.8")
    group.add_argument("--top-k", type=int, default=40, metavar="N", help="default 40, 0 = off")
    group.add_argument("--top-p", type=fraction, default=0.95, metavar="P", help="default 0.95, 1 = off")
    group.add_argument("--min-p", type=fraction, default=0.05, metavar="P", help="default 0.05, 0 = off")
    group.add_argument("--seed", type=_seed, default=-1, metavar="N", help="default -1: a new one each time")
    group.add_argument("--repeat-penalty", type=_above_zero, default=1.0, metavar="X", help="default 1 = off")


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Context, threads, batches, caches, GPU layers."""
    group = parser.add_argument_group("context and hardware")
    group.add_argument(
        "-c",
        "--ctx-size",
        dest="n_ctx",
        type=count,
        metavar="N",
        help=f"context in tokens; 0: the model's; default: the model's, at most {DEFAULT_CONTEXT}",
    )
    group.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        dest="n_gpu_layers",
        type=gpu_layers,
        default=-1,
        metavar="N",
        help="layers to put on GPUs, a number or 'all' (the default; without a GPU it means nothing)",
    )
    group.add_argument("-t", "--threads", type=positive, metavar="N", help="threads; default half the cores")
    group.add_argument(
        "-tb",
        "--threads-batch",
        type=positive,
        metavar="N",
        help="threads for prompts and for verifying drafts; default: as -t, or without it all cores",
    )
    group.add_argument("-b", "--batch-size", type=positive, default=2048, metavar="N", help="default 2048")
    group.add_argument("-ub", "--ubatch-size", type=positive, default=512, metavar="N", help="default 512")
    group.add_argument(
        "-fa",
        "--flash-attn",
        type=lambda text: {"0": "off", "1": "on"}.get(text, text),
        choices=("on", "off", "auto"),
        default="auto",
        help="default auto, which is off here",
    )
    for letter in "kv":
        group.add_argument(
            f"-ct{letter}",
            f"--cache-type-{letter}",
            choices=tuple(CACHE_TYPES),
            default="f16",
            metavar="TYPE",
            help=f"type of the {letter.upper()} cache: {', '.join(CACHE_TYPES)}; default f16",
        )
    group.add_argument("--swa-full", action="store_true", help="full-size cache for sliding-window layers")


def add_drafting(parser: argparse.ArgumentParser) -> None:
    """--spec-draft-n-max and its neighbours."""
    group = parser.add_argument_group("drafting")
    group.add_argument(
        "--spec-draft-n-max",
        type=_draft_max,
        default="auto",
        metavar="N|auto",
        help="most tokens drafted a round; default auto (llama.cpp's default of 3 does not apply)",
    )
    group.add_argument("--spec-draft-n-min", type=count, default=0, metavar="N", help="fewest; default 0")
    group.add_argument(
        "--spec-draft-window",
        choices=("per_query", "anchored"),
        default="per_query",
        help="how the drafter's window is counted; default per_query",
    )
    add_synthetic(group)


def add_synthetic(group: argparse._ArgumentGroup) -> None:
    """--spec-synth-len."""
    group.add_argument(
        "--spec-synth-len",
        type=_synth_len,
        metavar="L",
        help="for benchmarks: accept drafts at random, L tokens a round on average; the text is then not the model's",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """--json, --color, -v."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    group.add_argument("--color", choices=("auto", "on", "off"), default="auto", help="mark accepted drafts")
    group.add_argument("-v", "--verbose", action="store_true", help="llama.cpp's log and tracebacks on stderr")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse, as a usage error, arguments that contradict each other."""
    if args.draft_model is None and not args.no_draft:
        parser.error("-md is needed; with --no-draft it may be left out")
    if args.spec_synth_len is not None and args.no_draft:
        parser.error("--spec-synth-len accepts drafts; with --no-draft there are none")
    check_cache(parser, args)


def check_cache(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse a quantised V cache without flash attention, which llama.cpp does not have."""
    if args.cache_type_v not in _UNQUANTISED and args.flash_attn != "on":
        parser.error(f"-ctv {args.cache_type_v} needs -fa on")


def numbers(low: int, high: int = MAX_INTEGER) -> Callable[[str], tuple[int, ...]]:
    """argparse type: integers in low..high, separated by commas."""
    what = f"a list of numbers >= {low}"
    return lambda text: tuple(integer(part, low, high, what) for part in text.split(","))


def depths(text: str) -> tuple[int | str, ...]:
    """argparse type: draft depths separated by commas, numbers or 'auto'."""
    return tuple(dict.fromkeys(_draft_max(part) for part in text.split(",")))


def _n_predict(text: str) -> int:
    value = integer(text, -1, MAX_INTEGER, "-1 or a number >= 1")
    if value == 0:
        raise argparse.ArgumentTypeError("0 is not -1 or a number >= 1")
    return value


def _seed(text: str) -> int:
    return integer(text, -1, 2**32 - 2, "-1 or a number below 4294967295")


def _draft_max(text: str) -> int | str:
    return text if text == "auto" else integer(text, 0, MAX_INTEGER, "a number >= 0 or 'auto'")


def _synth_len(text: str) -> float:
    return number(text, 1.0, 1e9, "a number of tokens a round, >= 1")


def _above_zero(text: str) -> float:
    return number(text, 1e-9, 1e9, "a number > 0")


def llama_keywords(args: argparse.Namespace, n_ctx: int) -> dict[str, Any]:
    """Keywords of Llama that the options of every command which loads a target give; threads are not among them."""
    return {
        "n_ctx": n_ctx,
        "n_batch": args.batch_size,
        "n_ubatch": args.ubatch_size,
        "n_gpu_layers": args.n_gpu_layers,
        "type_k": CACHE_TYPES[args.cache_type_k],
        "type_v": CACHE_TYPES[args.cache_type_v],
        "swa_full": args.swa_full,
        "flash_attn": args.flash_attn == "on",
    }
