"""Sampling with drafts draws from the plain distribution: chi-square tests on a target with known probabilities.

The same seed giving the same tokens as Llama is tested elsewhere; here the seeds of both differ, and drafts are
guesses, so that rounds end anywhere. All seeds are fixed: the p values below are always the same.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chi_square import p_against_known, p_of_equality, survival
from laguna_gguf import SpecSession
from markov_target import STATES, GuessingDrafts, Sampler, draws, sharpened, transitions, write_markov_pair
from session_tools import plain_llama, spec_session

N_DRAWS = 12_800
"""For each sampler; 51,200 in all."""

SAMPLERS = {
    "temperature": Sampler(temp=1.2),
    "top_k": Sampler(top_k=4),
    "top_p": Sampler(temp=0.9, top_p=0.7),
    "min_p": Sampler(temp=1.1, min_p=0.15),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_markov_pair(tmp_path_factory.mktemp("markov"))


def open_session(pair: Any, **options: Any) -> SpecSession:
    target, drafter, _ = pair
    return spec_session(target, drafter, **{"draft_max": 3} | options)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_distribution(pair: tuple[Path, Path, Any], sampler: Sampler) -> None:
    probabilities = sampler.probabilities(pair[2])
    session, plain = open_session(pair), plain_llama(pair[0])
    GuessingDrafts(session, sharpened(probabilities), seed=7)
    counts = draws(session, sampler, N_DRAWS, seed=1)
    stats = session.stats
    assert min(stats.accepted_by_depth) > 200 and stats.rounds - stats.accepted_by_depth[0] > 200
    assert p_against_known(counts, probabilities) > 0.01
    plain_counts = draws(plain, sampler, N_DRAWS // 3, seed=10**6)
    assert p_against_known(plain_counts, probabilities) > 0.01
    assert p_of_equality(counts, plain_counts) > 0.01


def test_survival() -> None:
    """Against tabulated quantiles."""
    for freedom, quantile in ((1, 6.635), (2, 9.210), (3, 11.345), (10, 23.209), (99, 134.642), (100, 135.807)):
        assert survival(quantile, freedom) == pytest.approx(0.01, rel=2e-3)
        assert survival(0.0, freedom) == 1.0


def test_the_test_sees_a_bias(pair: tuple[Path, Path, Any]) -> None:
    """Accepting drafts by a coin, as benchmarks do, is noticed: so would be any rule that favours drafts a little."""
    sampler = SAMPLERS["temperature"]
    probabilities = sampler.probabilities(pair[2])
    session = open_session(pair, spec_synth_len=1.2)
    counts = np.zeros((12, 12), np.int64)
    session.set_seed(1)
    for i in range(8):
        # Guesses by other probabilities than the target's.
        GuessingDrafts(session, Sampler(temp=0.5).probabilities(pair[2]), seed=i)
        counts += transitions(list(islice(session.generate([STATES[i]], **sampler.settings()), 400)))
    assert p_against_known(counts, probabilities) < 1e-6
