"""Step 06: a component's weights to NF4, one tensor at a time, from shards to shards.

    models/nf4/<component>/
        config.json           the source's, with `quantization_config`
        *.safetensors         shard for shard as in the source, and the source's kind of index
        quantize.json         the journal: what it was made from, and each finished shard with its digest

A shard appears whole, then the journal names it. So an interruption costs the shard at hand: a rerun keeps
what the journal names and the disk still has, byte for byte, and makes the rest. The source is only read.

The folder is what bitsandbytes' loaders in transformers and diffusers expect. transformers was run on it on a
CPU; diffusers' loader refuses a machine without GPU and was not: names, shapes and states were compared with
what it asks for instead.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from runtime import files
from runtime.errors import UserError
from runtime.memory import nf4, shards
from runtime.memory.nf4 import Rule
from runtime.memory.shards import Entry, Writer
from runtime.progress import Progress

JOURNAL = "quantize.json"
WORST = 5  # layers named in the evidence
COPIED = ("generation_config.json",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    component: str
    source: Path
    target: Path
    rule: Rule
    device: str
    """cpu or cuda; the weights come from the CPU and go back there."""


@dataclass(slots=True, kw_only=True)
class Journal:
    path: Path
    settings: dict[str, Any]
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self) -> None:
        document = {"schema": "quantize/1", "settings": self.settings, "shards": self.shards}
        files.write_json(self.path, document)


def quantize(job: Job, progress: Progress) -> dict[str, Any]:
    """Make `job.target` and return its record for the evidence. Raises UserError for a source that is torn."""
    sources = shards.find(job.source)
    headers = {shard.name: shards.read_header(shard) for shard in sources}
    before = files.weights_fingerprint(job.source)
    journal = _journal(job, before)
    done = sum(len(headers[name]) for name in journal.shards)
    progress.start(f"quantize {job.component}", sum(map(len, headers.values())), done)
    try:
        for shard in sources:
            if shard.name in journal.shards:
                continue
            at = _advance(progress, done)
            journal.shards[shard.name] = _shard(job, shard, headers[shard.name], at)
            journal.write()
            done += len(headers[shard.name])
    finally:
        progress.stop()
    _write_index(job, headers)
    _write_config(job, headers)
    after = files.weights_fingerprint(job.source)
    if after != before:
        journal.path.unlink()
        raise UserError(
            f"{job.source} has changed while it was read",
            remedy=f"finetune quantize --component {job.component}",
        )
    return _record(job, journal, headers, before, after)


def _advance(progress: Progress, done: int) -> Callable[[int, str], None]:
    return lambda count, name: progress.update(done + count, name)


def missing_bytes(job: Job) -> int:
    """What is still to be written, headers left out; whether a shard that is there is whole comes later."""
    headers = {shard.name: shards.read_header(shard) for shard in shards.find(job.source)}
    absent = [header for name, header in headers.items() if not (job.target / name).is_file()]
    return sum(
        prod(shape) * shards.width(dtype)
        for header in absent
        for dtype, shape in _planned(job, header).values()
    )


# ---- what a kill may have left


def _journal(job: Job, fingerprint: str) -> Journal:
    """Of the target as it is: shards that the journal names and that are still what it says."""
    settings = {
        "component": job.component,
        "source_fingerprint": fingerprint,
        "inside": job.rule.inside,
        "keep": list(job.rule.keep),
        "block": nf4.BLOCK,
    }
    path = job.target / JOURNAL
    found = read_journal(job.target)
    if found is None and job.target.is_dir() and any(job.target.glob("*.safetensors")):
        raise UserError(
            f"{job.target} holds weights that this command did not make",
            remedy=f"move it away, then finetune quantize --component {job.component}",
        )
    journal = Journal(path=path, settings=settings)
    if found is not None and found["settings"] == settings:
        whole = {name: it for name, it in found["shards"].items() if _is_whole(job.target / name, it)}
        journal.shards = whole
    for torn in sorted(job.target.glob("*.safetensors")):
        if torn.name not in journal.shards:
            torn.unlink()
    for left in job.target.glob(".*.tmp"):
        left.unlink()
    journal.write()
    return journal


def read_journal(folder: Path) -> dict[str, Any] | None:
    """The journal of a made folder; None where there is none, or none that can be read."""
    try:
        document = files.read_json(folder / JOURNAL)
    except (OSError, ValueError):
        return None
    is_one = isinstance(document, dict) and {"settings", "shards"} <= document.keys()
    return document if is_one else None


def _is_whole(path: Path, record: Mapping[str, Any]) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == record["size"]
        and files.file_digest(path) == record["sha256"]
    )


# ---- one shard


def _shard(
    job: Job, source: Path, header: Mapping[str, Entry], advance: Callable[[int, str], None]
) -> dict[str, Any]:
    errors: dict[str, float] = {}
    target = job.target / source.name
    files.write_with(target, lambda path: _write(job, source, header, path, errors, advance))
    return {"size": target.stat().st_size, "sha256": files.file_digest(target), "errors": errors}


def _write(
    job: Job,
    source: Path,
    header: Mapping[str, Entry],
    path: Path,
    errors: dict[str, float],
    advance: Callable[[int, str], None],
) -> None:
    quantized = {name for name, it in header.items() if job.rule.takes(name, it.dtype, it.shape)}
    writer = Writer(path, _planned(job, header), [f"{name}.{nf4.STATE}" for name in quantized])
    try:
        # In the order of the file: reading goes on from where the last tensor ended.
        for count, name in enumerate(sorted(header, key=lambda name: header[name].start), 1):
            if name in quantized:
                errors[nf4.module_of(name)] = _quantize_one(job, source, header[name], name, writer)
            else:
                writer.put(name, shards.read_tensor(source, header[name]))
            advance(count, nf4.module_of(name))
        writer.close()
    finally:
        writer.abandon()


def _planned(job: Job, header: Mapping[str, Entry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the shard to be, the late texts left out: name to (dtype, shape)."""
    planned: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, entry in header.items():
        packed = job.rule.takes(name, entry.dtype, entry.shape)
        planned |= nf4.planned(name, entry.shape) if packed else {name: (entry.dtype, entry.shape)}
    return planned


