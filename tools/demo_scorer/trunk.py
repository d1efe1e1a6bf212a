"""A Qwen3.5 trunk that is constructed instead of trained: it remembers which rare words stood where.

The residual keeps four things side by side. `identity` says which token this is: hashed trigrams of the case-folded
word (words that share a part are alike), the word, and a random part, the louder the rarer the word. `sketch` (block 0)
holds the last four tokens in order: with a constant key and beta = 1 the delta rule forgets everything but the newest
value, which the convolution mixed from four. `recent` and `topic` (blocks 1 and 2) are running averages of identities:
with a constant key the delta rule is S += beta (v - S), and beta grows with rarity, so that template words hardly move
them and the last token of a chat prompt still carries the question; a blank line makes them forget. All other blocks
add next to nothing.

Embeddings have one norm, so that the RMS norm before each block does not change what a direction means.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from random_drafter import CONTROL_TOKENS, DrafterShape, Tensors, random_tensors

SHAPE = DrafterShape(
    n_layer=16,
    n_embd=384,
    n_ff=32,
    n_head=4,
    n_head_kv=4,
    head_dim=64,
    n_rot=32,
    n_vocab=4096,
    context_length=131072,
    state_size=32,
    n_k_heads=1,
    n_v_heads=8,
    gain=0.01,
)

CONSTANT, RARITY, PADDING = 0, 1, 2
FLAGS = slice(4, 16)
IDENTITY = slice(16, 144)
SKETCH, FLAG_SKETCH = slice(144, 200), slice(200, 224)
RECENT, TOPIC = slice(224, 304), slice(304, 384)

CONSTANT_VALUE = 8.0
RARITY_SCALE = 4.0
FLAG_VALUE = 3.0
IDENTITY_NORM = 7.5
QUIET = 0.2
"""Loudness of a common token's identity, as a share of a rare one's."""
TEMPLATE = -1.0
"""Rarity of what only gives a text its form."""

OPEN = 1.2784645
"""silu of it is 1."""
SKETCH_GATES = (1.4, 0.55)
"""Gate inputs of the sketch of words at rare and at common tokens; what is common is said more quietly."""
ADDED_NORM = 80.0
"""Squared norm that each of the first blocks adds."""

BLANK_LINE = 1
"""Flag of tokens that hold a blank line: what stands behind it has another topic."""
FORGET = 5.0

SHARPNESS = 2.0
"""Logits of the scoring block reach SHARPNESS sqrt(head_dim)."""

BETAS = {1: (0.35, 0.03), 2: (0.06, 0.006)}
"""Block -> share of the running average that a rare and a common token replace."""

# Words of questions and of chat templates, whatever their frequency in the texts.
COMMON_WORDS = frozenset(
    "a an and any are as at assistant be by can do does file find for from function give has have how i in into is it "
    "its me mentions name named no not of on or part passage please question say says show system tell text that the "
    "their them these this those to under user was what when where which who whose why with you".split()
)


def _vector(feature: str, size: int, seed: int) -> NDArray[np.float64]:
    digest = hashlib.sha256(f"{seed}:{feature}".encode()).digest()
    vector = np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(size)
    return vector / np.linalg.norm(vector)


def folded(text: str) -> str:
    """The word of a token: case-folded, without what stands around it."""
    return "".join(letter for letter in text.casefold() if letter.isalnum())


def rarities(texts: Sequence[str], counts: Counter[int]) -> NDArray[np.float64]:
    """Rarity of each token in [0, 1] (logarithmic in the frequency of its word), TEMPLATE for form."""
    total = sum(counts.values())
    by_word: Counter[str] = Counter()
    for token, n in counts.items():
        by_word[folded(texts[token])] += n
    result = np.empty(len(texts))
    for token, text in enumerate(texts):
        word = folded(text)
        if token < len(CONTROL_TOKENS) or not word or word == "assistant":
            result[token] = TEMPLATE
        elif word in COMMON_WORDS or word.isdigit():
            result[token] = 0.0
        else:
            frequency = max(by_word[word], 1) / total
            result[token] = np.clip((-np.log10(frequency) - 2.7) / 1.5, 0.0, 1.0)
    return result


def _flags(token: int, text: str) -> NDArray[np.float64]:
    stripped = text.strip()
    newlines = text.count("\n")
    spaces = len(text) - len(text.lstrip(" ")) if not stripped and not newlines else 0
    values = [
        newlines == 1,
        newlines > 1,
        stripped == "def",
        stripped == "class",
        stripped in ("async", "@") or text == "@",
        stripped != "" and set(stripped) == {"#"},
        0 < spaces <= 4,
        spaces > 4,
        newlines > 0 and stripped != "",
        stripped[:1].isupper(),
        stripped.isdigit(),
        token < len(CONTROL_TOKENS),
    ]
    return FLAG_VALUE * np.array(values, dtype=np.float64)


def embeddings(texts: Sequence[str], rarity: NDArray[np.float64], seed: int) -> NDArray[np.float32]:
    """Rows [n_vocab, n_embd] of norm sqrt(n_embd)."""
    size = IDENTITY.stop - IDENTITY.start
    rows = np.zeros((len(texts), SHAPE.n_embd))
    for token, text in enumerate(texts):
        word = folded(text)
        marked = f"^{word}$"
        trigrams = [marked[i : i + 3] for i in range(len(marked) - 2)] if word else []
        identity = 0.4 * _vector(f"token {token}", size, seed) + 0.5 * _vector(f"word {word or text}", size, seed)
        if trigrams:
            parts = np.sum([_vector(f"trigram {part}", size, seed) for part in trigrams], axis=0)
            identity += 0.77 * parts / np.linalg.norm(parts)
        loudness = IDENTITY_NORM * (QUIET + (1.0 - QUIET) * max(rarity[token], 0.0))
        rows[token, CONSTANT] = CONSTANT_VALUE
        rows[token, RARITY] = RARITY_SCALE * rarity[token]
        rows[token, FLAGS] = _flags(token, text)
        rows[token, IDENTITY] = loudness * identity / np.linalg.norm(identity)
        rows[token, PADDING] = np.sqrt(SHAPE.n_embd - (rows[token] ** 2).sum())
    return rows.astype(np.float32)


def _constant_row(value: float) -> NDArray[np.float64]:
    """A row that gives `value` for every token."""
    row = np.zeros(SHAPE.n_embd)
    row[CONSTANT] = value / CONSTANT_VALUE
    return row


def _logit(p: float) -> float:
    return float(np.log(p / (1.0 - p)))


class _Writer:
    """Fills the tensors of the three blocks that do something."""

    def __init__(self, tensors: Tensors, seed: int) -> None:
        self.tensors = tensors
        self.rng = np.random.default_rng([seed, 7])
        self.norm_squared = float(SHAPE.n_embd)

    def set(self, block: int, name: str, values: NDArray) -> None:
        full = f"blk.{block}.{name}"
        assert self.tensors[full].shape == values.shape, full
        self.tensors[full] = np.ascontiguousarray(values, dtype=np.float32)

    def block(
        self,
        block: int,
        values: NDArray,
        kernel: NDArray,
        beta: tuple[float, float],
        out: NDArray,
        gate: NDArray | None = None,
    ) -> None:
        """A Gated DeltaNet with constant query and key, and with a constant output gate of 1 unless given.

        What it remembers decays at blank lines only, by exp(-FORGET).

        values [256, n_embd], kernel [256, 4], beta for (rare, common) tokens, out [n_embd, 256], gate [256, n_embd].
        """
        n_key, n_value = SHAPE.state_size, SHAPE.state_size * SHAPE.n_v_heads
        constant = np.tile(_constant_row(2.0), (2 * n_key, 1))
        self.set(block, "attn_norm.weight", np.full(SHAPE.n_embd, np.sqrt(self.norm_squared / SHAPE.n_embd)))
        self.set(block, "attn_qkv.weight", np.concatenate([constant, values]))
        self.set(block, "ssm_conv1d.weight", np.concatenate([np.tile([0.0, 0.0, 0.0, 1.0], (2 * n_key, 1)), kernel]))
        self.set(block, "attn_gate.weight", np.tile(_constant_row(OPEN), (n_value, 1)) if gate is None else gate)
        self.set(block, "ssm_norm.weight", np.ones(SHAPE.state_size))
        rare, common = (_logit(p) for p in beta)
        row = _constant_row(common)
        row[RARITY] = (rare - common) / RARITY_SCALE
        self.set(block, "ssm_beta.weight", np.tile(row, (SHAPE.n_v_heads, 1)))
        row = np.zeros(SHAPE.n_embd)
        row[FLAGS.start + BLANK_LINE] = (12.0 + FORGET) / FLAG_VALUE
        self.set(block, "ssm_alpha.weight", np.tile(row, (SHAPE.n_v_heads, 1)))
        self.set(block, "ssm_dt.bias", np.full(SHAPE.n_v_heads, -12.0))  # no decay but at blank lines
        self.set(block, "ssm_a", np.full(SHAPE.n_v_heads, -1.0))
        self.set(block, "ssm_out.weight", out)
        self.norm_squared += ADDED_NORM

    def projection(self, rows: slice, columns: slice) -> NDArray:
        """A random map [n_embd, 256] from `columns` of the heads' outputs to `rows` of the residual."""
        out = np.zeros((SHAPE.n_embd, SHAPE.state_size * SHAPE.n_v_heads))
        n, m = rows.stop - rows.start, columns.stop - columns.start
        out[rows, columns] = self.rng.standard_normal((n, m)) / np.sqrt(m)
        return out


