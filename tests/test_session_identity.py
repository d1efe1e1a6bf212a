"""The same tokens as llama_cpp.Llama, whatever is drafted: f32 weights, f32 KV cache, flash attention off."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from fixtures import write_drafter_dir
from laguna_gguf import SpecSession
from session_tools import (
    FULL,
    GREEDY,
    MIXED,
    SAMPLED,
    Comparison,
    ForcedDrafts,
    Scratch,
    batch_shape_noise,
    check_state,
    plain_llama,
    row_logits,
    spec_session,
    take,
    take_plain,
    text_ids,
    top_gap,
)
from tiny_models import TINY_TARGET, write_tiny_target

WINDOWS = (6, 32)
SCHEDULES = {"0": (0,), "1": (1,), "2": (2,), "full": (FULL,), "mixed": MIXED}
N_TOKENS = 48
WIDE = 200
"""Window of a drafter that sees more rows than a prompt is decoded whole for."""
Models = dict[int, tuple[Path, Path]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Target and drafter with the same sliding window, by window; WIDE: a wider window in the drafter only."""
    folder = tmp_path_factory.mktemp("windows")
    pairs: Models = {}
    for window in WINDOWS:
        target = write_tiny_target(folder / f"target-{window}.gguf", replace(TINY_TARGET, window=window), seed=window)
        write_drafter_dir(folder / f"drafter-{window}", seed=window, sliding_window=window)
        pairs[window] = target, folder / f"drafter-{window}"
    write_drafter_dir(folder / "drafter-wide", seed=9, sliding_window=WIDE)
    pairs[WIDE] = pairs[32][0], folder / "drafter-wide"
    return pairs


def test_batch_shape_noise_is_rounding(models: Models) -> None:
    """The excuse that the comparisons below allow is a small one."""
    tokens = text_ids(60)
    for target, _ in models.values():
        logits = row_logits(target, tokens, 1)
        assert batch_shape_noise(target, tokens) <= 1e-4 * logits.std()
        assert top_gap(np.array([1.0, 4.0, 3.5], np.float32)) == 0.5


def test_greedy_invariant_on_synthetic_target(models: Models) -> None:
    """Greedy tokens with and without speculation, no draft forced: the smallest statement of all that follow."""
    for target, drafter in models.values():
        session, plain = spec_session(target, drafter, draft_max=15), plain_llama(target)
        comparison = Comparison(target)
        for seed in range(3):
            prompt = text_ids(10 + 30 * seed, seed)
            expected = take_plain(plain, prompt, 48, **GREEDY)
            comparison.check(take(session, prompt, 48, **GREEDY), expected, prompt)
        comparison.finish()
        assert session.stats.rounds > 0 and session.stats.drafted_tokens >= 15 * session.stats.rounds


@pytest.mark.parametrize("n_ubatch", [16, 512])
@pytest.mark.parametrize("swa_full", [True, False], ids=["swa_full", "swa_ring"])
@pytest.mark.parametrize("window", WINDOWS)
def test_tokens_with_forced_acceptance(models: Models, window: int, swa_full: bool, n_ubatch: int) -> None:
    target, drafter = models[window]
    options: dict[str, Any] = {"swa_full": swa_full, "n_ubatch": n_ubatch}
    session, plain = spec_session(target, drafter, **options), plain_llama(target, **options)
    comparison = Comparison(target)
    # The ring of a sliding layer has 256 cells at least: 230 + 48 tokens go round its end in the rounds.
    for n_prompt in (3, 230):
        prompt = text_ids(n_prompt, n_prompt)
        for seed, sampler in ((1, GREEDY), (7, SAMPLED)):
            expected = take_plain(plain, prompt, N_TOKENS + 10, seed=seed, **sampler)
            for schedule in SCHEDULES.values():
                forced = ForcedDrafts(session, prompt, expected, schedule)
                session.reset()
                session.reset_stats()
                tokens = take(session, prompt, N_TOKENS, seed=seed, **sampler)
                comparison.check(tokens, expected[:N_TOKENS], prompt)
                if tokens == expected[:N_TOKENS]:
                    assert session.stats.accepted_tokens == sum(schedule_accepts(schedule, forced.drafted, N_TOKENS))
    comparison.finish()


def schedule_accepts(schedule: tuple[int, ...], drafted: list[int], n_tokens: int) -> list[int]:
    """Accepted drafts of each round when n_tokens, the prompt's one included, were taken."""
    left, accepts = n_tokens - 1, []
    for i, n in enumerate(drafted):
        accepts.append(min(schedule[i % len(schedule)], n, left))
        left -= accepts[-1] + 1
    return accepts


