"""The model's own template with what chats may hold: variables, tool calls, roles it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo_pair.target_gguf import random_target, toy_tokenizer, write_target_gguf
from laguna_gguf.serve.session import ServedSession
from serve_tools import HELLO, Running, running
from tiny_models import TINY_TARGET

TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}{% endfor %}
{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"""


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory, tiny_drafter: Path) -> Iterator[Running]:
    """A server whose model has TEMPLATE."""
    path = tmp_path_factory.mktemp("templated") / "target.gguf"
    tokenizer = toy_tokenizer(TINY_TARGET.n_vocab) | {"chat_template": TEMPLATE}
    write_target_gguf(path, TINY_TARGET, random_target(TINY_TARGET, 1), tokenizer, "f32")
    with running(path, tiny_drafter) as here:
        yield here


def prompts(here: Running, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts that reach the model from now on."""
    seen: list[str] = []
    complete = here.session.create_completion

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(here.session.detokenize(kwargs["prompt"], special=True).decode())
        return complete(*args, **kwargs)

    monkeypatch.setattr(here.session, "create_completion", watched)
    return seen


def test_variables(templated: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(templated, monkeypatch)
    assert templated.chat(chat_template_kwargs={"enable_thinking": True}).status == 200
    assert templated.chat(chat_template_kwargs={"enable_thinking": False}).status == 200
    assert templated.chat(chat_template_kwargs={}).status == 200
    assert [prompt.endswith("<think>") for prompt in seen] == [True, False, False]
    for name in ("thinking", "messages", "bos_token", "add_generation_prompt"):
        templated.chat(chat_template_kwargs={name: True}).refused(400, name)


def test_tools_and_calls(templated: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(templated, monkeypatch)
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "this"}'}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "go on"}]
    assert templated.chat(messages=messages, tools=tools).status == 200
    assert "what=this;" in seen[-1] and seen[-1].rstrip().endswith("look_up")
    assert templated.chat(messages=messages, tools=tools, tool_choice="none").status == 200
    assert not seen[-1].rstrip().endswith("look_up")


def test_what_the_template_refuses(templated: Running) -> None:
    messages = [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    for stream in (False, True):
        templated.chat(messages=messages, stream=stream).refused(400, "no tools here")
    broken = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    answer = templated.chat(messages=[*HELLO, {"role": "assistant", "tool_calls": [broken]}])
    answer.refused(400, "template")


@pytest.mark.parametrize(
    ("template", "objects"),
    [
        ("{{ messages[1].tool_calls[0].function.arguments }}", False),
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}", True),
        ("{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}{% endfor %}", True),
        ("{{ messages[0].content }}", False),
    ],
)
def test_arguments(template: str, objects: bool) -> None:
    session = ServedSession.__new__(ServedSession)
    session.__dict__["_template"] = template
    session._closed = True
    assert session.wants_argument_objects is objects
