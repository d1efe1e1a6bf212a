"""The soak script, in small."""

import json
import sys

import pytest

import soak_session


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_soak_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak_session.main(["--tokens", "700", "--limit", "12"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] >= 700 and report["turns"] > 5 and report["rounds"] > 100
