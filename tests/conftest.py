"""Shared fixtures: one tiny random target and a drafter that fits it, written once a session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import llama_cpp

    from laguna_gguf import SpecSession
    from session_tools import Scratch

# ggml's OpenMP threads spin while they wait unless told otherwise before the first one starts. Together with
# n_threads=1 in the tests this keeps the suite usable on a small shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random f32 Laguna GGUF: window 32, 8 layers, hidden 64, vocabulary 320."""
    from tiny_models import write_tiny_target

    return write_tiny_target(tmp_path_factory.mktemp("target") / "tiny-F32.gguf")


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter directory that fits `tiny_target` (window 32, block 16, captures layers 1, 4 and 7)."""
    from fixtures import write_drafter_dir

    path = tmp_path_factory.mktemp("drafter") / "tiny-dflash"
    write_drafter_dir(path, seed=2)
    return path


@pytest.fixture(scope="session")
def qwen35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random f32 Qwen3.5 drafter of 17 blocks: block 16 stands behind the scoring block."""
    from random_drafter import write_drafter

    return write_drafter(tmp_path_factory.mktemp("qwen35") / "tiny-qwen35.gguf")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random f32 Qwen3 drafter of 15 blocks."""
    from random_drafter import TINY_QWEN3, write_drafter

    return write_drafter(tmp_path_factory.mktemp("qwen3") / "tiny-qwen3.gguf", TINY_QWEN3)


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> llama_cpp.Llama:
    """The judge of a test file."""
    from session_tools import plain_llama

    return plain_llama(tiny_target)


@pytest.fixture(scope="module")
def scratch(tiny_target: Path, tiny_drafter: Path) -> Scratch:
    """What target and drafter say after given tokens, from nothing."""
    from session_tools import Scratch

    return Scratch(tiny_target, tiny_drafter)


@pytest.fixture
def session(tiny_target: Path, tiny_drafter: Path) -> SpecSession:
    """A new session; 7 drafts a round."""
    from session_tools import spec_session

    return spec_session(tiny_target, tiny_drafter)