def _quantize_one(job: Job, source: Path, entry: Entry, name: str, writer: Writer) -> float:
    """Write the parts of one weight; nothing of it stays in memory after."""
    weight = shards.read_tensor(source, entry)
    packed, state = nf4.quantize(weight, job.device)
    error = nf4.relative_error(weight, packed, state)
    writer.put(name, packed)
    for suffix, tensor in state.as_dict(packed=True).items():
        if suffix == nf4.STATE:
            writer.put_late(f"{name}.{suffix}", bytes(tensor.tolist()))
        else:
            writer.put(f"{name}.{suffix}", tensor)
    return error


# ---- what makes the shards a folder that libraries load


def _write_index(job: Job, headers: Mapping[str, Mapping[str, Entry]]) -> None:
    """As the source has one; its weight_map follows the tensors that were written."""
    index = next(iter(sorted(job.source.glob("*.safetensors.index.json"))), None)
    if index is None:
        return
    made = {name: shards.read_header(job.target / name) for name in headers}
    size = sum(entry.size for header in made.values() for entry in header.values())
    weight_map = {tensor: name for name, header in made.items() for tensor in header}
    files.write_json(job.target / index.name, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_config(job: Job, headers: Mapping[str, Mapping[str, Entry]]) -> None:
    config = files.read_json(job.source / "config.json")
    everything = {name: entry for header in headers.values() for name, entry in header.items()}
    kept = kept_linears(job, everything)
    outside = [
        nf4.module_of(name)
        for name, entry in everything.items()
        if job.component == "transformer"
        and name.endswith(".weight")
        and len(entry.shape) == 2
        and not name.startswith(job.rule.inside)
    ]
    # transformers puts `model.` or `model.language_model.` before a name, and compares ends of names.
    inner = [name.removeprefix("model.") if job.component == "text_encoder" else name for name in kept]
    skipped = sorted({*outside, *inner, *(["lm_head"] if job.component == "text_encoder" else [])})
    files.write_json(job.target / "config.json", {**config, "quantization_config": nf4.config_entry(skipped)})
    for name in COPIED:
        if (job.source / name).is_file():
            files.write_bytes(job.target / name, (job.source / name).read_bytes())


def kept_linears(job: Job, header: Mapping[str, Entry]) -> list[str]:
    """Linears under the rule's eye that stay as they are: by a pattern, or for their rows are no whole blocks."""
    return sorted(
        nf4.module_of(name)
        for name, entry in header.items()
        if job.rule.is_linear(name, entry.dtype, entry.shape)
        and not job.rule.takes(name, entry.dtype, entry.shape)
    )


# ---- the record


def _record(
    job: Job, journal: Journal, headers: Mapping[str, Mapping[str, Entry]], before: str, after: str
) -> dict[str, Any]:
    errors = {name: error for shard in journal.shards.values() for name, error in shard["errors"].items()}
    if not errors:
        raise UserError(
            f"no linear of {job.component} would be quantized",
            remedy="give finetune quantize other --keep patterns",
        )
    worst = sorted(errors, key=lambda name: (-errors[name], name))[:WORST]
    everything = {name: entry for header in headers.values() for name, entry in header.items()}
    source = _bytes(header for header in headers.values())
    made = _bytes(shards.read_header(job.target / name) for name in headers)
    return {
        "name": job.component,
        "source_fingerprint": before,
        "source_fingerprint_after": after,
        "made_fingerprint": files.weights_fingerprint(job.target),
        "source_gib": source / files.GIB,
        "made_gib": made / files.GIB,
        "ratio": made / source,
        "linears": len(errors),
        "kept": kept_linears(job, everything),
        "mean_error": sum(errors.values()) / len(errors),
        "worst": [{"name": name, "error": errors[name]} for name in worst],
        "files": {
            path.name: {"size": path.stat().st_size, "sha256": _digest(path, journal)}
            for path in sorted(job.target.iterdir())
        },
    }


def _bytes(headers: Iterable[Mapping[str, Entry]]) -> int:
    return sum(entry.size for header in headers for entry in header.values())


def _digest(path: Path, journal: Journal) -> str:
    known = journal.shards.get(path.name)
    return str(known["sha256"]) if known else files.file_digest(path)
