"""HiddenCapture inside llama.cpp: the residual rows of a tiny random target against the numpy reference.

Equality tests use an f32 KV cache, no flash attention and one thread.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from captured_llama import LAYERS, CapturedLlama, new_capture, prompt
from demo_pair.target_gguf import random_target
from laguna_gguf._native import HiddenCapture
from laguna_gguf.errors import CaptureError, LagunaError
from reference.laguna_numpy import ReferenceTarget
from tiny_models import TINIER_TARGET, TINY_TARGET, write_tiny_target


def captured_rows(
    path: Path, tokens: Sequence[int], n_ubatch: int, layers: Sequence[int] = LAYERS
) -> NDArray[np.float32]:
    """Rows of one decode of a prompt in a fresh context."""
    capture = new_capture(layers)
    llm = CapturedLlama(path, capture, n_ubatch=n_ubatch)
    capture.begin()
    llm.decode_all(tokens)
    assert capture.n_rows() == len(tokens)
    llm.close()
    return capture.rows()


def by_layer_spread(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest |difference| of any layer, in units of that layer's standard deviation."""
    return float((np.abs(got.astype(np.float64) - expected).max(axis=(0, 2)) / expected.std(axis=(0, 2))).max())


@pytest.mark.parametrize("layers", [LAYERS, tuple(range(8)), (0,), (7,), (3, 5)], ids=str)
def test_rows_against_the_reference(tiny_target: Path, layers: tuple[int, ...]) -> None:
    tokens = prompt(100)
    rows = captured_rows(tiny_target, tokens, 64, layers)
    assert rows.dtype == np.float32 and rows.shape == (100, len(layers), 64)
    residuals, _ = ReferenceTarget(tiny_target).forward(tokens)
    assert by_layer_spread(rows, residuals[:, layers]) <= 1e-4


def test_logits_against_the_reference(tiny_target: Path) -> None:
    tokens = prompt(80, seed=1)
    logits = CapturedLlama(tiny_target, None, n_ubatch=64).decode_all(tokens)
    _, expected = ReferenceTarget(tiny_target).forward(tokens)
    assert np.abs(logits - expected).max() <= 1e-4 * expected.std()


@pytest.mark.parametrize("n_tokens", [1, 2, 6, 7, 8, 13, 14, 15, 21, 63, 64, 65, 70, 100, 128, 129, 200, 511, 512])
def test_rows_do_not_depend_on_the_micro_batch(tiny_target: Path, n_tokens: int) -> None:
    tokens = prompt(n_tokens, seed=n_tokens)
    rows = {n_ubatch: captured_rows(tiny_target, tokens, n_ubatch) for n_ubatch in (7, 64, 512)}
    for n_ubatch in (7, 64):
        # A last micro-batch of one row runs in llama.cpp's single-row kernels, which round differently.
        n_same = n_tokens - (n_tokens % n_ubatch == 1 and n_tokens > 1)
        np.testing.assert_array_equal(rows[n_ubatch][:n_same], rows[512][:n_same])
        assert by_layer_spread(rows[n_ubatch], rows[512]) <= 1e-4


def test_rows_of_single_row_kernels(tiny_target: Path) -> None:
    tokens = prompt(150, seed=5)
    rows = captured_rows(tiny_target, tokens, 512)
    single = captured_rows(tiny_target, tokens, 1)
    assert by_layer_spread(single, rows) <= 5e-3


def test_rows_of_consecutive_decodes(tiny_target: Path) -> None:
    tokens = prompt(120, seed=6)
    whole = captured_rows(tiny_target, tokens, 512)
    capture = new_capture()
    llm = CapturedLlama(tiny_target, capture, n_ubatch=16)
    capture.begin()
    llm.decode_all(tokens[:50])
    assert capture.n_rows() == 50
    llm.decode_all(tokens[50:90], 50)
    assert capture.n_rows() == 90
    assert by_layer_spread(capture.rows(), whole[:90]) <= 1e-4
    capture.begin()
    assert capture.n_rows() == 0
    assert capture.rows().shape == (0, 3, 64)
    llm.decode_all(tokens[90:], 90)
    assert by_layer_spread(capture.rows(), whole[90:]) <= 1e-4


