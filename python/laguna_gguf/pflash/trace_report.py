"""A page that shows traces: the text shaded by mass, what was kept of it and why.

States are told apart by marks, borders and patterns as well as by colour; shades differ in lightness.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.pflash.trace import Trace

DROPPED, KEPT, PINNED, QUERY = range(4)
STATES = (("dropped", "□"), ("kept", "■"), ("pinned", "◆"), ("query", "▶"))

LEVELS = (1, 2, 4, 8, 16)
"""Lifts from which a token is shaded more."""

_MAP_BINS = 400
_EXCERPT = 80  # characters of a segment in the table
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def report(traces: Iterable[Trace], title: str = "Prompt compression") -> Iterator[str]:
    """The page in pieces, one trace after another, each a turn. It loads nothing from elsewhere."""
    yield _HEAD.format(title=_text(title), style=_asset("trace_report.css"))
    count = 0
    for count, trace in enumerate(traces, 1):
        yield from _turn(_Turn(trace), count)
    if not count:
        yield "<p>The file holds no trace.</p>\n"
    yield f"<script>\n{_asset('trace_report.js')}</script>\n</body>\n</html>\n"


class _Turn:
    """A trace by token and by range."""

    def __init__(self, trace: Trace) -> None:
        n = trace.input_tokens
        self.trace = trace
        self.ranges = trace.ranges
        self.begins = np.array([begin for begin, _ in self.ranges] or [0])
        lengths = np.array([end - begin for begin, end in self.ranges] or [1])
        scores = np.array(trace.chunk_scores or [0.0])
        if trace.token_mass is not None:
            mass = np.array(trace.token_mass)
            sums = np.add.reduceat(np.append(mass, 0.0), np.array(self.ranges or [(0, n)]).ravel())[::2]
        else:
            sums = scores if trace.candidate_score == "sum" else scores * lengths
            mass = np.zeros(n)
            for (begin, end), value in zip(self.ranges, sums.tolist(), strict=False):
                mass[begin:end] = value / (end - begin)
        mean = float(mass.sum()) / n if n and mass.sum() > 0 else 1.0
        self.sums = sums
        self.lifts = sums / lengths / mean
        self.token_lifts = mass / mean

        self.states = np.full(n, DROPPED)
        self.range_states = [DROPPED] * len(self.ranges)
        forced = set(trace.forced_chunks)
        for ordinal in trace.selected_chunks:
            begin, end = self.ranges[ordinal]
            self.range_states[ordinal] = PINNED if ordinal in forced else KEPT
            self.states[begin:end] = self.range_states[ordinal]
            if begin < trace.query_end and trace.query_begin < end:
                self.range_states[ordinal] = QUERY
        asks = np.zeros(n, dtype=bool)
        for begin, end in [(trace.query_begin, trace.query_end), *((b, e) for b, e, _ in trace.parser.windows)]:
            asks[begin:end] = True
        self.asks = asks
        self.shades = np.where(asks, len(LEVELS) + 1, 0) + np.searchsorted(LEVELS, self.token_lifts, side="right")
        self.raw = trace.text.encode("utf-8", "surrogateescape") if trace.text is not None else None

    def count(self, state: int) -> int:
        return int((self.states == state).sum())

    def text(self, begin: int, end: int) -> str:
        """Text of tokens; a character that an edge splits goes to the first of its tokens."""
        if self.raw is None or self.trace.token_offsets is None:
            return " ".join(map(str, self.trace.input_ids[begin:end])) + " "
        first, last = (_whole(self.raw, self.trace.token_offsets[edge]) for edge in (begin, end))
        return self.raw[first:last].decode("utf-8", "replace")

    def runs(self, begin: int, end: int) -> Iterator[str]:
        """The tokens as HTML, neighbours of the same shade in one element."""
        shades: NDArray = self.shades[begin:end]
        cuts = [begin, *(np.flatnonzero(shades[1:] != shades[:-1]) + begin + 1).tolist(), end]
        for first, last in pairwise(cuts):
            text, shade = _text(self.text(first, last)), int(self.shades[first])
            if self.asks[first]:
                text = text.replace("\n", "↵\n")  # a query may be nothing else
            yield text if shade == 0 else f"<i class=m{shade}>{text}</i>"


def _turn(turn: _Turn, number: int) -> Iterator[str]:
    trace, parser = turn.trace, turn.trace.parser
    view = trace.view or {}
    served = f"{view.get('mode')}, turn {view.get('turn')}, {view.get('served_tokens')} tokens served" if view else ""
    facts = {
        "query rule": parser.selection_rule,
        "scorer": trace.scorer,
        "segments": trace.segmentation if trace.segments else f"{trace.segmentation}, {trace.chunk_size} tokens",
        "ranked by": trace.candidate_score,
        "mode": trace.selector_mode,
        "stopped": trace.stop_reason,
        "keep ratio": f"{trace.keep_ratio:.4g}",
        "mass kept": f"{trace.retained_mass:.1%}",
        "view": served,
        "ids": parser.fingerprint,
    }
    yield f'<section class="turn" id="turn-{number}">\n<h2>Turn {number}: '
    yield f"{trace.retained_tokens:,} of {trace.input_tokens:,} tokens kept</h2>\n<dl class=facts>"
    yield "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(str(v))}</dd></div>" for k, v in facts.items() if v)
    yield f"</dl>\n{_budget_bar(turn)}{_map(turn, number)}"
    yield '<details open><summary>Text</summary>\n<div class="text">\n'
    for ordinal, (begin, end) in enumerate(turn.ranges):
        name, mark = STATES[turn.range_states[ordinal]]
        yield (
            f'<div class="seg {name}" id="t{number}s{ordinal}"><div class=gutter><b>{mark} {name}</b>'
            f"<span>#{ordinal}</span><span>lift {turn.lifts[ordinal]:.3g}</span></div><div class=body dir=auto>"
        )
        yield from turn.runs(begin, end)
        yield "</div></div>\n"
    yield "</div></details>\n"
    yield from _table(turn, number)
    yield "</section>\n"


def _budget_bar(turn: _Turn) -> str:
    trace = turn.trace
    n = max(1, trace.input_tokens)
    pinned = turn.count(PINNED)
    kept = turn.count(KEPT)
    free = max(0, trace.token_budget - trace.retained_tokens)
    dropped = max(0, n - pinned - kept - free)
    parts = (("pinned", pinned), ("kept", kept), ("free", free), ("dropped", dropped))
    bar = "".join(
        f'<span class="{name}" style="width:{100 * value / n:.3f}%"></span>' for name, value in parts if value
    )
    names = {"pinned": "must be kept", "kept": "kept", "free": "budget left", "dropped": "dropped"}
    legend = "".join(f'<li><span class="key {name}"></span>{names[name]} {value:,}</li>' for name, value in parts)
    return (
        f'<div class="bar" role="img" aria-label="budget {trace.token_budget} of {n} tokens">{bar}</div>\n'
        f"<ul class=legend>{legend}<li>budget {trace.token_budget:,} of {n:,} tokens</li></ul>\n"
    )


def _map(turn: _Turn, number: int) -> str:
    """The whole prompt in one strip: mass as bars, and below them the states."""
    n = turn.trace.input_tokens
    if not n:
        return ""
    bins = min(_MAP_BINS, n)
    edges = np.linspace(0, n, bins + 1).astype(int)
    lifts = np.add.reduceat(turn.token_lifts, edges[:-1]) / np.diff(edges)
    heights = np.clip(np.log2(1 + lifts) / np.log2(1 + max(lifts.max(), 1.0)) * 40, 0.5, 40)
    bars = "".join(f"M{x} 42v-{height:.1f}" for x, height in enumerate(heights.tolist()))
    strips = ""
    for state, (name, _) in enumerate(STATES[:QUERY]):
        share = np.add.reduceat((turn.states == state).astype(float), edges[:-1]) / np.diff(edges)
        path = "".join(f"M{x} 58v-{14 * value:.1f}" for x, value in enumerate(share.tolist()) if value > 0 and state)
        strips += f'<path class="{name}" d="{path}"/>' if path else ""
    targets = np.searchsorted(turn.begins, (edges[:-1] + edges[1:]) // 2, side="right") - 1
    return (
        f'<svg class="map" viewBox="-0.5 0 {bins} 60" preserveAspectRatio="none" role="img" data-turn="{number}" '
        f'data-targets="{" ".join(map(str, np.maximum(targets, 0).tolist()))}" aria-label="mass by position">'
        f'<path class="mass" d="{bars}"/>{strips}</svg>\n'
    )


def _table(turn: _Turn, number: int) -> Iterator[str]:
    yield "<details><summary>Segments</summary>\n<table><thead><tr>"
    for name in ("#", "from", "to", "tokens", "mass", "lift", "score", "state", "begins with"):
        yield f"<th><button>{name}</button></th>"
    yield "</tr></thead><tbody>\n"
    for ordinal, (begin, end) in enumerate(turn.ranges):
        state = STATES[turn.range_states[ordinal]]
        values = (f"{turn.sums[ordinal]:.3e}", f"{turn.lifts[ordinal]:.3g}", f"{turn.trace.chunk_scores[ordinal]:.3e}")
        cells = (begin, end, end - begin, *values)
        start = " ".join(turn.text(begin, min(end, begin + 40)).split())[:_EXCERPT]
        yield (
            f'<tr class="{state[0]}"><td><a href="#t{number}s{ordinal}">{ordinal}</a></td>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + f"<td>{state[1]} {state[0]}</td><td>{_text(start)}</td></tr>\n"
        )
    yield "</tbody></table></details>\n"


def _whole(raw: bytes, at: int) -> int:
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


def _text(text: str) -> str:
    return html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True)


def _asset(name: str) -> str:
    return files("laguna_gguf").joinpath("data", name).read_text(encoding="utf-8")


_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<nav id="turns"></nav>
<p class="controls">
<label><input type="checkbox" data-hide="dropped" checked> □ dropped</label>
<label><input type="checkbox" data-hide="kept" checked> ■ kept</label>
<label><input type="checkbox" data-hide="pinned" checked> ◆ pinned</label>
<label><input type="checkbox" id="full"> dropped text in full</label>
<span class="shades">mass a token, against the mean:
<i class=m0>below</i> <i class=m1>1</i> <i class=m2>2</i> <i class=m3>4</i> <i class=m4>8</i> <i class=m5>16 times</i>
<i class=m6>asks</i></span>
</p>
</header>
"""
