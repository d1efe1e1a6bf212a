"""Evidence that a head keeps of examples whose taps were read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from scoring.features import ExampleTaps
from scoring.head import HeadModel, question_masses
from scoring.recall import KEEP, is_kept, keep_context, unit_segments


def head_recall(model: HeadModel, examples: Sequence[ExampleTaps], tail: int = 8) -> dict[str, dict[str, float]]:
    """Evidence kept at each ratio, by kind of question: {"all": {"0.05": share, ...}, kind: ...}."""
    hits: dict[str, dict[float, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for example in examples:
        if not example.questions:
            continue
        with torch.no_grad():
            keys = model.features(torch.from_numpy(example.taps))
            masses = question_masses(model, keys, example.questions, tail)[0].double().numpy()
        spans = unit_segments(len(example.taps), example.units)
        is_chunk = len(example.units) < 2
        for question, mass in zip(example.questions, masses, strict=True):
            for ratio in KEEP:
                budget = max(1, int(ratio * len(mass)))
                how: Literal["density", "sum"] = "sum" if is_chunk else "density"
                kept = keep_context(mass, spans, budget, how, skip_oversized=not is_chunk)
                found = [is_kept(span, kept) for span in question.evidence]
                for name in ("all", question.kind):
                    hits[name][ratio] += found
    return {
        name: {f"{ratio:g}": round(float(np.mean(found)), 3) for ratio, found in by_ratio.items()} | {"n": len(found)}
        for name, by_ratio in sorted(hits.items())
        for found in [next(iter(by_ratio.values()))]
    }
