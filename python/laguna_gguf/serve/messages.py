"""Messages and tools of a chat request, brought into the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from laguna_gguf.errors import RequestError
from laguna_gguf.serve.fields import mapping, refuse, text
from laguna_gguf.serve.settings import Limits

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of the API and what templates call them."""


def check_messages(value: Any) -> list[dict[str, Any]]:
    """Messages with text as content. Raises RequestError, naming the place."""
    if not isinstance(value, list) or not value:
        raise refuse("messages", value, "an array of at least one message")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, value: Any) -> dict[str, Any]:
    message = dict(mapping(where, value))
    role = message.get("role")
    if role == "function":  # the legacy form of "tool"
        message["role"] = role
    elif isinstance(role, str) and role in ROLES:
        message["role"] = ROLES[role]
    else:
        raise refuse(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if message.get("tool_calls") is None:
        message.pop("tool_calls", None)
    else:
        message["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise refuse(f"{where}.content", content, "text")
        message["content"] = ""  # templates put it between strings
    else:
        message["content"] = _content(f"{where}.content", content)
    return message


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(where, value, "a string or an array of text parts")
    pieces = []
    for i, part in enumerate(value):
        kind = mapping(f"{where}[{i}]", part).get("type")
        if kind not in ("text", "refusal"):
            raise refuse(f"{where}[{i}].type", kind, "text: the model reads nothing else")
        pieces.append(text(f"{where}[{i}].{kind}", part.get(kind)))
    return "\n".join(pieces)


def _tool_calls(where: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise refuse(where, value, "an array")
    for i, call in enumerate(value):
        function = mapping(f"{where}[{i}].function", mapping(f"{where}[{i}]", call).get("function"))
        text(f"{where}[{i}].function.name", function.get("name"))
        text(f"{where}[{i}].function.arguments", function.get("arguments"))
    return value


def arguments_as_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the arguments of tool calls decoded: templates that walk through them need objects."""
    return [
        message | {"tool_calls": _decoded(message["tool_calls"])} if message.get("tool_calls") else message
        for message in messages
    ]


def _decoded(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for call in calls:
        function = dict(call["function"])
        try:
            decoded = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            decoded = None
        if isinstance(decoded, dict):
            function["arguments"] = decoded
        out.append(call | {"function": function})
    return out


def check_tools(value: Any) -> list[dict[str, Any]]:
    """Tools with a name and a parameter schema each."""
    limit = Limits().tools
    if not isinstance(value, list) or len(value) > limit:
        raise refuse("tools", value, f"an array of at most {limit} tools")
    return [_tool(f"tools[{i}]", tool) for i, tool in enumerate(value)]


def _tool(where: str, value: Any) -> dict[str, Any]:
    tool = mapping(where, value)
    if tool.get("type") != "function":
        raise refuse(f"{where}.type", tool.get("type"), "function")
    return tool | {"function": _function(f"{where}.function", tool.get("function"))}


def check_functions(value: Any) -> list[dict[str, Any]]:
    """The legacy form of tools, as tools."""
    if not isinstance(value, list) or len(value) > Limits().tools:
        raise refuse("functions", value, f"an array of at most {Limits().tools} functions")
    return [{"type": "function", "function": _function(f"functions[{i}]", one)} for i, one in enumerate(value)]


def _function(where: str, value: Any) -> dict[str, Any]:
    function = dict(mapping(where, value))
    text(f"{where}.name", function.get("name"))
    if function.get("parameters") is None:
        function["parameters"] = {"type": "object", "properties": {}}
    mapping(f"{where}.parameters", function["parameters"])
    return function


def chosen_tool(choice: Any, tools: list[dict[str, Any]], field: str = "tool_choice") -> str | None:
    """The name of the tool that must be called, "none" for no tools at all, or None: the model decides.

    Raises RequestError where the choice cannot be enforced.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice is None or choice == "auto":
        return None
    if choice == "none":
        return "none"
    if choice == "required":
        if len(names) == 1:
            return names[0]
        raise RequestError(f"{field}: 'required' is supported with one tool; name the one to call, or use 'auto'")
    if isinstance(choice, str):
        raise refuse(field, choice, "auto, none, required or a named function")
    named = mapping(field, choice)
    if field == "tool_choice":
        named = mapping(f"{field}.function", named.get("function"))
    name = text(f"{field}.name", named.get("name"))
    if name not in names:
        raise refuse(field, name, f"the name of a tool in the request: {', '.join(names)[:200] or 'it has none'}")
    return name
