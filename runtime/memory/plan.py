"""What a config will need before any weight is loaded: memory, steps, disk; and what each `auto` becomes.

The numbers behind it are in `runtime.memory.estimate`.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from runtime.adaptation.choices import recorded
from runtime.config.load import Loaded
from runtime.config.model import Config
from runtime.data import manifest, order
from runtime.data.manifest import Sample
from runtime.errors import DataError, UserError
from runtime.files import GIB
from runtime.memory import architecture, budget, estimate, made
from runtime.memory.advice import find_problems
from runtime.memory.architecture import Architecture
from runtime.memory.budget import Budget
from runtime.memory.choices import Choice as Choice
from runtime.memory.choices import choose, largest_work, settings
from runtime.memory.estimate import Phase, Work
from runtime.memory.made import Made
from runtime.workspace import EXTERNAL, Workspace

EVIDENCE = "04-plan"
NUMBER_BYTES = 4  # the cache may keep fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    samples: int
    """Training samples."""
    per_epoch: int
    """Steps that an epoch spans, rounded up: accumulation runs across its end."""
    planned: int
    epochs: float
    checkpoints: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    family: str
    size_multiple: int
    device: str
    budget_gib: float
    budget_source: str
    dataset_digest: str
    config_digest: str
    phases: dict[str, Phase]
    steps: Steps
    disk_needed_gib: float
    disk_free_gib: float
    choices: dict[str, Choice]
    problems: tuple[UserError, ...]
    """Why the run would fail as configured; empty when nothing is known to be in its way."""

    @property
    def margin_gib(self) -> float:
        return self.budget_gib - max(phase.peak_gib for phase in self.phases.values())

    def to_json(self) -> dict[str, Any]:
        """The data of evidence 04-plan."""
        return {
            "family": self.family,
            "size_multiple": self.size_multiple,
            "device": self.device,
            "budget_gib": self.budget_gib,
            "budget_source": self.budget_source,
            "margin_gib": self.margin_gib,
            "dataset_digest": self.dataset_digest,
            "config_digest": self.config_digest,
            "phases": {name: _phase_json(phase) for name, phase in self.phases.items()},
            "steps": {name: getattr(self.steps, name) for name in Steps.__slots__},
            "disk": {"needed_gib": self.disk_needed_gib, "free_gib": self.disk_free_gib},
            "choices": {key: {"value": c.value, "reason": c.reason} for key, c in self.choices.items()},
        }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "components_gib": phase.components_gib,
        "resident_gib": phase.resident_gib,
        "peak_gib": phase.peak_gib,
        "largest": phase.largest,
    }


def make_plan(workspace: Workspace, loaded: Loaded) -> Plan:
    """The plan for the workspace's dataset and `loaded`. Raises UserError where one can't be made."""
    listed, _ = manifest.load(workspace)
    model = locate_model(workspace, loaded.config.model.pretrained_model_name_or_path)
    base = architecture.read(model)
    found = look(workspace, loaded.config)
    samples = listed.of("train")
    if not samples:
        raise DataError("the dataset has no training sample", remedy="finetune dataset")
    free = shutil.disk_usage(workspace.root).free / GIB
    return draw(
        loaded,
        listed.samples,
        base,
        found,
        dataset_digest=listed.dataset_digest,
        disk_free_gib=free,
        quantized=made.find(workspace, model),
    )


def draw(
    loaded: Loaded,
    samples: Sequence[Sample],
    base: Architecture,
    found: Budget,
    *,
    dataset_digest: str,
    disk_free_gib: float,
    quantized: Mapping[str, Made] | None = None,
) -> Plan:
    """The plan, from data alone. What step 06 made is counted as it lies there."""
    config = loaded.config
    choices = choose(config, samples, base, found, quantized)
    work = largest_work(config, samples, base)
    phases = estimate.phases(base, settings(config, base, choices), work)
    steps = _steps(config, samples)
    needed = _disk_gib(config, samples, base, work, steps)
    return Plan(
        family=base.family.name,
        size_multiple=base.size_multiple,
        device=found.device,
        budget_gib=found.gib,
        budget_source=found.source,
        dataset_digest=dataset_digest,
        config_digest=loaded.digest,
        phases=phases,
        steps=steps,
        disk_needed_gib=needed,
        disk_free_gib=disk_free_gib,
        choices=choices,
        problems=find_problems(
            config,
            samples,
            base,
            found,
            phases,
            disk_needed_gib=needed,
            disk_free_gib=disk_free_gib,
            quantized=quantized,
        ),
    )


def resolve_choices(workspace: Workspace, config: Config) -> dict[str, Choice]:
    """Value and reason of every key that the config left to the machine, by dotted key."""
    listed = workspace.evidence(manifest.EVIDENCE)
    if listed is None:
        raise DataError("the dataset has not been scanned", remedy="finetune dataset")
    samples = manifest.Manifest.from_json(listed).samples
    if not any(sample.split == "train" for sample in samples):
        raise DataError("the dataset has no training sample", remedy="finetune dataset")
    model = locate_model(workspace, config.model.pretrained_model_name_or_path)
    base, found = architecture.read(model), look(workspace, config)
    return choose(config, samples, base, found, made.find(workspace, model))


def look(workspace: Workspace, config: Config) -> Budget:
    """The device of `config`, what may be filled there, and what step 05 settled for it."""
    found = budget.find(config.hardware.device)
    return replace(found, measured=recorded(workspace, found.device))


def locate_model(workspace: Workspace, reference: str) -> Path:
    """The base's local folder; a hub id only if its files are here already, for a plan downloads nothing."""
    folder = workspace.resolve(reference)
    if folder.is_dir():
        return folder
    hub = not reference.startswith(EXTERNAL) and reference.count("/") == 1
    if hub:
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(reference, local_files_only=True))
        except Exception:  # absent package or absent snapshot, for which the client has many classes
            pass
    raise UserError(
        f"the base {reference} is not on this machine: {folder} is no folder",
        remedy=f"hf download {reference}" if hub else "fetch it, then finetune init --model FOLDER",
    )