def test_rows_are_a_copy(tiny_target: Path) -> None:
    capture = new_capture()
    llm = CapturedLlama(tiny_target, capture)
    capture.begin()
    llm.decode_all(prompt(9))
    rows = capture.rows()
    kept = rows.copy()
    capture.begin()
    llm.decode_all(prompt(20, seed=1), 9)
    np.testing.assert_array_equal(rows, kept)


def test_last_layer_is_cropped_to_flagged_rows(tiny_target: Path) -> None:
    tokens = prompt(40, seed=2)
    flagged = [i >= 35 for i in range(40)]
    whole = captured_rows(tiny_target, tokens, 512)
    last = new_capture((7,))
    llm = CapturedLlama(tiny_target, last, n_ubatch=16)
    last.begin()
    llm.decode(tokens, 0, flagged)
    assert last.n_rows() == 5
    assert by_layer_spread(last.rows(), whole[35:, 2:]) <= 1e-4

    capture = new_capture()
    llm = CapturedLlama(tiny_target, capture, n_ubatch=16)
    capture.begin()
    llm.decode(tokens, 0, flagged)
    with pytest.raises(CaptureError):
        capture.n_rows()
    with pytest.raises(CaptureError):
        capture.rows()
    # The next decode starts clean.
    capture.begin()
    llm.decode_all(tokens[:3], 40)
    assert capture.n_rows() == 3


def test_layer_names_match_whole(tmp_path: Path) -> None:
    config = replace(TINIER_TARGET, n_layer=16)
    path = write_tiny_target(tmp_path / "deep.gguf", config)
    tokens = prompt(20, seed=3)
    residuals, _ = ReferenceTarget(path).forward(tokens)
    for layers in ((1,), (13,), (1, 13), (1, 10, 11, 15)):
        capture = new_capture(layers, config.n_embd)
        llm = CapturedLlama(path, capture, n_ubatch=8)
        capture.begin()
        llm.decode_all(tokens)
        assert capture.n_rows() == 20
        assert by_layer_spread(capture.rows(), residuals[:, layers]) <= 1e-4


@pytest.mark.parametrize("n_ubatch", [1, 7, 512])
def test_logits_with_and_without_capture(tiny_target: Path, n_ubatch: int) -> None:
    tokens = prompt(60, seed=4)
    plain = CapturedLlama(tiny_target, None, n_ubatch=n_ubatch)
    capture = new_capture()
    captured = CapturedLlama(tiny_target, capture, n_ubatch=n_ubatch)
    np.testing.assert_array_equal(captured.decode_all(tokens), plain.decode_all(tokens))
    capture.enabled = False
    np.testing.assert_array_equal(captured.decode_all(tokens[:9], 60), plain.decode_all(tokens[:9], 60))
    assert captured.kv_bytes() == plain.kv_bytes()
    assert capture.n_rows() == 60


def test_disabled_captures_nothing(tiny_target: Path) -> None:
    capture = HiddenCapture(list(LAYERS), 64)
    assert not capture.enabled
    llm = CapturedLlama(tiny_target, capture)
    capture.begin()
    llm.decode_all(prompt(10))
    assert capture.n_rows() == 0
    capture.enabled = True
    llm.decode_all(prompt(5), 10)
    assert capture.n_rows() == 5


@pytest.mark.parametrize("n_ubatch", [16, 512])
def test_stop_after_last_layer(tiny_target: Path, n_ubatch: int) -> None:
    tokens = prompt(90, seed=7)
    plain = CapturedLlama(tiny_target, None, n_ubatch=n_ubatch)
    capture = new_capture()
    stopped = CapturedLlama(tiny_target, capture, n_ubatch=n_ubatch)
    capture.begin()
    capture.stop_after_last = True
    for begin in (0, 40):
        piece = tokens[begin : begin + 40]
        plain.decode_all(piece, begin)
        stopped.decode(piece, begin, [True] * 40)
    assert capture.n_rows() == 80
    assert stopped.kv_bytes() == plain.kv_bytes()
    capture.stop_after_last = False
    for i in range(80, 90):
        np.testing.assert_array_equal(stopped.decode_all(tokens[i : i + 1], i), plain.decode_all(tokens[i : i + 1], i))
    assert capture.n_rows() == 90
    assert stopped.kv_bytes() == plain.kv_bytes()
    residuals, _ = ReferenceTarget(tiny_target).forward(tokens)
    assert by_layer_spread(capture.rows(), residuals[:, LAYERS]) <= 1e-4


