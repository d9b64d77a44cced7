"""gate check 06: are the NF4 weights whole, small and close to the base, or is the step rightly left out?

What was finished is judged, whatever a skip says: a skip counts only where evidence 06-quantize is absent or
was begun and not finished.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gates import packed, plans, quantized
from gates.checks import Checks, Evidence, Finding, Gate, excuse, failed, listing, verdict_of
from gates.evidence import MissingEvidenceError, Reading, attempt
from gates.quantized import EVIDENCE, FOLDER, REMEDY, SKIP, Component, Quantized
from gates.verdict import Check, EvidenceRef
from gates.workspace import Workspace

MEAN_ERROR_MAX = 0.12  # relative; NF4 of normally distributed weights in blocks of 64 gives 0.092
LAYER_ERROR_MAX = 0.20  # heavy tails reach 0.15; scales of another layer, or garbled ones, give 0.3 and more
REMEASURED_MAX = 0.005  # between the recorded error of a layer and the same made anew: rounding of scales
OUTPUT_ERROR_MAX = 0.50  # one broken layer moves the denoiser's answer by about its own norm
KEPT_SHARE_MAX = 0.25  # of what could be NF4; with more left out the plan, which counts NF4, is not true
RECORDED_SHARE_MAX = 0.01  # between recorded and counted size, which are counted alike

DONE = "a deliberate skip stands in for the step"
NOT_SKIPPED = "nothing says to skip the step, or it was finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization(Evidence):
    quantized: Reading[Quantized]
    settings: Reading[dict[str, Any]]
    """config.yaml with defaults"""
    skip: Reading[dict[str, Any]] | None
    """what stands in .gates/skips/06.json, where it counts"""
    plan: Reading[dict[str, Any]]
    config_digest: Reading[str]

    @property
    def components(self) -> tuple[Component, ...]:
        return self.quantized.get().components


def collect(workspace: Workspace) -> Quantization:
    found = attempt(lambda: quantized.read(workspace))
    skip = quantized.read_skip(workspace)
    if not isinstance(found.error, MissingEvidenceError):
        skip = None
    return Quantization(
        quantized=found,
        settings=attempt(lambda: workspace.settings),
        skip=skip,
        plan=attempt(lambda: workspace.evidence("04-plan")),
        config_digest=attempt(workspace.config_digest),
        skip_reason=skip.value["reason"] if skip is not None and skip.value else None,
        inputs=tuple(sorted(workspace.inputs.values(), key=lambda item: item.path)),
    )


MADE: Checks[Quantization] = Checks()


@MADE.check(
    "components-present",
    title="Each component that the config wants as NF4 was made",
    section="6.2",
    remedy=REMEDY,
    may_skip=DONE,
    why="a missing one is quantized while loading, or keeps four times the memory, and the plan is wrong",
)
def components_present(e: Quantization) -> Finding:
    """Components of the evidence, and their files, against those that config.yaml does not set to none."""
    wanted = quantized.wanted(e.settings.get())
    if not wanted:
        return failed(
            "config.yaml sets both components to none: there is nothing to make",
            expected="a component, or a deliberate skip",
            observed="none",
            remedy='gate skip 06 --reason "plain weights, as config.yaml says"',
        )
    there = {component.name: component for component in e.components}
    faults = [f"{name} was not made" for name in wanted if name not in there]
    faults += [fault for name in there for fault in there[name].file_faults if fault.endswith(" is missing")]
    return verdict_of(
        not faults,
        listing(faults) or ", ".join(f"{FOLDER}/{name}" for name in there),
        expected=list(wanted),
        observed=sorted(there),
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/components"),),
    )


NEEDS = ("components-present",)


@MADE.check(
    "quantization-recorded",
    title="The weights are what was recorded, and NF4 as bitsandbytes reads it",
    section="6.3",
    remedy=REMEDY,
    needs=NEEDS,
    may_skip=DONE,
    why="an edited or half-copied file loads without a word, and trains an adapter on noise",
)
def quantization_recorded(e: Quantization) -> Finding:
    """Digests of files; quantization_config; names, shapes and states of tensors, against the base's."""
    faults = [fault for component in e.components for fault in packed.recording_faults(component)]
    told = ", ".join(f"{component.name}: {len(component.packed)} linears" for component in e.components)
    return verdict_of(
        not faults, listing(faults) or told, expected=0, observed=len(faults), unit="faults",
        evidence=tuple(EvidenceRef(path=f"{component.path}/config.json") for component in e.components),
    )  # fmt: skip


