"""A long body made shorter: rendered and counted by the upstream server, selected by the drafter, mapped back."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from laguna_gguf.daemon.model import Model
from laguna_gguf.daemon.protocol import CompressChat, Result
from laguna_gguf.daemon.proxy import messages
from laguna_gguf.daemon.proxy.requests import AUTO, FIELDS, OFF, Policy, max_tokens
from laguna_gguf.daemon.proxy.upstream import Headers, Upstream
from laguna_gguf.daemon.results import compressed
from laguna_gguf.errors import BudgetError, RequestError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Tighter selections after a rewritten prompt was over its ceiling."""

CONTINUED = ("continue", "repeat")
"""Views that were judged when they were made; the ceiling is that of fresh selections."""


@dataclass
class Shortened:
    """What is sent instead of a body."""

    body: bytes
    timings: dict[str, Any]
    """usage.timings.pflash."""
    prompt_tokens: int
    """Target tokens of the whole prompt."""
    served_tokens: int
    """And of what is sent."""
    trace: bytes | None = None


@dataclass
class Compressor:
    """Compresses bodies; one for the daemon."""

    upstream: Upstream
    model: Model
    policy: Policy
    traces: bool = False
    """Whether to ask for traces, for the status page."""

    async def chat(self, body: dict[str, Any], size: int, headers: Headers, client: Any) -> Shortened | None:
        """A body of /v1/chat/completions; None when it is to be forwarded as it is. `size`: its bytes.

        Raises RequestError, and what the model process raises.
        """
        policy = self.policy.of_body(body)
        if not isinstance(body.get("messages"), list) or _is_short(policy, size):
            return None
        began = time.perf_counter()
        job = _Job(self, policy, headers, client, began, body)
        cleaned = {name: value for name, value in body.items() if name not in FIELDS}
        prompt = await job.render(cleaned)
        n_prompt = await job.count(prompt)
        if policy.compression == AUTO and n_prompt < policy.threshold:
            return None
        contents = await job.locate(cleaned, prompt)
        fixed = 0
        for content in contents:
            if not content.found and content.text.strip():
                fixed += await job.count(content.text)
        if fixed:
            logger.info("%d target tokens of texts that the template changes are kept as they are", fixed)
        ratio = policy.ratio(n_prompt)
        session = policy.session or _session(body.get("model"), body["messages"], headers)
        ceiling: int | None = None
        for attempt in range(MAX_ATTEMPTS + 1):
            result = await job.compress(prompt, ratio, session)
            if result.stop_reason == "below_threshold":
                return None
            shorter = cleaned | {"messages": messages.rewritten(body["messages"], contents, job.part(prompt, result))}
            served = await job.count(await job.render(shorter))
            if ceiling is None:  # that of the ratio that was asked for
                ceiling = (result.ceiling or 0) + math.ceil(fixed * (1 - ratio))
            view = result.timings.get("view") or {}
            if served <= ceiling or view.get("mode") in CONTINUED:
                job.check_room(served)
                return job.shortened(shorter, result, n_prompt, served)
            logger.info("attempt %d: %d target tokens, the ceiling is %d", attempt + 1, served, ceiling)
            ratio = _tighter(ratio, result, ceiling, served)
        raise BudgetError(
            f"the rewritten prompt still takes {served} tokens after {MAX_ATTEMPTS} tighter selections; the ceiling is "
            f"{ceiling} of {n_prompt}. Raise the keep ratio"
        )

    async def text(self, body: dict[str, Any], size: int, headers: Headers, client: Any) -> Shortened | None:
        """A body with one text as its prompt; None and errors as `chat`."""
        policy = self.policy.of_body(body)
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or _is_short(policy, size):
            return None
        job = _Job(self, policy, headers, client, time.perf_counter(), body)
        n_prompt = await job.count(prompt)
        if policy.compression == AUTO and n_prompt < policy.threshold:
            return None
        session = policy.session or _session(body.get("model"), prompt[:1024], headers)
        result = await job.compress(prompt, policy.ratio(n_prompt), session)
        if result.stop_reason == "below_threshold":
            return None
        shorter = {name: value for name, value in body.items() if name not in FIELDS} | {"prompt": result.text}
        served = await job.count(result.text)
        job.check_room(served)
        return job.shortened(shorter, result, n_prompt, served)


