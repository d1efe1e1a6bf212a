"""laguna-gguf bench: figures from known times, engines, prompts, rows, labels, the identity check, other drafting."""

import contextlib
import csv
import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from laguna_gguf import SpecSession
from laguna_gguf.bench import check as checks
from laguna_gguf.bench import upstream
from laguna_gguf.bench.check import Divergence, check
from laguna_gguf.bench.costs import measure_costs
from laguna_gguf.bench.engines import Engine, Run, SessionEngine, same_model
from laguna_gguf.bench.measure import Case, Generations, Promptings, measure_generation
from laguna_gguf.bench.prompts import filler, load_prompts, load_vocabulary
from laguna_gguf.bench.rows import generation_rows, prompt_rows
from laguna_gguf.bench.text import output_hash, repetition
from laguna_gguf.cli import main
from laguna_gguf.errors import ConfigError, LagunaError
from session_tools import GREEDY, OPTIONS, plain_llama, spec_session, take_plain, text_ids

KEYS = {"test", "t_s", "std", "tau", "acceptance", "ratio"}
FAST = ["-t", "1", "-ub", "64", "-r", "2", "-ctk", "f32", "-ctv", "f32"]


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1
        return json.loads(self.out)


@pytest.fixture
def bench(tiny_target: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `laguna-gguf bench` on the tiny pair."""

    def run(*argv: object, drafter: bool = True) -> Result:
        capsys.readouterr()
        command = ["bench", "-m", tiny_target, *(["-md", tiny_drafter] if drafter else []), *FAST, *argv]
        try:
            code = main([str(arg) for arg in command])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def session(tiny_target: Path, tiny_drafter: Path) -> Iterator[SpecSession]:
    with contextlib.closing(spec_session(tiny_target, tiny_drafter)) as session:
        yield session


# Figures.


def test_repetition_and_hash() -> None:
    assert repetition([1, 2, 3]) == 0.0
    assert repetition(list(range(50))) == 0.0
    assert repetition([7] * 53) == 1 - 1 / 50
    assert output_hash([[1, 2], [3]]) != output_hash([[1], [2, 3]]) != output_hash([[2, 1], [3]])
    assert output_hash([[1, 2], [3]]) == output_hash([np.array([1, 2]), (3,)])
    assert len(output_hash([])) == 12


class FakeEngine:
    """As far as rows look at one."""

    synthetic = False

    def __init__(self, name: str, label: str = "", plain: bool = True) -> None:
        self.name, self.label, self.plain = name, label, plain


def generations(engine: FakeEngine, ms: dict[str, list[list[float]]], rounds: int, accepted: int) -> Generations:
    """5 tokens a run."""
    drafted = 0 if engine.plain else 2 * rounds
    result = Generations(engine)  # type: ignore[arg-type]
    for kind, repetitions in ms.items():
        result.runs[kind] = [
            [Run([1, 2, 3, 4, 5], t, rounds, drafted, accepted) for t in times] for times in repetitions
        ]
    return result


def test_rows_of_known_times() -> None:
    slow = generations(FakeEngine("slow"), {"a": [[20.0, 20.0], [20.0, 20.0]], "b": [[40.0], [40.0]]}, 4, 0)
    fast = generations(FakeEngine("fast"), {"a": [[10.0, 10.0], [20.0, 20.0]], "b": [[20.0], [40.0]]}, 4, 0)
    spec = generations(
        FakeEngine("spec", "dflash n=2", plain=False), {"a": [[5.0, 5.0], [5.0, 5.0]], "b": [[20.0], [20.0]]}, 2, 2
    )
    rows = {(row.test, row.prompts): row for row in generation_rows(Case(n_gen=5), [slow, fast, spec])}
    assert set(rows) == {(t, k) for t in ("tg5", "tg5 slow", "tg5 dflash n=2") for k in ("a", "b", "all")}
    plain = rows["tg5", "a"]
    assert plain.engine == "fast" and plain.baseline and plain.ratio == 1
    assert plain.samples_ts == (400.0, 200.0) and plain.t_s == 300.0
    assert plain.std == pytest.approx(141.42, abs=0.01)
    assert plain.tau is None and plain.acceptance is None
    drafted = rows["tg5 dflash n=2", "a"]
    assert drafted.samples_ts == (800.0, 800.0) and drafted.std == 0
    assert drafted.ratio == 3.0, "the median of 800/400 and 800/200"
    assert drafted.tau == 2.0 and drafted.acceptance == 0.5
    assert drafted.identical == "4/4" and drafted.hash == plain.hash
    # 12 tokens a repetition, of three texts
    assert rows["tg5 dflash n=2", "all"].samples_ts == pytest.approx((12e3 / 30, 12e3 / 30))
    assert rows["tg5 slow", "b"].ratio == 0.75


def test_prompt_rows_of_known_times() -> None:
    plain = Promptings(FakeEngine("plain"), [100.0, 110.0, 100.0])  # type: ignore[arg-type]
    captured = Promptings(FakeEngine("spec", "dflash", plain=False), [105.0, 110.0, 200.0])  # type: ignore[arg-type]
    rows = prompt_rows(Case(n_prompt=50, n_depth=7), [plain, captured])
    assert [row.test for row in rows] == ["pp50 @ d7", "pp50 dflash @ d7"]
    assert rows[0].samples_ts[0] == 500.0
    assert rows[1].ratio == pytest.approx(100 / 105)


# Engines.


def test_engines_share_the_weights_and_agree(tiny_target: Path, session: SpecSession) -> None:
    with same_model(session):
        llama = llama_cpp.Llama(str(tiny_target), **OPTIONS)
    assert llama_cpp.llama.internals.LlamaModel.__name__ == "LlamaModel", "the patch is gone again"
    assert llama.model == session.model
    engines = [Engine(llama), SessionEngine(session, 0), SessionEngine(session, 3), SessionEngine(session, "auto")]
    prompt = text_ids(40, 5)
    expected = take_plain(plain_llama(tiny_target), prompt, 30, **GREEDY)
    for engine in (*engines, *reversed(engines)):
        run = engine.generate(prompt, 30)
        assert run.tokens == expected and run.ms > 0 and len(run.tokens) == 1 + run.accepted + run.rounds
        assert engine.process(prompt, before=expected) > 0
    assert [engine.plain for engine in engines] == [True, True, False, False]
    llama.close()
    assert engines[2].generate(prompt, 30).tokens == expected, "closing the borrower leaves the owner alone"


def test_measuring_interleaves(session: SpecSession) -> None:
    order = []

    class Recorder(SessionEngine):
        def generate(self, prompt: Any, n: int, seed: int = 0) -> Run:
            order.append((self.draft_max, len(prompt), seed))
            return super().generate(prompt, n, seed)

    prompts = {"a": [text_ids(10, 1), text_ids(11, 2)], "b": [text_ids(12, 3)]}
    results = measure_generation([Recorder(session, 0), Recorder(session, 2)], Case(n_gen=4, n_depth=20), prompts, 2)
    assert order[2:] == [
        *((n, 20 + size, seed) for size, seed in ((10, 0), (11, 1), (12, 0)) for n in (0, 2)),
        *((n, 20 + size, seed) for size, seed in ((10, 2), (11, 3), (12, 1)) for n in (2, 0)),
    ]
    assert [[len(runs) for runs in group] for group in results[0].runs.values()] == [[2, 2], [1, 1]]


def test_lookup_counts(tiny_target: Path, session: SpecSession) -> None:
    lookup = upstream.make_lookup(session, str(tiny_target), 0.0, OPTIONS)
    prompt = text_ids(8, 6) * 4
    run = lookup.generate(prompt, 40)
    assert run.tokens == take_plain(plain_llama(tiny_target), prompt, 40, **GREEDY)
    assert run.drafted >= run.accepted >= 0 and run.rounds > 0
    lookup.llama.close()


def test_costs(session: SpecSession) -> None:
    rows = measure_costs(session, text_ids(80, 1), [3, 7], 2)
    assert [row["n"] for row in rows] == [0, 3, 7]
    assert rows[0]["draft_ms"] is None and rows[0]["break_even_tau"] == 1.0
    for row in rows[1:]:
        assert row["draft_ms"] > 0 and row["verify_ms"] > 0
        assert row["break_even_tau"] == pytest.approx((row["draft_ms"] + row["verify_ms"]) / rows[0]["verify_ms"])
    assert session.n_tokens == 0


# Prompts.


@pytest.fixture
def vocabulary(tiny_target: Path) -> Iterator[Any]:
    with contextlib.closing(load_vocabulary(tiny_target)) as vocabulary:
        yield vocabulary


def test_prompts_of_the_package(vocabulary: Any) -> None:
    prompts = load_prompts(vocabulary)
    assert list(prompts) == ["code", "prose", "thinking", "json"]
    assert len(prompts["code"]) == 3 and all(len(group) >= 2 for group in prompts.values())
    bos, think = vocabulary.token_bos(), 16
    for group in prompts.values():
        assert all(tokens[0] == bos and tokens[1] != bos and len(tokens) > 50 for tokens in group)
    assert all(tokens[-1] == think for tokens in prompts["thinking"])
    assert list(load_prompts(vocabulary, None, ["json", "prose"])) == ["prose", "json"]
    text = filler(prompts, 10_000)
    assert len(text) == 10_000 and text[: len(prompts["code"][0])] == prompts["code"][0]
    assert filler(prompts, 0) == []


def test_prompts_of_a_file(vocabulary: Any, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("Once upon a time", "utf-8")
    assert list(load_prompts(vocabulary, tmp_path / "story.txt")) == ["story"]
    (tmp_path / "p.json").write_text(json.dumps({"x": [{"text": "a b c"}]}), "utf-8")
    assert len(load_prompts(vocabulary, tmp_path / "p.json")["x"]) == 1
    for wrong in (
        [],
        {},
        {"x": []},
        {"x": "text"},
        {"x": [{}]},
        {"x": [{"messages": [{"role": 1}]}]},
        {"x": [{"text": ""}]},
    ):
        (tmp_path / "p.json").write_text(json.dumps(wrong), "utf-8")
        with pytest.raises(ConfigError, match=r"p\.json"):
            load_prompts(vocabulary, tmp_path / "p.json")
    (tmp_path / "binary").write_bytes(b"\x00\xff")
    with pytest.raises(ConfigError, match=r"binary is not UTF-8 \(byte 1\)"):
        load_prompts(vocabulary, tmp_path / "binary")
    with pytest.raises(ConfigError, match="poetry"):
        load_prompts(vocabulary, None, ["poetry"])


# The command.


def test_json(bench: Any) -> None:
    result = bench("-n", 12, "-p", "40,0", "-d", "0,30", "--spec-draft-n-max", "0,3,auto", "--kinds", "code", "--json")
    assert result.code == 0, result.err
    report = result.json
    rows = report["rows"]
    tests = {row["test"] for row in rows}
    assert {"pp40", "pp40 dflash", "tg12", "tg12 dflash n=3", "tg12 dflash auto"} <= tests
    assert {"pp40 @ d30", "pp40 dflash @ d30", "tg12 @ d30", "tg12 dflash n=3 @ d30"} <= tests
    assert len(rows) == 2 * (3 + 4)
    for row in rows:
        assert set(row) >= KEYS and row["t_s"] > 0 and row["std"] >= 0 and row["ratio"] > 0
        assert len(row["samples_ts"]) == 2 and not row["synthetic"]
    generated = [row for row in rows if row["n_gen"]]
    assert all(row["identical"] == "6/6" for row in generated), "f32"
    assert len({row["hash"] for row in generated if not row["n_depth"]}) == 1
    drafted = next(row for row in rows if row["test"] == "tg12 dflash n=3")
    assert drafted["tau"] >= 1 and 0 <= drafted["acceptance"] <= 1 and drafted["draft_ms"] > 0
    head = report["header"]
    assert (
        head["devices"] and head["type_k"] == "f32" and head["n_threads"] == 1 and head["llama_cpp_python"] == "0.3.36"
    )
    assert head["model_size"] > 0 and head["drafter_layers"] == 3


def test_synthetic_is_labelled_everywhere(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    argv = ["-n", 12, "-p", 0, "-r", 1, "--spec-draft-n-max", 3, "--kinds", "code", "--spec-synth-len", 4]
    report = bench(*argv, "-o", "json").json
    assert report["synthetic"] is True
    row = next(row for row in report["rows"] if row["test"] == "tg12 dflash n=3 synthetic=4")
    assert row["synthetic"] is True and row["acceptance"] == 1.0 and row["identical"] is None
    assert [row["synthetic"] for row in report["rows"] if "dflash n=3" not in row["test"]] == [False, False]
    text = bench(*argv)
    assert "SYNTHETIC" in text.out and "synthetic acceptance is on" in caplog.text
    lines = list(csv.DictReader(io.StringIO(bench(*argv, "-o", "csv").out)))
    assert [line["synthetic"] for line in lines] == ["False", "False", "True"]
    assert bench(*argv[:-1], 4.5).code == 1


def test_markdown_and_costs(bench: Any) -> None:
    result = bench("-n", 8, "-p", 0, "-r", 1, "--spec-draft-n-max", 2, "--costs")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("model: tiny-F32.gguf")
    table = [line for line in lines if line.startswith("|")]
    assert "tau" in table[0] and table[1].startswith("| ---")
    assert sum("tg8 dflash n=2" in line for line in table) == 5, "four kinds and all"
    assert any(line.startswith("| drafts |") for line in lines)


def test_without_a_drafter(bench: Any) -> None:
    result = bench("-n", 8, "-p", 16, "--kinds", "prose", "--json", drafter=False)
    assert [row["test"] for row in result.json["rows"]] == ["pp16", "tg8"]


@pytest.mark.parametrize(
    "argv",
    [
        ["-p", "0", "-n", "0"],
        ["-n", "1"],
        ["-p", "-4"],
        ["-n", "many"],
        ["-r", "0"],
        ["--spec-draft-n-max", "3,all"],
        ["--spec-synth-len", "0.5"],
        ["-o", "xml"],
        ["--check", "--spec-synth-len", "2"],
        ["--check", "--temp", "1"],
        ["--check", "-o", "csv"],
        ["--costs", "--spec-draft-n-max", "auto"],
        ["-ctv", "q8_0"],
    ],
    ids=" ".join,
)
def test_usage(bench: Any, argv: list[str]) -> None:
    result = bench(*argv)
    assert result.code == 2 and result.out == ""


def test_refused(bench: Any, tmp_path: Path) -> None:
    for argv, fragment in (
        (["--spec-draft-n-max", "16"], "0..15"),
        (["-c", "64"], "at least"),
        (["--kinds", "poetry"], "poetry"),
        (["--prompts", tmp_path / "absent.json"], "absent.json"),
    ):
        result = bench("-p", 0, *argv)
        assert result.code == 1 and result.out == "" and fragment in result.err.splitlines()[-1], result.err
    assert bench("--check", drafter=False).code == 2


# The check.


def test_check_of_a_sound_pair(bench: Any) -> None:
    result = bench("--check", "-n", 24, "--spec-draft-n-max", "3,7", "--json")
    assert result.code == 0, result.err
    report = result.json
    assert report["ok"] is True and len(report["rows"]) == 6
    for row in report["rows"]:
        assert set(row) >= KEYS and row["identical"] and row["ok"] and row["hash"] == row["plain_hash"]
        assert row["gap"] is None and row["tau"] >= 1 and row["ratio"] > 0 and 0 <= row["repetition"] <= 1
    assert "6 of 6 texts are identical" in bench("--check", "-n", 8, "-r", 1, "--spec-draft-n-max", "3,7").out


class Corrupt(SessionEngine):
    """A text with a token that the target would not choose."""

    def generate(self, prompt: Any, n: int, seed: int = 0) -> Run:
        run = super().generate(prompt, n, seed)
        if self.draft_max:
            run.tokens[5] = (run.tokens[5] + 1) % 300
        return run


def test_check_finds_a_wrong_token(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SessionEngine", Corrupt)
    result = bench("--check", "-n", 24, "-r", 1, "--json")
    assert result.code == 1
    for row in result.json["rows"]:
        assert not row["identical"] and not row["ok"] and row["first_difference"] == 5
        assert row["gap"] > row["batch_difference"] >= 0 and row["hash"] != row["plain_hash"]
    assert "rounding does not explain it" in result.err
    assert "no, at 5" in bench("--check", "-n", 24, "-r", 1).out


def test_gap_and_batch_difference(tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap is that of the plain logits, and with half-precision products shapes differ measurably."""
    monkeypatch.setattr(checks, "SessionEngine", Corrupt)
    prompt = text_ids(30, 8)
    with contextlib.closing(spec_session(tiny_target, tiny_drafter)) as session:
        divergence = check(session, [7], [prompt], 12, 1)[0].divergence
    assert divergence is not None
    llama = plain_llama(tiny_target)
    tokens = take_plain(llama, prompt, 6, **GREEDY)
    llama.reset()
    llama.eval([*prompt, *tokens[:5]])
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (llama.n_vocab(),))
    second, first = np.sort(logits)[-2:]
    assert divergence.gap == pytest.approx(first - second, rel=1e-3)
    assert 0 < divergence.batch_difference < 1e-2
    assert Divergence(0, 0.01, 0.02).excused and not Divergence(0, 0.03, 0.02).excused


