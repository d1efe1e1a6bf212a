"""One daemon on a tiny drafter for the tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_tools import Daemon, running_daemon


@pytest.fixture(scope="package")
def daemon(tmp_path_factory: pytest.TempPathFactory, qwen35: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("daemon"), "--prefill-drafter", str(qwen35)) as running:
        yield running
