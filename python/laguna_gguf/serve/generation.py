"""One request on the session: keywords in, dicts of the OpenAI API out. Runs in the model's thread."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import llama_cpp

from laguna_gguf.errors import DecodeError, LagunaError, RequestError
from laguna_gguf.serve.chunks import Chunks, correct_call, cut_logprobs
from laguna_gguf.serve.deltas import Deltas
from laguna_gguf.serve.grammars import grammar_text
from laguna_gguf.serve.messages import arguments_as_objects
from laguna_gguf.serve.meter import Cancelled, Meter
from laguna_gguf.serve.requests import GenerationRequest
from laguna_gguf.serve.session import ServedSession
from laguna_gguf.serve.settings import Limits

Answer = dict[str, Any]
Emit = Callable[[Answer], None]


def run(session: ServedSession, request: GenerationRequest, meter: Meter, limits: Limits, emit: Emit) -> None:
    """Emit the chunks of a streamed answer, or the one object of another. `meter` is the session's.

    Raises RequestError for what only the model can refuse, Cancelled, and errors of the session.
    """
    keywords = _keywords(session, request, limits)
    session.prefill_options = request.prefill_options
    try:
        if not request.stream:
            emit(_complete(session, request, meter, _call(session, request, keywords)))
        elif request.top_logprobs is None:
            _stream(session, request, meter, keywords, emit)
        else:
            _stream_logprobs(session, request, meter, keywords, emit)
    except DecodeError as error:
        if request.constraint is None and "logit_bias" not in keywords:
            raise
        raise RequestError(str(error)) from error  # they can exclude every token


def _keywords(session: ServedSession, request: GenerationRequest, limits: Limits) -> dict[str, Any]:
    keywords = dict(request.keywords)
    if request.top_logprobs is not None and not session._logits_all:
        raise RequestError("logprobs: the server does not keep logits; start it with --logits-all")
    if keywords["seed"] is None:
        keywords["seed"] = secrets.randbelow(2**32 - 1)
    for token in keywords.get("logit_bias", ()):
        if token >= session.n_vocab():
            raise RequestError(f"logit_bias: token {token} is outside the vocabulary of {session.n_vocab()}")
    if request.constraint is not None:
        text = grammar_text(request.constraint, limits)
        keywords["grammar"] = llama_cpp.LlamaGrammar.from_string(text, verbose=False)
    if request.suffix is not None:
        keywords["prompt"] = _infill(session, keywords["prompt"], request.suffix)
    if request.chat and session.wants_argument_objects:
        keywords["messages"] = arguments_as_objects(keywords["messages"])
    return keywords


def _call(session: ServedSession, request: GenerationRequest, keywords: dict[str, Any], stream: bool = False) -> Any:
    if not request.chat:
        # Llama can put text in front of text, and needs to where that text has log probabilities.
        echo = request.echo and request.top_logprobs is not None
        return session.create_completion(stream=stream, echo=echo, **keywords)
    meter = session.meter
    try:
        return session.chat(stream=stream, template_keywords=request.template_keywords, **keywords)
    except (LagunaError, Cancelled):
        raise
    except Exception as error:
        if (meter is None or not meter.began) and not isinstance(error, MemoryError):
            raise RequestError(f"the messages do not fit the model's chat template: {error}") from error
        raise


def _infill(session: ServedSession, prefix: str, suffix: str) -> list[int]:
    """The prompt for the text between the two, in the order prefix, suffix, middle."""
    vocabulary = session._model.vocab
    marks = [
        llama_cpp.llama_vocab_fim_pre(vocabulary),
        llama_cpp.llama_vocab_fim_suf(vocabulary),
        llama_cpp.llama_vocab_fim_mid(vocabulary),
    ]
    if min(marks) < 0:
        raise RequestError("suffix: the model has no tokens for filling in a middle")
    before, after = (session.tokenize(text.encode(), add_bos=False, special=False) for text in (prefix, suffix))
    begin = [session.token_bos()] if session._model.add_bos_token() else []
    return [*begin, marks[0], *before, marks[1], *after, marks[2]]


def _echoed(session: ServedSession, request: GenerationRequest) -> str:
    prompt = request.keywords["prompt"]
    if isinstance(prompt, str):
        return prompt
    return session.detokenize(prompt, special=True).decode("utf-8", "replace")


def _complete(session: ServedSession, request: GenerationRequest, meter: Meter, answer: Answer) -> Answer:
    choice = answer["choices"][0]
    _correct_reason(request, meter, choice)
    if request.chat:
        cut_logprobs(choice, request.top_logprobs)
    elif request.echo and request.top_logprobs is None:
        choice["text"] = _echoed(session, request) + choice["text"]
    answer["usage"] = meter.usage()
    answer["timings"] = meter.timings()
    return answer


def _stream(
    session: ServedSession, request: GenerationRequest, meter: Meter, keywords: dict[str, Any], emit: Emit
) -> None:
    """The whole answer as llama_cpp makes it, passed on while it grows."""
    chunks = Chunks(request)

    def timed(chunk: Answer) -> Answer:
        return chunk | {"timings": meter.timings()} if request.timings_per_token else chunk

    def pass_on(text: str) -> None:
        if text:
            emit(timed(chunks.text(text)))
            return
        for chunk in chunks.start():
            emit(timed(chunk))
        if request.echo:
            emit(timed(chunks.text(_echoed(session, request))))

    session.deltas = deltas = Deltas(pass_on)
    choice = _call(session, request, keywords)["choices"][0]
    deltas.finish(_text(request, choice))
    _correct_reason(request, meter, choice)
    last = chunks.finish(choice["finish_reason"])
    if request.include_usage:
        emit(last)
        last = chunks.usage(meter.usage())
    emit(last | {"timings": meter.timings()})


def _correct_reason(request: GenerationRequest, meter: Meter, choice: dict[str, Any]) -> None:
    if request.tool is not None:
        correct_call(choice, legacy=request.legacy_functions, whole=meter.ended)
    elif meter.cut:
        choice["finish_reason"] = "length"


def _text(request: GenerationRequest, choice: dict[str, Any]) -> str:
    if not request.chat:
        return choice["text"]
    message = choice["message"]
    return message["content"] if request.tool is None else message["tool_calls"][0]["function"]["arguments"]


def _stream_logprobs(
    session: ServedSession, request: GenerationRequest, meter: Meter, keywords: dict[str, Any], emit: Emit
) -> None:
    """llama_cpp's own chunks, which have the log probabilities of their tokens."""
    last: Answer = {}
    for chunk in _call(session, request, keywords, stream=True):
        choice = chunk["choices"][0]
        if request.chat:
            cut_logprobs(choice, request.top_logprobs)
        if choice["finish_reason"] is not None:
            _correct_reason(request, meter, choice)
        else:
            emit(chunk | {"timings": meter.timings()} if request.timings_per_token else chunk)
        last = chunk
    if request.include_usage:
        emit(last)
        last = last | {"choices": [], "usage": meter.usage()}
    emit(last | {"timings": meter.timings()})
