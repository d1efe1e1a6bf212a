"""Synthetic acceptance: the mean that was asked for, drafts as text, caches that agree with it, labels, refusals."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laguna_gguf import SpecSession, SpecStats
from laguna_gguf.cli import main
from laguna_gguf.dflash.synthetic import SyntheticAcceptance, SyntheticStats, acceptance_probability
from laguna_gguf.errors import ConfigError
from session_tools import GREEDY, Scratch, check_state, spec_session, take, text_ids

PROMPT = text_ids(40, 3)


def no_end(token: int) -> bool:
    return False


@pytest.mark.parametrize("n_max", [1, 3, 7, 15])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_probability(n_max: int, share: float) -> None:
    mean = 1 + share * n_max
    p = acceptance_probability(mean, n_max)
    assert math.isclose(sum(p**i for i in range(n_max + 1)), mean, rel_tol=1e-9)
    assert (p == 1) == (share == 1)


@pytest.mark.parametrize("value", [0.99, 8.01, -1, 0, float("nan"), float("inf"), "4", True, [4]], ids=repr)
def test_length_that_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"spec_synth_len is .*1\.\.8"):
        acceptance_probability(value, 7)


def test_nothing_drafted() -> None:
    with pytest.raises(ConfigError, match="nothing is drafted"):
        acceptance_probability(1.0, 0)


def test_mean_and_independence() -> None:
    """Run lengths are those of independent coins: mean L, and survival p^i at every depth."""
    acceptance = SyntheticAcceptance(4.0, 7, no_end)
    acceptance.seed(7)
    rounds = 40_000
    survived = np.zeros(8)
    for _ in range(rounds):
        i = 0
        while i < 7 and acceptance.decide(-1, i) == (i, True):
            i += 1
        survived[: i + 1] += 1
    p = acceptance.probability
    expected = p ** np.arange(8)
    error = np.sqrt(expected * (1 - expected) / rounds)
    assert np.all(np.abs(survived / rounds - expected) <= 5 * error + 1e-12)
    assert abs(survived.sum() / rounds - 4.0) < 0.06


def test_end_tokens_are_never_accepted() -> None:
    acceptance = SyntheticAcceptance(8.0, 7, lambda token: token == 2)
    assert acceptance.decide(50, 2) == (50, False)
    assert acceptance.decide(50, 3) == (3, True)
    assert acceptance.decide(50, None) == (50, False)


@pytest.mark.parametrize("draft_max", [7, "auto"])
def test_session(tiny_target: Path, tiny_drafter: Path, draft_max: Any) -> None:
    """A random drafter gets what was asked for; target, drafter and text agree afterwards; the seed decides."""
    session = spec_session(tiny_target, tiny_drafter, draft_max=draft_max, spec_synth_len=4.0)
    tokens = take(session, PROMPT, 200, seed=5, **GREEDY)
    stats = session.stats
    assert isinstance(stats, SyntheticStats)
    assert stats.spec_synth_len == 4.0 and stats.as_dict()["spec_synth_len"] == 4.0
    assert stats.drafted_tokens > 0
    if draft_max == 7:
        # 50 rounds or so, standard deviation of one about 2.5
        assert abs(stats.mean_accepted_length - 4.0) < 1.5
        assert stats.accepted_tokens > 50
    check_state(session, Scratch(tiny_target, tiny_drafter), PROMPT + tokens[:-1])
    if draft_max == 7:
        session.reset()
        again = take(session, PROMPT, 200, seed=5, **GREEDY)
        assert again == tokens
        session.reset()
        assert take(session, PROMPT, 200, seed=6, **GREEDY) != tokens


def test_all_accepted_and_none(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter, draft_max=3, spec_synth_len=4)
    session.next_max_tokens = 41
    take(session, PROMPT, 41, **GREEDY)
    assert session.stats.mean_accepted_length == 4.0 and session.stats.acceptance_rate == 1.0
    none = spec_session(tiny_target, tiny_drafter, draft_max=3, spec_synth_len=1)
    take(none, PROMPT, 41, **GREEDY)
    assert none.stats.accepted_tokens == 0 and none.stats.drafted_tokens > 0


def test_real_acceptance_has_plain_stats(tiny_target: Path, tiny_drafter: Path) -> None:
    session = spec_session(tiny_target, tiny_drafter)
    assert type(session.stats) is SpecStats


@pytest.mark.parametrize(("draft_max", "value"), [(3, 4.1), (3, 0.5), (0, 1.0), (3, "2"), ("auto", 16.5)])
def test_refused(tiny_target: Path, tiny_drafter: Path, draft_max: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match="spec_synth_len"):
        SpecSession(str(tiny_target), tiny_drafter, draft_max=draft_max, spec_synth_len=value, n_ctx=512)


def test_generate_says_so(tiny_target: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "-m", tiny_target, "-md", tiny_drafter, "-p", "some text", "-n", "24", "-t", "1", "-c", "512"]
    argv = [*common, "--temp", "0", "--spec-draft-n-max", "7", "--spec-synth-len", "3"]
    assert main([str(arg) for arg in [*argv, "--json"]]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["synthetic"] is True and report["stats"]["spec_synth_len"] == 3.0
    assert main([str(arg) for arg in argv]) == 0
    assert "SYNTHETIC" in capsys.readouterr().err
    assert main([str(arg) for arg in [*argv[:-1], "99"]]) == 1
    assert "1..8" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in [*argv, "--no-draft"]])
    assert stop.value.code == 2
