"""Segment probes: where units of text start, read off the drafter's tap."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import ConfigError
from laguna_gguf.inspection.scoring import BASE_MODEL, FEATURE_TAP, PROBE
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.hashing import file_sha256
from laguna_gguf.pflash.scoring_file import read_f32, read_scoring_file, write_scoring_file

SCHEMA = "qwen3_5_0_8b_segment_probe_v1"

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ProbeOutput:
    """One boundary detector on the hidden layer that all share: fc2, then a convolution over positions."""

    fc2_weight: Floats
    """[n_hidden]"""
    fc2_bias: float
    conv_weight: Floats
    """[conv_taps], odd"""
    conv_bias: float

    def scores(self, raw: Floats) -> Floats:
        """Raw values [n] -> scores [n] in (0, 1): sigmoid(r_t + b + sum_k w_k r_(t + k - taps/2)), no neighbour = 0."""
        values = raw.astype(np.float64)
        taps = self.conv_weight.astype(np.float64)
        around = np.correlate(np.pad(values, len(taps) // 2), taps, mode="valid")
        with np.errstate(over="ignore"):
            return (1.0 / (1.0 + np.exp(-(values + self.conv_bias + around)))).astype(np.float32)


@dataclass(frozen=True)
class SegmentProbe:
    """A probe file's weights, in numpy order."""

    threshold: float
    norm_eps: float
    min_segment: int
    max_segment: int
    gelu: str
    """tanh or erf"""
    norm_weight: Floats
    norm_bias: Floats
    fc1_weight: Floats
    """[n_hidden, n_embd]"""
    fc1_bias: Floats
    unit: ProbeOutput
    subunit: ProbeOutput | None = None

    def native_fields(self) -> dict[str, Any]:
        """What the native scorer needs to compute raw values [n_tokens, 1 or 2]."""
        outputs = [self.unit] if self.subunit is None else [self.unit, self.subunit]
        return {
            "norm_weight": self.norm_weight,
            "norm_bias": self.norm_bias,
            "fc1_weight": self.fc1_weight,
            "fc1_bias": self.fc1_bias,
            "fc2_weight": np.stack([output.fc2_weight for output in outputs]),
            "fc2_bias": np.array([output.fc2_bias for output in outputs], dtype=np.float32),
            "norm_eps": self.norm_eps,
            "gelu_erf": self.gelu == "erf",
        }

    def scores(self, raw: Floats) -> tuple[Floats, Floats | None]:
        """(unit, sub-unit) scores [n] of raw values [n, 1 or 2]."""
        return self.unit.scores(raw[:, 0]), None if self.subunit is None else self.subunit.scores(raw[:, 1])


def load_probe(path: str | os.PathLike[str], drafter: DrafterFile) -> SegmentProbe:
    """A segment probe that belongs to this drafter file.

    CheckpointError: not a sound probe file. TargetMismatchError: it belongs to another drafter file.
    """
    file, config = read_scoring_file(path, PROBE, drafter)

    def read(name: str) -> Floats:
        return read_f32(file, f"segmentprobe.{name}")

    def output(prefix: str) -> ProbeOutput:
        return ProbeOutput(
            read(f"{prefix}fc2.weight"),
            float(read(f"{prefix}fc2.bias")[0]),
            read(f"{prefix}conv.weight"),
            float(read(f"{prefix}conv.bias")[0]),
        )

    return SegmentProbe(
        threshold=config["threshold"],
        norm_eps=config["norm_eps"],
        min_segment=config["min_segment"],
        max_segment=config["max_segment"],
        gelu=config["gelu"],
        norm_weight=read("norm.weight"),
        norm_bias=read("norm.bias"),
        fc1_weight=read("fc1.weight"),
        fc1_bias=read("fc1.bias"),
        unit=output(""),
        subunit=output("subunit.") if config["subunit"] else None,
    )


def write_probe(outfile: str | os.PathLike[str], probe: SegmentProbe, drafter_path: str | os.PathLike[str]) -> None:
    """Write a probe for one drafter file. ConfigError when its convolutions differ in length or are even."""
    taps = len(probe.unit.conv_weight)
    if taps % 2 == 0 or (probe.subunit is not None and len(probe.subunit.conv_weight) != taps):
        raise ConfigError("the convolutions of a probe have one odd length")
    metadata = {
        "segmentprobe.schema": SCHEMA,
        "segmentprobe.base_model": BASE_MODEL,
        "segmentprobe.runtime_gguf_sha256": file_sha256(drafter_path),
        "segmentprobe.feature_tap": FEATURE_TAP,
        "segmentprobe.threshold": float(probe.threshold),
        "segmentprobe.norm_eps": float(probe.norm_eps),
        "segmentprobe.min_segment": probe.min_segment,
        "segmentprobe.max_segment": probe.max_segment,
        "segmentprobe.conv_taps": taps,
        "segmentprobe.gelu": probe.gelu,
    }
    tensors = {
        "norm.weight": probe.norm_weight,
        "norm.bias": probe.norm_bias,
        "fc1.weight": probe.fc1_weight,
        "fc1.bias": probe.fc1_bias,
    }
    for prefix, output in (("", probe.unit), ("subunit.", probe.subunit)):
        if output is not None:
            tensors[f"{prefix}fc2.weight"] = output.fc2_weight
            tensors[f"{prefix}fc2.bias"] = np.array([output.fc2_bias], dtype=np.float32)
            tensors[f"{prefix}conv.weight"] = output.conv_weight
            tensors[f"{prefix}conv.bias"] = np.array([output.conv_bias], dtype=np.float32)
    write_scoring_file(outfile, PROBE, metadata, {f"segmentprobe.{name}": t for name, t in tensors.items()})
