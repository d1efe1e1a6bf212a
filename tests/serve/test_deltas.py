"""Streamed pieces of any text, cut anywhere, with any stop strings: together they are the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laguna_gguf.serve.deltas import Deltas

BYTES = st.lists(st.sampled_from([b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xff", b"\xf0\x9f", b"\x98\x80", b"", b"bab"]))
STOPS = st.lists(st.sampled_from(["ab", "aba", "bb", "\u00e9", "a\u00e9b", "\U0001f600", "bab"]), max_size=3)


@given(BYTES, STOPS)
def test_pieces_make_the_text(pieces: list[bytes], stops: list[str]) -> None:
    emitted: list[str] = []
    deltas = Deltas(emitted.append)
    deltas.begin(stops)
    whole = b""
    for piece in pieces:
        deltas.add(piece)
        whole += piece
        found = [whole.index(stop.encode()) for stop in stops if stop.encode() in whole]
        if found:
            whole = whole[: found[0]]  # llama_cpp ends at the first stop string of the request that is there
            break
    text = whole.decode("utf-8", "ignore")
    assert text.startswith("".join(emitted))
    deltas.finish(text)
    assert "".join(emitted) == text
    assert emitted[0] == "" and emitted.count("") == 1


def test_nothing_waits_longer_than_it_must() -> None:
    emitted: list[str] = []
    deltas = Deltas(emitted.append)
    deltas.begin(["STOP"])
    for piece, so_far in ((b"one S", "one "), (b"T", "one "), (b"x", "one STx"), (b"\xff ok", "one STx ok")):
        deltas.add(piece)
        assert "".join(emitted) == so_far
