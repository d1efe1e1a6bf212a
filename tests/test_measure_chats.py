"""tools/measure_chats.py runs with any drafter, and its chats are what it says."""

import email
import json
from pathlib import Path

import pytest

import measure_chats
from scoring.sources import read_files


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = read_files([Path(email.__file__).parent, Path(json.__file__).parent])
    monkeypatch.setattr(measure_chats, "standard_library", lambda: sources)


def test_scripted_chats() -> None:
    chats = measure_chats.make_chats(4, 5000, 1)
    assert [chat.style for chat in chats] == list(measure_chats.STYLES)
    for chat in chats:
        asked = [question for turn in chat.turns for question in turn]
        assert len(asked) == 3 * (2 if chat.style == "two questions" else 1)
        assert len({question.text for question in asked}) == len(asked)
        first = chat.messages(1)[0][1]
        question = " ".join(question.text for question in chat.turns[0])
        place = first.index(question)
        if chat.style == "first":
            assert place == 0
        elif chat.style == "middle":
            assert 0 < place < len(first) - len(question)
        else:
            assert place == len(first) - len(question)
        for question in asked:
            assert first.count(measure_chats.evidence(chat.example, question)) == 1
        assert [role for role, _ in chat.messages(3)] == ["user", "assistant", "user", "assistant", "user"]


def test_report(qwen35: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_chats.main(["--prefill-drafter", str(qwen35), "--chats", "2", "--characters", "2500"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_read"][0] == report["tokens"]["prompt"][0] and report["tokens_read"][1] < 400
    assert set(report["evidence_kept"]) == {"served", "fresh", "last 8", "tail"}
    assert report["modes"]["1"] == {"fresh": 2} and report["turn_2_over_turn_1"] < 1
    assert report["tokens"]["served"][0] < report["tokens"]["prompt"][0]
