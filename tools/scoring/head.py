"""Training of a scoring head: query and key rows of block 15 on frozen taps.

Both start as the same random map of whitened taps, so that an untrained head already finds tokens that are like those
of the question; training learns which directions tell evidence.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laguna_gguf.pflash.drafter_file import DrafterFile, ScoringWeights
from scoring.features import ExampleTaps, QuestionTaps

Say = Callable[[str], None]

MEAN_WEIGHT = 4.0

LAST_WEIGHT = 0.3
"""Weight of the last token's own mass in the loss, so that it learns to ask alone as well."""


@dataclass(frozen=True)
class HeadSettings:
    """epochs over the contexts; `group` contexts share their keys in a step, so that each is a distractor of others."""

    epochs: int = 8
    group: int = 3
    learning_rate: float = 1e-3
    seed: int = 1
    tails: tuple[tuple[int, float], ...] = ((8, 0.6), (32, 0.4))
    """(tokens of the tail window, share of the steps)"""


class HeadModel(torch.nn.Module):
    """Rows that can be trained, seen through a whitening of the normalised taps that is folded into them at the end."""

    def __init__(self, drafter: DrafterFile, whitening: Tensor, seed: int) -> None:
        super().__init__()
        weights = drafter.scoring_weights()
        self.head_dim, self.groups = drafter.head_dim, drafter.n_head // drafter.n_head_kv
        self.eps = drafter.norm_eps
        self.register_buffer("whitening", whitening)
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm"):
            self.register_buffer(name, torch.from_numpy(getattr(weights, name).copy()))
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(drafter.n_head_kv, self.head_dim, drafter.n_embd, generator=generator)
        start /= math.sqrt(drafter.n_embd)
        self.key = torch.nn.Parameter(start.reshape(-1, drafter.n_embd).clone())
        self.query = torch.nn.Parameter(start.repeat_interleave(self.groups, 0).reshape(-1, drafter.n_embd).clone())

    def features(self, taps: Tensor) -> Tensor:
        """Whitened block-15 input of taps [n, n_embd]."""
        x = taps.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.attn_norm
        return x @ self.whitening.T

    def _project(self, features: Tensor, rows: Tensor, norm: Tensor) -> Tensor:
        values = (features @ rows.T).reshape(len(features), -1, self.head_dim)
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps) * norm

    def mass(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Attention [n_queries, n_keys] of query features to key features, mean over the heads."""
        q = self._project(queries, self.query, self.attn_q_norm).transpose(0, 1)
        k = self._project(keys, self.key, self.attn_k_norm).transpose(0, 1).repeat_interleave(self.groups, 0)
        return torch.softmax(q @ k.transpose(1, 2) / math.sqrt(self.head_dim), -1).mean(0)

    def rows(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(query, key) rows for taps that are not whitened, as a head file stores them."""
        with torch.no_grad():
            return tuple((rows @ self.whitening).numpy().astype(np.float32) for rows in (self.query, self.key))


def whitening(
    examples: Sequence[ExampleTaps], weights: ScoringWeights, eps: float, shrinkage: float = 0.05
) -> torch.Tensor:
    """Symmetric inverse root [n_embd, n_embd] of the second moment of normalised taps, shrunk towards a multiple of 1.

    The mean counts more than once, so that what all tokens share is nearly taken out.
    """
    taps = np.concatenate([example.taps[::4] for example in examples]).astype(np.float64)
    taps *= weights.attn_norm / np.sqrt((taps**2).mean(-1, keepdims=True) + eps)
    moment = taps.T @ taps / len(taps)
    size = len(moment)
    moment += MEAN_WEIGHT * np.outer(taps.mean(0), taps.mean(0))
    moment = (1 - shrinkage) * moment + shrinkage * np.trace(moment) / size * np.eye(size)
    values, vectors = np.linalg.eigh(moment)
    return torch.from_numpy(((vectors / np.sqrt(values)) @ vectors.T).astype(np.float32))


@dataclass(frozen=True)
class _Rows:
    """Query rows of several questions and how they are averaged."""

    features: Tensor
    last: Tensor
    """[n_questions]: row of each prompt's last token."""
    tail_mean: Tensor
    """[n_questions, n_rows]"""


def _rows(model: HeadModel, questions: Sequence[QuestionTaps], tail: int) -> _Rows:
    parts, last, spans = [], [], []
    n = 0
    for question in questions:
        rows = question.tail[-tail:]
        parts += [rows, question.last[None]]
        spans.append((n, n + len(rows)))
        n += len(rows) + 1
        last.append(n - 1)
    mean = torch.zeros(len(questions), n)
    for index, (begin, end) in enumerate(spans):
        mean[index, begin:end] = 1.0 / (end - begin)
    features = model.features(torch.from_numpy(np.concatenate(parts)))
    return _Rows(features, torch.tensor(last), mean)


def question_masses(
    model: HeadModel, keys: Tensor, questions: Sequence[QuestionTaps], tail: int
) -> tuple[Tensor, Tensor]:
    """([n_questions, n_keys] of both windows, the same of the last token alone)."""
    rows = _rows(model, questions, tail)
    mass = model.mass(rows.features, keys)
    last = mass[rows.last]
    return (last + rows.tail_mean @ mass) / 2, last


def _loss(model: HeadModel, group: Sequence[ExampleTaps], tail: int) -> Tensor:
    keys = model.features(torch.from_numpy(np.concatenate([example.taps for example in group])))
    starts = np.cumsum([0, *(len(example.taps) for example in group)])
    questions, owners, spans, weights = [], [], [], []
    for base, example in zip(starts, group, strict=False):
        for question in example.questions:
            owners += [len(questions)] * len(question.evidence)
            spans += [(base + begin, base + end) for begin, end in question.evidence]
            weights += [1.0 / len(question.evidence)] * len(question.evidence)
            questions.append(question)
    inside = torch.zeros(len(spans), len(keys))
    for index, (begin, end) in enumerate(spans):
        inside[index, begin:end] = 1.0
    both, last = question_masses(model, keys, questions, tail)
    on_both = (both[owners] * inside).sum(1)
    on_last = (last[owners] * inside).sum(1)
    loss = -torch.log(on_both + 1e-9) - LAST_WEIGHT * torch.log(on_last + 1e-9)
    return (loss * torch.tensor(weights)).sum() / len(questions)


def _groups(examples: Sequence[ExampleTaps], size: int, rng: random.Random) -> Iterator[list[ExampleTaps]]:
    order = rng.sample(range(len(examples)), len(examples))
    for begin in range(0, len(order), size):
        yield [examples[index] for index in order[begin : begin + size]]


def new_head(drafter: DrafterFile, train: Sequence[ExampleTaps], seed: int) -> HeadModel:
    """The head that training starts from: equal random query and key rows over whitened taps."""
    return HeadModel(drafter, whitening(train, drafter.scoring_weights(), drafter.norm_eps), seed)


def train_head(
    model: HeadModel,
    train: Sequence[ExampleTaps],
    tune: Sequence[ExampleTaps],
    settings: HeadSettings,
    say: Say,
) -> None:
    """Train a head in place. The loss on `tune` is only looked at."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng = random.Random(settings.seed)
    train = [example for example in train if example.questions]
    per_epoch = -(-len(train) // settings.group)
    total = settings.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / total)) / 2)
    )
    say(f"head before training: loss {held_out_loss(model, tune, settings):.3f} on held-out contexts")
    began = time.monotonic()
    for epoch in range(settings.epochs):
        losses = []
        for group in _groups(train, settings.group, rng):
            tail = rng.choices([size for size, _ in settings.tails], [share for _, share in settings.tails])[0]
            loss = _loss(model, group, tail)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        say(
            f"head epoch {epoch + 1}: loss {np.mean(losses):.3f}, held out {held_out_loss(model, tune, settings):.3f}, "
            f"{time.monotonic() - began:.0f} s"
        )


def held_out_loss(model: HeadModel, examples: Sequence[ExampleTaps], settings: HeadSettings) -> float:
    """Mean loss with the first tail; nan without questions."""
    with torch.no_grad():
        groups = [list(examples[i : i + settings.group]) for i in range(0, len(examples), settings.group)]
        losses = [
            _loss(model, group, settings.tails[0][0]).item() for group in groups if any(e.questions for e in group)
        ]
    return float(np.mean(losses)) if losses else math.nan
