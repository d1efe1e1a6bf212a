"""The laguna-gguf command: exit codes, streams, JSON keys, refusals."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fixtures import write_drafter_dir
from laguna_gguf import SpecStats, convert_dflash
from laguna_gguf.cli import main
from laguna_gguf.commands import demo
from laguna_gguf.commands.generation import Generation
from laguna_gguf.commands.output import TokenWriter, one_line, size
from tiny_models import write_tiny_target

F32 = ["-ctk", "f32", "-ctv", "f32"]
FAST = ["-t", "1", "-tb", "1", "-c", "512", "-ub", "64"]
PROMPT = "def main(argv):\n    the rest of it "
STATS = set(SpecStats.__dataclass_fields__)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, "stdout must hold one JSON object and nothing else"
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process."""

    def run(*argv: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


def run_process(*argv: object, stdin: bytes = b"", **environment: str) -> Result:
    """Run the command as a user does."""
    command = [sys.executable, "-m", "laguna_gguf.cli", *(str(arg) for arg in argv)]
    done = subprocess.run(
        command, input=stdin, capture_output=True, timeout=120, env={**os.environ, **environment}, check=False
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def assert_refused(result: Result, *fragments: str) -> None:
    """Exit 1, nothing on stdout, one reason as the last line of stderr, no traceback."""
    assert result.code == 1, result
    assert result.out == ""
    assert "Traceback" not in result.err
    reasons = [line for line in result.err.splitlines() if line.startswith("laguna-gguf: error: ")]
    assert len(reasons) == 1 and result.err.splitlines()[-1] == reasons[0], result.err
    for fragment in fragments:
        assert fragment in reasons[0], reasons[0]


# -- usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "-m", "t.gguf", "-p", "x"],  # neither -md nor --no-draft
        ["generate", "-m", "t.gguf", "-md", "d.gguf"],  # no prompt
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "-f", "y"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "--temp", "-1"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "--temp", "nan"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "--top-p", "1.5"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "-n", "0"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "-n", "many"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "-c", "-5"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "-ngl", "some"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "-ctk", "q9"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "-ctv", "q8_0"],  # needs -fa on
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "--spec-draft-n-max", "all"],
        ["generate", "-m", "t.gguf", "-md", "d.gguf", "-p", "x", "--spec-draft-window", "wide"],
        ["inspect"],
        ["demo", "extra"],
    ],
)
def test_usage_errors_exit_2(run: Run, argv: list[str]) -> None:
    result = run(*argv)
    assert result.code == 2
    assert result.out == "" and "usage: laguna-gguf" in result.err


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["demo", "--help"], ["inspect", "--help"]])
def test_help_goes_to_stdout(run: Run, argv: list[str]) -> None:
    result = run(*argv)
    assert result.code == 0 and "usage: laguna-gguf" in result.out and result.err == ""


def test_version_names_both_packages(run: Run) -> None:
    result = run("--version")
    assert result.code == 0
    assert result.out.startswith("laguna-gguf 0.") and "llama-cpp-python 0.3.36" in result.out


# -- generate -----------------------------------------------------------------------------------------------------


def test_generate_json(run: Run, tiny_target: Path, tiny_drafter: Path) -> None:
    result = run(
        "generate", "-m", tiny_target, "-md", tiny_drafter, "-p", PROMPT, "-n", 40, "--temp", 0, "--json", *FAST
    )
    assert result.code == 0, result.err
    report = result.json
    assert set(report) == {"text", "tokens", "finish_reason", "timings", "stats"}
    assert set(report["stats"]) == STATS
    timings = report["timings"]
    assert set(timings) == {
        "prompt_n",
        "prompt_ms",
        "predicted_n",
        "predicted_ms",
        "predicted_per_second",
        "draft_n",
        "draft_n_accepted",
    }
    assert timings["predicted_n"] == len(report["tokens"]) <= 40
    assert report["finish_reason"] in ("stop", "length")
    assert timings["draft_n"] == report["stats"]["drafted_tokens"] > 0
    assert timings["draft_n_accepted"] == report["stats"]["accepted_tokens"]
    assert timings["prompt_n"] > 10 and timings["prompt_ms"] > 0
    assert "memory plan" in result.err and "target KV cache" in result.err


