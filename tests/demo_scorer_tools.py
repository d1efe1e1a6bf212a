"""Prompts for the tests of the demo scorer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.pflash import demo_scorer
from laguna_gguf.pflash.compress import PFlash

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Asked:
    """A chat prompt about the stored document."""

    prompt: str
    ids: NDArray[np.int32]
    tail: tuple[int, int, float]
    """The last 8 tokens of the question, as a window."""

    @property
    def query(self) -> tuple[int, int]:
        return len(self.ids) - 1, len(self.ids)


def open_demo(**kwargs: Any) -> PFlash:
    """The shipped files, one thread."""
    demo = demo_scorer()
    head, probe = demo.scoring_head, demo.segment_probe
    return PFlash(demo.drafter, scoring_head=head, segment_probe=probe, n_threads=1, n_threads_batch=1, **kwargs)


def ask(pflash: PFlash, document: dict[str, Any], question: dict[str, Any]) -> Asked:
    before = f"<|im_start|>user\n{document['context'].rstrip()}\n\n{question['text']}"
    prompt = f"{before}<|im_end|>\n<|im_start|>assistant\n"
    end = len(pflash.tokenize(before))
    return Asked(prompt, pflash.tokenize(prompt), (end - 8, end, 1.0))
