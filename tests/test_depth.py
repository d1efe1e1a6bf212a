"""How many tokens a round drafts: the limits of every policy, and what the automatic one learns from."""

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from laguna_gguf.dflash.adaptive import PRIOR_ACCEPTANCE, AdaptiveDepth
from laguna_gguf.dflash.depth import AUTO, make_depth
from laguna_gguf.errors import ConfigError
from session_tools import FULL, GREEDY, ForcedDrafts, plain_llama, spec_session, take, take_plain, text_ids


@pytest.mark.parametrize("n", range(16))
def test_fixed(n: int) -> None:
    depth = make_depth(n, 0, block_size=16, n_ubatch=512)
    for drafted, accepted in ((n, n), (n, 0), (0, 0)):
        assert depth.now == n
        depth.update(drafted, accepted, 1.0)


@pytest.mark.parametrize(
    ("draft_max", "draft_min", "n_ubatch"),
    [(16, 0, 512), (-1, 0, 512), (7, 0, 7), (15, 0, 15), (3, 4, 512), (0, 1, 512), (AUTO, 16, 512), (AUTO, 8, 8)]
)  # fmt: skip
def test_refused(draft_max: int | str, draft_min: int, n_ubatch: int) -> None:
    with pytest.raises(ConfigError):
        make_depth(draft_max, draft_min, 16, n_ubatch)


@pytest.mark.parametrize("draft_min", [0, 1, 5, 15])
@pytest.mark.parametrize("n_ubatch", [1, 2, 6, 16, 512])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_auto_stays_within_its_limits(draft_min: int, n_ubatch: int, block_size: int) -> None:
    largest = min(block_size, n_ubatch) - 1
    if draft_min > largest:
        with pytest.raises(ConfigError):
            make_depth(AUTO, draft_min, block_size, n_ubatch)
        return
    depth = make_depth(AUTO, draft_min, block_size, n_ubatch)
    rng = random.Random(draft_min)
    for likely in (0.0, 1.0, 0.5, 0.9, 0.1):
        for _ in range(60):
            assert draft_min <= depth.now <= largest
            depth.update(depth.now, sum(rng.random() < likely for _ in range(depth.now)), 1.0 + depth.now)


def test_auto_in_a_session(tiny_target: Path, tiny_drafter: Path) -> None:
    """Measured costs and counts reach the policy, and what it chooses is drafted and shown in the stats."""
    session = spec_session(tiny_target, tiny_drafter, draft_max=AUTO)
    prompt = text_ids(20, 1)
    expected = take_plain(plain_llama(tiny_target), prompt, 260, **GREEDY)
    forced = ForcedDrafts(session, prompt, expected, (FULL,))
    assert take(session, prompt, 200, **GREEDY) == expected[:200]
    depth = session.depth
    assert isinstance(depth, AdaptiveDepth)
    before = depth.acceptance(1)
    assert before > PRIOR_ACCEPTANCE and depth.cost(max(forced.drafted)) > 0.0
    assert session.stats.draft_max_now == depth.now
    forced = ForcedDrafts(session, prompt, expected, (0,))
    assert take(session, prompt, 240, **GREEDY) == expected[:240]
    assert depth.acceptance(1) < before  # how far it falls depends on how soon plain decoding takes over
    assert session.stats.plain_rounds > 0


def test_auto_is_held_to_the_micro_batch(tiny_target: Path, tiny_drafter: Path) -> None:
    prompt = text_ids(20, 1)
    expected = take_plain(plain_llama(tiny_target), prompt, 120, **GREEDY)
    for n_ubatch in (1, 2, 5):
        session = spec_session(tiny_target, tiny_drafter, draft_max=AUTO, n_ubatch=n_ubatch)
        forced = ForcedDrafts(session, prompt, expected, (FULL,))
        assert take(session, prompt, 100, **GREEDY) == expected[:100]
        assert max(forced.drafted) == n_ubatch - 1


def test_cut_rounds_teach_nothing(tiny_target: Path, tiny_drafter: Path) -> None:
    """Rounds that the consumer or the end of the text cut short say nothing about their depth."""
    session = spec_session(tiny_target, tiny_drafter, draft_max=AUTO)
    prompt = text_ids(20, 1)
    expected = take_plain(plain_llama(tiny_target), prompt, 30, **GREEDY)
    ForcedDrafts(session, prompt, expected, (FULL,))
    depth = session.stats.draft_max_now
    for n in range(2, depth + 1):
        stream = session.generate(prompt, **GREEDY)
        assert list(islice(stream, n)) == expected[:n]
        stream.close()
        assert session.stats.draft_max_now == depth


def test_numpy_integers_are_depths() -> None:
    assert make_depth(np.int64(3), np.int32(1), 16, 512).now == 3
    with pytest.raises(ConfigError):
        make_depth(np.float64(3.0), 0, 16, 512)  # type: ignore[arg-type]
