#!/usr/bin/env python3
"""Scripted chats over real documents: what of each turn's evidence the target gets to read, and what a turn costs.

Twenty chats of three turns, with the demo drafter of the package or any other. A chat's first turn holds a document of
the standard library's held-out files (see scoring/sources.py) and its question before, in the middle of, or behind it,
or two questions behind it; two more turns ask about the same document. Compared are

  served     what `PFlash.compress_chat` serves, views and recall included
  fresh      its selection for the turn alone, as without views
  last 8     `PFlash.compress`, which asks with the prompt's last 8 tokens only, within the same budget
  tail       the last tokens of the prompt, as many as that budget

Evidence counts when its text is there whole. Documents and names are none that the demo scorer was trained on; with
another Python than the one in its card the standard library is split differently.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from laguna_gguf.errors import SelectionError
from laguna_gguf.pflash.compress import PFlash
from laguna_gguf.pflash.demo import demo_scorer
from laguna_gguf.pflash.keeping import chunk_size
from scoring.examples import Example, Question, make_example, name_words
from scoring.sources import split_sources, standard_library

STYLES = ("first", "middle", "last", "two questions")
N_TURNS = 3
KINDS = {"note": 3, "function": 3, "partial": 1, "raise": 2, "phrase": 2}
METHODS = ("served", "fresh", "last 8", "tail")
QUERY_TOKENS = 8


@dataclass(frozen=True)
class Chat:
    """A document and the questions of each turn."""

    style: str
    example: Example
    turns: list[list[Question]]

    def messages(self, n_turns: int) -> list[tuple[str, str]]:
        """(role, content) up to the question of a turn; answers quote the evidence of what was asked."""
        messages = []
        for number, asked in enumerate(self.turns[:n_turns]):
            question = " ".join(question.text for question in asked)
            messages.append(("user", self._opening(question) if number == 0 else question))
            if number + 1 < n_turns:
                messages.append(("assistant", "It says: " + " / ".join(evidence(self.example, q) for q in asked)))
        return messages

    def _opening(self, question: str) -> str:
        document = self.example.context.strip()
        if self.style == "first":
            return f"{question}\n\n{document}"
        if self.style == "middle":
            unit = min(self.example.units, key=lambda place: abs(place - len(document) // 2))
            return f"{document[:unit].rstrip()}\n\n{question}\n\n{document[unit:].lstrip()}"
        return f"{document}\n\n{question}"


def evidence(example: Example, question: Question) -> str:
    """Its text."""
    begin, end = question.evidence[0]
    return example.context[begin:end].strip()


def make_chats(n_chats: int, characters: int, seed: int) -> list[Chat]:
    """Chats that depend on the arguments only; no question twice, every evidence once in its document."""
    split = split_sources(standard_library(), seed)
    words = name_words(split.train + split.test, True)
    rng = random.Random(f"{seed} chats")
    chats: list[Chat] = []
    while len(chats) < n_chats:
        style = STYLES[len(chats) % len(STYLES)]
        example = make_example(split.test, words, characters, rng, KINDS, n_notes=10)
        usable = [q for q in example.questions if example.context.count(evidence(example, q)) == 1]
        wanted = N_TURNS * (2 if style == "two questions" else 1)
        if len(usable) < wanted:
            continue
        drawn = rng.sample(usable, wanted)
        size = wanted // N_TURNS
        chats.append(Chat(style, example, [drawn[at : at + size] for at in range(0, wanted, size)]))
    return chats


def rendered(messages: list[tuple[str, str]]) -> str:
    """As Qwen's template does it."""
    return (
        "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages) + "<|im_start|>assistant\n"
    )