@MADE.check(
    "size-ratio",
    title="NF4 is as small as it must be",
    section="6.3",
    remedy="finetune quantize, without --keep or with fewer patterns",
    needs=("components-present", "quantization-recorded"),
    may_skip=DONE,
    why="weights that stayed plain, or scales that were not quantized again, don't fit where the plan put them",
)
def size_ratio(e: Quantization) -> Finding:
    """Bytes of tensors against those that their shapes need as NF4; what was kept; the recorded sizes."""
    faults, observed, expected = [], {}, {}
    for component in e.components:
        found, record = packed.sizes(component), component.record
        observed[component.name] = round(found.ratio, 4)
        expected[component.name] = f"<= {found.expected_ratio:.4f}"
        if not found.made <= found.expected:
            faults.append(f"{component.name} takes {found.made} bytes, {found.expected} at most are needed")
        if not found.kept_share <= KEPT_SHARE_MAX:
            faults.append(f"{component.name}: {found.kept_share:.0%} of what could be NF4 was kept")
        for name, size in (("source_gib", found.source), ("made_gib", found.made)):
            if not abs(record[name] - size / 2**30) <= RECORDED_SHARE_MAX * size / 2**30:
                faults.append(
                    f"{component.name}: {name} {record[name]:.3f} recorded, {size / 2**30:.3f} counted"
                )
    return verdict_of(
        not faults, listing(faults), expected=expected, observed=observed, unit="of the base's size"
    )


@MADE.check(
    "error-bounded",
    title="The weights are close to the base's",
    section="6.4",
    remedy="finetune quantize --keep NAME, for the layers named",
    needs=NEEDS,
    may_skip=DONE,
    why="one broken layer is enough to turn every picture into noise",
)
def error_bounded(e: Quantization) -> Finding:
    """Recorded relative errors, mean and worst; some layers dequantized anew; the denoiser's output.

    Of weights that somebody else made of a base that is not here as bf16 nothing can be measured; nor can the
    denoiser's output where the base's shards were dropped. The message says so.
    """
    faults: list[str] = []
    again = 0
    for component in e.components:
        layers = packed.measured(component)
        again += len(layers)
        faults += _error_faults(component, layers)
    output = e.quantized.get().data["output_error"]["value"]
    faults += _output_faults(output, e.components)
    records = [component.record for component in e.components if component.record["worst"]]
    return verdict_of(
        not faults,
        listing(faults) or "; ".join([f"{again} layers measured anew", *_unmeasured(e.components, output)]),
        expected={"mean": f"<= {MEAN_ERROR_MAX}", "worst": f"<= {LAYER_ERROR_MAX}"},
        observed={
            "mean": max((round(record["mean_error"], 4) for record in records), default=None),
            "worst": max((round(record["worst"][0]["error"], 4) for record in records), default=None),
            "output": output,
        },
        remedy=_keep(e.components) or (REMEDY if faults and output is None else None),
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/components"),),
    )


def _keep(components: tuple[Component, ...]) -> str | None:
    """The command that leaves the bad layers plain, and those that are so already."""
    for component in components:
        record = component.record
        bad = [item["name"] for item in record["worst"] if not item["error"] <= LAYER_ERROR_MAX]
        if bad and not component.is_taken:
            patterns = " ".join(f'--keep "{name}"' for name in (*record.get("keep", ()), *bad))
            return f"finetune quantize --component {component.name} {patterns}"
    return None


def _output_faults(output: float | None, components: tuple[Component, ...]) -> Iterator[str]:
    """An output that was not measured is excused where some of the plain denoiser is not here to be asked."""
    if output is not None:
        if not output <= OUTPUT_ERROR_MAX:
            yield f"the denoiser's output is {output:.0%} off, at most {OUTPUT_ERROR_MAX:.0%} may be"
        return
    for component in components:
        if component.name == "transformer" and len(component.measurable) == len(component.plain or {}) > 0:
            yield "the output of the denoiser was not measured, though the base's own is here"


def _unmeasured(components: tuple[Component, ...], output: float | None) -> Iterator[str]:
    for component in components:
        why = _absence(component)
        if not component.measurable:
            yield (
                f"{component.name}: by what was recorded, {why}"
                if component.record["worst"]
                else (f"{component.name}: error not measured, {why}")
            )
        if component.name == "transformer" and output is None:
            yield f"the denoiser's output error was not measured, {why}"


def _absence(component: Component) -> str:
    """Why the base's own weights can't be asked, where they can't."""
    if component.dropped:
        return "its bf16 shards were dropped"
    return "the base's own are NF4" if component.source is not None else "the base is not here"


def _error_faults(component: Component, again: dict[str, float]) -> list[str]:
    record, recorded = component.record, {item["name"]: item["error"] for item in component.record["worst"]}
    if record["mean_error"] is None or not recorded:
        excused = component.is_taken and not component.measurable
        if not excused:
            return [f"{component.name}: its error was not measured"]
        return [f"{component.name} {name}: not finite" for name in packed.broken(component)]
    faults = [
        f"{component.name} {name}: {error:.3f}"
        for name, error in recorded.items()
        if not error <= LAYER_ERROR_MAX
    ]
    if not record["mean_error"] <= MEAN_ERROR_MAX:
        faults.append(f"{component.name}: {record['mean_error']:.3f} on average")
    highest = max(recorded.values())
    for name, error in again.items():
        told = recorded.get(name)
        agrees = error <= highest + REMEASURED_MAX if told is None else abs(error - told) <= REMEASURED_MAX
        if not (math.isfinite(error) and error <= LAYER_ERROR_MAX and agrees):
            was = f"{told:.3f} recorded" if told is not None else f"the worst recorded is {highest:.3f}"
            faults.append(f"{component.name} {name}: {error:.3f} measured anew, {was}")
    return faults


