"""Fallbacks, what `auto` becomes, and explicit values that a probe found broken."""

from importlib import metadata
from typing import Any

import pytest

from runtime.adaptation import choices, probes
from runtime.adaptation.probes import Finding
from runtime.config import load
from runtime.config.resolve import resolve
from runtime.errors import ConfigError

GONE = "killed by SIGABRT"


def findings(*broken: str, status: Any = "failed") -> dict[str, Finding]:
    return {
        name: Finding(
            name=name,
            status=status if name in broken else "ok",
            seconds=1.0,
            reason=GONE if name in broken else "",
            error=None if name in broken else 0.004,
        )
        for name in probes.NAMES
    }


def values(device: str, *broken: str) -> dict[str, Any]:
    return {key: choice.value for key, choice in choices.choose(device, findings(*broken)).items()}


ADAMW = {"optimizer.class_path": "torch.optim.AdamW"}
BF16, FP32 = {"train.mixed_precision": "bf16"}, {"train.mixed_precision": "no"}
NO_NF4 = {"model.quantize": "none", "model.quantize_text_encoder": "none"}
EAGER = {"train.compile": False}


@pytest.mark.parametrize(
    ("device", "broken", "expected"),
    [
        ("xpu", (), BF16 | ADAMW),
        ("cpu", (), FP32 | ADAMW),
        ("xpu", ("bf16-kernel",), FP32 | ADAMW),
        ("xpu", ("adam8bit-step",), BF16 | ADAMW),
        ("cuda", ("nf4-layer",), BF16 | ADAMW | NO_NF4),
        ("xpu", ("masked-sdpa",), BF16 | ADAMW | {"data.batch_size": 1}),
        ("xpu", ("compile", "attention-backends"), BF16 | ADAMW | EAGER),
        ("xpu", probes.NAMES, FP32 | ADAMW | NO_NF4 | {"data.batch_size": 1} | EAGER),
    ],
)
def test_choose(device: str, broken: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert values(device, *broken) == expected


@pytest.mark.parametrize("status", ["failed", "timeout", "absent"])
def test_a_fallback_tells_its_probe_and_why(status: str) -> None:
    chosen = choices.choose("xpu", findings("adam8bit-step", status=status))["optimizer.class_path"]
    assert (chosen.probe, chosen.reason) == ("adam8bit-step", f"probe adam8bit-step {status}: {GONE}")


def test_every_probe_has_a_fallback_and_every_setting_a_config_key() -> None:
    from runtime.config.model import Config

    assert set(choices.FALLBACKS) == set(probes.NAMES)
    config = Config.model_validate(
        {"model": {"pretrained_model_name_or_path": "x"}, "train": {"num_epochs": 1}}
    )
    document = config.model_dump(mode="json")
    for fallback in choices.FALLBACKS.values():
        for key in fallback.settings:
            section, _, leaf = key.partition(".")
            assert leaf in document[section] and key in choices.RESTS_ON


def evidence(*broken: str, device: str = "cpu", torch: str | None = None, **changed: Any) -> dict[str, Any]:
    """The data of an evidence, as far as the runtime reads it; `changed` are choices."""
    found = findings(*broken)
    chosen = {key: choice.to_json() for key, choice in choices.choose(device, found).items()}
    chosen |= {
        key.replace("__", "."): {"value": value, "reason": "measured", "probe": "bf16-kernel"}
        for key, value in changed.items()
    }
    return {
        "device": {"type": device, "name": device, "driver": None},
        "probes": [{"name": f.name, "status": f.status, "reason": f.reason} for f in found.values()],
        "choices": chosen,
        "step_parity": [],
        "versions": {"torch": torch or metadata.version("torch")},
    }


def record(lab: Any, data: dict[str, Any]) -> None:
    lab.workspace.begin_evidence(choices.EVIDENCE, "finetune adapt").write(inputs={}, data=data)


def test_auto_is_what_was_measured(lab: Any) -> None:
    record(lab, evidence(train__mixed_precision="bf16", optimizer__class_path="torch.optim.SGD"))
    found = resolve(lab.workspace, lab.configure().config)
    assert found.config.train.mixed_precision == "bf16"
    assert found.config.optimizer.class_path == "torch.optim.SGD"
    assert found.choices["train.mixed_precision"].reason == "auto: step 05: measured"


def test_a_broken_quantizer_leaves_the_base_plain(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.planning import choices as rules
    from runtime.planning.choices import Choice

    monkeypatch.setattr(rules, "_quantize", lambda *arguments: Choice(value="nf4", reason="the rule"))
    assert resolve(lab.workspace, lab.configure().config).config.model.quantize == "nf4"
    record(lab, evidence("nf4-layer"))
    found = resolve(lab.workspace, lab.configure().config)
    assert found.config.model.quantize == "none"
    assert found.choices["model.quantize"].reason == f"auto: step 05: probe nf4-layer failed: {GONE}"


def test_what_was_given_is_kept(lab: Any) -> None:
    record(lab, evidence(train__mixed_precision="bf16"))
    found = resolve(lab.workspace, lab.configure({"train.mixed_precision": "no"}).config)
    assert (found.config.train.mixed_precision, found.choices["train.mixed_precision"].reason) == (
        "no",
        "as configured",
    )


OF_NO_USE = {
    "none": lambda lab: None,
    "begun": lambda lab: lab.workspace.begin_evidence(choices.EVIDENCE, "finetune adapt"),
    "another device": lambda lab: record(lab, evidence(device="xpu", train__mixed_precision="bf16")),
    "another torch": lambda lab: record(lab, evidence(torch="2.9.0", train__mixed_precision="bf16")),
}


@pytest.mark.parametrize("case", OF_NO_USE)
def test_without_evidence_of_this_device_the_rule_says_so(case: str, lab: Any) -> None:
    OF_NO_USE[case](lab)
    found = resolve(lab.workspace, lab.configure().config)
    for key, value in (FP32 | ADAMW).items():
        assert found.choices[key].value == value
        assert found.choices[key].reason.endswith("; not measured here yet (finetune adapt)")


REFUSED = [
    ("bf16-kernel", "train.mixed_precision", "bf16", "auto"),
    ("adam8bit-step", "optimizer.class_path", "bitsandbytes.optim.Adam8bit", "auto"),
    ("nf4-layer", "model.quantize", "nf4", "auto"),
    ("masked-sdpa", "data.batch_size", 2, 1),
]


@pytest.mark.parametrize(("probe", "key", "value", "instead"), REFUSED)
def test_what_a_probe_found_broken_is_refused(
    probe: str, key: str, value: Any, instead: Any, lab: Any
) -> None:
    config = lab.configure({"data.batch_size": 1, key: value}).config
    resolve(lab.workspace, config)
    record(lab, evidence())
    resolve(lab.workspace, config)
    record(lab, evidence(probe))
    with pytest.raises(ConfigError) as caught:
        resolve(lab.workspace, config)
    assert caught.value.message == f"{key}: {value} does not work on this cpu: probe {probe} failed: {GONE}"
    assert caught.value.remedy.startswith(f"set {key}: {instead} in config.yaml")


def test_what_avoids_it_is_not_refused(lab: Any) -> None:
    record(lab, evidence(*probes.NAMES))
    plain = {
        "train.mixed_precision": "no",
        "optimizer.class_path": "torch.optim.AdamW",
        "model.quantize": "none",
        "data.batch_size": 1,
    }
    assert resolve(lab.workspace, lab.configure(plain).config).config.model.quantize == "none"


def test_a_fit_is_refused_before_anything_is_loaded(lab: Any) -> None:
    record(lab, evidence("bf16-kernel"))
    with pytest.raises(ConfigError, match="bf16 does not work"):
        lab.launch({"train.mixed_precision": "bf16"})
    assert not lab.project.exists()


def test_the_plan_counts_on_what_was_measured(lab: Any) -> None:
    from runtime.planning.plan import make_plan

    record(lab, evidence(train__mixed_precision="bf16"))
    lab.configure()
    plan = make_plan(lab.workspace, load.load_config(lab.workspace.config_path))
    assert plan.choices["train.mixed_precision"].value == "bf16"
