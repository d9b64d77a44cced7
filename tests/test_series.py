"""The whole series as its users walk it: `gate next` alone, to eight PASS.

From an empty folder, with a kill on the way; and back from each state of damage that a finished workspace
gets into. No state may lead in a circle.
"""

import contextlib
import importlib.util
import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.demo.series import DATA

SAME_MAX = 2  # a command may have to be run again for the same check, never a third time
STEPS, INTERVAL = 24, 8  # long enough to learn at this rate, and to be killed between two checkpoints
# What takes long to measure, and is the same again: the straight way measures it, the ways back write it again.
REMEMBERED = {
    "finetune probe --host": "01-host",
    "finetune probe --environment": "03-environment",
    "finetune adapt": "05-adaptation",
}


def captured(main: Any, line: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line)
    return code, out.getvalue(), err.getvalue()


Edit = Callable[[Path], Any]


@dataclass(kw_only=True)
class Walker:
    """Does what `gate next` says, and nothing else; what only a person knows is filled in."""

    root: Path
    base: Path
    edits: Mapping[str, Edit] = field(default_factory=dict)
    """check to what its remedy asks to be edited"""
    evidence: Mapping[str, bytes] = field(default_factory=dict)
    """command to the evidence that it would write again"""
    typed: list[str] = field(default_factory=list)
    seen: Counter[tuple[str | None, str]] = field(default_factory=Counter)

    def next(self) -> dict[str, Any]:
        code, out, err = captured(gate, ["next", "--json", "--workspace", str(self.root)])
        assert code == 0, err
        action: dict[str, Any] = json.loads(out)
        return action

    def obey(self, action: dict[str, Any]) -> None:
        command, check = action["command"], action["check"]
        assert command, action
        if action["kind"] == "edit":
            assert check in self.edits, action
            self.edits[check](self.root)
        self.seen[check, command] += 1
        assert self.seen[check, command] <= SAME_MAX, (action, self.typed)
        self.typed.append(command)
        if command in self.evidence:
            place = evidence_path(self.root, REMEMBERED[command])
            place.write_bytes(self.evidence[command])
            return
        words = shlex.split(
            command.replace("MODEL", self.base.as_posix()).replace("FOLDER", str(self.root / "dataset"))
        )
        main = {"finetune": finetune, "gate": gate}[words[0]]
        extra = ["--device", "cpu"] if words[1] == "init" else []
        code, out, err = captured(main, [*words[1:], *extra, "--workspace", str(self.root)])
        assert code == 0 or words[0] == "gate", (command, out, err)

    def walk(self, until: str | None = None) -> None:
        """On to the end, or to where `until` is the next command."""
        while (action := self.next())["kind"] != "done" and action["command"] != until:
            self.obey(action)


def evidence_path(root: Path, name: str) -> Path:
    return root / ".gates" / "evidence" / f"{name}.json"


def shorten(root: Path) -> None:
    """The recommended config with a run that is short enough for a test and long enough to learn."""
    configure(
        root,
        {
            "train.max_train_steps": STEPS,
            "train.checkpointing_steps": INTERVAL,
            "lr_scheduler.warmup_steps": 2,
            "optimizer.init_args.lr": 4e-3,
            "validation.num_inference_steps": 2,
        },
    )


def configure(root: Path, values: Mapping[str, Any]) -> None:
    """Set dotted keys of config.yaml, in sections that are there."""
    path = root / "config.yaml"
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    for dotted, value in values.items():
        *sections, key = dotted.split(".")
        section = document
        for name in sections:
            section = section[name]
        section[key] = value
    path.write_text(yaml.safe_dump(document), encoding="utf-8", newline="\n")


