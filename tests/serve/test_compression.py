"""Prompts compressed by the server: usage, streaming, errors, fields of the request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laguna_gguf import PFlash, SelectionSettings
from laguna_gguf.cli import main
from scorer_fixtures import EXACT
from serve_tools import Running, running

NOTES = "".join(f"key{i:02} holds {i * 37 % 100}\n" for i in range(30))
PROMPT = f"<user>{NOTES}What does key07 hold?</user>\n<assistant>"


@pytest.fixture(scope="module")
def here(tiny_target: Path, tiny_drafter: Path, qwen35: Path) -> Iterator[Running]:
    settings = SelectionSettings(select_chunk_size=32)
    with (
        PFlash(qwen35, settings=settings, target=tiny_target, **EXACT) as pflash,
        running(
            tiny_target,
            tiny_drafter,
            n_ctx=1024,
            pflash=pflash,
            prefill_compression="auto",
            prefill_threshold=250,
            prefill_keep_ratio=0.1,
        ) as server,
    ):
        yield server


def test_usage_says_what_was_compressed(here: Running) -> None:
    answer = here.text(prompt=PROMPT).json
    numbers = answer["usage"]["timings"]["pflash"]
    assert answer["usage"]["prompt_tokens"] == pytest.approx(numbers["compressed_tokens"], abs=1)  # BOS
    assert numbers["compressed_tokens"] < 0.5 * numbers["drafter_input_tokens"]
    assert numbers["query_rule"] == "prompt_end" and numbers["view"]["mode"] in ("fresh", "repeat")
    chat = here.chat(messages=[{"role": "user", "content": NOTES + "What does key07 hold?"}]).json
    assert chat["usage"]["timings"]["pflash"]["kept_tokens"] < len(NOTES) / 2


def test_streams_have_it_in_the_usage_chunk_only(here: Running) -> None:
    events = here.text(prompt=PROMPT, stream=True, stream_options={"include_usage": True}).events
    assert "pflash" in events[-1]["usage"]["timings"]
    assert all("usage" not in event for event in here.text(prompt=PROMPT, stream=True).events)


def test_short_prompts_and_tokens(here: Running) -> None:
    numbers = here.text(prompt="<user>Hello</user>\n<assistant>").json["usage"]["timings"]["pflash"]
    assert numbers["kept_tokens"] == numbers["drafter_input_tokens"] and numbers["view"] is None
    assert "timings" not in here.text(prompt=[5, 6, 7]).json["usage"]


def test_fields_of_a_request(here: Running) -> None:
    asked = here.text(
        prompt=PROMPT, pflash_query="What does key07 hold?", session_id="a", pflash_required="key11 holds"
    )
    assert asked.json["usage"]["timings"]["pflash"]["query_rule"] == "explicit_query_span"
    here.text(prompt=PROMPT, pflash_query="key99").refused(400, "does not occur")
    here.text(prompt=PROMPT, pflash_required=[1]).refused(400, "pflash_required")
    here.text(prompt=PROMPT, session_id=5).refused(400, "session_id")


def test_what_must_be_kept_does_not_fit(here: Running) -> None:
    prompt = f"<system>{NOTES * 4}</system>\n" + PROMPT
    here.text(prompt=prompt, max_tokens=8).refused(400, "system prompt")
    assert here.text(prompt=PROMPT).status == 200


def test_a_drafter_that_fails(here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from laguna_gguf.errors import ScorerError

    def fail(*_: Any, **__: Any) -> Any:
        raise ScorerError("not finite at /some/path")

    compressor: Any = here.session._compressor
    with monkeypatch.context() as patched:
        patched.setattr(compressor.pflash._scorers, "read", fail)
        answer = here.text(prompt=PROMPT.replace("holds", "keeps"))
    answer.refused(500, "ScorerError")
    assert b"/some/path" not in answer.data
    assert here.text(prompt=PROMPT).status == 200


@pytest.mark.parametrize("options", [["--prefill-compression", "auto"], ["--prefill-drafter", "x.gguf"]])
def test_options_that_need_each_other(
    tiny_target: Path, tiny_drafter: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "-m", str(tiny_target), "-md", str(tiny_drafter), *options])
    assert caught.value.code == 2 and "--prefill-drafter" in capsys.readouterr().err
