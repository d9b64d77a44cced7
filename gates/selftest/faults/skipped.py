"""Faults of gate 06 where step 06 was left out: its reason, and the plan that has to bear it."""

from collections.abc import Callable
from typing import Any

from gates.selftest.faults.row import Fault, Spoil, fault


def _plan(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit(made.evidence("04-plan"), lambda d: change(d["data"]))


SKIPPED: tuple[Fault, ...] = (
    fault(
        "no reason",
        {"skip-justified"},
        lambda m: m.edit(".gates/skips/06.json", lambda d: d.update(reason=" ")),
        shape="nf4-skipped",
    ),
    fault("no plan", {"skip-justified"}, lambda m: m.evidence("04-plan").unlink(), shape="nf4-skipped"),
    fault(
        "a plan of another config",
        {"skip-justified"},
        _plan(lambda d: d.update(config_digest="0" * 64)),
        shape="nf4-skipped",
    ),
    fault(
        "a fit that is too large",
        {"skip-justified"},
        _plan(lambda d: d["phases"]["fit"].update(peak_gib=8.5)),
        shape="nf4-skipped",
    ),
    fault(
        "a cache phase that is too large",
        {"skip-justified"},
        _plan(lambda d: d["phases"]["cache"].update(peak_gib=8.5)),
        shape="nf4-skipped",
    ),
    fault(
        "a fit that is too large with its reserve",
        {"skip-justified"},
        _plan(lambda d: d["phases"]["fit"].update(peak_gib=7.9)),
        shape="nf4-skipped",
    ),
    fault(
        "a fit whose parts add up to too much",
        {"skip-justified"},
        _plan(lambda d: d["phases"]["fit"]["components_gib"].update(activations=7.0)),
        shape="nf4-skipped",
    ),
    fault(
        "a host that is overfilled",
        {"skip-justified"},
        _plan(lambda d: d["phases"]["validate"].update(host_peak_gib=8.2)),
        shape="nf4-skipped",
    ),
    fault(
        "device and host too much for the memory that they share",
        {"skip-justified"},
        lambda m: (
            _plan(lambda d: d.update(unified_memory=True))(m),
            _plan(lambda d: d["phases"]["fit"].update(host_peak_gib=6.4))(m),
        ),
        shape="nf4-skipped",
    ),
    fault(
        "a plan that counts on an NF4 text encoder",
        {"skip-justified"},
        _plan(
            lambda d: d["choices"].update({"model.quantize_text_encoder": {"value": "nf4", "reason": "x"}})
        ),
        shape="nf4-skipped",
    ),
    fault(
        "a file of another gate",
        set(),
        lambda m: m.edit(".gates/skips/06.json", lambda d: d.update(gate="07")),
        errors={"skip-justified"},
        shape="nf4-skipped",
    ),
)
