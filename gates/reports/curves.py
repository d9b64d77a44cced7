"""Loss, probes and memory of a run, with its ancestors, for the HTML report."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from gates import judging
from gates.evidence import Reading
from gates.reports.charts import Curve, Marks, chart
from gates.runs import Run


def curves_of(run: Run | None) -> Iterator[str]:
    yield '<h2 id="curves">Curves</h2>'
    if run is None:
        yield '<p class="soft">No run yet: <code>finetune fit --smoke</code>, then <code>finetune fit</code>.</p>'
        return
    metrics, probes = _lines(run.metrics), _lines(run.probes)
    for reading in (run.metrics, run.probes, run.saves):
        if reading.error is not None:
            yield f'<p class="WARN">Not read: {escape(str(reading.error))}</p>'
    marks = _marks(run, metrics)
    yield f"<p>Run {escape(run.path)} ({escape(run.record['kind'])}), with the runs that it continues.</p>"
    yield "<h3>Loss of each step</h3>" + chart(
        "loss", "Loss of each step", _told(metrics, "loss_ema"), "loss", _loss(metrics), marks
    )
    yield "<h3>Loss on the fixed probe</h3>" + chart(
        "probe", "Loss on the fixed probe", _told(probes, "train_mean"), "loss", _probe(probes), marks
    )
    yield _probe_table(probes)
    yield "<h3>Memory</h3>" + chart(
        "memory", "Memory at each step", _told(metrics, _most(metrics)), "GiB", _memory(metrics), marks
    )


def _lines(reading: Reading[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return reading.value or []


def _marks(run: Run, metrics: Sequence[dict[str, Any]]) -> Marks:
    schedule = run.record["resolved"].get("lr_scheduler") or {}
    saved = sorted(judging.saved_steps(run)) if run.saves.value is not None else []
    last = max([line["step"] for line in metrics], default=run.record["planned_steps"])
    warmup = schedule.get("warmup_steps")
    return Marks(last=last, warmup=warmup if isinstance(warmup, int) else 0, checkpoints=saved)


def _points(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """What is null or no number makes a gap."""
    return [
        (line["step"], float(line[name]) if judging.finite(line.get(name)) else math.nan) for line in lines
    ]


def _loss(metrics: Sequence[dict[str, Any]]) -> list[Curve]:
    return [
        Curve(name="loss", style="c1 faint", points=_points(metrics, "loss"), noisy=True),
        Curve(name="running mean", style="c2", points=_points(metrics, "loss_ema")),
    ]


def _probe(probes: Sequence[dict[str, Any]]) -> list[Curve]:
    held = [line for line in probes if line.get("holdout_mean") is not None]
    return [
        Curve(name="training samples", style="c1", points=_points(probes, "train_mean"), dots=True),
        Curve(name="held-out samples", style="c2", points=_points(held, "holdout_mean"), dots=True),
    ]


def _memory(metrics: Sequence[dict[str, Any]]) -> list[Curve]:
    names = {
        "alloc_gib": "allocated on the device",
        "reserved_gib": "reserved on the device",
        "peak_gib": "peak on the device",
        "rss_gib": "resident in the process",
    }
    used = [name for name in names if name == "rss_gib" or any(line.get(name) for line in metrics)]
    return [
        Curve(name=names[name], style=f"c{index}", points=_points(metrics, name))
        for index, name in enumerate(names, 1)
        if name in used
    ]


def _most(metrics: Sequence[dict[str, Any]]) -> str:
    return "peak_gib" if any(line.get("peak_gib") for line in metrics) else "rss_gib"


def _told(lines: Sequence[dict[str, Any]], name: str) -> str:
    points = [(step, value) for step, value in _points(lines, name) if math.isfinite(value)]
    if not points:
        return "nothing was recorded"
    (first, before), (last, after) = points[0], points[-1]
    return f"{name} {before:.4g} at step {first}, {after:.4g} at step {last}"


def _probe_table(probes: Sequence[dict[str, Any]]) -> str:
    if not probes:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{line["step"]}</th><td>{_number(line["train_mean"])}</td>'
        f"<td>{_number(line['holdout_mean'])}</td></tr>"
        for line in probes
    )
    return (
        "<table><caption>The probe in numbers</caption><thead><tr>"
        '<th scope="col">step</th><th scope="col">training samples</th><th scope="col">held-out samples</th>'
        f"</tr></thead><tbody>{rows}</tbody></table>"
    )


def _number(value: Any) -> str:
    return f"{value:.4f}" if judging.finite(value) else "not finite" if value is not None else "none"
