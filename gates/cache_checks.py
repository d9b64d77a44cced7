"""The checks of gate 07's phase `cache`; those of its runs are in the skill's gate.py."""

import math
from typing import Any

from gates import caches
from gates.checks import Checks, Finding, failed, listing, verdict_of
from gates.training import CacheEvidence
from gates.verdict import EvidenceRef

ROUNDTRIP_ERROR_MAX = 0.02  # relative; or, of embeddings, twice the encoder's own rounding where that is more
ROUNDING_MAX = 0.15  # relative; an encoder that rounds by more can't be told from one that answers wrongly
ROUNDTRIP_PSNR_MIN = 12.0  # dB; latents of another picture, or in another scaling, decode to less
ROUNDTRIP = ".gates/evidence/07-cache-roundtrip.json"

CACHE: Checks[CacheEvidence] = Checks("cache")


@CACHE.check(
    "cache-complete",
    title="The cache holds every sample, whole",
    section="7.3",
    remedy=caches.REMEDY,
    why="a fit that meets a missing or torn entry dies on it, hours into the run",
)
def cache_complete(e: CacheEvidence) -> Finding:
    """One entry per sample; each file with its recorded size and digest; each key that of its document."""
    cache = e.cache.get()
    faults = caches.whole_faults(cache, e.dataset.get()["samples"])
    return verdict_of(
        not faults,
        listing(faults) or f"{len(cache.entries)} entries, each whole",
        expected=0,
        observed=len(faults),
        unit="faults",
        evidence=(EvidenceRef(path=f"{cache.path}/manifest.json", locator="/entries"),),
    )


@CACHE.check(
    "cache-matches-config",
    title="The cache was made for this config and dataset",
    section="7.1",
    remedy=caches.REMEDY,
    needs=("cache-complete",),
    why="latents of another size or prompt train another thing, or die with mismatched shapes",
)
def cache_matches_config(e: CacheEvidence) -> Finding:
    """Settings of manifest and entries, sizes and prompts of the config, digests of dataset and encoders."""
    cache = e.cache.get()
    faults = caches.encoder_faults(cache, e.encoders)
    faults += caches.config_faults(cache, e.dataset.get(), e.settings.get(), e.prompts.get())
    return verdict_of(
        not faults,
        listing(faults) or f"{len(cache.entries)} entries agree",
        expected=0,
        observed=len(faults),
        unit="differences",
    )


@CACHE.check(
    "cache-distinct",
    title="Different samples have different embeddings and latents",
    section="7.3",
    remedy="move the cache folder away, then finetune cache; if it stays, the sources show the same pixels: "
    "remove one of them, then finetune dataset",
    needs=("cache-complete",),
    why="a cache keyed by prompt text gives every sample the last one's embedding, and trains on it",
)
def cache_distinct(e: CacheEvidence) -> Finding:
    """Tensors with equal bytes whose sources (text and controls; a control; a target) have different bytes."""
    collisions = caches.collisions(e.cache.get())
    return verdict_of(
        not collisions,
        listing(collisions) or f"{len(e.cache.get().entries)} entries, none shares a tensor",
        expected=0,
        observed=len(collisions),
        unit="collisions",
    )


@CACHE.check(
    "cache-roundtrip",
    title="Encoding again gives the cached tensors, and decoding gives the pictures",
    section="7.3",
    remedy=caches.REMEDY,
    needs=("cache-complete",),
    why="latents in a wrong range or precision look like any others until the images come out",
)
def cache_roundtrip(e: CacheEvidence) -> Finding:
    """Of samples encoded anew after the cache was made: relative errors, and the decoded target's PSNR.

    The rounding is what the text encoder's answer to a prompt changes by when it is asked beside itself. A cache that
    is made in batches can't be nearer than that to the answer alone.
    """
    data = e.roundtrip.get()
    if data["manifest_digest"] != e.cache.get().digest:
        return failed(
            "it was measured on another cache",
            expected=e.cache.get().digest,
            observed=data["manifest_digest"],
        )
    samples = data["samples"]
    faults = [
        f"{sample['id']}: {name} {sample[name]:.3g}, at most {limit:.3g}"
        for sample in samples
        for name, limit in _limits(sample).items()
        if not sample.get(name, 0.0) <= limit
    ]
    faults += [
        f"{sample['id']}: decodes to {sample['decoded_psnr_db']:.1f} dB"
        for sample in samples
        if not ROUNDTRIP_PSNR_MIN <= sample["decoded_psnr_db"] < math.inf
    ]
    return verdict_of(
        bool(samples) and not faults,
        listing(faults) or f"{len(samples)} samples",
        expected=f"errors <= {ROUNDTRIP_ERROR_MAX}, of embeddings <= twice their rounding if that is more, "
        f"rounding <= {ROUNDING_MAX}, >= {ROUNDTRIP_PSNR_MIN:g} dB, 1 sample or more",
        observed={
            "samples": len(samples),
            "worst_error": max((max(s["embeds_error"], s["latents_error"]) for s in samples), default=None),
            "worst_psnr_db": min((s["decoded_psnr_db"] for s in samples), default=None),
        },
        evidence=(EvidenceRef(path=ROUNDTRIP, locator="/data/samples"),),
    )


def _limits(sample: dict[str, Any]) -> dict[str, float]:
    rounding = sample.get("embeds_rounding", 0.0)  # evidence of earlier versions has none
    return {
        "embeds_rounding": ROUNDING_MAX,
        "embeds_error": max(ROUNDTRIP_ERROR_MAX, 2 * min(rounding, ROUNDING_MAX)),
        "latents_error": ROUNDTRIP_ERROR_MAX,
    }
