"""All that can be checked and decided before the denoiser is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import device, files
from runtime.cache import build as cache_build
from runtime.cache.build import Job
from runtime.config import load
from runtime.config.load import Loaded
from runtime.config.model import Config
from runtime.config.resolve import Resolved, resolve
from runtime.data import order
from runtime.device import Device
from runtime.errors import ResumeError
from runtime.families.weights import open_denoiser_weights
from runtime.quantize import made
from runtime.training import ahead, checkpoints, pretrained, record, samples, trackers, trainables
from runtime.training.batches import Batches
from runtime.training.objective import FlowMatching
from runtime.workspace import Workspace

SMOKE_STEPS = 5
SETTLED = ("train.cached_modulation", "train.compile")
# What checkpoints that do not tell had.
OLDER: dict[str, Any] = {"train.cached_modulation": False, "train.compile": False, "model.nf4_keep": []}
OWN_NF4 = "NF4 weights of finetune quantize --keep or --made"
"""Of the fingerprint: what no key of config.yaml tells of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    loaded: Loaded
    smoke: bool
    overrides: dict[str, Any]
    resolved: Resolved
    project: Path
    checkpoint: Path | None
    """What the run continues."""
    job: Job
    batches: Batches
    objective: FlowMatching
    painting: samples.Plan | None
    planned_steps: int
    device: Device
    fingerprint: dict[str, Any]
    state: dict[str, Any]
    """Where the run starts: trainer_state.json of the checkpoint, or the beginning."""

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def origin(self) -> dict[str, Any] | None:
        """What run.json tells of the run that this one continues."""
        if self.checkpoint is None:
            return None
        return {
            "run_id": self.state["run_id"],
            "run": self.checkpoint.parent.name,
            "step": self.state["step"],
            "checkpoint": self.checkpoint.name,
            "digest": files.file_digest(self.checkpoint / trainables.STATE),
        }


def prepare(workspace: Workspace, loaded: Loaded, *, smoke: bool, resume: str | None) -> Prepared:
    """Raises UserError for whatever would stop the run later."""
    trackers.refuse_absent(loaded.config.logging)
    overrides = smoke_overrides(loaded.config) if smoke else {}
    wished = load.parse(load.apply_overrides(loaded.raw, overrides)) if overrides else loaded.config
    project = record.project(workspace, wished.logging)
    checkpoint = checkpoints.find(project, resume, workspace.root) if resume else None
    if checkpoint is not None:
        record.refuse_alive(checkpoint.parent)
        wished = _as_before(wished, checkpoint)
    resolved = resolve(workspace, wished)
    config = resolved.config
    job = cache_build.plan(workspace, config)
    batches = _open_cache(job)
    planned = planned_steps(config, batches)
    device.deterministic(config.train.deterministic)
    fingerprint = _fingerprint(job, config, planned)
    return Prepared(
        loaded=loaded,
        smoke=smoke,
        overrides=overrides,
        resolved=resolved,
        project=project,
        checkpoint=checkpoint,
        job=job,
        batches=batches,
        objective=ahead.objective(job.family, config, batches),
        painting=samples.plan(job),
        planned_steps=planned,
        device=device.pick(config.hardware.device),
        fingerprint=fingerprint,
        state=_starting_state(checkpoint, fingerprint, job),
    )


def _as_before(wished: Config, checkpoint: Path) -> Config:
    """Where `auto` decides over the last bits it stays what it was, whatever has been measured since."""
    before = {**OLDER, **checkpoints.read_state(checkpoint)["fingerprint"]}
    document = wished.model_dump(mode="json")
    kept = {key: before[key] for key in SETTLED if wished.train.model_dump()[key.partition(".")[2]] == "auto"}
    return load.parse(load.apply_overrides(document, kept)) if kept else wished


def smoke_overrides(config: Config) -> dict[str, Any]:
    """A run whose only purpose is to be judged: a few steps, one checkpoint, config.yaml untouched."""
    steps = min(SMOKE_STEPS, config.train.max_train_steps or SMOKE_STEPS)
    return {"train.max_train_steps": steps, "train.num_epochs": None, "train.checkpointing_steps": steps}


