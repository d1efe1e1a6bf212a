"""Training of a segment probe: where units and sub-units of text begin, read off frozen taps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from laguna_gguf.pflash.probe import ProbeOutput, SegmentProbe
from scoring.features import ExampleTaps
from scoring.recall import MAX_SEGMENT, MIN_SEGMENT, f1

Say = Callable[[str], None]

NORM_EPS = 1e-5


@dataclass(frozen=True)
class ProbeSettings:
    """hidden: width of the hidden layer; taps: tokens of the convolution, odd; batch in tokens."""

    epochs: int = 6
    hidden: int = 256
    taps: int = 5
    batch: int = 1024
    learning_rate: float = 2e-3
    positive_weight: float = 2.0
    seed: int = 1


class ProbeModel(torch.nn.Module):
    """As `laguna_gguf.pflash.probe.SegmentProbe`, both outputs, with GELU in its tanh form."""

    def __init__(self, n_embd: int, settings: ProbeSettings) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        self.taps = settings.taps
        self.norm = torch.nn.LayerNorm(n_embd, eps=NORM_EPS)
        self.fc1 = torch.nn.Linear(n_embd, settings.hidden)
        self.fc2 = torch.nn.Linear(settings.hidden, 2)
        self.conv = torch.nn.Parameter(torch.zeros(2, 1, settings.taps))
        self.conv_bias = torch.nn.Parameter(torch.full((2,), -3.0))

    def forward(self, taps: Tensor) -> Tensor:
        """Logits [n, 2] (unit, sub-unit) of consecutive tokens' taps [n, n_embd]."""
        raw = self.fc2(functional.gelu(self.fc1(self.norm(taps.float())), approximate="tanh")).T
        around = functional.conv1d(raw[None], self.conv, padding=self.taps // 2, groups=2)[0]
        return (raw + around + self.conv_bias[:, None]).T

    def probe(self, threshold: float) -> SegmentProbe:
        """The weights as the package knows them."""

        def array(tensor: Tensor) -> NDArray[np.float32]:
            return tensor.detach().numpy().astype(np.float32).copy()

        outputs = [
            ProbeOutput(
                array(self.fc2.weight[i]),
                float(self.fc2.bias[i].detach()),
                array(self.conv[i, 0]),
                float(self.conv_bias[i].detach()),
            )
            for i in range(2)
        ]
        return SegmentProbe(
            threshold,
            NORM_EPS,
            MIN_SEGMENT,
            MAX_SEGMENT,
            "tanh",
            array(self.norm.weight),
            array(self.norm.bias),
            array(self.fc1.weight),
            array(self.fc1.bias),
            outputs[0],
            outputs[1],
        )


def _targets(example: ExampleTaps) -> Tensor:
    targets = torch.zeros(len(example.taps), 2)
    targets[torch.from_numpy(example.units).long(), 0] = 1.0
    targets[torch.from_numpy(example.subunits).long(), 1] = 1.0
    return targets


def train_probe(
    n_embd: int,
    train: Sequence[ExampleTaps],
    tune: Sequence[ExampleTaps],
    settings: ProbeSettings,
    say: Say,
) -> SegmentProbe:
    """A trained probe whose threshold gives the best F1 of unit starts on `tune`."""
    model = ProbeModel(n_embd, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    pieces = [
        (example.taps[begin : begin + settings.batch], _targets(example)[begin : begin + settings.batch])
        for example in train
        for begin in range(0, len(example.taps), settings.batch)
    ]
    total = settings.epochs * len(pieces)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / 20) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / total)) / 2)
    )
    weight = torch.full((2,), settings.positive_weight)
    began = time.monotonic()
    for epoch in range(settings.epochs):
        losses = []
        for index in torch.randperm(len(pieces), generator=generator).tolist():
            taps, targets = pieces[index]
            logits = model(torch.from_numpy(taps))
            loss = functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        say(f"probe epoch {epoch + 1}: loss {np.mean(losses):.4f}, {time.monotonic() - began:.0f} s")
    threshold = best_threshold(model, tune)
    say(f"probe threshold {threshold:.2f}")
    return model.probe(threshold)


def _scores(model: ProbeModel, example: ExampleTaps) -> NDArray[np.float32]:
    with torch.no_grad():
        return torch.sigmoid(model(torch.from_numpy(example.taps))).numpy()


def best_threshold(model: ProbeModel, examples: Sequence[ExampleTaps]) -> float:
    """The threshold in 0.1..0.9 with the best F1 of unit starts."""
    scores, wanted, base = [], [], 0
    for example in examples:
        scores.append(_scores(model, example)[:, 0])
        wanted.append(base + example.units)
        base += len(example.taps)
    joined, true = np.concatenate(scores), np.concatenate(wanted)
    return max(
        np.round(np.arange(0.1, 0.91, 0.05), 2).tolist(), key=lambda t: f1(np.flatnonzero(joined > t), true)["f1"]
    )


def raw_values(probe: SegmentProbe, taps: NDArray) -> NDArray[np.float32]:
    """What the native scorer computes of taps [n, n_embd]: raw values [n, 2]."""
    x = torch.from_numpy(np.asarray(taps, dtype=np.float32))
    weight, bias = torch.from_numpy(probe.norm_weight), torch.from_numpy(probe.norm_bias)
    x = functional.layer_norm(x, (x.shape[1],), weight, bias, probe.norm_eps)
    x = x @ torch.from_numpy(probe.fc1_weight).T + torch.from_numpy(probe.fc1_bias)
    fields = probe.native_fields()
    hidden = functional.gelu(x, approximate="tanh").numpy()
    return hidden @ fields["fc2_weight"].T + fields["fc2_bias"]


def probe_f1(probe: SegmentProbe, examples: Sequence[ExampleTaps]) -> dict[str, dict[str, float]]:
    """Boundary F1 at the probe's threshold, and the share of starts of functions and classes that are found."""
    found: dict[str, list[NDArray]] = {name: [] for name in ("unit", "unit true", "sub", "sub true", "definitions")}
    base = 0
    for example in examples:
        unit, subunit = probe.scores(raw_values(probe, example.taps))
        assert subunit is not None
        found["unit"].append(base + np.flatnonzero(unit > probe.threshold))
        found["unit true"].append(base + example.units)
        found["sub"].append(base + np.flatnonzero(subunit > 0.5))
        found["sub true"].append(base + example.subunits)
        found["definitions"].append(base + example.definitions)
        base += len(example.taps)
    joined = {name: np.concatenate(parts) if parts else np.zeros(0, int) for name, parts in found.items()}
    starts = joined["definitions"]
    return {
        "unit": f1(joined["unit"], joined["unit true"]),
        "subunit": f1(joined["sub"], joined["sub true"]),
        "definitions": {"recall": float(np.isin(starts, joined["unit"]).mean()) if len(starts) else math.nan},
    }
