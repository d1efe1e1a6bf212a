"""PFlash.compress: exact budgets, what is kept in any case, every scorer and refusal, never an unscored prompt."""

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from laguna_gguf import PFlash, SelectionSettings
from laguna_gguf.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DecodeError,
    LagunaError,
    QueryError,
    ScorerError,
    SelectionError,
    SessionBusyError,
    TargetMismatchError,
)
from laguna_gguf.pflash.candidates import fixed_chunks
from laguna_gguf.pflash.head import export_head
from laguna_gguf.pflash.segmentation import segments
from laguna_gguf.pflash.selection import Candidate, select
from random_drafter import TINY_QWEN35, random_tensors, write_drafter
from reference.pflash_numpy import ReferenceScorer
from scorer_fixtures import EXACT, TIMINGS, random_ids, write_random_probe

TEXT = "<|im_start|>user\n" + "The river runs by the old mill and the tower. " * 14 + "Where is the tower?<|im_end|>"


def make(path: Path, settings: dict[str, Any] | None = None, **kwargs: Any) -> PFlash:
    return PFlash(path, settings=SelectionSettings(**(settings or {})), **(EXACT | kwargs))


@pytest.fixture(scope="module")
def pflash(qwen35: Path) -> Iterator[PFlash]:
    with make(qwen35, sessions=1) as loaded:
        yield loaded


@pytest.fixture
def probe(tmp_path: Path, qwen35: Path) -> Path:
    return write_random_probe(tmp_path / "probe.gguf", qwen35)


def test_selection_is_that_of_the_oracles_mass(qwen35: Path) -> None:
    pflash = make(qwen35, {"select_chunk_size": 16})
    ids = random_ids(400)
    result = pflash.compress(ids, keep_ratio=0.25, history=[(100, 108), (200, 208)])
    taps = pflash._scorers.head.trunk.taps(ids)  # type: ignore[union-attr]
    mass = ReferenceScorer(qwen35).mass(taps, (392, 400), [(100, 108, 0.5), (200, 208, 0.25)])
    chunks = fixed_chunks(400, 16)
    ratio = float(np.float32(min(1.0, (16 + float(np.float32(0.25)) * 384 + 1) / 400)))
    assert result.budget == int(400 * ratio)
    expected = select(
        [Candidate(i, b, e, mass[b:e].sum(), e > 392) for i, (b, e) in enumerate(chunks)],
        result.budget,
        mode="budget_only",
    )
    assert sum(e - b for b, e in result.spans) == expected.retained_tokens == result.retained_tokens
    assert result.trace["selected_chunks"] == expected.ordinals
    assert result.retained_mass == pytest.approx(expected.retained_mass, rel=1e-4)
    assert result.stop_reason == expected.stop_reason == "budget_reached"


def test_text_in_and_out(pflash: PFlash) -> None:
    ids = pflash.tokenize(TEXT)
    assert ids.dtype == np.int32 and ids[0] == 1 and ids[-1] == 2 and pflash.detokenize(ids) == TEXT
    assert pflash.detokenize([]) == ""
    result = pflash.compress(TEXT, keep_ratio=0.3)
    assert np.array_equal(result.ids, np.concatenate([ids[b:e] for b, e in result.spans]))
    assert result.text == pflash.detokenize(result.ids) and result.text.endswith("tower?<|im_end|>")
    assert len(result.ids) == result.retained_tokens <= result.budget < len(ids)
    assert all(a[1] < b[0] for a, b in zip(result.spans, result.spans[1:], strict=False))
    again = pflash.compress(ids.tolist(), keep_ratio=0.3)
    assert again.spans == result.spans and again.text == result.text


def test_broken_characters_become_replacement_characters(pflash: PFlash) -> None:
    ids = pflash.tokenize("größer")
    assert pflash.detokenize(ids[:-4]).endswith("�")


def test_everything_is_kept_at_ratio_one(pflash: PFlash) -> None:
    result = pflash.compress(TEXT, keep_ratio=1)
    assert result.text == TEXT and result.stop_reason == "candidates_exhausted" and result.retained_mass == 1.0


def test_nothing_optional_is_kept_at_ratio_zero(pflash: PFlash) -> None:
    result = pflash.compress(random_ids(300), keep_ratio=0.0)
    assert result.spans == [(256, 300)] and result.budget == 45


