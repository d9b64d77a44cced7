"""The cache phase: encode what is missing, leave the rest alone, never load the denoiser."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import device, files
from runtime.cache import encode, key
from runtime.cache.encode import Ask
from runtime.cache.key import Wanted
from runtime.cache.store import Store
from runtime.config.model import Config
from runtime.data import manifest
from runtime.families.base import Encoders, Family
from runtime.memory import made
from runtime.progress import Progress
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from torch import Tensor

ROUNDTRIP_SAMPLES = 4
ROUNDTRIP_TOLERANCE = 0.02  # relative; two runs of a bf16 kernel differ by less than a hundredth


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `finetune cache` did. `reasons`: why entries were built, and how many for each."""

    entries: int
    built: int
    reasons: dict[str, int]
    kept: int
    left_over: int
    tensors: dict[str, int]
    size_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the cache phase knows before it loads a model."""

    workspace: Workspace
    config: Config
    family: Family
    model: Path
    store: Store
    dataset_digest: str
    common: dict[str, Any]
    wants: list[Wanted]
    devices: dict[str, str]
    made: Mapping[str, Path]
    """By component, what step 06 made and the config asks for."""


def plan(workspace: Workspace, config: Config) -> Job:
    """What the cache must hold for a resolved config and the dataset. Reads files, loads nothing."""
    from runtime.families.registry import load_family, locate

    reference = config.model.pretrained_model_name_or_path
    model = locate(reference, workspace.resolve(reference))
    family = load_family(model)
    listed, root = manifest.load(workspace)
    quantized = made.folders(workspace, model, config)
    common = key.settings(config, family, model, _dtypes(config), quantized)
    wants = key.wanted(config, workspace, listed, root, common)
    for want in wants:
        encode.refuse_control_count(family, f"sample {want.id}", len(want.controls))
    return Job(
        workspace=workspace,
        config=config,
        family=family,
        model=model,
        store=Store(workspace.resolve(config.cache.cache_dir)),
        dataset_digest=listed.dataset_digest,
        common=common,
        wants=wants,
        devices={"text_encoder": config.cache.devices.text_encoder, "vae": config.cache.devices.vae},
        made=quantized,
    )


def build(job: Job, progress: Progress) -> Summary:
    """Bring the cache up to date. An interruption costs the sample at hand; a rerun goes on from there."""
    faults = {want.key: fault for want in job.wants if (fault := job.store.fault(want))}
    todo = [want for want in job.wants if want.key in faults]
    before = job.store.documents() if todo else {}
    reasons = Counter(_reason(before, want, faults[want.key]) for want in todo)
    encoders = None
    if todo:
        job.store.write_manifest(job.wants, job.common, job.dataset_digest, complete=False)
        encoders = encode.load(job.family, job.model, job.config, job.made)
        for want in progress.over(todo, "cache", unit="sample"):
            job.store.write(want, encode_entry(job, encoders, want))
    document = job.store.write_manifest(job.wants, job.common, job.dataset_digest, complete=True)
    if _roundtrip_is_stale(job):
        _roundtrip(
            job,
            encoders or encode.load(job.family, job.model, job.config, job.made),
            files.document_digest(document["entries"]),
        )
    return _summary(job, reasons)


def encode_entry(job: Job, encoders: Encoders, want: Wanted) -> "dict[str, Tensor]":
    ask = Ask(
        prompt=want.document["prompt"],
        controls=want.controls,
        target=want.target,
        empty=want.document["empty_prompt"],
        negative=want.document["negative_prompt"],
    )
    return encode.encode(job.family, encoders, job.config, ask)


def _dtypes(config: Config) -> dict[str, str]:
    """Name of the precision of each encoder, on the device where it will run."""
    precision = config.train.mixed_precision
    return {
        name: str(device.compute_dtype(device.pick(kind), precision)).removeprefix("torch.")
        for name, kind in (
            ("text_encoder", config.cache.devices.text_encoder),
            ("vae", config.cache.devices.vae),
        )
    }


def _reason(before: dict[tuple[str, str], dict[str, Any]], want: Wanted, fault: str) -> str:
    """Names what changed where the same sample was cached before."""
    if fault != "not there":
        return fault
    old = before.get((want.split, want.id))
    if old is None:
        return "new"
    changed = key.differences(old, want.document)
    return "changed: " + ", ".join(sorted({line.partition(":")[0] for line in changed}))


def _roundtrip_inputs(job: Job) -> dict[str, str]:
    where = f"{job.workspace.refer(job.store.root, 'cache')}/{job.store.manifest_path.name}"
    return {where: files.file_digest(job.store.manifest_path)}


def _roundtrip_is_stale(job: Job) -> bool:
    recorded = job.workspace.envelope("07-cache-roundtrip")
    return recorded is None or bool(recorded["inputs"]["files"] != _roundtrip_inputs(job))


def _roundtrip(job: Job, encoders: Encoders, manifest_digest: str) -> None:
    """Encode some samples again and decode their latents: evidence that the cache is what it says."""
    recording = job.workspace.begin_evidence("07-cache-roundtrip", "finetune cache")
    step = max(1, len(job.wants) // ROUNDTRIP_SAMPLES)
    chosen = [want for want in job.wants[::step] if want.target is not None][:ROUNDTRIP_SAMPLES]
    data = {
        "manifest_digest": manifest_digest,
        "tolerance": ROUNDTRIP_TOLERANCE,
        "samples": [_compare(job, encoders, want) for want in chosen],
    }
    recording.write(inputs={"files": _roundtrip_inputs(job)}, data=data)


def _compare(job: Job, encoders: Encoders, want: Wanted) -> dict[str, Any]:
    assert want.target is not None
    stored, again = job.store.read(want.folder), encode_entry(job, encoders, want)
    target = encode.fitted(want.target, job.config.data.processor.target_size)
    latents = stored["target"][None].to(job.config.cache.devices.vae)
    decoded = job.family.decode(encoders.pipeline.vae, latents)[0].float().cpu()
    mse = float((decoded.clamp(-1, 1) - encode.pixels(target)).square().mean())
    return {
        "id": want.id,
        "embeds_error": _relative_error(stored["prompt_embeds"], again["prompt_embeds"]),
        "latents_error": max(
            _relative_error(stored[name], again[name]) for name in stored if not name.endswith("_embeds")
        ),
        "decoded_psnr_db": 10 * math.log10(4 / max(mse, 1e-12)),
    }


def _relative_error(stored: "Tensor", again: "Tensor") -> float:
    old, new = stored.float(), again.float().cpu()
    return float((old - new).norm() / old.norm().clamp_min(1e-12))


def _summary(job: Job, reasons: Counter[str]) -> Summary:
    tensors: Counter[str] = Counter()
    size = 0
    for want in job.wants:
        entry = job.store.entry(want.folder)
        size += sum(recorded["size"] for recorded in entry["files"].values())
        tensors.update(
            name.split("_")[0] if name.startswith("control") else name for name in entry["tensors"]
        )
    built = sum(reasons.values())
    return Summary(
        entries=len(job.wants),
        built=built,
        reasons=dict(reasons),
        kept=len(job.wants) - built,
        left_over=len(job.store.unlisted()),
        tensors=dict(tensors),
        size_gib=size / files.GIB,
    )
