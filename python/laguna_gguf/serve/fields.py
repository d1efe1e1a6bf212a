"""The fields of a request body: which there are, what each may hold, and what it is called in create_completion.

A field that is null counts as left out. `docs/serving.md` has these tables for users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laguna_gguf.errors import RequestError
from laguna_gguf.http.bodies import type_name
from laguna_gguf.serve.settings import Limits

Check = Callable[[str, Any], Any]
"""(field, value) to the value that is used; raises RequestError, naming the field."""


def refuse(name: str, value: Any, needed: str) -> RequestError:
    """The error of a field: what was found, what was needed."""
    found = str(value) if isinstance(value, (int, float, str, bool)) else type_name(value)
    return RequestError(f"{name}: {found[:80]!r} found; needed {needed}")


def number(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise refuse(name, value, f"a number in {low:g}..{high:g}")
        return float(value)

    return check


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():  # some clients have only one kind of number
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise refuse(name, value, f"an integer in {low}..{high}")
        return value

    return check


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refuse(name, value, "a string")
    return value


def texts(name: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise refuse(name, value, "a string or an array of strings")
    return values


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(name, value, "an object")
    return value


def _temperature(name: str, value: Any) -> float:
    value = number(0.0, 100.0)(name, value)
    return value if value >= 1e-3 else 0.0  # logits divided by less overflow


def _seed(name: str, value: Any) -> int | None:
    value = integer(-(2**63), 2**64 - 1)(name, value)
    return None if value == -1 else value % (2**32 - 1)  # 2**32 - 1 means a random seed to llama.cpp


def _max_tokens(name: str, value: Any) -> int:
    value = integer(-1, 2**31 - 1)(name, value)
    if value == 0:
        raise refuse(name, value, "at least 1, or -1: until the context is full")
    return value


def _stop(name: str, value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    limit = Limits().stops
    if not isinstance(stops, list) or len(stops) > limit or not all(isinstance(s, str) for s in stops):
        raise refuse(name, value, f"a string or an array of at most {limit} strings")
    return [s for s in stops if s]


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    bias = {}
    for key, amount in mapping(name, value).items():
        if not (key.isdecimal() and key.isascii() and len(key) <= 9):
            raise refuse(f"{name} key", key, "a token id")
        bias[int(key)] = number(-1e4, 1e4)(f"{name}[{key}]", amount)
    return bias


@dataclass(frozen=True)
class Field:
    """A field that has an effect."""

    keyword: str
    check: Check


SAMPLING: dict[str, Field] = {
    "temperature": Field("temperature", _temperature),
    "top_p": Field("top_p", number(0.0, 1.0)),
    "top_k": Field("top_k", integer(-1, 2**31 - 1)),
    "min_p": Field("min_p", number(0.0, 1.0)),
    "typical_p": Field("typical_p", number(0.0, 1.0)),
    "frequency_penalty": Field("frequency_penalty", number(-100.0, 100.0)),
    "presence_penalty": Field("presence_penalty", number(-100.0, 100.0)),
    "repeat_penalty": Field("repeat_penalty", number(1e-2, 100.0)),
    "repetition_penalty": Field("repeat_penalty", number(1e-2, 100.0)),
    "mirostat": Field("mirostat_mode", integer(0, 2)),
    "mirostat_mode": Field("mirostat_mode", integer(0, 2)),
    "mirostat_tau": Field("mirostat_tau", number(0.0, 100.0)),
    "mirostat_eta": Field("mirostat_eta", number(0.0, 1.0)),
    "seed": Field("seed", _seed),
    "stop": Field("stop", _stop),
    "logit_bias": Field("logit_bias", _logit_bias),
    "max_tokens": Field("max_tokens", _max_tokens),
    "max_completion_tokens": Field("max_tokens", _max_tokens),
    "n_predict": Field("max_tokens", _max_tokens),
}
"""Fields that become keywords of create_completion, of both routes."""

PREFILL: dict[str, Field] = {
    "session_id": Field("session", text),
    "pflash_query": Field("pflash_query", text),
    "pflash_required": Field("pflash_required", texts),
}
"""Fields for the compression of prompts, of both routes; without effect where nothing is compressed."""

HANDLED = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "timings_per_token",
        "response_format",
        "json_schema",
        "grammar",
        "session_id",
        "pflash_query",
        "pflash_required",
    }
)
"""Further fields of both routes; `requests` looks at them."""

HANDLED_COMPLETION = frozenset({"prompt", "suffix", "echo", "logprobs"})
HANDLED_CHAT = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
    }
)

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
        "cache_prompt",
        "id_slot",
    }
)
"""Fields that change nothing in the answer here: bookkeeping, and hints about speed."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "tfs_z": (1,),
    "penalize_nl": (True, False),
    "ignore_eos": (False,),
    "n_probs": (0,),
    "n_keep": (0, -1),
    "return_progress": (False,),
    "return_tokens": (False,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (-1,),
    "repeat_last_n": (64,),
    "top_logprobs": (0,),
}
"""Fields of this and similar APIs that are not supported, with the values that ask for nothing."""


def check_names(body: Mapping[str, Any], handled: frozenset[str]) -> None:
    """Refuse, by name, fields that nothing here knows and unsupported ones that ask for something."""
    known = HANDLED | handled
    for name, value in body.items():
        if value is None or name in SAMPLING or name in known or name in IGNORED:
            continue
        if name == "chat_template":
            raise RequestError("chat_template: templates in requests are never rendered; the model's own is used")
        if name not in NEUTRAL:
            raise RequestError(
                f"{name[:80]!r} is not a parameter of this route; the documentation lists those that are"
            )
        neutral = NEUTRAL[name]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            wanted = " or ".join(str(one).lower() for one in neutral)
            raise RequestError(f"{name}: only {wanted} is supported")


def sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of create_completion for the sampling fields that the body has."""
    keywords: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, field in SAMPLING.items():
        if body.get(name) is None:
            continue
        value = field.check(name, body[name])
        if field.keyword in keywords and keywords[field.keyword] != value:
            raise RequestError(f"{origin[field.keyword]} and {name} contradict each other")
        keywords[field.keyword], origin[field.keyword] = value, name
    return keywords