def test_query_and_required_spans_are_kept(qwen35: Path) -> None:
    pflash = make(qwen35, {"select_chunk_size": 10})
    result = pflash.compress(random_ids(300), keep_ratio=0.01, query=(150, 160), required=[(33, 35), (70, 90)])
    kept = {token for begin, end in result.spans for token in range(begin, end)}
    assert kept >= {*range(30, 40), *range(70, 90), *range(150, 300)}
    assert result.trace["required_instruction_spans"] == [(33, 35), (70, 90)]
    suffix = pflash.compress(random_ids(300), keep_ratio=0.01, query=(150, 160), suffix_candidates=True)
    assert suffix.retained_tokens < 30 and (150, 160) in suffix.spans


def test_probe_segments(qwen35: Path, probe: Path) -> None:
    pflash = make(qwen35, segment_probe=probe)
    ids = random_ids(600)
    result = pflash.compress(ids, keep_ratio=0.2, required=[(50, 61)])
    trace = result.trace
    assert "probe" in trace["segmentation"] and trace["chunk_size"] == 0 and trace["candidate_score"] == "density"
    scores = pflash.score(ids, query=(592, 600))
    assert scores.probe is not None
    inside = np.where(np.arange(600) < 592, scores.probe, 0)
    expected = segments(
        inside,
        600,
        threshold=0.8,
        min_segment=4,
        max_segment=64,
        forced=[50, 61, 592],
        subunit=scores.subunit,
    )
    assert [tuple(span) for span in trace["segments"]] == expected
    assert any(b <= 50 and 61 <= e for b, e in result.spans) and result.spans[-1][1] == 600
    assert result.retained_tokens <= result.budget


def test_segments_setting(qwen35: Path, probe: Path) -> None:
    ids = random_ids(300)
    fixed = make(qwen35, {"select_segments": "fixed"}, segment_probe=probe)
    assert fixed.score(ids, query=(290, 300)).probe is None
    trace = fixed.compress(ids, keep_ratio=0.5).trace
    assert trace["segments"] == [] and trace["chunk_size"] == 128 and trace["candidate_score"] == "sum"
    with pytest.raises(ConfigError, match="PFLASH_SELECT_SEGMENTS is probe and no segment probe is given"):
        make(qwen35, {"select_segments": "probe"})


def test_few_boundaries_fall_back_to_chunks_unless_forced(qwen35: Path, probe: Path) -> None:
    ids = random_ids(12)
    assert make(qwen35, segment_probe=probe).compress(ids, keep_ratio=0.5).trace["chunk_size"] == 128
    forced = make(qwen35, {"select_segments": "probe"}, segment_probe=probe)
    assert forced.compress(ids, keep_ratio=0.5).trace["chunk_size"] == 0


def test_top_p(qwen35: Path) -> None:
    settings = {"select_mode": "top_p", "select_top_p": 0.2, "select_chunk_size": 8}
    result = make(qwen35, settings).compress(random_ids(300), keep_ratio=0.9)
    assert result.stop_reason == "top_p_reached" and result.trace["selector_mode"] == "top_p"
    assert 0.2 <= result.retained_mass < 0.3


@pytest.mark.parametrize("settings", [{"select_scorer": "legacy"}, {"qwen35_legacy_scorer": True}])
def test_legacy_scorer(qwen35: Path, settings: dict[str, Any]) -> None:
    pflash = make(qwen35, {"select_chunk_size": 16, **settings})
    ids = random_ids(200)
    importance = pflash.score(ids, query=(192, 200)).mass
    result = pflash.compress(ids, keep_ratio=0.3, query=(100, 108), suffix_candidates=True)
    assert result.spans[-1] == (96, 200)  # the suffix is structural with this scorer
    trace = pflash.compress(ids, keep_ratio=0.3).trace
    assert trace["candidate_score"] == "mean" and trace["scorer"] == "legacy"
    means = [importance[i : i + 16].mean() for i in range(0, 200, 16)]
    np.testing.assert_allclose(trace["chunk_scores"], means)


