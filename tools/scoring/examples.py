"""Examples to learn from: contexts, questions about them, and where the evidence stands."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any

from scoring import questions as ask
from scoring.sources import Piece, Source, excerpt

Span = tuple[int, int]

PREFIX = "<|im_start|>user\n"
END_OF_QUESTION = "<|im_end|>"
SUFFIX = END_OF_QUESTION + "\n<|im_start|>assistant\n"

ENOUGH_WORDS = 200

NUMBERS = {"identifier": 8, "note": 5, "function": 3, "partial": 2, "raise": 2, "phrase": 2, "three": 3}
"""Questions of each kind for a training context."""


@dataclass(frozen=True)
class Question:
    """`evidence`: character ranges of the context that answer it; one, or one a needle."""

    kind: str
    text: str
    evidence: tuple[Span, ...]


@dataclass
class Example:
    """A context, its questions and, where known, the characters at which units begin."""

    context: str
    questions: list[Question]
    units: list[int] = field(default_factory=list)
    subunits: list[int] = field(default_factory=list)
    definitions: list[int] = field(default_factory=list)

    @property
    def prompt_parts(self) -> tuple[str, list[str]]:
        """(what stands before every question, the rest of the prompt for each): one user turn of a chat."""
        return f"{PREFIX}{self.context.rstrip()}\n\n", [question.text + SUFFIX for question in self.questions]


def held_out_word(word: str) -> bool:
    """Whether a word of generated names is for evaluation only (a fifth of them, by a hash)."""
    return hashlib.sha256(word.encode()).digest()[0] < 52


def name_words(sources: Sequence[Source], held_out: bool) -> list[str]:
    """Words for the names in generated notes, on one side of the held-out split: lower-case words of the texts, and
    invented ones where the texts have too few."""
    found = {word for source in sources for word in re.findall(r"\b[a-z]{4,9}\b", source.text)}
    words = {word for word in found if held_out_word(word) == held_out}
    if len(words) < ENOUGH_WORDS:
        syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
        invented = (a + b + c for a, b, c in product(syllables[::3], syllables[1::3], syllables[2::7]))
        words |= set(islice((word for word in invented if held_out_word(word) == held_out), ENOUGH_WORDS))
    return sorted(words)


def assemble(sources: Sequence[Source], size: int, rng: random.Random) -> Piece:
    """A context of about `size` characters: excerpts of several sources, one after the other, each starting a unit."""
    joined = Piece("")
    while len(joined.text) < size:
        source = rng.choice(sources)
        wanted = min(size - len(joined.text), rng.randint(size // 3, size))
        part = excerpt(source, rng.randrange(max(1, len(source.text) - wanted)), wanted)
        if not part.text.strip():
            continue
        if joined.text and not joined.text.endswith("\n"):
            joined.text += "\n"
        base = len(joined.text)
        joined.text += part.text
        lead = len(part.text) - len(part.text.lstrip("\n"))
        joined.units += sorted({base + lead, *(base + place for place in part.units)})
        joined.subunits += [base + place for place in part.subunits]
        joined.definitions += [base + place for place in part.definitions]
    return joined


def insert_notes(piece: Piece, notes: Sequence[str], rng: random.Random) -> tuple[Piece, list[Span]]:
    """Notes as paragraphs of their own before units of the piece: (the longer piece, where each note stands)."""
    places = sorted(rng.sample(piece.units[1:], min(len(notes), len(piece.units) - 1)))
    result, spans, last = Piece(""), [], 0

    def moved(found: list[int], begin: int, end: int, base: int) -> list[int]:
        return [place - begin + base for place in found if begin <= place < end]

    for place, note in zip([*places, None], [*notes[: len(places)], None], strict=True):
        end = len(piece.text) if place is None else place
        base = len(result.text)
        result.text += piece.text[last:end]
        for name in ("units", "subunits", "definitions"):
            getattr(result, name).extend(moved(getattr(piece, name), last, end, base))
        if note is not None:
            begin = len(result.text)
            result.units.append(begin)
            result.subunits.append(begin)
            result.text += f"{note}\n\n"
            spans.append((begin, begin + len(note)))
            last = end
    return result, spans


def make_example(
    sources: Sequence[Source],
    words: Sequence[str],
    size: int,
    rng: random.Random,
    numbers: dict[str, int] | None = None,
    n_notes: int = 6,
) -> Example:
    """One context of about `size` characters with questions of all kinds that it offers."""
    numbers = NUMBERS if numbers is None else numbers
    piece = assemble(sources, size, rng)
    while len(piece.units) <= n_notes:
        piece = assemble(sources, size, rng)
    facts = ask.make_notes(words, n_notes, rng)
    piece, spans = insert_notes(piece, [fact.note for fact in facts], rng)
    finder = ask.Finder(piece.text, facts[: len(spans)], spans)
    questions = []
    for kind, n in numbers.items():
        found = finder.find(kind, n, rng)
        questions += [Question(kind, text, tuple(evidence)) for text, evidence in found]
    return Example(piece.text, questions, piece.units, piece.subunits, piece.definitions)


def make_examples(
    sources: Sequence[Source],
    words: Sequence[str],
    n: int,
    size: int,
    seed: str,
    numbers: dict[str, int] | None = None,
    n_notes: int = 6,
) -> list[Example]:
    """`n` examples that depend on the arguments only."""
    rng = random.Random(seed)
    return [make_example(sources, words, size, rng, numbers, n_notes) for _ in range(n)]


def read_jsonl(path: Path) -> list[Example]:
    """Examples of one's own: a line {"text": context, "question": text, "evidence": [[begin, end], ...]} each,
    positions in characters. Lines with the same text become one example. ValueError names the line that does not
    fit."""
    examples: dict[str, Example] = {}
    for number, record in _records(path):
        try:
            text, question = str(record["text"]), str(record["question"])
            spans = tuple((int(begin), int(end)) for begin, end in record["evidence"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: needed text, question and evidence [[begin, end], ...]") from error
        if not text.strip() or not question.strip() or not spans:
            raise ValueError(f"{path}:{number}: text, question or evidence is empty")
        if any(not 0 <= begin < end <= len(text.rstrip()) for begin, end in spans):
            raise ValueError(f"{path}:{number}: evidence {spans} lies outside the text of {len(text)} characters")
        example = examples.setdefault(text, Example(text, []))
        example.questions.append(Question(str(record.get("kind", "given")), question, spans))
    if not examples:
        raise ValueError(f"{path} holds no examples")
    return list(examples.values())


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
                if not isinstance(record, dict):
                    raise ValueError(f"{path}:{number}: needed an object")
                yield number, record
