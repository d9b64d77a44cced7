"""Everything that a fit needs, made in one place: config, cache, denoiser, adapter, run folder."""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime import device, files
from runtime.cache import build as cache_build
from runtime.cache.build import Job
from runtime.config import load
from runtime.config.model import Config
from runtime.config.resolve import resolve
from runtime.data import order
from runtime.device import Device
from runtime.errors import ResumeError
from runtime.families.base import Conditioning, Family
from runtime.families.weights import open_denoiser_weights
from runtime.training import checkpoints, optimizers, pretrained, record, samples, trackers, trainables
from runtime.training.batches import Batches
from runtime.training.checkpoints import Trained
from runtime.training.ema import Ema
from runtime.training.objective import FlowMatching, predictor
from runtime.training.pretrained import Pretrained
from runtime.training.probe import Probe
from runtime.training.record import Run
from runtime.training.samples import Samples
from runtime.training.sigmas import Sigmas
from runtime.workspace import Workspace

SMOKE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    config: Config
    device: Device
    dtype: torch.dtype
    family: Family
    denoiser: nn.Module
    trained: Trained
    batches: Batches
    objective: FlowMatching
    probe: Probe
    run: Run
    samples: Samples | None
    """Paints in the fit, where `validation.sample_steps` says so."""
    planned_steps: int
    fingerprint: dict[str, Any]
    state: dict[str, Any]

    def predict(self, noisy: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Velocity [B, C, h, w] on the device; inputs may lie on the CPU in fp32."""
        ask = predictor(self.family, self.denoiser, self.device, self.dtype)
        return ask(noisy, sigma, conditioning)

    def predict_base(self, noisy: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The same without the adapter."""
        with self.trained.adapter.disabled():
            return self.predict(noisy, sigma, conditioning)


def smoke_overrides(config: Config) -> dict[str, Any]:
    """A run whose only purpose is to be judged: a few steps, one checkpoint, config.yaml untouched."""
    steps = min(SMOKE_STEPS, config.train.max_train_steps or SMOKE_STEPS)
    return {"train.max_train_steps": steps, "train.num_epochs": None, "train.checkpointing_steps": steps}


def launch(workspace: Workspace, loaded: load.Loaded, *, smoke: bool, resume: str | None) -> Session:
    """Check all that can be checked before the denoiser is loaded, then load it and open the run."""
    trackers.refuse_absent(loaded.config.logging)
    overrides = smoke_overrides(loaded.config) if smoke else {}
    wished = load.parse(load.apply_overrides(loaded.raw, overrides)) if overrides else loaded.config
    resolved = resolve(workspace, wished)
    config = resolved.config
    project = record.project(workspace, config.logging)
    checkpoint = checkpoints.find(project, resume, workspace.root) if resume else None
    if checkpoint is not None:
        record.refuse_alive(checkpoint.parent)
    job = cache_build.plan(workspace, config)
    batches = _open_cache(job)
    painting = samples.plan(job)
    planned = planned_steps(config, batches)
    device.deterministic(config.train.deterministic)
    chosen = device.pick(config.hardware.device)
    fingerprint = _fingerprint(job, config, planned)
    state = _starting_state(checkpoint, fingerprint)

    dtype = device.compute_dtype(chosen, config.train.mixed_precision)
    denoiser = job.family.load_denoiser(
        job.model,
        device=chosen.type,
        dtype=dtype,
        quantize=config.model.quantize,
        made=job.made.get("transformer"),
        weight=job.made.get("transformer_weight"),
    )
    base_bytes = trainables.tensor_bytes(list(denoiser.parameters()))
    base_parameters = _logical_parameters(denoiser)
    trained, started = _make_trainable(workspace, denoiser, config, planned)
    if checkpoint is not None:
        checkpoints.restore(checkpoint, trained)
        optimizers.set_rate(trained.optimizer, trained.schedule)
        checkpoints.reduce(checkpoint)
    objective = _objective(job.family, config, batches)
    run = record.open_run(
        project,
        config.model_dump(mode="json"),
        record.first_document(
            run_id=uuid.uuid4().hex,
            kind="smoke" if smoke else "full",
            device=chosen,
            config=loaded.raw,
            config_digest=loaded.digest,
            overrides=overrides,
            resolved=config.model_dump(mode="json"),
            choices={name: {"value": c.value, "reason": c.reason} for name, c in resolved.choices.items()},
            dataset_digest=job.dataset_digest,
            cache_digest=fingerprint["cache"],
            model={
                "name": config.model.pretrained_model_name_or_path,
                "family": job.family.facts.name,
                "fingerprints": _loaded(job, fingerprint["base"]),
            },
            trainable={
                "name": "lora",
                "parameters": sum(p.numel() for p in trained.adapter.parameters()),
                "tensors": len(trained.adapter.parameters()),
                "scale": trained.adapter.scale,
                "weights": "trained" if trained.ema is None else "ema",
                "base_parameters": base_parameters,
                "base_gib": base_bytes / files.GIB,
                **({"pretrained": started.to_json()} if started else {}),
            },
            planned_steps=planned,
            planned_checkpoints=order.planned_checkpoints(planned, config.train.checkpointing_steps),
            resumed_from=_origin(checkpoint, state),
        ),
    )
    return Session(
        config=config,
        device=chosen,
        dtype=dtype,
        family=job.family,
        denoiser=denoiser,
        trained=trained,
        batches=batches,
        objective=objective,
        probe=Probe(batches, objective, samples=config.train.probe_samples, count=config.train.probe_draws),
        run=run,
        samples=_samples(painting, job.family, denoiser, chosen, dtype, run),
        planned_steps=planned,
        fingerprint=fingerprint,
        state=state,
    )


def _objective(family: Family, config: Config, batches: Batches) -> FlowMatching:
    largest = max(share.batch_size for share in batches.order.shares.values())
    return FlowMatching(
        family=family,
        seed=config.train.seed,
        sigmas=Sigmas.of(config.loss, largest * config.train.gradient_accumulation_steps),
        weighting=config.loss.weighting,
        mask_floor=config.loss.mask_floor,
        prior_weight=config.loss.prior_weight,
    )


def _samples(
    painting: samples.Plan | None,
    family: Family,
    denoiser: nn.Module,
    where: Device,
    dtype: torch.dtype,
    run: Run,
) -> Samples | None:
    if painting is None:
        return None
    ask = predictor(family, denoiser, where, dtype)
    return Samples(plan=painting, where=where, denoiser=denoiser, predict=ask, run=run)


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


def _make_trainable(
    workspace: Workspace, denoiser: Any, config: Config, steps: int
) -> tuple[Trained, Pretrained | None]:
    """The adapter, its optimizer and schedule; and what the adapter started from, where config.yaml says."""
    if config.train.gradient_checkpointing:
        denoiser.enable_gradient_checkpointing()
    adapter = trainables.add_adapter(denoiser, config.model.lora, seed=config.train.seed)
    started = pretrained.start(workspace, config, adapter)
    denoiser.train()
    optimizer = optimizers.make_optimizer(config.optimizer, adapter.parameters())
    schedule = optimizers.make_schedule(config.lr_scheduler, optimizer, steps)
    decay = config.train.ema_decay
    ema = Ema(adapter.named_parameters(), decay) if decay is not None else None
    return Trained(adapter=adapter, optimizer=optimizer, schedule=schedule, ema=ema), started


def _loaded(job: Job, base: str) -> dict[str, str]:
    """The base, and what was loaded instead of its denoiser: of step 06, or of model.transformer_weight."""
    made, weight = job.made.get("transformer"), job.made.get("transformer_weight")
    return {
        "transformer": base,
        **({"nf4/transformer": files.weights_fingerprint(made)} if made else {}),
        **({"transformer_weight": open_denoiser_weights(weight).fingerprint()} if weight else {}),
    }


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
        "train.mixed_precision": config.train.mixed_precision,
        "train.deterministic": config.train.deterministic,
        "model.lora": config.model.lora.model_dump(mode="json", exclude={"pretrained_weight"}),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "lr_scheduler": config.lr_scheduler.model_dump(mode="json"),
        "loss": config.loss.model_dump(mode="json"),
    }


