"""The acceptance warning: once, with numbers and causes, and only when there is something to say."""

import logging

import pytest

from laguna_gguf.dflash.health import LOWEST_RATE, MIN_DRAFTED, MIN_ROUNDS, AcceptanceWatch, low_acceptance


def watched(rounds: list[tuple[int, int]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages after rounds of (drafted, accepted)."""
    watch = AcceptanceWatch()
    with caplog.at_level(logging.WARNING, logger="laguna_gguf"):
        for drafted, accepted in rounds:
            watch.update(drafted, accepted)
    return [record.getMessage() for record in caplog.records]


def test_one_warning_with_numbers_and_causes(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = watched([(7, 0)] * 31 + [(7, 1)] + [(7, 0)] * 1000, caplog)
    assert "1 of 224" in message and "0.4%" in message and "32 rounds" in message
    for cause in ("another release", "rotated", "template", "norms"):
        assert cause in message
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].name == "laguna_gguf"


@pytest.mark.parametrize(
    "rounds",
    [
        [(7, 0)] * (MIN_ROUNDS - 1),
        [(1, 0)] * (MIN_DRAFTED - 1),
        [(0, 0)] * 1000,
        [(15, 1)] * 100,
        [(15, 15)] * MIN_ROUNDS + [(15, 0)] * 1000,  # good at first: hard text later is not the drafter's fault
    ],
)
def test_no_warning(rounds: list[tuple[int, int]], caplog: pytest.LogCaptureFixture) -> None:
    assert watched(rounds, caplog) == []


def test_plain_rounds_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    assert watched([(0, 0), (7, 0)] * (MIN_ROUNDS - 1), caplog) == []
    assert len(watched([(0, 0), (7, 0)] * MIN_ROUNDS, caplog)) == 1


def test_short_drafts_wait_for_enough_tokens(caplog: pytest.LogCaptureFixture) -> None:
    assert len(watched([(1, 0)] * MIN_DRAFTED, caplog)) == 1


def test_the_limit_is_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    drafted = 1000
    at_limit = round(LOWEST_RATE * drafted)
    assert low_acceptance(MIN_ROUNDS, drafted, at_limit) is None
    message = low_acceptance(MIN_ROUNDS, drafted, at_limit - 1)
    assert message is not None and "1.9%" in message