# Other drafting.


def test_missing_xllamacpp(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    result = bench("--compare", "-n", 8)
    assert result.code == 1 and "xllamacpp" in result.err and "pip install" in result.err


def test_compare(bench: Any) -> None:
    pytest.importorskip("xllamacpp")
    result = bench("--compare", "-n", 16, "-p", 0, "--spec-draft-n-max", 3, "--kinds", "code", "--json")
    assert result.code == 0, result.err
    rows = {row["test"]: row for row in result.json["rows"]}
    assert {"tg16", "tg16 lookup n=10", "tg16 llama-server", "tg16 llama-server ngram-simple"} <= set(rows)
    assert rows["tg16"]["engine"] in ("llama_cpp.Llama", "SpecSession(draft_max=0)")
    assert rows["tg16 lookup n=10"]["identical"] == "6/6"
    assert rows["tg16 llama-server"]["t_s"] > 0


def test_server_that_cannot_load(tiny_target: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    path = tmp_path / "broken.gguf"
    path.write_bytes(tiny_target.read_bytes()[:2000])
    keywords = OPTIONS | {"n_batch": 64, "n_ubatch": 64, "n_gpu_layers": 0, "swa_full": False}
    with pytest.raises(LagunaError, match="did not start"):
        upstream.ServerEngine(str(path), "none", 0.0, keywords)
