"""The all-layer scorer against numpy, which reads its inputs from hidden rows that another callback captured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from captured_llama import CapturedLlama, new_capture
from laguna_gguf.errors import ConfigError, QueryError, ScorerError
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.llama import LlamaModel
from laguna_gguf.pflash.llama_options import LlamaOptions
from laguna_gguf.pflash.running_max import RunningMaxScorer
from random_drafter import TINY_QWEN3, TINY_QWEN35, DrafterShape, random_tensors, write_drafter
from reference.laguna_numpy import partial_rope
from reference.pflash_numpy import ReferenceFile, rms, running_max
from scorer_fixtures import EXACT, random_ids


def make(path: Path, **kwargs: Any) -> RunningMaxScorer:
    return RunningMaxScorer(DrafterFile(path), LlamaModel(path, LlamaOptions.from_keywords(EXACT | kwargs)))


def queries_and_keys(path: Path, shape: DrafterShape, ids: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By full-attention layer, for all tokens; rotated for Qwen3.5."""
    tensors = ReferenceFile(path).tensors
    layers = [layer for layer in range(shape.n_layer) if shape.is_full(layer)]
    capture = new_capture([layer - 1 for layer in layers if layer > 0], shape.n_embd)
    llama = CapturedLlama(path, capture)
    llama.decode_all(ids.tolist())
    inputs = list(capture.rows().transpose(1, 0, 2).astype(np.float64))
    if layers[0] == 0:
        inputs.insert(0, tensors["token_embd.weight"][ids])
    queries, keys = [], []
    for layer, x in zip(layers, inputs, strict=True):

        def project(name: str, n_head: int, gates: int, x: np.ndarray = x, layer: int = layer) -> np.ndarray:
            xh = tensors[f"blk.{layer}.attn_norm.weight"] * rms(x, shape.norm_eps)
            heads = (xh @ tensors[f"blk.{layer}.attn_{name}.weight"].T).reshape(len(x), n_head, gates, shape.head_dim)
            y = tensors[f"blk.{layer}.attn_{name}_norm.weight"] * rms(heads[:, :, 0], shape.norm_eps)
            if shape.arch == "qwen3":
                return y
            return np.stack([partial_rope(row, i, shape.rope_base, shape.n_rot) for i, row in enumerate(y)])

        queries.append(project("q", shape.n_head, 2 if shape.arch == "qwen35" else 1))
        keys.append(project("k", shape.n_head_kv, 1))
    return queries, keys


@pytest.mark.parametrize(("shape", "fixture"), [(TINY_QWEN35, "qwen35"), (TINY_QWEN3, "qwen3")])
@pytest.mark.parametrize("query", [(92, 100), (60, 64)])
def test_importance_is_the_oracles(
    request: pytest.FixtureRequest, shape: DrafterShape, fixture: str, query: tuple[int, int]
) -> None:
    path: Path = request.getfixturevalue(fixture)
    ids = random_ids(100)
    queries, keys = queries_and_keys(path, shape, ids)
    expected = running_max([q[query[0] : query[1]] for q in queries], keys, query[0])
    scores = make(path).score(ids, query=query)
    assert np.abs(scores.mass - expected).max() <= 1e-3 * expected.max()  # keys are kept in f16
    assert (scores.resume, scores.new_tokens, scores.probe) == (0, 100, None)


def test_micro_batches_change_nothing(qwen35: Path) -> None:
    ids = random_ids(300)
    whole = make(qwen35).score(ids, query=(220, 290)).mass
    assert np.array_equal(make(qwen35, n_ubatch=75).score(ids, query=(220, 290)).mass, whole)
    scorer = make(qwen35)
    assert [np.array_equal(scorer.score(ids, query=(220, 290)).mass, whole) for _ in range(2)] == [True, True]


def test_long_inputs_of_qwen3_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    scorer = make(write_drafter(tmp_path / "long.gguf", replace(TINY_QWEN3, context_length=65536)))
    with pytest.raises(ConfigError, match="exceed the drafter's context of 32768"):
        scorer.score(random_ids(32769), query=(32760, 32769))


def test_refusals(tmp_path: Path, qwen35: Path) -> None:
    with pytest.raises(QueryError):
        make(qwen35).score(random_ids(10), query=(0, 4))
    tensors = random_tensors(TINY_QWEN35)
    tensors["blk.5.ffn_down.weight"][0, 0] = np.nan
    with pytest.raises(ScorerError, match="not finite"):
        make(write_drafter(tmp_path / "nan.gguf", tensors=tensors)).score(random_ids(10), query=(5, 10))
