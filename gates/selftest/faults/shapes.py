"""Faults that only some shapes can show: two controls, accumulation, a resumed lineage, pruned checkpoints."""

import shutil
from collections.abc import Callable
from typing import Any

from gates.selftest.faults.cache import share
from gates.selftest.faults.dataset import CONTROL
from gates.selftest.faults.row import Fault, Spoil, fault
from gates.selftest.faults.run_edits import ADAPTER, INPUTS

SECOND = CONTROL.replace(".png", "_control_1.png")


def _v2(name: str, change: Callable[[list[Any]], Any]) -> Spoil:
    return lambda made: made.edit_lines(made.project / "v2" / name, change)


def _drop_last_step(lines: list[Any]) -> list[Any]:
    return lines[:-1]


def _prune_last(made: Any) -> None:
    """The only checkpoint that was left, taken away, and told so."""
    run = made.run("full")

    def change(lines: list[Any]) -> None:
        line = next(x for x in lines if (x["kind"], x["step"]) == ("checkpoint", 60))
        lines.append({**line, "event": "prune"})
        shutil.rmtree(run / line["path"])

    made.edit_lines(run / "saves.jsonl", change)


def _untold(made: Any) -> None:
    """Pruned, and the list of saves does not say so."""
    made.edit_lines(
        made.run("full") / "saves.jsonl",
        lambda lines: [x for x in lines if (x["kind"], x["event"]) != ("checkpoint", "prune")],
    )


FAULTS: dict[str, tuple[Fault, ...]] = {
    "02": (
        fault(
            "the second control is gone",
            {"manifest-matches-files"},
            lambda m: (m.dataset / SECOND).unlink(),
            shape="controls",
        ),
        fault(
            "the second control was repainted",
            {"manifest-matches-files"},
            lambda m: shutil.copy(m.dataset / CONTROL, m.dataset / SECOND),
            shape="controls",
        ),
    ),
    "07": (
        fault(
            "two samples with one second control",
            {"cache/cache-distinct"},
            share("control_1"),
            shape="controls",
        ),
        fault(
            "other micro-batches a step than configured",
            INPUTS,
            lambda m: m.edit_config(lambda c: c["train"].update(gradient_accumulation_steps=2)),
            shape="accumulation",
        ),
        fault(
            "a step that was accumulated is missing",
            {"full/stopped-at-max-steps"},
            lambda m: m.edit_lines(m.run("full") / "metrics.jsonl", _drop_last_step),
            shape="accumulation",
        ),
        fault(
            "a gap where the run was resumed",
            {"full/stopped-at-max-steps"},
            _v2("metrics.jsonl", lambda lines: lines[1:]),
            shape="resumed",
        ),
        fault(
            "the probe of before the resume is gone",
            {"full/loss-fell"},
            lambda m: m.edit_lines(m.run("full") / "probe.jsonl", lambda lines: lines[1:]),
            shape="resumed",
        ),
        fault(
            "a checkpoint of before the resume is torn",
            {"full/checkpoints-on-schedule"},
            lambda m: (m.run("full") / "checkpoint-1-20" / ADAPTER).write_bytes(b""),
            shape="resumed",
        ),
        fault(
            "the last checkpoint was pruned", {"full/checkpoints-on-schedule"}, _prune_last, shape="pruned"
        ),
        fault("a prune that nobody recorded", {"full/checkpoints-on-schedule"}, _untold, shape="pruned"),
    ),
}
