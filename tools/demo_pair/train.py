"""Training loops of the target and of the drafter; each runs in every process of the group."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .data import Document, windows
from .drafter import DrafterConfig, DrafterModel
from .optim import Clock, Optimiser, Plan, in_turn, save_atomically
from .target import TargetModel
from .target_gguf import TargetConfig

CHECKPOINT_SECONDS = 180.0
Log = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Sizes of a run that are the same in every stage."""

    work: Path
    seed: int = 1
    batch: int = 4  # sequences a process and step
    length: int = 512  # tokens of a target training row
    anchors: int = 32  # blocks a drafter training sequence
    compile: bool = True
    target_lr: float = 0.02
    drafter_lr: float = 0.02
    soft: float = 0.5


def _continue(path: Path, model: torch.nn.Module, optimiser: Optimiser, plan: Plan) -> int:
    """Load a checkpoint if there is one; returns the next step."""
    if not path.exists():
        return 0
    stored = torch.load(path, weights_only=True)
    model.load_state_dict(stored["model"])
    optimiser.load(stored["optimiser"])
    plan.steps, plan.seconds = stored["plan"]["steps"], stored["plan"]["seconds"]
    return stored["step"]


def train_target(
    config: TargetConfig, docs: list[Document], held: list[Document], plan: Plan, s: Settings, log: Log
) -> None:
    """Train the target and leave `target.pt` and `target.json` in the work directory."""
    model = TargetModel(config, s.seed)
    counts = config.n_layer * config.n_expert
    optimiser = Optimiser(model.weights, s.target_lr, s.target_lr * 0.15, counts + 1)
    checkpoint = s.work / "target-checkpoint.pt"
    step = _continue(checkpoint, model, optimiser, plan)
    loss_of = torch.compile(model.loss) if s.compile else model.loss
    rank, world = dist.get_rank(), dist.get_world_size()

    def gradient(rows: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss, chosen = loss_of(rows)
        loss.backward()
        optimiser.extra[:counts] += chosen.flatten()
        optimiser.extra[counts] += loss.detach()

    in_turn(lambda: gradient(torch.zeros(s.batch, s.length + 1, dtype=torch.int64)))
    optimiser.flat.zero_()
    log(f"target: {sum(p.numel() for p in model.parameters())} parameters, starting at step {step}")
    epoch, rows, clock, since_save, mean = -1, [], Clock(), 0.0, None
    per_epoch = len(windows(docs, s.length, np.random.default_rng([s.seed, 0]))) // (s.batch * world)
    while plan.steps is None or step < plan.steps:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            rows = windows(docs, s.length, np.random.default_rng([s.seed, epoch]))
        first = ((step % per_epoch) * world + rank) * s.batch
        gradient(torch.from_numpy(np.stack(rows[first : first + s.batch])))
        scale = plan.scale(step)
        reduced = optimiser.step(scale)
        _balance(model, reduced[:counts].view(config.n_layer, config.n_expert), max(scale, 0.05))
        loss = float(reduced[counts])
        mean = loss if mean is None else 0.97 * mean + 0.03 * loss
        step += 1
        lap = clock.lap()
        plan.seconds += lap
        since_save += lap
        plan.settle(step)
        if step % 20 == 0:
            speed = s.batch * world * s.length / lap
            log(f"target step {step}/{plan.steps} loss {mean:.4f} {speed:.0f} tok/s {plan.seconds:.0f} s")
        if since_save > CHECKPOINT_SECONDS and rank == 0:
            since_save = 0.0
            state = {"model": model.state_dict(), "optimiser": optimiser.state(), "plan": plan.state(), "step": step}
            save_atomically(state, checkpoint)
    if rank == 0:
        for name, parameter in model.weights.items():  # what the file will hold: matrices in F16
            if parameter.dim() > 1 and not name.endswith("ffn_gate_inp.weight"):
                parameter.data = parameter.data.half().float()
        loss = held_out_loss(model, held, s.length)
        log(f"target: held-out loss {loss:.4f} nats a token after {step} steps, {plan.seconds:.0f} s")
        report = {"steps": step, "seconds": plan.seconds, "train_loss": mean, "held_out_loss": loss}
        report |= {"tokens": step * s.batch * world * s.length, "epochs": step / per_epoch}
        (s.work / "target.json").write_text(json.dumps(report, indent=1))
        save_atomically(model.state_dict(), s.work / "target.pt")
    dist.barrier()


@torch.no_grad()
def _balance(model: TargetModel, counts: Tensor, scale: float) -> None:
    """Move each expert's selection bias towards equal use (no auxiliary loss)."""
    for layer in range(model.config.n_layer):
        if not model.config.is_dense(layer):
            error = (counts[layer].mean() - counts[layer]).sign()
            model.weights[f"blk.{layer}.exp_probs_b.bias"].add_(error, alpha=0.002 * scale)


@torch.no_grad()
def held_out_loss(model: TargetModel, held: list[Document], length: int, limit: int = 64) -> float:
    """Mean cross-entropy in nats a token of at most `limit` held-out windows, in float32."""
    rows = windows(held, length, np.random.default_rng(0))[:limit]
    losses = [model.loss(torch.from_numpy(np.stack(rows[i : i + 4])))[0] for i in range(0, len(rows), 4)]
    return float(torch.stack(losses).mean())


@dataclass(frozen=True)
class Sequences:
    """Generated sequences of a fixed length, memory-mapped."""

    features: np.ndarray  # [n, S, A, n_embd] int16, the bits of bfloat16
    tokens: np.ndarray  # [n, S] int16
    labels: np.ndarray  # [n, S] int16: the target's greedy choice for each place
    prompt: np.ndarray  # [n] int16: length of the prompt
    valid: np.ndarray  # [n] int16: usable length (up to the end token)

    def batch(self, index: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """features bfloat16 [N, S, A, n_embd], tokens, labels [N, S] and valid [N] as int64."""
        features = torch.from_numpy(self.features[index]).view(torch.bfloat16)
        ids = (torch.from_numpy(a[index].astype(np.int64)) for a in (self.tokens, self.labels, self.valid))
        return (features, *ids)


def sequence_arrays(folder: Path, count: int, length: int, config: DrafterConfig, mode: str) -> Sequences:
    """Open (mode "r" or "r+") or create (mode "w+") the arrays of generated sequences."""

    def array(name: str, *shape: int) -> np.memmap:
        return np.memmap(folder / f"sequences-{name}.bin", np.int16, mode, shape=(count, *shape))

    features = array("features", length, len(config.captures), config.n_embd)
    return Sequences(features, array("tokens", length), array("labels", length), array("prompt"), array("valid"))


def train_drafter(
    config: DrafterConfig, target: TargetModel, data: Sequences, n_train: int, plan: Plan, s: Settings, log: Log
) -> None:
    """Train on the first `n_train` sequences (the rest measure) and leave `drafter.pt` and `drafter.json`."""
    model = DrafterModel(config, s.seed)
    optimiser = Optimiser(model.weights, s.drafter_lr, s.drafter_lr * 0.15, 3)
    checkpoint = s.work / "drafter-checkpoint.pt"
    step = _continue(checkpoint, model, optimiser, plan)
    loss_of = torch.compile(model.loss, dynamic=False) if s.compile else model.loss
    rank, world = dist.get_rank(), dist.get_world_size()
    w = target.weights
    frozen = tuple(w[n].detach() for n in ("token_embd.weight", "output_norm.weight", "output.weight"))

    def evaluate(index: np.ndarray, rng: np.random.Generator, fraction: float) -> tuple[Tensor, Tensor]:
        """Loss and statistics; the first half of the run uses half blocks, the last third counts acceptance."""
        features, tokens, labels, valid = data.batch(index)
        low, high = data.prompt[index].astype(np.int64), valid.numpy() - 1
        places = low[:, None] + (rng.random((len(index), s.anchors)) * (high - low)[:, None]).astype(np.int64)
        acceptance = torch.tensor(0.5 if fraction > 2 / 3 else 0.0)
        rows = config.block_size if fraction > 0.5 else config.block_size // 2
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(features, tokens, labels, valid, torch.from_numpy(places), frozen, s.soft, acceptance, rows)

    def gradient(index: np.ndarray, rng: np.random.Generator, fraction: float) -> None:
        loss, stats = evaluate(index, rng, fraction)
        loss.backward()
        optimiser.extra[:2] += stats
        optimiser.extra[2] += loss.detach()

    def held_out() -> tuple[float, float]:
        index, rng = np.arange(n_train, len(data.prompt)), np.random.default_rng(7)
        results = []
        for i in range(0, len(index) - s.batch + 1, s.batch):  # with gradients enabled: the same compiled graph
            loss, stats = evaluate(index[i : i + s.batch], rng, 0.6)
            results.append((loss.item(), 1 + stats[1].item()))
        loss, block_tau = np.mean(results, 0).tolist()
        return loss, block_tau

    in_turn(lambda: [gradient(np.arange(s.batch), np.random.default_rng(0), part) for part in (0.0, 1.0)])
    optimiser.flat.zero_()
    log(f"drafter: {sum(p.numel() for p in model.parameters())} parameters, {n_train} sequences, first step {step}")
    per_epoch = n_train // (s.batch * world)
    clock, since_save, mean = Clock(), 0.0, None
    while plan.steps is None or step < plan.steps:
        order = np.random.default_rng([s.seed, 3, step // per_epoch]).permutation(n_train)
        first = ((step % per_epoch) * world + rank) * s.batch
        gradient(
            np.sort(order[first : first + s.batch]), np.random.default_rng([s.seed, 5, step, rank]), plan.fraction(step)
        )
        reduced = optimiser.step(plan.scale(step))
        mean = reduced if mean is None else 0.97 * mean + 0.03 * reduced
        step += 1
        lap = clock.lap()
        plan.seconds += lap
        since_save += lap
        plan.settle(step)
        if step % 50 == 0:
            first_hit, accepted, loss = mean.tolist()
            speed = s.batch * world * s.anchors / lap
            text = f"loss {loss:.4f} first {first_hit:.3f} block tau {1 + accepted:.3f} {speed:.0f} blocks/s"
            log(f"drafter step {step}/{plan.steps} {text} {plan.seconds:.0f} s")
        if step % 500 == 0 and rank == 0:
            unseen_loss, unseen_tau = held_out()
            log(f"drafter: unseen prompts: loss {unseen_loss:.4f}, block tau {unseen_tau:.3f}")
        if since_save > CHECKPOINT_SECONDS and rank == 0:
            since_save = 0.0
            state = {"model": model.state_dict(), "optimiser": optimiser.state(), "plan": plan.state(), "step": step}
            save_atomically(state, checkpoint)
    if rank == 0:
        loss, block_tau = held_out()
        for parameter in model.parameters():  # what the checkpoint will hold
            parameter.data = parameter.data.bfloat16().float()
        report = {"steps": step, "seconds": plan.seconds, "train_loss": mean[2].item(), "epochs": step / per_epoch}
        report |= {"train_block_tau": 1 + mean[1].item(), "unseen_loss": loss, "unseen_block_tau": block_tau}
        (s.work / "drafter.json").write_text(json.dumps(report, indent=1))
        save_atomically(model.state_dict(), s.work / "drafter.pt")
    dist.barrier()
