"""Machines rehearsed on a larger one: the product's own commands held to what such a machine could give them.

    python benchmarks/random_base.py BASE --encoders published --device cuda
    python benchmarks/rehearse.py BASE WORK [--machines pc16-raised card24 pc32-raised] [--size 384 672] [--steps 10]
    python benchmarks/rehearse.py --tiny

For each machine: config.yaml with `hardware.memory_limit_gib` set to what `finetune plan --for` would let it fill,
then `finetune plan`, `cache`, `fit` of `--steps` steps with a checkpoint halfway, `validate` of one held-out sample, in
a process each, and the gates on what they left, all of which have to pass; before the first `finetune quantize`, once
for all. Whatever `finetune recommend` leaves to the plan, the plan decides; PCs of 16 GiB run eagerly.
The allocator is held to the limit (less what the plan keeps for the host, where memory is shared), so what would not
fit there fails here. One JSON object a line: peak_gib and reserved_gib of the device's allocator, rss_gib of the host,
together_gib of the sum of the last two at one moment, looked at every 20 ms; `planned_gib` is the plan's peak.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring
import true_size
from measuring import Line, Report
from true_size import Shape

from runtime import cli
from runtime import device as devices
from runtime.commands.dataset import scan
from runtime.commands.init import write_target
from runtime.demo.series import BASE
from runtime.planning.machines import MACHINES
from runtime.workspace import Workspace

REHEARSED = ("pc16-raised", "card24", "pc32-raised")
EAGER = ("pc16", "pc16-raised")
LEFT_TO_THE_PLAN = (
    "model.quantize",
    "model.quantize_text_encoder",
    "train.gradient_checkpointing",
    "train.cached_modulation",
    "train.streamed_blocks",
    "train.compile",
    "train.graphs",
)
STAGES = (  # by the plan's phase
    ("cache", ["cache"]),
    ("fit", ["fit", "--smoke"]),
    ("fit", ["fit"]),
    ("validate", ["validate", "--checkpoint", "last"]),
)
BEFORE = (["probe", "--host"], ["probe", "--environment"], ["adapt"])
GATES = ("01", "02", "03", "04", "05", "06", "07", "08")
PAIRS = 11  # ten to train, as gate 02 wants, and one held out
SAMPLER_STEPS = 4
LEARNING_RATE = 5e-4  # so that ten steps show in the loss, as gate 07 wants
PATIENCE_S = 400.0  # for one command


def main() -> int:
    wish = parsed()
    if wish.phase:
        return phase(wish.phase)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return rehearse(wish, wish.work or Path(folder) / "work")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, nargs="?", default=BASE)
    parser.add_argument("work", type=Path, nargs="?", help="a folder to leave all in")
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(REHEARSED))
    parser.add_argument("--size", type=int, nargs=2, default=(384, 672), help="height and width, pixels")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--tiny", action="store_true", help="the embedded base, on whatever device is there")
    parser.add_argument("--phase", nargs=argparse.REMAINDER, metavar="WORD", help=argparse.SUPPRESS)
    return parser.parse_args()


def rehearse(wish: argparse.Namespace, root: Path) -> int:
    report = Report()
    where = devices.pick()
    report.tell(**measuring.describe(where), size=wish.size)
    size = true_size.TINY.size if wish.tiny else (wish.size[0], wish.size[1])
    shape = Shape(size=size, tokens=(0,) * PAIRS)  # the encoders give the text's length
    workspace = prepare(root.resolve(), wish.base, shape)
    for name in wish.machines:
        with report.trying(machine=name):
            loaded = true_size.configure(workspace, config_of(name, wish))
            if name == wish.machines[0]:
                for words in BEFORE:
                    command(workspace, *words)
                model = loaded.config.model
                if {model.quantize, model.quantize_text_encoder} == {"none"}:
                    judge(workspace, "skip", "06", "--reason", "nothing is to be quantized")
                else:
                    told(report, workspace, name, ["quantize"], {})
            plan = json.loads(command(workspace, "plan", "--json"))
            within_ceiling(name, plan)
            for phase_name, words in STAGES:
                told(report, workspace, name, words, plan["phases"][phase_name])
            gates = {number: verdict(workspace, number) for number in GATES}
            chosen = {
                key: choice["value"] for key, choice in plan["choices"].items() if key in LEFT_TO_THE_PLAN
            }
            report.tell(machine=name, chosen=chosen, gates=gates)
            failed = [f"{number} {told}" for number, told in gates.items() if not told.startswith("PASS")]
            if failed:
                raise RuntimeError(f"gates did not pass: {'; '.join(failed)}")
    print(rendered(report.lines))
    return int(report.failed)


def prepare(root: Path, base: Path, shape: Shape) -> Workspace:
    """Pictures, of which one pair is held out, and the evidence of the dataset."""
    workspace = Workspace(root)
    true_size.make_pictures(root / "pairs", shape)
    target = write_target(
        workspace, model=str(base.resolve()), dataset=str(root / "pairs"), device=devices.pick().type
    )
    scan(workspace, holdout=1)
    model = {"model.pretrained_model_name_or_path": target["model"]}
    true_size.configure(workspace, {**model, "data.processor.target_size": list(shape.size)})
    return workspace


def config_of(name: str, wish: argparse.Namespace) -> dict[str, Any]:
    """What `finetune recommend` leaves to the plan, the plan decides; on the smallest machines, eager."""
    machine = MACHINES[name]
    budget = machine.budget()
    rest: dict[str, Any] = dict.fromkeys(LEFT_TO_THE_PLAN, "auto")
    if name in EAGER:
        rest |= {"train.compile": False, "train.graphs": False}
    return {
        **rest,
        "cache.cache_dir": f"cache-{name}",
        "logging.tracker_project_name": name,
        "train.max_train_steps": wish.steps,
        "train.checkpointing_steps": max(1, wish.steps // 2),
        "train.probe_samples": 8,
        "train.probe_draws": 2,
        "optimizer.init_args": {"lr": LEARNING_RATE},
        "validation.num_inference_steps": SAMPLER_STEPS,
        "hardware.memory_limit_gib": round(budget.host_gib if machine.unified else budget.gib, 1),
        "hardware.unified_memory": machine.unified,
        **true_size.read_changes(wish.set),
    }


def told(report: Report, workspace: Workspace, machine: str, words: Sequence[str], planned: Line) -> None:
    """One command in a process of its own, whose last line has its peaks."""
    line = [sys.executable, __file__, "--phase", *words, f"--workspace={workspace.root}"]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, encoding="utf-8", timeout=PATIENCE_S, check=False, cwd=workspace.root
    )
    if done.returncode:
        raise RuntimeError(f"finetune {' '.join(words)} ended with {done.returncode}")
    plan = (
        {"planned_gib": planned["peak_gib"], "planned_host_gib": planned["host_peak_gib"]} if planned else {}
    )
    found = json.loads(done.stdout.splitlines()[-1])
    report.tell(machine=machine, command=" ".join(words), **plan, **found)
    ceiling = MACHINES[machine].budget().gib
    if found["reserved_gib"] > ceiling:
        raise RuntimeError(f"{found['reserved_gib']:.2f} GiB reserved, the graphics may fill {ceiling:.2f}")


def within_ceiling(machine: str, plan: Line) -> None:
    """The graphics' ceiling of a PC is no key of the config, and the larger machine has none."""
    ceiling = MACHINES[machine].budget().gib
    for name, planned in plan["phases"].items():
        needed = planned["peak_gib"] + planned["reserve_gib"]
        if needed > ceiling:
            raise RuntimeError(f"{name}: {needed:.2f} GiB planned, the graphics may fill {ceiling:.2f}")


