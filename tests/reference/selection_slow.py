"""The strict selector and the segmenter once more, from their definitions: slow, with exact fractions, no shared code.

Candidates are tuples (ordinal, begin, end, score, mandatory). A result is (ordinals, retained tokens, mass, reason).
"""

from fractions import Fraction
from itertools import pairwise


def weights_of(candidates):
    """Weight of every candidate: max(0, score) over the largest, or one for all when no score is positive."""
    positive = {c[0]: max(Fraction(0), Fraction(c[3])) for c in candidates}
    top = max(positive.values(), default=Fraction(0))
    return {name: (value / top if top else Fraction(1)) for name, value in positive.items()}


def take(optional, room, cutoff, skip):
    """Ordinals taken one after another, and why it ended."""
    weight = weights_of(optional)
    whole = sum(weight.values())
    taken = []
    left_out = False
    todo = list(optional)
    while todo:
        best = todo[0]
        for c in todo[1:]:
            a, b = max(0.0, c[3]), max(0.0, best[3])
            if a > b or (a == b and c[0] < best[0]):
                best = c
        todo.remove(best)
        if cutoff is not None and sum(weight[c[0]] for c in taken) >= Fraction(cutoff) * whole:
            return taken, "top_p_reached"
        used = sum(c[2] - c[1] for c in taken)
        if used + best[2] - best[1] > room:
            if not skip:
                return taken, "budget_reached"
            left_out = True
        else:
            taken.append(best)
    return taken, "budget_reached" if left_out else "candidates_exhausted"


def finished(candidates, names, mass, reason):
    kept = sorted((c for c in candidates if c[0] in names), key=lambda c: c[1])
    return [c[0] for c in kept], sum(c[2] - c[1] for c in kept), mass, reason


def share(candidates, names):
    optional = [c for c in candidates if not c[4]]
    weight = weights_of(optional)
    if not optional:
        return Fraction(1)
    return sum(weight[c[0]] for c in optional if c[0] in names) / sum(weight.values())


def select_slow(candidates, budget, mode, top_p, skip):
    """Expects valid input."""
    must = [c for c in candidates if c[4]]
    needed = sum(c[2] - c[1] for c in must)
    if needed > budget:
        return [], 0, None, "mandatory_query_exceeds_budget"
    cutoff = top_p if mode == "top_p" else None
    taken, reason = take([c for c in candidates if not c[4]], budget - needed, cutoff, skip)
    names = {c[0] for c in must} | {c[0] for c in taken}
    return finished(candidates, names, share(candidates, names), reason)


def split_slow(head, other, budget, fraction, mode, top_p, skip):
    """Expects valid input."""
    must = [c for c in head if c[4]]
    needed = sum(c[2] - c[1] for c in must)
    if needed > budget:
        return [], 0, None, "mandatory_query_exceeds_budget"
    cutoff = top_p if mode == "top_p" else None
    first_budget = max(int(budget * fraction), min(needed, budget))
    first, _ = take([c for c in head if not c[4]], first_budget - needed, cutoff, skip)
    names = {c[0] for c in must} | {c[0] for c in first}
    spent = needed + sum(c[2] - c[1] for c in first)
    second, reason = take([c for c in other if c[0] not in names], budget - spent, cutoff, skip)
    names |= {c[0] for c in second}
    return finished(head, names, share(head, names), reason)


def segments_slow(scores, n, threshold, shortest, longest, forced, subunit):
    """Walks token by token; expects valid input."""
    cuts = [0]
    for t in range(1, n):
        if t in forced or (scores[t] > threshold and t - cuts[-1] >= shortest):
            cuts.append(t)
    cuts.append(n)
    inner = scores if subunit is None else subunit
    pieces = list(pairwise(cuts))
    done = []
    while pieces:
        b, e = pieces.pop(0)
        if e - b <= longest:
            done.append((b, e))
            continue
        best = None
        for t in range(b, e + 1):
            if max(b + shortest, b + longest // 2) <= t <= min(e - shortest, b + longest) and inner[t] > 0:
                if best is None or inner[t] > inner[best]:
                    best = t
        cut = b + longest if best is None else best
        done.append((b, cut))
        pieces.insert(0, (cut, e))
    return done
