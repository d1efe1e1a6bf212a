"""Hidden rows that are kept for later: the same drafts, whatever happens between, and none captured without need."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from captured_llama import CapturedLlama, new_capture
from laguna_gguf import _native, load_drafter
from laguna_gguf.dflash.adaptive import FIRST_PROBE, AdaptiveDepth
from laguna_gguf.dflash.depth import FixedDepth
from laguna_gguf.dflash.drafter import Drafter
from laguna_gguf.errors import RollbackError
from session_tools import (
    GREEDY,
    STATE_TOLERANCE,
    Scratch,
    check_state,
    draft_logits,
    plain_llama,
    spec_session,
    spread,
    take,
    text_ids,
)

N_ROWS = 300


@pytest.fixture(scope="module")
def capture(tiny_target: Path) -> Iterator[_native.HiddenCapture]:
    """Residual rows of 300 positions."""
    capture = new_capture()
    llm = CapturedLlama(tiny_target, capture, n_ctx=512)
    capture.begin()
    llm.decode_all(text_ids(N_ROWS))
    yield capture
    llm.close()


@pytest.fixture
def drafters(tiny_target: Path, tiny_drafter: Path) -> tuple[Drafter, Drafter]:
    """One that defers and one that does not."""
    return (
        load_drafter(tiny_drafter, target=tiny_target, n_threads=1),
        load_drafter(tiny_drafter, target=tiny_target, n_threads=1),
    )


def check_same(late: Drafter, now: Drafter) -> None:
    """Both have the same position and draft the same."""
    assert (late.position, late.n_rows >= min(late.position, late.config.sliding_window - 1)) == (now.position, True)
    got = late.draft(7, 15, return_logits=True).logits
    expected = now.draft(7, 15, return_logits=True).logits
    assert got is not None and expected is not None
    assert spread(got, expected) <= 1e-5


def feed(capture: _native.HiddenCapture, drafters: tuple[Drafter, Drafter], n: int) -> None:
    """The next n rows to both."""
    late, now = drafters
    start = now.position
    late._native.append_captured(capture, start, n, start, True)
    now._native.append_captured(capture, start, n, start)
    assert late.position == now.position == start + n


def test_deferred_rows_draft_as_if_computed_at_once(
    capture: _native.HiddenCapture, drafters: tuple[Drafter, Drafter]
) -> None:
    """Runs of all lengths, up to more than the 128 that are kept, with drafts between and not."""
    for n in (1, 1, 4, 16, 17, 90, 128, 3, 1):
        feed(capture, drafters, n)
        if n % 2:
            check_same(*drafters)
    check_same(*drafters)


def test_rollback_of_deferred_rows(capture: _native.HiddenCapture, drafters: tuple[Drafter, Drafter]) -> None:
    for _ in range(2):
        feed(capture, drafters, 20)
        check_same(*drafters)
    feed(capture, drafters, 6)
    for position in (46, 44, 43, 40, 38):  # nothing, some of the deferred rows, all of them, computed rows too
        for drafter in drafters:
            drafter.rollback(position)
            assert drafter.position == position
        if position != 43:
            check_same(*drafters)
    feed(capture, drafters, 20)
    for drafter in drafters:
        drafter.rollback(50)
    check_same(*drafters)
    for drafter in drafters:
        drafter.reset()
        assert (drafter.position, drafter.n_rows) == (0, 0)
    feed(capture, drafters, 5)
    check_same(*drafters)


def test_deferred_rows_refuse_holes_and_change_nothing(
    capture: _native.HiddenCapture, drafters: tuple[Drafter, Drafter]
) -> None:
    late, _ = drafters
    feed(capture, drafters, 10)
    for start in (0, 9, 11):
        for deferred in (False, True):
            with pytest.raises(RollbackError, match="needed 10"):
                late._native.append_captured(capture, start, 2, start, deferred)
    with pytest.raises(RollbackError, match=r"needed 0\.\.10"):
        late.rollback(11)
    feed(capture, drafters, 3)
    check_same(*drafters)


def test_public_rows_follow_deferred_ones(capture: _native.HiddenCapture, drafters: tuple[Drafter, Drafter]) -> None:
    feed(capture, drafters, 9)
    rows = capture.rows()[9:14]
    for drafter in drafters:
        drafter.append_context(rows)
    check_same(*drafters)


# Sessions.


class Script:
    """A depth policy that decodes plainly for some rounds, then drafts."""

    largest = 7

    def __init__(self, plain: int) -> None:
        self.plain = plain
        self.now = 0

    @property
    def plain_ahead(self) -> int:
        return self.plain

    def update(self, drafted: int, accepted: int, ms: float) -> None:
        self.plain = max(self.plain - 1, 0)
        self.now = 0 if self.plain else self.largest


@pytest.mark.parametrize("n_plain", [8, 31, 32, 60])
def test_drafts_resume_with_a_whole_window(tiny_target: Path, tiny_drafter: Path, n_plain: int) -> None:
    """After a plain stretch, shorter or longer than the drafter's window of 32, drafts are those from scratch."""
    session = spec_session(tiny_target, tiny_drafter, draft_max="auto")
    session.depth = Script(n_plain)
    ids = text_ids(50)
    captured: list[bool] = []
    verify = session.verify

    def watched(anchor: int, draft: list[int]) -> None:
        verify(anchor, draft)
        captured.append(session._capture.enabled)

    session.verify = watched  # type: ignore[method-assign]
    tokens = take(session, ids, n_plain + 12, **GREEDY)
    assert captured[:n_plain] == [n_plain - i < session.drafter.config.sliding_window for i in range(n_plain)]
    assert all(captured[n_plain:])
    assert session.stats.drafted_tokens > 0 and session.stats.plain_rounds == n_plain
    plain = plain_llama(tiny_target)
    assert tokens == take(plain, ids, n_plain + 12, **GREEDY)
    scratch = Scratch(tiny_target, tiny_drafter)
    assert spread(draft_logits(session), scratch.draft_logits([*ids, *tokens[:-1]])) <= STATE_TOLERANCE
    check_state(session, scratch, [*ids, *tokens[:-1]])
    session.close()


