"""What both trainers do around the training: sources, contexts, taps, held-out figures, files."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laguna_gguf.pflash.head import write_head
from laguna_gguf.pflash.probe import write_probe
from laguna_gguf.pflash.trunk import Trunk
from scoring.examples import Example, make_examples, name_words, read_jsonl
from scoring.features import ExampleTaps, read_examples
from scoring.head import HeadSettings, new_head, train_head
from scoring.head_recall import head_recall
from scoring.probe import ProbeSettings, probe_f1, train_probe
from scoring.progress import say
from scoring.sources import Label, Source, Split, load_label, read_files, split_sources, standard_library

CHARACTERS = 4500
"""Of a training context; 1,100 to 1,500 tokens of code."""
HELD_OUT_LENGTH = 4
"""Times as long are the contexts that figures are reported on."""
HELD_OUT_NOTES = 8


@dataclass(frozen=True)
class Contexts:
    """Taps to learn from and taps to report on, of different texts."""

    train: list[ExampleTaps]
    held_out: list[ExampleTaps]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that both trainers share."""
    parser.add_argument("drafter", type=Path, help="a Qwen3.5 GGUF with at least 16 blocks")
    parser.add_argument(
        "texts",
        type=Path,
        nargs="*",
        help="files and folders (.py, .md, .rst, .txt); without any, the standard library of this Python",
    )
    parser.add_argument("--outfile", type=Path, required=True, help="the GGUF to write")
    parser.add_argument("--cache", type=Path, help="folder that keeps the taps between runs")
    parser.add_argument(
        "--contexts", type=int, default=380, help="training contexts of about 1,300 tokens; default 380"
    )
    parser.add_argument("--held-out", type=int, default=10, help="longer contexts of held-out files; default 10")
    parser.add_argument(
        "--characters", type=int, default=CHARACTERS, help=f"of a training context; default {CHARACTERS}"
    )
    parser.add_argument("--epochs", type=int, help="passes over the training contexts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-ngl", "--gpu-layers", dest="n_gpu_layers", type=int, default=0)
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="SUFFIX=MODULE:NAME",
        help="function text -> (unit starts, sub-unit starts) for files of a suffix; repeatable",
    )


def sources_of(args: argparse.Namespace) -> list[Source]:
    """The texts that an argument list names. ValueError when there are none."""
    plugins: dict[str, Label] = dict(load_label(spec) for spec in args.label)
    if not args.texts:
        return standard_library()
    missing = [str(path) for path in args.texts if not path.exists()]
    if missing:
        raise ValueError(f"not found: {', '.join(missing)}")
    sources = read_files(args.texts, plugins)
    if not sources:
        raise ValueError(f"no readable text files under {', '.join(map(str, args.texts))}")
    return sources


def open_trunk(path: Path, threads: int, n_gpu_layers: int = 0) -> Trunk:
    """The drafter, with as many threads for everything."""
    torch.set_num_threads(threads)
    return Trunk(path, n_threads=threads, n_threads_batch=threads, n_gpu_layers=n_gpu_layers)


def example_texts(
    split: Split, n_train: int, n_held_out: int, seed: int, characters: int = CHARACTERS
) -> tuple[list[Example], list[Example]]:
    """Contexts of the training files, and longer ones of the `tune` files with names of held-out words."""
    train = make_examples(split.train, name_words(split.train, False), n_train, characters, f"{seed} train")
    words = name_words(split.train + split.tune, True)
    tune = make_examples(
        split.tune, words, n_held_out, HELD_OUT_LENGTH * characters, f"{seed} tune", n_notes=HELD_OUT_NOTES
    )
    return train, tune


def read_contexts(trunk: Trunk, train: list[Example], held_out: list[Example], cache: Path | None) -> Contexts:
    """Taps of both."""
    return Contexts(read_examples(trunk, train, cache, say), read_examples(trunk, held_out, cache, say))


def contexts_of(args: argparse.Namespace, trunk: Trunk, jsonl: Path | None = None) -> Contexts:
    """The contexts that an argument list asks for; of a JSONL file a tenth of the texts, two at least, is held out."""
    if jsonl is not None:
        examples = read_jsonl(jsonl)
        n = max(2, round(0.1 * len(examples)))
        if len(examples) <= n:
            raise ValueError(f"{jsonl} has {len(examples)} different texts; needed at least {n + 1}")
        random.Random(args.seed).shuffle(examples)
        return read_contexts(trunk, examples[n:], examples[:n], args.cache)
    split = split_sources(sources_of(args), args.seed)
    examples = example_texts(split, args.contexts, args.held_out, args.seed, args.characters)
    return read_contexts(trunk, *examples, args.cache)


def make_head(trunk: Trunk, contexts: Contexts, settings: HeadSettings, outfile: Path) -> dict[str, Any]:
    """Train, write and measure a head: {"recall": {tail: by kind}, "untrained": the same of the rows at the start}."""
    model = new_head(trunk.file, contexts.train, settings.seed)
    report: dict[str, Any] = {"untrained": {str(tail): head_recall(model, contexts.held_out, tail) for tail in (8, 32)}}
    train_head(model, contexts.train, contexts.held_out, settings, say)
    write_head(outfile, *model.rows(), trunk.file.path)
    report["recall"] = {str(tail): head_recall(model, contexts.held_out, tail) for tail in (8, 32)}
    report |= totals(contexts.train)
    return report


def make_probe(trunk: Trunk, contexts: Contexts, settings: ProbeSettings, outfile: Path) -> dict[str, Any]:
    """Train, write and measure a probe. Its threshold is chosen on the first half of the held-out contexts, the figures
    are of the others (of all where there is only one)."""
    half = len(contexts.held_out) // 2
    tune, rest = contexts.held_out[:half] or contexts.held_out, contexts.held_out[half:]
    probe = train_probe(trunk.file.n_embd, contexts.train, tune, settings, say)
    write_probe(outfile, probe, trunk.file.path)
    return {"f1": probe_f1(probe, rest), "threshold": probe.threshold} | totals(contexts.train)


def totals(examples: Sequence[ExampleTaps]) -> dict[str, int]:
    """How much was trained on."""
    return {
        "contexts": len(examples),
        "tokens": sum(len(example.taps) for example in examples),
        "questions": sum(len(example.questions) for example in examples),
    }
