"""The arithmetic on runs that gate 07 rests on: each function gives faults or numbers, no verdict."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from gates import configs, runs
from gates.evidence import document_digest
from gates.runs import Run
from gates.schema import with_defaults
from gates.statistics import WINDOWS, growth
from gates.training import RunEvidence

# Sections that a finished training does not depend on: step 08 may still change its prompts.
LATER = ("validation", "resume")
# What leaves no trace in the weights by itself. The cache is compared by the digest of its entries.
TRACELESS = ("cache", "data.num_workers", "logging.report_to")

BF16_BYTES = 2  # a weight of a merged base on disk, whatever precision was trained beside


def input_faults(e: RunEvidence, overridable: Collection[str]) -> list[str]:
    """Where the run's config and digests are not those of the workspace now."""
    record = e.record
    faults = config_differences(record["config"], e.config.get(), overridable)
    used = with_defaults(configs.overridden(with_defaults(record["config"]), record["overrides"]))
    # A run of an earlier version knew no keys that came later: it did what their defaults say.
    faults += configs.unresolved(configs.without(used, *LATER), with_defaults(record["resolved"]))
    faults += [f"{key} was overridden" for key in sorted(set(record["overrides"]) - set(overridable))]
    if document_digest(record["config"]) != record["config_digest"]:
        faults.append("config_digest is not that of the recorded config")
    prints = record["model"]["fingerprints"]
    pairs = {
        "dataset": (record["dataset_digest"], e.dataset.get()["dataset_digest"]),
        "cache": (record["cache_digest"], e.cache_digest.get()),
        **{f"base {part}": (prints[part], now) for part, now in e.weights.items() if part in prints},
    }
    return faults + [f"another {name} than now" for name, (then, now) in pairs.items() if then != now]


def config_differences(
    then: dict[str, Any], now: dict[str, Any], overridable: Collection[str] = ()
) -> list[str]:
    """Between two config documents, defaults filled; what trained nothing, or was overridden, left out."""
    left_out = (*LATER, *TRACELESS, *overridable)
    old, new = (configs.without(with_defaults(document), *left_out) for document in (then, now))
    return list(configs.differences(old, new))


def environment_faults(e: RunEvidence, device: str, packages: Sequence[str]) -> list[str]:
    """Where the run's device or interpreter is not the target's, or a package was absent."""
    there, seen = e.record["packages"], e.record["device"]["type"]
    faults = [f"device {seen}, the target is {device}"] if seen != device else []
    python, wanted = there.get("python", "absent"), e.target["python"]
    if python.split(".")[:2] != wanted.split(".")[:2]:
        faults.append(f"Python {python}, the target has {wanted}")
    return faults + [f"{name} is absent" for name in packages if there.get(name, "absent") == "absent"]


def package_faults(smoke: dict[str, Any], full: dict[str, Any]) -> list[str]:
    """Packages that were changed between two runs."""
    return [f"package {line}" for line in configs.differences(smoke["packages"], full["packages"])]


def is_older(one: Run, other: Run) -> bool:
    """Whether `one` was launched before `other`."""
    return _launch(one) < _launch(other)


def _launch(run: Run) -> tuple[str, int]:
    """When, and as which v<N>; a clock may have stood still between two, and a folder may have been renamed."""
    number = re.search(r"\d+$", run.path)
    return run.record["launched_at"], int(number[0]) if number else 0


def step_faults(record: dict[str, Any], steps: list[int], configured: int) -> list[str]:
    """Where the run did not do each step from 1 to the configured one, once, in order."""
    planned, faults = record["planned_steps"], []
    if record["state"] != "completed" or record["done_steps"] != planned:
        reason = f" ({record['reason']})" if record["reason"] else ""
        faults.append(f"the run is {record['state']} after step {record['done_steps']} of {planned}{reason}")
    if planned != configured:
        faults.append(f"{planned} steps were planned, {configured} are configured")
    if steps != list(range(1, planned + 1)):
        faults.append(_step_fault(steps, planned))
    return faults


def _step_fault(steps: list[int], planned: int) -> str:
    beyond = [step for step in steps if step > planned]
    missing = sorted(set(range(1, planned + 1)) - set(steps))
    twice = sorted({step for step in steps if steps.count(step) > 1})
    if beyond:
        return f"{len(beyond)} steps beyond {planned}"
    if missing:
        return f"no record of step {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    return f"step {twice[0]} is recorded twice" if twice else "the steps are out of order"


def finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def losses(line: dict[str, Any], split: str) -> dict[tuple[str, float, int], Any]:
    """Probe losses by what they were measured on."""
    return {
        (item["sample"], item["sigma"], item["noise"]): item["loss"]
        for item in line["items"]
        if item["split"] == split
    }


def schedule_faults(run: Run) -> list[str]:
    """Planned checkpoints that were not saved, saved ones not planned, and kept ones that are not whole."""
    saved, planned = saved_steps(run), run.planned_checkpoints.get()
    there = run.checkpoints.get()
    faults = [f"no checkpoint of step {step}" for step in sorted(planned - saved)]
    faults += [f"a checkpoint of step {step}, which was not planned" for step in sorted(saved - planned)]
    faults += [fault for item in there for fault in item.faults]
    if planned & saved and max(planned & saved) not in {item.step for item in there}:
        faults.append("the last checkpoint was pruned")
    return faults


def saved_steps(run: Run) -> set[int]:
    lines = run.saves.get()
    return {line["step"] for line in lines if line["kind"] == "checkpoint" and line["event"] == "save"}


def adapter_files(run: Run) -> dict[str, dict[str, Any]]:
    """Every file that should hold the adapter and nothing else: path to its tensors."""
    # What a damaged checkpoint or -last- lacks is for other checks to tell.
    checkpoints = [item for item in run.checkpoints.get() if item.tensors.value or not item.faults]
    files = {f"{item.path}/{runs.ADAPTER}": item.tensors.get() for item in checkpoints}
    if run.last.value is not None:
        last = run.last.value
        held = {runs.ADAPTER: last.adapter.value, runs.STATE: last.state.value}
        files |= {f"{last.path}/{name}": tensors for name, tensors in held.items() if tensors}
    return files


def adapter_faults(run: Run, share_max: float) -> list[str]:
    """Tensors of the base, another number of parameters than was trained, files that no save recorded."""
    trainable = run.record["trainable"]
    limit = share_max * trainable["base_parameters"] * BF16_BYTES
    unlisted = [name for item in run.checkpoints.get() for name in item.unlisted]
    unlisted += run.last.value.unlisted if run.last.value is not None else ()
    faults = [f"{name} was not there when the checkpoint was saved" for name in unlisted]
    for name, tensors in adapter_files(run).items():
        base = runs.base_tensors(tensors)
        elements = sum(entry.elements for entry in tensors.values())
        size = sum(entry.size for entry in tensors.values())
        if base:
            faults.append(f"{name} holds {len(base)} tensors of the base, first {base[0]}")
        elif elements != trainable["parameters"]:
            faults.append(f"{name} holds {elements} parameters, trained were {trainable['parameters']}")
        elif not size < limit:
            faults.append(f"{name} has {size} bytes, {share_max:.0%} of the base in bf16 are {limit:.0f}")
    return faults


def memory_growth(lines: list[dict[str, Any]], name: str, *, after: float) -> float | None:
    """GiB a step by which `name` rises after a step, in the worst shape; None where none has steps enough.

    NaN where a value is not finite: medians would hide it.
    """
    late = [line for line in lines if line["step"] > after]
    if not all(finite(line[name]) for line in late):
        return math.nan
    series: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in late:
        series[line["bucket"]].append(line)
    rises = [
        growth([line["step"] for line in group], [line[name] for line in group])
        for group in series.values()
        if len(group) >= 2 * WINDOWS
    ]
    return max(rises, default=None)


def last_faults(run: Run) -> list[str]:
    """What keeps the newest -last- from continuing the run at its end."""
    last, done = run.last.get(), run.record["done_steps"]
    faults = [f"{last.path} lacks {name}" for name in last.missing]
    faults += [fault for fault in last.faults if not fault.endswith("is missing")]
    if last.trainer_state.value is not None and last.trainer_state.value["step"] != done:
        faults.append(f"it is of step {last.trainer_state.value['step']}, the run ended at {done}")
    elif last.trainer_state.error is not None and "trainer_state.json" not in last.missing:
        faults.append(str(last.trainer_state.error))
    return faults