@pytest.mark.parametrize("swa_full", [True, False], ids=["swa_full", "swa_ring"])
@pytest.mark.parametrize("window", WINDOWS)
def test_many_wraps_in_rounds(models: Models, window: int, swa_full: bool) -> None:
    """Twice round a ring of 256 cells, and many times through the windows."""
    target, drafter = models[window]
    options: dict[str, Any] = {"swa_full": swa_full, "n_ubatch": 16, "n_ctx": 1024}
    prompt = text_ids(20, 3)
    expected = take_plain(plain_llama(target, **options), prompt, 550, **GREEDY)
    session = spec_session(target, drafter, **options)
    ForcedDrafts(session, prompt, expected, MIXED)
    comparison = Comparison(target)
    comparison.check(take(session, prompt, 540, **GREEDY), expected[:540], prompt)
    comparison.finish()
    check_state(session, Scratch(target, drafter), session._input_ids.tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"draft_max": 0},
        {"draft_max": 1},
        {"draft_max": "auto"},
        {"draft_max": 15, "window": "anchored"},
        {"draft_max": 7, "n_ctx": 0},
        {"draft_max": 7, "n_batch": 8},
        {"draft_max": 7, "n_batch": 8, "n_ubatch": 64, "swa_full": False},
        {"draft_max": "auto", "n_batch": 2, "n_ubatch": 1},
        {"draft_max": 15, "n_batch": 40, "n_ubatch": 16, "swa_full": False},
        {"draft_max": 7, "logits_all": True},
        {"draft_max": 0, "logits_all": True, "n_batch": 32},
        {"draft_max": 7, "swa_full": False, "n_batch": 100, "wide": True},
        {"draft_max": 7, "logits_all": True, "wide": True},
        {"draft_max": 7, "n_batch": 8, "wide": True},
    ],
    ids=str,
)
def test_tokens_with_other_settings(models: Models, options: dict[str, Any]) -> None:
    options = dict(options)
    target, drafter = models[WIDE if options.pop("wide", False) else 6]
    session = spec_session(target, drafter, **options)
    plain = plain_llama(target, n_batch=64)
    comparison = Comparison(target)
    for n_prompt in (1, 70, 300):
        prompt = text_ids(n_prompt, n_prompt)
        for seed, sampler in ((1, GREEDY), (5, SAMPLED)):
            expected = take_plain(plain, prompt, 40, seed=seed, **sampler)
            ForcedDrafts(session, prompt, expected, MIXED)
            comparison.check(take(session, prompt, 32, seed=seed, **sampler), expected[:32], prompt)
    comparison.finish()


@pytest.mark.parametrize(
    "n_prompt", [1, 2, 5, 6, 7, 31, 32, 33, 34, 40, 41, 135, 136, 137, 160, 199, 200, 207, 208, 330]
)
def test_every_way_to_split_a_prompt(models: Models, n_prompt: int) -> None:
    """Prompts around the sizes at which the session decodes them in other pieces."""
    for window, (target, drafter) in models.items():
        if window == 6 and n_prompt > 60:
            continue
        prompt = text_ids(n_prompt, n_prompt)
        session = spec_session(target, drafter, draft_max=3)
        expected = take_plain(plain_llama(target), prompt, 3, **GREEDY)
        assert take(session, prompt, 1, **GREEDY) == expected[:1]
        check_state(session, Scratch(target, drafter), prompt)
        assert take(session, prompt, 3, **GREEDY) == expected


@pytest.mark.parametrize("layers", [[0, 2, 4], [3, 5, 6], [5, 6, 7]], ids=str)
def test_captured_layers_need_not_end_with_the_last(models: Models, tmp_path: Path, layers: list[int]) -> None:
    target, _ = models[32]
    write_drafter_dir(tmp_path / "drafter", seed=4, target_layer_ids=layers, sliding_window=WIDE)
    session = spec_session(target, tmp_path / "drafter", n_ubatch=16)
    plain = plain_llama(target)
    comparison = Comparison(target)
    for n_prompt in (20, 150, 300):
        prompt = text_ids(n_prompt, n_prompt)
        expected = take_plain(plain, prompt, 50, **GREEDY)
        ForcedDrafts(session, prompt, expected, MIXED)
        comparison.check(take(session, prompt, 40, **GREEDY), expected[:40], prompt)
        check_state(session, Scratch(target, tmp_path / "drafter", layers=layers), session._input_ids.tolist())
    comparison.finish()