def _starting_state(checkpoint: Path | None, fingerprint: dict[str, Any]) -> dict[str, Any]:
    if checkpoint is None:
        return {"step": 0, "epoch": 0, "loss_ema": [0.0, 0.0], "not_finite": []}
    state = checkpoints.read_state(checkpoint)
    before, now = state["fingerprint"].get("train steps"), fingerprint["train steps"]
    if isinstance(before, int) and before < now:
        # A longer run: from here on the schedule is that of the new length, see `checkpoints.restore`.
        state["fingerprint"]["train steps"] = now
    checkpoints.refuse_differences(state["fingerprint"], fingerprint)
    if state["step"] >= now:
        raise ResumeError(
            f"{checkpoint.name} is the end of a finished run of {state['step']} steps",
            remedy="gate check 07; to train on: a larger train.max_train_steps in config.yaml, finetune plan, "
            "finetune fit --resume latest",
        )
    return {"not_finite": [], **state}


def _origin(checkpoint: Path | None, state: dict[str, Any]) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    return {
        "run_id": state["run_id"],
        "run": checkpoint.parent.name,
        "step": state["step"],
        "checkpoint": checkpoint.name,
        "digest": files.file_digest(checkpoint / trainables.STATE),
    }


def _logical_parameters(denoiser: nn.Module) -> int:
    """Weights of the base: a byte of NF4 holds two."""
    packed = {id(module.weight) for module in denoiser.modules() if type(module).__name__ == "Linear4bit"}
    return sum(p.numel() * (2 if id(p) in packed else 1) for p in denoiser.parameters())
