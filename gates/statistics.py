"""The arithmetic of gate 07: paired tests and robust slopes, on plain lists of numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median, stdev

WINDOWS = 8  # fewer hide a staircase, more are noise at 50 steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    count: int
    before: float
    after: float
    relative_drop: float
    """(before - after) / before"""
    t: float
    """of the differences before - after; infinite where they don't vary"""


def paired(before: Sequence[float], after: Sequence[float]) -> Paired:
    """Did `after` fall below `before`, item by item? Needs two pairs at least."""
    differences = [a - b for a, b in zip(before, after, strict=True)]
    mean, start = fmean(differences), fmean(before)
    error = stdev(differences) / math.sqrt(len(differences))
    t = mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0
    drop = mean / start if start > 0 else math.nan
    return Paired(count=len(differences), before=start, after=fmean(after), relative_drop=drop, t=t)


def growth(steps: Sequence[float], values: Sequence[float]) -> float:
    """Units per step by which `values` keep rising, or 0.0 for too few of them.

    Theil-Sen over the medians of eight windows, after the largest single rise is taken out:
    one jump (a new bucket, a compiled kernel) is no leak, a line or a staircase is.
    """
    if len(steps) < 2 * WINDOWS:
        return 0.0
    edges = [round(i * len(steps) / WINDOWS) for i in range(WINDOWS + 1)]
    xs = [fmean(steps[a:b]) for a, b in pairwise(edges)]
    ys = [median(values[a:b]) for a, b in pairwise(edges)]
    rises = [b - a for a, b in pairwise(ys)]
    largest = max(range(len(rises)), key=rises.__getitem__)
    rises[largest] = min(median(rises[:largest] + rises[largest + 1 :]), rises[largest])
    smooth = [sum(rises[:i]) for i in range(len(ys))]
    return median((smooth[j] - smooth[i]) / (xs[j] - xs[i]) for i, j in combinations(range(len(xs)), 2))
