"""Some samples encoded again, one by one, and their latents decoded: evidence that the cache is what it says."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
TOLERANCE = 0.02  # relative; more where the text encoder's own rounding is more, see Again


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Embeddings of one entry, made alone."""

    embeds: "Mapping[str, Tensor]"
    rounding: float
    """How far each prompt's are from what they are when it is asked beside itself, relative: the same numbers by the
    kernels of another shape. In bf16 a deep encoder can make of that more than any fixed tolerance. 0 where the cache
    asks one at a time."""


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


def ask_again(job: "Job", encoders: "Encoders", want: Wanted) -> Again:
    """With the text encoder in memory."""
    alone = encode.encode(job.family, encoders, job.config, [want])[0].tensors
    embeds = {name: alone[name] for name in encode.texts(want.document)}
    if job.config.cache.batch_size == 1:
        return Again(embeds=embeds, rounding=0.0)
    beside, _ = encode.encode(job.family, encoders, job.config, [want, want])
    return Again(
        embeds=embeds, rounding=max(_relative_error(embeds[name], beside.tensors[name]) for name in embeds)
    )


def compare(job: "Job", encoders: "Encoders", want: Wanted, again: Again) -> dict[str, Any]:
    """Relative errors of the stored tensors, and how near the decoded target is to its pixels.

    Of the encoders the VAE is enough: `again` was made while the text encoder was in memory.
    """
    assert want.target is not None
    stored = job.store.read(want.folder)
    made = {**encode.encode(job.family, encoders, job.config, [want])[0].tensors, **again.embeds}
    latents = stored["target"][None].to(job.config.cache.devices.vae)
    decoded = job.family.decode(encoders.pipeline.vae, latents)[0].float().cpu()
    wished = encode.pixels(encode.fitted(want.target, job.config.data.processor.background))
    mse = float((decoded.clamp(-1, 1) - wished).square().mean())
    errors = {name: _relative_error(stored[name], made[name]) for name in stored}
    return {
        "id": want.id,
        "embeds_error": max(errors[name] for name in again.embeds),
        "embeds_rounding": again.rounding,
        "latents_error": max(error for name, error in errors.items() if name not in again.embeds),
        "decoded_psnr_db": 10 * math.log10(4 / max(mse, 1e-12)),
    }


def _relative_error(stored: "Tensor", again: "Tensor") -> float:
    old, new = stored.float(), again.float().cpu()
    return float((old - new).norm() / old.norm().clamp_min(1e-12))