def verdicts_of(root: Path) -> list[dict[str, Any]]:
    _, out, _ = captured(gate, ["check", "all", "--json", "--workspace", str(root)])
    verdicts: list[dict[str, Any]] = json.loads(out)
    return verdicts


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, nano: Path) -> Walker:
    """Walked from an empty folder, with a kill on the way. To be copied, never changed."""
    root = tmp_path_factory.mktemp("series") / "finished"
    root.mkdir()
    walker = Walker(root=root, base=nano)
    assert walker.next()["command"].startswith("finetune init")
    shutil.copytree(DATA, root / "dataset")
    walker.walk(until="finetune plan")
    shorten(root)
    walker.walk(until="finetune fit")
    kill_a_fit(root)
    assert walker.next()["command"] == "finetune monitor --wait", "a run that says running is waited for"
    walker.walk()
    return walker


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gate_next_alone_leads_from_an_empty_folder_to_eight_pass(finished: Walker, tmp_path: Path) -> None:
    assert "finetune fit --resume latest" in finished.typed
    verdicts = verdicts_of(finished.root)
    assert [v["verdict"] for v in verdicts] == ["PASS"] * 8
    assert finished.next()["command"] == "finetune export --format diffusers"
    assert_judges_alike_elsewhere(finished.root, tmp_path / "moved", verdicts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_children_of_the_probes_measured_here(finished: Walker) -> None:
    """Each in a process of its own, for the CPU: quantizing, compiling, and one step of training in two, with and
    without recomputing."""
    quantizer = evidence_of(finished.root, "03-environment")["data"]["quantizer"]
    assert (quantizer["status"], quantizer["quantize_error"]) == ("ok", None)
    assert quantizer["dequantize_error"] == pytest.approx(0.092, abs=0.005)
    adapted = evidence_of(finished.root, "05-adaptation")["data"]
    compiled = next(probe for probe in adapted["probes"] if probe["name"] == "compile")
    assert compiled["status"] == "ok" and compiled["error"] < 1e-5
    (record,) = adapted["step_parity"]
    assert record["status"] == "ok", record["reason"]
    assert (record["compute"], record["masked"], record["checkpointing"]) == ("float32", True, True)
    assert record["loss_error"] == record["gradient_error"] == record["update_error"] == 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_windows_takes_every_name_in_a_workspace(finished: Walker) -> None:
    path = Path(__file__).with_name("test_windows.py")
    spec = importlib.util.spec_from_file_location("names_of_windows", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = [path.relative_to(finished.root).as_posix() for path in finished.root.rglob("*")]
    assert len(names) > 50 and not module.refused(names)


def kill_a_fit(root: Path) -> None:
    """SIGKILL after the first checkpoint: run.json stays at `running`, whose process is gone."""
    line = [sys.executable, "-m", "runtime", "fit", "--workspace", str(root)]
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(root.glob("outputs/*/v1/checkpoint-last-*-last")):
        assert child.poll() is None and time.monotonic() < deadline, "the fit wrote no checkpoint"
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()


def assert_judges_alike_elsewhere(root: Path, moved: Path, verdicts: list[dict[str, Any]]) -> None:
    """Copied to another folder the workspace gets the same judgements: they are functions of its files."""
    shutil.copytree(root, moved)
    local = moved / ".gates" / "local.json"
    if local.is_file():
        local.write_text(local.read_text(encoding="utf-8").replace(str(root), str(moved)), encoding="utf-8")
    assert [v["judgement_digest"] for v in verdicts_of(moved)] == [v["judgement_digest"] for v in verdicts]


# ---- ways back


def the_run(root: Path, kind: str) -> Path:
    """The newest run of a kind."""
    found = {int(path.parent.name[1:]): path.parent for path in root.glob("outputs/*/v*/run.json")}
    return next(path for _, path in sorted(found.items(), reverse=True) if record_of(path)["kind"] == kind)


def record_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return record


def record(run: Path, **values: Any) -> None:
    document = {**record_of(run), **values}
    (run / "run.json").write_text(json.dumps(document), encoding="utf-8", newline="\n")


def cut(path: Path, by: int = 20) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def lose_evidence(root: Path) -> None:
    """Each piece cut short, or not there at all."""
    for number, path in enumerate(sorted((root / ".gates" / "evidence").iterdir())):
        if number % 2:
            path.unlink()
        else:
            cut(path)


def damage_target(root: Path) -> None:
    cut(root / ".gates" / "target.json")


def tear_saves(root: Path) -> None:
    """Torn in the line of the last checkpoint."""
    path = the_run(root, "full") / "saves.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b'"checkpoint"')])


def cut_last(root: Path) -> None:
    """A run that was stopped, and whose resumable checkpoint is no longer whole."""
    run = the_run(root, "full")
    record(run, state="interrupted", outcome="interrupted", reason="SIGINT")
    next(run.glob("checkpoint-last-*-last/optimizer.bin")).unlink()


def upgrade(root: Path) -> None:
    """The smoke fit ran with another torch than the full one, which ran with what is installed now."""
    run = the_run(root, "smoke")
    record(run, packages={**record_of(run)["packages"], "torch": "2.0.0"})


def meet_nan(root: Path) -> None:
    run = the_run(root, "full")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), "loss": None, "grad_norm": None})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    done = record_of(run)["planned_steps"] - 1
    record(run, state="failed", outcome="NonFiniteError", reason="loss nan", done_steps=done)


