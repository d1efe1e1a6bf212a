"""The target's own continuations: the drafter's training data, and the texts on which tau is measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .target import KeyValueCache, TargetModel
from .target_gguf import EOS_ID, EOT_ID
from .train import Log, Sequences


@dataclass(frozen=True)
class Continuation:
    """A batch of equally long texts: ids and greedy choices [B, S], residuals [B, S, A, n_embd], lengths [B]."""

    tokens: Tensor
    labels: Tensor
    features: Tensor
    valid: Tensor


@torch.no_grad()
def continue_prompts(
    model: TargetModel, prompts: Tensor, length: int, temperature: Tensor, captures: tuple[int, ...], seed: int
) -> Continuation:
    """Extend prompts [B, L] to `length` tokens in float32; temperature [B] (0: greedy) holds for every step.

    labels[:, t] is the target's greedy choice for place t; valid is the length up to and with the first end token.
    The last place is never evaluated: its residuals stay zero.
    """
    batch, start = prompts.shape
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    tokens[:, :start] = prompts
    labels = torch.zeros_like(tokens)
    features = torch.zeros(batch, length, len(captures), model.config.n_embd, dtype=torch.float32)
    cache = KeyValueCache(model.config, batch, length)
    divisor = temperature.clamp_min(1e-4)[:, None]
    begin, end = 0, start
    while True:
        logits, residuals = model.extend(tokens[:, begin:end], cache, captures)
        features[:, begin:end] = residuals
        labels[:, begin + 1 : end + 1] = logits.argmax(-1)[:, : length - begin - 1]
        last = logits[:, -1]
        noise = torch.rand(last.shape, generator=generator).clamp_min(1e-20).log().neg().log().neg()
        sampled = (last / divisor + noise).argmax(-1)
        tokens[:, end] = torch.where(temperature > 0, sampled, labels[:, end])
        begin, end = end, end + 1
        if end == length:
            break
    ended = ((tokens == EOS_ID) | (tokens == EOT_ID)) & (torch.arange(length) >= start)
    valid = torch.where(ended.any(1), ended.int().argmax(1) + 1, length)
    return Continuation(tokens, labels, features, valid)


def generate_sequences(
    model: TargetModel,
    prompts: dict[int, np.ndarray],
    out: Sequences,
    captures: tuple[int, ...],
    seed: int,
    log: Log,
    batch: int = 96,
) -> None:
    """Fill `out` with one continuation a prompt: 75 % greedy, 20 % at T = 0.7, 5 % at T = 1. Batches are shared out."""
    rank, world = dist.get_rank(), dist.get_world_size()
    length = out.tokens.shape[1]
    jobs = []
    offset = 0
    for _, rows in sorted(prompts.items()):
        jobs += [(offset + i, rows[i : i + batch]) for i in range(0, len(rows), batch)]
        offset += len(rows)
    for number, (place, rows) in enumerate(jobs):
        if number % world != rank:
            continue
        draw = np.random.default_rng([seed, 11, number]).random(len(rows))
        temperature = torch.from_numpy(np.select([draw < 0.75, draw < 0.95], [0.0, 0.7], 1.0)).float()
        made = continue_prompts(model, torch.from_numpy(rows), length, temperature, captures, seed * 100003 + number)
        part = slice(place, place + len(rows))
        out.features[part] = made.features.bfloat16().view(torch.int16).numpy()
        out.tokens[part] = made.tokens.numpy()
        out.labels[part] = made.labels.numpy()
        out.valid[part] = made.valid.numpy()
        out.prompt[part] = rows.shape[1]
        log(f"generated batch {number + 1} of {len(jobs)}")
    dist.barrier()
