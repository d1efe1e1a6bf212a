"""The reference itself: it sees each of the known mistakes."""

from typing import Any

import numpy as np
import pytest

from drafter_tools import MAX_DRAFT, MODES, VISIBLE, Features, random_features
from fixtures import drafter_config, drafter_tensors
from reference.dflash_numpy import Array, ReferenceDrafter, spread
from reference.laguna_numpy import ReferenceTarget


def reference_drafter(
    target: ReferenceTarget, cls: type[ReferenceDrafter] = ReferenceDrafter, **overrides: Any
) -> ReferenceDrafter:
    """A reference alone; overrides are config.json fields, or `weights` (a function that edits the tensors)."""
    edit = overrides.pop("weights", None)
    config = drafter_config(**overrides)
    tensors = drafter_tensors(config, seed=5)
    if edit is not None:
        edit(tensors)
    return cls(config, tensors, target.embedding, target.lm_head)


class WithoutAuxNorm(ReferenceDrafter):
    def captured_slice(self, i: int, h: Array) -> Array:
        return h


class WithoutContextInputNorm(ReferenceDrafter):
    def context_input(self, layer: int, c: Array) -> Array:
        return c


def zero_gates(tensors: dict[str, Features]) -> None:
    for name in tensors:
        if name.endswith("g_proj.weight"):
            tensors[name] = np.zeros_like(tensors[name])


def unit_aux_norms(tensors: dict[str, Features]) -> None:
    for name in tensors:
        if name.startswith("aux_hidden_norms"):
            tensors[name] = np.ones_like(tensors[name])


def swap_query_and_key_norms(tensors: dict[str, Features]) -> None:
    for name in [name for name in tensors if name.endswith("q_norm.weight")]:
        other = name.replace("q_norm", "k_norm")
        tensors[name], tensors[other] = tensors[other], tensors[name]


@pytest.mark.parametrize(
    ("cls", "overrides", "layers"),
    [
        pytest.param(ReferenceDrafter, {"weights": zero_gates}, (1, 4, 7), id="gate_zeroed"),
        pytest.param(WithoutAuxNorm, {}, (1, 4, 7), id="aux_norm_skipped"),
        pytest.param(ReferenceDrafter, {"weights": unit_aux_norms}, (1, 4, 7), id="aux_weights_as_one"),
        pytest.param(WithoutContextInputNorm, {}, (1, 4, 7), id="context_without_input_layernorm"),
        pytest.param(ReferenceDrafter, {}, (0, 3, 6), id="ids_one_too_low"),
        pytest.param(ReferenceDrafter, {}, (2, 5, 7), id="ids_one_too_high"),
        pytest.param(ReferenceDrafter, {"sliding_window": 512}, (1, 4, 7), id="window_512"),
        pytest.param(ReferenceDrafter, {"sliding_window": 31}, (1, 4, 7), id="window_one_short"),
        pytest.param(ReferenceDrafter, {"sliding_window": 33}, (1, 4, 7), id="window_one_long"),
        pytest.param(ReferenceDrafter, {"rope_theta": 10000.0}, (1, 4, 7), id="rope_of_the_target"),
        pytest.param(ReferenceDrafter, {"weights": swap_query_and_key_norms}, (1, 4, 7), id="q_and_k_norms_swapped"),
        pytest.param(ReferenceDrafter, {"mask_token_id": 13}, (1, 4, 7), id="mask_off_by_one"),
    ],
)
def test_reference_sees_the_mistakes(
    target: ReferenceTarget, cls: type[ReferenceDrafter], overrides: dict[str, Any], layers: tuple[int, ...]
) -> None:
    residuals, _ = target.forward(np.random.default_rng(3).integers(0, 320, 90))
    right = reference_drafter(target)
    right.append(residuals[:, (1, 4, 7)])
    wrong = reference_drafter(target, cls, **overrides)
    wrong.append(residuals[:, layers])
    assert spread(wrong.draft(7, MAX_DRAFT)[1], right.draft(7, MAX_DRAFT)[1]) > VISIBLE


def test_reference_sees_shifted_positions_and_window_modes(target: ReferenceTarget) -> None:
    right, shifted = reference_drafter(target), reference_drafter(target)
    features = random_features(60)
    right.append(features)
    shifted.append(features, 1)
    # Rope is relative: a shift of the whole context alone must not matter.
    assert spread(shifted.draft(7, 5)[1], right.draft(7, 5)[1]) < 1e-9
    holed = reference_drafter(target)
    holed.append(features[:-1], 1)
    assert spread(holed.draft(7, 5)[1], right.draft(7, 5)[1]) > VISIBLE
    per_query, anchored = (right.draft(7, MAX_DRAFT, mode)[1] for mode in MODES)
    assert spread(anchored, per_query) > VISIBLE
    short = reference_drafter(target)
    short.append(features[: 32 - MAX_DRAFT])
    # The two modes differ only when cached rows + j > W - 1.
    np.testing.assert_allclose(short.draft(7, 14, "anchored")[1], short.draft(7, 14, "per_query")[1], atol=1e-12)
