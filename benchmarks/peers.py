"""Steps of `finetune fit` side by side with those of other tools: same shapes, adapted layers and rank, batch 1.

    python benchmarks/peers.py BASE [--rows bf16-1024 ...] [--contenders ours musubi ...] [--steps 6]
    python benchmarks/peers.py --tiny

BASE is a folder of benchmarks/random_base.py. Times are taken in one process: between two steps of our fit, which runs
as a user runs it (sigmas drawn, fp32 adapter, data from the cache, metrics, a checkpoint halfway), each peer does one.
Peaks are taken in a process for each contender. Ours have no peer beside them there, and the peak is the largest from
the first probe to the last checkpoint. `ours-...` are settings of the same product: see MODES. What can't run here says
so in a line with `error` or `skipped`. JSON lines, and a table in markdown at the end.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flops
import measuring
import peer_steps
import true_size
from measuring import Line
from peer_steps import Peer
from true_size import Shape

from runtime import device as devices
from runtime.demo.series import BASE
from runtime.device import Device
from runtime.workspace import Workspace

COMPILED = {"train.compile": True, "train.graphs": False, "train.cached_modulation": True}
EAGER = {"train.compile": False, "train.graphs": False, "train.cached_modulation": True}
MODES: dict[str, dict[str, Any]] = {
    "ours": {**COMPILED, "train.gradient_checkpointing": "selective"},
    "ours-graphs": {**COMPILED, "train.graphs": True, "train.gradient_checkpointing": "selective"},
    "ours-fast": {**COMPILED, "train.gradient_checkpointing": False},
    "ours-fast-graphs": {**COMPILED, "train.graphs": True, "train.gradient_checkpointing": False},
    "ours-lean": {**COMPILED, "train.gradient_checkpointing": True},
    "ours-lean-graphs": {**COMPILED, "train.graphs": True, "train.gradient_checkpointing": True},
    "ours-low": {**EAGER, "train.gradient_checkpointing": True},
}
WARM_PEERS, ALONE = 3, 2  # steps of a peer before it is timed, and of one that is alone
PATIENCE_S = 400.0  # for one contender's peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    shape: Shape
    quantize: str
    ours: tuple[str, ...]
    peers: tuple[str, ...]


LARGE, SMALL = Shape(size=(1024, 1024)), Shape(size=(384, 672))
PLAIN_PEERS = ("musubi", "musubi-compiled", "diffusers")
ROWS: dict[str, Row] = {
    "bf16-1024": Row(shape=LARGE, quantize="none", ours=("ours", "ours-fast"), peers=PLAIN_PEERS),
    "bf16-384": Row(
        shape=SMALL, quantize="none", ours=("ours-graphs", "ours-fast-graphs"), peers=PLAIN_PEERS
    ),
    "nf4-1024": Row(
        shape=LARGE, quantize="nf4", ours=("ours-lean", "ours"), peers=("diffusers-nf4", "musubi-fp8")
    ),
    "nf4-384": Row(
        shape=SMALL, quantize="nf4", ours=("ours-lean-graphs", "ours-low"), peers=("diffusers-nf4",)
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all rows of a call share."""

    base: Path
    steps: int
    warmup: int
    tiny: bool
    changes: Mapping[str, Any]
    contenders: tuple[str, ...] | None
    work: Path

    def chosen(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.contenders is None or name in self.contenders]

    def workspace(self, row: Row) -> Workspace:
        """Of the row's shape, made where it isn't there yet."""
        shape = self.shape(row)
        place = self.work / f"{shape.size[0]}x{shape.size[1]}"
        if place.is_dir():
            return Workspace(place.resolve())
        return true_size.make(place, self.base, shape, {"train.max_train_steps": self.warmup + self.steps})

    @property
    def warm_peers(self) -> int:
        return 1 if self.tiny else WARM_PEERS

    def shape(self, row: Row) -> Shape:
        return true_size.TINY if self.tiny else row.shape

    def config_of(self, row: Row, mode: str) -> dict[str, Any]:
        own = {"train.compile": False, "train.graphs": False} if self.tiny else {}
        length = {
            "train.max_train_steps": self.warmup + self.steps,
            "train.checkpointing_steps": self.warmup + max(1, self.steps // 2),
        }
        return {"model.quantize": row.quantize, **length, **MODES[mode], **own, **self.changes}


def main() -> int:
    wish = parsed()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return run(wish, setting_of(wish, Path(folder)))


def run(wish: argparse.Namespace, setting: Setting) -> int:
    report = measuring.Report()
    if wish.peak:
        with report.trying():
            report.tell(**peak(setting, ROWS[wish.rows[0]], wish.peak))
        return int(report.failed)
    where = devices.pick()
    rate = flops.matrix_rate(where, flops.side(setting.tiny))
    report.tell(**measuring.describe(where), matrix_tflop_s=rate / 1e12)
    for name in wish.rows:
        devices.free_cached(where)
        with report.trying(row=name):
            setting.workspace(ROWS[name])
            runnable = runnable_peers(setting, name, report)
            if wish.only != "times":  # first, while this process holds next to nothing
                spawn(setting, name, [*setting.chosen(ROWS[name].ours), *runnable], report)
            if wish.only != "peaks":
                race(setting, name, runnable, rate, report)
    print(rendered(report.lines))
    return int(report.failed)


def setting_of(wish: argparse.Namespace, folder: Path) -> Setting:
    if not wish.tiny and wish.base is None:
        raise SystemExit("BASE is missing: a folder of benchmarks/random_base.py; or --tiny")
    return Setting(
        base=wish.base or BASE,
        steps=wish.steps or (2 if wish.tiny else 6),
        warmup=wish.warmup if wish.warmup is not None else (1 if wish.tiny else 4),
        tiny=wish.tiny,
        changes=true_size.read_changes(wish.set),
        contenders=tuple(wish.contenders) if wish.contenders else None,
        work=wish.work or folder,
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, nargs="?")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    everyone = [*MODES, *dict.fromkeys(name for row in ROWS.values() for name in row.peers)]
    parser.add_argument("--contenders", nargs="+", choices=everyone, help="only these")
    parser.add_argument("--steps", type=int, help="timed, of ours; a peer does one between two of them")
    parser.add_argument("--warmup", type=int, help="steps of ours that are not timed")
    parser.add_argument("--only", choices=("times", "peaks"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of ours")
    parser.add_argument("--work", type=Path, help="leave the workspaces in this folder")
    parser.add_argument("--tiny", action="store_true", help="the embedded base, on whatever device is there")
    parser.add_argument("--peak", metavar="CONTENDER", help="only the peak of this one, in this process")
    return parser.parse_args()


def runnable_peers(setting: Setting, name: str, report: measuring.Report) -> list[str]:
    """Of a row; what keeps the others from running is told."""
    reasons = {peer: peer_steps.missing(peer) for peer in setting.chosen(ROWS[name].peers)}
    for peer, reason in reasons.items():
        if reason:
            report.tell(row=name, contender=peer, skipped=reason)
    return [peer for peer, reason in reasons.items() if not reason]


def race(setting: Setting, name: str, names: Sequence[str], rate: float, report: measuring.Report) -> None:
    """Each of our modes, with the peers between its steps."""
    row, where = ROWS[name], devices.pick()
    config, shape = true_size.read_denoiser(setting.base), setting.shape(row)
    needed = flops.step_flops(config, shape).step
    peers = warmed(setting, name, names, where, report)
    for mode in setting.chosen(row.ours):
        taken: dict[str, list[float]] = {peer.name: [] for peer in peers}

        def turn(step: int, taken: dict[str, list[float]] = taken) -> None:
            # From the end of the warm-up on, and once in it: whatever our launch does to a compiler shows there.
            for peer in peers if step >= setting.warmup or step == 1 else ():
                taken[peer.name].append(measuring.timed(where, peer.step))

        told: Line = {"row": name, "kind": "time", "beside": mode}
        with report.trying(**told, contender=mode):
            fitted = measuring.fit(
                setting.workspace(row), setting.config_of(row, mode), setting.warmup, turn=turn
            )
            found = {mode: fitted.to_json()}
            found |= {name: measuring.summary(times[1:]) for name, times in taken.items()}
            for contender, line in found.items():
                used = {"model_tflop": needed / 1e12, "mfu": needed / line["median_s"] / rate}
                ratio = {"ours_to_it": found[mode]["median_s"] / line["median_s"]}
                report.tell(**told, contender=contender, **line, **ratio, **used)
        measuring.fresh_compiler()  # or the model before would stay in memory
        devices.free_cached(where)


def warmed(
    setting: Setting, name: str, names: Sequence[str], where: Device, report: measuring.Report
) -> list[Peer]:
    """Peers whose kernels are chosen and compiled; one that fails is told and left out."""
    groups: dict[str, list[str]] = {}
    for peer in names:
        groups.setdefault(peer_steps.weights_of(peer), []).append(peer)
    config, ready = true_size.read_denoiser(setting.base), []
    for group in groups.values():
        built: list[Peer] = []
        with report.trying(row=name, contender=group[0]):
            built = peer_steps.build(group, config, setting.shape(ROWS[name]), where)
        for made in built:
            with report.trying(row=name, contender=made.name):
                started = time.perf_counter()
                for _ in range(setting.warm_peers):
                    made.step()
                spent = {"warmup_s": time.perf_counter() - started, "adapted": made.adapted}
                report.tell(row=name, kind="warm", contender=made.name, **spent)
                ready.append(made)
    devices.free_cached(where)
    return ready


def spawn(setting: Setting, name: str, contenders: Sequence[str], report: measuring.Report) -> None:
    """The peak of each, from a process of its own."""
    given = [f"{key}={json.dumps(value)}" for key, value in setting.changes.items()]
    for contender in contenders:
        line = [sys.executable, __file__, str(setting.base), "--peak", contender, "--rows", name]
        line += ["--work", str(setting.work), "--warmup", str(setting.warmup)]
        line += ["--steps", str(setting.steps)]  # as in the race, so that both read one table of modulations
        line += [*(["--tiny"] if setting.tiny else []), *(word for pair in given for word in ("--set", pair))]
        with report.trying(row=name, kind="peak", contender=contender):
            # A failure is in the line that it prints; without one it was killed.
            done = subprocess.run(
                line, check=False, stdout=subprocess.PIPE, encoding="utf-8", timeout=PATIENCE_S
            )
            if not done.stdout:
                raise RuntimeError(f"ended with {done.returncode} and without a word")
            report.tell(
                row=name, kind="peak", contender=contender, **json.loads(done.stdout.splitlines()[-1])
            )


def peak(setting: Setting, row: Row, contender: str) -> Line:
    """GiB of one contender alone in this process, and its time a step with nothing beside it."""
    if contender in MODES:
        workspace = setting.workspace(row)
        fitted = measuring.fit(workspace, setting.config_of(row, contender), setting.warmup)
        planned = {"planned_gib": measuring.planned_gib(workspace)}
        return {**fitted.memory_json(), **planned, "alone_s": statistics.median(fitted.times)}
    where = devices.pick()
    config, memory = true_size.read_denoiser(setting.base), measuring.Memory(where)
    (made,) = peer_steps.build([contender], config, setting.shape(row), where)
    devices.free_cached(where)
    loaded = devices.memory(where)
    devices.reset_peak(where)
    for _ in range(setting.warm_peers):
        made.step()
    alone = [measuring.timed(where, made.step) for _ in range(ALONE)]
    memory.look()
    resident = {"resident_gib": loaded.alloc_gib, "load_peak_gib": loaded.peak_gib}
    return {**resident, **memory.to_json(), "alone_s": statistics.median(alone)}


def rendered(lines: Sequence[Line]) -> str:
    """One row of a table for each contender of each row: its times, and its peaks where they were taken."""
    peaks = {(line["row"], line["contender"]): line for line in lines if line.get("kind") == "peak"}
    times = [line for line in lines if line.get("kind") == "time"]
    timed = {(line["row"], line["contender"]) for line in times}
    alone = [line for key, line in peaks.items() if key not in timed]
    rows = []
    for line in [*times, *alone]:
        held = peaks.get((line["row"], line["contender"]), {})
        rows.append([line["row"], line["contender"], line.get("beside", ""), *_times(line), *_peaks(held)])
    heads = ["row", "contender", "in the run of", "s a step: median (min to max)", "ours to it", "MFU"]
    return measuring.table([*heads, "allocated, GiB", "planned", "reserved, GiB", "host, GiB"], rows)


def _times(line: Line) -> list[str]:
    if "median_s" not in line:
        return [line.get("error", "alone: " + f"{line['alone_s']:.3f}" if "alone_s" in line else ""), "", ""]
    spread = f"{line['median_s']:.3f} ({line['min_s']:.3f} to {line['max_s']:.3f})"
    return [spread, f"{line['ours_to_it']:.2f}", f"{line['mfu']:.1%}"]


def _peaks(line: Line) -> list[str]:
    names = ("peak_gib", "planned_gib", "reserved_gib", "rss_gib")
    return [f"{line[name]:.2f}" if name in line else "" for name in names]


if __name__ == "__main__":
    raise SystemExit(main())