def test_nonfinite_features_are_zeroed_and_counted(tmp_path: Path) -> None:
    embedding = random_target(TINY_TARGET, 1)["token_embd.weight"]
    embedding[300, 5] = np.inf
    embedding[301, :] = np.nan
    path = write_tiny_target(tmp_path / "nonfinite.gguf", replaced={"token_embd.weight": embedding})
    capture = new_capture((0, 2))
    llm = CapturedLlama(path, capture)
    capture.stop_after_last = True
    tokens = [token % 300 for token in prompt(10)]
    capture.begin()
    llm.decode_all(tokens)
    assert capture.n_nonfinite == 0
    good = capture.rows()
    assert np.isfinite(good).all() and (good != 0).all()
    capture.begin()
    llm.decode_all([301], 10)
    assert capture.n_nonfinite == 2 * 64
    assert (capture.rows() == 0).all()
    capture.begin()
    assert capture.n_nonfinite == 2 * 64  # counted since construction


def test_time_is_counted(tiny_target: Path) -> None:
    capture = new_capture()
    assert capture.ms == 0.0
    CapturedLlama(tiny_target, capture).decode_all(prompt(30))
    assert 0.0 < capture.ms < 10_000.0


@pytest.mark.parametrize(
    ("layers", "n_embd"), [([], 64), ([-1, 2], 64), ([2, 1], 64), ([1, 1], 64), ([1], 0), ([1], -64)], ids=str
)
def test_bad_arguments(layers: list[int], n_embd: int) -> None:
    with pytest.raises(LagunaError):
        HiddenCapture(layers, n_embd)


def test_wrong_width_is_an_error(tiny_target: Path) -> None:
    capture = new_capture(LAYERS, 48)
    llm = CapturedLlama(tiny_target, capture)
    capture.begin()
    llm.decode_all(prompt(5))
    with pytest.raises(CaptureError):
        capture.n_rows()
    with pytest.raises(CaptureError):
        capture.rows()


def test_missing_layer_is_an_error(tiny_target: Path) -> None:
    capture = new_capture((1, 8))
    llm = CapturedLlama(tiny_target, capture)
    capture.begin()
    llm.decode_all(prompt(5))
    with pytest.raises(CaptureError):
        capture.n_rows()


def test_two_contexts_in_one_process(tiny_target: Path) -> None:
    captures = [new_capture(), new_capture((0, 6))]
    llms = [CapturedLlama(tiny_target, capture, n_ubatch=32) for capture in captures]
    residuals, _ = ReferenceTarget(tiny_target).forward(prompt(30))
    for capture in captures:
        capture.begin()
    for begin in (0, 15):
        for llm in llms:
            llm.decode_all(prompt(30)[begin : begin + 15], begin)
    assert by_layer_spread(captures[0].rows(), residuals[:, LAYERS]) <= 1e-4
    assert by_layer_spread(captures[1].rows(), residuals[:, (0, 6)]) <= 1e-4


def test_one_graph_ends_everything_behind_the_stop(tiny_target: Path) -> None:
    """Later parts of a graph, here a second micro-batch, are not captured until the next begin()."""
    capture = new_capture([1, 4])
    capture.stop_after_last = capture.one_graph = True
    llama = CapturedLlama(tiny_target, capture, n_ubatch=16)
    tokens = prompt(32)
    llama.decode(tokens, 0, [False] * 32)
    assert capture.n_rows() == 16
    capture.begin()
    llama.decode(tokens[:10], 32, [False] * 10)
    assert capture.n_rows() == 10
