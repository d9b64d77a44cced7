"""Some samples encoded again, one by one, and their latents decoded: evidence that the cache is what it says."""

import math
from typing import TYPE_CHECKING, Any

from runtime import files
from runtime.cache import encode
from runtime.cache.key import Wanted
from runtime.cache.store import Store
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.cache.build import Job
    from runtime.families.base import Encoders

NAME = "07-cache-roundtrip"
SAMPLES = 4
TOLERANCE = 0.02  # relative; kernels for batches and single samples differ in bf16 by less than a hundredth


def is_stale(workspace: Workspace, store: Store) -> bool:
    """Whether the cache has changed since the evidence was made."""
    recorded = workspace.envelope(NAME)
    return recorded is None or bool(recorded["inputs"]["files"] != _inputs(workspace, store))


def _inputs(workspace: Workspace, store: Store) -> dict[str, str]:
    where = f"{workspace.refer(store.root, 'cache')}/{store.manifest_path.name}"
    return {where: files.file_digest(store.manifest_path)}


def measure(job: "Job", encoders: "Encoders | None", manifest_digest: str) -> None:
    """Write the evidence. `encoders`: those of the cache phase, where it has loaded them."""
    recording = job.workspace.begin_evidence(NAME, "finetune cache")
    able = [want for want in job.wants if want.target is not None]
    chosen = able[:: max(1, len(able) // SAMPLES)][:SAMPLES]
    encoders = encoders or encode.load(job.family, job.model, job.config, job.made)
    data = {
        "manifest_digest": manifest_digest,
        "tolerance": TOLERANCE,
        "samples": [compare(job, encoders, want) for want in chosen],
    }
    recording.write(inputs={"files": _inputs(job.workspace, job.store)}, data=data)


def compare(job: "Job", encoders: "Encoders", want: Wanted) -> dict[str, Any]:
    """Relative errors of the stored tensors, and how near the decoded target is to its pixels."""
    assert want.target is not None
    stored = job.store.read(want.folder)
    again = encode.encode(job.family, encoders, job.config, [want])[0].tensors
    latents = stored["target"][None].to(job.config.cache.devices.vae)
    decoded = job.family.decode(encoders.pipeline.vae, latents)[0].float().cpu()
    wished = encode.pixels(encode.fitted(want.target, job.config.data.processor.background))
    mse = float((decoded.clamp(-1, 1) - wished).square().mean())
    embeds = [name for name in stored if "embeds" in name]
    return {
        "id": want.id,
        "embeds_error": max(_relative_error(stored[name], again[name]) for name in embeds),
        "latents_error": max(
            _relative_error(stored[name], again[name]) for name in stored if name not in embeds
        ),
        "decoded_psnr_db": 10 * math.log10(4 / max(mse, 1e-12)),
    }


def _relative_error(stored: "Tensor", again: "Tensor") -> float:
    old, new = stored.float(), again.float().cpu()
    return float((old - new).norm() / old.norm().clamp_min(1e-12))
