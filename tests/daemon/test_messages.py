"""Where the texts of a chat stand in its rendered prompt."""

from typing import Any

from fake_upstream import render
from laguna_gguf.daemon.proxy.messages import MAX_SEARCHED_BYTES, locate, rewritten

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "ask", "arguments": '{"text": "yes"}'}}]}


def before(messages: Any, prompt: str) -> list[str | None]:
    """The end of what stands before each text, None for one that is not found."""
    raw = prompt.encode()
    return [raw[: content.begin].decode()[-10:] if content.found else None for content in locate(messages, prompt)]


def test_the_same_text_in_every_message() -> None:
    messages = [{"role": role, "content": "yes"} for role in ("user", "assistant", "user")]
    assert before(messages, render(messages)) == ["art|>user\n", "assistant\n", "art|>user\n"]


def test_a_short_text_stands_by_itself() -> None:
    messages = [{"role": "user", "content": "Ask."}, CALL, {"role": "tool", "content": "yes"}]
    prompt = render(messages)
    assert prompt.index('"yes\\"') < prompt.index("tool\nyes")
    assert before(messages, prompt) == ["art|>user\n", "art|>tool\n"]
    # where a template wraps it, it is kept as it is
    assert before(messages[2:], '<|im_start|>tool\n{"content": "yes"}<|im_end|>\n') == [None]
    assert before(messages[2:], "[INST] <<SYS>>\nBe brief.<</SYS>>yesterday yes[/INST]") == ["yesterday "]


def test_texts_that_the_template_changes() -> None:
    long = "The river runs. " * 10
    messages = [{"role": "user", "content": f" {long}"}, {"role": "user", "content": f"<{long}>"}]
    prompt = f"<|user|>{long.strip()}<|end|><|user|>&lt;{long}&gt;<|end|>"
    contents = locate(messages, prompt)
    assert [content.found for content in contents] == [False, False]
    assert rewritten(messages, contents, lambda begin, end: "") == messages


def test_parts() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "image_url"}, {"type": "text", "text": "Two."}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": None}, "odd", {"content": 3}]
    contents = locate(messages, "<|user|>One.\nTwo.<|end|>")
    assert [(c.message, c.part, c.begin) for c in contents] == [(0, 0, 8), (0, 2, 13)]
    after = rewritten(messages, contents, lambda begin, end: f"{begin}-{end}")
    assert [part.get("text") for part in after[0]["content"]] == ["8-12", None, "13-17"]
    assert parts[0]["text"] == "One."  # a copy


def test_what_is_searched_is_bounded() -> None:
    texts = [f"missing {n}" for n in range(2000)]
    prompt = "m" * (1 << 20) + "\nhere\n"
    messages = [{"role": "user", "content": text} for text in [*texts, "here"]]
    assert MAX_SEARCHED_BYTES < len(texts) * len(prompt)
    assert not any(content.found for content in locate(messages, prompt))
    assert [content.found for content in locate(messages[-100:], prompt)] == [False] * 99 + [True]