def _steps(config: Config, samples: Sequence[Sample]) -> Steps:
    train = config.train
    keys = order.keys_of(sample for sample in samples if sample.split == "train")
    micro = order.count_micro_batches(keys, config.data.batch_size)
    planned = order.planned_steps(
        max_train_steps=train.max_train_steps,
        num_epochs=train.num_epochs,
        micro_per_epoch=micro,
        accumulation=train.gradient_accumulation_steps,
    )
    return Steps(
        samples=len(keys),
        per_epoch=ceil(micro / train.gradient_accumulation_steps),
        planned=planned,
        epochs=round(planned * train.gradient_accumulation_steps / micro, 3),
        checkpoints=len(order.planned_checkpoints(planned, train.checkpointing_steps)),
    )


def _disk_gib(
    config: Config, samples: Sequence[Sample], base: Architecture, work: Work, steps: Steps
) -> float:
    """The cache, every checkpoint that is kept, and the rolling one twice, for it is replaced by rename."""
    lora = config.model.lora
    adapter = architecture.adapter_parameters(base.denoiser, lora.r, lora.target_modules) * NUMBER_BYTES
    kept = min(steps.checkpoints, config.train.checkpoints_total_limit or steps.checkpoints)
    latents = 64 * work.image_tokens
    prompts = 2 if config.data.caption_dropout_rate > 0 or config.validation.guidance_scale > 1 else 1
    entry = (latents + prompts * work.text_tokens * base.text_encoder.hidden) * NUMBER_BYTES
    entries = len(samples) + len(config.validation.samples)
    rolling = 2 * (2 * adapter + adapter // NUMBER_BYTES * estimate.ADAM_BYTES)
    return (entries * entry + kept * adapter + rolling) / GIB
