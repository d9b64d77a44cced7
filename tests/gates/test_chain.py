import json
from typing import Any

import pytest

from gates import chain, registry
from gates.verdict import Verdict
from gates.workspace import Workspace


def _judge(made: Any, number: str = "07", **options: Any) -> list[Verdict]:
    return [judged.whole for judged in chain.judge_up_to(Workspace.open(made.root), number, **options)]


def test_a_healthy_chain(made: Any) -> None:
    assert {v.gate: v.outcome for v in _judge(made)} == dict.fromkeys(registry.up_to("07"), "passed")


def test_the_first_that_fails_blocks_those_after_it(made: Any) -> None:
    (made.dataset / "training_images/s05.txt").write_text("", encoding="utf-8")
    before, dataset, *after = _judge(made)
    assert before.passes and (dataset.outcome, dataset.first_failure) == ("failed", "manifest-matches-files")
    for verdict in after:
        assert (verdict.verdict, verdict.outcome, verdict.blocked_by) == ("FAIL", "blocked", "02")
        assert verdict.exit_code == 1 and verdict.next_command == dataset.next_command == "finetune dataset"
        assert {check.status for check in verdict.checks} == {"skip"}
        assert len(verdict.checks) == len(registry.load(verdict.gate).specs)


def test_no_stored_verdict_is_trusted(made: Any) -> None:
    for judged in chain.judge_up_to(Workspace.open(made.root), "07"):
        judged.write(Workspace.open(made.root))
    stored = json.loads((made.root / ".gates/verdicts/02.json").read_text(encoding="utf-8"))
    assert stored["verdict"] == "PASS"
    (made.dataset / "training_images/s05.txt").unlink()
    blocked = ["blocked"] * (len(registry.up_to("07")) - 2)
    assert [v.outcome for v in _judge(made)] == ["passed", "failed", *blocked]


def test_a_verdict_is_a_function_of_the_workspace(made: Any) -> None:
    once, again = _judge(made), _judge(made)
    assert [v.judgement_digest for v in once] == [v.judgement_digest for v in again]
    made.edit(made.run("full") / "run.json", lambda document: document.update(pid=2))
    changed = [
        a.gate for a, b in zip(once, _judge(made), strict=True) if a.judgement_digest != b.judgement_digest
    ]
    assert changed == ["07"]


def test_no_absolute_path_and_no_host_in_a_verdict(made: Any) -> None:
    for verdict in _judge(made):
        assert str(made.root) not in json.dumps(verdict.to_json())