def phase(words: list[str]) -> int:
    """`finetune` with these words, in this process, watched."""
    where = devices.pick()
    started = time.perf_counter()
    with measuring.watching(where) as watched:
        status = cli.main(words)
    found = {"seconds": time.perf_counter() - started, **watched.to_json()}
    print(json.dumps({name: float(f"{value:.4g}") for name, value in found.items()}))
    return status


def command(workspace: Workspace, *words: str) -> str:
    line = [sys.executable, "-m", "runtime", *words, "--workspace", str(workspace.root)]
    return subprocess.run(line, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout


def judge(workspace: Workspace, *words: str) -> str:
    line = [sys.executable, "-m", "gates", *words, "--workspace", str(workspace.root)]
    return subprocess.run(line, stdout=subprocess.PIPE, encoding="utf-8", check=False).stdout


def verdict(workspace: Workspace, number: str) -> str:
    """PASS, or the checks that failed."""
    document = json.loads(judge(workspace, "check", number, "--json"))
    failed = [check["id"] for check in document["checks"] if check["status"] == "fail"]
    return document["verdict"] + (f": {', '.join(failed)}" if failed else "")


def rendered(lines: Sequence[Line]) -> str:
    heads = [
        "machine",
        "limit, GiB",
        "command",
        "allocated, GiB",
        "planned",
        "reserved",
        "host",
        "together",
        "s",
    ]
    names = ("peak_gib", "planned_gib", "reserved_gib", "rss_gib", "together_gib")
    rows = []
    for line in lines:
        if "command" in line:
            figures = [f"{line[name]:.2f}" if name in line else "" for name in names]
            rows.append(
                [line["machine"], limit(line["machine"]), line["command"], *figures, f"{line['seconds']:.0f}"]
            )
    return measuring.table(heads, rows)


def limit(name: str) -> str:
    machine = MACHINES[name]
    found = machine.budget()
    return f"{found.host_gib:.1f} together" if machine.unified else f"{found.gib:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