def test_split_of_two_scorers(qwen35: Path) -> None:
    ids = random_ids(400)
    kept = {
        kind: make(qwen35, {"select_chunk_size": 8, "select_scorer": kind}).compress(ids, keep_ratio=0.3)
        for kind in ("head", "legacy", "split")
    }
    chosen = {kind: set(result.trace["selected_chunks"]) for kind, result in kept.items()}
    assert chosen["split"] - chosen["legacy"] and chosen["split"] - chosen["head"]  # some of either alone
    assert chosen["split"] <= chosen["head"] | chosen["legacy"]
    assert kept["split"].trace["scorer"] == "split"


def test_qwen3_without_a_mode_selects_chunks(qwen3: Path) -> None:
    pflash = make(qwen3)
    result = pflash.compress(random_ids(1400), keep_ratio=0.8)
    assert result.retained_tokens == len(result.ids) <= result.budget == 35 * 32
    assert result.spans[0][0] == 0 and result.spans[0][1] >= 256 and result.spans[-1][0] <= 640
    assert result.trace["selector_mode"] == "legacy_chunks" and result.trace["chunk_size"] == 32
    with pytest.raises(SelectionError, match="set PFLASH_SELECT_MODE"):
        pflash.compress(random_ids(200), keep_ratio=0.5, required=[(3, 5)])


def test_qwen3_with_a_mode_uses_block_13(qwen3: Path) -> None:
    pflash = make(qwen3, {"select_mode": "budget_only"})
    ids = random_ids(200)
    taps = pflash._scorers.head.trunk.taps(ids)  # type: ignore[union-attr]
    expected = ReferenceScorer(qwen3).mass(taps, (192, 200))
    assert np.abs(pflash.score(ids, query=(192, 200)).mass - expected).max() <= 1e-5 * expected.max()
    assert pflash.compress(ids, keep_ratio=0.5).trace["selector_mode"] == "budget_only"


def test_sessions_through_compress(pflash: PFlash) -> None:
    first = pflash.compress(TEXT, keep_ratio=0.3, session="chat")
    again = pflash.compress(TEXT, keep_ratio=0.3, session="chat")
    n = first.timings["drafter_input_tokens"]
    assert (again.timings["scorer_resume"], again.timings["scorer_new_tokens"]) == (n, 0)
    assert again.spans == first.spans


def test_timings_and_trace(tmp_path: Path, qwen35: Path) -> None:
    pflash = make(qwen35, {"trace_path": str(tmp_path / "trace.jsonl")})
    ids = random_ids(300)
    result = pflash.compress(ids, keep_ratio=0.1, history=[(100, 108)])
    assert set(result.timings) == TIMINGS
    timings = result.timings
    assert timings["compress_ms"] > timings["scorer_forward_ms"] > 0
    assert (timings["drafter_input_tokens"], timings["kept_tokens"]) == (300, result.retained_tokens)
    assert (timings["query_rule"], timings["history_queries"]) == ("content_tail", 1)
    pflash.compress(ids, keep_ratio=0.5, query=(90, 95))
    first, second = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    assert first == json.loads(json.dumps(result.trace)) and second["parser"]["selection_rule"] == "explicit_query_span"
    assert first["compressed_ids"] == result.ids.tolist() and first["input_ids"] == ids.tolist()
    assert len(first["chunk_scores"]) == 3 and first["forced_chunks"] == [2]
    assert first["parser"]["windows"] == [[100, 108, 0.5]]
    digest = 0xCBF29CE484222325
    for byte in ids.astype("<i4").tobytes():
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    assert first["parser"]["fingerprint"] == f"{digest:016x}"


def test_trace_that_cannot_be_written_fails(tmp_path: Path, qwen35: Path) -> None:
    with pytest.raises(ConfigError, match="PFLASH_TRACE_PATH"):
        make(qwen35, {"trace_path": str(tmp_path)})


@pytest.mark.parametrize("kind", ["callable", "path", "llama"])
def test_target_tokens_are_held_to_their_share(qwen35: Path, kind: str) -> None:
    target: Any = lambda text: len(text.split())  # noqa: E731
    if kind != "callable":
        target = qwen35 if kind == "path" else llama_cpp.Llama(str(qwen35), vocab_only=True, verbose=False)
    pflash = make(qwen35, {"select_chunk_size": 8}, target=target)
    result = pflash.compress(TEXT, keep_ratio=0.2)
    count = target if kind == "callable" else lambda text: len(pflash.tokenize(text))
    n = len(pflash.tokenize(TEXT))
    kept = n - (n - 8) // 8 * 8  # the chunks that hold the last eight tokens
    ratio = float(np.float32((kept + float(np.float32(0.2)) * (n - kept) + 1) / n))
    assert result.timings["compressed_tokens"] == count(result.text) <= int(count(TEXT) * ratio)


