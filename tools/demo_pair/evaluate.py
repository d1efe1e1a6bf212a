"""tau on held-out prompts, computed from the target's plain text: a lossless round accepts what equals that text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .drafter import DrafterModel
from .generate import continue_prompts
from .target import TargetModel


@dataclass(frozen=True)
class Run:
    """One text: its generated ids [g] and the drafts [g, block - 1] that follow each of them."""

    generated: np.ndarray
    drafts: np.ndarray

    def rounds(self, n: int) -> tuple[int, int]:
        """Rounds and accepted drafts with n drafts a round; the first token comes from the prompt's own decode.

        The last round is cut at the end of the text, so accepted + rounds is the number of ids after the first.
        """
        place, rounds, accepted = 0, 0, 0
        last = len(self.generated) - 1
        while place < last:
            room = min(n, last - place - 1)
            equal = self.drafts[place, :room] == self.generated[place + 1 : place + 1 + room]
            run = room if equal.all() else int(equal.argmin())
            rounds, accepted, place = rounds + 1, accepted + run, place + run + 1
        return rounds, accepted


@torch.no_grad()
def run_prompt(
    target: TargetModel, drafter: DrafterModel, ids: list[int], n_tokens: int, temperature: float, seed: int
) -> Run:
    """Continue a prompt by the target alone, then draft after every generated token."""
    start = len(ids)
    text = continue_prompts(
        target,
        torch.tensor([ids]),
        start + n_tokens,
        torch.tensor([temperature]),
        drafter.config.captures,
        seed,
    )
    end = int(text.valid[0])
    anchors = torch.arange(start, end)[None]
    x = drafter.block_input(text.tokens[:, start:end], target.weights["token_embd.weight"], drafter.config.block_size)
    y = drafter.draft(x, anchors, drafter.context(text.features))
    drafts = (y @ target.weights["output.weight"].T).argmax(-1)[0]
    return Run(text.tokens[0, start:end].numpy(), drafts.numpy())


def repeated_ngrams(runs: list[Run], size: int = 8) -> float:
    """Share of the generated n-grams that occurred before in the same text."""
    total = distinct = 0
    for run in runs:
        grams = [tuple(run.generated[i : i + size].tolist()) for i in range(len(run.generated) - size + 1)]
        total, distinct = total + len(grams), distinct + len(set(grams))
    return 1 - distinct / max(total, 1)


def tau_with_error(counts: list[tuple[int, int]]) -> tuple[float, float]:
    """Pooled tau = 1 + accepted / rounds, and its standard error over prompts (ratio estimator)."""
    rounds = np.array([r for r, _ in counts], float)
    tokens = np.array([r + a for r, a in counts], float)
    tau = tokens.sum() / rounds.sum()
    spread = ((tokens - tau * rounds) ** 2).sum() * len(counts) / max(len(counts) - 1, 1)
    return float(tau), float(np.sqrt(spread) / rounds.sum())


def evaluate_pair(
    target: TargetModel, drafter: DrafterModel, prompts: list[dict[str, Any]], n_tokens: int, seed: int
) -> dict[str, Any]:
    """tau at n = 15, 7, 4 on greedy text and at n = 15 on text at T = 0.8; prompts carry "ids" and "form"."""
    greedy = [run_prompt(target, drafter, p["ids"], n_tokens, 0.0, seed) for p in prompts]
    warm = [run_prompt(target, drafter, p["ids"], n_tokens, 0.8, seed + i) for i, p in enumerate(prompts)]
    report: dict[str, Any] = {"n_prompts": len(prompts), "n_tokens": n_tokens}
    for label, runs, depths in (("greedy", greedy, (15, 7, 4)), ("T=0.8", warm, (15,))):
        for n in depths:
            counts = [run.rounds(n) for run in runs]
            tau, error = tau_with_error(counts)
            report[f"{label} n={n}"] = {"tau": tau, "standard_error": error}
            for form in sorted({p["form"] for p in prompts}):
                part = [c for c, p in zip(counts, prompts, strict=True) if p["form"] == form]
                report[f"{label} n={n}"][f"tau_{form}"] = tau_with_error(part)[0]
        report[f"{label} repeated 8-grams"] = repeated_ngrams(runs)
    report["prompts"] = [
        {
            "file": p["file"],
            "form": p["form"],
            "prompt_tokens": len(p["ids"]),
            "generated": len(run.generated),
            "rounds_accepted": {str(n): run.rounds(n) for n in (15, 7, 4)},
            "ids": run.generated.tolist(),
        }
        for p, run in zip(prompts, greedy, strict=True)
    ]
    return report
