"""Bodies of the two generating routes, as the keywords that the model's thread will use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from laguna_gguf.errors import RequestError
from laguna_gguf.http.bodies import type_name
from laguna_gguf.serve import fields, messages
from laguna_gguf.serve.settings import Settings


@dataclass(frozen=True)
class Constraint:
    """What the text must match: a GBNF grammar, or a JSON schema (any JSON object: an empty one)."""

    origin: str
    """The field it came from, for messages."""
    grammar: str | None = None
    schema: str | None = None
    """As JSON."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request that was found valid as far as that can be told without the model."""

    chat: bool
    stream: bool
    keywords: dict[str, Any]
    """Of create_chat_completion or create_completion, without the grammar."""
    include_usage: bool = False
    timings_per_token: bool = False
    constraint: Constraint | None = None
    tool: str | None = None
    """The tool whose call is the answer."""
    legacy_functions: bool = False
    """Whether the call goes to `function_call` instead of `tool_calls`."""
    template_keywords: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    echo: bool = False
    """Whether the prompt is to stand before the text."""
    top_logprobs: int | None = None
    suffix: str | None = None
    prefill_options: dict[str, Any] = field(default_factory=dict)
    """What a compressor of prompts is told."""


def completion_request(body: Mapping[str, Any], settings: Settings) -> GenerationRequest:
    """Of POST /v1/completions. Raises RequestError."""
    fields.check_names(body, fields.HANDLED_COMPLETION)
    keywords = _keywords(body, settings)
    keywords["prompt"] = _prompt(body.get("prompt"))
    logprobs = body.get("logprobs")
    if logprobs is not None and logprobs is not False:
        keywords["logprobs"] = fields.integer(0, settings.limits.top_logprobs)("logprobs", logprobs)
    suffix = body.get("suffix")
    echo = _flag(body, "echo")
    if suffix is not None:
        fields.text("suffix", suffix)
        if not isinstance(keywords["prompt"], str):
            raise RequestError("suffix needs the prompt as text")
        if echo:
            raise RequestError("echo cannot be combined with suffix")
    if echo and "logprobs" in keywords and _flag(body, "stream"):
        raise RequestError("echo with logprobs cannot be streamed")
    if echo and "logprobs" in keywords and not isinstance(keywords["prompt"], str):
        raise RequestError("echo with logprobs needs the prompt as text")
    return GenerationRequest(
        chat=False,
        keywords=keywords,
        echo=echo,
        suffix=suffix or None,
        top_logprobs=keywords.get("logprobs"),
        constraint=_constraint(body),
        prefill_options=_prefill(body),
        **_stream(body),
    )


def chat_request(body: Mapping[str, Any], settings: Settings) -> GenerationRequest:
    """Of POST /v1/chat/completions. Raises RequestError."""
    fields.check_names(body, fields.HANDLED_CHAT)
    keywords = _keywords(body, settings)
    keywords["messages"] = messages.check_messages(body.get("messages"))
    tools, tool, legacy = _tools(body)
    if tools:
        keywords["tools"] = tools
    constraint = _constraint(body)
    top_logprobs = _logprobs(body, settings, keywords)
    if tool is not None:
        if top_logprobs is not None and _flag(body, "stream"):
            raise RequestError("logprobs of a tool call cannot be streamed")
        keywords["tool_choice"] = {"type": "function", "function": {"name": tool}}
        if constraint is not None and constraint.grammar is not None:
            raise RequestError("grammar cannot be combined with a tool that must be called")
        parameters = next(t["function"]["parameters"] for t in tools if t["function"]["name"] == tool)
        constraint = Constraint(f"parameters of {tool}", schema=json.dumps(parameters))
    return GenerationRequest(
        chat=True,
        keywords=keywords,
        tool=tool,
        legacy_functions=legacy,
        template_keywords=fields.mapping("chat_template_kwargs", body.get("chat_template_kwargs") or {}),
        constraint=constraint,
        top_logprobs=top_logprobs,
        prefill_options=_prefill(body),
        **_stream(body),
    )


