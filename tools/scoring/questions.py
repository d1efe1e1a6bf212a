"""Questions that a text offers, with their evidence: generated from notes, names, messages and phrases."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Span = tuple[int, int]
Found = tuple[str, list[Span]]
"""(question, evidence)"""

DEFINITION = re.compile(r"^[ \t]*(?:async )?def (\w+)", re.MULTILINE)
RAISE = re.compile(r"""^[ \t]*raise \w+\(\s*f?(["'])(?P<text>[A-Za-z][^"'{%\n]{11,})""", re.MULTILINE)
IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]{5,30}\b")
PROSE_LINE = re.compile(r"^[ \t]*#? ?[A-Za-z][A-Za-z ,'-]{30,}", re.MULTILINE)
PREFIX_OF_DEFINITION = 96
"""Characters of a definition that are its evidence, at most the line and the one after it."""

NOTES = (
    "Note: the {attribute} of {name} is {value}.",
    "The {attribute} for {name} is {value}.",
    "Remember that {name} has the {attribute} {value}.",
    "{name}: {attribute} {value}",
)
ATTRIBUTES = ("access code", "port", "owner id", "serial number", "budget", "room", "batch number", "pin")
NOTE_QUESTIONS = (
    "What is the {attribute} of {name}?",
    "Please tell me the {attribute} for {name}.",
    "Which {attribute} does {name} have?",
    "Find {name} and say what its {attribute} is.",
)
FUNCTION_QUESTIONS = (
    "What does the function {name} do?",
    "How does {name} work?",
    "Explain the function {name}.",
    "Show me the definition of {name}.",
)
PARTIAL_QUESTIONS = (
    "Which function has {name} in its name?",
    "Find the function whose name contains {name}.",
    "What does the function named something like {name} do?",
)
RAISE_QUESTIONS = (
    'Where is the error "{name}" raised?',
    'Why do I see the message "{name}"?',
    'Which code says "{name}"?',
)
PHRASE_QUESTIONS = (
    'Which passage says "{name}"?',
    "Where does the text mention {name}?",
    'What stands around the words "{name}"?',
)
IDENTIFIER_QUESTIONS = (
    "Where is {name} used?",
    "What is {name} for?",
    "Show the line with {name}.",
    "Explain how {name} is used here.",
)
THREE_NOTES = (
    "What are the {attribute} of {a}, the {attribute2} of {b} and the {attribute3} of {c}?",
    "Tell me about {a}, {b} and {c}.",
    "Compare {a} with {b} and with {c}.",
)
THREE_FUNCTIONS = (
    "Compare the functions {a}, {b} and {c}.",
    "How do {a}, {b} and {c} work together?",
    "What do {a}, {b} and {c} return?",
)


@dataclass(frozen=True)
class Fact:
    """A generated note and what it says."""

    name: str
    attribute: str
    note: str


def make_notes(words: Sequence[str], n: int, rng: random.Random) -> list[Fact]:
    """Notes about names of two words each, all words of a context different."""
    drawn = rng.sample(list(words), 2 * n)
    facts = []
    for first, second in zip(drawn[::2], drawn[1::2], strict=True):
        name = f"{first}-{second}" if rng.random() < 0.5 else f"{first} {second}"
        attribute = rng.choice(ATTRIBUTES)
        value = str(rng.randint(1000, 999999))
        facts.append(Fact(name, attribute, rng.choice(NOTES).format(attribute=attribute, name=name, value=value)))
    return facts


class Finder:
    """Finds questions in one text."""

    def __init__(self, text: str, facts: Sequence[Fact], spans: Sequence[Span]) -> None:
        """spans: where the note of each fact stands."""
        self.text = text
        self.facts = list(zip(facts, spans, strict=True))
        self._counts = Counter(word.casefold() for word in IDENTIFIER.findall(text))
        definitions = list(DEFINITION.finditer(text))
        names = Counter(match[1] for match in definitions)
        self.functions = {
            match[1]: self._definition(match.start())
            for match in definitions
            if names[match[1]] == 1 and len(match[1]) >= 5 and not match[1].startswith("__")
        }
        self._kinds: dict[str, Callable[[random.Random], list[Found]]] = {
            "note": self._notes,
            "function": self._functions,
            "partial": self._partial,
            "raise": self._raises,
            "phrase": self._phrases,
            "identifier": self._identifiers,
            "three": self._three,
        }

    def find(self, kind: str, n: int, rng: random.Random) -> list[Found]:
        """At most n questions of a kind."""
        found = self._kinds[kind](rng)
        return rng.sample(found, min(n, len(found)))

    def _definition(self, begin: int) -> Span:
        end = self.text.find("\n", begin)
        return begin, min(len(self.text) if end < 0 else end, begin + PREFIX_OF_DEFINITION)

    def _line(self, place: int) -> Span:
        end = self.text.find("\n", place)
        begin = self.text.rfind("\n", 0, place) + 1
        begin += len(self.text[begin:place]) - len(self.text[begin:place].lstrip())
        return begin, len(self.text) if end < 0 else end

    def _notes(self, rng: random.Random) -> list[Found]:
        return [
            (rng.choice(NOTE_QUESTIONS).format(attribute=fact.attribute, name=fact.name), [span])
            for fact, span in self.facts
        ]

    def _functions(self, rng: random.Random) -> list[Found]:
        return [(rng.choice(FUNCTION_QUESTIONS).format(name=name), [span]) for name, span in self.functions.items()]

    def _partial(self, rng: random.Random) -> list[Found]:
        """Parts of names that occur in one definition only."""
        found = []
        for name, span in self.functions.items():
            parts = [part for part in name.split("_") if len(part) >= 4]
            if len(parts) < 2:
                continue
            part = rng.choice(parts)
            if sum(part in other for other in self.functions) == 1 and self.text.casefold().count(part) <= 6:
                found.append((rng.choice(PARTIAL_QUESTIONS).format(name=part), [span]))
        return found

    def _raises(self, rng: random.Random) -> list[Found]:
        found = []
        for match in RAISE.finditer(self.text):
            message = match["text"].strip()
            if self.text.count(message) == 1:
                shown = " ".join(message.split()[:7])
                begin = self.text.rfind("\n", 0, match.start("text")) + 1
                found.append((rng.choice(RAISE_QUESTIONS).format(name=shown), [(begin, match.end("text"))]))
        return found

    def _phrases(self, rng: random.Random) -> list[Found]:
        notes = [span for _, span in self.facts]
        found = []
        for match in PROSE_LINE.finditer(self.text):
            if any(begin <= match.start() < end for begin, end in notes):
                continue
            words = match[0].strip(" #\t").split()
            if len(words) < 6:
                continue
            first = rng.randrange(len(words) - 4)
            phrase = " ".join(words[first : first + rng.randint(4, 6)]).strip(",.'-")
            if self.text.count(phrase) == 1:
                found.append((rng.choice(PHRASE_QUESTIONS).format(name=phrase), [match.span()]))
        return found

    def _identifiers(self, rng: random.Random) -> list[Found]:
        """Identifiers that stand in the text exactly once."""
        found = []
        for match in IDENTIFIER.finditer(self.text):
            word = match[0]
            if self._counts[word.casefold()] == 1 and (len(word) >= 8 or "_" in word):
                begin, end = self._line(match.start())
                begin, end = max(begin, match.start() - 60), min(end, match.end() + 60)
                found.append((rng.choice(IDENTIFIER_QUESTIONS).format(name=word), [(begin, end)]))
        return found

    def _three(self, rng: random.Random) -> list[Found]:
        found = []
        for _ in range(6):
            if len(self.facts) >= 3 and (rng.random() < 0.6 or len(self.functions) < 3):
                chosen = rng.sample(self.facts, 3)
                a, b, c = (fact for fact, _ in chosen)
                question = rng.choice(THREE_NOTES).format(
                    attribute=a.attribute,
                    attribute2=b.attribute,
                    attribute3=c.attribute,
                    a=a.name,
                    b=b.name,
                    c=c.name,
                )
                found.append((question, [span for _, span in chosen]))
            elif len(self.functions) >= 3:
                names = rng.sample(sorted(self.functions), 3)
                question = rng.choice(THREE_FUNCTIONS).format(a=names[0], b=names[1], c=names[2])
                found.append((question, [self.functions[name] for name in names]))
        return found
