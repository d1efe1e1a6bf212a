"""Examples for the training of heads and probes: questions, evidence, labels, baselines."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from scoring import baselines
from scoring.evaluation import function_extent
from scoring.examples import Example, Question, assemble, insert_notes, make_example, read_jsonl
from scoring.features import TokenPlaces
from scoring.recall import f1, is_kept, keep_context, unit_segments
from scoring.sources import excerpt, load_label, make_source, prose_label, python_label, read_files, split_sources

PYTHON = '''"""Reads tower records."""

import collections


class TowerReader:
    """Reads."""

    @property
    def record_height(self):
        return self._height

    def parse_tower_line(self, line):
        if not line:
            raise ValueError("the tower line is missing")
        return collections.OrderedDict(line=line)


def write_tower_report(records):
    total = sum(records)
    return total
'''
PROSE = "# Towers\n\nThe first tower of the town was built near the river by the old mill.\n\n## Bridges\nNo bridge.\n"


def starts(text: str, places: tuple[int, ...] | set[int]) -> list[str]:
    return [text[place:].split("\n")[0].strip() for place in sorted(places)]


def test_labels() -> None:
    units, subunits = python_label(PYTHON)
    assert starts(PYTHON, set(units)) == [
        '"""Reads tower records."""',
        "import collections",
        "class TowerReader:",
        "@property",
        "def parse_tower_line(self, line):",
        "def write_tower_report(records):",
    ]
    assert "total = sum(records)" in starts(PYTHON, set(subunits))
    units, _ = prose_label(PROSE)
    assert starts(PROSE, set(units))[-1] == "## Bridges" and len(set(units)) == 3
    assert python_label("def broken(:\n\nx") == prose_label("def broken(:\n\nx")
    assert starts(PYTHON, make_source("a.py", "python", PYTHON).definitions)[0] == "class TowerReader:"


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(8):
        (tmp_path / f"part{index}.py").write_text(PYTHON)
        (tmp_path / f"page{index}.md").write_text(PROSE)
    (tmp_path / "code.js").write_text("function a() {}\nfunction b() {}\n")
    (tmp_path / "my_labels.py").write_text("def javascript(text):\n    return [0, text.find('function b')], []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = dict([load_label(".js=my_labels:javascript")])
    sources = read_files([tmp_path], plugins)
    script = next(source for source in sources if source.kind == "js")
    assert script.units == (0, 16)
    split = split_sources([source for source in sources if source.kind != "js"], 3)
    names = [{source.name for source in part} for part in (split.train, split.tune, split.test)]
    assert all(names) and not (names[0] & names[1] or names[0] & names[2] or names[1] & names[2])
    assert split_sources(sources[:-1], 3).sha256 != split.sha256
    for spec in ("js=my_labels:javascript", ".js=my_labels", ".js=my_labels:absent"):
        with pytest.raises(ValueError, match=re.escape(spec)):
            load_label(spec)
    with pytest.raises(ValueError, match="too few"):
        split_sources(sources[:2], 1)


def test_excerpts_keep_labels_in_place() -> None:
    source = make_source("a.py", "python", PYTHON)
    piece = excerpt(source, PYTHON.index("record_height"), 120)
    assert piece.text.startswith("    def record_height") and piece.text.endswith("\n")
    assert starts(piece.text, set(piece.definitions)) == ["def parse_tower_line(self, line):"]
    joined = assemble([source], 900, random.Random(1))
    assert len(joined.text) >= 900
    longer, spans = insert_notes(joined, ["Note: one.", "Note: two."], random.Random(2))
    assert [longer.text[begin:end] for begin, end in spans] == ["Note: one.", "Note: two."]
    assert {begin for begin, _ in spans} <= set(longer.units)
    assert sorted(starts(longer.text, set(longer.definitions))) == sorted(starts(joined.text, set(joined.definitions)))


def test_questions_have_their_evidence() -> None:
    sources = [make_source("a.py", "python", PYTHON), make_source("b.md", "prose", PROSE)]
    words = [f"word{chr(97 + i)}{chr(97 + j)}" for i in range(6) for j in range(6)]
    kinds = set()
    for seed in range(6):
        example = make_example(sources, words, 1200, random.Random(seed), n_notes=4)
        for question in example.questions:
            kinds.add(question.kind)
            assert len(question.evidence) == (3 if question.kind == "three" else 1)
            for begin, end in question.evidence:
                evidence = example.context[begin:end]
                assert evidence.strip() and "\n" not in evidence.strip("\n")
                shared = set(re.findall(r"[a-z]{4,}", evidence.casefold()))
                assert shared & set(re.findall(r"[a-z]{4,}", question.text.casefold())), (question, evidence)
    assert {"note", "three"} <= kinds


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    lines = [
        {"text": "The mill stands by the river.", "question": "Where is the mill?", "evidence": [[9, 28]]},
        {"text": "The mill stands by the river.", "question": "What stands there?", "evidence": [[0, 8]]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    (example,) = read_jsonl(path)
    assert [question.evidence for question in example.questions] == [((9, 28),), ((0, 8),)]
    for broken in (
        '{"text": "a"}',
        "[1]",
        "{",
        '{"text": "ab", "question": "q", "evidence": [[1, 9]]}',
        '{"text": "ab", "question": "q", "evidence": []}',
    ):
        path.write_text(json.dumps(lines[0]) + "\n" + broken)
        with pytest.raises(ValueError, match=":2: "):
            read_jsonl(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no examples"):
        read_jsonl(path)


def test_prompt_parts() -> None:
    before, (suffix,) = Example("The mill.\n", [Question("given", "Where?", ((4, 8),))]).prompt_parts
    assert before == "<|im_start|>user\nThe mill.\n\n" and suffix == "Where?<|im_end|>\n<|im_start|>assistant\n"


def test_token_places() -> None:
    text = "ab\u00e9c\nd"  # bytes a b (2) c \n d
    places = TokenPlaces(text, np.array([0, 2, 5, 6, 7], dtype=np.int32))
    assert places.at_or_after([0, 1, 4, 5]).tolist() == [0, 1, 2, 3]
    assert places.covering(2, 3) == (1, 2) and places.covering(1, 5) == (0, 3)


def test_kept_evidence() -> None:
    mass = np.array([0.0, 0, 0.5, 0, 0.1, 0, 0.4, 0])
    spans = [(0, 2), (2, 4), (4, 6), (6, 8)]
    kept = keep_context(mass, spans, 4, "density", skip_oversized=True)
    assert kept == [(2, 4), (6, 8)]
    assert is_kept((2, 4), kept) and not is_kept((2, 5), kept) and is_kept((3, 5), [(2, 4), (4, 6)])
    assert is_kept((0, 60), [(0, 24)])  # the first 24 tokens decide
    assert unit_segments(300, [0]) == [(0, 128), (128, 256), (256, 300)]
    assert unit_segments(100, [0, 40]) == [(0, 40), (40, 100)]
    assert f1([1, 2, 3], [2, 3, 4, 5]) == pytest.approx({"precision": 2 / 3, "recall": 0.5, "f1": 4 / 7})


def test_baselines() -> None:
    pieces = ["the", " mill", " stands", " the", " river", " runs", " the", " mill", " wheel", " river"]
    spans = [(0, 3), (3, 6), (6, 10)]
    scores = baselines.bm25(pieces, spans, ["Wheel", "?", " river"])
    assert scores[0] == 0.0 and scores[2] > scores[1] > 0.0
    assert baselines.head_and_tail(100, (90, 99), 0.2) == [(0, 5), (85, 100)]
    assert baselines.head_and_tail(100, (70, 99), 0.2) == [(0, 0), (70, 100)]


def test_function_extent() -> None:
    begin = PYTHON.index("    def parse_tower_line")
    first, last = function_extent(PYTHON, begin)
    assert PYTHON[first:last].strip().endswith("OrderedDict(line=line)")
    begin = PYTHON.index("def write_tower_report")
    assert PYTHON[slice(*function_extent(PYTHON, begin))].endswith("return total")
