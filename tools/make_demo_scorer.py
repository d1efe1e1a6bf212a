#!/usr/bin/env python3
"""Make the demo drafter of prompt compression: a constructed Qwen3.5 trunk, its tokenizer, head and probe.

    pip install ".[train]" && python tools/make_demo_scorer.py --work WORK --out OUT

Needs no download: everything is made of the standard library of the running Python and the language reference that
comes with it. Taps are kept in WORK, so that a run that was stopped goes on. About 40 minutes with one
thread on a shared machine, half of them for the evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_scorer import trunk as demo_trunk
from demo_scorer.tokenizer import balanced, token_texts, train_tokenizer, vocabulary
from laguna_gguf.pflash.demo import DemoScorer
from random_drafter import write_drafter
from scoring.head import HeadSettings
from scoring.probe import ProbeSettings
from scoring.run import example_texts, make_head, make_probe, open_trunk, read_contexts, say
from scoring.sources import Split, python_version, split_sources, standard_library

GENERAL = {
    "general.name": "PFlash demo scorer",
    "general.description": "Constructed trunk of architecture qwen35 for demonstrations; not Qwen3.5",
    "general.license": "PSF-2.0",
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the taps and the facts of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--contexts", type=int, default=380)
    parser.add_argument("--held-out", type=int, default=10)
    parser.add_argument("--head-epochs", type=int, default=HeadSettings.epochs)
    parser.add_argument("--probe-epochs", type=int, default=ProbeSettings.epochs)
    parser.add_argument("--questions", type=int, default=100, help="single needles of the evaluation; 0: no evaluation")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="a few contexts and epochs")
    args = parser.parse_args(argv)
    if args.smoke:
        args.contexts, args.held_out, args.head_epochs, args.probe_epochs, args.questions = 6, 2, 1, 1, 4
    return args


def construct_trunk(split: Split, seed: int, outfile: Path) -> None:
    """Tokenizer and weights, both of the training files only."""
    tokenizer = train_tokenizer(balanced(split.train[::2], demo_trunk.COMMON_WORDS), demo_trunk.SHAPE.n_vocab)
    counts: Counter[int] = Counter()
    for source in split.train[::3]:
        counts.update(tokenizer.encode(source.text).ids)
    tensors = demo_trunk.construct(token_texts(tokenizer), counts, seed)
    write_drafter(outfile, demo_trunk.SHAPE, tensors, dtype="q8_0", vocabulary=vocabulary(tokenizer), general=GENERAL)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    files = DemoScorer.in_folder(args.out)
    began = time.monotonic()
    split = split_sources(standard_library(), args.seed)
    facts: dict = {
        "python": python_version(),
        "corpus_sha256": split.sha256,
        "files": {name: len(getattr(split, name)) for name in ("train", "tune", "test")},
        "seed": args.seed,
    }
    construct_trunk(split, args.seed, files.drafter)
    say(f"wrote {files.drafter.name}, {files.drafter.stat().st_size / 1e6:.1f} MB")
    trunk = open_trunk(files.drafter, args.threads)
    contexts = read_contexts(trunk, *example_texts(split, args.contexts, args.held_out, args.seed), args.work / "taps")
    facts["minutes_taps"] = (time.monotonic() - began) / 60
    facts["head"] = make_head(
        trunk, contexts, HeadSettings(epochs=args.head_epochs, seed=args.seed), files.scoring_head
    )
    say(f"head: {json.dumps(facts['head'])}")
    facts["probe"] = make_probe(
        trunk, contexts, ProbeSettings(epochs=args.probe_epochs, seed=args.seed), files.segment_probe
    )
    say(f"probe: {json.dumps(facts['probe'])}")
    trunk.close()
    facts["minutes_training"] = (time.monotonic() - began) / 60
    (args.work / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    if args.questions:
        from demo_scorer.card import write_card
        from scoring.evaluation import evaluate

        report = evaluate(files, split, args.seed, n_questions=args.questions, n_threads=args.threads, say=say)
        facts["minutes"] = (time.monotonic() - began) / 60
        (args.work / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
        write_card(args.out / "CARD-scorer.md", files, facts, report)
    print(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
