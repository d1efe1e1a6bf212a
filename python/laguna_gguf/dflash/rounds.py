"""The loop: draft, verify, accept, roll back.

P is the number of committed positions: 0..P-1 are in the target's KV cache and (the last W-1 of them) in the drafter's
context. The anchor is the newest token; it is known but not evaluated, and will stand at position P.

    anchor          d_1      d_2      d_3      drafted in one pass of the drafter
    P               P+1      P+2      P+3      verified in one decode of the target
    row 0           row 1    row 2    row 3
    gives t_1       t_2      t_3      t_4      sampled one after the other from the target's own sampler chain

t_1 is always a right token. While t_i == d_i the next row was computed for the right text and gives the next token.
Since only the target's samples are ever emitted, the text is the one that plain decoding samples. (Synthetic
acceptance, for benchmarks, emits drafts unseen.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laguna_gguf.dflash.session import SpecSession


def run_rounds(
    session: SpecSession,
    turn: object,
    sample: Callable[[int], int],
    stop: Callable[[int], bool],
    wanted: int | None,
) -> Generator[int, Sequence[int] | None, None]:
    """Yield tokens from the state after a prompt until the consumer closes the generator or `stop` says so.

    sample(row): the next token from the logits of a row of the last decode. stop(row): stopping criteria on that row.
    wanted: tokens still wanted, or None. turn: what the session knows this caller by; when another call begins,
    SessionBusyError ends this one. A value sent in takes the place of the next draft.
    """
    clock = perf_counter

    session.last_token_drafted = False
    anchor = sample(-1)
    if stop(-1):
        return
    proposed = yield anchor
    session.check_turn(turn)

    while True:
        started, away = clock(), 0.0
        counters = session.counters  # those of this round, whatever reset_stats() does meanwhile
        wanted = None if wanted is None else wanted - 1
        draft = session.draft(anchor, wanted) if proposed is None else session.check_proposal(proposed)
        proposed = None
        start = session.n_tokens
        session.verify(anchor, draft)
        counters.rounds += 1
        counters.plain_rounds += not draft
        counters.drafted_tokens += len(draft)
        row = accepted = 0
        whole = False  # whether the round came to its natural end
        try:
            for row in range(len(draft) + 1):
                session.n_tokens = start + row + 1  # what sampling callbacks see as evaluated
                anchor = sample(row)
                if stop(row):
                    return
                drafted = draft[row] if row < len(draft) else None
                hit = anchor == drafted
                if session.synthetic is not None:
                    anchor, hit = session.synthetic.decide(anchor, drafted)
                if hit:
                    counters.count_accepted(row)
                    accepted += 1
                counters.generated_tokens += 1
                session.last_token_drafted = hit
                left_at = clock()
                try:
                    proposed = yield anchor
                finally:
                    away += clock() - left_at
                session.check_turn(turn)
                if not hit:
                    break
                wanted = None if wanted is None else wanted - 1
            whole = True
        finally:  # the consumer may have gone at any yield: what it got is committed, the rest is taken back
            if session.owned_by(turn):
                session.commit(start, row + 1)
            ms = (clock() - started - away) * 1e3
            counters.round_ms += ms
            if whole:  # a round that was cut says nothing about its depth
                session.depth.update(len(draft), accepted, ms)
                if session.synthetic is None:
                    session.acceptance.update(len(draft), accepted)
