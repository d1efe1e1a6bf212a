"""What a compression gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.pflash.candidates import merge
from laguna_gguf.pflash.segmentation import Span

BELOW_THRESHOLD = "below_threshold"
COMPRESSION_OFF = "compression_off"


@dataclass(frozen=True)
class Compressed:
    """What is left of a prompt.

    Of a chat `text` is what the target gets; where a conversation is continued it holds more than this prompt's own
    selection, which all other fields describe up to `trace`.
    """

    ids: NDArray[np.int32]
    """Kept drafter tokens, in source order."""
    spans: list[Span]
    """The same as ranges of the prompt; ranges that touch are one."""
    text: str
    budget: int
    """Drafter tokens that might be kept."""
    retained_tokens: int
    stop_reason: str
    """budget_reached, top_p_reached or candidates_exhausted; of a chat that was not compressed below_threshold or
    compression_off."""
    retained_mass: float
    """Share of the optional mass that was kept."""
    timings: dict[str, Any]
    """As `usage.timings.pflash`: compress_ms (all that the caller waited for), scorer_resume, ..."""
    trace: dict[str, Any]
    """As a line of PFLASH_TRACE_PATH."""
    byte_spans: list[Span] | None = None
    """Of a chat: the bytes of the prompt that `text` holds, in order, those of earlier turns' selections included. None
    for other texts, and where the drafter's tokens do not spell the prompt byte for byte (text that is not UTF-8)."""
    ceiling: int | None = None
    """Of a chat that was compressed: target tokens that this prompt's own selection may take."""
    inserted: Sequence[tuple[int, str]] = ()
    """Of a chat: recalled excerpts in `text` as (byte of the prompt before which they stand, text)."""

    @property
    def is_whole(self) -> bool:
        """Whether a chat came back as it was, unread."""
        return self.stop_reason in (BELOW_THRESHOLD, COMPRESSION_OFF)

    def part(self, prompt: str | bytes, begin: int, end: int) -> str | None:
        """What `text` holds of bytes [begin, end) of the prompt, such as those of one message, excerpts that were
        inserted there included. Characters that a span cuts are left out. None where `byte_spans` is None."""
        if self.byte_spans is None:
            return None
        raw = prompt if isinstance(prompt, bytes) else prompt.encode("utf-8", "surrogateescape")
        at, pieces = begin, []
        for place, text in [*(cut for cut in self.inserted if begin <= cut[0] <= end), (end, "")]:
            kept = [
                (max(first, at), min(last, place)) for first, last in self.byte_spans if first < place and at < last
            ]
            pieces += [raw[slice(*_whole_characters(raw, *span))] for span in merge(kept)]
            pieces.append(text.encode())
            at = place
        return b"".join(pieces).decode("utf-8", "replace")


def _whole_characters(raw: bytes, begin: int, end: int) -> Span:
    """The range without characters of UTF-8 that begin before it or end behind it."""
    while begin < end and _is_inside(raw, begin):
        begin += 1
    while begin < end and _is_inside(raw, end):
        end -= 1
    return begin, end


def _is_inside(raw: bytes, place: int) -> bool:
    """Whether a cut here would be inside a character."""
    return place < len(raw) and raw[place] & 0xC0 == 0x80


def timings(
    began: float,
    *,
    input_tokens: int,
    kept_tokens: int,
    keep_ratio: float,
    compressed_tokens: int,
    rule: str,
    history_queries: int,
    resume: int,
    new_tokens: int,
    forward_ms: float,
    view: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`usage.timings.pflash` of a compression that began at this perf_counter."""
    return {
        "compress_ms": (perf_counter() - began) * 1e3,
        "drafter_input_tokens": input_tokens,
        "kept_tokens": kept_tokens,
        "keep_ratio": keep_ratio,
        "compressed_tokens": compressed_tokens,
        "query_rule": rule,
        "history_queries": history_queries,
        "scorer_resume": resume,
        "scorer_new_tokens": new_tokens,
        "scorer_forward_ms": forward_ms,
        "view": view,
    }
