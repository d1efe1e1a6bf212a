"""SpecSession: a `llama_cpp.Llama` that drafts."""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.dflash.arguments import (
    Closed,
    check_chat_handler,
    check_keywords_allowed,
    check_keywords_known,
    check_llama_keywords,
    micro_batch,
)
from laguna_gguf.dflash.checkpoint import read_checkpoint
from laguna_gguf.dflash.depth import make_depth
from laguna_gguf.dflash.draft_vocab import DraftVocab, draft_vocabulary, output_rows
from laguna_gguf.dflash.drafter import WINDOWS, Drafter
from laguna_gguf.dflash.drafting_llama import DraftingLlama
from laguna_gguf.dflash.evaluation import Evaluation
from laguna_gguf.dflash.health import AcceptanceWatch
from laguna_gguf.dflash.prefill import Compression, ShortPrompt, make_compressor, shorten
from laguna_gguf.dflash.rounds import run_rounds
from laguna_gguf.dflash.sampling import Callbacks, JoinedProcessors, SafeSampler, check_grammar, check_logit_bias
from laguna_gguf.dflash.stats import Counters, SpecStats
from laguna_gguf.dflash.synthetic import SyntheticStats, acceptance_probability, make_synthetic
from laguna_gguf.dflash.target import TargetContext, check_target_file, model_address, model_shape
from laguna_gguf.errors import (
    CheckpointError,
    ConfigError,
    DecodeError,
    LagunaError,
    UnsupportedError,
)
from laguna_gguf.llama_text import tokenizable
from laguna_gguf.paths import path_argument


