"""Every check of every gate says what it measures, its thresholds, why, on which files, and what mends it."""

from typing import Any

import pytest

from gates import explain, registry

SPECS = [(number, spec) for number in registry.numbers() for spec in registry.load(number).specs]


@pytest.mark.parametrize(
    ("number", "spec"), SPECS, ids=[f"{number}-{spec.phase}-{spec.id}" for number, spec in SPECS]
)
def test_nothing_is_left_empty(number: str, spec: Any) -> None:
    told = explain.document(spec, explain.EVIDENCE[number, spec.phase])
    for name in ("id", "title", "section", "why", "measures", "remedy", "evidence"):
        assert told[name].strip(), name
    assert told["measures"].endswith((".", "?")), told["measures"]
    for limit in told["thresholds"]:
        assert any(map(str.isdigit, limit["value"])), limit


THRESHOLDS = {
    ("02", "samples-enough"): {"SAMPLES_MIN": "5"},
    ("05", "step-parity"): {"PARITY_MAX": "loss 0.02"},
    ("06", "error-bounded"): {"MEAN_ERROR_MAX": "0.12"},
    ("07", "cache-roundtrip"): {"ROUNDTRIP_ERROR_MAX": "0.02", "ROUNDTRIP_PSNR_MIN": "12"},
    ("07", "loss-fell"): {"LOSS_DROP_MIN": "0.02", "LOSS_T_MIN": "3", "PROBE_PAIRS_MIN": "8"},
    ("07", "adapter-learned"): {"LEARNED_SHARE_MIN": "0.9", "LEARNED_NORM_MIN": "1e-06"},
    ("08", "heldout-loss-improves"): {"LOSS_T_MIN": "3", "DRAWS_MIN": "32"},
    ("08", "zero-adapter-rejected"): {"CHANGE_MIN": "1"},
}


@pytest.mark.parametrize(("number", "check"), THRESHOLDS)
def test_thresholds_are_those_that_are_compared_with(number: str, check: str) -> None:
    spec = next(spec for spec in registry.load(number).specs if spec.id == check)
    told = {row["name"]: row for row in explain.thresholds(spec.measure)}
    for name, value in THRESHOLDS[number, check].items():
        assert value in told[name]["value"] and told[name]["why"], told


def test_a_threshold_in_a_helper_and_in_brackets_is_found() -> None:
    spec = next(spec for spec in registry.load("05").specs if spec.id == "probes-complete")
    (row,) = explain.thresholds(spec.measure)
    assert row["name"] == "PROBE_ERROR_MAX" and row["why"].startswith("relative; bf16")


def test_files_are_those_that_a_gate_reads(make: Any) -> None:
    """Each evidence file of a gate's inputs is told by its name."""
    from gates.workspace import Workspace

    workspace = Workspace.open(make().root)
    for number in registry.numbers():
        told = " ".join(text for (gate, _), text in explain.EVIDENCE.items() if gate == number)
        for item in registry.load(number).collect(workspace.again()).inputs:
            name = item.path.rsplit("/", 1)[-1]
            assert name in told, (number, item.path)
