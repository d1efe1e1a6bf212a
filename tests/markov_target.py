"""A target whose next token depends on the last one only, with known probabilities: draws can be counted and tested."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from demo_pair.target_gguf import TargetConfig, random_target
from fixtures import write_drafter_dir
from laguna_gguf import SpecSession
from tiny_models import TINY_TARGET, write_tiny_target

STATES = list(range(25 + 97, 25 + 97 + 12))
"""Ids of the letters a..l, the only tokens with a chance."""

CONFIG: TargetConfig = replace(TINY_TARGET, n_layer=2, n_head_swa=2, n_head_full=2)


def write_markov_pair(folder: Path, *, seed: int = 0) -> tuple[Path, Path, NDArray[np.float64]]:
    """Target, a random drafter, and the target's logits [12, 12] of the next state by the last one.

    Every block adds nothing to the residual stream, so that the head sees the last token's embedding alone.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.0, (12, 12))
    width = CONFIG.n_embd
    tensors = random_target(CONFIG, seed)
    silent = {
        name: np.zeros_like(tensor) for name, tensor in tensors.items() if "attn_output" in name or "ffn_down" in name
    }
    # Token s embeds as sqrt(width) * e_s, which a norm leaves as it is; any other token as the last unit vector.
    embedding = np.zeros((CONFIG.n_vocab, width), np.float32)
    embedding[:, width - 1] = 1.0
    head = np.zeros((CONFIG.n_vocab, width), np.float32)
    head[:, :12] = -60.0 / np.sqrt(width)
    for i, token in enumerate(STATES):
        embedding[token] = 0.0
        embedding[token, i] = 1.0
        head[token, :12] = logits[:, i] / np.sqrt(width)
    replaced = silent | {
        "token_embd.weight": embedding * np.float32(np.sqrt(width)),
        "output.weight": head,
        "output_norm.weight": np.ones(width, np.float32),
    }
    target = write_tiny_target(folder / "markov-F32.gguf", CONFIG, seed=seed, replaced=replaced)
    write_drafter_dir(folder / "drafter", seed=3, num_hidden_layers=2, num_target_layers=2, target_layer_ids=[0, 1])
    return target, folder / "drafter", logits


@dataclass(frozen=True)
class Sampler:
    """Settings of Llama.generate, and the distribution they stand for."""

    temp: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def settings(self) -> dict[str, Any]:
        return {"temp": self.temp, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    def probabilities(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows of transition probabilities, in llama.cpp's order: top-k, top-p, min-p, then temperature.

        top-p keeps the smallest set of most likely tokens that reaches p; min-p those of at least p times the largest.
        """
        rows = []
        for row in logits:
            order = np.argsort(-row)
            kept = np.zeros(len(row), bool)
            kept[order[: self.top_k or None]] = True
            p = np.where(kept, np.exp(row - row.max()), 0.0)
            p /= p.sum()
            reached = np.cumsum(p[order])
            kept &= np.isin(np.arange(len(row)), order[: int(np.searchsorted(reached, self.top_p)) + 1])
            kept &= p >= self.min_p * p.max()
            q = np.where(kept, np.exp((row - row.max()) / self.temp), 0.0)
            rows.append(q / q.sum())
        return np.array(rows)


class GuessingDrafts:
    """Replaces a session's drafts by draws from given transition probabilities: right now and then, anywhere."""

    def __init__(self, session: SpecSession, probabilities: NDArray[np.float64], seed: int) -> None:
        self.session = session
        self.cumulative = probabilities.cumsum(axis=1)
        self.rng = np.random.default_rng(seed)
        session.draft = self  # type: ignore[method-assign]

    def __call__(self, anchor: int, wanted: int | None) -> list[int]:
        n = len(SpecSession.draft(self.session, anchor, wanted))
        state, draft = anchor - STATES[0], []
        for draw in self.rng.random(n):
            state = min(int(np.searchsorted(self.cumulative[state], draw)), 11)
            draft.append(STATES[state])
        return draft


def transitions(tokens: list[int]) -> NDArray[np.int64]:
    """Counts [12, 12] of pairs of neighbours."""
    states = np.array(tokens) - STATES[0]
    counts = np.zeros((12, 12), np.int64)
    np.add.at(counts, (states[:-1], states[1:]), 1)
    return counts


def sharpened(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Guesses that are likelier right than draws would be, and unlike them."""
    return probabilities**2 / (probabilities**2).sum(axis=1, keepdims=True)


def draws(llama: llama_cpp.Llama, sampler: Sampler, n: int, seed: int) -> NDArray[np.int64]:
    """Transition counts of n draws, in texts of 400 tokens with a seed each."""
    counts = np.zeros((12, 12), np.int64)
    for i in range(0, n, 400):
        llama.set_seed(seed + i)
        prompt = [STATES[i // 400 % 12]]
        tokens = list(islice(llama.generate(prompt, **sampler.settings()), min(400, n - i)))
        counts += transitions(prompt + tokens)
    assert counts.sum() == n
    return counts
