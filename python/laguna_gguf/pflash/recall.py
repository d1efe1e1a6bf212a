"""Excerpts of a conversation's earlier text, put before a new question."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from laguna_gguf.pflash.candidates import merge
from laguna_gguf.pflash.families import Family
from laguna_gguf.pflash.segmentation import Span

OPENING = "[Earlier in this conversation]\n"
CLOSING = "\n[End of earlier excerpts]\n\n"


def missing(wanted: Iterable[Span], present: Sequence[Span]) -> list[Span]:
    """What of `wanted` is not in `present`, as sorted spans that do not touch; both in any one unit."""
    holes: list[Span] = []
    have = merge(present)
    ends = [end for _, end in have]
    for begin, end in merge(wanted):
        at = bisect_right(ends, begin)
        while begin < end and at < len(have) and have[at][0] < end:
            if begin < have[at][0]:
                holes.append((begin, have[at][0]))
            begin = have[at][1]
            at += 1
        if begin < end:
            holes.append((begin, end))
    return holes


def clipped(spans: Iterable[Span], end: int) -> list[Span]:
    """What of the spans lies before `end`."""
    return [(begin, min(last, end)) for begin, last in spans if begin < end]


def excerpts(raw: bytes, spans: Iterable[Span], family: Family | None) -> list[str]:
    """The text of byte spans, without role markers and other control tokens, which become newlines, also where a span
    holds only a part of one. Characters cut by a span's edge are completed; blank excerpts are left out."""
    markers = _controls(raw, family) if family is not None else []
    starts = [begin for begin, _ in markers]
    found = []
    for begin, end in spans:
        pieces = []
        at = max(0, bisect_right(starts, begin) - 1)
        for marker_begin, marker_end in markers[at:]:
            if marker_begin >= end:
                break
            if marker_end > begin:
                pieces.append(_text(raw, begin, marker_begin))
                begin = min(marker_end, end)
        pieces.append(_text(raw, begin, end))
        text = "\n".join(pieces).strip()
        if text:
            found.append(text)
    return found


def block(texts: Sequence[str]) -> str:
    """The recall block of these excerpts; empty without any."""
    return OPENING + "\n\n".join(texts) + CLOSING if texts else ""


def _controls(raw: bytes, family: Family) -> list[Span]:
    markers = [match.span() for match in family.markers.finditer(raw)]
    return sorted([*markers, *missing((match.span() for match in family.others.finditer(raw)), markers)])


def _text(raw: bytes, begin: int, end: int) -> str:
    if begin >= end:
        return ""
    while begin > 0 and _continues(raw, begin):
        begin -= 1
    while end < len(raw) and _continues(raw, end):
        end += 1
    return raw[begin:end].decode("utf-8", "replace")


def _continues(raw: bytes, at: int) -> bool:
    return raw[at] & 0xC0 == 0x80