def test_window_reaches_the_drafter(models: Models) -> None:
    """Drafts follow the session's window rule; the text does not."""
    target, drafter = models[6]
    prompt, drafts = text_ids(60), {}
    for window in ("per_query", "anchored"):
        session = spec_session(target, drafter, window=window)
        take(session, prompt, 1, **GREEDY)
        drafts[window] = session.draft(40, None)
        assert drafts[window] == session.drafter.draft(40, 7, window=window).tokens.tolist()
    assert drafts["per_query"] != drafts["anchored"]


def test_tied_target(tmp_path: Path) -> None:
    """A target without a head of its own: token_embd is the head."""
    target = write_tiny_target(tmp_path / "tied.gguf", replace(TINY_TARGET, tied=True))
    write_drafter_dir(tmp_path / "drafter", seed=3)
    session, plain = spec_session(target, tmp_path / "drafter"), plain_llama(target)
    prompt = text_ids(50)
    expected = take_plain(plain, prompt, 50, **GREEDY)
    ForcedDrafts(session, prompt, expected, MIXED)
    comparison = Comparison(target)
    comparison.check(take(session, prompt, 40, **GREEDY), expected[:40], prompt)
    comparison.finish()
    check_state(session, Scratch(target, tmp_path / "drafter"), session._input_ids.tolist())


@pytest.mark.parametrize(
    "sampler",
    [
        {"mirostat_mode": 1},
        {"mirostat_mode": 2},
        {"temp": -1.0},
        {"repeat_penalty": 1.3},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3},
        {"typical_p": 0.7, "min_p": 0.2},
        {"temp": 0.0, "repeat_penalty": 1.5},
    ],
    ids=str,
)
def test_every_sampler(models: Models, sampler: dict[str, Any]) -> None:
    """Samplers with a state of their own see each token once, in order."""
    target, drafter = models[32]
    session, plain = spec_session(target, drafter), plain_llama(target)
    comparison = Comparison(target)
    for seed in range(3):
        prompt = text_ids(30, seed)
        expected = take_plain(plain, prompt, 60, seed=seed, **sampler)
        ForcedDrafts(session, prompt, expected, MIXED)
        comparison.check(take(session, prompt, 50, seed=seed, **sampler), expected[:50], prompt)
    comparison.finish()


def test_seeds_differ(models: Models) -> None:
    """Sampled tokens follow the seed: equal for equal seeds, else not."""
    session = spec_session(*models[32])
    prompt = text_ids(30)
    first = take(session, prompt, 30, seed=1, **SAMPLED)
    assert take(session, prompt, 30, seed=1, **SAMPLED) == first
    assert take(session, prompt, 30, seed=2, **SAMPLED) != first


def test_generate_without_reset(models: Models) -> None:
    """reset=False goes on behind the tokens that are there, as Llama does."""
    target, drafter = models[32]
    session, plain = spec_session(target, drafter), plain_llama(target)
    first, second = text_ids(20, 1), text_ids(5, 2)
    for llama in (session, plain):
        assert len(take(llama, first, 3, **GREEDY)) == 3
    kept = plain._input_ids.tolist()
    assert session._input_ids.tolist() == kept
    expected = list(islice(plain.generate(second, reset=False, **GREEDY), 20))
    assert list(islice(session.generate(second, reset=False, **GREEDY), 20)) == expected
    assert session._input_ids.tolist() == plain._input_ids.tolist()
    for llama in (session, plain):
        llama.eval(text_ids(4, 5))
    expected = list(islice(plain.generate([], reset=False, **GREEDY), 9))
    assert list(islice(session.generate([], reset=False, **GREEDY), 9)) == expected


def test_eval_and_sample(models: Models) -> None:
    """Llama's two lower calls give the same tokens as generate."""
    target, drafter = models[32]
    for draft_max in (7, 0):
        session = spec_session(target, drafter, draft_max=draft_max)
        prompt = text_ids(20, 1)
        expected = take_plain(plain_llama(target), prompt, 12, **GREEDY)
        tokens: list[int] = []
        session.eval(prompt)
        for _ in range(12):
            tokens.append(session.sample(temp=0.0))
            session.eval(tokens[-1:])
        assert tokens == expected
        check_state(session, Scratch(target, drafter), prompt + tokens)


def test_llama_cpp_defaults(models: Models) -> None:
    """With llama_cpp's own defaults (f16 cache) the session runs, and its first tokens are the plain ones."""
    target, drafter = models[32]
    session = SpecSession(str(target), drafter, verbose=False)
    plain = llama_cpp.Llama(str(target), verbose=False)
    prompt = text_ids(20, 2)
    assert take(session, prompt, 20, **GREEDY)[:3] == take_plain(plain, prompt, 3, **GREEDY)
    assert session.stats.generated_tokens == 19 and 0 <= session.stats.draft_max_now <= 15
