"""What no single line shows: numbers that don't move, steps beyond their limit, refusals with memory free."""

import re
from itertools import pairwise

from gates.faults.logs import Line, Log

SAME = 5  # readings in a row; fewer happen in any run
STEP = re.compile(r"\b(?:global_?step|step|steps)\b[\"']?[ :=]+(\d+)(?:\s*/\s*(\d+))?", re.I)
LIMIT = re.compile(r"\bmax_train_steps[\"']?[ :=]+(\d+)", re.I)
FREE = re.compile(r"\bfree(?: memory)?[ :=]+([\d.]+) ?(GiB|GB|MiB|MB)", re.I)
ALLOCATED = re.compile(r"\b(?:xpu (?:memory|alloc\w*)|memory_allocated|alloc\w*)\b[ :=()]+([\d.]+)", re.I)
REFUSED = re.compile(r"tried to allocate ([\d.]+) ?(GiB|MiB)", re.I)
STATED_FREE = re.compile(r"([\d.]+) ?(GiB|MiB) (?:is |are )?free|free[ :]+([\d.]+) ?(GiB|MiB)", re.I)
LAST = re.compile(r"checkpoint-last-(\d+)-(\d+)-last", re.I)
GIB = {"gib": 1.0, "gb": 1.0, "mib": 1 / 1024, "mb": 1 / 1024}
NEAR = 0.9  # of the free memory: a block so large is refused though it would fit


def zero_allocated(log: Log) -> Line | None:
    """Steps are done, and each reading of the device's memory is nothing."""
    if log.stage not in ("step", "done"):
        return None
    seen = [(float(found[1]), line) for line in log.lines if (found := ALLOCATED.search(line.text))]
    return seen[-1][1] if len(seen) >= SAME and all(value < 0.01 for value, _ in seen) else None


def frozen_free(log: Log) -> Line | None:
    """The free memory never moves while the allocated does."""
    free = [(found[1], line) for line in log.lines if (found := FREE.search(line.text))]
    used = {found[1] for line in log.lines if (found := ALLOCATED.search(line.text))}
    still = len(free) >= SAME and len({value for value, _ in free}) == 1
    return free[-1][1] if still and len(used) > 1 else None


def growing(log: Log) -> Line | None:
    """The allocated memory rises at each of many readings, by a tenth and more in all."""
    seen = [(float(found[1]), line) for line in log.lines if (found := ALLOCATED.search(line.text))]
    if len(seen) < 4 * SAME:
        return None
    rises = all(after >= before for (before, _), (after, _) in pairwise(seen))
    moved = sum(after > before for (before, _), (after, _) in pairwise(seen))
    return seen[-1][1] if rises and 2 * moved > len(seen) and seen[-1][0] > 1.1 * seen[0][0] else None


def refused_near_ceiling(log: Log) -> Line | None:
    """One block refused that is smaller than what the message calls free, and nearly all of it."""
    line = log.find(REFUSED.pattern)
    return line if line and (pair := _refusal(log, line)) and NEAR * pair[1] <= pair[0] <= pair[1] else None


def refused_though_free(log: Log) -> Line | None:
    """A block refused of which the message itself says that there is room for it."""
    line = log.find(REFUSED.pattern)
    return line if line and (pair := _refusal(log, line)) and pair[0] <= pair[1] else None


def _refusal(log: Log, line: Line) -> tuple[float, float] | None:
    """GiB asked for, and GiB called free in the same line."""
    asked, free = REFUSED.search(line.text), STATED_FREE.search(line.text)
    if not asked or not free:
        return None
    number, unit = (free[1], free[2]) if free[1] else (free[3], free[4])
    return float(asked[1]) * GIB[asked[2].lower()], float(number) * GIB[unit.lower()]


def beyond_limit(log: Log) -> Line | None:
    """A step number above max_train_steps."""
    told = [int(found[1]) for line in log.lines if (found := LIMIT.search(line.text))]
    limit = log.limit if log.limit is not None else told[0] if told else None
    if limit is None:
        return None
    for line in log.lines:
        found = None if LIMIT.search(line.text) else STEP.search(line.text)
        if found and int(found[1]) > limit:
            return line
    return None


def repeated_last(log: Log) -> Line | None:
    """Resumable checkpoints of one step and several epochs."""
    epochs: dict[str, set[str]] = {}
    for line in log.lines:
        for found in LAST.finditer(line.text):
            epochs.setdefault(found[2], set()).add(found[1])
            if len(epochs[found[2]]) > 1:
                return line
    return None
