"""gate check 04: is config.yaml sound, for this dataset and host, and does its plan fit into memory?"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gates import plans, pointers, prompt_file
from gates.buckets import SIZE_MULTIPLES
from gates.checks import Checks, Evidence, Finding, Gate, failed, listing, verdict_of
from gates.evidence import Reading, attempt, dataset_digest
from gates.plans import PHASES, SPARE_DISK_GIB
from gates.schema import with_defaults
from gates.verdict import Check, EvidenceRef
from gates.workspace import Workspace, setting_problems

ROUNDING_GIB = 0.01  # components are recorded with two decimals or more

PLAN = ".gates/evidence/04-plan.json"
MEND = "mend config.yaml, then finetune plan"
_PLACEHOLDER = re.compile(r"\bTODO\b|\bFIXME\b|\bCHANGE_?ME\b|path/to|<[^<>]*>|\bYOUR[_-]", re.IGNORECASE)
# Prompts are prose: a caption may well say "<3", and is no setting.
_PROSE = re.compile(r"^validation\.(samples\[\d+\]\.)?(negative_)?prompt$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured(Evidence):
    config: Reading[dict[str, Any]]
    """config.yaml as parsed"""
    traps: tuple[str, ...]
    config_digest: Reading[str]
    target: dict[str, Any]
    plan: Reading[dict[str, Any]]
    dataset: Reading[dict[str, Any]]
    model: Reading[str]
    """`folder` with model_index.json, `other` folder, `hub` id, or `nothing`"""
    images: dict[str, bool]
    """paths of validation.samples, and whether they are there"""
    prompts: Reading[list[dict[str, Any]]]
    """lines of validation.prompt_file"""
    weights: dict[str, bool]
    """by key, whether weights that the config names beside the base are there"""

    @property
    def settings(self) -> dict[str, Any]:
        return with_defaults(self.config.get())


def collect(workspace: Workspace) -> Configured:
    config = attempt(lambda: workspace.config)
    traps = attempt(lambda: tuple(workspace.config_traps))
    return Configured(
        config=config,
        traps=traps.value or (),
        config_digest=attempt(workspace.config_digest),
        target=workspace.target,
        plan=attempt(lambda: workspace.evidence("04-plan")),
        dataset=attempt(lambda: workspace.evidence("02-dataset")),
        model=attempt(lambda: pointers.model(workspace, config.value or {})),
        images=pointers.images(workspace, config.value or {}),
        prompts=attempt(lambda: pointers.prompts(workspace, config.value or {})),
        weights=pointers.weights(workspace, config.value or {}),
        inputs=tuple(workspace.inputs.values()),
    )


CHECKS: Checks[Configured] = Checks()


@CHECKS.check(
    "schema-valid",
    title="config.yaml has known keys with values of their kind",
    section="4.2",
    remedy=MEND,
    why="a key that nobody reads, or a number read as text, changes a run without a word",
)
def schema_valid(e: Configured) -> Finding:
    """The document against the published config schema, and the values that YAML reads as something else."""
    faults = [*e.traps, *setting_problems(e.config.get())]
    return verdict_of(
        not faults,
        listing(faults, 5) or "every key is known and of its kind",
        expected=0,
        observed=len(faults),
        unit="problems",
        evidence=(EvidenceRef(path="config.yaml"),),
    )


@CHECKS.check(
    "no-placeholders",
    title="Nothing is left to be filled in",
    section="4.2",
    remedy=MEND,
    why="a TODO or path/to in a config is a run that fails late",
)
def no_placeholders(e: Configured) -> Finding:
    """Texts of the config that look like a blank: TODO, <...>, path/to, CHANGEME."""
    found = [
        f"{key}: {text}"
        for key, text in _texts(e.config.get(), "")
        if _PLACEHOLDER.search(text) and not _PROSE.match(key)
    ]
    return verdict_of(
        not found, listing(found) or "none", expected=0, observed=len(found), unit="placeholders"
    )


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]")


@CHECKS.check(
    "cache-mandatory",
    title="The cache is on",
    section="4.3",
    remedy="set cache.use_cache: true, then finetune cache",
    why="without it the text encoder stays in memory beside the denoiser, beyond what an AI PC holds",
)
def cache_mandatory(e: Configured) -> Finding:
    """cache.use_cache, which may be left out and must not be anything but true."""
    section = e.config.get().get("cache")
    seen = section.get("use_cache", True) if isinstance(section, dict) else True
    return verdict_of(
        seen is True,
        "" if seen is True else "an empty cache is mended by finetune cache, never by turning the cache off",
        expected=True,
        observed=seen,
    )


@CHECKS.check(
    "paths-exist",
    title="Model and dataset are where the config says",
    section="4.3",
    remedy="finetune init --model MODEL, then set model.pretrained_model_name_or_path",
    needs=("schema-valid", "no-placeholders"),
    why="a wrong path is found here in a second instead of after a long download or load",
)
def paths_exist(e: Configured) -> Finding:
    """The model is a folder with model_index.json or the target's hub id; other weights, prompts, images are there."""
    absent = [key for key, there in e.weights.items() if not there]
    if absent:
        return failed(
            f"nothing is where {listing(absent)} points",
            expected=0,
            observed=len(absent),
            remedy=f"correct {absent[0]} in config.yaml, then finetune plan",
        )
    name, model = e.settings["model"]["pretrained_model_name_or_path"], e.model.get()
    absent = [path for path, there in e.images.items() if not there]
    if absent:
        return failed(
            f"validation.samples: no image at {listing(absent)}",
            expected=0,
            observed=len(absent),
            remedy="correct validation.samples in config.yaml, then finetune cache",
        )
    absent = [path.name for item in e.prompts.get() for path in item["paths"] if not path.is_file()]
    if absent:
        return failed(
            f"validation.prompt_file: no image {listing(absent)}",
            expected=0,
            observed=len(absent),
            remedy=prompt_file.REMEDY,
        )
    e.dataset.get()
    told = {
        "folder": "a folder with model_index.json",
        "hub": "a hub id, the target's",
        "other": "a folder without a readable model_index.json",
        "nothing": "no folder, nor the hub id of the target",
    }
    return verdict_of(
        model in ("folder", "hub"),
        f"{name} is {told[model]}",
        expected="a diffusers-style folder, or the hub id in .gates/target.json",
        observed=name,
    )


