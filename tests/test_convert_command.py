"""tools/convert_dflash.py: output, exit status, progress."""

import io
from pathlib import Path

import pytest
from rich.console import Console

import convert_dflash as command
from convert_tools import write_target_dir, write_target_gguf
from fixtures import write_drafter_dir


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target_gguf(tmp_path / "target.gguf")


def test_command(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_drafter_dir(tmp_path / "d")
    arguments = [str(tmp_path / "d"), "--outfile", str(tmp_path / "x-{ftype}-{FTYPE}.gguf"), "--outtype", "q8_0"]
    assert command.main([*arguments, "--target-gguf", str(target), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "would write" in printed
    assert "layers.0.mlp.down_proj" in printed
    assert "default: sliding_windows" in printed
    assert not list(tmp_path.glob("x-*"))
    assert command.main([*arguments, "--target-gguf", str(target)]) == 0
    assert (tmp_path / "x-q8_0-Q8_0.gguf").is_file()
    folder = write_target_dir(tmp_path / "t")
    assert command.main([*arguments, "--target-model-dir", str(folder), "--verbose"]) == 0


def test_command_writes_directories_and_takes_types_in_any_case(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_drafter_dir(tmp_path / "d", dtype="bf16")
    a, back = tmp_path / "a.gguf", tmp_path / "back"
    assert (
        command.main([str(tmp_path / "d"), "--outfile", str(a), "--outtype", "BF16", "--target-gguf", str(target)]) == 0
    )
    assert command.main([str(a), "--outfile", str(back), "--outtype", "HF", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "layers.2.self_attn.qkv_proj.weight" in printed and "blk.2.attn_q, blk.2.attn_k, blk.2.attn_v" in printed
    assert not back.exists()
    assert command.main([str(a), "--outfile", str(back), "--outtype", "hf"]) == 0
    assert (back / "config.json").is_file()
    assert command.main([str(a), "--outfile", str(back), "--outtype", "hf"]) == 1
    assert "exists" in capsys.readouterr().err


def test_command_shows_progress_on_terminals_only(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_drafter_dir(tmp_path / "d")
    arguments = [str(tmp_path / "d"), "--outfile", str(tmp_path / "a.gguf"), "--target-gguf", str(target)]
    assert command.main(arguments) == 0
    assert capsys.readouterr().err == ""
    screen = io.StringIO()
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    assert command.main(arguments) == 0
    assert "converting" in screen.getvalue() and "KiB" in screen.getvalue()


def test_command_refuses_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_drafter_dir(tmp_path / "d", gating="per-element")
    for source in (tmp_path / "d", tmp_path / "nothing"):
        assert command.main([str(source), "--outfile", str(tmp_path / "x.gguf")]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["d"],
        ["d", "--outfile", "x", "--outtype", "q9"],
        ["d", "--nonsense"],
        ["d", "--outfile", "x", "--target-gguf", "a", "--target-model-dir", "b"],
    ],
)
def test_command_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err
