"""The arithmetic of gate 07: paired tests, the trend of a noisy curve, robust slopes, on plain lists of numbers.

How often each is wrong, by simulation: `python benchmarks/statistics_power.py`.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median, median_low, stdev

WINDOWS = 8  # fewer hide a staircase, more are noise at 50 steps
RISE_T = 3.0  # standard errors by which a rise of memory has to stand out of its noise
_JUMP_MIN = 6.0  # of the noise; between neighbours it makes 4.5 once in 1,000 values
_JUMP_STEPS = 3  # that it may take
# The standard error of `growth` over that of least squares in normal noise: 1.7 to 1.9 from 25 to 500 values.
_GROWTH_ERROR = 1.85
_MAD = 1.4826  # a normal distribution's standard deviation over its median absolute deviation

# One-sided 0.75 % points of Student's t for 1 to 8 degrees of freedom; from 9 on 3.0 is beyond it.
_T_SMALL = (42.44, 8.08, 5.05, 4.09, 3.64, 3.38, 3.21, 3.09)
T_LIMIT = 3.0

BLOCKS = 32  # of a curve: means of some ten steps each are close to normal and to independent
CURVE_STEPS_MIN = 3 * BLOCKS
CURVE_T_MIN = 2.75  # of the fall, on 30 degrees of freedom: by chance once in 200 flat curves
ENDS_T_MIN = 2.25  # of the last eighth below the first: a curve that fell and came back has no fall to show
_SETTLING = 0.3  # of the run: a fall's time constant in the middle between a straight line and a quick start
_SPREAD_MAX = 4.0  # standard deviations at which a value is cut off
_POWER_99 = 2.4  # standard errors beyond its limit at which a fall is found 99 times in 100
_ENDS_SHARE = 0.80  # of a fall that settles so lies between the first eighth and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    count: int
    before: float
    after: float
    relative_drop: float
    """(before - after) / before"""
    t: float
    """of the differences before - after; infinite where they don't vary"""
    limit: float
    """what t has to pass"""


def paired(before: Sequence[float], after: Sequence[float], groups: Sequence[Hashable] = ()) -> Paired:
    """Did `after` fall below `before`, item by item? Needs two pairs at least.

    Items of one group (the draws of one sample) move together, so that 32 of 8 samples say less than 32 samples:
    `t` is the smaller of that over items and that over the groups' means, and its limit grows where groups are few.
    """
    differences = [a - b for a, b in zip(before, after, strict=True)]
    mean, start = fmean(differences), fmean(before)
    t, limit = _t(differences), T_LIMIT
    means = _group_means(differences, groups)
    if len(means) > 1:
        t, limit = min(t, _t(means)), t_limit(len(means) - 1)
    drop = mean / start if start > 0 else math.nan
    return Paired(
        count=len(differences), before=start, after=fmean(after), relative_drop=drop, t=t, limit=limit
    )


def t_limit(freedom: int) -> float:
    return _T_SMALL[freedom - 1] if freedom <= len(_T_SMALL) else T_LIMIT


def _t(values: Sequence[float]) -> float:
    mean, error = fmean(values), stdev(values) / math.sqrt(len(values))
    return mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0


