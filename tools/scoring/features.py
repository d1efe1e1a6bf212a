"""Taps of examples, read once from the frozen drafter and kept in a file."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.pflash.hashing import file_sha256
from laguna_gguf.pflash.trunk import Trunk
from scoring.examples import END_OF_QUESTION, PREFIX, Example

TAIL = 32
"""Rows kept of the end of each question; windows of 8 are their last ones."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class QuestionTaps:
    """Rows of one question; evidence in tokens of the context."""

    kind: str
    tail: NDArray[np.float16]
    """[1..TAIL, n_embd]: the last tokens of the question."""
    last: NDArray[np.float16]
    """[n_embd]: the prompt's last token."""
    evidence: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ExampleTaps:
    """A context's rows [n, n_embd], which tokens begin units, and its questions."""

    taps: NDArray[np.float16]
    units: NDArray[np.int32]
    subunits: NDArray[np.int32]
    definitions: NDArray[np.int32]
    questions: list[QuestionTaps]


class TokenPlaces:
    """Characters of a text to tokens."""

    def __init__(self, text: str, offsets: NDArray[np.int32]) -> None:
        """offsets: bytes at which tokens begin, and the length of all, [n + 1]."""
        self._offsets = offsets
        sizes = [len(letter.encode("utf-8", "surrogateescape")) for letter in text]
        self._bytes = np.cumsum([0, *sizes])

    def at_or_after(self, places: Sequence[int]) -> NDArray[np.int32]:
        """First token that begins at or after each character, without those behind the text."""
        found = np.searchsorted(self._offsets[:-1], self._bytes[np.asarray(places, dtype=np.int64)], side="left")
        return np.unique(found[found < len(self._offsets) - 1]).astype(np.int32)

    def covering(self, begin: int, end: int) -> tuple[int, int]:
        """Tokens that hold these characters."""
        first = int(np.searchsorted(self._offsets, self._bytes[begin], side="right")) - 1
        return first, int(np.searchsorted(self._offsets, self._bytes[end], side="left"))


def read_example(trunk: Trunk, example: Example) -> ExampleTaps:
    """Run a context once, then every question from the state behind it."""
    before, questions = example.prompt_parts
    context, model = trunk.context, trunk.model
    ids = model.tokenize(before)
    suffixes = [model.tokenize(question) for question in questions]
    context.reserve(len(ids) + max(map(len, suffixes), default=0))
    context.clear(0)
    taps = _run(trunk, ids)
    state, position = context.save(0), context.positions[0]
    places = TokenPlaces(before, model.offsets(ids))
    end_mark = int(model.tokenize(END_OF_QUESTION)[0])
    read = []
    for question, suffix in zip(example.questions, suffixes, strict=True):
        rows = _run(trunk, suffix)
        context.restore(0, position, state)
        marks = np.flatnonzero(suffix == end_mark)
        end = int(marks[-1]) if len(marks) else len(suffix)
        evidence = tuple(places.covering(b + len(PREFIX), e + len(PREFIX)) for b, e in question.evidence)
        read.append(QuestionTaps(question.kind, rows[max(0, end - TAIL) : end], rows[-1], evidence))
    context.clear(0)

    def tokens(found: list[int]) -> NDArray[np.int32]:
        return places.at_or_after([place + len(PREFIX) for place in found])

    return ExampleTaps(taps, tokens(example.units), tokens(example.subunits), tokens(example.definitions), read)


def _run(trunk: Trunk, ids: NDArray[np.int32]) -> NDArray[np.float16]:
    taps = np.empty((len(ids), trunk.file.n_embd), dtype=np.float16)
    start = trunk.context.positions[0]

    def keep(capture: _native.HiddenCapture, begin: int, n: int) -> None:
        taps[begin - start : begin - start + n] = capture.rows()[:, 0]

    trunk.run(0, ids, keep)
    return taps


def read_examples(trunk: Trunk, examples: Sequence[Example], cache: Path | None, say: Say) -> list[ExampleTaps]:
    """Taps of all examples. `cache`: a folder in which they are kept, by drafter and examples.

    Taps beyond float16 raise ValueError: such a drafter needs a smaller scale.
    """
    path = None
    if cache is not None:
        content = json.dumps([asdict(example) for example in examples]) + file_sha256(trunk.file.path)
        path = cache / f"taps-{hashlib.sha256(content.encode()).hexdigest()[:16]}.pickle"
        if path.exists():
            with open(path, "rb") as file:
                return pickle.load(file)
    read = []
    n_tokens = 0
    for number, example in enumerate(examples, start=1):
        read.append(read_example(trunk, example))
        n_tokens += len(read[-1].taps)
        if not np.isfinite(read[-1].taps).all():
            raise ValueError(f"taps of {trunk.file.path} exceed float16; they cannot be cached")
        if number % 50 == 0 or number == len(examples):
            say(f"read {number} of {len(examples)} contexts, {n_tokens} tokens")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            pickle.dump(read, file, protocol=4)
        temporary.rename(path)
    return read
