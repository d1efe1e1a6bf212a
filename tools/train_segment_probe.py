#!/usr/bin/env python3
"""Train a segment probe for a Qwen3.5 drafter: where units of text begin, read off its tap. Needs torch.

    python tools/train_segment_probe.py DRAFTER.gguf TEXTS... --outfile PROBE.gguf

Labels come from parsers: functions, classes and blocks of Python by its own parser, headings and paragraphs of Markdown
and plain text, joins of files; for other suffixes from a function of yours (--label .js=my_labels:javascript). The
drafter is not changed. Prints the boundary F1 on held-out files.
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
from scoring.probe import ProbeSettings
from scoring.run import add_arguments, contexts_of, make_probe, open_trunk


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--hidden", type=int, default=ProbeSettings.hidden, help="width of the hidden layer; default 256"
    )
    parser.add_argument(
        "--taps", type=int, default=ProbeSettings.taps, help="tokens of the convolution, odd; default 5"
    )
    args = parser.parse_args(argv)
    settings = ProbeSettings(
        epochs=args.epochs or ProbeSettings.epochs, hidden=args.hidden, taps=args.taps, seed=args.seed
    )
    try:
        trunk = open_trunk(args.drafter, args.threads, args.n_gpu_layers)
        report = make_probe(trunk, contexts_of(args, trunk), settings, args.outfile)
    except (LagunaError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