def test_drafter_is_brought_up_to_date_when_it_is_read(tiny_target: Path, tiny_drafter: Path) -> None:
    """In the middle of a stretch without capture, and the stretch goes on after."""
    session = spec_session(tiny_target, tiny_drafter, draft_max="auto")
    session.depth = Script(200)
    ids = text_ids(40)
    tokens = take(session, ids, 30, **GREEDY)
    assert session._drafter.position == 0, "nothing was wanted of it so far"
    check_state(session, Scratch(tiny_target, tiny_drafter), [*ids, *tokens[:-1]])
    more = take(session, [*ids, *tokens], 20, **GREEDY)
    check_state(session, Scratch(tiny_target, tiny_drafter), [*ids, *tokens, *more[:-1]])
    session.close()


def test_a_policy_that_changes_its_mind_waits_for_the_context(tiny_target: Path, tiny_drafter: Path) -> None:
    """Drafting that begins sooner than announced begins when the window has filled, and never on a part of it."""
    session = spec_session(tiny_target, tiny_drafter, draft_max="auto")
    depth = session.depth = Script(500)
    ids = text_ids(40)
    stream = session.generate(ids, **GREEDY)
    tokens = [next(stream) for _ in range(5)]
    depth.plain = 1
    tokens += [next(stream) for _ in range(60)]
    stream.close()
    window = session.drafter.config.sliding_window
    assert 4 + window - 1 <= session.stats.plain_rounds <= 4 + window + 1
    assert session.stats.drafted_tokens > 0
    check_state(session, Scratch(tiny_target, tiny_drafter), [*ids, *tokens[:-1]])
    session.close()


# Policies.


def test_fixed_depth_says_whether_it_ever_drafts() -> None:
    assert FixedDepth(0).plain_ahead == math.inf
    assert FixedDepth(3).plain_ahead == 0


def test_adaptive_depth_announces_its_plain_stretches() -> None:
    """What plain_ahead says comes true, round by round."""
    depth = AdaptiveDepth(0, 15)
    announced: list[tuple[float, int]] = []
    for _ in range(1000):
        announced.append((depth.plain_ahead, depth.now))
        depth.update(depth.now, 0, 10.0 + 10.0 * depth.now)
    assert max(ahead for ahead, _ in announced) >= FIRST_PROBE
    for i, (ahead, _) in enumerate(announced):
        assert all(now == 0 for _, now in announced[i : i + int(ahead)])
    assert any(now for _, now in announced[100:]), "it never probed again"


def test_adaptive_depth_keeps_a_plan_that_the_session_could_not_follow() -> None:
    depth = AdaptiveDepth(0, 15)
    planned = depth.now
    for _ in range(20):
        depth.update(0, 0, 10.0)
        assert depth.now == planned and depth.plain_ahead == 0
    assert depth.cost(0) == pytest.approx(10.0)
    depth.update(planned, planned, 12.0)
    assert np.isfinite(depth.cost(planned))