def planned_steps(config: Config, batches: Batches) -> int:
    return order.planned_steps(
        batches.order,
        max_train_steps=config.train.max_train_steps,
        num_epochs=config.train.num_epochs,
        accumulation=config.train.gradient_accumulation_steps,
    )


def _open_cache(job: Job) -> Batches:
    cache_build.open_for_fit(job)
    config = job.config
    return Batches(
        job.store,
        order.order_of(config, job.listed.samples, job.listed.settings, job.facts.size_multiple),
        caption_dropout=config.data.caption_dropout_rate,
        workers=config.data.num_workers,
        epochs=config.train.num_epochs,
    )


def _fingerprint(job: Job, config: Config, planned: int) -> dict[str, Any]:
    """What a resume must find unchanged, by the name under which a difference is told.

    Of the cache only what is trained on: a prompt to sample or a guidance scale may come later.
    """
    weight = job.made.get("transformer_weight")
    trained_on = [entry for entry in job.store.manifest()["entries"] if entry["split"] == "train"]
    return {
        "dataset": job.dataset_digest,
        "cache": files.document_digest(trained_on),
        "base": files.weights_fingerprint(job.model / "transformer"),
        "model.transformer_weight": open_denoiser_weights(weight).fingerprint() if weight else None,
        "model.lora.pretrained_weight": pretrained.digest(job.workspace, config),
        "train steps": planned,
        "data.batch_size": config.data.batch_size,
        "data.shuffle": config.data.shuffle,
        "data.caption_dropout_rate": config.data.caption_dropout_rate,
        "train.gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        "train.seed": config.train.seed,
        "train.max_grad_norm": config.train.max_grad_norm,
        "train.clip_grad_value": config.train.clip_grad_value,
        "train.ema_decay": config.train.ema_decay,
        "model.quantize": config.model.quantize,
        "model.nf4_keep": list(config.model.nf4_keep),
        OWN_NF4: made.own_fingerprint(job.workspace, job.model, config),
        "train.mixed_precision": config.train.mixed_precision,
        "train.deterministic": config.train.deterministic,
        # Both move the last bits; what of the activations is recomputed, streamed or replayed does not.
        "train.cached_modulation": config.train.cached_modulation,
        "train.compile": config.train.compile,
        "model.lora": config.model.lora.model_dump(mode="json", exclude={"pretrained_weight"}),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "lr_scheduler": config.lr_scheduler.model_dump(mode="json"),
        "loss": config.loss.model_dump(mode="json"),
    }


def _starting_state(checkpoint: Path | None, fingerprint: dict[str, Any], job: Job) -> dict[str, Any]:
    if checkpoint is None:
        return {"step": 0, "epoch": 0, "loss_ema": [0.0, 0.0], "not_finite": [], "open_boundary": False}
    state = checkpoints.read_state(checkpoint)
    state["fingerprint"] = {**OLDER, **state["fingerprint"]}
    if OWN_NF4 not in state["fingerprint"]:
        state["fingerprint"][OWN_NF4] = _own_nf4_before(checkpoint, fingerprint[OWN_NF4], job)
    before, now = state["fingerprint"].get("train steps"), fingerprint["train steps"]
    if isinstance(before, int) and before < now:
        # A longer run: from here on the schedule is that of the new length, see `optimizers.set_rate`.
        state["fingerprint"]["train steps"] = now
    checkpoints.refuse_differences(state["fingerprint"], fingerprint)
    ended = files.read_json(checkpoint.parent / "run.json")["state"] == "completed"
    if ended and state["step"] >= now:
        raise ResumeError(
            f"{checkpoint.name} is the end of a finished run of {state['step']} steps",
            remedy="gate check 07; to train on: a larger train.max_train_steps in config.yaml, finetune plan, "
            "finetune fit --resume latest",
        )
    return {"not_finite": [], "open_boundary": False, **state}


def _own_nf4_before(checkpoint: Path, now: str | None, job: Job) -> str | None:
    """Of a checkpoint that does not tell: as now, unless its run's record names other NF4 weights of step 06."""
    prints = files.read_json(checkpoint.parent / "run.json")["model"]["fingerprints"]
    then: str | None = prints.get("nf4/transformer")
    folder = job.made.get("transformer")
    return now if then == (files.weights_fingerprint(folder) if folder else None) else then
