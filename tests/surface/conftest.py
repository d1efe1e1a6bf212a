"""One pair of rivals for the tests that need no settings of their own; each call begins on empty contexts."""

from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import pytest

from session_tools import plain_llama, spec_session
from surface_tools import Rivals


@pytest.fixture(scope="session")
def judge(tiny_target: Path) -> Iterator[llama_cpp.Llama]:
    """Knows what comes next; its state is nobody's."""
    llama = plain_llama(tiny_target)
    yield llama
    llama.close()


@pytest.fixture(scope="session")
def rivals(tiny_target: Path, tiny_drafter: Path, judge: llama_cpp.Llama) -> Iterator[Rivals]:
    """Without logits_all."""
    plain, session = plain_llama(tiny_target), spec_session(tiny_target, tiny_drafter)
    yield Rivals(plain, session, judge)
    session.close()
    plain.close()


@pytest.fixture(scope="session")
def scored(tiny_target: Path, tiny_drafter: Path, judge: llama_cpp.Llama) -> Iterator[Rivals]:
    """With logits_all, as log probabilities need."""
    plain = plain_llama(tiny_target, logits_all=True)
    session = spec_session(tiny_target, tiny_drafter, logits_all=True)
    yield Rivals(plain, session, judge)
    session.close()
    plain.close()
