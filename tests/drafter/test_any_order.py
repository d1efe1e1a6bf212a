"""Everything in any order, beside the reference."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from drafter_tools import MAX_DRAFT, MODES, Features, Pair, PairFactory, random_features, rollback_or_refuse
from laguna_gguf.errors import RollbackError
from reference.dflash_numpy import Window


class DrafterMachine(RuleBasedStateMachine):
    """Append, draft, roll back and reset in any order; the drafter always equals the reference."""

    pair: Pair
    n_appended: int

    @initialize()
    def begin(self) -> None:
        self.pair.reset()
        self.n_appended = 0

    def features(self, n_rows: int) -> Features:
        self.n_appended += 1
        return random_features(n_rows, seed=1000 + self.n_appended)

    @rule(n_rows=st.integers(1, 20))
    def append(self, n_rows: int) -> None:
        self.pair.append(self.features(n_rows))

    @rule(n_rows=st.integers(1, 6), hole=st.sampled_from([-3, -1, 1, 7]))
    def append_with_hole(self, n_rows: int, hole: int) -> None:
        if self.pair.reference.position == self.pair.reference.first_position:
            return
        start = max(0, self.pair.drafter.position + hole)
        with pytest.raises(RollbackError):
            self.pair.drafter.append_context(self.features(n_rows), start)

    @rule(anchor=st.integers(0, 319), n=st.integers(1, MAX_DRAFT), mode=st.sampled_from(MODES))
    def draft(self, anchor: int, n: int, mode: Window) -> None:
        self.pair.check(anchor, n, (mode,))

    @rule(depth=st.integers(0, 45))
    def rollback(self, depth: int) -> None:
        position = self.pair.drafter.position - depth
        if position < self.pair.reference.first_position:
            with pytest.raises(RollbackError):
                self.pair.drafter.rollback(position)
        else:
            rollback_or_refuse(self.pair, position)

    @rule(start=st.sampled_from([0, 1, 33, 500]), n_rows=st.integers(1, 12))
    def reset(self, start: int, n_rows: int) -> None:
        self.pair.reset()
        self.pair.append(self.features(n_rows), start)

    @invariant()
    def same_position(self) -> None:
        assert self.pair.drafter.position == self.pair.reference.position


@pytest.mark.parametrize("window", [6, 32])
def test_state_machine(make_pair: PairFactory, window: int) -> None:
    machine = type("Machine", (DrafterMachine,), {"pair": make_pair(sliding_window=window)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
