"""gate check 05: is it known what this device can do, and does a training step on it give the right numbers?"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gates import checkout
from gates.checks import Checks, Evidence, Finding, Gate, failed, listing, skipped, verdict_of
from gates.evidence import Reading, attempt
from gates.verdict import Check, EvidenceRef
from gates.workspace import Workspace

# Each probe, and the settings that avoid what it tried. None: nothing can stand in for it.
PROBES: dict[str, dict[str, Any] | None] = {
    "bf16-kernel": {"train.mixed_precision": "no"},
    "adam8bit-step": {"optimizer.class_path": "torch.optim.AdamW"},
    "nf4-layer": {"model.quantize": "none", "model.quantize_text_encoder": "none"},
    "masked-sdpa": {"data.batch_size": 1},
    "attention-backends": None,
    "compile": {"train.compile": False},
}
# Explicit values that ask for what a probe tried.
ASKS: dict[str, Callable[[Any], bool]] = {
    "train.mixed_precision": lambda value: value == "bf16",
    "optimizer.class_path": lambda value: "8bit" in value,
    "model.quantize": lambda value: value == "nf4",
    "model.quantize_text_encoder": lambda value: value == "nf4",
    "data.batch_size": lambda value: value > 1,
    "train.compile": lambda value: value is True,
}
PROBE_ERROR_MAX = (
    0.05  # relative; bf16 keeps 8 bits (0.004), 8-bit Adam gave 0.007, and a wrong kernel 0.3 or more
)

EMBEDDED_BASE, TRUE_WIDTH = "embedded base", "block of true width"
WHERE = ("base", "adapter", "activations", "gradients", "optimizer_state")
RESIDENT_SHARE_MIN = 0.5  # of the base's bytes, which lie on the device while the step is taken
# Relative to the CPU in fp32. In bf16 on a CPU measured: loss 0.002, gradient 0.065, update 0.25; Adam's first
# update is nearly the gradient's sign, so rounding turns the smallest. A wrong kernel gives 1 for all three.
# In fp32 the order of sums is all that may differ.
PARITY_MAX = {
    "bfloat16": {"loss": 0.02, "gradient": 0.15, "update": 0.5},
    "float32": {"loss": 1e-5, "gradient": 1e-3, "update": 0.02},
}
COMPUTE = {"no": "float32", "bf16": "bfloat16"}
USED = (
    "hardware.device", "optimizer.class_path", "train.gradient_checkpointing", "train.mixed_precision",
)  # fmt: skip
PACKAGES = ("torch", "bitsandbytes", "diffusers", "peft")

GUARDS = (
    "missing-step-guard",
    "missing-epoch-break",
)  # findings of step-guard-present; all others are CUDA's
NO_CHECKOUT = "no other trainer's checkout was scanned"

EVIDENCE = ".gates/evidence/05-adaptation.json"
SCANNED = EvidenceRef(path=EVIDENCE, locator="/data/scan")
ADAPT = "finetune adapt"
ENVIRONMENT = "finetune probe --environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation(Evidence):
    record: Reading[dict[str, Any]]
    """evidence 05-adaptation with its envelope"""
    plan: Reading[dict[str, Any]]
    settings: Reading[dict[str, Any]]
    """config.yaml with defaults"""
    environment: Reading[dict[str, Any]]
    """evidence 03-environment with its envelope"""
    scan: Mapping[str, Any] | None
    """what `finetune adapt --scan` recorded of another trainer's checkout; None: it trains with none"""
    source: Reading[checkout.Checkout | None]
    """the checkout as it is now; None where it is not on this machine"""

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.record.get()["data"]
        return data

    @property
    def probes(self) -> dict[str, dict[str, Any]]:
        return {probe["name"]: probe for probe in self.data["probes"]}

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        return {step["what"]: step for step in self.data["step_parity"]}

    @property
    def compute(self) -> str:
        """The dtype in which the fit computes here."""
        precision = setting(self.settings.get(), "train.mixed_precision")
        if precision == "auto":
            precision = self.data["choices"].get("train.mixed_precision", {}).get("value")
        return COMPUTE.get(str(precision), str(precision))

    @property
    def wanted_steps(self) -> tuple[str, ...]:
        """On the CPU in fp32 the step is its own reference, and one base is enough to see that it repeats."""
        if (self.data["device"]["type"], self.compute) == ("cpu", "float32"):
            return (EMBEDDED_BASE,)
        return (EMBEDDED_BASE, TRUE_WIDTH)


