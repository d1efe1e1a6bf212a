"""Chi-square tests of counted transitions between states. Given a state, the draws of the next one are independent."""

import math

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

LEAST = 5.0
"""Expected count of a cell below which it is pooled with others of its row."""


def survival(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable exceeds `statistic` (Abramowitz and Stegun 26.4.4 and 26.4.5)."""
    x = statistic / 2
    k = freedom % 2 or 2
    total = math.erfc(math.sqrt(x)) if k == 1 else math.exp(-x)
    while k < freedom:
        total += math.exp(k / 2 * math.log(x) - x - math.lgamma(k / 2 + 1)) if x > 0 else 0.0
        k += 2
    return total


def p_against_known(counts: Counts, probabilities: NDArray[np.float64]) -> float:
    """p value of counts [n, n] against known transition probabilities; 0 if something impossible was counted."""
    if counts[probabilities == 0].any():
        return 0.0
    statistic, freedom = 0.0, 0
    for row, p in zip(counts, probabilities, strict=True):
        observed, expected = pooled(row.astype(float), row.sum() * p)
        statistic += float(((observed - expected) ** 2 / expected).sum())
        freedom += len(expected) - 1
    return survival(statistic, freedom)


def p_of_equality(a: Counts, b: Counts) -> float:
    """p value of two tables of counts [n, n] having the same transition probabilities."""
    statistic, freedom = 0.0, 0
    for rows in zip(a, b, strict=True):
        sums = np.array(rows, float)
        share = sums.sum(axis=1) / sums.sum()
        if not share.all():
            continue
        smaller = sums.sum(axis=0) * share.min()
        table = np.array([pooled(row, smaller)[0] for row in sums])
        expected = np.outer(share, table.sum(axis=0))
        statistic += float(((table - expected) ** 2 / expected).sum())
        freedom += table.shape[1] - 1
    return survival(statistic, freedom)


def pooled(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
    """Both without empty cells, those that are expected too rarely (and as many more as it takes) made one."""
    order = np.argsort(expected)
    order = order[expected[order] > 0]
    n_small = int((expected[order] < LEAST).sum())
    while 0 < n_small < len(order) and expected[order[:n_small]].sum() < LEAST:
        n_small += 1
    groups = [order[:n_small], *order[n_small:]] if n_small else list(order)
    return tuple(np.array([values[group].sum() for group in groups]) for values in (observed, expected))