@MADE.check(
    "source-untouched",
    title="The base is as it was, and the config's",
    section="6.5",
    remedy=REMEDY,
    needs=NEEDS,
    may_skip=DONE,
    why="weights made of another base than the one configured train an adapter for neither",
)
def source_untouched(e: Quantization) -> Finding:
    """Fingerprints of the base before and after the step, and now where it is here; the model's name.

    Shards that the step fetched itself and dropped are known by the digests that the hub named; it checked those
    as they came.
    """
    data, name = e.quantized.get().data, e.settings.get()["model"]["pretrained_model_name_or_path"]
    faults = [f"made of {data['model']}, the config has {name}"] if data["model"] != name else []
    for component in e.components:
        record = component.record
        if record["source_fingerprint_after"] != record["source_fingerprint"]:
            faults.append(f"{component.name} changed while it was read")
        if component.source_fingerprint not in (None, record["source_fingerprint"]):
            faults.append(f"the base's {component.name} is another now")
        faults += packed.fetch_faults(component, name)
    return verdict_of(
        not faults,
        listing(faults) or _source_told(e.components),
        expected=0,
        observed=len(faults),
        unit="differences",
    )


def _source_told(components: tuple[Component, ...]) -> str:
    absent = [component.name for component in components if component.source_fingerprint is None]
    told = f"by what was recorded: {', '.join(absent)} of the base is not here" if absent else "as it was"
    for component in components:
        if component.dropped:
            fetched = component.record["fetched"]
            told += (
                f"; {len(component.dropped)} of {len(fetched['shards'])} shards of {component.name} were dropped "
                f"once they were quantized, known by the digests of {fetched['repo']} at {fetched['revision'][:12]}"
            )
        if component.is_taken:
            told += f"; {component.name} was made by somebody else, taken from {component.record['taken']}"
    return told


SKIPPED: Checks[Quantization] = Checks()


@SKIPPED.check(
    "skip-justified",
    title="The step is left out for a reason, and all fits without it",
    section="6.1",
    remedy=REMEDY,
    may_skip=NOT_SKIPPED,
    why="without NF4 made beforehand a small PC runs out of memory in the cache phase or the fit",
)
def skip_justified(e: Quantization) -> Finding:
    """The reason, and the memory plan of this config, made without weights of this step: does each phase fit, as
    memory-plan-fits of gate 04 asks it?"""
    assert e.skip is not None
    reason, plan = e.skip.get()["reason"].strip(), e.plan.get()
    if not reason:
        return failed(
            "no reason is given", expected="a reason", observed="", remedy="gate skip 06 --reason TEXT",
            evidence=(EvidenceRef(path=SKIP, locator="/reason"),),
        )  # fmt: skip
    if plan["config_digest"] != e.config_digest.get():
        return failed(
            "the plan was made for another config.yaml", expected=e.config_digest.get(),
            observed=plan["config_digest"], remedy="finetune plan",
        )  # fmt: skip
    faults = []
    if plan["choices"].get("model.quantize_text_encoder", {}).get("value") == "nf4":
        configured = e.settings.get()["model"]["quantize_text_encoder"] == "nf4"
        why = "config.yaml asks for" if configured else "the plan counts on"
        faults.append(f"{why} an NF4 text encoder, which only this step makes")
    faults += [line for name in plans.PHASES for line in plans.overfull(name, plan)]
    return verdict_of(
        not faults,
        listing(faults) or reason,
        expected=plans.limits(plan),
        observed={name: plan["phases"][name]["peak_gib"] for name in plans.PHASES},
        unit="GiB",
        evidence=(EvidenceRef(path=SKIP, locator="/reason"),),
    )


def judge(evidence: Quantization) -> list[Check]:
    if evidence.skip is not None:
        return [*(excuse(spec, DONE) for spec in MADE.specs), *SKIPPED.run(evidence)]
    return [*MADE.run(evidence), *(excuse(spec, NOT_SKIPPED) for spec in SKIPPED.specs)]


GATE = Gate(
    number="06",
    name="quantize",
    skill="qwen-image-edit-aipc-finetune-06-quantize",
    purpose="NF4 of DiT and text encoder, or a deliberate skip",
    collect=collect,
    judge=judge,
    specs=(*MADE.specs, *SKIPPED.specs),
    next_commands={None: "finetune cache"},
    may_be_skipped=True,
)
