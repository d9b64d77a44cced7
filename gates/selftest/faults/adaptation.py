"""Faults of gate 05: what the device can do."""

from collections.abc import Callable
from typing import Any

from gates.selftest.faults.row import Fault, Spoil, each, fault

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


NO_NF4 = {"model.quantize": "none", "model.quantize_text_encoder": "none"}
FELL_BACK: dict[str, dict[str, Any]] = {
    "bf16-kernel": {PRECISION: "no"},
    "adam8bit-step": {"optimizer.class_path": "torch.optim.AdamW"},
    "nf4-layer": NO_NF4,
    "compile": {"train.compile": False},
}
IN_FP32 = each(
    *(
        each(
            _step(which, compute="float32", loss_device=2.0, gradient_error=1e-6, update_error=1e-6),
            _seen("dtypes", which, base=["float32"], attention=[["float32"]]),
        )
        for which in (0, 1)
    )
)

FAULTS: tuple[Fault, ...] = (
    fault("never run", {"probes-complete"}, lambda m: m.evidence(NAME).unlink(), shape="xpu"),
    fault(
        "begun and not finished",
        {"probes-complete"},
        lambda m: m.edit(m.evidence(NAME), lambda d: d.update(complete=False, data={})),
        shape="xpu",
    ),
    fault("a probe left out", {"probes-complete"}, _data(lambda d: d["probes"].pop(3)), shape="xpu"),
    fault(
        "a probe told twice",
        {"probes-complete"},
        _data(lambda d: d["probes"].append(d["probes"][0])),
        shape="xpu",
    ),
    fault("ok with a large error", {"probes-complete"}, _probe("masked-sdpa", error=0.4), shape="xpu"),
    fault("ok without an error", {"probes-complete"}, _probe("bf16-kernel", error=None), shape="xpu"),
    fault(
        "a failure without a reason",
        {"probes-complete"},
        each(_broken("compile"), _probe("compile", reason="")),
        shape="xpu",
    ),
    fault(
        "probed on another device",
        {"probes-complete"},
        _data(lambda d: d["device"].update(type="cuda")),
        shape="xpu",
    ),
    fault(
        "planned for another device",
        {"probes-complete"},
        lambda m: m.edit(m.evidence("04-plan"), lambda d: d["data"].update(device="cpu")),
        shape="xpu",
    ),
    fault(
        "precision configured since",
        {"probes-complete"},
        _config("train", mixed_precision="bf16"),
        shape="xpu",
    ),
    fault(
        "optimizer configured since",
        {"probes-complete"},
        _config("optimizer", class_path="torch.optim.SGD"),
        shape="xpu",
    ),
    fault(
        "checkpointing off since",
        {"probes-complete"},
        _config("train", gradient_checkpointing=False),
        shape="xpu",
    ),
    fault(
        "inputs not recorded",
        {"probes-complete"},
        lambda m: m.edit(m.evidence(NAME), lambda d: d["inputs"].update(config={})),
        shape="xpu",
    ),
    fault(
        "another torch since",
        {"probes-complete"},
        _environment(lambda d: d["packages"][0].update(version="2.14.0+xpu")),
        shape="xpu",
    ),
    fault(
        "another driver since",
        {"probes-complete"},
        _environment(lambda d: d["torch"]["xpu"]["devices"][0].update(driver="9.9.9")),
        shape="xpu",
    ),
    fault(
        "no fallback",
        {"fallbacks-chosen", "dtypes-consistent"},
        each(_broken("bf16-kernel"), _data(lambda d: d["choices"].pop(PRECISION))),
        shape="xpu",
    ),
    fault("bf16 all the same", {"fallbacks-chosen"}, _broken("bf16-kernel"), shape="xpu"),
    fault(
        "half a fallback",
        {"fallbacks-chosen"},
        _broken("nf4-layer", choices={"model.quantize": "none"}),
        shape="xpu",
    ),
    fault(
        "a timeout without a fallback", {"fallbacks-chosen"}, _broken("masked-sdpa", "timeout"), shape="xpu"
    ),
    fault("attention broken", {"fallbacks-chosen"}, _broken("attention-backends"), shape="xpu"),
    fault(
        "config asks for broken nf4",
        {"fallbacks-chosen"},
        each(_broken("nf4-layer", choices=NO_NF4), _config("model", quantize="nf4")),
        shape="xpu",
    ),
    fault(
        "config asks for broken bf16",
        {"fallbacks-chosen"},
        each(
            _broken("bf16-kernel", choices=FELL_BACK["bf16-kernel"]),
            _config("train", mixed_precision="bf16"),
            _inputs(**{PRECISION: "bf16"}),
        ),
        shape="xpu",
    ),
    fault(
        "config asks for broken 8-bit Adam",
        {"fallbacks-chosen"},
        each(
            _broken("adam8bit-step", choices=FELL_BACK["adam8bit-step"]),
            _config("optimizer", class_path="bitsandbytes.optim.AdamW8bit"),
            _inputs(**{"optimizer.class_path": "bitsandbytes.optim.AdamW8bit"}),
        ),
        shape="xpu",
    ),
    fault(
        "a batch that needs the broken mask",
        {"fallbacks-chosen"},
        each(_broken("masked-sdpa", choices={"data.batch_size": 1}), _config("data", batch_size=2)),
        shape="xpu",
    ),
    fault(
        "the plan counts on broken nf4",
        {"fallbacks-chosen"},
        each(_broken("nf4-layer", choices=NO_NF4), _planned(**{"model.quantize": "nf4"})),
        shape="xpu",
    ),
    fault(
        "no step on the wide block", {"step-on-device"}, _data(lambda d: d["step_parity"].pop(1)), shape="xpu"
    ),
    fault(
        "the step aborted",
        {"step-on-device"},
        _step(1, status="failed", reason="killed by SIGABRT", devices={}, dtypes={}, memory={}),
        shape="xpu",
    ),
    fault("activations on the CPU", {"step-on-device"}, _seen("devices", activations=["cpu"]), shape="xpu"),
    fault("adapter on the CPU", {"step-on-device"}, _seen("devices", adapter=["cpu", "xpu"]), shape="xpu"),
    fault("state on the CPU", {"step-on-device"}, _seen("devices", optimizer_state=["cpu"]), shape="xpu"),
    fault("gradients nowhere", {"step-on-device"}, _seen("devices", gradients=[]), shape="xpu"),
    fault("nothing allocated", {"step-on-device"}, _seen("memory", alloc_gib=0.0), shape="xpu"),
    fault("less allocated than the base", {"step-on-device"}, _seen("memory", 1, base_gib=1.4), shape="xpu"),
    fault("loss off", {"step-parity"}, _step(loss_device=2.2), shape="xpu"),
    fault("loss off and called right", {"step-parity"}, _step(loss_device=2.2, loss_error=0.0), shape="xpu"),
    fault("loss lost", {"step-parity"}, _step(loss_device=None), shape="xpu"),
    fault("gradient off", {"step-parity"}, _step(1, gradient_error=0.3), shape="xpu"),
    fault("gradient lost", {"step-parity"}, _step(1, gradient_error=None), shape="xpu"),
    fault("update off", {"step-parity"}, _step(update_error=1.0), shape="xpu"),
    fault("no gradient", {"step-parity"}, _step(gradient_norm=0.0), shape="xpu"),
    fault("no update", {"step-parity"}, _step(update_norm=None), shape="xpu"),
    fault("taken without a mask", {"step-parity"}, _step(masked=False), shape="xpu"),
    fault("adapter in bf16", {"dtypes-consistent"}, _seen("dtypes", adapter=["bfloat16"]), shape="xpu"),
    fault("state in bf16", {"dtypes-consistent"}, _seen("dtypes", optimizer_state=["bfloat16"]), shape="xpu"),
    fault(
        "8-bit state unasked",
        {"dtypes-consistent"},
        _seen("dtypes", optimizer_state=["float32", "uint8"]),
        shape="xpu",
    ),
    fault(
        "base in fp32", {"dtypes-consistent"}, _seen("dtypes", 1, base=["bfloat16", "float32"]), shape="xpu"
    ),
    fault(
        "mixed before attention",
        {"dtypes-consistent"},
        _seen("dtypes", attention=[["bfloat16"], ["bfloat16", "float32"]]),
        shape="xpu",
    ),
    fault(
        "attention in fp32", {"dtypes-consistent"}, _seen("dtypes", 1, attention=[["float32"]]), shape="xpu"
    ),
    fault("no attention seen", {"dtypes-consistent"}, _seen("dtypes", attention=[]), shape="xpu"),
    fault("another precision than configured", {"dtypes-consistent"}, IN_FP32, shape="xpu"),
    fault("it does not repeat", {"step-parity"}, _step(loss_device=2.0001)),
    fault("gradients don't repeat", {"step-parity"}, _step(gradient_error=0.01)),
    fault(
        "bf16 needs both bases",
        {"step-on-device"},
        each(
            _config("train", mixed_precision="bf16"),
            _inputs(**{PRECISION: "bf16"}),
            _step(compute="bfloat16"),
            _seen("dtypes", base=["bfloat16"], attention=[["bfloat16"]]),
        ),
    ),
)