def test_budget_is_tightened_to_the_targets_tokens(qwen35: Path) -> None:
    tokenize = make(qwen35).tokenize
    whole = tokenize(TEXT)

    def slightly_over(text: str) -> int:
        return len(whole) if text == TEXT else len(tokenize(text)) + 30

    pflash = make(qwen35, {"select_chunk_size": 4}, target=slightly_over)
    loose = make(qwen35, {"select_chunk_size": 4}).compress(TEXT, keep_ratio=0.2)
    assert pflash.compress(TEXT, keep_ratio=0.2).retained_tokens < loose.retained_tokens


def test_long_chunks_are_dropped_for_a_token_too_many(qwen35: Path) -> None:
    """The tightened budget would hold the same chunks again, as often as one likes."""
    n = len(make(qwen35).tokenize(TEXT))
    loose = make(qwen35, {"select_chunk_size": 48}).compress(TEXT, keep_ratio=0.4)
    assert loose.budget - loose.retained_tokens > 10

    def one_over(text: str) -> int:
        return n if text == TEXT else loose.budget + 1 if text == loose.text else len(text) // 4

    tight = make(qwen35, {"select_chunk_size": 48}, target=one_over).compress(TEXT, keep_ratio=0.4)
    assert 0 < tight.retained_tokens <= loose.retained_tokens - 48 + n % 48


def test_stubborn_target_is_asked_four_times(qwen35: Path) -> None:
    whole = len(make(qwen35).tokenize(TEXT))
    asked: list[int] = []

    def count(text: str) -> int:
        if text == TEXT:
            return 10 * whole
        asked.append(len(text))
        return 4 * whole  # always above the ceiling

    with pytest.raises(BudgetError, match="after 3 tighter selections"):
        make(qwen35, {"select_chunk_size": 4}, target=count).compress(TEXT, keep_ratio=0.29)
    assert len(asked) == 4


def test_what_must_be_kept_exceeds_a_tightened_budget(qwen35: Path) -> None:
    def compress(target: Any = None) -> Any:
        pflash = make(qwen35, {"select_chunk_size": 64}, target=target)
        return pflash.compress(TEXT, keep_ratio=0.5, required=[(0, 99)])  # two chunks

    n, budget = len(make(qwen35).tokenize(TEXT)), compress().budget
    with pytest.raises(SelectionError, match="what must be kept takes") as caught:
        compress(lambda text: n if text == TEXT else 2 * budget - 51)  # leaves 50 tokens
    assert caught.value.stop_reason == "mandatory_query_exceeds_budget"


@pytest.mark.parametrize("target", [5, object(), lambda text: -1, lambda text: "x"])
def test_targets_are_checked(qwen35: Path, target: Any) -> None:
    with pytest.raises(ConfigError, match="target"):
        make(qwen35, target=target).compress(TEXT, keep_ratio=0.5)


