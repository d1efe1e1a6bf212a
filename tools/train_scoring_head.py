#!/usr/bin/env python3
"""Train a scoring head for a Qwen3.5 drafter: query and key rows of block 15 that find evidence. Needs torch.

    python tools/train_scoring_head.py DRAFTER.gguf TEXTS... --outfile HEAD.gguf

Examples are generated from text files (notes, functions by name and by a part of it, error messages, phrases, rare
identifiers, three needles at once), or given as JSON lines {"text", "question", "evidence": [[begin, end], ...]} with
positions in characters. The drafter is not changed. Prints the evidence that the head keeps on held-out files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from laguna_gguf.errors import LagunaError
from scoring.head import HeadSettings
from scoring.run import add_arguments, contexts_of, make_head, open_trunk


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help="examples of your own instead of generated ones")
    parser.add_argument("--learning-rate", type=float, default=HeadSettings.learning_rate)
    args = parser.parse_args(argv)
    settings = HeadSettings(epochs=args.epochs or HeadSettings.epochs, learning_rate=args.learning_rate, seed=args.seed)
    try:
        trunk = open_trunk(args.drafter, args.threads, args.n_gpu_layers)
        report = make_head(trunk, contexts_of(args, trunk, args.jsonl), settings, args.outfile)
    except (LagunaError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
