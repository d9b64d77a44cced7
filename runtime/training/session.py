"""Everything that a fit needs, made in one place: config, cache, denoiser, adapter, run folder."""

import uuid
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime import device, files
from runtime.cache.build import Job
from runtime.config.load import Loaded
from runtime.config.model import Config
from runtime.data import order
from runtime.device import Device
from runtime.families.base import Conditioning, Family
from runtime.families.weights import open_denoiser_weights
from runtime.memory import checkpointing, offload
from runtime.planning import limit
from runtime.training import ahead, checkpoints, optimizers, pretrained, record, samples, trainables
from runtime.training.batches import Batches
from runtime.training.checkpoints import Trained
from runtime.training.ema import Ema
from runtime.training.gradients import Gradients
from runtime.training.objective import FlowMatching, Predictor
from runtime.training.prepared import Prepared, prepare
from runtime.training.pretrained import Pretrained
from runtime.training.probe import Probe
from runtime.training.record import Run
from runtime.training.samples import Samples
from runtime.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    config: Config
    device: Device
    dtype: torch.dtype
    family: Family
    denoiser: nn.Module
    trained: Trained
    batches: Batches
    gradients: Gradients
    objective: FlowMatching
    predict: Predictor
    probe: Probe
    run: Run
    samples: Samples | None
    """Paints in the fit, where `validation.sample_steps` says so."""
    planned_steps: int
    fingerprint: dict[str, Any]
    state: dict[str, Any]


def launch(
    workspace: Workspace,
    loaded: Loaded,
    *,
    smoke: bool,
    resume: str | None,
    report: ahead.Report = ahead.silent,
) -> Session:
    """Check all that can be checked before the denoiser is loaded, then load it and open the run."""
    prepared = prepare(workspace, loaded, smoke=smoke, resume=resume)
    config, job = prepared.config, prepared.job
    limit.enforce(workspace, config, "fit", report)
    dtype = device.compute_dtype(prepared.device, config.train.mixed_precision)
    denoiser = _load(prepared, dtype, report)
    base = {
        "base_parameters": _logical_parameters(denoiser),
        "base_gib": trainables.tensor_bytes(list(denoiser.parameters())) / files.GIB,
    }
    adapter = trainables.add_adapter(denoiser, config.model.lora, seed=config.train.seed)
    streamed = offload.stream(getattr(denoiser, job.facts.blocks), config.train.streamed, prepared.device)
    if streamed.note:
        report(f"note: {streamed.note}")
    trained, started = _make_trainable(prepared, denoiser, adapter)
    _arrange(denoiser, job, config)
    if prepared.checkpoint is not None:
        checkpoints.restore(prepared.checkpoint, trained)
        optimizers.set_rate(trained.optimizer, trained.schedule)
        checkpoints.reduce(prepared.checkpoint)
    objective = prepared.objective
    predict = Predictor(job.family, denoiser, prepared.device, dtype)
    trainable = {**_described(trained), **base, **_streamed(config, streamed)}
    if started:
        trainable["pretrained"] = started.to_json()
    run = record.open_run(prepared.project, config.model_dump(mode="json"), _document(prepared, trainable))
    return Session(
        config=config,
        device=prepared.device,
        dtype=dtype,
        family=job.family,
        denoiser=denoiser,
        trained=trained,
        batches=prepared.batches,
        gradients=_gradients(objective, predict, trained, config),
        objective=objective,
        predict=predict,
        probe=ahead.probe(prepared.batches, objective, config),
        run=run,
        samples=_samples(prepared.painting, predict, run),
        planned_steps=prepared.planned_steps,
        fingerprint=prepared.fingerprint,
        state=prepared.state,
    )


