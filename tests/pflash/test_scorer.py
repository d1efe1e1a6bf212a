"""The block-15 scorer against a numpy oracle, and everything it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laguna_gguf import _native
from laguna_gguf.errors import ConfigError, OutOfMemoryError, QueryError, ScorerError
from laguna_gguf.pflash.scorer import Scorer, check_request
from laguna_gguf.pflash.trunk import Trunk
from random_drafter import TINY_QWEN35, random_tensors, write_drafter
from reference.pflash_numpy import ReferenceScorer, probe_scores
from scorer_fixtures import EXACT, make_scorer, random_ids, random_probe, write_random_probe
from tap_model import TAP_SEED, TAP_SHAPE

REQUESTS: list[dict[str, Any]] = [
    {"query": (142, 150)},
    {"query": (149, 150)},
    {"query": (140, 150), "windows": [(100, 108, 1.0), (40, 48, 0.5), (0, 5, 0.25)]},
    {"query": (100, 110), "suffix_candidates": True},
    {"query": (100, 110), "windows": [(20, 28, 1.0)], "suffix_candidates": True},
    {"query": (60, 150)},
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_mass_is_the_oracles(qwen35: Path, request_: dict[str, Any]) -> None:
    scorer = make_scorer(qwen35)
    ids = random_ids(150)
    scores = scorer.score(ids, **request_)
    expected = ReferenceScorer(qwen35).mass(scorer.trunk.taps(ids), **request_)
    assert scores.mass.dtype == np.float64 and scores.mass.shape == (150,)
    assert np.abs(scores.mass - expected).max() <= 1e-5 * expected.max()
    assert abs(scores.mass.sum() - 1) < 1e-6
    assert np.array_equal(scores.mass == 0, expected == 0)  # the same tokens are no candidates
    assert (scores.resume, scores.new_tokens) == (0, 150) and scores.probe is None


def test_end_to_end_from_transformers_taps(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "d.gguf", TAP_SHAPE, seed=TAP_SEED)
    stored = np.load(Path(__file__).parents[1] / "data" / "qwen35_tap.npz")
    expected = ReferenceScorer(path).mass(stored["taps"], (142, 150), [(50, 58, 1.0)])
    mass = make_scorer(path).score(stored["ids"], query=(142, 150), windows=[(50, 58, 1.0)]).mass
    assert np.abs(mass - expected).max() <= 1e-4 * expected.max()


def test_block_13_of_qwen3(qwen3: Path) -> None:
    scorer = make_scorer(qwen3)
    ids = random_ids(90)
    expected = ReferenceScorer(qwen3).mass(scorer.trunk.taps(ids), (80, 90))
    assert np.abs(scorer.score(ids, query=(80, 90)).mass - expected).max() <= 1e-5 * expected.max()


def native_scorer(path: Path) -> _native.Block15Scorer:
    file = Trunk(str(path), **EXACT).file
    config = {key: getattr(file, key) for key in ("n_embd", "n_head", "n_head_kv", "head_dim", "norm_eps")}
    return _native.Block15Scorer(config, vars(file.scoring_weights()), None, 1)


def test_blocks_of_keys_and_long_windows(qwen35: Path) -> None:
    """More keys than a block holds, more rows than a tile, several windows at once."""
    rng = np.random.default_rng(3)
    taps = rng.standard_normal((2500, TINY_QWEN35.n_embd)).astype(np.float32)
    scorer = native_scorer(qwen35)
    store = scorer.new_store()
    for piece in np.array_split(taps, 9):
        scorer.append(np.ascontiguousarray(piece), store)
    windows = [(2400, 2500), (1000, 1070), (5, 6)]
    allowed = [[(0, 2400)], [(0, 1000), (1070, 2400)], [(0, 5), (6, 2400)]]
    masses = scorer.mass(store, [(taps[b:e], a) for (b, e), a in zip(windows, allowed, strict=True)])
    reference = ReferenceScorer(qwen35)
    np.testing.assert_allclose(store.keys(), reference.keys(taps), atol=2e-5)
    for mass, window, ranges in zip(masses, windows, allowed, strict=True):
        mask = np.zeros(2500, dtype=bool)
        for begin, end in ranges:
            mask[begin:end] = True
        expected = reference.window_mass(taps, window, mask)
        assert np.abs(mass - expected).max() <= 1e-5 * expected.max()


def test_sharp_attention_stays_exact(qwen35: Path) -> None:
    """Keys equal to the query: scores far apart, most probabilities vanish."""
    rng = np.random.default_rng(4)
    taps = rng.standard_normal((1200, TINY_QWEN35.n_embd)).astype(np.float32) * 100
    taps[700] = taps[1199]
    scorer, reference = native_scorer(qwen35), ReferenceScorer(qwen35)
    scorer_store = scorer.new_store()
    scorer.append(taps, scorer_store)
    mask = np.arange(1200) < 1199
    expected = reference.window_mass(taps, (1199, 1200), mask)
    mass = scorer.mass(scorer_store, [(taps[1199:], [(0, 1199)])])[0]
    assert np.abs(mass - expected).max() <= 1e-5 * expected.max()


def test_permuted_keys_permute_the_mass(qwen35: Path) -> None:
    rng = np.random.default_rng(5)
    taps = rng.standard_normal((1100, TINY_QWEN35.n_embd)).astype(np.float32)
    order = rng.permutation(1090)
    scorer = native_scorer(qwen35)

    def mass(rows: np.ndarray) -> np.ndarray:
        store = scorer.new_store()
        scorer.append(np.ascontiguousarray(rows), store)
        return scorer.mass(store, [(taps[1090:], [(0, 1090)])])[0]

    np.testing.assert_allclose(mass(taps)[order], mass(np.concatenate([taps[order], taps[1090:]]))[:1090], rtol=1e-5)


@pytest.mark.parametrize("n_ubatch", [64, 100, 512])
def test_micro_batches_of_64_and_more_change_no_bit(qwen35: Path, n_ubatch: int) -> None:
    ids = random_ids(700)
    whole = make_scorer(qwen35, n_ubatch=700, n_batch=700).score(ids, query=(690, 700)).mass
    assert np.array_equal(make_scorer(qwen35, n_ubatch=n_ubatch).score(ids, query=(690, 700)).mass, whole)


@pytest.mark.parametrize("n_ubatch", [1, 5, 33])
def test_smaller_micro_batches_change_rounding_only(qwen35: Path, n_ubatch: int) -> None:
    ids = random_ids(100)
    whole = make_scorer(qwen35).score(ids, query=(90, 100)).mass
    assert np.abs(make_scorer(qwen35, n_ubatch=n_ubatch).score(ids, query=(90, 100)).mass - whole).max() <= (
        1e-3 * whole.max()
    )


def test_default_cache_types_stay_close(qwen35: Path) -> None:
    ids = random_ids(300)
    exact = make_scorer(qwen35).score(ids, query=(290, 300)).mass
    half = make_scorer(qwen35, type_k=1, type_v=1).score(ids, query=(290, 300)).mass
    assert 0 < np.abs(half - exact).max() <= 1e-2 * exact.max()


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_other_weight_types(tmp_path: Path, qwen35: Path, dtype: Any) -> None:
    scorer = make_scorer(write_drafter(tmp_path / "d.gguf", dtype=dtype))
    ids = random_ids(120)
    exact = make_scorer(qwen35).score(ids, query=(110, 120)).mass
    assert np.abs(scorer.score(ids, query=(110, 120)).mass - exact).max() <= 0.1 * exact.max()


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
@pytest.mark.parametrize("subunit", [True, False])
def test_probe_is_the_oracles(tmp_path: Path, qwen35: Path, gelu: str, subunit: bool) -> None:
    from dataclasses import replace

    probe = replace(random_probe(TINY_QWEN35.n_embd, subunit=subunit), gelu=gelu)
    path = write_random_probe(tmp_path / "probe.gguf", qwen35, probe)
    scorer = make_scorer(qwen35, probe=path)
    ids = random_ids(300)
    scores = scorer.score(ids, query=(290, 300))
    unit, inner = probe_scores(path, scorer.trunk.taps(ids))
    assert scores.probe is not None and scores.probe.dtype == np.float32
    assert np.abs(scores.probe - unit).max() < 1e-5 and unit.std() > 0.1
    if subunit:
        assert scores.subunit is not None and inner is not None and np.abs(scores.subunit - inner).max() < 1e-5
    else:
        assert scores.subunit is None and inner is None
    assert scorer.score(ids, query=(290, 300), run_probe=False).probe is None


def test_probe_of_one_token_and_wide_convolution(tmp_path: Path, qwen35: Path) -> None:
    probe = random_probe(TINY_QWEN35.n_embd, taps=9)
    path = write_random_probe(tmp_path / "probe.gguf", qwen35, probe)
    taps = np.random.default_rng(0).standard_normal((2, TINY_QWEN35.n_embd)).astype(np.float32)
    for n in (1, 2):
        raw = np.full((n, 2), 0.3, np.float32)
        assert probe.scores(raw)[0].shape == (n,)
    unit, _ = probe_scores(path, taps)
    assert unit.shape == (2,)


@pytest.mark.parametrize(
    ("query", "windows"),
    [
        ((0, 8), []),  # nothing before it
        ((8, 8), []),
        ((9, 8), []),
        ((-4, 4), []),
        ((90, 101), []),
        ((1.5, 3), []),
        (None, []),
        ((90, 100), [(0, 0, 1.0)]),
        ((90, 100), [(0, 5, 0.0)]),
        ((90, 100), [(0, 5, -1.0)]),
        ((90, 100), [(0, 5, float("nan"))]),
        ((90, 100), [(0, 5, float("inf"))]),
        ((90, 100), [(0, 5)]),
        ((90, 100), [(-5, 5, 1.0)]),
        ((90, 100), [(95, 101, 1.0)]),
        ((90, 100), [(0, 90, 1.0)]),  # all that it might look at is itself
    ],
)
def test_windows_are_checked_before_anything_runs(qwen35: Path, query: Any, windows: list[Any]) -> None:
    with pytest.raises(QueryError):
        check_request(random_ids(100), query, windows, False)


def test_widest_query(qwen35: Path) -> None:
    ids = random_ids(600)
    assert abs(make_scorer(qwen35).score(ids, query=(88, 600)).mass.sum() - 1) < 1e-6
    with pytest.raises(QueryError, match="1 to 512 tokens"):
        check_request(ids, (87, 600), [], False)


def test_values_that_are_not_finite_fail_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors(TINY_QWEN35)
    tensors["blk.7.ffn_down.weight"][0, 0] = np.inf
    scorer = make_scorer(write_drafter(tmp_path / "bad.gguf", tensors=tensors), sessions=1)
    runs = []
    original = Scorer._attempt
    monkeypatch.setattr(Scorer, "_attempt", lambda self, *args: runs.append(1) or original(self, *args))
    with pytest.raises(ScorerError, match="not finite"):
        scorer.score(random_ids(30), query=(20, 30), session="a")
    assert len(runs) == 2
    assert len(scorer._sessions.values()[0].ids) == 0


def test_a_passing_fault_is_repaired(qwen35: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = make_scorer(qwen35)
    ids = random_ids(60)
    expected = scorer.score(ids, query=(50, 60)).mass
    original, faults = Scorer._attempt, [ScorerError("the scorer met values that are not finite")]

    def once(self: Scorer, *args: Any) -> Any:
        if faults:
            raise faults.pop()
        return original(self, *args)

    monkeypatch.setattr(Scorer, "_attempt", once)
    assert np.array_equal(scorer.score(ids, query=(50, 60)).mass, expected)


def test_native_arguments_are_checked(qwen35: Path) -> None:
    scorer = native_scorer(qwen35)
    store = scorer.new_store()
    taps = np.zeros((4, TINY_QWEN35.n_embd), np.float32)
    scorer.append(taps + 1, store)
    with pytest.raises(ConfigError, match="taps has shape"):
        scorer.append(np.zeros((4, 3), np.float32), store)
    for allowed in ([(0, 5)], [(2, 1)], [(2, 3), (1, 2)], [(-1, 2)], [], [(1, 1)]):
        with pytest.raises(ConfigError):
            scorer.mass(store, [(taps[:1], allowed)])
    with pytest.raises(ConfigError):
        scorer.mass(store, [(taps[:0], [(0, 4)])])
    with pytest.raises(ScorerError, match="not finite"):
        scorer.mass(store, [(np.full_like(taps[:1], np.nan), [(0, 4)])])


def test_session_name_is_checked(qwen35: Path) -> None:
    with pytest.raises(ConfigError, match="session is 5"):
        make_scorer(qwen35, sessions=1).score(random_ids(30), query=(20, 30), session=5)  # type: ignore[arg-type]


def test_context_that_cannot_be_made(qwen35: Path) -> None:
    """Half the sequences of a quantised cache without flash attention: llama.cpp refuses, nothing crashes."""
    with pytest.raises(OutOfMemoryError, match="settings that do not go together"):
        make_scorer(qwen35, type_k=0, type_v=8).score(random_ids(30), query=(20, 30))


def test_progress(qwen35: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_scorer(qwen35, n_ubatch=64).score(
        random_ids(200), query=(190, 200), progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(50, 200), (100, 200), (150, 200), (200, 200)]


def test_memory_does_not_grow_with_rows_times_tokens(qwen35: Path) -> None:
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((300, TINY_QWEN35.n_embd)).astype(np.float32)
    compute = []
    for n in (1000, 20000):
        scorer = native_scorer(qwen35)
        store = scorer.new_store()
        scorer.append(rng.standard_normal((n, TINY_QWEN35.n_embd)).astype(np.float32), store)
        scorer.mass(store, [(rows, [(0, n - 300)])] * 2)
        compute.append(scorer.memory()["compute"])
        assert store.n_bytes <= 1.05 * (n + 1024) * 4 * TINY_QWEN35.n_head_kv * TINY_QWEN35.head_dim
    assert compute[1] <= 1.05 * compute[0]
