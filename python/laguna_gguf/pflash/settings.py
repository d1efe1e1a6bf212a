"""Every setting that users give as an environment variable, checked in one place.

A field is named like its variable without `PFLASH_`, in lower case. Every error is a ConfigError naming the variable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from laguna_gguf.errors import ConfigError

MAX_QUERY_TOKENS = 512
MAX_HISTORY_QUERIES = 8
MAX_SESSIONS = 16

_MAX_INTEGER = 2**31 - 1  # what the native half and the wire can hold


@dataclass(frozen=True)
class SelectionSettings:
    """How a prompt is scored and what is kept of it. None means that the variable is not set."""

    select_mode: str | None = None
    """budget_only or top_p; None: budget_only, or legacy chunk selection with a Qwen3-0.6B drafter."""
    select_chunk_size: int | None = None
    """Tokens in a fixed chunk, >= 1; None: by prompt length."""
    select_query_tokens: int = 8
    """Tokens of a tail that asks, 1..512."""
    select_query_parser: str = "arbitrary_tail"
    """arbitrary_tail or latest_user."""
    select_top_p: float = 0.95
    """Share of the optional mass after which mode top_p stops, in (0, 1]."""
    select_segments: str = "auto"
    """auto, fixed or probe."""
    select_score: str = "auto"
    """auto, sum or density."""
    select_scorer: str = "head"
    """head, legacy or split."""
    select_split: float = 0.5
    """Share of the budget that the head fills in a split, in (0, 1)."""
    scoring_head_gguf: str | None = None
    segment_probe_gguf: str | None = None
    qwen35_legacy_scorer: bool = False
    chat_skeleton_tokens: int = 256
    """User and assistant turns of at most this many tokens are kept whole where they fit; >= 0."""
    chat_history_queries: int = 3
    """Earlier user turns whose tails ask as well, 0..8."""
    chat_recall_min_lift: float = 2.0
    """Lift from which a dropped segment is recalled, >= 0."""
    chat_view: bool = True
    drafter_sessions: int = 2
    """Scoring sessions kept, 0..16."""
    trace_path: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            # a frozen dataclass is normalised (1 -> True, numpy numbers) only through object
            object.__setattr__(self, field.name, _RULES[field.name](variable(field.name), value))

    @classmethod
    def from_env(cls, mapping: Mapping[str, str]) -> SelectionSettings:
        """Settings from variables such as os.environ holds; other names are ignored.

        ConfigError names the variable: also one that is set but empty, and integers such as `12x` or ` 12`.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"settings are read from {type(mapping).__name__}; needed a mapping such as os.environ")
        given: dict[str, Any] = {}
        for field in fields(cls):
            name = variable(field.name)
            if name in mapping:
                given[field.name] = _parsed(name, mapping[name], _RULES[field.name])
        return cls(**given)


def variable(field: str) -> str:
    """The environment variable of a field."""
    return f"PFLASH_{field.upper()}"


class _Choice:
    def __init__(self, *values: str) -> None:
        self.values = values

    def __call__(self, name: str, value: Any) -> str:
        if value not in self.values:
            raise ConfigError(f"{name} is {value!r}; needed one of {', '.join(self.values)}")
        return value

    def parse(self, text: str) -> str:
        return text


class _Integer:
    def __init__(self, low: int, high: int = _MAX_INTEGER) -> None:
        self.low, self.high = low, high

    def __call__(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__") or not self.low <= int(value) <= self.high:
            raise ConfigError(f"{name} is {value!r}; needed an integer in {self.low}..{self.high}")
        return int(value)

    def parse(self, text: str) -> int | str:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


class _Number:
    def __init__(self, needed: str, fits: Callable[[float], bool]) -> None:
        self.needed, self.fits = needed, fits

    def __call__(self, name: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or not self.fits(number):
            raise ConfigError(f"{name} is {value!r}; needed {self.needed}")
        return number

    def parse(self, text: str) -> float | str:
        number = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
        return float(text) if re.fullmatch(number, text, re.ASCII) else text


class _Switch:
    def __call__(self, name: str, value: Any) -> bool:
        if isinstance(value, str) or value not in (0, 1):
            raise ConfigError(f"{name} is {value!r}; needed 0 or 1")
        return bool(value)

    def parse(self, text: str) -> int | str:
        return {"0": 0, "1": 1}.get(text, text)


class _Path:
    def __call__(self, name: str, value: Any) -> str:
        text = value if isinstance(value, str) else str(value) if hasattr(value, "__fspath__") else ""
        if not text.strip() or "\0" in text:
            raise ConfigError(f"{name} is {value!r}; needed a path, or leave the variable unset")
        return text

    def parse(self, text: str) -> str:
        return text


_Rule = _Choice | _Integer | _Number | _Switch | _Path

_RULES: dict[str, _Rule] = {
    "select_mode": _Choice("budget_only", "top_p"),
    "select_chunk_size": _Integer(1),
    "select_query_tokens": _Integer(1, MAX_QUERY_TOKENS),
    "select_query_parser": _Choice("arbitrary_tail", "latest_user"),
    "select_top_p": _Number("a number in (0, 1]", lambda x: 0 < x <= 1),
    "select_segments": _Choice("auto", "fixed", "probe"),
    "select_score": _Choice("auto", "sum", "density"),
    "select_scorer": _Choice("head", "legacy", "split"),
    "select_split": _Number("a number in (0, 1), both ends excluded", lambda x: 0 < x < 1),
    "scoring_head_gguf": _Path(),
    "segment_probe_gguf": _Path(),
    "qwen35_legacy_scorer": _Switch(),
    "chat_skeleton_tokens": _Integer(0),
    "chat_history_queries": _Integer(0, MAX_HISTORY_QUERIES),
    "chat_recall_min_lift": _Number("a finite number >= 0", lambda x: x >= 0),
    "chat_view": _Switch(),
    "drafter_sessions": _Integer(0, MAX_SESSIONS),
    "trace_path": _Path(),
}


def _parsed(name: str, text: Any, rule: _Rule) -> Any:
    # what does not parse stays a string, which the rule then refuses with its own message
    if not isinstance(text, str):
        raise ConfigError(f"{name} is {text!r}; needed a string, as in an environment")
    return rule(name, rule.parse(text))
