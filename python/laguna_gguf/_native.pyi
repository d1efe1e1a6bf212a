"""Types of the compiled half. Every function raises the classes of laguna_gguf.errors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LLAMA_CPP_PYTHON_VERSION: str
"""Version of llama-cpp-python whose headers this module was compiled against."""

def output_device(llama_model: int) -> str:
    """Registry name of the device that holds the output head of a live llama_model."""

def ggml_library_path() -> str:
    """Path of the libggml-base this process runs, as the dynamic linker reports it."""

def type_name(ggml_type: int) -> str:
    """ggml's name of a type id, lower case ("bf16", "q8_0")."""

def type_size(ggml_type: int) -> tuple[int, int]:
    """(elements a block, bytes a block); ConfigError for an id this ggml does not have."""

def quantize(rows: NDArray[np.float32], ggml_type: int) -> NDArray[np.uint8]:
    """Quantise [n_rows, n_per_row] with ggml_quantize_chunk; returns [n_rows, bytes a row]."""

def dequantize(data: NDArray[np.uint8], ggml_type: int, n_per_row: int) -> NDArray[np.float32]:
    """Raw bytes of whole rows to float32 [n_rows, n_per_row]."""

def all_finite(data: NDArray[np.uint8], ggml_type: int, n_per_row: int) -> bool:
    """Whether every value that the raw bytes stand for is finite."""

class GgufTensor:
    name: str
    ggml_type: int
    ne: tuple[int, ...]
    """ggml order: ne[0] is the contiguous axis."""
    n_bytes: int
    def data(self) -> NDArray[np.uint8]:
        """The raw bytes, a read-only view of the mapped file (no copy)."""

class GgufFile:
    """A GGUF file (or all shards of a split one), fully validated before anything else sees a number."""

    def __init__(self, path: str) -> None: ...
    paths: list[str]
    version: int
    alignment: int
    def keys(self) -> list[str]: ...
    def get(self, key: str, default: Any = None) -> Any:
        """int, float, bool, str, or for arrays a numpy array (numbers, bools) or list (strings)."""
    def tensors(self) -> list[GgufTensor]: ...
    def tensor(self, name: str) -> GgufTensor | None: ...

class HiddenCapture:
    """llama.cpp eval callback that copies the residual rows `l_out-<t>` of the wanted layers.

    Rows are stored [row, layer, n_embd] float32. One decode may fire several times (once a micro-batch)."""

    def __init__(self, layers: Sequence[int], n_embd: int) -> None: ...
    callback_address: int
    user_data_address: int
    enabled: bool
    """False: the callback asks for nothing."""
    stop_after_last: bool
    """True: the graph ends once the highest wanted layer is copied (no logits then)."""
    one_graph: bool
    """True: only one micro-batch follows a begin(). llama.cpp ends the part of the graph that lies on the same device;
    with this the parts on other devices end too, after their first node."""
    n_nonfinite: int
    """Features that were not finite and were set to 0, since construction."""
    ms: float
    """Time spent in the callback since construction."""
    def begin(self) -> None:
        """Drop captured rows; call before each decode (or group of decodes whose rows belong together)."""
    def n_rows(self) -> int:
        """Rows captured since begin(); CaptureError when the layers disagree."""
    def rows(self) -> NDArray[np.float32]:
        """Copy of the captured rows [n_rows, n_layers, n_embd]."""