class _Job:
    """One request on its way."""

    def __init__(
        self, owner: Compressor, policy: Policy, headers: Headers, client: Any, began: float, body: dict[str, Any]
    ) -> None:
        self._owner, self._policy, self._headers, self._client = owner, policy, headers, client
        self._began = began
        self._n_output = max_tokens(body)
        self._n_ctx: int | None = None
        self._counts: dict[str, int] = {}
        self._model = {"model": model} if isinstance(model := body.get("model"), str) else {}
        """For a llama-server that has several."""

    async def render(self, body: dict[str, Any]) -> str:
        answer = await self._owner.upstream.ask("/apply-template", body, self._headers)
        prompt = answer.get("prompt") if isinstance(answer, dict) else None
        if not isinstance(prompt, str):
            raise RequestError("the upstream server's answer to /apply-template has no prompt", 502, "server_error")
        return prompt

    async def locate(self, body: dict[str, Any], prompt: str) -> list[messages.Content]:
        """Where the texts of the body's messages stand in the prompt."""
        marked = messages.marked(body["messages"])
        try:
            skeleton: str | None = await self.render(body | {"messages": marked.messages})
        except RequestError as error:
            logger.info("the chat cannot be rendered with markers for its texts: %s", error)
            skeleton = None
        return messages.locate(body["messages"], prompt, skeleton, marked.markers)

    async def count(self, text: str) -> int:
        if text not in self._counts:
            body = {"content": text, "add_special": True, "parse_special": True} | self._model
            answer = await self._owner.upstream.ask("/tokenize", body, self._headers)
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            if not isinstance(tokens, list):
                raise RequestError("the upstream server's answer to /tokenize has no tokens", 502, "server_error")
            self._counts[text] = len(tokens)
        return self._counts[text]

    async def compress(self, prompt: str, ratio: float, session: str | None) -> Result:
        self._n_ctx = await self._owner.upstream.context_size(self._headers)
        request = CompressChat(
            id=0,
            rendered_prompt=prompt,
            keep_ratio=ratio,
            session=session,
            pflash_query=self._policy.query,
            pflash_required=list(self._policy.required),
            compression=self._policy.compression,
            threshold=self._policy.threshold,
            target_n_ctx=self._n_ctx,
            max_tokens=self._n_output,
            trace=self._owner.traces,
        )
        return await self._owner.model.compress(request, self._client, count=self.count)

    def part(self, prompt: str, result: Result) -> messages.Part:
        """What is kept of bytes of the prompt."""
        raw, kept = prompt.encode("utf-8", "surrogatepass"), compressed(result)
        if kept.byte_spans is None:
            raise RequestError("the drafter's tokens do not spell the prompt byte for byte", 500, "server_error")

        def part(begin: int, end: int) -> str:
            # excerpts stand behind the role header, and a template may put blanks between it and the words
            inserted = [
                (begin if place < begin and not raw[place:begin].strip() else place, text)
                for place, text in kept.inserted
            ]
            return replace(kept, inserted=inserted).part(raw, begin, end) or ""

        return part

    def check_room(self, served: int) -> None:
        if self._n_ctx is not None and served >= self._n_ctx:
            raise BudgetError(
                f"the compressed prompt takes {served} tokens and the upstream server's context {self._n_ctx}; "
                "lower the keep ratio, or give the server a larger context"
            )

    def shortened(self, body: dict[str, Any], result: Result, n_prompt: int, served: int) -> Shortened:
        timings = dict(result.timings)
        timings["compress_ms"] = (time.perf_counter() - self._began) * 1e3  # all that the client waited for
        timings["compressed_tokens"] = served
        timings["prompt_tokens"] = n_prompt
        data = json.dumps(body, ensure_ascii=False).encode()
        return Shortened(data, timings, n_prompt, served, result.trace)


def _is_short(policy: Policy, size: int) -> bool:
    """Whether a body needs no look: no text has more tokens than bytes."""
    return policy.compression == OFF or (policy.compression == AUTO and size < policy.threshold)


def _tokens(result: Result) -> int:
    return int(result.timings.get("drafter_input_tokens", 0))


def _tighter(ratio: float, result: Result, ceiling: int, served: int) -> float:
    """The ratio that shrinks a budget by (ceiling - overflow - 1) / ceiling, and below what was kept of it.

    budget = kept + ratio (n - kept) + 1, so n - kept = (n - budget + 1) / (1 - ratio).
    """
    overflow, budget, n_tokens = served - ceiling, result.budget, _tokens(result)
    wanted = min(budget * max(0, ceiling - overflow - 1) / max(1, ceiling), result.retained_tokens - 1)
    return max(0.0, ratio - (budget - wanted) * (1 - ratio) / max(1, n_tokens - budget + 1))


def _session(model: Any, beginning: Any, headers: Headers) -> str:
    """A name for the conversation: the drafter resumes where prompts begin alike, and keeps few of them."""
    first = beginning[:2] if isinstance(beginning, list) else beginning
    keys = [value.decode("latin-1") for name, value in headers if name in (b"authorization", b"x-api-key")]
    data = json.dumps([str(model), first, keys], sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return "chat-" + hashlib.sha256(data).hexdigest()[:32]
