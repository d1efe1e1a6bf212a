#!/usr/bin/env python3
"""Chi-square tests of speculative sampling with many draws; the tests do the same with few.

`PYTHONPATH=tests:tools python tools/check_distribution.py -n 1000000` prints one JSON object a sampler: p values of the
session's and of Llama's draws against the known probabilities, of both being the same, and rounds by accepted drafts.
Under equality p values are uniform: of many, one in a hundred lies below 0.01.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from chi_square import p_against_known, p_of_equality
from markov_target import GuessingDrafts, Sampler, draws, sharpened, write_markov_pair
from session_tools import plain_llama, spec_session

SAMPLERS = {
    "plain": Sampler(),
    "temperature": Sampler(temp=1.2),
    "low temperature": Sampler(temp=0.6),
    "top_k": Sampler(top_k=4),
    "top_p": Sampler(temp=0.9, top_p=0.7),
    "min_p": Sampler(temp=1.1, min_p=0.15),
    "all": Sampler(temp=1.3, top_k=8, top_p=0.9, min_p=0.05),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare speculative draws with known probabilities.")
    parser.add_argument("-n", type=int, default=200_000, help="draws for each sampler (default %(default)s)")
    parser.add_argument("--draft-max", type=int, default=3, help="drafts a round (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first text (default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target, drafter, logits = write_markov_pair(Path(folder))
        plain = plain_llama(target)
        for name, sampler in SAMPLERS.items():
            probabilities = sampler.probabilities(logits)
            session = spec_session(target, drafter, draft_max=args.draft_max)
            GuessingDrafts(session, sharpened(probabilities), seed=args.seed)
            counts = draws(session, sampler, args.n, args.seed)
            plain_counts = draws(plain, sampler, args.n, args.seed + args.n)
            report = {
                "sampler": name,
                "draws": args.n,
                "p_session": p_against_known(counts, probabilities),
                "p_llama": p_against_known(plain_counts, probabilities),
                "p_equal": p_of_equality(counts, plain_counts),
                "rounds": session.stats.rounds,
                "accepted_by_depth": list(session.stats.accepted_by_depth),
            }
            session.close()
            print(json.dumps(report), flush=True)
        plain.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
