"""Drafting over a part of the vocabulary: the same logits for its tokens, never another token, the same text."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from laguna_gguf import SpecSession, load_drafter
from laguna_gguf.dflash.draft_vocab import draft_vocabulary, most_frequent, output_rows
from laguna_gguf.dflash.drafter import Drafter
from laguna_gguf.errors import ConfigError
from measure_demo_pair import DATA, load_prompts
from session_tools import GREEDY, SAMPLED, plain_llama, spec_session, spread, take, text_ids
from tiny_models import TINY_TARGET, write_tiny_target

N_CAPTURED, N_EMBD = 3, 64


def features(n_rows: int = 40) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((n_rows, N_CAPTURED, N_EMBD)).astype(np.float32)


def limit(drafter: Drafter, target: Path, ids: np.ndarray) -> None:
    drafter.limit_vocabulary(ids, *output_rows(target, ids))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("on_device", [False, True])
def test_logits_are_those_of_the_whole_vocabulary(
    tmp_path: Path, tiny_drafter: Path, dtype: str, on_device: bool
) -> None:
    target = write_tiny_target(tmp_path / "target.gguf", dtype=dtype)
    drafter = load_drafter(tiny_drafter, target=target, n_threads=1)
    drafter._native.argmax_on_device = on_device
    drafter.append_context(features())
    whole = drafter.draft(7, 15, return_logits=True).logits
    assert whole is not None
    ids = np.unique(np.random.default_rng(1).integers(0, TINY_TARGET.n_vocab, 60)).astype(np.int32)
    limit(drafter, target, ids)
    block = drafter.draft(7, 15, return_logits=True)
    assert block.logits is not None
    assert spread(block.logits[:, ids], whole[:, ids]) <= 1e-5
    others = np.setdiff1d(np.arange(TINY_TARGET.n_vocab), ids)
    assert np.isneginf(block.logits[:, others]).all()
    assert block.tokens.tolist() == block.logits.argmax(axis=1).tolist()
    drafter.limit_vocabulary(np.zeros(0, np.int32), 0, np.zeros(0, np.uint8))
    again = drafter.draft(7, 15, return_logits=True).logits
    np.testing.assert_array_equal(again, whole)


def test_the_whole_vocabulary_changes_nothing(tiny_target: Path, tiny_drafter: Path) -> None:
    drafter = load_drafter(tiny_drafter, target=tiny_target, n_threads=1)
    drafter.append_context(features())
    whole = drafter.draft(7, 15, return_logits=True)
    limit(drafter, tiny_target, np.arange(TINY_TARGET.n_vocab, dtype=np.int32))
    every = drafter.draft(7, 15, return_logits=True)
    assert whole.tokens.tolist() == every.tokens.tolist()
    np.testing.assert_array_equal(whole.logits, every.logits)


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED])
def test_text_is_the_plain_one(tiny_target: Path, tiny_drafter: Path, sampler: dict[str, float]) -> None:
    plain = plain_llama(tiny_target)
    session = spec_session(tiny_target, tiny_drafter, draft_vocab=list(range(30, 90)))
    drafted: set[int] = set()
    draft = session.draft

    def watched(anchor: int, wanted: int | None) -> list[int]:
        tokens = draft(anchor, wanted)
        drafted.update(tokens)
        return tokens

    session.draft = watched  # type: ignore[method-assign]
    for seed in range(4):
        ids = text_ids(30, seed)
        assert take(session, ids, 40, seed=seed, **sampler) == take(plain, ids, 40, seed=seed, **sampler)
    assert drafted and drafted <= set(range(30, 90))
    session.close()
    plain.close()


def test_quantised_head_and_text_of_the_demo_pair() -> None:
    """Q8_0 rows keep their bytes; half of the vocabulary brings most of the acceptance and the same text."""
    pair = (DATA / "demo-target-q8_0.gguf", DATA / "demo-drafter-q8_0.gguf")
    ids = np.array([1, 5, 77], np.int32)
    kind, rows = output_rows(pair[0], ids)
    head = next(t for t in GGUFReader(pair[0]).tensors if t.name == "output.weight")
    assert kind == head.tensor_type
    np.testing.assert_array_equal(rows, head.data[ids])
    text = load_prompts()[0]["prompt"]
    results = []
    for vocab in (None, (1024, "".join(p["prompt"] for p in load_prompts()))):
        session = spec_session(*pair, draft_vocab=vocab)
        session.reset_stats()
        prompt = session.tokenize(text.encode(), special=True)
        results.append((take(session, prompt, 60, **GREEDY), session.stats.mean_accepted_length))
        session.close()
    assert results[1][0] == results[0][0]
    assert results[1][1] > 0.8 * results[0][1]


def test_most_frequent_tokens() -> None:
    assert most_frequent([5, 9, 5, 2, 9, 5, 7], 2).tolist() == [5, 9]
    assert most_frequent([5, 9, 5, 2, 9, 5, 7], 3).tolist() == [2, 5, 9], "of equals the lower id"
    assert most_frequent([5, 9], 10).tolist() == [5, 9]


def test_frequent_tokens_of_a_text(tiny_target: Path, tiny_drafter: Path) -> None:
    text = "for i in range(10):\n    print(i)\n" * 20
    session = spec_session(tiny_target, tiny_drafter, draft_vocab=(12, text))
    expected = set(most_frequent(session.tokenize(text.encode(), add_bos=False), 12).tolist())
    session.eval(text_ids(30))
    block = session.drafter.draft(40, 7, return_logits=True)
    assert block.logits is not None
    assert set(np.flatnonzero(np.isfinite(block.logits[0])).tolist()) == expected
    session.close()


@pytest.mark.parametrize(
    "bad", [[], [-1, 4], [4, 10**6], [1.5], "text", (0, "text"), (True, "text"), (5, ""), [[1, 2]], 7, ["a"]]
)
def test_refusals(tiny_target: Path, tiny_drafter: Path, bad: object) -> None:
    with pytest.raises(ConfigError, match="draft_vocab"):
        SpecSession(tiny_target, tiny_drafter, draft_vocab=bad, n_ctx=64, verbose=False)


def test_native_half_checks_ids_and_bytes(tiny_target: Path, tiny_drafter: Path) -> None:
    drafter = load_drafter(tiny_drafter, target=tiny_target, n_threads=1)
    drafter.append_context(features())
    before = drafter.draft(7, 5).tokens.tolist()
    rows = np.zeros(2 * N_EMBD * 4, np.uint8)
    for ids, kind, data in [
        ([5, 4], 0, rows),
        ([4, 4], 0, rows),
        ([-1, 4], 0, rows),
        ([4, TINY_TARGET.n_vocab], 0, rows),
        ([4, 5], 0, rows[:-1]),
        ([4, 5], 999, rows),
        ([4, 5], -1, rows),
    ]:
        with pytest.raises(ConfigError, match="draft vocabulary"):
            drafter._native.limit_vocabulary(ids, kind, data)
    assert drafter.draft(7, 5).tokens.tolist() == before


def test_another_target_has_its_whole_vocabulary(tmp_path: Path, tiny_target: Path, tiny_drafter: Path) -> None:
    drafter = load_drafter(tiny_drafter, target=tiny_target, n_threads=1)
    limit(drafter, tiny_target, np.array([3, 4], np.int32))
    drafter.append_context(features())
    assert set(drafter.draft(7, 15).tokens.tolist()) <= {3, 4}
    llama = plain_llama(tiny_target)
    drafter.bind_target(llama)
    assert len(set(drafter.draft(7, 15).tokens.tolist()) - {3, 4}) > 0
    drafter.unbind_target()
    llama.close()


def test_draft_vocabulary_of_arrays() -> None:
    ids = draft_vocabulary(np.array([9, 3, 3], np.int64), 10, lambda text: [])
    assert ids.dtype == np.int32 and ids.tolist() == [3, 9]
