"""The adaptive depth: what it chooses on known costs and acceptance, and that it is cheap where drafting cannot pay."""

import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from laguna_gguf.dflash.adaptive import FIRST_DEPTH, AdaptiveDepth
from simulate_depth import COSTS, PROFILES, Cost, main, simulate


def drive(depth: AdaptiveDepth, cost: Cost, chance: float, rounds: int, seed: int = 0) -> list[int]:
    """Depths of so many rounds with exact costs and a constant chance for every next draft."""
    rng = random.Random(seed)
    used = []
    for _ in range(rounds):
        n, run = depth.now, 0
        while run < n and rng.random() < chance:
            run += 1
        used.append(n)
        depth.update(n, run, cost(n))
    return used


def test_begins_with_measuring() -> None:
    depth = AdaptiveDepth(0, 15)
    assert drive(depth, COSTS["36+3.6"], 0.9, 4) == [FIRST_DEPTH, FIRST_DEPTH, 0, 0]


def test_nothing_accepted_means_plain_decoding() -> None:
    depth = AdaptiveDepth(0, 15)
    used = drive(depth, COSTS["77+3.1"], 0.0, 400)
    assert depth.is_plain
    assert sum(n > 0 for n in used) <= 16  # the first measurements and a few short bursts


def test_everything_accepted_means_the_deepest() -> None:
    depth = AdaptiveDepth(0, 15)
    used = drive(depth, COSTS["flat"], 1.0, 200)
    assert sum(n == 15 for n in used[-60:]) >= 45


def test_comes_back_when_drafts_are_accepted_again() -> None:
    depth = AdaptiveDepth(0, 15)
    drive(depth, COSTS["36+3.6"], 0.0, 300)
    assert depth.is_plain
    used = drive(depth, COSTS["36+3.6"], 0.9, 1600)
    assert not depth.is_plain
    assert sum(n >= 4 for n in used[-100:]) >= 80


def test_costs_need_not_be_monotone() -> None:
    """A dip at one depth is found: 7 drafts are cheaper than 5 here, as on kernels with row blocks."""

    def cost(n: int) -> float:
        return 20.0 if n == 0 else (30.0 if n == 7 else 55.0)

    depth = AdaptiveDepth(0, 15)
    used = drive(depth, cost, 0.8, 400)
    assert sum(n == 7 for n in used[-100:]) >= 75


def test_draft_min_rules_plain_decoding_out() -> None:
    depth = AdaptiveDepth(3, 9)
    used = drive(depth, COSTS["36+3.6"], 0.5, 300)
    assert set(used) <= set(range(3, 10)) and len(set(used)) > 1


def test_only_plain_when_nothing_else_fits() -> None:
    depth = AdaptiveDepth(0, 0)
    assert drive(depth, COSTS["flat"], 1.0, 20) == [0] * 20


def test_one_spike_changes_nothing() -> None:
    depth = AdaptiveDepth(0, 15)
    drive(depth, COSTS["flat"], 0.9, 200)
    before = depth.cost(depth.now)
    depth.update(depth.now, depth.now, before * 500)
    assert depth.cost(depth.now) < 1.3 * before
    assert not depth.is_plain


@pytest.mark.parametrize("cost", sorted(COSTS))
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_never_behind_plain_decoding(cost: str, profile: str) -> None:
    """The promise, measuring included: over 4,000 tokens at least 0.97 of plain and 0.95 of the best fixed depth."""
    result = simulate(COSTS[cost], profile, 4000, seeds=3)
    assert result["speedup"] >= 0.97
    assert result["of_best"] >= 0.95


def test_plot_has_a_panel_for_every_row(tmp_path: Path) -> None:
    out = tmp_path / "curves.svg"
    assert main(["--tokens", "64", "--seeds", "1", "--plot", str(out), "--json"]) == 0
    root = ElementTree.parse(out).getroot()
    curves = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == len(COSTS) * (len(PROFILES) + 1)
    assert all(len(curve.attrib["points"].split()) == 16 for curve in curves)


@pytest.mark.parametrize("cost", sorted(COSTS))
def test_short_texts_pay_little_for_measuring(cost: str) -> None:
    assert simulate(COSTS[cost], "adversarial", 256, seeds=3)["speedup"] >= 0.90
