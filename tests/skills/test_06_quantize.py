"""Gate 06: healthy NF4 and a rightful skip pass, and each planted fault turns its check and no other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gates.selftest import nf4
from gates.selftest.faults.quantize import (
    EVIDENCE,
    FAULTS,
    FILES,
    _bytes,
    _component,
    _garble,
    _tensors,
    _weights,
)

Spoil = Callable[[Any], Any]


def test_healthy(made: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(made, "06")
    assert (verdict.verdict, verdict.outcome, verdict.skip_reason) == ("PASS", "passed", None)
    assert verdict.counts["pass"] == 5 and verdict.next_command == "finetune cache"
    assert_turned(verdict)


@pytest.mark.parametrize("quantize", ["quantize", "quantize_text_encoder"])
def test_a_component_that_the_config_does_not_want_may_be_absent(
    quantize: str, made: Any, judge: Any
) -> None:
    name = {"quantize": "transformer", "quantize_text_encoder": "text_encoder"}[quantize]
    made.edit_config(lambda c: c["model"].update({quantize: "none"}))
    made.edit(
        made.evidence(EVIDENCE),
        lambda d: d["data"].update(components=[c for c in d["data"]["components"] if c["name"] != name]),
    )
    shutil.rmtree(made.root / "models/nf4" / name)
    assert judge(made, "06").outcome == "passed"


def test_without_the_base_it_is_judged_by_what_was_recorded(made: Any, judge: Any) -> None:
    shutil.rmtree(made.root / "models/base")
    verdict = judge(made, "06")
    assert verdict.passes
    told = {check.id: check.message for check in verdict.checks}
    assert "of the base is not here" in told["source-untouched"]
    assert "0 layers measured anew" in told["error-bounded"]


def test_a_planted_bad_layer_is_named(made: Any, judge: Any) -> None:
    _tensors(_garble)(made)
    check = next(c for c in judge(made, "06").checks if c.id == "error-bounded")
    assert "transformer_blocks.0.attn.to_q" in check.message and "measured anew" in check.message


def test_a_large_file_is_known_by_its_samples(made: Any, judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gates import evidence, quantized

    for module in (evidence, quantized):
        monkeypatch.setattr(module, "SAMPLED_ABOVE", 100)
    monkeypatch.setattr(evidence, "PIECE", 64)
    for component in FILES:
        now = nf4.record(made.root, component)
        prints = {name: now[name] for name in now if "fingerprint" in name}
        _component(lambda item, prints=prints: item.update(prints), component)(made)  # type: ignore[misc]
    assert judge(made, "06").passes
    path = _weights(made)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 10] ^= 1
    path.write_bytes(content)
    failed = [check.id for check in judge(made, "06").checks if check.status == "fail"]
    assert failed == ["quantization-recorded"]


# ---- the skip


def _skip(reason: str = "64 GiB are enough") -> Spoil:
    def spoil(made: Any) -> None:
        document = {"schema": "skip/1", "gate": "06", "reason": reason, "at": "2026-11-30T12:00:00.000Z"}
        path = made.root / ".gates/skips/06.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document), encoding="utf-8")

    return spoil


@pytest.fixture
def skipped(made: Any) -> Any:
    made.evidence(EVIDENCE).unlink()
    shutil.rmtree(made.root / "models/nf4")
    _skip()(made)
    return made


def test_a_skip_with_a_reason_and_a_plan_that_fits(skipped: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(skipped, "06")
    assert (verdict.verdict, verdict.outcome, verdict.exit_code) == ("PASS", "skipped", 0)
    assert verdict.skip_reason == verdict.summary == "64 GiB are enough"
    assert_turned(verdict)


def test_unfinished_weights_do_not_stand_in_the_way_of_a_skip(made: Any, judge: Any) -> None:
    made.edit(made.evidence(EVIDENCE), lambda d: d.update(complete=False, data={}))
    _skip()(made)
    assert judge(made, "06").outcome == "skipped"


def test_what_was_finished_is_judged_whatever_a_skip_says(made: Any, judge: Any) -> None:
    _skip()(made)
    assert judge(made, "06").outcome == "passed"
    _bytes(made)
    assert judge(made, "06").outcome == "failed"


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ("no reason", "gate skip 06 --reason TEXT"),
        ("no plan", "finetune plan"),
        ("a plan of another config", "finetune plan"),
        ("a fit that is too large", "finetune quantize"),
        ("a fit that is too large with its reserve", "finetune quantize"),
        ("a plan that counts on an NF4 text encoder", "finetune quantize"),
        ("a file of another gate", "finetune quantize"),
    ],
)
def test_an_unjustified_skip_leads_on(fault: str, remedy: str, skipped: Any, judge: Any) -> None:
    row = next(row for row in FAULTS if (row.shape, row.what) == ("nf4-skipped", fault))
    row.spoil(skipped)
    verdict = judge(skipped, "06")
    assert verdict.skip_reason is None and verdict.next_command == remedy


# peak, reserve and host memory of the fit in GiB; budgets of device and host; whether they share; what is said
FITS = [
    ((7.5, 0.5, 7.9), (8.0, 8.0), False, ""),
    (
        (10.0, 3.0, 9.0),
        (11.0, 12.5),
        False,
        "fit: 13.00 GiB at its peak with its reserve, the budget is 11.00",
    ),
    (
        (10.0, 0.5, 9.0),
        (11.0, 12.5),
        True,
        "fit: 19.50 GiB of the memory that device and host share, of 12.50",
    ),
    ((2.0, 0.5, 12.6), (11.0, 12.5), False, "fit: 12.60 GiB of the host's memory, its budget is 12.50"),
    ((2.0, 0.5, 10.0), (11.0, 12.5), True, ""),
]


@pytest.mark.parametrize(("phase", "budgets", "shared", "said"), FITS)
def test_a_skip_and_gate_04_judge_a_plan_alike(
    phase: tuple[float, float, float],
    budgets: tuple[float, float],
    shared: bool,
    said: str,
    skipped: Any,
    judge: Any,
) -> None:
    peak, reserve, host = phase

    def plan(document: dict[str, Any]) -> None:
        data = document["data"]
        data["phases"]["fit"].update(
            components_gib={"denoiser": peak}, peak_gib=peak, resident_gib=peak, largest="denoiser",
            reserve_gib=reserve, host_gib={"streamed_blocks": host}, host_peak_gib=host,
        )  # fmt: skip
        taken = peak + reserve
        spare = min(budgets[0] - taken, budgets[1] - host - taken * shared)
        data.update(
            budget_gib=budgets[0], host_budget_gib=budgets[1], unified_memory=shared, margin_gib=spare
        )

    skipped.edit(skipped.evidence("04-plan"), plan)
    for gate, name in (("04", "memory-plan-fits"), ("06", "skip-justified")):
        check = next(check for check in judge(skipped, gate).checks if check.id == name)
        assert check.status == ("fail" if said else "pass") and said in check.message


def test_gate_07_passes_after_a_skip_as_after_the_step(skipped: Any) -> None:
    from gates import chain
    from gates.workspace import Workspace

    whole = [judged.whole for judged in chain.judge_up_to(Workspace.open(skipped.root), "07")]
    assert all(verdict.passes for verdict in whole), [(v.gate, v.summary) for v in whole]
    assert {v.gate: v.outcome for v in whole}["06"] == "skipped"


def test_gate_07_knows_the_weights_that_a_run_loaded(made: Any, judge: Any) -> None:
    from gates.evidence import weights_fingerprint

    folder = made.root / "models/nf4/transformer"
    for kind in ("smoke", "full"):
        made.edit(
            made.run(kind) / "run.json",
            lambda d: d["model"]["fingerprints"].update({"nf4/transformer": weights_fingerprint(folder)}),
        )
    assert judge(made, "07").passes
    (folder / "extra.txt").write_text("x", encoding="utf-8")
    verdict = judge(made, "07")
    check = next(c for c in verdict.checks if c.id == "run-matches-inputs" and c.status == "fail")
    assert "another base nf4/transformer than now" in check.message


# ---- the command


def test_gate_skip_writes_what_the_gate_reads(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from gates import cli

    made.evidence(EVIDENCE).unlink()
    where = ["--workspace", str(made.root)]
    assert cli.main(["skip", "6", "--reason", " it fits ", *where]) == 0
    assert "gate 06 is to be skipped: it fits" in capsys.readouterr().out
    assert cli.main(["check", "06", *where]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == "gate 06: PASS (skipped), it fits; next: finetune cache"
    )


@pytest.mark.parametrize(
    "arguments", [["07", "--reason", "x"], ["all", "--reason", "x"], ["06"], ["06", "--reason", " "]]
)
def test_gate_skip_takes_only_06_and_only_with_a_reason(arguments: list[str], made: Any) -> None:
    from gates import cli

    assert cli.main(["skip", *arguments, "--workspace", str(made.root)]) == 2
    assert not (made.root / ".gates/skips").exists()


# ---- what the runtime makes


def test_what_finetune_quantize_makes_passes_and_the_script_stops_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate's own reading of NF4 against bitsandbytes' writing of it."""
    pytest.importorskip("bitsandbytes")
    from gates import chain, packaged, registry
    from gates.workspace import Workspace
    from runtime.cli import main as finetune
    from runtime.demo import series

    root = tmp_path / "ws"
    series.prepare(root, "cpu")
    assert [finetune([name, "--workspace", str(root)]) for name in ("dataset", "plan")] == [0, 0]
    script = series.load_script(packaged.data_dir("skills") / registry.skill_of("06") / "scripts" / "run.py")
    monkeypatch.setattr(script, "gate", _only_06(root))
    assert script.main(["--workspace", str(root)]) == 0
    verdict = chain.judge(registry.load("06"), Workspace.open(root)).whole
    assert verdict.outcome == "passed"
    told = next(check.message for check in verdict.checks if check.id == "error-bounded")
    assert told == "88 layers measured anew"
    monkeypatch.setattr(script, "finetune", lambda line: pytest.fail("it passed already"))
    assert script.main(["--workspace", str(root)]) == 0


def _only_06(root: Path) -> Callable[..., int]:
    """Without the gates before it, which want a host and an environment."""
    from gates import chain, registry
    from gates.workspace import Workspace

    return lambda line: chain.judge(registry.load("06"), Workspace.open(root)).whole.exit_code


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("transformer", "text_encoder")),
        ({"quantize": "none"}, ("text_encoder",)),
        ({"transformer_weight": "dit.safetensors"}, ("text_encoder",)),
        ({"transformer_weight": "dit.safetensors", "quantize_text_encoder": "none"}, ()),
    ],
)
def test_what_the_config_wants_made(changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    """A denoiser that config.yaml replaces is quantized while loading; step 06 has nothing to make of it."""
    from gates import quantized

    model = {"quantize": "auto", "quantize_text_encoder": "auto", "transformer_weight": None}
    assert quantized.wanted({"model": {**model, **changes}}) == expected