@pytest.mark.parametrize("n_max", ["auto", "1", "15"])
def test_drafting_does_not_change_the_tokens(run: Run, tiny_target: Path, tiny_drafter: Path, n_max: str) -> None:
    common = ["generate", "-m", tiny_target, "-p", PROMPT, "-n", 60, "--temp", 0, "--json", *F32, *FAST]
    plain = run(*common, "--no-draft")
    same_session = run(*common, "-md", tiny_drafter, "--no-draft")
    drafted = run(*common, "-md", tiny_drafter, "--spec-draft-n-max", n_max)
    assert plain.json["tokens"] == same_session.json["tokens"] == drafted.json["tokens"]
    assert plain.json["text"] == drafted.json["text"]
    for result in (plain, same_session):
        assert result.json["timings"]["draft_n"] == result.json["timings"]["draft_n_accepted"] == 0
        assert set(result.json["stats"]) == STATS


def test_a_seed_repeats_a_sample(run: Run, tiny_target: Path, tiny_drafter: Path) -> None:
    common = ["generate", "-m", tiny_target, "-md", tiny_drafter, "-p", PROMPT, "-n", 24, "--json", *F32, *FAST]
    first, again, other = (run(*common, "--seed", seed).json["tokens"] for seed in (7, 7, 8))
    assert first == again != other
    assert "seed " in run(*common).err  # a random seed is said, so that the run can be repeated


def test_text_streams_to_stdout(run: Run, tiny_target: Path, tiny_drafter: Path) -> None:
    common = ["generate", "-m", tiny_target, "-md", tiny_drafter, "-p", PROMPT, "-n", 30, "--temp", 0, *FAST]
    text = run(*common, "--json").json["text"]
    plain = run(*common)
    assert plain.code == 0 and plain.out == text + "\n"
    assert "tokens/s" in plain.err
    marked = run(*common, "--color", "on", "--spec-draft-n-max", 15)
    assert marked.out.replace("\x1b[4;32m", "").replace("\x1b[4m", "").replace("\x1b[0m", "") == text + "\n"