def lower_rate(root: Path) -> None:
    configure(root, {"optimizer.init_args.lr": 3e-3})


def delete_entry(root: Path) -> None:
    shutil.rmtree(next(path for path in sorted((root / "cache").iterdir()) if path.is_dir()))


def change_holdout(root: Path) -> None:
    stems = sorted(path.stem for path in (root / "dataset" / "training_images").glob("*.png"))
    (root / "dataset" / "holdout.txt").write_text("\n".join(stems[:3]) + "\n", encoding="utf-8")


def add_prompt(root: Path) -> None:
    image = next((root / "dataset" / "control_images").glob("*.png")).relative_to(root).as_posix()
    configure(root, {"validation.samples": [{"prompt": "paint it green", "images": [image]}]})


def tear_saves_and_add_prompt(root: Path) -> None:
    tear_saves(root)
    add_prompt(root)


def leave_quantize_unfinished(root: Path) -> None:
    path = evidence_path(root, "06-quantize")
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "complete": False}), encoding="utf-8", newline="\n")
    weights = next((root / "models" / "nf4").glob("*/*.safetensors"), None)
    if weights is not None:
        cut(weights)


# ---- ten sabotaged workspaces


def evidence_of(root: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(evidence_path(root, name).read_text(encoding="utf-8"))
    return document


def spoil_evidence(root: Path, name: str, **values: Any) -> None:
    document = evidence_of(root, name)
    document["data"] |= values
    evidence_path(root, name).write_text(json.dumps(document), encoding="utf-8", newline="\n")


def flip_cache_flag(root: Path) -> None:
    configure(root, {"cache.use_cache": False})


def flip_it_back(root: Path) -> None:
    configure(root, {"cache.use_cache": True})


def train_at_another_size(root: Path) -> None:
    """The cache stays that of the old size."""
    configure(root, {"data.processor.target_size": [48, 64]})


def forge_verdicts(root: Path) -> None:
    """Eight files that say PASS, in a workspace that was never validated."""
    verdicts_of(root)  # which stores them
    for path in (root / ".gates" / "verdicts").iterdir():
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace('"FAIL"', '"PASS"'), encoding="utf-8", newline="\n")
    assert json.loads((root / ".gates" / "verdicts" / "08.json").read_text("utf-8"))["verdict"] == "PASS"
    evidence_path(root, "08-validation").unlink()


def take_captions(root: Path) -> None:
    for path in sorted((root / "dataset" / "training_images").glob("*.txt"))[:2]:
        path.rename(root.parent / path.name)


def write_captions(root: Path) -> None:
    for path in root.parent.glob("*.txt"):
        path.rename(root / "dataset" / "training_images" / path.name)


def name_another_torch(root: Path) -> None:
    """As of a machine with CUDA: evidence that was copied, or made before torch was replaced."""
    data, other = evidence_of(root, "03-environment")["data"], "2.12.0+cu128"
    packages = [{**item, "version": other} if item["name"] == "torch" else item for item in data["packages"]]
    built = {**data["torch"]["built"], "cuda": "12.8"}
    torch = {**data["torch"], "version": other, "built": built}
    spoil_evidence(root, "03-environment", packages=packages, torch=torch)


def forget_the_resume(root: Path) -> None:
    """Back to where the fit was killed: its run says running, and its process is gone."""
    shutil.rmtree(the_run(root, "full"))
    killed = the_run(root, "full")
    assert record_of(killed)["outcome"] == "vanished"  # which `finetune monitor` wrote on the first way
    record(killed, state="running", outcome="", reason="", ended_at=None)


def validate_the_smoke_fit(root: Path) -> None:
    run = the_run(root, "smoke")
    saves = [json.loads(line) for line in (run / "saves.jsonl").read_text(encoding="utf-8").splitlines()]
    save = next(line for line in saves if line["kind"] == "checkpoint")
    spoil_evidence(
        root,
        "08-validation",
        run=run.relative_to(root).as_posix(),
        run_id=record_of(run)["run_id"],
        checkpoint=save["path"],
        adapter_sha256=next(iter(save["files"].values()))["sha256"],
    )


