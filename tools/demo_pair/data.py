"""The corpus (the standard library of the running interpreter), its tokenizer, and the held-out prompts."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .target_gguf import EOS_ID, SPECIAL_TOKENS, make_tokenizer

EXCLUDED_PARTS = {"site-packages", "test", "tests", "idle_test", "encodings", "turtledemo", "__pycache__"}
MIN_HELD_OUT_BYTES = 3000

# The pre-tokenizer "laguna" of llama.cpp (src/llama-vocab.cpp), one Split a regex.
LAGUNA_SPLITS = (
    r"[^\n]+|[\n]+",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
ENTRY_LINE = re.compile(r"^[ \t]*(?:async def|def|class)\s", re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    """Source files split by a fixed seed; `train` and `held_out` map a path in the library to its text."""

    train: dict[str, str]
    held_out: dict[str, str]
    sha256: str
    python: str

    def chat_files(self, files: dict[str, str], share: float = 0.34) -> list[str]:
        """The files of which the functions are also shown in chat form, chosen by a hash of the path."""
        limit = int(share * 256)
        return [name for name in files if hashlib.sha256(name.encode()).digest()[0] < limit]


def load_corpus(seed: int, n_held_out: int, max_files: int | None = None) -> Corpus:
    """Read `Lib/**/*.py` without tests and encodings, and hold files out by `seed`."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if EXCLUDED_PARTS & set(name.parts):
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        digest.update(f"{name.as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
        if text.strip():
            texts[name.as_posix()] = text
    eligible = [name for name, text in texts.items() if len(text) >= MIN_HELD_OUT_BYTES]
    held = set(random.Random(seed).sample(eligible, n_held_out))
    train = {name: text for name, text in texts.items() if name not in held}
    if max_files is not None:
        train = dict(sorted(train.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())[:max_files])
    return Corpus(train, {name: texts[name] for name in sorted(held)}, digest.hexdigest(), platform.python_version())


def chat_examples(text: str) -> list[tuple[str, str]]:
    """(prompt, answer) pairs in chat tags: the signature and docstring of a function, then its source."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.splitlines(keepends=True)
    pairs = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        indent = node.col_offset
        source = [
            line[indent:] if not line[:indent].strip() else line for line in lines[node.lineno - 1 : node.end_lineno]
        ]
        head = source[: (node.body[0].end_lineno or node.lineno) - node.lineno + 1]
        prompt = f"<user>\n{''.join(head).rstrip()}\n</user>\n<assistant>\n"
        pairs.append((prompt, f"{''.join(source).rstrip()}\n</assistant>\n"))
    return pairs


def train_tokenizer(corpus: Corpus, n_vocab: int) -> Tokenizer:
    """A byte-level BPE of `n_vocab` ids, with Laguna's pre-tokenizer and the specials on the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in LAGUNA_SPLITS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train.values(), trainer)
    return tokenizer


def gguf_tokenizer(tokenizer: Tokenizer) -> dict:
    """The tokenizer in the form that `write_target_gguf` takes."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return make_tokenizer(tokens, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])


@dataclass(frozen=True)
class Document:
    """Token ids of one file, or of the chat examples of one file, and where a window may start."""

    ids: np.ndarray  # [n] int32
    starts: np.ndarray  # [m] int32, ascending
    chat: bool


def plain_document(tokenizer: Tokenizer, text: str) -> Document:
    """A file with its end token; windows start at the file's start and at def and class lines."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids = np.array([*encoding.ids, EOS_ID], np.int32)
    token_starts = np.array([begin for begin, _ in encoding.offsets])
    lines = [match.start() for match in ENTRY_LINE.finditer(text)]
    starts = {0, *np.searchsorted(token_starts, lines).tolist()}
    return Document(ids, np.array(sorted(start for start in starts if start < len(encoding.ids)), np.int32), False)


def chat_document(tokenizer: Tokenizer, text: str) -> Document | None:
    """The chat examples of a file one after the other, each with its BOS; windows start after a BOS."""
    ids: list[int] = []
    starts = []
    for prompt, answer in chat_examples(text):
        ids.append(EOS_ID)
        starts.append(len(ids))
        ids.extend(tokenizer.encode(prompt + answer, add_special_tokens=False).ids)
    return Document(np.array(ids, np.int32), np.array(starts, np.int32), True) if ids else None


def documents(corpus: Corpus, files: dict[str, str], tokenizer: Tokenizer) -> list[Document]:
    """All documents of a set of files: every file in plain form, a share of them in chat form too."""
    plain = [plain_document(tokenizer, text) for text in files.values()]
    chat = [chat_document(tokenizer, files[name]) for name in corpus.chat_files(files)]
    return plain + [document for document in chat if document is not None]


def windows(docs: list[Document], length: int, rng: np.random.Generator) -> list[np.ndarray]:
    """One epoch in random order: windows [length + 1] of BOS and text, from allowed starts, that cover the corpus."""
    rows = []
    for doc in docs:
        first, begin = int(doc.starts[0]), int(doc.starts[rng.integers(0, min(4, len(doc.starts)))])
        heads = [first, begin] if begin > first + 64 else [begin]
        for index, position in enumerate(heads):
            stop = heads[index + 1] if index + 1 < len(heads) else len(doc.ids)
            while position < stop:
                row = np.concatenate([[EOS_ID], doc.ids[position : position + length]])
                rows.append(np.pad(row, (0, length + 1 - len(row)), constant_values=-1))
                inside = doc.starts[(doc.starts > position + length // 2) & (doc.starts <= position + length)]
                position = int(inside[-1]) if len(inside) else position + length
    return [_filled(rows, index) for index in rng.permutation(len(rows))]


def _filled(rows: list[np.ndarray], index: int) -> np.ndarray:
    """A short window continued with the beginning of its neighbours, so that no row is padding."""
    row, other = rows[index], index
    while row[-1] < 0:
        used = int((row >= 0).sum())
        other = (other + 1) % len(rows)
        row = np.concatenate([row[:used], rows[other][: len(row) - used]])
    return row.astype(np.int64)


def generation_prompts(
    docs: list[Document], count: int, lengths: list[int], chat_share: float, rng: np.random.Generator
) -> dict[int, np.ndarray]:
    """Distinct prompts from allowed starts: {length: [n, length] ids including the BOS}, `count` in all."""
    places: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for number, doc in enumerate(docs):
        places[doc.chat].extend((number, int(s)) for s in doc.starts if s + max(lengths) < len(doc.ids))
    for kind in places.values():
        rng.shuffle(kind)
    n_chat = min(int(count * chat_share), len(places[True]))
    chosen = places[True][:n_chat] + places[False]
    if len(chosen) < count:  # few def lines: further starts at other tokens
        spare = [
            (n, int(p)) for n, d in enumerate(docs) if not d.chat for p in range(32, len(d.ids) - max(lengths), 48)
        ]
        rng.shuffle(spare)
        chosen += spare
    chosen = chosen[:count]
    rng.shuffle(chosen)
    result = {}
    for index, length in enumerate(lengths):
        part = chosen[index :: len(lengths)]
        result[length] = np.array(
            [np.concatenate([[EOS_ID], docs[n].ids[s : s + length - 1]]) for n, s in part], np.int64
        )
    return result


def held_out_prompts(corpus: Corpus, tokenizer: Tokenizer, count: int, seed: int) -> list[dict[str, str]]:
    """One prompt a held-out file, every fourth in chat form where the file allows it: [{"file", "form", "prompt"}].

    A prompt has 64..128 tokens, starts at the file's start or at a def or class line, ends at a token's end, and
    tokenises to the same ids when it is read back as text.
    """
    rng = random.Random(seed)
    names = list(corpus.held_out)
    rng.shuffle(names)
    prompts: list[dict[str, str]] = []
    for name in names:
        if len(prompts) == count:
            break
        text = corpus.held_out[name]
        if len(prompts) % 4 == 3:
            pairs = [p for p, _ in chat_examples(text) if 64 <= len(tokenizer.encode(p).ids) <= 128]
            if pairs:
                prompts.append({"file": name, "form": "chat", "prompt": rng.choice(pairs)})
                continue
        starts = [0, *(match.start() for match in ENTRY_LINE.finditer(text))]
        rng.shuffle(starts)
        for start in starts:
            length = rng.randint(64, 128)
            encoding = tokenizer.encode(text[start : start + 2000])
            if len(encoding.ids) < length + 32:
                continue
            prompt = text[start : start + encoding.offsets[length - 1][1]]
            if tokenizer.encode(prompt).ids == encoding.ids[:length]:
                prompts.append({"file": name, "form": "plain", "prompt": prompt})
                break
    return prompts