def test_prompt_from_file_and_stdin(tmp_path: Path, tiny_target: Path, tiny_drafter: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n", encoding="utf-8")
    common = ["generate", "-m", tiny_target, "-md", tiny_drafter, "-n", 8, "--temp", 0, "--json", *FAST]
    from_file = run_process(*common, "-f", tmp_path / "prompt.txt")
    from_stdin = run_process(*common, "-f", "-", stdin=PROMPT.encode())
    assert from_file.code == from_stdin.code == 0, from_file.err
    assert from_file.json["tokens"] == from_stdin.json["tokens"]


def test_generation_ends_with_the_context(run: Run, tiny_target: Path, tiny_drafter: Path) -> None:
    few = ["-t", 1, "-tb", 1, "-c", 256, "-ub", 64, "--temp", 0, "--json"]
    report = run("generate", "-m", tiny_target, "-md", tiny_drafter, "-p", PROMPT * 5, *few).json
    assert report["finish_reason"] == "stop" or report["timings"]["prompt_n"] + len(report["tokens"]) == 256


def test_warns_beyond_the_trained_context(run: Run, tiny_target: Path) -> None:
    result = run("generate", "-m", tiny_target, "--no-draft", "-p", "x", "-n", 1, "-c", 5000, "-t", 1, "-tb", 1)
    assert result.code == 0 and "4096 tokens the target was trained for" in result.err


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bad_files(tmp_path: Path, tiny_target: Path) -> dict[str, Path]:
    data = tiny_target.read_bytes()
    (tmp_path / "text.gguf").write_text("this is not a model")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "cut-header.gguf").write_bytes(data[:1000])
    (tmp_path / "cut-data.gguf").write_bytes(data[: len(data) * 3 // 4])
    (tmp_path / "dir").mkdir()
    names = ("text.gguf", "empty.gguf", "cut-header.gguf", "cut-data.gguf", "dir", "missing.gguf")
    return {name: tmp_path / name for name in names}


BAD = ["text.gguf", "empty.gguf", "cut-header.gguf", "cut-data.gguf", "dir", "missing.gguf"]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("no_draft", [True, False])
def test_bad_target(run: Run, bad_files: dict[str, Path], tiny_drafter: Path, name: str, no_draft: bool) -> None:
    models = ["--no-draft"] if no_draft else ["-md", tiny_drafter]
    assert_refused(run("generate", "-m", bad_files[name], *models, "-p", "x", "-n", 1, *FAST), str(bad_files[name]))


@pytest.mark.parametrize("name", BAD)
def test_bad_drafter(run: Run, bad_files: dict[str, Path], tiny_target: Path, name: str) -> None:
    assert_refused(run("generate", "-m", tiny_target, "-md", bad_files[name], "-p", "x", "-n", 1, *FAST))


def test_models_in_each_others_place(run: Run, tmp_path: Path, tiny_target: Path, tiny_drafter: Path) -> None:
    drafter = tmp_path / "drafter.gguf"
    convert_dflash(tiny_drafter, drafter, outtype="f32", target=tiny_target)
    assert_refused(run("generate", "-m", drafter, "-md", drafter, "-p", "x", *FAST), "drafter")
    assert_refused(run("generate", "-m", tiny_target, "-md", tiny_target, "-p", "x", *FAST))


def test_drafter_of_another_target(run: Run, tmp_path: Path, tiny_target: Path) -> None:
    write_drafter_dir(tmp_path / "wide", hidden_size=128)
    write_drafter_dir(tmp_path / "deep", num_target_layers=12)
    for name in ("wide", "deep"):
        assert_refused(run("generate", "-m", tiny_target, "-md", tmp_path / name, "-p", "x", *FAST))


@pytest.mark.parametrize(
    "flags",
    [
        ["--spec-draft-n-max", "16"],  # block_size - 1 is 15
        ["--spec-draft-n-max", "2", "--spec-draft-n-min", "3"],
        ["--spec-draft-n-max", "15", "-ub", "15"],
        ["-p", PROMPT * 100],  # does not fit the context
    ],
)
def test_settings_that_cannot_work(run: Run, tiny_target: Path, tiny_drafter: Path, flags: list[str]) -> None:
    prompt = [] if "-p" in flags else ["-p", "x"]
    assert_refused(run("generate", "-m", tiny_target, "-md", tiny_drafter, *prompt, *FAST, *flags))


def test_missing_prompt_file(run: Run, tmp_path: Path, tiny_target: Path) -> None:
    missing = tmp_path / "no prompt.txt"
    assert_refused(run("generate", "-m", tiny_target, "--no-draft", "-f", missing, *FAST), str(missing), "No such file")


def test_process_exit_code_and_streams(tmp_path: Path) -> None:
    assert_refused(run_process("inspect", tmp_path / "missing.gguf"), "missing.gguf")
    assert run_process("generate").code == 2


def test_verbose_shows_the_traceback(tmp_path: Path) -> None:
    result = run_process("inspect", "-v", tmp_path / "missing.gguf")
    assert result.code == 1 and "Traceback" in result.err


# -- inspect ------------------------------------------------------------------------------------------------------


def test_inspect_sound_files(run: Run, tiny_target: Path, tiny_drafter: Path) -> None:
    for path, kind in ((tiny_target, "target"), (tiny_drafter, "drafter")):
        result = run("inspect", path, "--json")
        assert result.code == 0, result
        report = result.json
        assert {"kind", "dialect", "sound", "problems", "config"} <= set(report)
        assert report["kind"] == kind and report["sound"] is True and report["problems"] == []
        text = run("inspect", path)
        assert text.code == 0 and kind in text.out and "CPU" in text.out


def test_inspect_unsound_files(run: Run, bad_files: dict[str, Path]) -> None:
    for name in ("text.gguf", "cut-header.gguf", "dir"):
        result = run("inspect", bad_files[name], "--json")
        assert result.code == 1 and "Traceback" not in result.err
        report = result.json
        assert report["sound"] is False and report["problems"]
        assert result.err.count("\n") == 1 and "not sound" in result.err
        assert "problem" in run("inspect", bad_files[name]).out
    assert_refused(run("inspect", bad_files["missing.gguf"], "--json"))


# -- demo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_demo(tmp_path: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's data directory with a tiny random pair in it."""
    write_tiny_target(tmp_path / demo.TARGET_FILE, dtype="f16")
    convert_dflash(tiny_drafter, tmp_path / demo.DRAFTER_FILE, outtype="bf16", target=tmp_path / demo.TARGET_FILE)
    prompts = [{"file": f"part{i}.py", "prompt": f"import os\n\ndef part{i}(x):\n    "} for i in range(6)]
    (tmp_path / demo.PROMPTS_FILE).write_text(json.dumps({"prompts": prompts}), encoding="utf-8")
    monkeypatch.setattr(demo, "DATA_DIR", tmp_path)
    monkeypatch.setattr(demo, "N_PREDICT", 24)
    return tmp_path


def test_demo_json(run: Run, tiny_demo: Path) -> None:
    result = run("demo", "--json", "-t", 1)
    assert result.code == 0, result.err
    report = result.json
    assert {"prompts", "identical", "tau", "speedup"} <= set(report)
    assert len(report["prompts"]) == demo.N_PROMPTS
    for entry in report["prompts"]:
        assert {"prompt", "text", "identical", "plain", "speculative"} <= set(entry)
        assert {"tau", "rounds", "tokens_per_second"} <= set(entry["speculative"])
        assert entry["plain"]["tokens_per_second"] > 0
        assert entry["identical"] == (entry["first_difference"] is None)
        assert 1 <= entry["speculative"]["tau"] <= 1 + demo.DRAFT_MAX
    assert report["identical"] == all(entry["identical"] for entry in report["prompts"])
    rounds = sum(entry["speculative"]["rounds"] for entry in report["prompts"])
    tokens = sum(entry["speculative"]["tokens"] - 1 for entry in report["prompts"])
    assert report["tau"] == pytest.approx(tokens / rounds)
    assert report["speedup"] > 0


def test_demo_for_people(run: Run, tiny_demo: Path) -> None:
    result = run("demo", "-t", 1)
    assert result.code == 0, result.err
    for word in ("part0.py", "part3.py", "tokens", "rounds", "tau", "ratio", "identical", "all"):
        assert word in result.out
    assert "part4.py" not in result.out and "\x1b[4" not in result.out


def test_demo_without_models(run: Run, tiny_demo: Path) -> None:
    (tiny_demo / demo.DRAFTER_FILE).unlink()
    assert_refused(run("demo", "--json"), demo.DRAFTER_FILE)


def make_outcome(plain: list[int], speculative: list[int], stats: SpecStats) -> demo.Outcome:
    def generation(tokens: list[int]) -> Generation:
        return Generation(1, tokens, "", "length", 1.0, 10.0)

    return demo.Outcome("name", "prompt", generation(plain), 10.0, generation(speculative), 5.0, stats)


def test_demo_finds_the_first_difference() -> None:
    from laguna_gguf.dflash.stats import Counters

    stats = Counters(rounds=2, generated_tokens=3).snapshot(nonfinite=0, draft_max_now=3)
    assert make_outcome([1, 2, 3, 4], [1, 2, 3, 4], stats).first_difference is None
    assert make_outcome([1, 2, 3, 4], [1, 2, 5, 4], stats).first_difference == 2
    assert make_outcome([1, 2, 3, 4], [1, 2, 3], stats).first_difference == 3
    report = demo.report([make_outcome([1, 2, 3, 4], [1, 2, 3, 5], stats)])
    assert report["identical"] is False and report["prompts"][0]["first_difference"] == 3
    assert report["tau"] == 1.5 and report["speedup"] == pytest.approx(2.0)


def test_repetition() -> None:
    assert demo.repetition([1, 2, 3]) == 0.0
    assert demo.repetition(list(range(20))) == 0.0
    assert demo.repetition([1, 2, 3, 4] * 10) == pytest.approx(1 - 4 / 37)


# -- output -------------------------------------------------------------------------------------------------------


def test_characters_are_never_split() -> None:
    stream = io.StringIO()
    writer = TokenWriter(stream, "off")
    written = []
    for byte in "né€🙂".encode():
        writer.write(bytes([byte]))
        written.append(stream.getvalue())
    assert written == ["n", "n", "né", "né", "né", "né€", "né€", "né€", "né€", "né€🙂"]
    writer.write("🙂".encode()[:2])
    writer.close()
    assert writer.text == stream.getvalue() == "né€🙂\ufffd"


def test_accepted_drafts_are_marked_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(color: str) -> str:
        stream = io.StringIO()
        writer = TokenWriter(stream, color)
        writer.write(b"a")
        writer.write(b"b", drafted=True)
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert written("auto") == written("off") == "ab"
    assert written("on") == "a\x1b[4;32mb\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert written("on") == "a\x1b[4mb\x1b[0m"  # underlined, no colour


def test_sizes_and_lines() -> None:
    assert [size(n) for n in (0, 1023, 1024, 16357785)] == ["0 B", "1023 B", "1.0 KiB", "15.6 MiB"]
    assert one_line("a\n  b\tc ") == "a b c"
