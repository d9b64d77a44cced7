"""Faults planted in recordings of real runs; most in that which was resumed as v2, NF4 skipped, checkpoints pruned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gates.evidence import dataset_digest
from gates.selftest.editing import recorded
from gates.selftest.faults.row import Fault, Spoil, fault
from gates.selftest.faults.run_edits import ADAPTER, SMOKE_TOO
from gates.selftest.shapes import last_run

SHAPE = "recorded-cpu"
LAST = "checkpoint-last-7-80-last"


def _data(name: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """A change of the data of a piece of evidence."""

    def edit(document: dict[str, Any]) -> None:
        change(document["data"])

    return lambda made: made.edit(made.evidence(name), edit)


def _split(keep: int | None) -> Spoil:
    """All but `keep` samples held out; None: no sample is. The digest is put right again."""

    def change(data: dict[str, Any]) -> None:
        for index, sample in enumerate(data["samples"]):
            sample["split"] = "train" if keep is None or index < keep else "holdout"
        data["dataset_digest"] = dataset_digest(data)

    return _data("02-dataset", change)


def _full(name: str, change: Callable[[Any], Any]) -> Spoil:
    """Lines or record of the newest run."""

    def spoil(made: Any) -> None:
        path = last_run(made) / name
        (made.edit if path.suffix == ".json" else made.edit_lines)(path, change)

    return spoil


def _flat(lines: list[Any]) -> None:
    """The last probe of the training samples is the first one's, which v1 measured: nothing was learned."""
    for item in lines[-1]["items"]:
        item["loss"] = 1.4


def _zeroed(made: Any) -> None:
    """lora_B of the last checkpoint is zero, recorded as if it had been saved so."""
    folder = last_run(made) / "checkpoint-7-80"
    tensors = {
        name: np.zeros_like(tensor) if ".lora_B" in name else tensor
        for name, tensor in load_file(folder / ADAPTER).items()
    }
    save_file(tensors, folder / ADAPTER)

    def change(lines: list[Any]) -> None:
        for line in lines:
            if line["path"] == folder.name:
                line["files"] = recorded(folder)

    made.edit_lines(last_run(made) / "saves.jsonl", change)


def _entry(made: Any) -> Path:
    entries = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))["entries"]
    return Path(made.root / "cache" / entries[3]["folder"])


def _planted(what: str, fails: set[str], spoil: Spoil) -> Fault:
    return fault(what, fails, spoil, shape=SHAPE)


FAULTS: dict[str, tuple[Fault, ...]] = {
    "01": (
        _planted(
            "the target wants an Arc", {"accelerator-present"},
            lambda m: m.edit(".gates/target.json", lambda d: d.update(device="xpu")),
        ),
        _planted("a full disk", {"disk-free"}, _data("01-host", lambda d: d["disk"][0].update(free_gib=0.1))),
    ),
    "02": (
        _planted("three to train on", {"samples-enough", "manifest-matches-files"}, _split(3)),
        _planted("nothing held out", {"holdout-reserved", "manifest-matches-files"}, _split(None)),
        _planted(
            "a caption was edited", {"manifest-matches-files", "captions-usable"},
            lambda m: (m.dataset / "training_images/star-08.txt").write_text("x", encoding="utf-8"),
        ),
        fault("a second control is gone", {"manifest-matches-files"},
              lambda m: next((m.dataset / "control_images").glob("*_control_1.png")).unlink(),
              shape="recorded-controls"),
    ),
    "03": (
        _planted("peft is gone", {"packages-present"}, _data("03-environment", lambda d: [
            item.update(version=None) for item in d["packages"] if item["name"] == "peft"])),
    ),
    "04": (
        _planted("the cache is off", {"cache-mandatory"},
                 lambda m: m.edit_config(lambda c: c.update(cache={"use_cache": False}))),
        _planted("the fit outgrows the memory", {"memory-plan-fits"},
                 _data("04-plan", lambda d: d["phases"]["fit"].update(peak_gib=500.0))),
    ),
    "05": (
        _planted("the step's loss is another one", {"step-parity"},
                 _data("05-adaptation", lambda d: d["step_parity"][0].update(loss_device=9.0))),
    ),
    "06": (
        _planted("the skip has no plan that fits", {"skip-justified"},
                 _data("04-plan", lambda d: d["phases"]["fit"].update(peak_gib=500.0))),
    ),
    "07": (
        _planted("a cached entry is torn", {"cache/cache-complete"},
                 lambda m: (_entry(m) / "tensors.safetensors").write_bytes(b"torn")),
        _planted("the smoke run had no first loss", {"smoke/first-step-completed", *SMOKE_TOO},
                 lambda m: m.edit_lines(m.run("smoke") / "metrics.jsonl", lambda x: x[0].update(loss=None))),
        _planted("a gap where it was resumed", {"full/stopped-at-max-steps"},
                 _full("metrics.jsonl", lambda lines: lines[1:])),
        _planted("the loss of the probe did not fall", {"full/loss-fell"}, _full("probe.jsonl", _flat)),
        _planted("the adapter is of zeros", {"full/adapter-learned"}, _zeroed),
        _planted("the optimizer's state is gone", {"full/resumable-last"},
                 lambda m: (last_run(m) / LAST / "optimizer.bin").unlink()),
        fault("nothing lay on the card", {"full/xpu-alloc"},
              _full("metrics.jsonl", lambda lines: [line.update(alloc_gib=0.0) for line in lines] and None),
              shape="recorded-cuda"),
        _planted("the ancestor's checkpoint is gone", {"full/checkpoints-on-schedule"},
                 lambda m: (m.run("full") / "checkpoint-3-40" / ADAPTER).unlink()),
    ),
    "08": (
        _planted("the adapter of another run", {"adapter-from-judged-run"},
                 _data("08-validation", lambda d: d.update(run="outputs/demo/v0"))),
        _planted("held out and told to be a prompt", {"heldout-loss-improves"},
                 _data("08-validation", lambda d: d["samples"][0].update(split="prompt", draws=[]))),
    ),
}  # fmt: skip