def _group_means(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    members: dict[Hashable, list[float]] = defaultdict(list)
    for value, group in zip(values, groups, strict=bool(groups)):
        members[group].append(value)
    return [fmean(group) for group in members.values()]


# ---- a training curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a curve of losses went, its logarithm fitted by a fall that settles."""

    steps: int
    drop: float
    """of the geometric mean, start to end, by the fit; negative where it rose"""
    t: float
    """of the fitted fall"""
    ends_t: float
    """of the last eighth against the first"""
    detectable: float
    """the smallest drop that this many steps of this noise show 99 times in 100"""

    @property
    def fell(self) -> bool:
        return self.t > CURVE_T_MIN and self.ends_t > ENDS_T_MIN


def trend(losses: Sequence[float]) -> Trend:
    """Did the losses of a run, one a step, in order, fall?

    A step's loss swings with its sigma by a factor of ten and more, so it is the logarithm that is fitted, extreme
    values cut off, in 32 block means: neighbours that are alike fall into one block, and what is left of them is in
    the scatter of the blocks, of which the standard error is made. The regressor is exp(-t / 0.3 T), and no straight
    line, for adapters learn most at the start. The start counts, warm-up too: there the adapter is next to zero, and
    the loss is the base's. NaN in all fields for a loss that is not positive, or fewer than 96 steps.
    """
    if len(losses) < CURVE_STEPS_MIN or not all(math.isfinite(loss) and loss > 0 for loss in losses):
        return Trend(steps=len(losses), drop=math.nan, t=math.nan, ends_t=math.nan, detectable=math.nan)
    blocks = _block_means(_cut([math.log(loss) for loss in losses]), BLOCKS)
    shape = [math.exp(-(i + 0.5) / BLOCKS / _SETTLING) for i in range(BLOCKS)]
    middle, centre = fmean(blocks), fmean(shape)
    weights = [value - centre for value in shape]
    square = sum(weight * weight for weight in weights)
    slope = sum(w * b for w, b in zip(weights, blocks, strict=True)) / square
    rest = [b - middle - slope * w for w, b in zip(weights, blocks, strict=True)]
    scatter = math.sqrt(sum(value * value for value in rest) / (BLOCKS - 2))
    error = max(scatter / math.sqrt(square), 1e-12)
    eighth = BLOCKS // 8
    ends = fmean(blocks[:eighth]) - fmean(blocks[-eighth:])
    ends_error = max(scatter * math.sqrt(2 / eighth), 1e-12)
    whole = 1 - math.exp(-1 / _SETTLING)
    least = max(
        (CURVE_T_MIN + _POWER_99) * error * whole, (ENDS_T_MIN + _POWER_99) * ends_error / _ENDS_SHARE
    )
    return Trend(
        steps=len(losses),
        drop=1 - math.exp(-slope * whole),
        t=slope / error,
        ends_t=ends / ends_error,
        detectable=1 - math.exp(-least),
    )


def _cut(values: Sequence[float]) -> list[float]:
    middle = median(values)
    width = _SPREAD_MAX * _MAD * median(abs(value - middle) for value in values)
    return [min(max(value, middle - width), middle + width) for value in values]


def _edges(count: int, parts: int) -> list[int]:
    return [round(i * count / parts) for i in range(parts + 1)]


def _block_means(values: Sequence[float], parts: int) -> list[float]:
    return [fmean(values[a:b]) for a, b in pairwise(_edges(len(values), parts))]


# ---- memory


def growth(steps: Sequence[float], values: Sequence[float]) -> float:
    """Units per step by which `values` keep rising; 0.0 for too few of them, or a trend that noise may have made.

    Theil-Sen over the medians of eight windows, after the largest single rise is taken out if it stands apart from
    the others: one jump (a new bucket, a compiled kernel, a checkpoint's buffers) is no leak, a line or a staircase is.
    """
    if len(steps) < 2 * WINDOWS:
        return 0.0
    level, jumped = _without_jump(values)
    edges = _edges(len(steps), WINDOWS)
    xs = [fmean(steps[a:b]) for a, b in pairwise(edges)]
    rises = [b - a for a, b in pairwise([median_low(level[a:b]) for a, b in pairwise(edges)])]
    if not jumped:
        rises = _without_largest(rises)
    smooth = [sum(rises[:i]) for i in range(WINDOWS)]
    rise = median((smooth[j] - smooth[i]) / (xs[j] - xs[i]) for i, j in combinations(range(WINDOWS), 2))
    return rise if abs(rise) > RISE_T * _growth_error(steps, values) else 0.0


def _without_jump(values: Sequence[float]) -> tuple[list[float], bool]:
    """Where one value lies far above the one before it, what follows is brought down; and whether there was one."""
    changes = [b - a for a, b in pairwise(values)]
    at = max(range(len(changes)), key=changes.__getitem__) + 1
    # A jump may take two or three steps: those are left out of its measure, and medians pass over them.
    size = _jump_size(values[: max(at - 1, 1)], values[min(at + 2, len(values) - 1) :])
    least = _JUMP_MIN * max(_noise(values), abs(median(changes)))
    if min(size, changes[at - 1]) <= least:
        return list(values), False
    return [*values[:at], *(value - size for value in values[at:])], True


def _jump_size(before: Sequence[float], after: Sequence[float]) -> float:
    """Between two stretches of one slope, by least squares: a leak that goes on is no part of it."""
    square = product = 0.0
    for part in (before, after):
        middle = (len(part) - 1) / 2
        square += sum((x - middle) ** 2 for x in range(len(part)))
        product += sum((x - middle) * value for x, value in enumerate(part))
    slope = product / square if square else 0.0
    apart = (len(before) + len(after)) / 2 + _JUMP_STEPS
    return fmean(after) - fmean(before) - slope * apart


def _without_largest(rises: Sequence[float]) -> list[float]:
    """The largest rise made a usual one, if it stands apart: a jump that took a few steps."""
    largest = max(range(len(rises)), key=rises.__getitem__)
    others = [*rises[:largest], *rises[largest + 1 :]]
    usual = median(others)
    width = _SPREAD_MAX * _MAD * median(abs(rise - usual) for rise in others)
    apart = rises[largest] - usual > width
    return [*rises[:largest], usual if apart else rises[largest], *rises[largest + 1 :]]


def _noise(values: Sequence[float]) -> float:
    """Standard deviation, from how much neighbours differ: a trend hardly shows there."""
    changes = [b - a for a, b in pairwise(values)]
    usual = median(changes)
    return _MAD * median(abs(change - usual) for change in changes) / math.sqrt(2)


def _growth_error(steps: Sequence[float], values: Sequence[float]) -> float:
    return _GROWTH_ERROR * _noise(values) * math.sqrt(12 / len(steps)) / (steps[-1] - steps[0])