def collect(workspace: Workspace) -> Adaptation:
    record = attempt(lambda: workspace.record("05-adaptation"))
    scan = record.value["data"].get("scan") if record.value else None
    return Adaptation(
        record=record,
        plan=attempt(lambda: workspace.evidence("04-plan")),
        settings=attempt(lambda: workspace.settings),
        environment=attempt(lambda: workspace.record("03-environment")),
        scan=scan,
        source=attempt(lambda: checkout.read(workspace, scan)) if scan else Reading(),
        device=record.value["data"]["device"]["type"] if record.value else None,
        inputs=tuple(workspace.inputs.values()),
    )


def setting(settings: Mapping[str, Any], dotted: str) -> Any:
    value: Any = settings
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


CHECKS: Checks[Adaptation] = Checks()


@CHECKS.check(
    "probes-complete",
    title="Every capability was probed, on this device, with these packages and settings",
    section="5.1",
    remedy=ADAPT,
    why="a capability that nobody tried fails in the fit, as an abort without a message after hours",
)
def probes_complete(e: Adaptation) -> Finding:
    """A result for each probe, backed by its error; device, packages, driver and config keys against those of now."""
    seen = e.probes
    faults = [*_stale(e), *_moved(e)]
    faults += [f"{name} was not probed" for name in PROBES if name not in seen]
    if len(seen) != len(e.data["probes"]):
        faults.append("a probe is listed twice")
    for name, probe in seen.items():
        if probe["status"] == "ok" and not _within(probe["error"], PROBE_ERROR_MAX):
            faults.append(f"{name} is called ok with an error of {probe['error']}")
        if probe["status"] != "ok" and not probe["reason"]:
            faults.append(f"{name} {probe['status']} without a reason")
    bad = [f"{name} {probe['status']}" for name, probe in seen.items() if probe["status"] != "ok"]
    return verdict_of(
        not faults,
        listing(faults) or (f"all work but {', '.join(bad)}" if bad else "all work"),
        expected=dict.fromkeys(PROBES, "a result"),
        observed={name: probe["status"] for name, probe in seen.items()},
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/probes"),),
        remedy=ENVIRONMENT if any(_moved(e)) and _older_environment(e) else None,
    )


def _stale(e: Adaptation) -> Iterator[str]:
    """What has changed since the probes ran, one line each."""
    device, planned = e.data["device"], e.plan.get()["device"]
    if device["type"] != planned:
        yield f"probed on {device['type']}, the plan is for {planned}"
    settings = e.settings.get()
    used = e.record.get()["inputs"]["config"]
    for key in USED:
        if used.get(key) != setting(settings, key):
            yield f"{key}: {used.get(key)} when probed, {setting(settings, key)} now"


def _moved(e: Adaptation) -> Iterator[str]:
    """Where the environment on record is another than that of the probes, one line each."""
    device, environment = e.data["device"], e.environment.get()["data"]
    listed = {item["name"]: item["version"] or "absent" for item in environment["packages"]}
    for name in PACKAGES:
        if name in listed and e.data["versions"].get(name) != listed[name]:
            yield f"{name} {e.data['versions'].get(name)} when probed, {listed[name]} now"
    now = environment["torch"].get(device["type"], {}).get("devices", [])
    drivers = [item["driver"] for item in now if item["driver"]]
    if drivers and device["driver"] not in drivers:
        yield f"driver {device['driver']} when probed, {drivers[0]} now"


def _older_environment(e: Adaptation) -> bool:
    """Then it is step 03 that has to look again: the probes would only measure what they did."""
    older: bool = e.environment.get()["measured_at"] < e.record.get()["measured_at"]
    return older


def _within(error: float | None, limit: float) -> bool:
    return error is not None and math.isfinite(error) and error <= limit


