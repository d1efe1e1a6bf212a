"""What a scorer is compared with: BM25 of words, and the two ends of a prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Span = tuple[int, int]

K1, B = 1.2, 0.75  # the usual ones


def words(pieces: Sequence[str]) -> list[str]:
    """Case-folded words of token texts; what has no letter or digit is dropped."""
    folded = ("".join(letter for letter in piece.casefold() if letter.isalnum()) for piece in pieces)
    return [word for word in folded if word]


def bm25(pieces: Sequence[str], spans: Sequence[Span], query: Sequence[str]) -> list[float]:
    """Score of each segment for the words of a query, over the segments as a collection."""
    collection = [Counter(words(pieces[begin:end])) for begin, end in spans]
    lengths = [sum(counts.values()) for counts in collection]
    mean = sum(lengths) / max(len(lengths), 1) or 1.0
    holding = Counter(word for counts in collection for word in counts)
    scores = [0.0] * len(spans)
    for word in set(words(query)):
        n = holding[word]
        idf = math.log(1.0 + (len(spans) - n + 0.5) / (n + 0.5))
        for index, counts in enumerate(collection):
            if counts[word]:
                length = K1 * (1.0 - B + B * lengths[index] / mean)
                scores[index] += idf * counts[word] * (K1 + 1.0) / (counts[word] + length)
    return scores


def head_and_tail(n: int, question: Span, ratio: float) -> list[Span]:
    """The question and equally much of the beginning of the context and of its end, within ratio * n tokens."""
    left = max(0, int(ratio * n) - (n - question[0]))
    begin = left // 2
    return [(0, begin), (max(begin, question[0] - (left - begin)), n)]
