"""What a fit is about to do, on one screen; and the end of it where that can't work.

`Forecast` is made before a weight is loaded, for a full disk or too little memory must not show after
minutes of loading, or hours of training.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime import files
from runtime.config import load
from runtime.config.load import Loaded
from runtime.config.model import Config
from runtime.errors import UserError
from runtime.planning import architecture, estimate
from runtime.planning.advice import SPARE_DISK_GIB
from runtime.planning.plan import Plan, locate_model, make_plan
from runtime.training import record
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from runtime.training.session import Session

ROLLING = 2  # the new resumable checkpoint stands before the old one goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    plan: Plan
    kept: int
    """Plain checkpoints that stay."""
    adapter_bytes: int
    """Of a plain checkpoint."""
    last_bytes: int
    """Of a resumable one."""
    free_gib: float
    """On the disk that the runs go to."""

    @property
    def peak_gib(self) -> float:
        return self.plan.phases["fit"].peak_gib

    @property
    def needed_gib(self) -> float:
        return (self.kept * self.adapter_bytes + ROLLING * self.last_bytes) / files.GIB


def forecast(workspace: Workspace, loaded: Loaded, *, smoke: bool) -> Forecast:
    """Raises UserError where memory or the disk will not suffice, or where no plan can be made."""
    from runtime.training.prepared import smoke_overrides

    if smoke:
        raw = load.apply_overrides(loaded.raw, smoke_overrides(loaded.config))
        loaded = replace(loaded, config=load.parse(raw))
    config = loaded.config
    plan = make_plan(workspace, loaded)
    base = architecture.read(locate_model(workspace, config.model.pretrained_model_name_or_path))
    lora, limit = config.model.lora, config.train.checkpoints_total_limit
    parameters = architecture.adapter_parameters(
        base.denoiser, lora.r, lora.target_modules, dora=lora.use_dora
    )
    found = Forecast(
        plan=plan,
        kept=min(plan.steps.checkpoints, limit or plan.steps.checkpoints),
        adapter_bytes=parameters * estimate.ADAPTER_BYTES,
        last_bytes=parameters * (2 * estimate.ADAPTER_BYTES + _state_bytes(config)),
        free_gib=shutil.disk_usage(_standing(record.project(workspace, config.logging))).free / files.GIB,
    )
    _refuse(found)
    return found


def _refuse(found: Forecast) -> None:
    fit = found.plan.phases["fit"]
    if found.peak_gib + fit.reserve_gib > found.plan.budget_gib or found.plan.found.spare_gib(fit) < 0:
        raise UserError(
            f"the fit would peak at {found.peak_gib:.1f} GiB, {found.plan.budget_gib:.1f} GiB may be filled "
            f"({found.plan.budget_source})",
            remedy="finetune plan, which says what makes it fit",
        )
    if found.needed_gib + SPARE_DISK_GIB > found.free_gib:
        raise UserError(
            f"the checkpoints need {found.needed_gib:.2f} GiB and {SPARE_DISK_GIB:.0f} GiB to spare, "
            f"{found.free_gib:.2f} GiB are free",
            remedy="free disk space, or set train.checkpoints_total_limit in config.yaml",
        )


def _state_bytes(config: Config) -> int:
    """What the optimizer keeps of each parameter."""
    name = config.optimizer.class_path.rpartition(".")[2]
    return estimate.OPTIMIZER_BYTES.get(name, estimate.ADAM_BYTES)


def screen(opened: "Session", found: Forecast, run: str, sleep: str) -> list[str]:
    """What is trained, on what, for how long, with what room; a line each."""
    document, config, batches = opened.run.document, opened.config, opened.batches
    trainable, lora, steps = document["trainable"], config.model.lora, found.plan.steps
    adapted = sum(".lora_A." in name for name, _ in opened.trained.adapter.named_parameters())
    kind = ("DoRA" if lora.use_dora else "LoRA") + (" (rslora)" if lora.use_rslora else "")
    held = sum(item.regularisation for item in batches.order.items)
    sizes = sorted({share.batch_size for share in batches.order.shares.values()})
    per_step = " or ".join(str(size * config.train.gradient_accumulation_steps) for size in sizes)
    origin = document["resumed_from"]
    return [
        f"run        {run} ({document['kind']})"
        + (f", resumed from {origin['run']} at step {origin['step']}" if origin else ", from step 0"),
        f"trains     {kind} rank {lora.r} on {adapted} linears, {trainable['parameters']:,} parameters, "
        f"scale {trainable['scale']:g}",
        f"base       {document['model']['family']}, {trainable['base_parameters']:,} parameters, "
        f"{config.model.quantize}, {trainable['base_gib']:.3g} GiB",
        f"device     {opened.device.type}, {opened.device.name} ({opened.device.reason}), "
        f"compute {'bf16' if config.train.mixed_precision == 'bf16' else 'fp32'}, adapter fp32",
        f"memory     peak {found.peak_gib:.3g} GiB planned; {found.plan.budget_gib:.1f} GiB may be filled, "
        f"{found.plan.budget_source}",
        f"data       {len(batches.ids('train')) - held} training, {held} regularisation and "
        f"{len(batches.ids('holdout'))} held-out samples, {per_step} a step, "
        f"{batches.order.count(1)} micro-batches an epoch",
        f"length     {opened.planned_steps} steps, {steps.epochs:g} epochs; "
        f"checkpoints at {spoken(document['planned_checkpoints'])}",
        f"disk       {found.needed_gib:.2f} GiB needed, {found.free_gib:.1f} GiB free: "
        f"checkpoints {found.kept} x {found.adapter_bytes / files.MIB:.1f} MiB, "
        f"the resumable one {found.last_bytes / files.MIB:.1f} MiB",
        f"sleep      {sleep}",
        *[f"note       {note}" for note in found.plan.notes],
    ]


def spoken(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 6 else f"{steps[0]}, {steps[1]}, ... {steps[-1]}"


def _standing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there already."""
    return path if path.is_dir() else _standing(path.parent)
