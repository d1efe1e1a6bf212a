"""Hostile directories are refused by every reader, every attack has its line, and a short fuzz run finds nothing."""

import os
import re
import sys
from pathlib import Path

import pytest

from convert_tools import write_target_dir, write_target_gguf
from fixtures import write_drafter_dir
from fuzz_gguf import fuzz
from laguna_gguf import LagunaError, convert_dflash, load_drafter
from laguna_gguf.errors import CheckpointError, ConfigError
from laguna_gguf.inspect import inspect
from malformed.directory_attacks import DIRECTORY_ATTACKS
from malformed.gguf_attacks import ATTACKS


@pytest.mark.parametrize("attack", DIRECTORY_ATTACKS)
def test_hostile_directories_are_refused(tmp_path: Path, attack: str) -> None:
    change, message = DIRECTORY_ATTACKS[attack]
    write_drafter_dir(tmp_path / "d")
    write_target_gguf(tmp_path / "target.gguf")
    change(tmp_path / "d")
    before = sorted(tmp_path.rglob("*"))
    for action in (
        load_drafter,
        lambda path: convert_dflash(path, tmp_path / "out.gguf", target=tmp_path / "target.gguf"),
        lambda path: convert_dflash(path, tmp_path / "out", outtype="hf"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
            action(tmp_path / "d")
        assert str(tmp_path / "d") in str(caught.value)
    report = inspect(tmp_path / "d")
    assert report["sound"] is False and report["problems"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_targets_of_special_files_do_not_hang(tmp_path: Path, name: str, kind: str) -> None:
    write_drafter_dir(tmp_path / "d")
    folder = write_target_dir(tmp_path / "t")
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    inspect(folder)
    try:
        convert_dflash(tmp_path / "d", tmp_path / "out.gguf", target=folder)
    except LagunaError:
        assert not (tmp_path / "out.gguf").exists()


def test_every_attack_has_its_line() -> None:
    text = (Path(__file__).parent / "malformed" / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| ([a-z0-9-]+) \|", text, re.MULTILINE)
    assert [name for name in lines if name != "attack"] == [*ATTACKS, *DIRECTORY_ATTACKS]


@pytest.mark.skipif(sys.platform != "linux", reason="memory limits and /proc")
def test_fuzz_smoke() -> None:
    report = fuzz(600, seed=20)
    assert report["failures"] == []
    assert report["slowest"][0] < 5