def _keywords(body: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    if body.get("model") is not None:
        fields.text("model", body["model"])
    keywords = {**settings.sampling, "max_tokens": -1, "seed": settings.seed, "model": settings.alias}
    return keywords | fields.sampling(body)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    return False if value is None else fields.boolean(name, value)


def _stream(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the request that say how the answer goes out."""
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    usage = False
    if options is not None:
        options = fields.mapping("stream_options", options)
        for name in options:
            if name not in ("include_usage", "include_obfuscation"):
                raise RequestError(f"stream_options.{name[:80]} is not supported")
        if options.get("include_obfuscation"):
            raise RequestError("stream_options.include_obfuscation is not supported")
        usage = _flag(options, "include_usage")
    return {"stream": stream, "include_usage": usage, "timings_per_token": _flag(body, "timings_per_token")}


def _prefill(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: rule for name, rule in fields.PREFILL.items() if body.get(name) is not None}
    return {rule.keyword: rule.check(name, body[name]) for name, rule in given.items()}


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value):
            return value
        if all(isinstance(item, (str, list)) for item in value):
            raise RequestError(f"prompt: {len(value)} prompts found; one request is one prompt here")
        raise RequestError("prompt: an array must hold token ids only")
    if value == []:
        raise RequestError("prompt: it is empty; needed at least one token")
    raise RequestError(f"prompt: {type_name(value)} found; needed a string or an array of token ids")


def _tools(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None, bool]:
    """Tools, the one that must be called, and whether they came as functions."""
    legacy = body.get("functions") is not None
    if legacy and body.get("tools") is not None:
        raise RequestError("functions and tools contradict each other; functions is the older form")
    for old, new, given in (("function_call", "functions", legacy), ("tool_choice", "tools", body.get("tools"))):
        if body.get(old) not in (None, "none", "auto") and not given:
            raise RequestError(f"{old} needs {new}")
    if legacy:
        tools = messages.check_functions(body["functions"])
        tool = messages.chosen_tool(body.get("function_call"), tools, "function_call")
    else:
        tools = messages.check_tools(body["tools"]) if body.get("tools") is not None else []
        tool = messages.chosen_tool(body.get("tool_choice"), tools)
    return ([], None, legacy) if tool == "none" else (tools, tool, legacy)


def _logprobs(body: Mapping[str, Any], settings: Settings, keywords: dict[str, Any]) -> int | None:
    """How many alternatives a token is to have, None for no log probabilities at all; adds to the keywords."""
    wanted = _flag(body, "logprobs")
    top = body.get("top_logprobs")
    n = 0 if top is None else fields.integer(0, settings.limits.top_logprobs)("top_logprobs", top)
    if n and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true")
    if not wanted:
        return None
    keywords |= {"logprobs": True, "top_logprobs": n}
    return n


def _constraint(body: Mapping[str, Any]) -> Constraint | None:
    found = [c for c in (_grammar(body), _json_schema(body), _response_format(body)) if c is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0].origin} and {found[1].origin} contradict each other")
    return found[0] if found else None


def _grammar(body: Mapping[str, Any]) -> Constraint | None:
    value = body.get("grammar")
    if value is None or value == "":
        return None
    return Constraint("grammar", grammar=fields.text("grammar", value))


def _json_schema(body: Mapping[str, Any]) -> Constraint | None:
    value = body.get("json_schema")
    return None if value is None else Constraint("json_schema", schema=json.dumps(fields.mapping("json_schema", value)))


def _response_format(body: Mapping[str, Any]) -> Constraint | None:
    value = body.get("response_format")
    if value is None:
        return None
    kind = fields.mapping("response_format", value).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        where = "response_format.schema"
        schema = {} if schema is None else schema
    elif kind == "json_schema":
        where = "response_format.json_schema.schema"
        schema = fields.mapping("response_format.json_schema", value.get("json_schema")).get("schema")
    else:
        raise fields.refuse("response_format.type", kind, "text, json_object or json_schema")
    return Constraint("response_format", schema=json.dumps(fields.mapping(where, schema)))
