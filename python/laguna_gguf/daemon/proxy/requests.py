"""What a request asks of the compression: fields of its body over the daemon's own settings."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any

from laguna_gguf.errors import RequestError
from laguna_gguf.pflash.keep_ratio import Curve

OFF, AUTO, ALWAYS = "off", "auto", "always"

FIELDS = ("pflash", "pflash_query", "pflash_required", "session_id")
"""Fields of a body that are ours; they are removed from one that is rewritten."""

_KEYS = frozenset("on off compression keep keep_ratio query required session".split())
_MAX_TEXT = 64 << 10


@dataclass(frozen=True)
class Policy:
    """How prompts are compressed: the daemon's settings, or a request's."""

    compression: str = AUTO
    threshold: int = 32000
    keep_ratio: float = 0.05
    curve: Curve | None = None
    query: str | None = None
    required: tuple[str, ...] = ()
    session: str | None = None

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Policy:
        """The daemon's."""
        return cls(
            compression=args.prefill_compression,
            threshold=args.prefill_threshold,
            keep_ratio=args.prefill_keep_ratio,
            curve=args.prefill_curve,
        )

    def ratio(self, n_tokens: int) -> float:
        """Keep ratio of a prompt of this many target tokens."""
        return self.keep_ratio if self.curve is None else self.curve.ratio(n_tokens)

    def of_body(self, body: dict[str, Any]) -> Policy:
        """A request's own. RequestError 400 for fields that are not as they should be."""
        policy = _cache_policy_checked(body, self)
        given = body.get("pflash")
        if isinstance(given, bool):
            given = {"on": given}
        elif isinstance(given, str):
            given = {"compression": given}
        elif given is None:
            given = {}
        if not isinstance(given, dict):
            raise RequestError('pflash is not an object, such as {"on": true, "keep": 0.1}')
        given = {name: value for name, value in given.items() if value is not None}
        unknown = sorted(set(given) - _KEYS)
        if unknown:
            raise RequestError(f"pflash.{unknown[0][:80]} is not known; known are {', '.join(sorted(_KEYS))}")
        if "compression" in given:
            if given["compression"] not in (OFF, AUTO, ALWAYS):
                raise RequestError("pflash.compression is none of off, auto, always")
            policy = replace(policy, compression=given["compression"])
        for name, on in (("on", True), ("off", False)):
            if name in given:
                if not isinstance(given[name], bool):
                    raise RequestError(f"pflash.{name} is not true or false")
                policy = replace(policy, compression=ALWAYS if given[name] is on else OFF)
        keep = given.get("keep", given.get("keep_ratio"))
        if keep is not None:
            if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 <= keep <= 1 or math.isnan(keep):
                raise RequestError("pflash.keep is not a number in 0..1")
            policy = replace(policy, keep_ratio=float(keep), curve=None)
        query = given.get("query", body.get("pflash_query"))
        session = given.get("session", body.get("session_id"))
        for name, value in (("query", query), ("session", session)):
            if value is not None and (not isinstance(value, str) or len(value) > _MAX_TEXT):
                raise RequestError(f"the field {name} of pflash is not a text of at most {_MAX_TEXT} characters")
        required = given.get("required", body.get("pflash_required")) or ()
        required = [required] if isinstance(required, str) else required
        if not isinstance(required, list | tuple) or not all(isinstance(text, str) for text in required):
            raise RequestError("the texts required by pflash are not a list of texts")
        return replace(
            policy, query=query, required=tuple(required), session=None if session is None else session[:256]
        )


def _cache_policy_checked(body: dict[str, Any], policy: Policy) -> Policy:
    cache = body.get("disk_cache_policy")
    if isinstance(cache, dict) and cache.get("compress"):
        raise RequestError("disk_cache_policy.compress is not supported here; leave it out, or false")
    return policy


def max_tokens(body: dict[str, Any]) -> int:
    """Output that a body asks for; 0 when it leaves that open."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return min(value, 2**31 - 1)
    return 0
