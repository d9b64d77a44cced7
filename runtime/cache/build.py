"""The cache phase: encode what is missing, leave the rest alone, never load the denoiser.

With nothing to do neither torch nor a model is loaded, and no picture is opened.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import files
from runtime.cache import key
from runtime.cache.key import Wanted
from runtime.cache.store import Store
from runtime.config.model import Config
from runtime.data import manifest
from runtime.data.manifest import Manifest
from runtime.errors import CacheError, DataError
from runtime.families.facts import Facts
from runtime.index import Index
from runtime.planning import architecture, work
from runtime.progress import Progress
from runtime.quantize import made
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from runtime.cache.passes import Tally
    from runtime.families.base import Family

SHOWN = 3  # samples named for each reason
SPARE_GIB = 0.5  # left free on the disk of the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What `finetune cache` did.

    `reasons`: why entries were built, and the ids of each. `tensors` and `bytes`: by kind, over all entries.
    `prompts` and `pictures`: encoded now. `seconds`: by stage; `read` is what an encoder waited for pictures.
    `peak_gib`: allocated on its device while an encoder was there, by component; accelerators only.
    """

    entries: int
    built: int
    reasons: dict[str, list[str]]
    kept: int
    left_over: int
    tensors: dict[str, int]
    bytes: dict[str, int]
    notes: list[str]
    prompts: int = 0
    pictures: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the cache phase knows before it loads a model."""

    workspace: Workspace
    config: Config
    facts: Facts
    model: Path
    store: Store
    listed: Manifest
    common: dict[str, Any]
    wants: list[Wanted]
    made: Mapping[str, Path]
    """By component, what step 06 made and the config asks for."""

    @property
    def dataset_digest(self) -> str:
        return self.listed.dataset_digest

    @property
    def family(self) -> "Family":
        from runtime.families.registry import load_family

        return load_family(self.model)


def plan(workspace: Workspace, config: Config) -> Job:
    """What the cache must hold for a resolved config and the dataset. Reads files, loads nothing."""
    from runtime.families import registry

    reference = config.model.pretrained_model_name_or_path
    model = registry.locate(reference, workspace.resolve(reference))
    facts = registry.facts(model)
    listed = manifest.load(workspace)
    quantized = made.folders(workspace, model, config)
    common = key.settings(config, facts, model, quantized)
    wants = key.wanted(config, workspace, listed, facts, common)
    for want in wants:
        refuse_control_count(facts, f"sample {want.id}", len(want.controls))
    return Job(
        workspace=workspace,
        config=config,
        facts=facts,
        model=model,
        store=Store(workspace.resolve(config.cache.cache_dir), Index.open(workspace.index_path)),
        listed=listed,
        common=common,
        wants=wants,
        made=quantized,
    )


def refuse_control_count(facts: Facts, name: str, count: int) -> None:
    """Raises DataError where the family takes fewer or more controls than `count`."""
    if not facts.min_controls <= count <= facts.max_controls:
        raise DataError(
            f"{name} has {count} controls; family {facts.name} takes {facts.min_controls} to {facts.max_controls}",
            remedy="take the extra control images away, or use a base of family qwen-image-edit-plus",
        )


def build(job: Job, progress: Progress) -> Summary:
    """Bring the cache up to date. An interruption costs one batch; a rerun goes on from there."""
    with job.store.locked(progress):
        try:
            return _build(job, progress)
        finally:
            job.store.index.save()


def _build(job: Job, progress: Progress) -> Summary:
    faults = {want.key: fault for want in job.wants if (fault := job.store.fault(want))}
    todo = list({want.key: want for want in job.wants if want.key in faults}.values())
    before = job.store.documents() if todo else {}
    reasons: dict[str, list[str]] = {}
    for want in todo:
        reasons.setdefault(_reason(before, want, faults[want.key]), []).append(want.id)
    compared, tally = None, None
    if todo:
        refuse_full_disk(job, todo)
        job.store.write_manifest(job.wants, job.common, job.dataset_digest, None)
        for reason, ids in reasons.items():
            progress.say(f"encoding {len(ids)}: {reason} ({_some(ids)})")
        compared, tally = _encode(job, todo, progress)
    entries = {want.folder: _kept(job.store.entry(want.folder)) for want in job.wants}
    document = job.store.write_manifest(job.wants, job.common, job.dataset_digest, entries)
    _roundtrip(job, compared, files.document_digest(document["entries"]), progress)
    return _summary(job, reasons, entries, tally)


def _kept(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Without its document, which is the larger part, and of which each file has its own."""
    return {name: entry[name] for name in ("files", "tensors", "notes")}


def _encode(job: Job, todo: Sequence[Wanted], progress: Progress) -> "tuple[list[dict[str, Any]], Tally]":
    """Entries of `todo`, and for the evidence what some of all look like when they are made again."""
    from runtime.cache import passes, roundtrip

    job.workspace.begin_evidence(roundtrip.NAME, "finetune cache")  # yesterday's is of another cache
    tally = passes.Tally()
    compared = passes.fill(job, todo, tally, progress)
    if todo:
        progress.say(_took(tally))
    return compared, tally


