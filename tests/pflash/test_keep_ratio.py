"""Keep ratios by prompt length and by acceptance."""

import math
import random

import pytest

from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.keep_ratio import AdaptiveKeepRatio, Curve


@pytest.mark.parametrize(
    ("n", "ratio"),
    [(0, 0.2), (7999, 0.2), (8000, 0.2), (36_000, 0.125), (22_000, 0.1625), (64_000, 0.05), (10**9, 0.05)],
)
def test_curve(n: int, ratio: float) -> None:
    for text in ("8000:0.2 64000:0.05", " 64000:5e-2\n 8000:.2 "):
        assert Curve.parse(text).ratio(n) == pytest.approx(ratio, abs=1e-15)


def test_curve_is_exact_at_its_points_and_monotone_between() -> None:
    curve = Curve.parse("1000:0.3 2000:0.1 3000:0.1 9000:1")
    assert [curve.ratio(n) for n in (1000, 2000, 2500, 3000, 9000)] == [0.3, 0.1, 0.1, 0.1, 1.0]
    falling = [curve.ratio(n) for n in range(1000, 2001, 7)]
    assert falling == sorted(falling, reverse=True)
    assert Curve.parse("0:0.5").ratio(7) == 0.5


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "8000", "8000:", ":0.2", "8000:0.2:3", "-1:0.2", "8000:-0.2", "8000:0", "8000:1.01", "8000:nan"),
        *("8000:0.2 8000:0.3", "8000:0.2 08000:0.2", "8000:0.2,64000:0.05", "8k:0.2", "8000.5:0.2", "8000:1e999"),
    ],
)
def test_bad_curves(text: str) -> None:
    with pytest.raises(ConfigError, match="curve"):
        Curve.parse(text)


def test_scripted_acceptances() -> None:
    """ema: 0.95, 0.935, 0.8945, 0.77615, 0.693305, 0.6953135, 0.78671945, 0.850703615."""
    adaptive = AdaptiveKeepRatio()
    assert adaptive.ratio("s", 0.1) == 0.1
    expected = [0.09, 0.08, 0.075, 0.075, 0.085, 0.095, 0.095, 0.09]
    for acceptance, ratio in zip((0.95, 0.90, 0.80, 0.50, 0.50, 0.70, 1.0, 1.0), expected, strict=True):
        assert adaptive.update("s", acceptance, configured=0.1) == pytest.approx(ratio)
        assert adaptive.ratio("s", 0.2) == pytest.approx(ratio)  # the configured ratio is only where a session starts


@pytest.mark.parametrize(
    ("acceptance", "step"),
    [
        *((1.0, -0.01), (0.91, -0.01), (0.90, -0.005), (0.86, -0.005), (0.85, 0.0), (0.80, 0.0), (0.75, 0.0)),
        *((0.749, 0.005), (0.70, 0.005), (0.699, 0.01), (0.0, 0.01)),
    ],
)
def test_thresholds(acceptance: float, step: float) -> None:
    assert AdaptiveKeepRatio().update(1, acceptance, configured=0.1) == pytest.approx(0.1 + step)


@pytest.mark.parametrize(("acceptance", "step"), [(0.9, -0.005), (0.85, 0.0), (0.7, 0.005)])
def test_a_steady_acceptance_stays_at_its_threshold(acceptance: float, step: float) -> None:
    adaptive = AdaptiveKeepRatio()
    ratios = [adaptive.update("s", acceptance, configured=0.1) for _ in range(6)]
    assert ratios == pytest.approx([0.1 + step * (i + 1) for i in range(6)])


@pytest.mark.parametrize("text", [None, 5, b"8000:0.2"])
def test_curves_are_text(text: object) -> None:
    with pytest.raises(ConfigError, match="curve"):
        Curve.parse(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(("configured", "start"), [(0.0, 0.025), (0.01, 0.025), (0.05, 0.05), (0.5, 0.2), (1, 0.2)])
def test_start(configured: float, start: float) -> None:
    adaptive = AdaptiveKeepRatio()
    assert adaptive.ratio("new", configured) == start
    assert adaptive.update("new", 0.8, configured=configured) == start


def test_ratios_stay_in_range() -> None:
    rng = random.Random(3)
    adaptive = AdaptiveKeepRatio()
    for always, end in ((1.0, 0.025), (0.0, 0.2)):
        ratios = [adaptive.update(always, always, configured=0.1) for _ in range(40)]
        assert ratios[-1] == pytest.approx(end)
    for _ in range(500):
        assert 0.025 <= adaptive.update(rng.randrange(5), rng.random(), configured=rng.random()) <= 0.2


def test_least_recently_used_sessions_are_forgotten() -> None:
    adaptive = AdaptiveKeepRatio(capacity=2)
    for session in ("a", "b"):
        adaptive.update(session, 0.0, configured=0.1)
    assert adaptive.ratio("a", 0.1) == pytest.approx(0.11)  # used, so that b is the older one now
    adaptive.update("c", 0.0, configured=0.1)
    assert adaptive.ratio("b", 0.1) == 0.1
    assert adaptive.ratio("a", 0.1) == adaptive.ratio("c", 0.1) == pytest.approx(0.11)
    for n in range(50):
        adaptive.ratio(n, 0.1)  # asking does not remember
    assert adaptive.ratio("a", 0.1) == pytest.approx(0.11)


@pytest.mark.parametrize("acceptance", [-0.01, 1.01, math.nan, math.inf, "0.5", None])
def test_bad_acceptance_changes_nothing(acceptance: object) -> None:
    adaptive = AdaptiveKeepRatio()
    adaptive.update("s", 0.5, configured=0.1)
    with pytest.raises(ConfigError, match="acceptance"):
        adaptive.update("s", acceptance, configured=0.1)
    assert adaptive.ratio("s", 0.1) == pytest.approx(0.11)


@pytest.mark.parametrize("configured", [-0.1, 1.5, math.nan, None])
def test_bad_configured(configured: object) -> None:
    for call in (
        lambda: AdaptiveKeepRatio().ratio("s", configured),
        lambda: AdaptiveKeepRatio().update("s", 0.5, configured=configured),
    ):
        with pytest.raises(ConfigError, match="configured"):
            call()


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_bad_capacity(capacity: object) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        AdaptiveKeepRatio(capacity)