@CHECKS.check(
    "fallbacks-chosen",
    title="What does not work here is avoided",
    section="5.2",
    remedy=ADAPT,
    needs=("probes-complete",),
    why="a config that asks for what the device can't do aborts, or trains on wrong numbers",
)
def fallbacks_chosen(e: Adaptation) -> Finding:
    """For each probe that is not ok: its fallback among the choices, against the plan and config.yaml."""
    broken = {name: probe for name, probe in e.probes.items() if probe["status"] != "ok"}
    chosen = e.data["choices"]
    expected: dict[str, Any] = {}
    for name, probe in broken.items():
        fallback = PROBES.get(name)
        if fallback is None:
            return failed(
                f"{name} {probe['status']}: {probe['reason']}; nothing can stand in for it",
                expected="ok",
                observed=probe["status"],
                remedy="install the newest driver of the device, reboot, finetune adapt",
            )
        expected |= fallback
    faults = [
        f"{key} should fall back to {value}, the choice is {chosen.get(key, {}).get('value', 'missing')}"
        for key, value in expected.items()
        if key not in chosen or chosen[key]["value"] != value
    ]
    if not faults:
        for key, value in expected.items():
            if finding := _contradiction(e, key, value):
                return finding
    return verdict_of(
        not faults,
        listing(faults) or (f"{len(expected)} settings fall back" if expected else "nothing has to"),
        expected=expected,
        observed={key: choice["value"] for key, choice in chosen.items()},
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/choices"),),
    )


def _contradiction(e: Adaptation, key: str, fallback: Any) -> Finding | None:
    """config.yaml or the plan asking for what the probe of `key` found not to work."""
    configured = setting(e.settings.get(), key)
    reason = e.data["choices"][key]["reason"]
    if configured not in ("auto", None) and ASKS[key](configured):
        instead = fallback if key == "data.batch_size" else "auto"
        return failed(
            f"config.yaml sets {key}: {configured}, which does not work here: {reason}",
            expected=fallback,
            observed=configured,
            remedy=f"set {key}: {instead} in config.yaml, then finetune plan, then finetune adapt",
        )
    planned = e.plan.get()["choices"].get(key, {}).get("value", fallback)
    if configured == "auto" and planned != fallback:
        return failed(
            f"the plan counts on {key}: {planned}, which does not work here: {reason}",
            expected=fallback,
            observed=planned,
            remedy="finetune plan",
        )
    return None


@CHECKS.check(
    "step-on-device",
    title="A training step ran on the target's device",
    section="5.3",
    remedy="gate check 03, then finetune adapt",
    needs=("probes-complete",),
    why="a run that falls back to the CPU takes days, and passes every other check",
)
def step_on_device(e: Adaptation) -> Finding:
    """Where weights, adapter, activations, gradients and optimizer state were, read in the process that trained."""
    device = e.data["device"]["type"]
    faults = [fault for what in e.wanted_steps for fault in _place_faults(e.steps.get(what), what, device)]
    told = (
        "read in the process; nothing is allocated elsewhere" if device == "cpu" else e.data["device"]["name"]
    )
    return verdict_of(
        not faults,
        listing(faults) or f"{', '.join(e.wanted_steps)}: on {device} ({told})",
        expected=device,
        observed={what: step["devices"] for what, step in e.steps.items()},
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/step_parity"),),
    )


def _place_faults(step: Mapping[str, Any] | None, what: str, device: str) -> Iterator[str]:
    if step is None or step["status"] != "ok":
        yield f"{what}: {step['reason'] or step['status']}" if step else f"{what}: no step was taken"
        return
    for name in WHERE:
        places = step["devices"].get(name, [])
        if places != [device] and not (name == "optimizer_state" and places == []):  # SGD has none
            yield f"{what}: {name} on {', '.join(places) or 'nothing'}"
    memory = step["memory"]
    if device != "cpu":
        resident, base = memory.get("alloc_gib", 0.0), memory.get("base_gib", math.nan)
        if not (resident > 0 and resident >= RESIDENT_SHARE_MIN * base):
            yield f"{what}: {resident:.3f} GiB allocated on {device}, the base alone has {base:.3f}"


@CHECKS.check(
    "step-parity",
    title="The step gives the numbers that the CPU gives in fp32",
    section="5.4",
    remedy="install the newest driver of the device, reboot, finetune adapt",
    needs=("step-on-device",),
    why="a kernel that is wrong by half trains to a smooth loss curve and a useless adapter",
)
def step_parity(e: Adaptation) -> Finding:
    """Loss, gradient and update of the adapter after one step, relative to the same step on the CPU in fp32."""
    faults, observed = [], {}
    for what in e.wanted_steps:
        step = e.steps[what]
        limits = PARITY_MAX.get(step["compute"] or "", {})
        errors = {
            "loss": _relative(step["loss_device"], step["loss_reference"]),
            "gradient": step["gradient_error"],
            "update": step["update_error"],
        }
        observed[what] = errors
        for name, error in errors.items():
            if not _within(error, limits.get(name, -1.0)):
                faults.append(f"{what}: {name} is off by {error}, at most {limits.get(name)}")
        faults += [
            f"{what}: the {name} is {step[f'{name}_norm']}"
            for name in ("gradient", "update")
            if not (step[f"{name}_norm"] or 0.0) > 0.0
        ]
        if e.probes["masked-sdpa"]["status"] == "ok" and not step["masked"]:
            faults.append(f"{what}: taken without a mask, though masked attention works")
    alone = e.wanted_steps == (EMBEDDED_BASE,)
    return verdict_of(
        not faults,
        listing(faults)
        or ("the CPU in fp32 is the reference itself: it repeats" if alone else "within rounding"),
        expected=PARITY_MAX.get(e.compute, {}),
        observed=observed,
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/step_parity"),),
    )