def _took(tally: "Tally") -> str:
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in tally.seconds.items())
    rate = tally.pictures / max(1e-9, tally.seconds.get("encode pictures", 0.0))
    return f"encoded {tally.prompts} prompts and {tally.pictures} pictures ({rate:.1f} pictures/s): {stages}"


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ", ".join(ids[:SHOWN]) + more


def _reason(before: dict[tuple[str, str], dict[str, Any]], want: Wanted, fault: str) -> str:
    """Names what changed where the same sample was cached before."""
    if fault != "not there":
        return fault
    old = before.get((want.split, want.id))
    if old is None:
        return "new"
    changed = key.differences(old, want.document)
    return "changed: " + ", ".join(sorted({line.partition(":")[0] for line in changed}))


def refuse_full_disk(job: Job, todo: Sequence[Wanted]) -> None:
    """Raises CacheError where the entries to come would not fit on the disk."""
    needed = sum(_expected_bytes(job, want) for want in todo) / files.GIB
    job.store.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(job.store.root).free / files.GIB
    if needed + SPARE_GIB > free:
        raise CacheError(
            f"the cache needs about {needed:.2f} GiB for {len(todo)} entries and {SPARE_GIB} GiB to spare, "
            f"{free:.2f} GiB are free in {job.store.root}",
            remedy="free disk space, or set cache.cache_dir to a folder on another disk",
        )


def _expected_bytes(job: Job, want: Wanted) -> int:
    """Latents and embeddings, counted in fp32 wherever that may be."""
    return work.entry_bytes(want.document, job.config, architecture.read(job.model))


def _roundtrip(
    job: Job, compared: list[dict[str, Any]] | None, manifest_digest: str, progress: Progress
) -> None:
    """Evidence that the cache is what it says, made anew where the cache is another."""
    from runtime.cache import roundtrip

    if roundtrip.is_stale(job.workspace, job.store):
        if compared is None:
            compared, _ = _encode(job, [], progress)
        roundtrip.measure(job, compared, manifest_digest)


def _summary(
    job: Job,
    reasons: Mapping[str, list[str]],
    entries: Mapping[str, dict[str, Any]],
    tally: "Tally | None",
) -> Summary:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for want in job.wants:
        for kind, size in _tensors(entries[want.folder]):
            counts[kind] += 1
            sizes[kind] += size
    built = sum(len(ids) for ids in reasons.values())
    return Summary(
        entries=len(job.wants),
        built=built,
        reasons=dict(reasons),
        kept=len(job.wants) - built,
        left_over=len(job.store.unlisted()),
        tensors=dict(counts),
        bytes=dict(sizes),
        notes=[f"{want.id}: {note}" for want in job.wants for note in entries[want.folder]["notes"]],
        **(asdict(tally) if tally else {}),
    )


def _tensors(entry: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Kind and bytes of each tensor."""
    widths = {"float32": 4, "bfloat16": 2, "float16": 2}
    for name, tensor in entry["tensors"].items():
        size = widths[tensor["dtype"]]
        for side in tensor["shape"]:
            size *= side
        yield _kind(name), size


def _kind(name: str) -> str:
    if "embeds" in name:
        return "embeddings"
    return {"target": "latents", "mask": "masks"}.get(name, "controls")


def open_for_fit(job: Job) -> dict[str, Any]:
    """The manifest of the cache, refused by name where it was made for other settings or samples, or is damaged."""
    document = job.store.manifest()
    changed = key.differences(document["settings"], job.common)
    if changed:
        raise CacheError(
            "the cache was made for other settings:\n  " + "\n  ".join(changed), remedy="finetune cache"
        )
    listed = {entry["key"] for entry in document["entries"]}
    missing = [want for want in job.wants if want.key not in listed]
    if missing:
        raise CacheError(_missing(job, missing), remedy="finetune cache")
    # Megabytes, read again in the fit: better now than as a traceback in the middle of the night.
    damaged = [f"{want.id}: {fault}" for want in job.wants if (fault := job.store.fault(want))]
    job.store.index.save()
    if damaged:
        raise CacheError("the cache is damaged:\n  " + "\n  ".join(damaged[:5]), remedy="finetune cache")
    return document


def _missing(job: Job, missing: Sequence[Wanted]) -> str:
    """What the cache lacks, and what changed where it has the same samples as they were before."""
    before = job.store.documents()
    lines: dict[str, list[str]] = {}
    for want in missing:
        old = before.get((want.split, want.id))
        found = key.differences(old, want.document) if old is not None else ["not cached"]
        for line in found:
            name, _, values = line.partition(": ")
            # Digests say nothing to a person.
            shown = f"another {name}" if name in ("target", "controls", "mask") else f"{name}: {values}"
            lines.setdefault(shown if values else line, []).append(want.id)
    # Boxes, each sample's own, follow from sizes: they come last.
    widest = sorted(lines.items(), key=lambda item: (item[0].startswith("boxes."), -len(item[1])))
    told = [f"{line} ({_some(ids)})" for line, ids in widest[:5]]
    return f"the cache does not fit for {len(missing)} of {len(job.wants)} samples:\n  " + "\n  ".join(told)
