"""The evaluation of a drafter with head and probe through `PFlash.score`, on texts and words used for nothing else.

Every document is one user turn of a chat with its question at the end. All scorers get the same segments and the same
budget, keep_ratio of the whole prompt rounded down, of which the question and the generation prompt take their part.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import SelectionError
from laguna_gguf.pflash.candidates import chunk_size_for, fixed_chunks, make_candidates, merge, probe_segments
from laguna_gguf.pflash.compress import PFlash
from laguna_gguf.pflash.demo import DemoScorer
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.probe import SegmentProbe, load_probe
from laguna_gguf.pflash.selection import BUDGET_ONLY, Candidate, select
from scoring import baselines
from scoring.examples import END_OF_QUESTION, PREFIX, SUFFIX, Example, Question, assemble, make_example, name_words
from scoring.features import TokenPlaces
from scoring.recall import KEEP, f1, is_kept
from scoring.sources import Piece, Source, Split

Span = tuple[int, int]
Say = Callable[[str], None]

CHARACTERS = 26000
"""Of a document; 7,000 to 8,000 tokens."""
SINGLE_KINDS = ("note", "function", "partial", "raise", "phrase")
OFFERED = {"note": 1, "function": 1, "partial": 2, "raise": 2, "phrase": 1, "identifier": 1, "three": 2}
"""Questions taken of each kind from one document, at most."""
N_NOTES = 10


@dataclass(frozen=True)
class Asked:
    """A tokenized prompt and where things stand in it, in tokens."""

    ids: NDArray[np.int32]
    context: Span
    tail_end: int
    evidence: tuple[Span, ...]
    function: Span | None = None
    """The whole function that a question asks for."""

    @property
    def question(self) -> Span:
        """Question and generation prompt but the last token."""
        return self.context[1], len(self.ids) - 1

    def tail(self, n: int) -> Span:
        return max(self.context[1], self.tail_end - n), self.tail_end

    def budget(self, ratio: float) -> int:
        return int(ratio * len(self.ids))


@dataclass
class Tally:
    """Shares of evidence kept, by scorer and kind."""

    found: dict[tuple[str, str], list[bool]] = field(default_factory=lambda: defaultdict(list))

    def add(self, scorer: str, kind: str, kept: Sequence[bool]) -> None:
        if kind == "three":
            self.found[scorer, "three needles"] += kept
            self.found[scorer, "all three"].append(all(kept))
        else:
            self.found[scorer, kind] += kept
            if kind in SINGLE_KINDS:
                self.found[scorer, "single"] += kept

    def table(self) -> dict[str, dict[str, float]]:
        result: dict[str, dict[str, float]] = defaultdict(dict)
        for (scorer, kind), kept in self.found.items():
            result[scorer][kind] = round(float(np.mean(kept)), 3)
        return dict(result)

    def counts(self) -> dict[str, int]:
        """Questions by kind."""
        scorer = next(iter(self.found))[0]
        return {kind: len(kept) for (name, kind), kept in self.found.items() if name == scorer}


def documents(split: Split, seed: int, n_questions: int) -> Iterator[Example]:
    """Documents of the test files until n_questions single needles, equally many of each kind, and half as many
    three-needle questions are asked. Names are made of words that no training context used."""
    rng = random.Random(f"{seed} test")
    words = name_words(split.train + split.test, True)
    wanted = dict.fromkeys((*SINGLE_KINDS, "identifier"), -(-n_questions // len(SINGLE_KINDS)))
    wanted["three"] = -(-n_questions // 2)
    for _ in range(n_questions):  # more than enough
        if not any(wanted.values()):
            return
        example = make_example(split.test, words, CHARACTERS, rng, OFFERED, N_NOTES)
        taken = []
        for question in example.questions:
            if wanted[question.kind]:
                wanted[question.kind] -= 1
                taken.append(question)
        example.questions = taken
        if taken:
            yield example


class Prompts:
    """Tokenizes prompts about one document."""

    def __init__(self, pflash: PFlash, example: Example) -> None:
        self._pflash, self._example = pflash, example
        self._before = example.prompt_parts[0]
        self.ids = pflash.tokenize(self._before)
        pieces = [len(pflash.detokenize(self.ids[i : i + 1]).encode()) for i in range(len(self.ids))]
        self.places = TokenPlaces(self._before, np.cumsum([0, *pieces]).astype(np.int32))
        self._end_mark = int(pflash.tokenize(END_OF_QUESTION)[0])

    def tokens(self, characters: Sequence[int]) -> NDArray[np.int32]:
        """Tokens that begin at characters of the context."""
        return self.places.at_or_after([place + len(PREFIX) for place in characters])

    def span(self, begin: int, end: int) -> Span:
        return self.places.covering(begin + len(PREFIX), end + len(PREFIX))

    def ask(self, text: str, question: Question) -> Asked:
        """A prompt that asks `text`; evidence as of `question`."""
        suffix = self._pflash.tokenize(text + SUFFIX)
        ids = np.concatenate([self.ids, suffix])
        end = len(self.ids) + int(np.flatnonzero(suffix == self._end_mark)[-1])
        function = None
        if question.kind == "function":
            function = self.span(*function_extent(self._example.context, question.evidence[0][0]))
        evidence = tuple(self.span(*span) for span in question.evidence)
        return Asked(ids, (0, len(self.ids)), end, evidence, function)


def function_extent(text: str, begin: int) -> Span:
    """A definition with its body: up to the next line that is not indented further."""
    line = text.find("\n", begin)
    indent = len(text[begin:]) - len(text[begin:].lstrip(" "))
    end = line
    while 0 <= line < len(text) - 1:
        following = text.find("\n", line + 1)
        following = len(text) if following < 0 else following
        content = text[line + 1 : following]
        if (
            content.strip()
            and len(content) - len(content.lstrip(" ")) <= indent
            and not content.lstrip().startswith(")")
        ):
            break
        if content.strip():
            end = following
        line = following
    return begin, max(end, begin + 1)


def keep_segments(asked: Asked, candidates: Sequence[Candidate], ratio: float, *, skip: bool) -> list[Span]:
    """What is kept of a prompt; nothing when what must be kept exceeds the budget."""
    try:
        chosen = set(select(candidates, asked.budget(ratio), mode=BUDGET_ONLY, skip_oversized=skip).ordinals)
    except SelectionError:
        return []
    return merge((c.begin, c.end) for c in candidates if c.ordinal in chosen)


def _ranked(asked: Asked, spans: Sequence[Span], values: Sequence[float]) -> list[Candidate]:
    """Candidates with a score of their own for each segment."""
    shaped = make_candidates(np.zeros(len(asked.ids)), spans, "sum", _query(asked), [asked.question])
    return [Candidate(c.ordinal, c.begin, c.end, v, c.mandatory) for c, v in zip(shaped, values, strict=True)]


def _query(asked: Asked) -> Span:
    return len(asked.ids) - 1, len(asked.ids)


class Evaluator:
    """Runs questions and tallies what each scorer keeps."""

    def __init__(self, pflash: PFlash, probe: SegmentProbe, seed: int) -> None:
        self.pflash, self.probe = pflash, probe
        self.tallies = {ratio: Tally() for ratio in KEEP}
        self.functions: list[bool] = []
        """For functions at 0.1, last token and 8-token tail: whether half of their tokens are kept."""
        self._rng = np.random.default_rng(seed)

    def segments(self, asked: Asked, probe_scores: NDArray[np.float32]) -> list[Span]:
        """Segments of the probe."""
        spans = probe_segments(
            probe_scores,
            _query(asked),
            threshold=self.probe.threshold,
            min_segment=self.probe.min_segment,
            max_segment=self.probe.max_segment,
            required=[asked.question],
            at_least=0,
        )
        assert spans is not None
        return spans

    def mass(self, asked: Asked, query: Span, windows: Sequence[tuple[int, int, float]] = ()) -> Any:
        return self.pflash.score(asked.ids, query=query, windows=windows, session="document")

    def run(self, asked: Asked, kind: str) -> None:
        """All scorers on one question."""
        last = _query(asked)
        wide = self.mass(asked, last, [(*asked.tail(32), 1.0)])  # first: it keeps the rows of all windows
        masses = {
            "last token + 8-token tail": self.mass(asked, last, [(*asked.tail(8), 1.0)]).mass,
            "last token": self.mass(asked, last).mass,
            "8-token tail": self.mass(asked, asked.tail(8)).mass,
            "last token + 32-token tail": wide.mass,
        }
        spans = self.segments(asked, wide.probe)
        for name, mass in masses.items():
            candidates = make_candidates(mass, spans, "density", last, [asked.question])
            self._count(name, kind, asked, partial(keep_segments, asked, candidates, skip=True))
        pieces = [self.pflash.detokenize(asked.ids[i : i + 1]) for i in range(len(asked.ids))]
        queries = {"BM25 of the last 8 tokens": asked.tail(8), "BM25 of the whole question": asked.tail(10**6)}
        for name, (begin, end) in queries.items():
            values = baselines.bm25(pieces, spans, pieces[begin:end])
            self._count(name, kind, asked, partial(keep_segments, asked, _ranked(asked, spans, values), skip=True))
        values = self._rng.random(len(spans)).tolist()
        self._count(
            "random segments", kind, asked, partial(keep_segments, asked, _ranked(asked, spans, values), skip=True)
        )
        self._count("head + tail", kind, asked, partial(baselines.head_and_tail, len(asked.ids), asked.question))
        mass = masses["last token + 8-token tail"]
        for size in (128, 512, chunk_size_for(len(asked.ids))):
            chunks = fixed_chunks(len(asked.ids), size)
            candidates = make_candidates(mass, chunks, "sum", last, [asked.question])
            name = f"chunks of {size}" + ("" if size in (128, 512) else " (default)")
            self._count(name, kind, asked, partial(keep_segments, asked, candidates, skip=False))

    def run_other(self, name: str, asked: Asked, kind: str) -> None:
        """One scorer, last token and 8-token tail: another drafter, or another question."""
        scores = self.mass(asked, _query(asked), [(*asked.tail(8), 1.0)])
        spans = self.segments(asked, scores.probe)
        candidates = make_candidates(scores.mass, spans, "density", _query(asked), [asked.question])
        self._count(name, kind, asked, partial(keep_segments, asked, candidates, skip=True))

    def _count(self, name: str, kind: str, asked: Asked, keep: Callable[..., list[Span]]) -> None:
        for ratio, tally in self.tallies.items():
            kept = keep(ratio=ratio)
            tally.add(name, kind, [is_kept(span, kept) for span in asked.evidence])
            if name == "last token + 8-token tail" and ratio == 0.1 and asked.function is not None:
                begin, end = asked.function
                inside = sum(max(0, min(end, last) - max(begin, first)) for first, last in kept)
                self.functions.append(2 * inside >= end - begin)


def evaluate(
    files: DemoScorer, split: Split, seed: int, *, n_questions: int, n_threads: int, say: Say
) -> dict[str, Any]:
    """The whole table. n_questions: single needles; half as many three-needle questions are added."""
    options = {"sessions": 1, "n_threads": n_threads, "n_threads_batch": n_threads}
    examples = list(documents(split, seed, n_questions))
    say(f"{len(examples)} documents, {sum(len(example.questions) for example in examples)} questions")
    lengths = []
    with PFlash(files.drafter, scoring_head=files.scoring_head, segment_probe=files.segment_probe, **options) as pflash:
        probe = load_probe(files.segment_probe, DrafterFile(files.drafter))
        evaluator = Evaluator(pflash, probe, seed)
        for number, example in enumerate(examples, start=1):
            prompts = Prompts(pflash, example)
            for index, question in enumerate(example.questions):
                asked = prompts.ask(question.text, question)
                lengths.append(len(asked.ids))
                evaluator.run(asked, question.kind)
                others = examples[number % len(examples)].questions
                other = others[index % len(others)]
                evaluator.run_other("another question", prompts.ask(other.text, question), question.kind)
            say(f"document {number}: {evaluator.tallies[0.1].table()['last token + 8-token tail']}")
        boundaries = probe_report(pflash, probe, split, seed, n_documents=max(1, min(4, n_questions // 10)))
    with PFlash(files.drafter, segment_probe=files.segment_probe, **options) as untrained:
        evaluator.pflash = untrained
        for example in examples:
            prompts = Prompts(untrained, example)
            for question in example.questions:
                evaluator.run_other("untrained block 15", prompts.ask(question.text, question), question.kind)
    return {
        "seed": seed,
        "documents": len(examples),
        "prompt_tokens": [min(lengths), int(np.mean(lengths)), max(lengths)],
        "questions": evaluator.tallies[0.1].counts(),
        "kept": {f"{ratio:g}": tally.table() for ratio, tally in evaluator.tallies.items()},
        "half_of_the_function": round(float(np.mean(evaluator.functions)), 3) if evaluator.functions else None,
        "probe": boundaries,
    }


def probe_report(
    pflash: PFlash, probe: SegmentProbe, split: Split, seed: int, n_documents: int
) -> dict[str, dict[str, float]]:
    """F1 of exact unit starts on documents of Python and prose in equal parts, and on Python alone."""
    rng = random.Random(f"{seed} probe")
    python = [source for source in split.test if source.kind == "python"]
    prose = [source for source in split.test if source.kind != "python"] or python
    mixes: dict[str, list[list[Source]]] = {"mixed": [python, prose], "python": [python]}
    report = {}
    for name, parts in mixes.items():
        found: dict[str, list[int]] = defaultdict(list)
        base = 0
        for _ in range(n_documents):
            piece = Piece("")
            for part in parts:
                more = assemble(part, CHARACTERS // len(parts), rng)
                start = len(piece.text)
                piece.text += more.text
                for labels in ("units", "subunits", "definitions"):
                    getattr(piece, labels).extend(start + place for place in getattr(more, labels))
            example = Example(piece.text, [], piece.units, piece.subunits, piece.definitions)
            prompts = Prompts(pflash, example)
            ids = np.concatenate([prompts.ids, pflash.tokenize("?" + SUFFIX)])
            scores = pflash.score(ids, query=(len(ids) - 1, len(ids)))
            n = len(prompts.ids)
            assert scores.probe is not None and scores.subunit is not None
            values = {
                "unit": np.flatnonzero(scores.probe[:n] > probe.threshold),
                "subunit": np.flatnonzero(scores.subunit[:n] > 0.5),
                "true unit": prompts.tokens(piece.units),
                "true subunit": prompts.tokens(piece.subunits),
                "definitions": prompts.tokens(piece.definitions),
            }
            for key, places in values.items():
                found[key] += (base + places).tolist()
            base += n
        starts = set(found["definitions"])
        report[name] = {
            "unit": round(f1(found["unit"], found["true unit"])["f1"], 3),
            "subunit": round(f1(found["subunit"], found["true subunit"])["f1"], 3),
            "definitions found": round(len(starts & set(found["unit"])) / max(len(starts), 1), 3),
        }
    return report