class Drafter:
    """DFlash weights, rotating context cache, context-update and block graphs."""

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, tuple[int, tuple[int, ...], NDArray[np.uint8]]],
        n_threads: int,
        device: str = "",
    ) -> None:
        """config: the fields of DrafterConfig (target_layer_ids 0-based outputs) as a dict.

        tensors: dialect-A name without ".weight" -> (ggml type, ne, raw bytes): fc, enc.aux_norm (ne [H, A]),
        enc.output_norm, output_norm, blk.N.{attn_norm, attn_q, attn_k, attn_v, attn_output, attn_q_norm, attn_k_norm,
        attn_gate, ffn_norm, ffn_gate, ffn_up, ffn_down}. Norms f32. Copied: the bytes are not kept."""
    n_threads: int
    position: int
    """Next absolute position (number of rows fed since reset when it started at 0)."""
    first_position: int
    """Lowest position fed since reset (where append started)."""
    n_rows: int
    """Contiguous rows ending at position-1 that are still in the cache."""
    has_target: bool
    argmax_on_device: bool
    """Find the tokens by graph operations, as for logits outside host memory; for tests and GPU measurements."""
    def bind_target(self, llama_model: int) -> None:
        """llama_model: address of a live llama_model; its token_embd and output rows are used in place.

        TargetMismatchError when shapes do not fit. The model must outlive the binding."""
    def unbind_target(self) -> None: ...
    def limit_vocabulary(self, ids: Sequence[int], ggml_type: int, rows: NDArray[np.uint8]) -> None:
        """Draft only these ids (ascending); rows: the bytes of their rows of the output head. []: all tokens again."""
    def append(self, features: NDArray[np.float32], start_position: int) -> None:
        """features [n_rows, n_captured, n_embd] at positions start_position... ; RollbackError on a hole."""
    def append_captured(
        self, capture: HiddenCapture, first_row: int, n_rows: int, start_position: int, deferred: bool = False
    ) -> None:
        """The same from rows that a capture holds, without a copy to Python. deferred: copied now, computed later."""
    def flush(self) -> None:
        """Compute deferred rows; the next draft does it too."""
    def draft(
        self, anchor: int, n: int, anchored: bool = False, return_logits: bool = False
    ) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
        """tokens int32 [n] (argmax, lowest id on ties), logits float32 [n, n_vocab] or None. Changes no state."""
    def rollback(self, position: int) -> None: ...
    def reset(self) -> None: ...
    def memory(self) -> dict[str, int]:
        """Bytes by use: weights, context_cache, compute."""

class TokenStore:
    """What a scoring session keeps of every token: NoPE keys and the segment probe's values before its convolution."""

    n_tokens: int
    n_bytes: int
    def truncate(self, n_tokens: int) -> None:
        """Forget tokens n_tokens... ; no effect when there are not as many."""
    def keys(self) -> NDArray[np.float32]:
        """Copy [n_tokens, n_head_kv, head_dim]."""
    def probe(self) -> NDArray[np.float32]:
        """Copy [n_tokens, n_outputs]; 0 outputs without a probe, 2 with a sub-unit head."""

class Block15Scorer:
    """Attention without RoPE of query rows over all tokens, with the projections of the block behind the tap."""

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, NDArray[np.float32]],
        probe: dict[str, Any] | None,
        n_threads: int,
        device: str = "",
    ) -> None:
        """config: n_embd, n_head, n_head_kv, head_dim, norm_eps. weights: attn_norm, attn_q (query rows only), attn_k,
        attn_q_norm, attn_k_norm. probe: norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight [n_outputs, n_hidden],
        fc2_bias [n_outputs], norm_eps, gelu_erf. All float32, matrices [n_out, n_in]; copied."""
    def new_store(self) -> TokenStore: ...
    def append(self, taps: NDArray[np.float32], store: TokenStore) -> None:
        """taps [n, n_embd] of the next n tokens."""
    def append_captured(self, capture: HiddenCapture, store: TokenStore) -> None:
        """The same from the rows that a capture of one layer holds, without a copy to Python."""
    def mass(
        self, store: TokenStore, windows: Sequence[tuple[NDArray[np.float32], Sequence[tuple[int, int]]]]
    ) -> NDArray[np.float64]:
        """[n_windows, n_tokens]: mean over heads and rows of each window's attention, 0 where it may not look.

        A window is (taps [n_rows, n_embd], ascending ranges of tokens it may see). ScorerError when a value is not
        finite. Tiled over the tokens: memory does not grow with rows x tokens."""
    def memory(self) -> dict[str, int]:
        """Bytes by use: weights, compute."""

class AttentionCapture:
    """llama.cpp eval callback that copies the keys (as f16) of all tokens and the queries of one window, by layer.

    The graph ends behind the last wanted layer's keys and queries."""

    def __init__(self, layers: Sequence[int], n_head: int, n_head_kv: int, head_dim: int, rotated: bool) -> None:
        """rotated: after RoPE; False: before it."""
    callback_address: int
    user_data_address: int
    enabled: bool
    n_bytes: int
    def begin(self, query_begin: int, query_end: int) -> None:
        """Forget everything; the queries of these positions are wanted."""
    def next_batch(self) -> None:
        """Call before each micro-batch."""

def running_max(capture: AttentionCapture, n_threads: int, device: str = "") -> NDArray[np.float32]:
    """Importance [n_tokens] from captured keys and queries: causal softmax by layer, maximum over heads and layers,
    mean over query rows, centred average over 13 tokens. ScorerError when a value is not finite."""

def fingerprint(ids: NDArray[np.int32]) -> int:
    """FNV-1a of 64 bits over the little-endian bytes of token ids."""
