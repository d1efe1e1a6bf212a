"""The shipped demo scorer: its size, that its files belong together, the masses it gave, and that it finds evidence."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from demo_scorer_tools import DATA, ask, open_demo
from laguna_gguf.cli import main
from laguna_gguf.errors import CheckpointError, TargetMismatchError
from laguna_gguf.pflash import DemoScorer, demo_scorer
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.head import load_head
from laguna_gguf.pflash.probe import load_probe
from scoring.evaluation import Evaluator, Prompts
from scoring.examples import Example, Question

STORED = json.loads((DATA / "demo_scorer.json").read_text("utf-8"))
MAX_BYTES = 12_000_000


def test_size_and_shape() -> None:
    demo = demo_scorer()
    assert sum(path.stat().st_size for path in (demo.drafter, demo.scoring_head, demo.segment_probe)) <= MAX_BYTES
    file = DrafterFile(demo.drafter)
    assert (file.arch, file.n_layer, file.n_embd) == ("qwen35", 16, 384)
    with open_demo() as pflash:
        assert len(pflash.tokenize("<|im_start|>user\n<|im_end|><|endoftext|>")) == 5
        assert len(pflash.tokenize("1234567")) == 7


def test_bound_to_the_drafter(qwen35: Path) -> None:
    demo = demo_scorer()
    own = DrafterFile(demo.drafter)
    assert load_head(demo.scoring_head, own).attn_q.shape == (256, 384)
    probe = load_probe(demo.segment_probe, own)
    assert probe.subunit is not None and (probe.min_segment, probe.max_segment) == (16, 256)
    other = DrafterFile(qwen35)
    for load, path in ((load_head, demo.scoring_head), (load_probe, demo.segment_probe)):
        with pytest.raises(TargetMismatchError):
            load(path, other)


WORDS = "river stone cloud copper window garden paper silver train forest letter bridge candle market".split()


def sentences(rng: random.Random, n_words: int) -> str:
    return " ".join(rng.choice(WORDS) + ("." if i % 11 == 10 else "") for i in range(n_words))


@pytest.mark.parametrize("question", ["Where does the tower stand?", "<|im_end|>\n<|im_start|>assistant\n"])
def test_a_small_budget_is_used(question: str) -> None:
    """Of a text without lines, chunks of 1,024 tokens would not fit, and nothing but the question would be kept."""
    with open_demo() as pflash:
        result = pflash.compress_chat(f"{sentences(random.Random(3), 1600)} {question}", keep_ratio=0.05)
        assert result.budget < 512 and result.budget / 2 < result.retained_tokens <= result.budget


ENDS = {
    "chatml": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "gemma": ("<|turn>user\n", "<turn|>\n<|turn>model\n"),
    "laguna": ("<user>\n", "\n</user>\n<assistant>\n"),
}


@pytest.mark.parametrize("family", ENDS)
def test_the_questions_turn_stays_closed(family: str) -> None:
    header, end = ENDS[family]
    with open_demo() as pflash:
        text = f"{header}{sentences(random.Random(3), 900)} Where does the tower stand?{end}"
        result = pflash.compress_chat(text, keep_ratio=0.05)
        assert result.retained_tokens < len(pflash.tokenize(text)) / 2
        assert result.text.startswith(header) and result.text.endswith(f"does the tower stand?{end}")


@pytest.mark.parametrize("words", ["河流石头云彩铜窗花园", "שלום עולם مرحبا بالعالم ", "👩‍👧‍👦𝒳😀🏴 é"])
def test_parts_are_cut_between_characters(words: str) -> None:
    before, end = "<|im_start|>user\n", "Where?<|im_end|>\n<|im_start|>assistant\n"
    text = words * 150
    with open_demo() as pflash:
        for ratio in (0.05, 0.1, 0.2):
            prompt = before + text + end
            result = pflash.compress_chat(prompt, keep_ratio=ratio)
            first = len(before.encode())
            part = result.part(prompt, first, first + len(text.encode()))
            assert part is not None and 0 < len(part) < len(text)
            rest = iter(text)
            assert all(character in rest for character in part)  # in this order, and no replacement characters


@pytest.mark.parametrize("seed", [24, 33])
def test_growing_chats_are_not_refused(seed: int) -> None:
    """With a target whose tokens are unevenly distributed, so that selections are over their ceiling at first."""
    rng = random.Random(seed)
    chat = (
        f"<|im_start|>user\n{sentences(rng, 600)}<|im_end|>\n<|im_start|>user\nWhere does the tower stand?<|im_end|>\n"
    )
    with open_demo(target=lambda prompt: len(re.findall(r"<.im_\w+.>|\s?\w{1,4}|\s?\W", prompt))) as pflash:
        for _ in range(7):
            result = pflash.compress_chat(chat + "<|im_start|>assistant\n", keep_ratio=0.05, session="grows")
            assert result.ceiling is not None
            chat += f"<|im_start|>assistant\n{sentences(rng, 8)}.<|im_end|>\n"
            chat += f"<|im_start|>user\nAnd what about the {sentences(rng, 2)}?<|im_end|>\n"


def test_a_package_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not DemoScorer.in_folder(tmp_path).exists
    monkeypatch.setattr("laguna_gguf.pflash.demo.files", lambda _: tmp_path)
    with pytest.raises(CheckpointError, match="no demo drafter"):
        demo_scorer()


def test_stored_masses() -> None:
    """Masses and probe scores are those of the day the files were made, up to the rounding of other kernels; the chat
    prompt itself is compressed with them."""
    stored = np.load(DATA / "demo_scorer.npz")
    question = STORED["questions"][0]
    with open_demo(sessions=1) as pflash:
        asked = ask(pflash, STORED, question)
        assert asked.ids.tolist() == stored["ids"].tolist()
        scores = pflash.score(asked.ids, query=asked.query, windows=[asked.tail], session="chat")
        chat = pflash.compress_chat(asked.prompt, keep_ratio=0.1, session="chat")
    assert scores.probe is not None and scores.subunit is not None
    assert scores.mass.sum() == pytest.approx(1.0, abs=1e-6)
    assert np.abs(scores.mass - stored["mass"]).max() <= 0.02 * stored["mass"].max()
    assert np.abs(scores.probe - stored["probe"]).max() <= 0.05
    assert np.abs(scores.subunit - stored["subunit"]).max() <= 0.05
    begin, end = question["evidence"][0]
    assert STORED["context"][begin:end] in chat.text and question["text"] in chat.text
    assert chat.trace["segmentation"] == "probe" and len(chat.ids) < 0.6 * len(asked.ids)


def test_finds_evidence() -> None:
    """With a budget of a tenth of the prompt; a question about something else keeps far less of the same evidence."""
    demo = demo_scorer()
    other = "How tall is the oldest tower of Lisbon?"
    questions = [Question(q["kind"], q["text"], tuple(map(tuple, q["evidence"]))) for q in STORED["questions"]]
    with open_demo(sessions=1) as pflash:
        evaluator = Evaluator(pflash, load_probe(demo.segment_probe, DrafterFile(demo.drafter)), seed=0)
        prompts = Prompts(pflash, Example(STORED["context"], questions))
        for question in questions:
            evaluator.run_other("right", prompts.ask(question.text, question), question.kind)
            evaluator.run_other("wrong", prompts.ask(other, question), question.kind)
    kept = evaluator.tallies[0.1].table()
    assert evaluator.tallies[0.1].counts()["single"] >= 12
    assert kept["right"]["single"] >= 0.85 and kept["right"]["three needles"] >= 0.6
    assert kept["wrong"]["single"] <= 0.4


def test_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = STORED["questions"][0]
    path = tmp_path / "text.txt"
    path.write_text(f"{STORED['context'].rstrip()}\n\n{question['text']}", "utf-8")
    assert main(["compress", "-t", "1", "-f", str(path), "--prefill-keep-ratio", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert "demo drafter" in err and "constructed" in err and err.count("\n") == 1
    begin, end = question["evidence"][0]
    assert STORED["context"][begin:end] in out and question["text"] in out and len(out) < 0.7 * len(STORED["context"])
