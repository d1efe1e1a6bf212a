"""Two-process training: one flat gradient, Muon for matrices, AdamW for the rest, a schedule planned by the clock."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

DECAY_START = 0.4  # the learning rate is constant up to this share of the steps, then falls linearly to zero

VOCABULARY_MATRICES = ("token_embd.weight", "output.weight")


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration of Muon on [..., m, n]: near-orthogonal matrices of the same row and column spaces."""
    x = update.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x if wide else x.transpose(-1, -2)).float()


class Optimiser:
    """Muon on the 2-D and 3-D weights of the blocks, AdamW on everything else.

    Gradients are views of one flat buffer, averaged over the processes with a single all-reduce; `extra` further
    floats of the caller ride along. Each process orthogonalises its share of the matrices, and a second all-reduce
    collects the results.
    """

    def __init__(self, weights: dict[str, nn.Parameter], lr: float, adam_lr: float, extra: int = 0) -> None:
        trained = {name: p for name, p in weights.items() if p.requires_grad}
        self.lr, self.adam_lr, self.decay = lr, adam_lr, 0.05
        self.flat = torch.zeros(sum(p.numel() for p in trained.values()) + extra)
        self.extra = self.flat[self.flat.numel() - extra :]
        self.muon: list[nn.Parameter] = []
        self.adam: list[nn.Parameter] = []
        offset = 0
        for name, parameter in trained.items():
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            small = parameter.dim() == 1 or min(parameter.shape[-2:]) < 16 or name in VOCABULARY_MATRICES
            (self.adam if small else self.muon).append(parameter)
        self.momentum = [torch.zeros_like(p) for p in self.muon]
        self.first = [torch.zeros_like(p) for p in self.adam]
        self.second = [torch.zeros_like(p) for p in self.adam]
        self.updates = torch.zeros(sum(p.numel() for p in self.muon))
        self.count = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"momentum": self.momentum, "first": self.first, "second": self.second, "count": self.count}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for key, mine in (("momentum", self.momentum), ("first", self.first), ("second", self.second)):
            for tensor, value in zip(mine, state[key], strict=True):
                tensor.copy_(value)
        self.count = state["count"]

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """Average over the processes, update with learning rates times `scale`; returns the averaged extras."""
        world, rank = dist.get_world_size(), dist.get_rank()
        dist.all_reduce(self.flat)
        self.flat /= world
        self.count += 1
        self.updates.zero_()
        warm = min(0.95, 0.85 + 0.1 * self.count / 300)
        groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        offset = 0
        for index, (parameter, momentum) in enumerate(zip(self.muon, self.momentum, strict=True)):
            momentum.lerp_(parameter.grad, 1 - warm)
            if index % world == rank:
                place = self.updates[offset : offset + parameter.numel()].view_as(parameter)
                groups.setdefault(tuple(parameter.shape), []).append((parameter.grad.lerp(momentum, warm), place))
            offset += parameter.numel()
        for members in groups.values():
            for (_, place), result in zip(members, orthogonalise(torch.stack([u for u, _ in members])), strict=True):
                place.copy_(result)
        dist.all_reduce(self.updates)
        offset = 0
        for parameter in self.muon:
            update = self.updates[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            shape = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
            parameter.mul_(1 - self.lr * scale * self.decay)
            parameter.add_(update, alpha=-self.lr * scale * shape)
        b1, b2 = 0.9, 0.95
        for parameter, first, second in zip(self.adam, self.first, self.second, strict=True):
            first.lerp_(parameter.grad, 1 - b1)
            second.lerp_(parameter.grad.square(), 1 - b2)
            size = first / (1 - b1**self.count) / ((second / (1 - b2**self.count)).sqrt() + 1e-10)
            parameter.add_(size, alpha=-self.adam_lr * scale)
        extra = self.extra.clone()
        self.flat.zero_()
        return extra


@dataclass
class Plan:
    """A number of steps: given, or derived from a budget in minutes at the point where the decay begins.

    Up to that point the learning rate does not depend on the total, so a run with the resulting `steps` repeats it.
    """

    minutes: float
    steps: int | None = None
    seconds: float = 0.0  # spent so far, over all resumed parts

    def scale(self, step: int) -> float:
        """Factor of the learning rate at a step."""
        warm = min(1.0, (step + 1) / 20)
        if self.steps is None:
            return warm
        return warm * min(1.0, (self.steps - step) / (self.steps * (1 - DECAY_START)))

    def fraction(self, step: int) -> float:
        """Share of the run that is over; 0 before the total is known."""
        return 0.0 if self.steps is None else step / self.steps

    def settle(self, step: int) -> None:
        """Fix the total once DECAY_START of the budget is spent; the same in every process."""
        if self.steps is None and step % 10 == 0 and step:
            spent = torch.tensor([self.seconds])
            dist.broadcast(spent, 0)
            if float(spent) >= self.minutes * 60 * DECAY_START:
                self.steps = round(step / DECAY_START)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return asdict(self)


def start_process(rank: int, world: int, rendezvous: Path) -> None:
    """Join the group of one-thread processes."""
    os.nice(5)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)


def in_turn(action: Any) -> Any:
    """Run `action` in one process after the other, so that later ones find the compile cache filled."""
    result = None
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            result = action()
        dist.barrier()
    return result


def save_atomically(value: Any, path: Path) -> None:
    """torch.save through a temporary file."""
    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    temporary.replace(path)


class Clock:
    """Seconds since the last call."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.monotonic()
        elapsed, self.last = now - self.last, now
        return elapsed