def test_missing_target(qwen35: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="target not found"):
        make(qwen35, target=tmp_path / "absent.gguf")
    (tmp_path / "junk.gguf").write_bytes(b"GGUF junk")
    with pytest.raises(CheckpointError, match="cannot load the vocabulary"):
        make(qwen35, target=tmp_path / "junk.gguf")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keep_ratio": -0.1}, ConfigError),
        ({"keep_ratio": 1.1}, ConfigError),
        ({"keep_ratio": float("nan")}, ConfigError),
        ({"keep_ratio": "x"}, ConfigError),
        ({"text_or_ids": ""}, ConfigError),
        ({"text_or_ids": []}, ConfigError),
        ({"text_or_ids": [TINY_QWEN35.n_vocab]}, ConfigError),
        ({"text_or_ids": [-1, 5]}, ConfigError),
        ({"text_or_ids": b"bytes"}, ConfigError),
        ({"text_or_ids": None}, ConfigError),
        ({"text_or_ids": "lone \ud800 surrogate"}, ConfigError),
        ({"text_or_ids": [5]}, QueryError),  # nothing before the query
        ({"query": (0, 5)}, QueryError),
        ({"query": (60, 60)}, QueryError),
        ({"query": (95, 105)}, QueryError),
        ({"query": 7}, QueryError),
        ({"history": [(0, 0)]}, QueryError),
        ({"history": [5]}, QueryError),
        ({"required": [(5, 3)]}, SelectionError),
        ({"required": [(3, 6), (5, 8)]}, SelectionError),
        ({"required": [(90, 101)]}, SelectionError),
        ({"required": [(i, i + 1) for i in range(65)]}, SelectionError),
        ({"session": 5}, ConfigError),
        ({"text_or_ids": random_ids(9000)}, ConfigError),  # longer than the file's context
    ],
)
def test_refusals_leave_the_session(pflash: PFlash, arguments: dict[str, Any], error: type[LagunaError]) -> None:
    ids = random_ids(100)
    pflash.compress(ids, keep_ratio=0.5, session="kept")
    with pytest.raises(error):
        pflash.compress(**({"text_or_ids": ids, "keep_ratio": 0.5, "session": "kept"} | arguments))
    assert pflash.score(ids, query=(92, 100), session="kept").new_tokens == 0


