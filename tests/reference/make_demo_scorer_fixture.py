"""Masses of the shipped demo scorer: writes tests/data/demo_scorer.json and demo_scorer.npz.

    python tests/reference/make_demo_scorer_fixture.py

A document of about 4,000 tokens from held-out files with notes in it, questions about it, where their evidence
stands, and for the first question the masses and probe scores that these files gave when they were made.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from demo_scorer_tools import DATA, ask, open_demo  # noqa: E402
from scoring.examples import make_example, name_words  # noqa: E402
from scoring.sources import split_sources, standard_library  # noqa: E402

SEED = 1
NUMBERS = {"note": 4, "function": 4, "partial": 2, "raise": 2, "phrase": 2, "three": 2}


def main() -> None:
    split = split_sources(standard_library(), SEED)
    words = name_words(split.train + split.test, True)
    example = make_example(split.test, words, 14000, random.Random("fixture"), NUMBERS, 8)
    questions = [{"kind": q.kind, "text": q.text, "evidence": q.evidence} for q in example.questions]
    stored = {"context": example.context, "questions": questions}
    (DATA / "demo_scorer.json").write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    with open_demo() as pflash:
        asked = ask(pflash, stored, questions[0])
        scores = pflash.score(asked.ids, query=asked.query, windows=[asked.tail])
    assert scores.probe is not None and scores.subunit is not None
    np.savez_compressed(
        DATA / "demo_scorer.npz",
        ids=asked.ids,
        mass=scores.mass.astype(np.float32),
        probe=scores.probe,
        subunit=scores.subunit,
    )


if __name__ == "__main__":
    main()