@CHECKS.check(
    "dataset-unchanged",
    title="The plan is for the dataset as it is",
    section="4.4",
    remedy="finetune plan",
    why="steps, epochs and memory are planned from the number and shapes of the samples",
)
def dataset_unchanged(e: Configured) -> Finding:
    """The digest in the plan, the one in the dataset's evidence, and that of its samples added up anew."""
    planned, dataset = e.plan.get()["dataset_digest"], e.dataset.get()
    recorded, counted = dataset["dataset_digest"], dataset_digest(dataset)
    told = "the plan was made for other samples" if planned != recorded else "one digest"
    return verdict_of(
        planned == recorded == counted,
        told if recorded == counted else "the samples in the dataset's evidence are not those of its digest",
        expected=counted,
        observed={"plan": planned, "dataset": recorded},
        evidence=(EvidenceRef(path=PLAN, locator="/data/dataset_digest"),),
        remedy=None if recorded == counted else "finetune dataset, then finetune plan",
    )


@CHECKS.check(
    "checkpoint-within-steps",
    title="The run has one length, and writes a checkpoint within it",
    section="4.5",
    remedy=MEND,
    needs=("schema-valid",),
    why="with an interval beyond the end nothing is kept until the last step, and a kill loses all",
)
def checkpoint_within_steps(e: Configured) -> Finding:
    """Exactly one of max_train_steps and num_epochs, and checkpointing_steps within the planned steps."""
    train = e.settings["train"]
    given = {name: train[name] for name in ("max_train_steps", "num_epochs") if train[name] is not None}
    if len(given) != 1:
        return failed(
            "train needs exactly one of max_train_steps and num_epochs",
            expected="one of the two",
            observed=given or "neither",
        )
    steps = given.get("max_train_steps")
    planned = steps if steps is not None else e.plan.get()["steps"]["planned"]
    return verdict_of(
        train["checkpointing_steps"] <= planned,
        f"a checkpoint each {train['checkpointing_steps']} of {planned} steps",
        expected=f"at most {planned}",
        observed=train["checkpointing_steps"],
        unit="steps",
        remedy=f"set train.checkpointing_steps to {planned} or less, then finetune plan",
    )


@CHECKS.check(
    "size-multiple",
    title="Sizes are multiples of what the model divides by",
    section="4.5",
    remedy=MEND,
    needs=("schema-valid",),
    why="other sizes leave half a patch, and latents of control and target that no longer agree",
)
def size_multiple(e: Configured) -> Finding:
    """Target, controls and prompts with a size of their own against the family's multiple, told by the plan too."""
    plan, processor = e.plan.get(), e.settings["data"]["processor"]
    multiple = SIZE_MULTIPLES.get(plan["family"])
    if multiple is None or plan["size_multiple"] != multiple:
        return failed(
            f"the plan is for the family {plan['family']} with multiples of {plan['size_multiple']}",
            expected=SIZE_MULTIPLES,
            observed={plan["family"]: plan["size_multiple"]},
            remedy="finetune plan",
        )
    sizes = {f"data.processor.{n}": processor[n] for n in ("target_size", "controls_size") if processor[n]}
    prompts = [
        *e.settings["validation"]["samples"],
        *(e.prompts.value or []),
    ]  # an unreadable file is paths-exist's
    sizes |= {f"prompt-{i}": item["size"] for i, item in enumerate(prompts) if item.get("size")}
    odd = [f"{name}: {size}" for name, size in sizes.items() if any(n % multiple for n in size)]
    return verdict_of(
        not odd,
        listing(odd) or f"multiples of {multiple}",
        expected=f"multiples of {multiple}",
        observed=sizes,
    )