def test_failures_return_no_prompt(tmp_path: Path, qwen35: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors(TINY_QWEN35)
    tensors["blk.2.ffn_up.weight"][0] = np.nan
    broken = make(write_drafter(tmp_path / "nan.gguf", tensors=tensors))
    with pytest.raises(ScorerError):
        broken.compress(TEXT, keep_ratio=1.0)
    pflash = make(qwen35)
    monkeypatch.setattr(llama_cpp, "llama_decode", lambda *_: -3)
    with pytest.raises(DecodeError, match="returned -3"):
        pflash.compress(TEXT, keep_ratio=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PFLASH_SELECT_CHUNK_SIZE", "12x"),
        ("PFLASH_DRAFTER_SESSIONS", "17"),
        ("PFLASH_SELECT_MODE", "BUDGET_ONLY"),
        ("PFLASH_SCORING_HEAD_GGUF", ""),
    ],
)
def test_environment_errors_name_the_variable(
    qwen35: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        PFlash(qwen35, **EXACT)


def test_files_come_from_the_environment(
    tmp_path: Path, qwen35: Path, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_head(qwen35, tmp_path / "head.gguf")
    monkeypatch.setenv("PFLASH_SCORING_HEAD_GGUF", str(tmp_path / "head.gguf"))
    monkeypatch.setenv("PFLASH_SEGMENT_PROBE_GGUF", str(probe))
    with PFlash(qwen35, **EXACT) as pflash:
        assert pflash.score(random_ids(30), query=(20, 30)).probe is not None
    other = write_drafter(tmp_path / "other.gguf", seed=3)
    with pytest.raises(TargetMismatchError, match="belongs to another drafter"):
        PFlash(other, **EXACT)
    with pytest.raises(CheckpointError, match="not found"):
        PFlash(qwen35, scoring_head=tmp_path / "absent.gguf", **EXACT)  # an explicit argument wins


def test_drafter_without_a_tokenizer_scores_ids_only(tmp_path: Path, qwen35: Path) -> None:
    pflash = make(write_drafter(tmp_path / "none.gguf", tokenizer=False))
    ids = random_ids(40)
    expected = make(qwen35).score(ids, query=(30, 40)).mass
    assert np.array_equal(pflash.score(ids, query=(30, 40)).mass, expected)
    for call in (
        lambda: pflash.tokenize("a"),
        lambda: pflash.detokenize([5]),
        lambda: pflash.compress("a b", keep_ratio=1),
    ):
        with pytest.raises(CheckpointError, match="has no tokenizer"):
            call()


@pytest.mark.parametrize("sessions", [-1, 17, 1.5, True])
def test_sessions_are_checked(qwen35: Path, sessions: Any) -> None:
    with pytest.raises(ConfigError, match="sessions is"):
        make(qwen35, sessions=sessions)


def test_several_threads_wait_for_one_another(pflash: PFlash) -> None:
    prompts = [random_ids(150, seed=i) for i in range(4)]
    expected = [pflash.compress(ids, keep_ratio=0.4).spans for ids in prompts]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = pflash.compress(prompts[i], keep_ratio=0.4, session="shared").spans

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == expected


def test_progress_and_close(qwen35: Path) -> None:
    pflash = make(qwen35, n_ubatch=64)
    seen: list[tuple[int, int]] = []
    pflash.on_progress = lambda done, total: seen.append((done, total))
    pflash.compress(random_ids(128), keep_ratio=0.5)
    assert seen == [(64, 128), (128, 128)]
    pflash.close()
    pflash.close()
    for call in (
        lambda: pflash.compress(TEXT, keep_ratio=0.5),
        lambda: pflash.tokenize("a"),
        lambda: pflash.score([1], query=(0, 1)),
    ):
        with pytest.raises(DecodeError, match="closed"):
            call()


def test_large_weights_do_not_overflow(pflash: PFlash) -> None:
    ids = random_ids(60)
    expected = pflash.score(ids, query=(50, 60), windows=[(5, 9, 1e20)] * 3).mass
    assert expected.sum() == pytest.approx(1.0)
    found = pflash.score(ids, query=(50, 60), windows=[(5, 9, 1e308)] * 3).mass
    assert found == pytest.approx(expected)


def test_windows_are_checked_for_every_scorer(qwen35: Path) -> None:
    with make(qwen35, {"select_scorer": "legacy"}) as pflash, pytest.raises(QueryError, match="window"):
        pflash.score(random_ids(60), query=(50, 60), windows=[(5, 5, 1.0)])


def test_closing_waits_for_a_running_call(qwen35: Path) -> None:
    pflash = make(qwen35, n_ubatch=64)
    begun = threading.Event()
    pflash.on_progress = lambda done, total: begun.set()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(pflash.score(random_ids(512), query=(500, 512))))
    thread.start()
    assert begun.wait(60)
    pflash.close()
    thread.join(60)
    assert found[0].mass.sum() == pytest.approx(1.0)


def test_the_progress_callback_cannot_call_its_own_drafter(qwen35: Path) -> None:
    with make(qwen35) as pflash:
        refused = []

        def progress(done: int, total: int) -> None:
            for call in (pflash.close, lambda: pflash.score([5] * 9, query=(5, 9))):
                with pytest.raises(SessionBusyError, match="callback"):
                    call()
                refused.append(done)

        pflash.on_progress = progress
        assert pflash.compress(random_ids(100), keep_ratio=0.5).retained_tokens > 0
        assert len(refused) == 2


@pytest.mark.parametrize(
    "keywords", [{"settings": 5}, {"scoring_head": 5}, {"segment_probe": []}, {"drafter_path": None}]
)
def test_arguments_of_another_type(qwen35: Path, keywords: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"drafter_path": qwen35, "settings": SelectionSettings()} | keywords
    with pytest.raises(ConfigError, match="needed"):
        PFlash(arguments.pop("drafter_path"), **arguments, **EXACT)


def test_calls_with_another_type(pflash: PFlash) -> None:
    for text in (None, 5, ["a"], bytearray(b"a")):
        with pytest.raises(ConfigError, match="needed str or bytes"):
            pflash.tokenize(text)  # type: ignore[arg-type]
    for windows in (None, 5):
        with pytest.raises(QueryError, match="windows are"):
            pflash.score(random_ids(50), query=(40, 50), windows=windows)  # type: ignore[arg-type]
    with pytest.raises(QueryError, match="pflash_required is 5"):
        pflash.compress_chat(TEXT, keep_ratio=0.5, pflash_required=5)  # type: ignore[arg-type]


def test_forgotten_objects_are_freed_in_a_safe_order(qwen35: Path) -> None:
    """Scorer, sessions and contexts refer to one another; a collection must not free the model before them."""
    kept = weakref.WeakSet[Any]()
    for _ in range(3):
        pflash = make(qwen35, {"select_scorer": "split"}, sessions=2)
        pflash.compress(random_ids(40), keep_ratio=0.5, session="a")
        kept.add(pflash)
        del pflash
        gc.collect()
    assert len(kept) == 0
