"""Prompts by kind of text: how much drafting brings depends on it more than on anything else.

A prompt set is a JSON object, kind to list of prompts. A prompt is {"text": ...}, continued as it stands, or
{"messages": [...]}, rendered with the target's own chat template; "thinking": true opens the assistant's reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp._internals import LlamaModel
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from laguna_gguf.dflash.target import quiet_llama_cpp
from laguna_gguf.errors import ConfigError

DEFAULT_FILE = Path(__file__).with_name("prompts.json")

THINK = "<think>"

Prompts = dict[str, list[list[int]]]
"""Token ids by kind."""


def load_vocabulary(target: Path) -> LlamaModel:
    """A target without its weights, to tokenise with before it is known how much context is needed. To be closed."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    with quiet_llama_cpp():
        return LlamaModel(path_model=str(target), params=params, verbose=False)


def load_prompts(model: LlamaModel, path: Path | None = None, kinds: Sequence[str] = ()) -> Prompts:
    """Tokenised prompts of a file (default: the package's own), of these kinds only if any are named.

    A file that is not JSON is one prompt, of a kind called after the file. Raises ConfigError for other contents or an
    unknown kind, OSError when the file cannot be read.
    """
    path = path or DEFAULT_FILE
    entries = _parse(path)
    unknown = [kind for kind in kinds if kind not in entries]
    if unknown:
        raise ConfigError(f"no prompts of kind {', '.join(unknown)} in {path.name}; it has {', '.join(entries)}")
    return {
        kind: [_tokenise(model, prompt) for prompt in prompts]
        for kind, prompts in entries.items()
        if not kinds or kind in kinds
    }


def filler(prompts: Prompts, n_tokens: int) -> list[int]:
    """n_tokens of the prompts' text, over and over: something to fill a context with."""
    tokens = [token for group in prompts.values() for prompt in group for token in prompt]
    return (tokens * (n_tokens // len(tokens) + 1))[:n_tokens]


def _parse(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path.name} is not UTF-8 (byte {error.start}); needed a prompt set or one prompt"
        ) from error
    try:
        entries = json.loads(content)
    except ValueError:
        entries = {path.stem: [{"text": content}]}
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{path.name} is not a prompt set; needed a JSON object of kind to list of prompts")
    for kind, prompts in entries.items():
        if not isinstance(prompts, list) or not prompts or not all(_is_prompt(prompt) for prompt in prompts):
            raise ConfigError(
                f"{path.name}: {kind!r} is not a list of prompts; needed objects with a text or a list of messages"
            )
    return entries


def _is_prompt(prompt: Any) -> bool:
    if not isinstance(prompt, dict):
        return False
    if isinstance(prompt.get("text"), str) and prompt["text"]:
        return True
    messages = prompt.get("messages")
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages)
    )


def _tokenise(model: LlamaModel, prompt: dict[str, Any]) -> list[int]:
    text = prompt.get("text") or _render(model, prompt)
    bos = model.token_get_text(model.token_bos())  # chat templates write it themselves
    return model.tokenize(text.encode("utf-8"), not text.startswith(bos), True)


def _render(model: LlamaModel, prompt: dict[str, Any]) -> str:
    template = model.metadata().get("tokenizer.chat_template")
    if template is None:
        raise ConfigError("the target has no chat template, which prompts with messages need; use prompts with text")
    formatter = Jinja2ChatFormatter(
        template=template,
        eos_token=model.token_get_text(model.token_eos()),
        bos_token=model.token_get_text(model.token_bos()),
    )
    thinking = bool(prompt.get("thinking"))
    text = formatter(messages=prompt["messages"], enable_thinking=thinking).prompt
    if thinking and not text.rstrip().endswith(THINK):
        text += THINK
    return text
