"""Traces of compressions: the JSON object, the file, and the page that shows it."""

import json
import logging
import math
import os
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from chat_templates import render
from laguna_gguf import cli
from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.candidates import fixed_chunks, make_candidates
from laguna_gguf.pflash.query import plan
from laguna_gguf.pflash.selection import select
from laguna_gguf.pflash.trace import Trace, TraceWriter, fingerprint, make_trace, read_traces
from laguna_gguf.pflash.trace_report import report

# as other tools know them
KEYS = """schema_version input_tokens keep_ratio input_ids query_begin query_end selector_mode query_parser token_budget
retained_tokens required_instruction_spans stop_reason retained_mass segmentation candidate_score scorer segments
chunk_size chunk_scores selected_chunks forced_chunks compressed_ids parser""".split()
PARSER_KEYS = """input_kind selection_rule query_parser fingerprint content_begin content_end query_begin query_end
windows""".split()

HOSTILE = "</div></script><script>alert(1)</script> <b>\"'&amp;\x00\x1b[31m\u202e 第二 \udcff"


def chat_trace(document: str = "line one\n" * 60, *, segmented: bool = True, text: bool = True, **extra) -> Trace:
    messages = [
        dict(role="system", content="Be brief."),
        dict(role="user", content="What was it?"),
        dict(role="assistant", content="That."),
        dict(role="user", content=document + "Where is it?"),
    ]
    prompt = render("qwen", messages)
    n_bytes = len(prompt.encode("utf-8", "surrogateescape"))
    offsets = np.append(np.arange(0, n_bytes, 3), n_bytes)
    n = len(offsets) - 1
    planned = plan(prompt, offsets)
    mass = np.arange(n, dtype=float) % 7
    mass /= mass.sum()
    spans = fixed_chunks(n, 16)
    required = planned.pins
    rows = make_candidates(mass, spans, "density" if segmented else "sum", planned.query, required)
    budget = max(n // 2, sum(row.end - row.begin for row in rows if row.mandatory))
    selection = select(rows, budget, mode="budget_only", skip_oversized=segmented)
    kept = np.concatenate([np.arange(*spans[ordinal]) for ordinal in selection.ordinals])
    return make_trace(
        ids=np.arange(n, dtype=np.int32),
        keep_ratio=0.25,
        query=planned.query,
        required=required,
        budget=budget,
        candidates=rows,
        selection=selection,
        compressed_ids=kept,
        mode="budget_only",
        segmentation="probe" if segmented else "fixed",
        chunk_size=0 if segmented else 16,
        candidate_score="density" if segmented else "sum",
        scorer="head",
        query_parser="arbitrary_tail",
        rule=planned.rule,
        plan=planned,
        text=prompt if text else None,
        offsets=offsets if text else None,
        mass=mass if text else None,
        **extra,
    )


def test_fingerprint() -> None:
    """FNV-1a-64 of no bytes is its offset basis; of the bytes of "foobar" and two zeros computed by hand."""
    assert fingerprint([]) == "cbf29ce484222325"
    by_hand = 0xCBF29CE484222325
    for byte in b"foobar\0\0":
        by_hand = ((by_hand ^ byte) * 1099511628211) % 2**64
    assert fingerprint([int.from_bytes(b"foob", "little"), int.from_bytes(b"ar\0\0", "little")]) == f"{by_hand:016x}"
    assert fingerprint(np.array([1, 2], dtype=np.int64)) == fingerprint([1, 2]) != fingerprint([2, 1])


def test_object() -> None:
    trace = chat_trace(text=False)
    values = trace.as_dict()
    assert sorted(values) == sorted(KEYS) and sorted(values["parser"]) == sorted(PARSER_KEYS)
    assert (values["input_tokens"], values["schema_version"]) == (len(values["input_ids"]), 1)
    assert values["retained_tokens"] == len(values["compressed_ids"])
    assert values["segments"] and values["chunk_size"] == 0 and values["segmentation"] == "probe"
    assert values["forced_chunks"] and set(values["forced_chunks"]) <= set(values["selected_chunks"])
    parser = values["parser"]
    assert (parser["input_kind"], parser["selection_rule"]) == ("chat", "prompt_end")
    assert [window[2] for window in parser["windows"]] == [1.0, 0.5]
    fixed = chat_trace(segmented=False)
    assert fixed.segments == [] and fixed.chunk_size == 16 and len(fixed.ranges) == len(fixed.chunk_scores)
    assert chat_trace(view=dict(mode="fresh")).as_dict()["view"] == {"mode": "fresh"}


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traces = [chat_trace(), chat_trace(segmented=False, text=False), chat_trace(HOSTILE)]
    writer = TraceWriter(path)
    for trace in traces:
        writer.write(trace)
    TraceWriter(path).write(traces[0].as_dict())  # appends, also from a dict
    assert path.read_bytes().isascii() and path.read_text().count("\n") == 4
    for read, trace in zip(read_traces(path), [*traces, traces[0]], strict=True):
        assert json.dumps(read.as_dict()) == json.dumps(trace.as_dict())


def test_writer_refuses_and_survives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="PFLASH_TRACE_PATH"):
        TraceWriter(tmp_path)
    with pytest.raises(ConfigError, match="PFLASH_TRACE_PATH"):
        TraceWriter(tmp_path / "nowhere" / "trace.jsonl")
    if not os.path.exists("/dev/full"):
        return
    writer = TraceWriter("/dev/full")
    with caplog.at_level(logging.WARNING, logger="laguna_gguf"):
        for _ in range(3):
            writer.write(chat_trace())
    assert len(caplog.records) == 1 and "/dev/full" in caplog.text
    with pytest.raises(ValueError, match="JSON"):
        writer.write(replace(chat_trace(), retained_mass=math.nan))


