"""Keywords of `llama_cpp.Llama` that a drafter takes, and llama.cpp's parameters for them."""

from __future__ import annotations

import ctypes
import multiprocessing
from dataclasses import dataclass
from typing import Any

import llama_cpp

from laguna_gguf.errors import ConfigError
from laguna_gguf.llama_arguments import check_llama_keywords

_ALL_LAYERS = 0x7FFFFFFF

_WITHOUT_EFFECT = ("seed", "logits_all", "swa_full", "no_perf", "last_n_tokens_size", "chat_format", "chat_handler")
"""Keywords of Llama that are taken and change nothing here."""

_AS_LLAMA_CPP_HAS_IT = (
    "op_offload",
    "type_k",
    "type_v",
    "rope_scaling_type",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
"""Settings that keep llama.cpp's default when they are None."""


@dataclass(frozen=True)
class LlamaOptions:
    """Keywords of `llama_cpp.Llama` that mean something for a drafter, with Llama's defaults.

    Except n_ctx, which is not set: the context then grows with the prompts.
    """

    n_ctx: int = 0
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_gpu_layers: int = 0
    split_mode: int = llama_cpp.LLAMA_SPLIT_MODE_LAYER
    main_gpu: int = 0
    tensor_split: list[float] | None = None
    use_mmap: bool = True
    use_mlock: bool = False
    offload_kqv: bool = True
    flash_attn: bool = False
    op_offload: bool | None = None
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    rope_scaling_type: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: int | None = None
    type_k: int | None = None
    type_v: int | None = None
    verbose: bool = False

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any]) -> LlamaOptions:
        """ConfigError, naming the keyword, for values and keywords that do not work."""
        keywords = {name: value for name, value in keywords.items() if name not in _WITHOUT_EFFECT}
        check_llama_keywords(keywords)
        unknown = set(keywords) - set(cls.__dataclass_fields__)
        if unknown:
            raise ConfigError(
                f"{', '.join(sorted(unknown))}: not a setting of a drafter; known are "
                f"{', '.join(cls.__dataclass_fields__)}"
            )
        try:
            options = cls(**keywords)
            options._fill_model(llama_cpp.llama_model_default_params())
            options._fill_context(llama_cpp.llama_context_default_params())
        except (TypeError, ValueError, ctypes.ArgumentError) as error:
            raise ConfigError(f"a setting of the drafter has the wrong type: {error}") from error
        return options

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return min(self.n_batch, self.n_ubatch)

    @property
    def threads(self) -> int:
        return self.n_threads_batch or multiprocessing.cpu_count()

    def model_params(self) -> Any:
        return self._fill_model(llama_cpp.llama_model_default_params())

    def context_params(self) -> Any:
        return self._fill_context(llama_cpp.llama_context_default_params())

    def _fill_model(self, params: Any) -> Any:
        params.n_gpu_layers = _ALL_LAYERS if self.n_gpu_layers == -1 else self.n_gpu_layers
        params.split_mode = self.split_mode
        params.main_gpu = self.main_gpu
        if self.tensor_split is not None:
            if len(self.tensor_split) > llama_cpp.LLAMA_MAX_DEVICES:
                raise ValueError(f"tensor_split has more than {llama_cpp.LLAMA_MAX_DEVICES} entries")
            params.tensor_split = (ctypes.c_float * llama_cpp.LLAMA_MAX_DEVICES)(*self.tensor_split)
        if self.use_mlock:
            mode = llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK if self.use_mmap else llama_cpp.LLAMA_LOAD_MODE_MLOCK
        else:
            mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if self.use_mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
        params.load_mode = mode
        params.load_mtp = False  # blocks behind the tap are never run
        return params

    def _fill_context(self, params: Any) -> Any:
        params.n_batch = params.n_ubatch = self.rows
        params.n_threads = self.n_threads or max(multiprocessing.cpu_count() // 2, 1)
        params.n_threads_batch = self.threads
        params.offload_kqv = self.offload_kqv
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if self.flash_attn else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.rope_freq_base = self.rope_freq_base
        params.rope_freq_scale = self.rope_freq_scale
        for name in _AS_LLAMA_CPP_HAS_IT:
            if getattr(self, name) is not None:
                setattr(params, name, getattr(self, name))
        return params
