"""Drafting over a part of the vocabulary.

The output head is the drafter's largest product on a CPU: at XS-2.1's shapes 28 % of the work of a drafted row. Drafts
may leave rare tokens out: the target then rejects where one was due, and the text stays the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.errors import ConfigError, TargetMismatchError

DraftVocab = Sequence[int] | NDArray[np.integer] | tuple[int, str]
"""Token ids, or (n, text): the n most frequent tokens of a text."""


def draft_vocabulary(wanted: DraftVocab, n_vocab: int, tokenize: Callable[[str], Sequence[int]]) -> NDArray[np.int32]:
    """Ascending ids int32 [n] without repeats. Raises ConfigError for anything but ids below n_vocab, or none."""
    if isinstance(wanted, tuple) and len(wanted) == 2 and isinstance(wanted[1], str):
        return most_frequent(tokenize(wanted[1]), wanted[0])
    try:
        ids = np.unique(np.asarray(wanted))
    except (TypeError, ValueError) as error:
        raise _refusal(wanted) from error
    if np.ndim(wanted) != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise _refusal(wanted)
    if ids[0] < 0 or ids[-1] >= n_vocab:
        raise ConfigError(f"draft_vocab has ids {ids[0]}..{ids[-1]}; needed 0..{n_vocab - 1}")
    return ids.astype(np.int32)


def most_frequent(tokens: Sequence[int], n: int) -> NDArray[np.int32]:
    """The n most frequent of some tokens, ascending (fewer where there are fewer); of equals those with lower ids."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"draft_vocab: {n!r} tokens wanted; needed an integer >= 1")
    ids, counts = np.unique(np.asarray(tokens, np.int32), return_counts=True)
    if not ids.size:
        raise ConfigError("draft_vocab: the text has no tokens; needed one like what is to be generated")
    return np.sort(ids[np.argsort(-counts, kind="stable")[:n]])


def output_rows(target: str | os.PathLike[str], ids: NDArray[np.int32]) -> tuple[int, NDArray[np.uint8]]:
    """(ggml type, bytes uint8 [n, row bytes]) of some rows of a target file's output head.

    Read from the file: what llama.cpp made of them in memory may be rearranged for its kernels.
    """
    file = _native.GgufFile(os.fspath(target))
    tensor = file.tensor("output.weight") or file.tensor("token_embd.weight")
    if tensor is None:
        raise TargetMismatchError(f"{target} has neither output.weight nor token_embd.weight")
    rows = tensor.data().reshape(tensor.ne[1], -1)
    return tensor.ggml_type, np.ascontiguousarray(rows[ids])


def _refusal(wanted: object) -> ConfigError:
    return ConfigError(
        f"draft_vocab is {wanted!r:.80}; needed token ids, or (n, text) for the n most frequent of a text"
    )
