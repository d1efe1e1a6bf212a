"""The numpy reference of the tiny target, and pairs of drafter and reference."""

from pathlib import Path
from typing import Any

import pytest

from drafter_tools import Pair, PairFactory
from fixtures import drafter_config, write_drafter_dir
from laguna_gguf import load_drafter
from reference.dflash_numpy import ReferenceDrafter
from reference.laguna_numpy import ReferenceTarget


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> ReferenceTarget:
    return ReferenceTarget(tiny_target)


@pytest.fixture(scope="module")
def make_pair(tiny_target: Path, target: ReferenceTarget, tmp_path_factory: pytest.TempPathFactory) -> PairFactory:
    """Pair of given config.json overrides, reset; loaded once a module for each distinct request."""
    loaded: dict[str, Pair] = {}

    def make(**overrides: Any) -> Pair:
        key = repr(sorted(overrides.items()))
        if key not in loaded:
            path = tmp_path_factory.mktemp("drafter") / "model"
            tensors = write_drafter_dir(path, seed=5, **overrides)
            config = drafter_config(**overrides)
            reference = ReferenceDrafter(config, tensors, target.embedding, target.lm_head)
            loaded[key] = Pair(load_drafter(path, target=tiny_target, n_threads=1), reference, config["sliding_window"])
        loaded[key].reset()
        return loaded[key]

    return make
