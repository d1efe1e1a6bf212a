"""Chunks of a streamed answer, and corrections of llama_cpp's whole ones."""

from __future__ import annotations

import time
import uuid
from typing import Any

from laguna_gguf.serve.requests import GenerationRequest

Chunk = dict[str, Any]


class Chunks:
    """Makes the chunks of one answer: chat, tool call or plain text."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        kind = "chat.completion.chunk" if request.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4()}",
            "object": kind,
            "created": int(time.time()),
            "model": request.keywords["model"],
        }
        self._call_id = f"call_{uuid.uuid4().hex}"

    def start(self) -> list[Chunk]:
        """Before any text: the role alone, then, for a call, its id and name without arguments."""
        if not self._request.chat:
            return []
        chunks = [self._delta({"role": "assistant"})]
        name = self._request.tool
        if name is not None and self._request.legacy_functions:
            chunks.append(self._delta({"function_call": {"name": name, "arguments": ""}}))
        elif name is not None:
            function = {"name": name, "arguments": ""}
            call = {"index": 0, "id": self._call_id, "type": "function", "function": function}
            chunks.append(self._delta({"tool_calls": [call]}))
        return chunks

    def text(self, text: str) -> Chunk:
        """A piece of text, or of a call's arguments."""
        if not self._request.chat:
            return self._choice({"text": text, "index": 0})
        if self._request.tool is None:
            return self._delta({"content": text})
        if self._request.legacy_functions:
            return self._delta({"function_call": {"arguments": text}})
        return self._delta({"tool_calls": [{"index": 0, "function": {"arguments": text}}]})

    def finish(self, reason: str) -> Chunk:
        """The last one with a choice."""
        if not self._request.chat:
            return self._choice({"text": "", "index": 0}, reason)
        return self._delta({}, reason)

    def usage(self, usage: dict[str, Any]) -> Chunk:
        """The one after it, if the client asked for it."""
        return {**self._head, "choices": [], "usage": usage}

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> Chunk:
        return self._choice({"index": 0, "delta": delta}, reason)

    def _choice(self, choice: dict[str, Any], reason: str | None = None) -> Chunk:
        return {**self._head, "choices": [{**choice, "logprobs": None, "finish_reason": reason}]}


def correct_call(choice: dict[str, Any], *, legacy: bool, whole: bool) -> None:
    """A message with a call, in the form that was asked for; "length" where the arguments were cut off."""
    choice["message"].pop("tool_calls" if legacy else "function_call", None)
    if not whole:
        choice["finish_reason"] = "length"
    elif legacy:
        choice["finish_reason"] = "function_call"


def cut_logprobs(choice: dict[str, Any], n_top: int | None) -> None:
    """As many alternatives as were asked for: llama_cpp adds the chosen token to them."""
    if choice.get("logprobs") is None or n_top is None:
        return
    for entry in choice["logprobs"]["content"]:
        entry["top_logprobs"] = entry["top_logprobs"][:n_top]