def _load(prepared: Prepared, dtype: torch.dtype, report: ahead.Report) -> nn.Module:
    config, job = prepared.config, prepared.job
    return job.family.load_denoiser(
        job.model,
        device=prepared.device.type,
        dtype=dtype,
        quantize=config.model.quantize,
        keep=config.model.nf4_keep,
        made=job.made.get("transformer"),
        weight=job.made.get("transformer_weight"),
        table=ahead.table(prepared, report) if config.train.cached_modulation is True else None,
        streamed=config.train.streamed,
    )


def _arrange(denoiser: Any, job: Job, config: Config) -> None:
    """How the blocks are run: what of them is recomputed, and whether they are compiled."""
    compiled = config.train.compile is True
    if compiled:
        job.family.make_compilable(denoiser)
    checkpointing.apply(
        denoiser,
        config.train.gradient_checkpointing,
        job.facts.blocks,
        dropout=config.model.lora.lora_dropout > 0,
        compiled=compiled,
    )


def _gradients(objective: FlowMatching, predict: Predictor, trained: Trained, config: Config) -> Gradients:
    def base(noisy: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        with trained.adapter.disabled():
            return predict(noisy, sigma, conditioning)

    return Gradients(
        objective, predict, base, trained.adapter.parameters(), recorded=config.train.graphs is True
    )


def _document(prepared: Prepared, trainable: dict[str, Any]) -> dict[str, Any]:
    """run.json as the run is opened."""
    config, job, choices = prepared.config, prepared.job, prepared.resolved.choices
    return record.first_document(
        run_id=uuid.uuid4().hex,
        kind="smoke" if prepared.smoke else "full",
        device=prepared.device,
        config=prepared.loaded.raw,
        config_digest=prepared.loaded.digest,
        overrides=prepared.overrides,
        resolved=config.model_dump(mode="json"),
        choices={name: {"value": c.value, "reason": c.reason} for name, c in choices.items()},
        dataset_digest=job.dataset_digest,
        cache_digest=prepared.fingerprint["cache"],
        model={
            "name": config.model.pretrained_model_name_or_path,
            "family": job.facts.name,
            "fingerprints": _loaded(job, prepared.fingerprint["base"]),
        },
        trainable=trainable,
        planned_steps=prepared.planned_steps,
        planned_checkpoints=order.planned_checkpoints(
            prepared.planned_steps, config.train.checkpointing_steps
        ),
        resumed_from=prepared.origin,
    )


def _described(trained: Trained) -> dict[str, Any]:
    parameters = trained.adapter.parameters()
    return {
        "name": "lora",
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "scale": trained.adapter.scale,
        "weights": "trained" if trained.ema is None else "ema",
    }


def _samples(painting: samples.Plan | None, predict: Predictor, run: Run) -> Samples | None:
    if painting is None:
        return None
    return Samples(plan=painting, where=predict.where, denoiser=predict.denoiser, predict=predict, run=run)


def _streamed(config: Config, streamed: offload.Streamed) -> dict[str, Any]:
    """What of the base lives in host memory, for run.json."""
    count = config.train.streamed
    told = {"blocks": count, "host_gib": streamed.host_bytes / files.GIB, "note": streamed.note}
    return {"streamed": told} if count else {}


def _make_trainable(
    prepared: Prepared, denoiser: Any, adapter: trainables.Adapter
) -> tuple[Trained, Pretrained | None]:
    """The adapter with its optimizer and schedule; and what it started from, where config.yaml says."""
    config, job = prepared.config, prepared.job
    started = pretrained.start(job.workspace, config, adapter)
    denoiser.train()
    optimizer = optimizers.make_optimizer(config.optimizer, adapter.parameters())
    schedule = optimizers.make_schedule(config.lr_scheduler, optimizer, prepared.planned_steps)
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


def _logical_parameters(denoiser: nn.Module) -> int:
    """Weights of the base: a byte of NF4 holds two."""
    packed = {id(module.weight) for module in denoiser.modules() if type(module).__name__ == "Linear4bit"}
    return sum(p.numel() * (2 if id(p) in packed else 1) for p in denoiser.parameters())
