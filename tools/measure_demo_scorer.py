#!/usr/bin/env python3
"""Evidence kept by the shipped demo scorer, and how well its probe finds boundaries, on files that trained nothing.

Files and questions follow from the standard library of the running Python and the seed; with another Python than the
one in the card the held-out files may differ from those of the training. --questions N for a smoke run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from laguna_gguf.pflash.demo import DemoScorer, demo_scorer
from scoring.evaluation import evaluate
from scoring.progress import say
from scoring.sources import split_sources, standard_library


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100, metavar="N", help="single needles; default 100")
    parser.add_argument("--seed", type=int, default=1, help="of the split; the one that the files were trained with")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="default: the files inside the package")
    parser.add_argument("-t", "--threads", type=int, default=1)
    args = parser.parse_args(argv)
    files = demo_scorer() if args.files is None else DemoScorer.in_folder(args.files)
    split = split_sources(standard_library(), args.seed)
    report = evaluate(files, split, args.seed, n_questions=args.questions, n_threads=args.threads, say=say)
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
