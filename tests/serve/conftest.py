"""One server for the tests that leave it as it was."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from http_tools import eventually

if TYPE_CHECKING:
    from serve_tools import Running

if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client", "openai")):
    collect_ignore_glob = ["test_*.py"]  # an environment without the extra `test`


@pytest.fixture(scope="package")
def server(tiny_target: Path, tiny_drafter: Path) -> Iterator[Running]:
    """A server on tiny random models, with logits kept."""
    from serve_tools import running

    with running(tiny_target, tiny_drafter, logits_all=True) as here:
        yield here


@pytest.fixture(autouse=True)
def alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared server: it answers, and nothing is left running."""
    yield
    if "server" in request.fixturenames:
        here: Running = request.getfixturevalue("server")
        assert here.text(max_tokens=2).status == 200
        eventually(here.idle)