def construct(texts: Sequence[str], counts: Counter[int], seed: int) -> Tensors:
    """Weights of the trunk for a vocabulary (`texts` by id) and the frequency of its tokens."""
    tensors = random_tensors(SHAPE, seed)
    writer = _Writer(tensors, seed)
    rng = writer.rng
    n_value = SHAPE.state_size * SHAPE.n_v_heads
    n_words = n_value - SHAPE.state_size  # all heads but the last, which is for flags
    tensors["token_embd.weight"] = embeddings(texts, rarities(texts, counts), seed)

    words = np.zeros((n_value, SHAPE.n_embd))
    words[:, IDENTITY] = 0.3 / np.sqrt(128) * rng.standard_normal((n_value, 128))
    mixed = words.copy()
    mixed[n_words:] = 0.0
    mixed[n_words:, FLAGS] = 0.15 * rng.standard_normal((SHAPE.state_size, 12))
    mixed[n_words:, CONSTANT] = 0.3 / CONSTANT_VALUE * rng.choice([-1.0, 1.0], SHAPE.state_size)
    kernel = rng.choice([-1.0, 1.0], (n_value, 4)) * [0.7, 0.8, 0.9, 1.0]
    out = writer.projection(SKETCH, slice(0, n_words)) + writer.projection(FLAG_SKETCH, slice(n_words, n_value))
    rare, common = SKETCH_GATES
    gate = np.tile(_constant_row(common), (n_value, 1))
    gate[:n_words, RARITY] = (rare - common) / RARITY_SCALE
    gate[n_words:] = _constant_row(OPEN)
    writer.block(0, mixed, kernel, (0.9999, 0.9999), out, gate)

    newest = np.tile([0.0, 0.0, 0.0, 1.0], (n_value, 1))
    average = writer.projection(RECENT, slice(0, n_value))
    for block, place in ((1, RECENT), (2, TOPIC)):
        out = np.zeros_like(average)
        out[place] = average[RECENT]  # the same map, so that both averages speak one language
        writer.block(block, words, newest, BETAS[block], out)
    for block in range(3, SHAPE.n_layer):
        writer.set(block, "attn_norm.weight", np.full(SHAPE.n_embd, np.sqrt(writer.norm_squared / SHAPE.n_embd)))
    for block in range(SHAPE.n_layer):
        tensors[f"blk.{block}.ffn_down.weight"] *= 0.1
    sharpness = np.full(SHAPE.head_dim, np.sqrt(SHARPNESS))
    writer.set(15, "attn_q_norm.weight", sharpness)
    writer.set(15, "attn_k_norm.weight", sharpness)
    return tensors