def test_an_exception_in_a_gate_is_an_error_and_never_a_pass(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = registry.load("04")

    def collect(workspace: Workspace) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(
        registry, "load", lambda number: _with(gate, collect) if number == "04" else _LOAD(number)
    )
    verdicts = {verdict.gate: verdict for verdict in _judge(made)}
    config, training = verdicts["04"], verdicts["07"]
    assert all(verdict.passes for number, verdict in verdicts.items() if number < "04")
    assert (config.verdict, config.outcome, config.exit_code) == ("FAIL", "error", 3)
    assert config.first_failure == "schema-valid"
    assert {check.message for check in config.checks} == {"RuntimeError: out of luck"}
    assert {check.remedy for check in config.checks} == {"report it with .gates/error.log"}
    assert training.blocked_by == "04"
    assert "out of luck" in (made.root / ".gates/error.log").read_text(encoding="utf-8")


_LOAD = registry.load


def _with(gate: Any, collect: Any) -> Any:
    from dataclasses import replace

    return replace(gate, collect=collect)


def test_a_gate_that_cannot_be_loaded_is_an_error(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(number: str) -> Any:
        raise ImportError("no such file")

    monkeypatch.setattr(registry, "load", load)
    (verdict,) = _judge(made, "01")
    assert (verdict.outcome, verdict.exit_code) == ("error", 3) and "no such file" in verdict.summary
    judged = chain.judge_up_to(Workspace.open(made.root), "01")[0]
    judged.write(Workspace.open(made.root))


def test_a_broken_target_is_an_error(made: Any) -> None:
    (made.root / ".gates/target.json").write_text('{"schema": "target/1"}', encoding="utf-8")
    assert _judge(made, "02")[0].outcome == "error"


@pytest.mark.parametrize("text", ['{"schema": "target/1"}', '{"schema": "tar', ""])
def test_a_damaged_target_leads_to_init(text: str, made: Any) -> None:
    (made.root / ".gates/target.json").write_text(text, encoding="utf-8")
    host = _judge(made, "01")[0]
    assert host.next_command == "finetune init --model MODEL --dataset FOLDER"
    assert {check.remedy for check in host.checks} == {host.next_command}


@pytest.mark.parametrize("what", ["dataset", "model"])
def test_a_damaged_local_json_leads_to_init(what: str, made: Any) -> None:
    """Whichever gate needs it first says so, and blames nothing else."""
    outside = made.root.parent / "outside"
    place = made.dataset if what == "dataset" else made.root / "models" / "base"
    place.rename(outside)
    local = made.root / ".gates/local.json"
    local.write_text(json.dumps({"external": {what: str(outside)}}), encoding="utf-8")
    made.edit(".gates/target.json", lambda d: d.update({what: f"external:{what}"}))
    if what == "dataset":
        made.edit(made.evidence("02-dataset"), lambda d: d["data"].update(root="external:dataset"))
    else:
        made.edit_config(lambda c: c["model"].update(pretrained_model_name_or_path="external:model"))
        made.edit(made.evidence("01-host"), lambda d: d["data"]["base"].update(reference="external:model"))
    local.write_text('{"external": ', encoding="utf-8")
    failing = next(v for v in _judge(made, "04") if not v.passes)
    assert failing.gate == {"dataset": "02", "model": "04"}[what]
    assert failing.next_command == "finetune init --model MODEL --dataset FOLDER"
    assert ".gates/local.json" in failing.first_check.message


@pytest.mark.parametrize(("number", "name", "command"), [
    ("01", "01-host", "finetune probe --host"),
    ("03", "03-environment", "finetune probe --environment"),
    ("08", "08-validation", "finetune validate"),
])  # fmt: skip
def test_damaged_evidence_leads_to_what_makes_it(number: str, name: str, command: str, made: Any) -> None:
    path = made.evidence(name)
    path.write_bytes(path.read_bytes()[:-20])
    failing = next(v for v in _judge(made, "08") if not v.passes)
    assert (failing.gate, failing.next_command) == (number, command)


def test_phase_verdicts_are_those_of_their_checks(made: Any) -> None:
    made.edit_lines(made.run("full") / "metrics.jsonl", lambda lines: lines[3].update(loss=None))
    judged = chain.judge_up_to(Workspace.open(made.root), "07")[-1]
    assert [judged.of(phase).verdict for phase in ("cache", "smoke", "full")] == ["PASS", "PASS", "FAIL"]
    assert judged.of("cache").next_command == "finetune fit --smoke"
    assert judged.of("smoke").run == "outputs/edit-lora/v0"
    assert judged.whole.first_failure == judged.of("full").first_failure == "loss-finite"


def test_next_command_is_the_first_failures_remedy(made: Any) -> None:
    made.evidence("04-plan").unlink()
    assert _judge(made, "04")[-1].next_command == "finetune plan"


def test_external_dataset_and_model(made: Any) -> None:
    """What lies outside of the workspace is named, and its place is this machine's secret."""
    outside = made.root.parent / "outside"
    made.dataset.rename(outside)
    local = {"external": {"dataset": str(outside)}}
    (made.root / ".gates/local.json").write_text(json.dumps(local), encoding="utf-8")
    made.edit(".gates/target.json", lambda d: d.update(dataset="external:dataset"))

    def move(document: Any) -> None:
        document["data"]["root"] = "external:dataset"
        document["data"]["sources"][0].update(root="external:dataset", origin="external:dataset")

    made.edit(made.evidence("02-dataset"), move)
    assert {v.outcome for v in _judge(made)} == {"passed"}
    (made.root / ".gates/local.json").write_text("{}", encoding="utf-8")
    assert _judge(made)[1].outcome == "error"
    (made.root / ".gates/local.json").unlink()
    verdict = _judge(made)[1]
    assert (verdict.outcome, verdict.next_command) == ("failed", "finetune init --dataset PATH")