class SpecSession(DraftingLlama):
    """Drop-in for `llama_cpp.Llama` with Laguna DFlash speculative decoding.

    Same constructor keywords, same methods, same results; the drafter only decides how many target passes they take.
    In f32 (weights, KV cache, flash attention off) the text is token-identical to plain decoding, greedy or sampled
    with the same seed. With half or quantised types a verify decode of several rows can round differently from a decode
    of one row, so a first difference is possible where two tokens are nearly tied.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        draft_model_path: str | os.PathLike[str],
        *,
        draft_max: int | str = "auto",
        draft_min: int = 0,
        window: str = "per_query",
        draft_vocab: DraftVocab | None = None,
        spec_synth_len: float | None = None,
        pflash: Compression | None = None,
        prefill_compression: str = "off",
        prefill_threshold: int = 32000,
        prefill_keep_ratio: float = 0.05,
        prefill_curve: Any = None,
        **llama_kwargs: Any,
    ) -> None:
        """Load target and drafter.

        draft_model_path: a drafter GGUF or a Hugging Face directory. draft_max: drafts a round, "auto" or
        0..block_size-1 (0 is plain decoding). draft_min: the least that "auto" drafts; 0 lets it decode plainly where
        drafts do not pay. window: see `Drafter.draft`. spec_synth_len: for benchmarks only, tokens a round that random
        acceptance is to bring (`laguna_gguf.dflash.synthetic`), 1..draft_max + 1; the text is then not the target's.
        draft_vocab: token ids that may be drafted, or (n, text) for the n most frequent of a text: the output head is a
        large part of the drafter's cost, and rare tokens may not be worth it.
        pflash: a `PFlash`, which shortens prompts given as text, and those that a chat handler renders, before they are
        evaluated: never (prefill_compression "off"), when at least prefill_threshold target tokens could be dropped
        ("auto"), or "always". prefill_keep_ratio of these is kept, or as much as prefill_curve ("TOKENS:RATIO ...")
        says for the prompt's length. Lossy; see `last_compression`.
        Raises CheckpointError, ConfigError, TargetMismatchError (all ValueError too) before anything large is loaded
        where that is possible.
        """
        check_keywords_known(llama_kwargs, inspect.signature(SpecSession).parameters)
        check_keywords_allowed(llama_kwargs)
        check_llama_keywords(llama_kwargs)
        if window not in WINDOWS:
            raise ConfigError(f"window is {window!r}; needed one of {', '.join(WINDOWS)}")
        model_path = path_argument("model_path", model_path)
        check_target_file(model_path)
        self._compressor = make_compressor(
            pflash,
            compression=prefill_compression,
            threshold=prefill_threshold,
            keep_ratio=prefill_keep_ratio,
            curve=prefill_curve,
            model_path=model_path,
        )
        self.last_compression: ShortPrompt | None = None
        """What became of the prompt of the last completion (with PFlash a `Compressed`); None where it was not looked
        at."""
        self.prefill_options: dict[str, Any] = {}
        """What the compressor is told about the next prompts besides the policy. With PFlash: session (the name under
        which they are scored and their keep ratio adapts; conversations that alternate are read faster under names of
        their own), pflash_query, pflash_required."""
        self._is_rendered = False  # whether prompts are being made by a chat handler
        checkpoint = read_checkpoint(path_argument("draft_model_path", draft_model_path))
        config = checkpoint.config
        self._window = window
        planned = make_depth(
            draft_max, draft_min, config.block_size, micro_batch(llama_kwargs)
        )  # refuse before loading
        if spec_synth_len is not None:
            acceptance_probability(spec_synth_len, planned.largest)

        self._capture = _native.HiddenCapture(list(config.target_layer_ids), config.hidden_size)
        self._eval_callback = ctypes.cast(
            self._capture.callback_address, llama_cpp.llama_cpp.ggml_backend_sched_eval_callback
        )
        try:
            super().__init__(model_path, **llama_kwargs)
        except ValueError as error:
            kind = ConfigError if hasattr(self, "_model") else CheckpointError
            raise kind(f"llama.cpp refused {model_path} or its settings: {error}") from error
        try:
            config.validate_target(*model_shape(self.model))
            self._target = TargetContext(self, self._capture)
            self.depth = make_depth(draft_max, draft_min, config.block_size, self._target.n_ubatch)
            self.synthetic = make_synthetic(spec_synth_len, self.depth.largest, self.model)
            device = _native.output_device(model_address(self.model))
            self._drafter = Drafter(checkpoint, n_threads=self.n_threads_batch, device=device)
            self._drafter.bind_target(self._model)  # not self: a cycle would keep the memory until a collection
            if draft_vocab is not None:
                ids = draft_vocabulary(draft_vocab, self._n_vocab, self._text_tokens)
                self._drafter.limit_vocabulary(ids, *output_rows(model_path, ids))
        except BaseException:
            self.close()
            raise
        self._evaluation = Evaluation(self._target, self._drafter, self._capture)
        self._limit = self._n_ctx
        self._fit_arrays()
        self.next_max_tokens: int | None = None
        """max_tokens of a completion that is about to generate; 0 is no limit."""
        self._turn = None  # identity of the generator in progress
        self._thread = threading.current_thread()  # the one that last called
        self._lock = threading.Lock()
        self.counters = Counters()
        self.acceptance = AcceptanceWatch()
        self.last_token_drafted = False
        """Whether the token that `generate` yielded last had been drafted."""

    # -- set-up -----------------------------------------------------------------------------------------------------

    @property
    def chat_handler(self) -> Any:
        """As Llama's. Raises ConfigError for a multimodal handler."""
        return self._chat_handler

    @chat_handler.setter
    def chat_handler(self, handler: Any) -> None:
        check_chat_handler(handler)
        self._chat_handler = handler

    @property
    def drafter(self) -> Drafter:
        """The drafter; between calls its context is first brought up to the committed tokens."""
        stale = self.n_tokens > 0 and not self._evaluation.drafter_holds(self.n_tokens, self.n_tokens)
        if stale and self._turn is None and not self._closed:
            self._evaluate(self._input_ids.copy(), keep=self.n_tokens, capture=True)
        return self._drafter

    @property
    def stats(self) -> SpecStats:
        stats = self.counters.snapshot(nonfinite=self._capture.n_nonfinite, draft_max_now=self.depth.now)
        return stats if self.synthetic is None else SyntheticStats.of(stats, self.synthetic.mean_length)

    def reset_stats(self) -> None:
        """Counters to zero; the depth policy keeps what it learnt."""
        self.counters = Counters(nonfinite_before=self._capture.n_nonfinite)

    def close(self) -> None:
        """Free context and model; the drafter object survives without a target.

        Raises SessionBusyError while another thread generates: it may be inside llama.cpp at this moment.
        """
        with self._lock:
            self._check_thread()
            self._closed = True
            self._turn = None  # a suspended generator must not touch the freed context
        drafter = getattr(self, "_drafter", None)
        if drafter is not None:
            drafter.unbind_target()
        if hasattr(self, "_stack"):  # absent when the constructor refused before loading
            super().close()
            self._model = self._ctx = self.tokenizer_ = Closed()

    def __del__(self) -> None:
        self._turn = None  # a generator that was collected with the session
        self.close()

    def __enter__(self) -> SpecSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError("a SpecSession cannot be pickled or copied; make another one from the same files")

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        *,
        draft_repo_id: str | None = None,
        draft_filename: str | None = None,
        **kwargs: Any,
    ) -> SpecSession:
        """As Llama.from_pretrained, with the drafter's repository and file (None: its checkpoint or only GGUF).

        Raises ConfigError without draft_repo_id, CheckpointError when files cannot be had.
        """
        if not draft_repo_id:
            raise ConfigError("draft_repo_id is missing; needed the drafter's repository, as 'owner/name'")
        source = f"hf://{draft_repo_id}" + (f"/{draft_filename}" if draft_filename else "")
        try:
            return super().from_pretrained(repo_id, filename, draft_model_path=source, **kwargs)
        except LagunaError:
            raise
        except Exception as error:  # of huggingface_hub and its HTTP client
            raise CheckpointError(f"{repo_id}/{filename} cannot be had: {error}") from error

    # -- state ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens."""
        self._check_open()
        self._check_thread()
        super().reset()
        self._turn = None
        self._target.clear()
        self._drafter.reset()

    def save_state(self) -> llama_cpp.LlamaState:
        """As Llama.save_state."""
        self._check_open()
        self._check_thread()
        return super().save_state()

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Restore a state that a session or a Llama with this model and context size saved.

        The drafter's context is rebuilt when it is next needed. Raises ConfigError or DecodeError for a state that does
        not fit; the session is empty then.
        """
        self._check_open()
        self._check_thread()
        self._turn = None
        self._drafter.reset()
        self._target.clear()  # a state that holds less than it says must not be completed by what was here before
        try:
            super().load_state(state)
            self._fit_arrays()
            tokens = self._checked(self._input_ids)
            if not self._target.restored(len(tokens)):
                self._evaluate(tokens, keep=0)
        except BaseException as error:
            self.reset()
            if isinstance(error, LagunaError) or not isinstance(error, Exception):
                raise
            kind = DecodeError if isinstance(error, RuntimeError) else ConfigError
            raise kind(f"the state is not one of this model and context size: {error}") from error

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the current ones. Raises ConfigError when they do not fit in the context."""
        self._check_open()
        self._claim()
        try:
            new = self._checked(tokens)
            if len(new):
                self._evaluate(np.concatenate([self._input_ids, new]), keep=self.n_tokens)
        finally:
            self._turn = None

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As Llama.sample; the last token is evaluated again where its logits are gone.

        Raises DecodeError for an `idx` whose logits are not those of the last decode, and for an empty session.
        """
        self._check_open()
        self._claim()
        try:
            if self.n_tokens == 0:
                raise DecodeError("no token is evaluated yet; eval() a prompt before sample()")
            if self._requires_eval or self._target.position != self.n_tokens:
                self._evaluate(self._input_ids.copy(), keep=self.n_tokens)
            last = self.n_tokens - 1
            first = last + 1 - self._target.n_logits
            idx = inspect.signature(super().sample).bind(*args, **kwargs).arguments.get("idx")
            if idx is not None and not first <= idx <= last:
                raise DecodeError(f"idx is {idx}; the last decode left the logits of positions {first}..{last}")
            return super().sample(*args, **kwargs)
        finally:
            self._turn = None

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As Llama.tokenize; bytes that are no character count as U+FFFD, all of them (see `tokenizable`)."""
        self._check_open()
        if not isinstance(text, bytes):
            raise ConfigError(f"text is {type(text).__name__}; needed UTF-8 bytes: text.encode()")
        return super().tokenize(tokenizable(text), add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As Llama.detokenize. Raises ConfigError for ids outside the vocabulary."""
        self._check_open()
        return super().detokenize(self._checked(tokens).tolist(), prev_tokens, special)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Not in a session: raises UnsupportedError, as does create_embedding."""
        raise UnsupportedError("a SpecSession does not embed; use a llama_cpp.Llama(..., embedding=True) beside it")

    def _text_tokens(self, text: str) -> list[int]:
        return self.tokenize(text.encode(), add_bos=False)

    # -- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: llama_cpp.LogitsProcessorList | None = None,
        stopping_criteria: llama_cpp.StoppingCriteriaList | None = None,
        grammar: llama_cpp.LlamaGrammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Tokens after a prompt, as `Llama.generate`. A sequence sent in is verified in place of the next draft.

        When the generator is closed, the session holds the prompt and the tokens that were yielded, the last one not
        evaluated, as with Llama. Raises ConfigError (a ValueError) for an empty prompt, one that exceeds the context,
        or ids outside the vocabulary; the session stays usable.
        """
        self._check_open()
        turn = self._claim()
        try:
            wanted, self.next_max_tokens = self.next_max_tokens or None, None
            prompt = self._checked(tokens)
            self._sampler = sampler = self._init_sampler(
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                temp=temp,
                repeat_penalty=repeat_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                tfs_z=tfs_z,
                mirostat_mode=mirostat_mode,
                mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta,
                penalize_nl=penalize_nl,
                logits_processor=logits_processor,
                grammar=grammar,
            )

            def sample(row: int) -> int:
                began = perf_counter()
                token = sampler.sample(self._ctx, row)
                self.counters.sample_ms += (perf_counter() - began) * 1e3
                return token

            def stop(row: int) -> bool:
                if stopping_criteria is None:
                    return False
                logits = self._target.logits(row)
                self._scores[-1] = logits  # where Llama._create_completion looks for them after the last token
                return stopping_criteria(self._input_ids, logits)

            if self.synthetic is not None:
                self.synthetic.seed(self._seed)
            self._prefill(prompt, reset)
            yield from run_rounds(self, turn, sample, stop, wanted)
        finally:
            if self.owned_by(turn):
                self._turn = None

    def _init_sampler(self, *, logits_processor: Any = None, grammar: Any = None, **settings: Any) -> Any:
        """Llama's sampler chain. Raises ConfigError for settings that llama.cpp cannot take."""
        if grammar is not None:
            check_grammar(self.model, grammar)
        callbacks = Callbacks(() if logits_processor is None else logits_processor)
        checked = None if logits_processor is None else llama_cpp.LogitsProcessorList([callbacks])
        try:
            chain = super()._init_sampler(logits_processor=checked, grammar=grammar, **settings)
        except (TypeError, ctypes.ArgumentError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
            raise ConfigError(f"llama.cpp cannot take one of the sampler settings {given} ({error})") from error
        return chain if checked is None and grammar is None else SafeSampler(chain, callbacks, self._n_vocab)

    def _prefill(self, prompt: NDArray[np.intc], reset: bool) -> None:
        """Evaluate the prompt, reusing the longest prefix that is already there."""
        if not reset:
            prompt = np.concatenate([self._input_ids, prompt])
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty; needed at least one token")
        n = min(self.n_tokens, len(prompt))
        differs = np.flatnonzero(self.input_ids[:n] != prompt[:n])
        shared = int(differs[0]) if len(differs) else n
        logits_ready = not self._requires_eval and self._target.position == self.n_tokens == shared == len(prompt)
        if logits_ready and (not self._capturing or self._evaluation.drafter_holds(shared, shared)):
            return
        self._evaluate(prompt, keep=shared)

    @contextmanager
    def rendering_chat(self) -> Iterator[None]:
        """Token prompts that are given inside are rendered chats, which a compressor may shorten."""
        before, self._is_rendered = self._is_rendered, True
        try:
            yield
        finally:
            self._is_rendered = before

    @functools.wraps(llama_cpp.Llama.create_chat_completion)
    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        with self.rendering_chat():
            return super().create_chat_completion(*args, **kwargs)

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        return self._complete(self._is_rendered, *args, **kwargs)  # a generator: it may run when the handler is done

    def _complete(self, is_rendered: bool, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        bound = inspect.signature(super()._create_completion).bind(*args, **kwargs)
        given = bound.arguments
        if not isinstance(given["prompt"], (str, list)):
            raise ConfigError(f"prompt is {type(given['prompt']).__name__}; needed text or a list of token ids")
        if given.get("logit_bias") is not None:
            check_logit_bias(given["logit_bias"], self._n_vocab)
            if given.get("logits_processor") is not None:
                given["logits_processor"] = JoinedProcessors(given["logits_processor"])
        limit = given.get("max_tokens", 16)
        self.last_compression = None
        if self._compressor is not None and self._may_shorten(given, is_rendered):
            given["prompt"], self.last_compression = shorten(
                self, self._compressor, given["prompt"], options=self.prefill_options, max_tokens=limit
            )
        drafted, accepted = self._draft_counts()
        succeeded = True
        self.next_max_tokens = math.ceil(limit) if limit is not None and 0 < limit < self._limit else 0
        try:
            yield from super()._create_completion(*bound.args, **bound.kwargs)
        except ValueError as error:
            if self.next_max_tokens is None or isinstance(error, LagunaError):  # generation had begun
                raise
            raise ConfigError(str(error)) from error
        except Exception:
            succeeded = False
            raise
        finally:
            self.next_max_tokens = None
            if succeeded and self._compressor is not None and self.last_compression is not None:
                self._report_acceptance(drafted, accepted)

    def _may_shorten(self, given: Mapping[str, Any], is_rendered: bool) -> bool:
        """Text, and tokens that a chat handler made; not an infill, whose prompt is half of one."""
        prompt = given["prompt"]
        return given.get("suffix") is None and (bool(prompt.strip()) if isinstance(prompt, str) else is_rendered)

    def _draft_counts(self) -> tuple[int, int]:
        """Drafted and accepted tokens so far."""
        return self.counters.drafted_tokens, sum(self.counters.accepted_by_depth)

    def _report_acceptance(self, drafted_before: int, accepted_before: int) -> None:
        drafted, accepted = self._draft_counts()
        if self._compressor is not None and self.synthetic is None and drafted > drafted_before:
            self._compressor.accepted((accepted - accepted_before) / (drafted - drafted_before))