@CHECKS.check(
    "device-matches-host",
    title="The config is for this host's device",
    section="4.6",
    remedy="set hardware.device: auto, then finetune plan",
    needs=("schema-valid",),
    why="a run that falls back to the CPU takes days, and passes every other check",
)
def device_matches_host(e: Configured) -> Finding:
    """hardware.device and the plan's device against the device of target.json; auto agrees with all."""
    wanted = e.target["device"]
    observed = {"config": e.settings["hardware"]["device"], "plan": e.plan.get()["device"]}
    agree = all(seen in (wanted, "auto") or wanted == "auto" for seen in observed.values())
    consistent = observed["config"] in (observed["plan"], "auto")
    return verdict_of(
        agree and consistent and observed["plan"] != "auto",
        f"target {wanted}, config {observed['config']}, planned for {observed['plan']}",
        expected=wanted,
        observed=observed,
        remedy="finetune plan" if observed["config"] in (wanted, "auto") else None,
    )


@CHECKS.check(
    "memory-plan-fits",
    title="The plan fits into memory and on the disk",
    section="4.7",
    remedy="set a smaller data.processor.target_size or model.quantize: nf4, then finetune plan",
    needs=("schema-valid", "dataset-unchanged"),
    why="a plan that does not fit ends in an out-of-memory error, or in hours of paging",
)
def memory_plan_fits(e: Configured) -> Finding:
    """Made for this config; components added up anew; peak and reserve of each phase within the budget, host memory
    within its own, or both within the one that they share; the disk, with 1 GiB to spare."""
    plan, digest = e.plan.get(), e.config_digest.get()
    if plan["config_digest"] != digest:
        return failed(
            "the plan was made for another config.yaml",
            expected=digest,
            observed=plan["config_digest"],
            remedy="finetune plan",
        )
    faults = [line for name in PHASES for line in _phase_faults(name, plan)]
    spare = {name: _spare_gib(plan["phases"][name], plan) for name in PHASES}
    if not abs(min(spare.values()) - plan["margin_gib"]) <= ROUNDING_GIB:
        faults.append(f"margin: {plan['margin_gib']:.2f} GiB is not what the largest phase leaves")
    disk = plan["disk"]
    if not disk["needed_gib"] + SPARE_DISK_GIB <= disk["free_gib"]:
        told = f"{disk['needed_gib']:.1f} GiB needed and {SPARE_DISK_GIB:.0f} to spare"
        faults.append(f"disk: {told}, {disk['free_gib']:.1f} free")
    largest = min(spare, key=spare.__getitem__)
    return verdict_of(
        not faults,
        listing(faults) or f"{largest} is the largest, {plan['phases'][largest]['largest']} its largest part",
        expected=plans.limits(plan),
        observed={name: plan["phases"][name]["peak_gib"] for name in PHASES},
        unit="GiB",
        evidence=(EvidenceRef(path=PLAN, locator="/data/phases"),),
    )


def _phase_faults(name: str, plan: dict[str, Any]) -> Iterator[str]:
    phase = plan["phases"][name]
    sums = {"components": ("components_gib", "peak_gib"), "host memory": ("host_gib", "host_peak_gib")}
    for what, (parts, peak) in sums.items():
        total = sum(phase[parts].values())
        if not abs(total - phase[peak]) <= ROUNDING_GIB * max(1, len(phase[parts])):
            yield f"{name}: {what} adds up to {total:.2f} GiB, the plan says {phase[peak]:.2f}"
    if not phase["resident_gib"] <= phase["peak_gib"] + ROUNDING_GIB:
        yield f"{name}: resident {phase['resident_gib']:.2f} GiB exceeds the peak {phase['peak_gib']:.2f}"
    if plan["device"] != "cpu" and not phase["reserve_gib"] > 0:
        yield f"{name}: nothing is reserved for the allocator and the device's context"
    yield from plans.overfull(name, plan)


def _spare_gib(phase: dict[str, Any], plan: dict[str, Any]) -> float:
    """What a phase leaves of the tightest limit."""
    device = phase["peak_gib"] + phase["reserve_gib"]
    together = phase["host_peak_gib"] + (device if plan["unified_memory"] else 0.0)
    return float(min(plan["budget_gib"] - device, plan["host_budget_gib"] - together))


def judge(evidence: Configured) -> list[Check]:
    return CHECKS.run(evidence)


GATE = Gate(
    number="04",
    name="config",
    skill="qwen-image-edit-aipc-finetune-04-config",
    purpose="probe + dataset -> config.yaml, and a memory plan that fits",
    collect=collect,
    judge=judge,
    specs=tuple(CHECKS.specs),
    next_commands={None: "finetune adapt"},
)
