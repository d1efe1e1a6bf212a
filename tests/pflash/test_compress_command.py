"""`laguna-gguf compress`: text in, compressed text out."""

import io
import json
import sys
from pathlib import Path

import pytest

from laguna_gguf.cli import main
from scorer_fixtures import write_random_probe

TEXT = "Where is the tower?\n" + "The river runs by the old mill and the tower.\n" * 40 + "Tell me about the mill."
KEYS = {"text", "spans", "budget", "retained_tokens", "stop_reason", "retained_mass", "timings"}


@pytest.fixture
def base(tmp_path: Path, qwen35: Path) -> list[str]:
    (tmp_path / "text.txt").write_text(TEXT + "\n")
    drafter = ["--prefill-drafter", str(qwen35), "-t", "1"]
    return ["compress", *drafter, "-f", str(tmp_path / "text.txt"), "--prefill-keep-ratio", "0.2"]


def test_text_out(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(base) == 0
    out, err = capsys.readouterr()
    assert out.endswith("the mill.\n") and 100 < len(out) < len(TEXT) and err == ""


def test_json(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*base, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == KEYS and report["retained_tokens"] <= report["budget"]
    assert report["timings"]["query_rule"] == "content_tail"


def test_question_before_its_text(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*base, "--query", "tower?", "--required", "Where is", "--json", "--prefill-keep-ratio", "0.1"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert "Where is" in report["text"] and "tower?" in report["text"] and report["spans"][0][0] == 0
    assert report["retained_tokens"] < 1000  # what follows the question is no part of it


def test_standard_input(
    base: list[str], qwen35: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(base) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    arguments = ["compress", "--prefill-drafter", str(qwen35), "-t", "1", "--prefill-keep-ratio", "0.2"]
    assert main(arguments) == 0 and capsys.readouterr().out == expected


def test_explain_is_a_table_on_stderr(
    base: list[str], tmp_path: Path, qwen35: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = write_random_probe(tmp_path / "probe.gguf", qwen35)
    assert main([*base, "--explain", "--segment-probe", str(probe)]) == 0
    out, err = capsys.readouterr()
    assert "lift" in err and "pinned" in err and "of the mass" in err and "lift" not in out


def test_refusals(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    cases = [
        ([*base, "--query", "castle"], "'castle' does not occur in the prompt"),
        ([*base, "-f", str(tmp_path / "empty.txt")], "the text is empty"),
        ([*base, "-f", str(tmp_path / "absent.txt")], "No such file"),
        ([*base, "--scoring-head", str(tmp_path / "absent.gguf")], "not found"),
        ([*base, "--query", "Where"], "needed at least one token before it"),
    ]
    for arguments, message in cases:
        assert main(arguments) == 1
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1
    monkeypatch.setenv("PFLASH_SELECT_TOP_P", "0,5")
    assert main(base) == 1 and "PFLASH_SELECT_TOP_P" in capsys.readouterr().err


def test_usage_errors(base: list[str]) -> None:
    for arguments in (base[:-2], [*base, "--prefill-keep-ratio", "1.5"], [*base, "--prefill-keep-ratio", "nan"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_without_a_demo_drafter(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("laguna_gguf.pflash.demo.files", lambda _: tmp_path)
    assert main(["compress", *base[5:]]) == 1
    assert "no demo drafter; give a Qwen3.5 GGUF" in capsys.readouterr().err


def test_a_curve_in_place_of_a_ratio(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*base[:-2], "--prefill-curve", "10:0.9 100000:0.9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["timings"]["keep_ratio"] == pytest.approx(0.9)
    for wrong in (["--prefill-curve", "10"], ["--prefill-curve", "10:0.5", "--prefill-keep-ratio", "0.1"], []):
        with pytest.raises(SystemExit) as caught:
            main([*base[:-2], *wrong])
        assert caught.value.code == 2
        assert "prefill-curve" in capsys.readouterr().err
