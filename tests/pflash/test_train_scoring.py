"""Training of heads and probes on a random drafter: figures improve, and the files score as the training says."""

import json
from pathlib import Path

import numpy as np
import pytest

from scorer_fixtures import EXACT

torch = pytest.importorskip("torch", reason="training needs the extra [train]")

from test_scoring_examples import PROSE, PYTHON  # noqa: E402

import train_scoring_head  # noqa: E402
import train_segment_probe  # noqa: E402
from laguna_gguf.pflash.drafter_file import DrafterFile  # noqa: E402
from laguna_gguf.pflash.head import load_head, write_head  # noqa: E402
from laguna_gguf.pflash.probe import load_probe  # noqa: E402
from laguna_gguf.pflash.scorer import Scorer  # noqa: E402
from laguna_gguf.pflash.trunk import Trunk  # noqa: E402
from scoring.examples import Example, Question  # noqa: E402
from scoring.features import read_example, read_examples  # noqa: E402
from scoring.head import HeadSettings, held_out_loss, new_head, question_masses, train_head  # noqa: E402
from scoring.probe import raw_values  # noqa: E402

NOTES = ("The mill is red.", "The tower is tall.", "The river is deep.", "The bridge is old.")


def examples() -> list[Example]:
    context = "\n\n".join(NOTES * 3)
    questions = []
    for note in NOTES:
        begin = context.index(note)
        questions.append(Question("given", f"What of {note.split()[1]}?", ((begin, begin + len(note)),)))
    return [Example(context, questions, units=[context.index(note) for note in NOTES])]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(6):
        (folder / f"part{index}.py").write_text(PYTHON * 2 + f"\n\ndef rare_function_{'abcdef'[index]}(x):\n    pass\n")
        (folder / f"page{index}.md").write_text(PROSE * 4)
    return folder


def test_head_learns_and_its_file_scores_the_same(tmp_path: Path, qwen35: Path) -> None:
    trunk = Trunk(qwen35, n_sequences=1, **EXACT)
    (example,) = examples()
    read = read_examples(trunk, [example], tmp_path, lambda _: None)
    assert read_examples(trunk, [example], tmp_path, lambda _: None)[0].taps.tobytes() == read[0].taps.tobytes()
    settings = HeadSettings(epochs=30, learning_rate=3e-3)
    model = new_head(trunk.file, read, seed=1)
    before = held_out_loss(model, read, settings)
    train_head(model, read, [], settings, lambda _: None)
    assert held_out_loss(model, read, settings) < before - 0.3
    path = tmp_path / "head.gguf"
    write_head(path, *model.rows(), qwen35)
    prompt, (question, *_) = example.prompt_parts
    ids = trunk.model.tokenize(prompt + question)
    n = len(read[0].taps)
    assert len(ids) == n + len(trunk.model.tokenize(question))
    scores = Scorer(trunk, head=path).score(ids, query=(len(ids) - 1, len(ids)))
    with torch.no_grad():
        keys = model.features(torch.from_numpy(read[0].taps))
        last = question_masses(model, keys, read[0].questions[:1], 8)[1][0].numpy()
    mass = scores.mass[:n] / scores.mass[:n].sum()  # training sees the context's keys only
    assert np.abs(mass - last).max() <= 0.02 * last.max()


def test_commands(tmp_path: Path, qwen35: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, probe = tmp_path / "head.gguf", tmp_path / "probe.gguf"
    small = ["--contexts", "2", "--held-out", "2", "--characters", "1200", "--epochs", "1"]
    small += ["--cache", str(tmp_path / "taps")]
    assert train_scoring_head.main([str(qwen35), str(texts), "--outfile", str(head), *small]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["recall"]["8"]["all"]) == {"0.05", "0.1", "0.2", "n"} and report["contexts"] == 2
    assert train_segment_probe.main([str(qwen35), str(texts), "--outfile", str(probe), *small, "--hidden", "32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 <= report["f1"]["unit"]["f1"] <= 1 and "subunit" in report["f1"]
    drafter = DrafterFile(qwen35)
    assert load_head(head, drafter).attn_q.shape == (128, 64)
    loaded = load_probe(probe, drafter)
    trunk = Trunk(qwen35, n_sequences=1, **EXACT)
    ids = trunk.model.tokenize("The mill is red.\n\nThe tower is tall.")
    scores = Scorer(trunk, probe=probe).score(ids, query=(len(ids) - 1, len(ids)))
    unit, subunit = loaded.scores(raw_values(loaded, trunk.taps(ids)))
    assert scores.probe is not None and scores.subunit is not None and subunit is not None
    assert np.abs(scores.probe - unit).max() < 1e-3 and np.abs(scores.subunit - subunit).max() < 1e-3


def test_own_examples(tmp_path: Path, qwen35: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "examples.jsonl"
    lines = []
    for index, note in enumerate(NOTES):
        text = "\n".join(NOTES[index:] + NOTES[:index]) + "\nAnd so on." * 8
        lines.append({"text": text, "question": f"What of {note.split()[1]}?", "evidence": [[0, len(note)]]})
    path.write_text("\n".join(map(json.dumps, lines)))
    arguments = [str(qwen35), "--jsonl", str(path), "--outfile", str(tmp_path / "head.gguf"), "--epochs", "1"]
    assert train_scoring_head.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["questions"] == 2 and report["recall"]["8"]["given"]["n"] == 2
    path.write_text(json.dumps(lines[0]))
    for extra, message in (([], "needed at least 3"), (["--label", "js"], "SUFFIX=MODULE:NAME")):
        files = [str(qwen35), str(tmp_path)] if extra else arguments[:3]
        assert train_scoring_head.main([*files, "--outfile", str(tmp_path / "other.gguf"), *extra]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and message in err
    assert not (tmp_path / "other.gguf").exists()


def test_question_rows_come_from_the_state_behind_the_context(qwen35: Path) -> None:
    """Reading a question after the context equals reading the whole prompt."""
    trunk = Trunk(qwen35, n_sequences=1, **EXACT)
    (example,) = examples()
    read = read_example(trunk, example)
    before, questions = example.prompt_parts
    for question, rows in zip(questions, read.questions, strict=True):
        ids = np.concatenate([trunk.model.tokenize(before), trunk.model.tokenize(question)])
        taps = trunk.taps(ids)
        assert np.abs(taps[-1] - rows.last.astype(np.float32)).max() <= 2e-3 * np.abs(taps).max()
        begin, end = rows.evidence[0]
        assert trunk.model.detokenize_bytes(ids[begin:end]).decode().strip().startswith("The ")