def fill_the_disk(root: Path) -> None:
    """The probe found no room, and the fit died of it while it saved."""
    disk = [{**place, "free_gib": 0.0} for place in evidence_of(root, "01-host")["data"]["disk"]]
    spoil_evidence(root, "01-host", disk=disk)
    run = the_run(root, "full")
    cut(next(run.glob("checkpoint-last-*-last/model.safetensors")))
    reason = "[Errno 28] No space left on device"
    record(
        run, state="failed", outcome="OSError", reason=reason, done_steps=record_of(run)["planned_steps"] - 1
    )


def free_the_disk(root: Path) -> None:
    """What was in the way lies elsewhere: nothing to do here."""


def turn_a_target(root: Path) -> None:
    path = sorted((root / "dataset" / "training_images").glob("*.png"))[-1]
    with Image.open(path) as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)


@dataclass(frozen=True, kw_only=True)
class State:
    spoil: Edit
    passes_through: tuple[str, ...]
    """commands that the way back has to name"""
    edits: Mapping[str, Edit] = field(default_factory=dict)


RUNS = ("finetune plan", "finetune fit --smoke", "finetune fit", "finetune validate")
STATES = {
    "evidence lost": State(
        spoil=lose_evidence,
        passes_through=("finetune probe --host", "finetune dataset", "finetune probe --environment",
                        "finetune plan", "finetune adapt", "finetune quantize", "finetune cache",
                        "finetune validate"),
    ),
    "target damaged": State(
        spoil=damage_target, passes_through=("finetune init --model MODEL --dataset FOLDER",)
    ),
    "-last- cut": State(spoil=cut_last, passes_through=("finetune fit", "finetune validate")),
    "packages upgraded": State(spoil=upgrade, passes_through=("finetune fit --smoke",)),
    "NaN, then a lower rate": State(
        spoil=meet_nan, passes_through=RUNS, edits={"stopped-at-max-steps": lower_rate}
    ),
    "cache entry deleted": State(spoil=delete_entry, passes_through=("finetune cache",)),
    "another holdout": State(
        spoil=change_holdout, passes_through=("finetune dataset", "finetune cache", *RUNS)
    ),
    "prompt added, and saves torn": State(
        spoil=tear_saves_and_add_prompt,
        passes_through=("finetune plan", "finetune cache", "finetune fit", "finetune validate"),
    ),
}  # fmt: skip
AGAIN = ("finetune dataset", "finetune plan", "finetune cache", *RUNS)
SABOTAGED = {
    "flipped cache flag": State(
        spoil=flip_cache_flag, passes_through=("finetune cache",), edits={"cache-mandatory": flip_it_back}
    ),
    "stale cache": State(
        spoil=train_at_another_size, passes_through=("finetune plan", "finetune cache", *RUNS)
    ),
    "forged verdict": State(spoil=forge_verdicts, passes_through=("finetune validate",)),
    "missing captions": State(
        spoil=take_captions, passes_through=("finetune dataset",), edits={"pairs-complete": write_captions}
    ),
    "wrong torch build in the evidence": State(
        spoil=name_another_torch, passes_through=("finetune probe --environment",)
    ),
    "killed run": State(
        spoil=forget_the_resume,
        passes_through=("finetune monitor --wait", "finetune fit --resume latest", "finetune validate"),
    ),
    "wrong adapter validated": State(spoil=validate_the_smoke_fit, passes_through=("finetune validate",)),
    "full disk": State(
        spoil=fill_the_disk,
        passes_through=("finetune probe --host", "finetune fit --resume latest", "finetune validate"),
        edits={"disk-free": free_the_disk},
    ),
    "changed dataset": State(spoil=turn_a_target, passes_through=AGAIN),
    "unfinished quantize": State(spoil=leave_quantize_unfinished, passes_through=("finetune quantize",)),
}
STATES |= SABOTAGED


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STATES)
def test_gate_next_leads_back_from(name: str, finished: Walker, tmp_path: Path) -> None:
    state, root = STATES[name], tmp_path / "ws"
    shutil.copytree(finished.root, root)
    local = root / ".gates" / "local.json"
    if local.is_file():
        text = local.read_text(encoding="utf-8")
        local.write_text(text.replace(str(finished.root), str(root)), encoding="utf-8", newline="\n")
    evidence = {
        command: evidence_path(finished.root, made).read_bytes() for command, made in REMEMBERED.items()
    }
    state.spoil(root)
    walker = Walker(root=root, base=finished.base, edits=state.edits, evidence=evidence)
    walker.walk()
    assert set(state.passes_through) <= set(walker.typed), walker.typed
    assert [v["verdict"] for v in verdicts_of(root)] == ["PASS"] * 8
