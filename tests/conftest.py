"""Shared fixtures: one tiny random target and a drafter that fits it, written once a session."""

import os
from pathlib import Path

import pytest

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
