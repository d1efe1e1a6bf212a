"""Small drafters, heads and probes for the tests of the scorer."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.pflash.probe import ProbeOutput, SegmentProbe, write_probe
from laguna_gguf.pflash.scorer import Scorer
from laguna_gguf.pflash.trunk import Trunk
from random_drafter import TINY_QWEN35

EXACT = {"n_threads": 1, "n_threads_batch": 1, "type_k": 0, "type_v": 0}
"""One thread, attention cache in f32."""


def random_ids(n: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, TINY_QWEN35.n_vocab, n).astype(np.int32)


def make_scorer(path: Path, *, sessions: int = 0, head: Path | None = None, probe: Path | None = None, **kwargs: Any):
    """A scorer over a fresh trunk, f32 and one thread unless told otherwise."""
    trunk = Trunk(str(path), n_sequences=sessions + 1, **(EXACT | kwargs))
    return Scorer(trunk, head=head, probe=probe)


def random_probe(
    n_embd: int, *, seed: int = 0, n_hidden: int = 24, taps: int = 5, subunit: bool = True
) -> SegmentProbe:
    """A probe whose scores spread over (0, 1)."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def output() -> ProbeOutput:
        weight = draw(n_hidden, scale=n_hidden**-0.5)
        return ProbeOutput(weight, float(draw(1)[0]), draw(taps, scale=0.5), float(draw(1)[0]))

    return SegmentProbe(
        threshold=0.8,
        norm_eps=1e-5,
        min_segment=4,
        max_segment=64,
        gelu="tanh",
        norm_weight=rng.uniform(0.5, 1.5, n_embd).astype(np.float32),
        norm_bias=draw(n_embd, scale=0.1),
        fc1_weight=draw(n_hidden, n_embd, scale=2 * n_embd**-0.5),
        fc1_bias=draw(n_hidden, scale=0.1),
        unit=output(),
        subunit=output() if subunit else None,
    )


def write_random_probe(path: Path, drafter: Path, probe: SegmentProbe | None = None) -> Path:
    write_probe(path, probe or random_probe(TINY_QWEN35.n_embd), drafter)
    return path


TIMINGS = {
    "compress_ms",
    "drafter_input_tokens",
    "kept_tokens",
    "keep_ratio",
    "compressed_tokens",
    "query_rule",
    "history_queries",
    "scorer_resume",
    "scorer_new_tokens",
    "scorer_forward_ms",
    "view",
}
"""Keys of usage.timings.pflash, as `Compressed.timings` has them."""
