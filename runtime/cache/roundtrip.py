"""Some samples encoded again, one by one, and their latents decoded: evidence that the cache is what it says."""

import math
from collections.abc import Mapping, Sequence
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


def chosen(job: "Job") -> list[Wanted]:
    """The samples that are looked at, spread over all."""
    able = [want for want in job.wants if want.target is not None]
    return able[:: max(1, len(able) // SAMPLES)][:SAMPLES]


def measure(job: "Job", compared: Sequence[Mapping[str, Any]], manifest_digest: str) -> None:
    """Write the evidence. `compared`: what `compare` gave for each that was chosen."""
    recording = job.workspace.begin_evidence(NAME, "finetune cache")
    data = {"manifest_digest": manifest_digest, "tolerance": TOLERANCE, "samples": list(compared)}
    recording.write(inputs={"files": _inputs(job.workspace, job.store)}, data=data)


def compare(
    job: "Job", encoders: "Encoders", want: Wanted, embeds: "Mapping[str, Tensor] | None" = None
) -> dict[str, Any]:
    """Relative errors of the stored tensors, and how near the decoded target is to its pixels.

    `embeds`: made again before, where the text encoder is no longer in memory.
    """
    assert want.target is not None
    stored = job.store.read(want.folder)
    again = {**(embeds or {}), **encode.encode(job.family, encoders, job.config, [want])[0].tensors}
    latents = stored["target"][None].to(job.config.cache.devices.vae)
    decoded = job.family.decode(encoders.pipeline.vae, latents)[0].float().cpu()
    wished = encode.pixels(encode.fitted(want.target, job.config.data.processor.background))
    mse = float((decoded.clamp(-1, 1) - wished).square().mean())
    texts = [name for name in stored if "embeds" in name]
    return {
        "id": want.id,
        "embeds_error": max(_relative_error(stored[name], again[name]) for name in texts),
        "latents_error": max(
            _relative_error(stored[name], again[name]) for name in stored if name not in texts
        ),
        "decoded_psnr_db": 10 * math.log10(4 / max(mse, 1e-12)),
    }


def _relative_error(stored: "Tensor", again: "Tensor") -> float:
    old, new = stored.float(), again.float().cpu()
    return float((old - new).norm() / old.norm().clamp_min(1e-12))