GOOD = chat_trace().as_dict()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(schema_version=2), "schema_version"),
        (dict(input_ids=[1]), "ids"),
        (dict(chunk_scores=[]), "scores"),
        (dict(segments=[[5, 2]]), "ranges"),
        (dict(segments=[[0, 10**9]]), "ranges"),
        (dict(segments=[], chunk_size=0), "chunk size"),
        (dict(selected_chunks=[10**6]), "ordinal"),
        (dict(forced_chunks=[-1]), "ordinal"),
        (dict(query_end=10**9), "span"),
        (dict(required_instruction_spans=[[4, 1]]), "span"),
        (dict(token_mass=[1.0]), "token_mass"),
        (dict(token_offsets=[0]), "token_offsets"),
        (dict(parser=None), "not a trace"),
        (dict(parser={}), "input_kind"),
        (dict(parser={**GOOD["parser"], "windows": [[0, 10**9, 1.0]]}), "span"),
        (dict(parser={**GOOD["parser"], "windows": [7]}), "not a trace"),
        (dict(segments="abc"), "not a trace"),
    ],
)
def test_lines_that_are_no_trace(tmp_path: Path, change: dict, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(ConfigError, match=f"line 3.*{reason}"):
        list(read_traces(path))


@pytest.mark.parametrize("line", ["{", "[]", "7", '{"a": 1}', "\xff", '{"schema_version": 1}'])
def test_lines_that_are_something_else(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line.encode("latin-1"))
    with pytest.raises(ConfigError, match="line 1: not a trace"):
        list(read_traces(path))


class Page(HTMLParser):
    """Text and elements of a page; checks that elements are closed in order."""

    VOID = ("meta", "input", "br", "path")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.body = ""
        self.feed(source)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack[-1:] and self.stack[-1] not in ("script", "style"):
            self.body += data

    def classes(self, tag: str) -> list[str]:
        return [attrs.get("class", "") for name, attrs in self.seen if name == tag]


def test_page() -> None:
    traces = [chat_trace(), chat_trace(segmented=False, view=dict(mode="continue", turn=2, served_tokens=9))]
    page = Page("".join(report(traces)))
    assert page.classes("section") == ["turn", "turn"]
    segments = [name for name in page.classes("div") if name.startswith("seg ")]
    for trace, turn in zip(traces, (segments[: len(traces[0].ranges)], segments[len(traces[0].ranges) :]), strict=True):
        assert len(turn) == len(trace.ranges)
        assert turn.count("seg dropped") == len(trace.ranges) - len(trace.selected_chunks)
        assert turn.count("seg query") == 1 and turn.count("seg pinned") == len(trace.forced_chunks) - 1
        assert turn.count("seg kept") == len(trace.selected_chunks) - len(trace.forced_chunks)
    for mark in ("□ dropped", "■ kept", "◆ pinned", "▶ query"):  # not by colour alone
        assert mark in page.body
    assert page.body.count("line one") >= 120 and "continue, turn 2" in page.body
    assert sum(tag == "tr" for tag, _ in page.seen) == len(segments) + 2
    ids = [attrs["id"] for _, attrs in page.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for tag, attrs in page.seen if tag == "a"]
    assert links and {link[1:] for link in links} <= set(ids)


def test_page_obeys_no_text() -> None:
    trace = chat_trace(HOSTILE)
    source = "".join(report([trace], title=HOSTILE))
    page = Page(source)
    assert [tag for tag, _ in page.seen].count("script") == 1
    assert not re.search(r'(src|href)\s*=\s*["\']?(?!#)\w', source.replace('name="viewport"', ""))
    assert "alert(1)" in page.body and "\x1b" not in source and "\x00" not in source
    assert "url(" not in source and "@import" not in source
    source.encode("utf-8")  # no surrogates are left


def test_page_without_text_or_mass() -> None:
    page = Page("".join(report([chat_trace(text=False), chat_trace(text=False, segmented=False)])))
    assert " 17 18 19 " in page.body
    assert "holds no trace" in Page("".join(report([]))).body


def test_page_of_a_long_prompt() -> None:
    trace = chat_trace("word " * 70_000)
    started = time.process_time()
    source = "".join(report([trace]))
    seconds = time.process_time() - started
    assert trace.input_tokens > 100_000
    assert len(source) < 12_000_000 and seconds < 10


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "trace.jsonl", tmp_path / "report.html"
    TraceWriter(path).write(chat_trace())
    page.write_text("an older one")
    assert cli.main(["trace", str(path), "-o", str(page)]) == 0
    assert capsys.readouterr().out == ""
    assert "line one" in Page(page.read_text(encoding="utf-8")).body and "trace.jsonl" in page.read_text()
    assert cli.main(["trace", str(path), "-o", str(path)]) == 1
    assert list(read_traces(path))  # not overwritten
    path.write_text("{}\n")
    assert cli.main(["trace", str(path), "-o", str(page)]) == 1
    assert "line 1" in capsys.readouterr().err and "line one" in page.read_text()  # the older page stays
    assert cli.main(["trace", str(tmp_path / "missing"), "-o", str(page)]) == 1
    assert cli.main(["trace", str(path), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "trace.jsonl"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["trace", str(path)])
    assert caught.value.code == 2
