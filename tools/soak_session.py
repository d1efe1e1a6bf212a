#!/usr/bin/env python3
"""Many sampled tokens in one session, as users make them: memory must stay flat, and nothing may fail.

Conversations on the shipped demo pair (or -m and -md): appended and regenerated turns, other samplers and seeds,
grammars and stop strings, streams that are abandoned, an exception in a callback now and then. Prints one JSON object;
exit code 1 when memory grew by more than --limit MiB after the first tenth.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import llama_cpp

from laguna_gguf import SpecSession
from laguna_gguf.commands.demo import DRAFTER_FILE, TARGET_FILE

DATA = Path(__file__).resolve().parent.parent / "python" / "laguna_gguf" / "data"
TURN = 200
"""Tokens of a turn at most."""
GRAMMAR = 'root ::= "[" [a-z ]+ ("," [a-z ]+)* "]"'


class Unhappy(Exception):
    """Raised in a callback on purpose."""


def resident_mib() -> float:
    """Resident memory of this process."""
    gc.collect()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def raise_later(length: int) -> llama_cpp.LogitsProcessorList:
    """A logits processor that fails once there are so many tokens."""

    def process(ids: Any, logits: Any) -> Any:
        if len(ids) >= length:
            raise Unhappy
        return logits

    return llama_cpp.LogitsProcessorList([process])


def settings(random: Random) -> dict[str, Any]:
    """Sampler settings of a turn."""
    chosen: dict[str, Any] = {"temperature": random.uniform(0.5, 1.3), "seed": random.randrange(1 << 32)}
    if random.random() < 0.3:
        chosen |= {"top_k": random.choice([0, 5, 40]), "top_p": random.uniform(0.5, 1.0), "min_p": 0.02}
    if random.random() < 0.2:
        chosen["mirostat_mode"] = random.choice([1, 2])
    if random.random() < 0.2:
        chosen |= {"repeat_penalty": 1.1, "frequency_penalty": 0.1}
    if random.random() < 0.1:
        chosen["grammar"] = llama_cpp.LlamaGrammar.from_string(GRAMMAR, verbose=False)
    if random.random() < 0.2:
        chosen["stop"] = ["\n\n", "return"]
    return chosen


def soak(session: SpecSession, prompts: list[str], n_tokens: int, seed: int) -> Iterator[int]:
    """Generate until `n_tokens` came out, yielding how many there are after each turn."""
    random = Random(seed)
    ids: list[int] = []
    made = 0
    while made < n_tokens:
        if len(ids) + TURN + 2 > session.n_ctx() or not ids or random.random() < 0.15:
            ids = session.tokenize(random.choice(prompts).encode(), special=True)[: session.n_ctx() // 3]
        chosen = settings(random)
        n = min(random.randrange(1, TURN), n_tokens - made)
        kind = random.random()
        before = session.stats.generated_tokens
        if kind < 0.1:
            list(islice(session(ids, stream=True, max_tokens=n, **chosen), max(n // 2, 1)))
        elif kind < 0.15:
            try:
                session(ids, max_tokens=n, logits_processor=raise_later(len(ids) + n // 2), **chosen)
            except Unhappy:
                pass
        else:
            session(ids, max_tokens=n, **chosen)
        made += session.stats.generated_tokens - before + 1
        if random.random() < 0.6:  # go on from here, else regenerate
            ids = session._input_ids.tolist()
        yield made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Sample many tokens in one session and watch its memory.")
    parser.add_argument("-m", dest="target", default=str(DATA / TARGET_FILE), help="target GGUF")
    parser.add_argument("-md", dest="drafter", default=str(DATA / DRAFTER_FILE), help="drafter")
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens to generate (default %(default)s)")
    parser.add_argument("--draft-max", type=int, default=7, help="drafts a round (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random here (default %(default)s)")
    parser.add_argument("--limit", type=float, default=4.0, help="growth allowed, MiB (default %(default)s)")
    args = parser.parse_args(arguments)

    prompts = [prompt["prompt"] for prompt in json.loads((DATA / "heldout_prompts.json").read_text("utf-8"))["prompts"]]
    session = SpecSession(
        args.target,
        args.drafter,
        draft_max=args.draft_max,
        n_ctx=512,
        swa_full=False,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        verbose=False,
    )
    began = perf_counter()
    marks = [round(args.tokens * share / 10) for share in range(1, 11)]
    sizes: list[float] = []
    made = turns = 0
    for made in soak(session, prompts, args.tokens, args.seed):
        turns += 1
        while len(sizes) < len(marks) and made >= marks[len(sizes)]:
            sizes.append(round(resident_mib(), 2))
    growth = round(max(sizes[1:], default=sizes[0]) - sizes[0], 2)
    report = {
        "tokens": made,
        "turns": turns,
        "rounds": session.stats.rounds,
        "tau": round(session.stats.mean_accepted_length, 3),
        "seconds": round(perf_counter() - began, 1),
        "resident_mib": sizes,
        "growth_mib": growth,
    }
    session.close()
    print(json.dumps(report))
    return 0 if growth <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
