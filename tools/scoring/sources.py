"""Texts that examples are made of, with the places where their units begin, and their split into parts."""

from __future__ import annotations

import ast
import hashlib
import importlib
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

Label = Callable[[str], tuple[Iterable[int], Iterable[int]]]
"""Text -> (characters at which units begin, characters at which sub-units begin)."""

SUFFIXES = {".py": "python", ".md": "prose", ".rst": "prose", ".txt": "prose"}
EXCLUDED_PARTS = {"site-packages", "test", "tests", "idle_test", "encodings", "turtledemo", "lib2to3", "__pycache__"}
AFTER_BLANK = re.compile(r"(?:\A|\n[ \t]*\n)(?=[ \t]*\S)")
HEADING = re.compile(r"^#{1,6} \S", re.MULTILINE)
LINE = re.compile(r"^(?=[ \t]*\S)", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One text. Positions are characters; `definitions` are those units that are functions and classes."""

    name: str
    kind: str
    text: str
    units: tuple[int, ...]
    subunits: tuple[int, ...]
    definitions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Split:
    """Parts that share no file: `train` to learn from, `tune` to look at meanwhile, `test` used for nothing else."""

    train: list[Source]
    tune: list[Source]
    test: list[Source]
    sha256: str = ""


def prose_label(text: str) -> tuple[set[int], set[int]]:
    """Paragraphs and Markdown headings; sub-units are lines."""
    units = {match.end() for match in AFTER_BLANK.finditer(text)} | {m.start() for m in HEADING.finditer(text)}
    return units, {match.start() for match in LINE.finditer(text)}


def python_definitions(text: str) -> set[int]:
    """Line starts of functions and classes, of their first decorator where they have one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return set()
    starts = _line_starts(text)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.add(starts[first - 1])
    return found


def python_label(text: str) -> tuple[set[int], set[int]]:
    """Functions, classes and blocks after a blank line; sub-units are statements."""
    units = {match.end() for match in AFTER_BLANK.finditer(text)} | python_definitions(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return prose_label(text)
    starts = _line_starts(text)
    statements = {starts[node.lineno - 1] for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    return units, units | statements


LABELS: dict[str, Label] = {"python": python_label, "prose": prose_label}


def load_label(spec: str) -> tuple[str, Label]:
    """A plug-in SUFFIX=MODULE:NAME, e.g. .js=my_labels:javascript -> (suffix, function). ValueError otherwise."""
    suffix, _, place = spec.partition("=")
    module, _, name = place.partition(":")
    if not (suffix.startswith(".") and module and name):
        raise ValueError(f"{spec!r} is no label plug-in; needed SUFFIX=MODULE:NAME, e.g. .js=my_labels:javascript")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"{spec!r}: module {module} has no function {name}")
    return suffix, function


def make_source(name: str, kind: str, text: str, label: Label | None = None) -> Source:
    """Label a text. ValueError when a plug-in gives positions outside of it."""
    units, subunits = (set(part) for part in (label or LABELS[kind])(text))
    if any(not 0 <= place <= len(text) for place in units | subunits):
        raise ValueError(f"labels of {name} lie outside its {len(text)} characters")
    definitions = python_definitions(text) if kind == "python" else set()
    return Source(name, kind, text, *(tuple(sorted(part)) for part in (units | {0}, subunits | {0}, definitions)))


def read_files(paths: Iterable[Path], plugins: dict[str, Label] | None = None) -> list[Source]:
    """Sources of all readable text files under `paths`, sorted; suffixes of SUFFIXES and of `plugins`."""
    plugins = plugins or {}
    found = set()
    for path in paths:
        found |= {path} if path.is_file() else set(path.rglob("*"))
    sources = []
    for path in sorted(found):
        if path.suffix not in SUFFIXES | plugins or not path.is_file():
            continue
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            kind = SUFFIXES.get(path.suffix, path.suffix.removeprefix("."))
            sources.append(make_source(path.as_posix(), kind, text, plugins.get(path.suffix)))
    return sources


def standard_library() -> list[Source]:
    """The interpreter's own library, and the language reference that `help()` shows, as Markdown."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if EXCLUDED_PARTS & set(name.parts) or name.as_posix() == "pydoc_data/topics.py":
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 400 and len(text.encode()) == len(text):
            sources.append(make_source(name.as_posix(), "python", text))
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        markdown = _as_markdown(text.encode("ascii", "ignore").decode())
        if len(markdown) > 400:
            sources.append(make_source(f"topics/{name}.md", "prose", markdown))
    return sources


def _as_markdown(text: str) -> str:
    """Underlined headings as # headings, and no more than one blank line anywhere."""
    for level, mark in ((1, "*"), (2, "="), (3, "-")):
        pattern = re.compile(rf"^(\S.*)\n{re.escape(mark)}{{3,}}$", re.MULTILINE)
        text = pattern.sub("#" * level + r" \1", text)
    return re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"


def split_sources(sources: list[Source], seed: int, tune: float = 0.06, test: float = 0.14) -> Split:
    """Whole files, drawn by `seed` before anything is trained; each kind in the same shares."""
    digest = hashlib.sha256()
    for source in sorted(sources, key=lambda source: source.name):
        digest.update(f"{source.name}\0{len(source.text)}\0{source.text}".encode())
    parts: dict[str, list[Source]] = {"train": [], "tune": [], "test": []}
    for kind in sorted({source.kind for source in sources}):
        files = sorted((source for source in sources if source.kind == kind), key=lambda source: source.name)
        random.Random(f"{seed} {kind}").shuffle(files)
        n_tune, n_test = (max(1, round(share * len(files))) for share in (tune, test))
        parts["tune"] += files[:n_tune]
        parts["test"] += files[n_tune : n_tune + n_test]
        parts["train"] += files[n_tune + n_test :]
    if not parts["train"]:
        raise ValueError(f"{len(sources)} files are too few to hold some out; needed at least 3 of a kind")
    return Split(parts["train"], parts["tune"], parts["test"], digest.hexdigest())


def _line_starts(text: str) -> list[int]:
    return [0, *(match.end() for match in re.finditer("\n", text)), len(text)]


def python_version() -> str:
    return sys.version.split()[0]


@dataclass
class Piece:
    """Consecutive whole lines of a source, with its labels moved along."""

    text: str
    units: list[int] = field(default_factory=list)
    subunits: list[int] = field(default_factory=list)
    definitions: list[int] = field(default_factory=list)


def excerpt(source: Source, begin: int, size: int) -> Piece:
    """About `size` characters from the line that holds character `begin` on."""
    first = source.text.rfind("\n", 0, begin) + 1
    last = source.text.find("\n", min(first + size, len(source.text)))
    last = len(source.text) if last < 0 else last + 1

    def inside(places: tuple[int, ...]) -> list[int]:
        return [place - first for place in places if first <= place < last]

    return Piece(source.text[first:last], inside(source.units), inside(source.subunits), inside(source.definitions))