def last_tokens_only(pflash: PFlash, prompt: str, budget: int, session: str) -> str:
    """`compress` with its default query within a budget; empty if what it must keep exceeds that. The prompt was read
    in this session, so only its end is read once more; that can drop rows of windows there, for which a later turn is
    then read from the start (`tokens_read`), as it is not without this comparison."""
    n = len(pflash.tokenize(prompt))
    size = chunk_size(n, pflash.settings)
    kept = n - (n - QUERY_TOKENS) // size * size  # the chunks that hold the query
    ratio = max(0.0, (budget - 1 - kept) / max(1, n - kept))
    try:
        return pflash.compress(prompt, keep_ratio=min(1.0, ratio), session=session).text
    except SelectionError:
        return ""


def run(pflash: PFlash, chats: list[Chat], ratio: float) -> dict[str, Any]:
    """All chats, one after another."""
    kept: dict[tuple[str, str, int], list[bool]] = defaultdict(list)
    tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
    times: dict[int, list[float]] = defaultdict(list)
    modes: dict[int, list[str]] = defaultdict(list)
    read: dict[int, list[int]] = defaultdict(list)
    for number, chat in enumerate(chats):
        for turn in range(1, N_TURNS + 1):
            prompt = rendered(chat.messages(turn))
            session = f"chat {number}"
            result = pflash.compress_chat(prompt, keep_ratio=ratio, session=session)
            ids = pflash.tokenize(prompt)
            texts = {
                "served": result.text,
                "fresh": pflash.detokenize(result.ids),
                "last 8": last_tokens_only(pflash, prompt, result.budget, session),
                "tail": pflash.detokenize(ids[-result.budget :]),
            }
            for method, text in texts.items():
                wanted = [evidence(chat.example, question) in text for question in chat.turns[turn - 1]]
                kept[method, chat.style, turn] += wanted
                kept[method, "all", turn] += wanted
                tokens[method, turn].append(len(pflash.tokenize(text)))
            tokens["prompt", turn].append(len(ids))
            times[turn].append(result.timings["compress_ms"])
            read[turn].append(result.timings["scorer_new_tokens"])
            modes[turn].append(result.timings["view"]["mode"])
        print(f"chat {number + 1} of {len(chats)}", file=sys.stderr, flush=True)
    turns = range(1, N_TURNS + 1)
    ratios = [second / first for first, second in zip(times[1], times[2], strict=True)]
    return {
        "chats": len(chats),
        "keep_ratio": ratio,
        "evidence_kept": {
            method: {style: [_share(kept[method, style, turn]) for turn in turns] for style in (*STYLES, "all")}
            for method in METHODS
        },
        "tokens": {
            name: [round(statistics.mean(tokens[name, turn])) for turn in turns] for name in ("prompt", *METHODS)
        },
        "tokens_read": [round(statistics.mean(read[turn])) for turn in turns],
        "compress_ms": [round(statistics.median(times[turn]), 1) for turn in turns],
        "turn_2_over_turn_1": round(statistics.median(ratios), 4),
        "modes": {turn: {mode: modes[turn].count(mode) for mode in sorted(set(modes[turn]))} for turn in turns},
    }


def _share(values: list[bool]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None


def main(argv: list[str] | None = None) -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-drafter", metavar="F", help="default: the demo drafter of the package")
    parser.add_argument("--scoring-head", metavar="F")
    parser.add_argument("--segment-probe", metavar="F")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--characters", type=int, default=26000, help="of a document")
    parser.add_argument("--prefill-keep-ratio", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1, help="of the split; the one that the files were trained with")
    parser.add_argument("-t", "--threads", type=int, default=1)
    args = parser.parse_args(argv)
    drafter, head, probe = args.prefill_drafter, args.scoring_head, args.segment_probe
    if drafter is None:
        demo = demo_scorer()
        drafter, head, probe = demo.drafter, head or demo.scoring_head, probe or demo.segment_probe
    chats = make_chats(args.chats, args.characters, args.seed)
    with PFlash(
        drafter,
        scoring_head=head,
        segment_probe=probe,
        sessions=2,
        n_threads=args.threads,
        n_threads_batch=args.threads,
    ) as pflash:
        print(json.dumps(run(pflash, chats, args.prefill_keep_ratio), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
