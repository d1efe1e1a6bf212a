"""A byte-level BPE with Qwen3.5's pre-tokenizer, trained on the training texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from random_drafter import CONTROL_TOKENS
from scoring.sources import Source

PROSE_WEIGHT = 5
WORD_WEIGHT = 500

# The pre-tokenizer "qwen35" of llama.cpp (src/llama-vocab.cpp): digits are single tokens.
QWEN35_SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], n_vocab: int) -> Tokenizer:
    """A byte-level BPE of `n_vocab` ids, the control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN35_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def balanced(sources: Sequence[Source], words: Iterable[str]) -> Iterator[str]:
    """Texts in which prose counts several times, with `words` often enough that each becomes a token or two."""
    for source in sources:
        yield from [source.text] * (PROSE_WEIGHT if source.kind == "prose" else 1)
    for word in sorted(words):
        yield f" {word} {word.capitalize()}\n{word.capitalize()}" * WORD_WEIGHT


def vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """(tokens by id, merges) as a GGUF file lists them."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """What each id decodes to, control tokens written out."""
    return [
        CONTROL_TOKENS[i] if i < len(CONTROL_TOKENS) else tokenizer.decode([i], skip_special_tokens=False)
        for i in range(tokenizer.get_vocab_size())
    ]
