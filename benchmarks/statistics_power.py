"""How often gate 07's statistics are wrong, by simulation: numpy and gates.statistics, no torch.

    python benchmarks/statistics_power.py [--runs 2000] [--seed 0] [--part curve|probe|memory]

One line a case: how often it passed of `--runs`; `!` marks a row that is wrong more than once in 100.

curve   loss-fell of another trainer's run (gates.statistics.trend). Batch 1, 30 samples in a new order each epoch. Log
        loss = g(sigma) + sample + noise + trend: g falls from 1.0 to 0.1 and rises to 0.35 over a uniform sigma
        (standard deviation 0.59), sample 0.3, noise 0.35, or Student's t of 3 degrees where the tail is heavy.
probe   loss-fell of our own run (gates.statistics.paired): 8 samples x 4 draws. Each loss changes by the true decline,
        and at random by `spread`, of which `alike` is shared by the draws of one sample.
memory  memory-stable (gates.judging.memory_growth): resident memory, limit 0.45 MiB a step, second half of the run.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gates.judging import memory_growth
from gates.statistics import paired, trend

SAMPLES, PROBED, DRAWS = 30, 8, 4
DROP_MIN, RSS_MAX = 0.02, 0.45  # as gate 07 has them; a test compares
Shape = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    part: str
    case: str
    wanted: bool | None
    """whether it should pass; None: the row tells the power"""
    passed: float
    """share of the runs"""

    @property
    def wrong(self) -> bool:
        return self.wanted is not None and abs(self.passed - self.wanted) > 0.01


# ---- curve


def base_loss(sigma: np.ndarray) -> np.ndarray:
    """Logarithm of the loss of an untrained adapter."""
    return np.log(0.10 + 0.9 * (1 - sigma) ** 4 + 0.25 * sigma**6)


def line(drop: float) -> Shape:
    return lambda x: np.log(1 - drop * x)


def settling(drop: float) -> Shape:
    """Most of it in the first seventh, as adapters learn."""
    return lambda x: np.log(1 - drop * (1 - np.exp(-x / 0.15)) / (1 - math.exp(-1 / 0.15)))


def returning(drop: float, turn: float = 0.5) -> Shape:
    return lambda x: np.log(1 - drop * np.where(x < turn, x / turn, (1 - x) / (1 - turn)))


def curve(draw: np.random.Generator, steps: int, shape: Shape, *, heavy: bool = False) -> list[float]:
    """Losses of one run."""
    epochs = -(-steps // SAMPLES)
    order = np.concatenate([draw.permutation(SAMPLES) for _ in range(epochs)])[:steps]
    noise = draw.standard_t(3, steps) if heavy else draw.standard_normal(steps)
    log = base_loss(draw.uniform(size=steps)) + 0.3 * draw.standard_normal(SAMPLES)[order] + 0.35 * noise
    return np.exp(log + shape(np.arange(steps) / steps)).tolist()


CURVES: dict[str, tuple[Shape, bool | None]] = {
    "flat": (line(0.0), False),
    "rising 10 %": (line(-0.1), False),
    "rising 50 %": (line(-0.5), False),
    "falling 30 % to the middle, and back": (returning(0.3), False),
    "rising 30 % to the middle, and back": (returning(-0.3), False),
    "falling 30 % till 0.7 of it, and back": (returning(0.3, 0.7), None),
    **{f"settling {drop:.0%} lower": (settling(drop), None) for drop in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)},
    "settling 75% lower": (settling(0.75), True),
    **{f"falling {drop:.0%} in a line": (line(drop), None) for drop in (0.2, 0.4, 0.6)},
}  # fmt: skip


def lucky(losses: list[float]) -> list[float]:
    """The last step a hundredth of what it was."""
    return [*losses[:-1], losses[-1] / 100]


def curve_rows(
    draw: np.random.Generator, runs: int, lengths: Sequence[int] = (300, 600, 1000)
) -> Iterator[Row]:
    for steps in lengths:
        for name, (shape, wanted) in CURVES.items():
            for heavy in (False, True):
                fell = [trend(curve(draw, steps, shape, heavy=heavy)).fell for _ in range(runs)]
                case = f"{steps} steps, {name}" + (", heavy tail" if heavy else "")
                yield Row(part="curve", case=case, wanted=wanted, passed=float(np.mean(fell)))
        fell = [trend(lucky(curve(draw, steps, line(0.0)))).fell for _ in range(runs)]
        yield Row(
            part="curve",
            case=f"{steps} steps, flat, a lucky last step",
            wanted=False,
            passed=float(np.mean(fell)),
        )


# ---- probe


def probe(
    draw: np.random.Generator, decline: float, spread: float, alike: float
) -> tuple[list[float], list[float], list[int]]:
    """Losses before and after, and the sample of each."""
    sigmas = base_loss((np.arange(DRAWS) + 0.5) / DRAWS)
    before = np.exp(
        sigmas + 0.3 * draw.standard_normal((PROBED, 1)) + 0.2 * draw.standard_normal((PROBED, DRAWS))
    )
    shared, own = draw.standard_normal((PROBED, 1)), draw.standard_normal((PROBED, DRAWS))
    change = spread * (math.sqrt(alike) * shared + math.sqrt(1 - alike) * own)
    after = before * np.exp(change - spread**2 / 2) * (1 - decline)
    return before.ravel().tolist(), after.ravel().tolist(), np.repeat(np.arange(PROBED), DRAWS).tolist()


PROBES: dict[tuple[float, float], bool | None] = {
    (0.0, 0.02): False, (0.0, 0.05): False, (0.0, 0.1): False, (0.0, 0.2): None, (-0.05, 0.05): False,
    (0.05, 0.02): True, (0.05, 0.05): None, (0.1, 0.05): None, (0.2, 0.05): True, (0.2, 0.1): None,
}  # fmt: skip


def probe_rows(draw: np.random.Generator, runs: int) -> Iterator[Row]:
    for (decline, spread), wanted in PROBES.items():
        for alike in (0.0, 0.3, 0.6):
            found = [paired(*probe(draw, decline, spread, alike)) for _ in range(runs)]
            fell = [item.relative_drop >= DROP_MIN and item.t > item.limit for item in found]
            case = f"decline {decline:.0%}, spread {spread:.0%}, alike {alike:g}"
            yield Row(part="probe", case=case, wanted=wanted, passed=float(np.mean(fell)))


# ---- memory: MiB by step


def jump(steps: int, draw: np.random.Generator) -> np.ndarray:
    """2 GiB more from a step of the second half on."""
    return 2048.0 * (np.arange(steps) >= draw.integers(steps // 2, steps))


def staircase(steps: int, draw: np.random.Generator) -> np.ndarray:
    """1 MiB a step, in segments of 16 MiB, as an allocator grows."""
    return 16.0 * ((np.arange(steps) + draw.integers(16)) // 16)


def sawtooth(steps: int, draw: np.random.Generator) -> np.ndarray:
    """64 MiB of garbage, collected every 32 steps."""
    return 2.0 * ((np.arange(steps) + draw.integers(32)) % 32)


MEMORY: dict[str, tuple[Callable[[int, np.random.Generator], np.ndarray], float, bool | None]] = {
    "flat": (lambda n, _: np.zeros(n), 20, True),
    "a leak of 1 MiB a step": (lambda n, _: np.arange(n) * 1.0, 20, False),
    "the same without noise": (lambda n, _: np.arange(n) * 1.0, 0, False),
    "the same as a staircase of 16 MiB": (staircase, 20, False),
    "the same after a jump of 2 GiB": (lambda n, d: jump(n, d) + np.arange(n), 20, False),
    "one jump of 2 GiB": (jump, 20, True),
    "a sawtooth of 64 MiB every 32 steps": (sawtooth, 20, True),
}  # fmt: skip


def memory_lines(values: np.ndarray, buckets: int) -> list[dict[str, object]]:
    """Lines of metrics.jsonl; of two buckets that alternate the second takes 3 GiB more."""
    return [
        {"step": step, "bucket": str(step % buckets), "rss_gib": (value + 3072 * (step % buckets)) / 1024}
        for step, value in enumerate(values.tolist(), 1)
    ]


def memory_rows(
    draw: np.random.Generator, runs: int, lengths: Sequence[int] = (100, 200, 400, 1000)
) -> Iterator[Row]:
    for steps in lengths:
        for name, (make, noise, wanted) in MEMORY.items():
            for buckets in (1, 2):
                stable = 0
                for _ in range(runs):
                    values = 8192 + make(steps, draw) + noise * draw.standard_normal(steps)
                    rise = memory_growth(memory_lines(values, buckets), "rss_gib", after=steps / 2)
                    stable += rise is not None and rise * 1024 <= RSS_MAX
                # A second half of 50 steps hides much in noise of 20 MiB, and a sawtooth there has one tooth.
                clear = noise == 0 or steps >= 200 or name == "flat"
                case = f"{steps} steps, {name}" + (", two buckets" if buckets == 2 else "")
                yield Row(part="memory", case=case, wanted=wanted if clear else None, passed=stable / runs)


PARTS: dict[str, Callable[[np.random.Generator, int], Iterator[Row]]] = {
    "curve": curve_rows, "probe": probe_rows, "memory": memory_rows,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of wrong answers of gate 07's statistics.")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=tuple(PARTS))
    asked = parser.parse_args()
    print(f"{'part':<7} {'should':<6} {'passed':>8}  case ({asked.runs} runs each, seed {asked.seed})")
    for name in [asked.part] if asked.part else PARTS:
        for row in PARTS[name](np.random.default_rng(asked.seed), asked.runs):
            should = "-" if row.wanted is None else "pass" if row.wanted else "fail"
            print(
                f"{row.part:<7} {should:<6} {row.passed:8.2%}{'!' if row.wrong else ' '} {row.case}",
                flush=True,
            )


if __name__ == "__main__":
    main()