def _relative(found: float | None, exact: float | None) -> float | None:
    return abs(found - exact) / abs(exact) if found is not None and exact else None


@CHECKS.check(
    "dtypes-consistent",
    title="Each tensor has the precision that it should have",
    section="5.5",
    remedy="set train.mixed_precision: auto in config.yaml, then finetune plan, then finetune adapt",
    needs=("step-on-device",),
    why="an adapter in bf16 loses small updates, and mixed types before attention stop a run or slow it down",
)
def dtypes_consistent(e: Adaptation) -> Finding:
    """dtypes of adapter, optimizer state and base, and of what reached attention, seen in the step's process."""
    faults = [fault for what in e.wanted_steps for fault in _dtype_faults(e.steps[what], what, e.compute)]
    return verdict_of(
        not faults,
        listing(faults) or f"adapter and optimizer state in float32, compute in {e.compute}",
        expected={"adapter": "float32", "optimizer_state": "float32", "compute": e.compute},
        observed={what: e.steps[what]["dtypes"] for what in e.wanted_steps},
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/step_parity"),),
    )


def _dtype_faults(step: Mapping[str, Any], what: str, compute: str) -> Iterator[str]:
    seen = step["dtypes"]
    if step["compute"] != compute:
        yield f"{what}: taken in {step['compute']}, the fit computes in {compute}"
    state = {"float32", "uint8"} if "8bit" in step["optimizer"] else {"float32"}
    for name, kinds, allowed in (
        ("adapter", seen.get("adapter", []), {"float32"}),
        ("optimizer_state", seen.get("optimizer_state", ["nothing"]), state),
        ("base", seen.get("base", []), {compute}),
    ):
        if not set(kinds) <= allowed or (not kinds and name != "optimizer_state"):
            yield f"{what}: {name} in {', '.join(kinds) or 'nothing'}, expected {', '.join(sorted(allowed))}"
    calls = seen.get("attention", [])
    if not calls:
        yield f"{what}: no attention was seen"
    for kinds in calls:
        if kinds != [compute]:
            yield f"{what}: attention got {', '.join(kinds)}, expected {compute}"


@CHECKS.check(
    "no-cuda-only-calls",
    title="The other trainer's code calls nothing that only CUDA has",
    section="5.6",
    remedy=f"mend the lines as the scan says, then {checkout.RESCAN}",
    needs=("probes-complete",),
    may_skip=NO_CHECKOUT,
    why="such a call ends the run, does nothing, or leaves the work to the CPU",
)
def no_cuda_only_calls(e: Adaptation) -> Finding:
    """Findings of the scan but its loops; the checkout's digest now, and calls that the gate itself reads there."""
    return skipped(NO_CHECKOUT) if e.scan is None else checkout.judge_calls(e.scan, e.source, SCANNED)


@CHECKS.check(
    "step-guard-present",
    title="The other trainer's loops stop at max_train_steps",
    section="5.6",
    remedy=f"leave both loops at max_train_steps, then {checkout.RESCAN}",
    needs=("probes-complete",),
    may_skip=NO_CHECKOUT,
    why="without it 5 steps become all epochs over all samples, and each epoch saves again",
)
def step_guard_present(e: Adaptation) -> Finding:
    """Each loop in which an optimizer steps, and each over epochs around one: the line on which the limit leaves it."""
    return skipped(NO_CHECKOUT) if e.scan is None else checkout.judge_loops(e.scan, e.source, SCANNED)


def judge(evidence: Adaptation) -> list[Check]:
    return CHECKS.run(evidence)


GATE = Gate(
    number="05",
    name="adaptation",
    skill="qwen-image-edit-aipc-finetune-05-adaptation",
    purpose="what this device can really do: probes, fallbacks, parity",
    collect=collect,
    judge=judge,
    specs=tuple(CHECKS.specs),
    next_commands={None: "finetune quantize"},
)
