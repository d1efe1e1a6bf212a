"""The session of the server: a SpecSession that is watched, and that can be stopped between two decodes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import jinja2
import jinja2.meta
import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter, get_chat_completion_handler

from laguna_gguf.dflash.session import SpecSession
from laguna_gguf.errors import RequestError
from laguna_gguf.serve.deltas import Deltas
from laguna_gguf.serve.meter import Meter

_FORMATTER_VARIABLES = frozenset(
    "messages tools functions tool_choice function_call bos_token eos_token raise_exception strftime_now "
    "add_generation_prompt".split()
)
"""Variables of a template that are not a request's to set."""


SPARE_TOKENS = 3
"""Tokens that may follow max_tokens to complete a character; llama_cpp has no limit, not even the context's end."""


class _Pieces(dict[int, bytes]):
    """Text of tokens, asked for once. Tokens of any length: llama_cpp takes 32 bytes for enough."""

    def __init__(self, vocabulary: Any, *, special: bool) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._special = special

    def __missing__(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = (ctypes.c_char * size)()
            n = llama_cpp.llama_token_to_piece(self._vocabulary, token, buffer, size, 0, self._special)
            if n >= 0:
                break
            size = -n
        piece = self[token] = ctypes.string_at(buffer, n)
        return piece


class ServedSession(SpecSession):
    """A SpecSession with a meter, and where wanted deltas, for the request at hand."""

    meter: Meter | None = None
    deltas: Deltas | None = None

    def __init__(self, *args: Any, pflash: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, pflash=pflash, **kwargs)
        if pflash is not None:
            pflash.on_progress = self._check_meter

    def _check_meter(self, *_: int) -> None:
        """A client may leave while its prompt is compressed, too."""
        if self.meter is not None:
            self.meter.check()

    def new_meter(self, cancelled: Callable[[], bool]) -> Meter:
        """Measure the next call; it ends with `Cancelled` soon after `cancelled()` is true."""
        self.meter = Meter(cancelled, self._draft_counts, synthetic=self.synthetic is not None)
        return self.meter

    def on_evaluated(self, n_tokens: int) -> None:
        if self.meter is not None and not self.meter.n_predicted:
            self.meter.evaluated(n_tokens)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        meter = self.meter
        if meter is None:
            yield from super().generate(tokens, *args, **kwargs)
            return
        meter.begin(len(tokens))
        meter.compression = None if self.last_compression is None else self.last_compression.timings
        wanted = self.next_max_tokens
        room = self.n_ctx() - len(tokens)
        most = min(room, wanted + SPARE_TOKENS) if wanted else room
        with closing(super().generate(tokens, *args, **kwargs)) as stream:
            for token in stream:
                ends = self.ends(token)
                meter.token(ends)
                if self.deltas is not None and not ends:
                    self.deltas.add(self.detokenize([token]))
                yield token
                if meter.n_predicted >= most:
                    break
        meter.cut = True
        yield self.token_eos()  # llama_cpp returns the text it has

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As Llama's, also when a chat calls it; the deltas learn which strings end the text."""
        stop = kwargs.get("stop") or []
        if self.deltas is not None:
            self.deltas.begin([stop] if isinstance(stop, str) else stop)
        return super().create_completion(*args, **kwargs)

    def detokenize(self, tokens: Sequence[int], prev_tokens: Any = None, special: bool = False) -> bytes:
        """As Llama's, from a table: Llama wants the whole text after every token, and asks llama.cpp for each piece."""
        self._check_open()
        text = b"".join(map(self._pieces[special].__getitem__, tokens))
        begins_with_bos = len(tokens) > 0 and tokens[0] == self.token_bos()
        return text[1:] if begins_with_bos and text[:1] == b" " else text

    @cached_property
    def _pieces(self) -> tuple[_Pieces, _Pieces]:
        return _Pieces(self._model.vocab, special=False), _Pieces(self._model.vocab, special=True)

    def ends(self, token: int) -> bool:
        """Whether a token ends a generation."""
        return llama_cpp.llama_vocab_is_eog(self._model.vocab, token)

    def chat(self, *, template_keywords: dict[str, Any], **keywords: Any) -> Any:
        """create_chat_completion, with further variables for the template. Raises RequestError for unknown ones."""
        if not template_keywords:
            return self.create_chat_completion(**keywords)
        for name in template_keywords:
            if name not in self._template_variables:
                known = ", ".join(sorted(self._template_variables)) or "none"
                raise RequestError(f"chat_template_kwargs: the template has no variable {name[:80]!r}; it has: {known}")
        name = self.chat_format or ""
        handler = self._chat_handlers.get(name) or get_chat_completion_handler(name)
        with self.rendering_chat():
            return handler(llama=self, **template_keywords, **keywords)

    @cached_property
    def _template(self) -> str:
        """The model's own template; empty when chats are formatted in another way."""
        return self.metadata.get("tokenizer.chat_template", "") if self.chat_format == "chat_template.default" else ""

    @cached_property
    def _template_variables(self) -> frozenset[str]:
        environment = jinja2.Environment(extensions=[Jinja2ChatFormatter.IgnoreGenerationTags, jinja2.ext.loopcontrols])
        return (
            frozenset(jinja2.meta.find_undeclared_variables(environment.parse(self._template))) - _FORMATTER_VARIABLES
        )

    @cached_property
    def wants_argument_objects(self) -> bool:
        """Whether the template can show arguments of a tool call only as objects, not as JSON text.

        Tried out, since templates do not say.
        """
        if "arguments" not in self._template:
            return False
        return "probe_key" in self._probe({"probe_key": "probe_value"}) and '"probe_key":' not in self._probe(
            '{"probe_key": "probe_value"}'
        )

    def _probe(self, arguments: Any) -> str:
        call = {"id": "call_1", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages: Any = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return Jinja2ChatFormatter(self._template, eos_token="", bos_token="")(messages=messages).prompt
        except Exception:  # whatever a template does with arguments it does not expect
            return ""
