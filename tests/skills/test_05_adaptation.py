"""Gate 05: healthy probes and steps pass on every device, and each planted fault turns its check and no other."""

import math
from collections.abc import Callable
from typing import Any

import pytest

Spoil = Callable[[Any], Any]
NAME = "05-adaptation"
PRECISION = "train.mixed_precision"


def _data(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(document: dict[str, Any]) -> None:
        change(document["data"])

    return lambda made: made.edit(made.evidence(NAME), spoil)


def _probe(name: str, **values: Any) -> Spoil:
    return _data(lambda data: next(p for p in data["probes"] if p["name"] == name).update(values))


def _broken(name: str, status: str = "failed", choices: dict[str, Any] | None = None) -> Spoil:
    """A probe that failed, and the choices that `finetune adapt` makes of it."""
    chosen = {
        key: {"value": value, "reason": f"probe {name} {status}: killed by SIGABRT", "probe": name}
        for key, value in (choices or {}).items()
    }

    def spoil(made: Any) -> None:
        _probe(name, status=status, reason="killed by SIGABRT", error=None)(made)
        _data(lambda data: data["choices"].update(chosen))(made)

    return spoil


def _step(which: int = 0, **values: Any) -> Spoil:
    return _data(lambda data: data["step_parity"][which].update(values))


def _seen(section: str, which: int = 0, **values: Any) -> Spoil:
    return _data(lambda data: data["step_parity"][which][section].update(values))


def _inputs(**values: Any) -> Spoil:
    return lambda made: made.edit(made.evidence(NAME), lambda d: d["inputs"]["config"].update(values))


def _config(section: str, **values: Any) -> Spoil:
    return lambda made: made.edit_config(lambda config: config.setdefault(section, {}).update(values))


def _environment(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit(made.evidence("03-environment"), lambda document: change(document["data"]))


def _planned(**values: Any) -> Spoil:
    chosen = {key: {"value": value, "reason": "auto"} for key, value in values.items()}
    return lambda made: made.edit(made.evidence("04-plan"), lambda d: d["data"]["choices"].update(chosen))


def _all(*spoils: Spoil) -> Spoil:
    return lambda made: [spoil(made) for spoil in spoils]


NO_NF4 = {"model.quantize": "none", "model.quantize_text_encoder": "none"}
FELL_BACK = {
    "bf16-kernel": {PRECISION: "no"},
    "adam8bit-step": {"optimizer.class_path": "torch.optim.AdamW"},
    "nf4-layer": NO_NF4,
    "compile": {},
}
IN_FP32 = _all(
    *(
        _all(
            _step(which, compute="float32", loss_device=2.0, gradient_error=1e-6, update_error=1e-6),
            _seen("dtypes", which, base=["float32"], attention=[["float32"]]),
        )
        for which in (0, 1)
    )
)

FAULTS: dict[str, tuple[Spoil, set[str]]] = {
    "never run": (
        lambda m: m.evidence(NAME).unlink(),
        {"probes-complete"},
    ),
    "begun and not finished": (
        lambda m: m.edit(m.evidence(NAME), lambda d: d.update(complete=False, data={})),
        {"probes-complete"},
    ),
    # probes-complete
    "a probe left out": (_data(lambda d: d["probes"].pop(3)), {"probes-complete"}),
    "a probe told twice": (_data(lambda d: d["probes"].append(d["probes"][0])), {"probes-complete"}),
    "ok with a large error": (_probe("masked-sdpa", error=0.4), {"probes-complete"}),
    "ok without an error": (_probe("bf16-kernel", error=None), {"probes-complete"}),
    "a failure without a reason": (
        _all(_broken("compile"), _probe("compile", reason="")),
        {"probes-complete"},
    ),
    "probed on another device": (
        _data(lambda d: d["device"].update(type="cuda")),
        {"probes-complete"},
    ),
    "planned for another device": (
        lambda m: m.edit(m.evidence("04-plan"), lambda d: d["data"].update(device="cpu")),
        {"probes-complete"},
    ),
    "precision configured since": (_config("train", mixed_precision="bf16"), {"probes-complete"}),
    "optimizer configured since": (
        _config("optimizer", class_path="torch.optim.SGD"),
        {"probes-complete"},
    ),
    "checkpointing off since": (_config("train", gradient_checkpointing=False), {"probes-complete"}),
    "inputs not recorded": (
        lambda m: m.edit(m.evidence(NAME), lambda d: d["inputs"].update(config={})),
        {"probes-complete"},
    ),
    "another torch since": (
        _environment(lambda d: d["packages"][0].update(version="2.14.0+xpu")),
        {"probes-complete"},
    ),
    "another driver since": (
        _environment(lambda d: d["torch"]["xpu"]["devices"][0].update(driver="9.9.9")),
        {"probes-complete"},
    ),
    # fallbacks-chosen
    "no fallback": (
        _all(_broken("bf16-kernel"), _data(lambda d: d["choices"].pop(PRECISION))),
        {"fallbacks-chosen", "dtypes-consistent"},
    ),
    "bf16 all the same": (_broken("bf16-kernel"), {"fallbacks-chosen"}),
    "half a fallback": (
        _broken("nf4-layer", choices={"model.quantize": "none"}),
        {"fallbacks-chosen"},
    ),
    "a timeout without a fallback": (_broken("masked-sdpa", "timeout"), {"fallbacks-chosen"}),
    "attention broken": (_broken("attention-backends"), {"fallbacks-chosen"}),
    "config asks for broken nf4": (
        _all(_broken("nf4-layer", choices=NO_NF4), _config("model", quantize="nf4")),
        {"fallbacks-chosen"},
    ),
    "config asks for broken bf16": (
        _all(
            _broken("bf16-kernel", choices=FELL_BACK["bf16-kernel"]),
            _config("train", mixed_precision="bf16"),
            _inputs(**{PRECISION: "bf16"}),
        ),
        {"fallbacks-chosen"},
    ),
    "config asks for broken 8-bit Adam": (
        _all(
            _broken("adam8bit-step", choices=FELL_BACK["adam8bit-step"]),
            _config("optimizer", class_path="bitsandbytes.optim.AdamW8bit"),
            _inputs(**{"optimizer.class_path": "bitsandbytes.optim.AdamW8bit"}),
        ),
        {"fallbacks-chosen"},
    ),
    "a batch that needs the broken mask": (
        _all(_broken("masked-sdpa", choices={"data.batch_size": 1}), _config("data", batch_size=2)),
        {"fallbacks-chosen"},
    ),
    "the plan counts on broken nf4": (
        _all(_broken("nf4-layer", choices=NO_NF4), _planned(**{"model.quantize": "nf4"})),
        {"fallbacks-chosen"},
    ),
    # step-on-device
    "no step on the wide block": (_data(lambda d: d["step_parity"].pop(1)), {"step-on-device"}),
    "the step aborted": (
        _step(1, status="failed", reason="killed by SIGABRT", devices={}, dtypes={}, memory={}),
        {"step-on-device"},
    ),
    "activations on the CPU": (_seen("devices", activations=["cpu"]), {"step-on-device"}),
    "adapter on the CPU": (_seen("devices", adapter=["cpu", "xpu"]), {"step-on-device"}),
    "state on the CPU": (_seen("devices", optimizer_state=["cpu"]), {"step-on-device"}),
    "gradients nowhere": (_seen("devices", gradients=[]), {"step-on-device"}),
    "nothing allocated": (_seen("memory", alloc_gib=0.0), {"step-on-device"}),
    "less allocated than the base": (_seen("memory", 1, base_gib=1.4), {"step-on-device"}),
    # step-parity
    "loss off": (_step(loss_device=2.2), {"step-parity"}),
    "loss off and called right": (_step(loss_device=2.2, loss_error=0.0), {"step-parity"}),
    "loss lost": (_step(loss_device=None), {"step-parity"}),
    "gradient off": (_step(1, gradient_error=0.3), {"step-parity"}),
    "gradient lost": (_step(1, gradient_error=None), {"step-parity"}),
    "update off": (_step(update_error=1.0), {"step-parity"}),
    "no gradient": (_step(gradient_norm=0.0), {"step-parity"}),
    "no update": (_step(update_norm=None), {"step-parity"}),
    "taken without a mask": (_step(masked=False), {"step-parity"}),
    # dtypes-consistent
    "adapter in bf16": (_seen("dtypes", adapter=["bfloat16"]), {"dtypes-consistent"}),
    "state in bf16": (_seen("dtypes", optimizer_state=["bfloat16"]), {"dtypes-consistent"}),
    "8-bit state unasked": (_seen("dtypes", optimizer_state=["float32", "uint8"]), {"dtypes-consistent"}),
    "base in fp32": (_seen("dtypes", 1, base=["bfloat16", "float32"]), {"dtypes-consistent"}),
    "mixed before attention": (
        _seen("dtypes", attention=[["bfloat16"], ["bfloat16", "float32"]]),
        {"dtypes-consistent"},
    ),
    "attention in fp32": (_seen("dtypes", 1, attention=[["float32"]]), {"dtypes-consistent"}),
    "no attention seen": (_seen("dtypes", attention=[]), {"dtypes-consistent"}),
    "another precision than configured": (IN_FP32, {"dtypes-consistent"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_its_check(fault: str, make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    spoil, expected = FAULTS[fault]
    spoil(made)
    assert_turned(judge(made, "05"), fail=expected)


@pytest.mark.parametrize("device", ["cpu", "xpu", "cuda"])
def test_healthy(device: str, make: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(make(device), "05")
    assert_turned(verdict)
    assert verdict.passes and verdict.counts["pass"] == 5 and verdict.device == device


@pytest.mark.parametrize("status", ["failed", "timeout", "absent"])
@pytest.mark.parametrize("name", ["adam8bit-step", "nf4-layer", "compile"])
def test_a_fallback_with_its_reason_is_a_pass(
    name: str, status: str, make: Any, judge: Any, assert_turned: Any
) -> None:
    made = make("xpu")
    _broken(name, status, FELL_BACK[name])(made)
    assert_turned(judge(made, "05"))


def test_fp32_where_bf16_is_broken(make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    _broken("bf16-kernel", choices=FELL_BACK["bf16-kernel"])(made)
    IN_FP32(made)
    assert_turned(judge(made, "05"))


def test_one_sample_where_masks_are_broken(make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    _broken("masked-sdpa", choices={"data.batch_size": 1})(made)
    for which in (0, 1):
        _step(which, masked=False, samples=1)(made)
    assert_turned(judge(made, "05"))


def test_8_bit_state_as_configured(make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    path = "bitsandbytes.optim.AdamW8bit"
    _all(
        _config("optimizer", class_path=path),
        _inputs(**{"optimizer.class_path": path}),
        *(_step(which, optimizer=path) for which in (0, 1)),
        *(_seen("dtypes", which, optimizer_state=["float32", "uint8"]) for which in (0, 1)),
    )(made)
    assert_turned(judge(made, "05"))


def test_an_optimizer_without_state(make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    for which in (0, 1):
        _seen("devices", which, optimizer_state=[])(made)
        _seen("dtypes", which, optimizer_state=[])(made)
    assert_turned(judge(made, "05"))


CPU_FAULTS: dict[str, tuple[Spoil, set[str]]] = {
    "it does not repeat": (_step(loss_device=2.0001), {"step-parity"}),
    "gradients don't repeat": (_step(gradient_error=0.01), {"step-parity"}),
    "bf16 needs both bases": (
        _all(
            _config("train", mixed_precision="bf16"),
            _inputs(**{PRECISION: "bf16"}),
            _step(compute="bfloat16"),
            _seen("dtypes", base=["bfloat16"], attention=[["bfloat16"]]),
        ),
        {"step-on-device"},
    ),
}


@pytest.mark.parametrize("fault", CPU_FAULTS)
def test_on_a_cpu(fault: str, made: Any, judge: Any, assert_turned: Any) -> None:
    spoil, expected = CPU_FAULTS[fault]
    spoil(made)
    assert_turned(judge(made, "05"), fail=expected)


def test_a_cpu_says_that_it_is_its_own_reference(made: Any, judge: Any) -> None:
    check = next(c for c in judge(made, "05").checks if c.id == "step-parity")
    assert check.message == "the CPU in fp32 is the reference itself: it repeats"


def test_a_number_that_json_does_not_have_never_passes(make: Any, judge: Any) -> None:
    made = make("xpu")
    _step(gradient_error=math.nan)(made)
    assert judge(made, "05").outcome == "error"


REMEDIES = {
    "config asks for broken nf4": (
        "set model.quantize: auto in config.yaml, then finetune plan, then finetune adapt"
    ),
    "a batch that needs the broken mask": (
        "set data.batch_size: 1 in config.yaml, then finetune plan, then finetune adapt"
    ),
    "the plan counts on broken nf4": "finetune plan",
    "never run": "finetune adapt",
    "another torch since": "finetune adapt",
}


@pytest.mark.parametrize("fault", REMEDIES)
def test_remedies(fault: str, make: Any, judge: Any) -> None:
    made = make("xpu")
    FAULTS[fault][0](made)
    verdict = judge(made, "05")
    assert verdict.next_command == REMEDIES[fault]
    if "broken" in fault:
        assert "killed by SIGABRT" in next(c for c in verdict.checks if c.status == "fail").message
