"""SpecSession with a PFlash: which prompts are shortened, what is reported, and that the rest is left alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laguna_gguf import PFlash, SelectionSettings, SpecSession
from laguna_gguf.errors import ConfigError, ScorerError
from laguna_gguf.pflash.keep_ratio import Curve
from scorer_fixtures import EXACT
from session_tools import spec_session

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</' + m.role + '>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
NOTES = "".join(f"key{i:02} holds {i * 37 % 100}\n" for i in range(30))
CHAT = [dict(role="system", content="Be kind."), dict(role="user", content=NOTES + "What does key07 hold?")]
RENDERED = "".join(f"<{m['role']}>{m['content']}</{m['role']}>\n" for m in CHAT) + "<assistant>"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def pflash(qwen35: Path) -> Iterator[PFlash]:
    with PFlash(qwen35, settings=SelectionSettings(select_chunk_size=32), **EXACT) as loaded:
        yield loaded


def make(target: Path, drafter: Path, pflash: PFlash | None, compression: str = "always", **kwargs: Any) -> SpecSession:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    options: dict[str, Any] = {"prefill_keep_ratio": 0.15, "n_ctx": 2048} | kwargs
    session = spec_session(target, drafter, pflash=pflash, prefill_compression=compression, **options)
    formatter = Jinja2ChatFormatter(TEMPLATE, eos_token="<never>", bos_token="", stop_token_ids=None)
    session.chat_handler = formatter.to_chat_handler()
    return session


def evaluated(session: SpecSession) -> str:
    """The text that the session holds."""
    tokens = session.input_ids[: session.n_tokens].tolist()
    return session.detokenize(tokens, special=True).decode("utf-8", "replace")


def test_off_leaves_everything_alone(tiny_target: Path, tiny_drafter: Path, pflash: PFlash) -> None:
    session = make(tiny_target, tiny_drafter, pflash, "off")
    session.create_completion(RENDERED, **GREEDY)
    assert session.last_compression is None and RENDERED in evaluated(session)


def test_text_and_chats_are_shortened_alike(tiny_target: Path, tiny_drafter: Path, pflash: PFlash) -> None:
    session = make(tiny_target, tiny_drafter, pflash)
    answer = session.create_completion(RENDERED, **GREEDY)
    short = session.last_compression
    assert short is not None and not short.is_whole and len(short.text) < 0.6 * len(RENDERED)
    assert short.text in evaluated(session) and NOTES not in evaluated(session)
    assert answer["usage"]["prompt_tokens"] < len(RENDERED) * 0.6 and answer["choices"][0]["text"]
    plain = make(tiny_target, tiny_drafter, None, "off").create_completion(short.text, **GREEDY)
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]

    chat = make(tiny_target, tiny_drafter, pflash)
    said = chat.create_chat_completion(CHAT, **GREEDY)["choices"][0]["message"]["content"]
    assert said and NOTES not in evaluated(chat)
    assert chat.last_compression is not None and chat.last_compression.text == short.text
    assert chat.last_compression.timings["view"]["mode"] == "repeat"
    streamed = chat.create_chat_completion(CHAT, stream=True, **GREEDY)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed)
    assert text == said and chat.last_compression.text == short.text


def test_the_second_turn_reuses_the_first(tiny_target: Path, tiny_drafter: Path, qwen35: Path) -> None:
    with PFlash(qwen35, settings=SelectionSettings(select_chunk_size=32), **EXACT) as pflash:
        session = make(tiny_target, tiny_drafter, pflash)
        said = session.create_chat_completion(CHAT, **GREEDY)["choices"][0]["message"]["content"]
        first = session.last_compression
        more = [*CHAT, dict(role="assistant", content=said), dict(role="user", content="And key08?")]
        session.create_chat_completion(more, **GREEDY)
        second = session.last_compression
        assert first is not None and second is not None
        assert second.timings["view"]["mode"] == "continue" and second.timings["scorer_new_tokens"] < 150
        assert second.text.startswith(first.text.removesuffix("<assistant>"))
        shared = session.tokenize(second.text.encode(), add_bos=False, special=True)
        assert len(shared) == second.timings["compressed_tokens"]  # counted with the target's vocabulary


def test_the_automatic_mode(tiny_target: Path, tiny_drafter: Path, pflash: PFlash) -> None:
    session = make(tiny_target, tiny_drafter, pflash, "auto", prefill_threshold=300)
    session.create_completion(RENDERED, **GREEDY)
    assert session.last_compression is not None and not session.last_compression.is_whole
    session.create_completion("<user>Hello</user>\n<assistant>", **GREEDY)
    assert session.last_compression is not None and session.last_compression.is_whole
    assert "Hello" in evaluated(session)


def test_tokens_and_blanks_pass_untouched(tiny_target: Path, tiny_drafter: Path, pflash: PFlash) -> None:
    session = make(tiny_target, tiny_drafter, pflash)
    tokens = session.tokenize(RENDERED.encode(), add_bos=False, special=True)
    session.create_completion(tokens, **GREEDY)
    assert session.last_compression is None and session.n_tokens >= len(tokens)
    for blank in ("", " \n"):
        session.create_completion(blank, **GREEDY)
        assert session.last_compression is None


def test_a_failing_scorer_fails_the_call(
    tiny_target: Path, tiny_drafter: Path, pflash: PFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make(tiny_target, tiny_drafter, pflash)

    def fail(*_: Any, **__: Any) -> Any:
        raise ScorerError("not finite")

    with monkeypatch.context() as patched:
        patched.setattr(pflash._scorers, "read", fail)
        with pytest.raises(ScorerError):
            session.create_completion(RENDERED.replace("key", "row"), **GREEDY)
    assert session.n_tokens == 0
    assert session.create_completion(RENDERED, **GREEDY)["choices"][0]["text"]


def test_the_prompt_leaves_room_for_the_output(tiny_target: Path, tiny_drafter: Path, pflash: PFlash) -> None:
    session = make(tiny_target, tiny_drafter, pflash, n_ctx=256, prefill_keep_ratio=1.0)
    answer = session.create_completion(RENDERED, temperature=0.0, max_tokens=100)
    assert answer["usage"]["prompt_tokens"] <= 156


def test_acceptance_moves_the_keep_ratio(tiny_target: Path, tiny_drafter: Path, qwen35: Path) -> None:
    with PFlash(qwen35, settings=SelectionSettings(select_chunk_size=32), **EXACT) as pflash:
        session = make(tiny_target, tiny_drafter, pflash, prefill_keep_ratio=0.1)
        session.create_completion(RENDERED, **GREEDY)
        first = session.last_compression
        stats = session.stats
        assert first is not None and stats.drafted_tokens > 0
        session.create_completion(RENDERED, **GREEDY)  # sent again: served again
        again = session.last_compression
        assert again is not None and again.timings["view"]["mode"] == "repeat"
        session.create_completion(RENDERED.replace("key07", "key09"), **GREEDY)
        third = session.last_compression
        assert third is not None and stats.acceptance_rate < 0.7  # two random models
        assert third.timings["keep_ratio"] == pytest.approx(0.12)  # 0.01 for each generation
        session.prefill_options = {"session": "other"}
        session.create_completion(RENDERED.replace("key07", "key10"), **GREEDY)
        assert session.last_compression is not None
        assert session.last_compression.timings["keep_ratio"] == pytest.approx(0.1)
        session.prefill_options = {"pflash_query": "What does key10 hold?"}
        session.create_completion(RENDERED.replace("key07", "key10"), **GREEDY)
        assert session.last_compression.timings["query_rule"] == "explicit_query_span"


def test_the_policy(qwen35: Path) -> None:
    with PFlash(qwen35, settings=SelectionSettings(select_chunk_size=32), **EXACT) as pflash:
        n = pflash.count_tokens(RENDERED)
        prefill = pflash.prefill(compression="always", curve=f"{n - 10}:0.5 {n + 10}:0.3")
        assert prefill.compress(RENDERED, session="a").timings["keep_ratio"] == pytest.approx(0.4)
        prefill.accepted(0.1)  # outside the range of the law: stays as configured
        assert prefill.compress(RENDERED + " ", session="a").timings["keep_ratio"] == pytest.approx(0.4, abs=0.02)
        assert pflash.prefill(curve=Curve.parse("1:0.1")).policy.configured(7) == 0.1
        steady = pflash.prefill(compression="always", keep_ratio=0.1)
        assert steady.compress(RENDERED).timings["keep_ratio"] == pytest.approx(0.1)
        steady.accepted(0.1)  # without a session nothing is learnt
        assert steady.compress(RENDERED + "  ").timings["keep_ratio"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "option",
    [
        {"prefill_compression": "sometimes"},
        {"prefill_threshold": -1},
        {"prefill_threshold": 1.5},
        {"prefill_keep_ratio": 2},
        {"prefill_keep_ratio": "x"},
        {"prefill_curve": "8000"},
        {"prefill_curve": 5},
    ],
    ids=str,
)
def test_options_that_do_not_fit(tiny_target: Path, tiny_drafter: Path, pflash: PFlash, option: dict[str, Any]) -> None:
    name = next(iter(option)).replace("prefill_curve", "curve")
    with pytest.raises(ConfigError, match=name):
        spec_session(tiny_target, tiny_drafter, pflash=pflash, **option)
