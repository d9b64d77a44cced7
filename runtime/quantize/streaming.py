"""Step 06: a component's weights to NF4, one tensor at a time, from shards to shards.

    models/nf4/<component>/
        config.json           the source's, with `quantization_config`
        *.safetensors         shard for shard as in the source, and the source's kind of index
        quantize.json         the journal: what it was made from, and each finished shard with its digest

A shard appears whole, then the journal names it. So an interruption costs the shard at hand: a rerun keeps
what the journal names and the disk still has, byte for byte, and makes the rest. The source is only read.

The folder is what bitsandbytes' loaders in transformers and diffusers expect; `benchmarks/nf4_loaders.py` loads it
through each and compares, diffusers' only on a GPU, without which it refuses.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import fsum, prod
from pathlib import Path
from typing import Any

from runtime import files, shards
from runtime.errors import UserError
from runtime.progress import Progress
from runtime.quantize import nf4, packing
from runtime.quantize.crew import crew
from runtime.quantize.meter import Meter
from runtime.quantize.nf4 import Rule
from runtime.quantize.sources import Folder, Source
from runtime.shards import Entry

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
    supply: Source | None = None
    """Where the shards come from, where `source` does not hold all of them."""
    workers: int | None = None
    """Threads; as many as torch computes with if None. The bytes are the same with any number."""

    @property
    def shards(self) -> Source:
        return self.supply or Folder(self.source)


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
    source = job.shards
    headers = {name: source.header(name) for name in source.names}
    before = source.identity()
    journal = _journal(job, before)
    todo = [name for name in headers if name not in journal.shards]
    for name in headers.keys() - todo:
        source.release(name)
    fetched = sum(source.to_fetch(name) for name in todo)
    done = sum(_bytes([headers[name]]) for name in journal.shards)
    meter = Meter(progress, f"quantize {job.component}", _bytes(headers.values()) + fetched, done)
    try:
        with crew(job.workers) as pool:
            _make(job, source, headers, journal, todo, pool, meter)
    finally:
        meter.stop()
    _write_index(job, headers)
    _write_config(job, headers)
    if source.identity() != before:
        journal.path.unlink()
        raise UserError(
            f"{job.source} has changed while it was read",
            remedy=f"finetune quantize --component {job.component}",
        )
    return _record(job, journal, headers, source)


def _make(
    job: Job,
    source: Source,
    headers: Mapping[str, Mapping[str, Entry]],
    journal: Journal,
    todo: Iterable[str],
    pool: Executor,
    meter: Meter,
) -> None:
    """Each shard of `todo`; its way to the disk, digest and journal run beside the next one's quantization."""
    finishing: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="finisher") as finisher:
        for name in todo:
            path = source.open(name, meter)
            temporary = job.target / f".{name}.{os.getpid()}.tmp"
            try:
                errors = packing.pack(job.rule, path, headers[name], temporary, job.device, pool, meter)
                if finishing is not None:
                    finishing.result()
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finishing = finisher.submit(_finish, job, source, journal, name, temporary, errors)
            if source.one_by_one:
                finishing.result()
        if finishing is not None:
            finishing.result()


def _finish(
    job: Job, source: Source, journal: Journal, name: str, temporary: Path, errors: dict[str, float]
) -> None:
    """The shard appears whole, then the journal names it, then its source may go."""
    target = job.target / name
    digest = files.file_digest(temporary)  # of what is still in the page cache
    files.sync(temporary)
    files.rename(temporary, target)
    journal.shards[name] = {"size": target.stat().st_size, "sha256": digest, "errors": errors}
    journal.write()
    source.release(name)


def missing_bytes(job: Job) -> int:
    """What is still to be written, headers left out; whether a shard that is there is whole comes later."""
    source = job.shards
    return sum(
        prod(shape) * shards.width(dtype)
        for name in source.names
        if not (job.target / name).is_file()
        for dtype, shape in packing.planned(job.rule, source.header(name)).values()
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
    job: Job, journal: Journal, headers: Mapping[str, Mapping[str, Entry]], source: Source
) -> dict[str, Any]:
    errors = {name: error for shard in journal.shards.values() for name, error in shard["errors"].items()}
    if not errors:
        raise UserError(
            f"no linear of {job.component} would be quantized",
            remedy="give finetune quantize other --keep patterns",
        )
    everything = {name: entry for header in headers.values() for name, entry in header.items()}
    fetched = source.record()
    return {
        "name": job.component,
        **fingerprints(job.source, job.target),
        **sizes(_bytes(headers.values()), job.target),
        **of_errors(errors),
        "linears": len(errors),
        "keep": list(job.rule.keep),
        "kept": kept_linears(job, everything),
        "files": listed(job.target, {name: it["sha256"] for name, it in journal.shards.items()}),
        **({"fetched": fetched} if fetched is not None else {}),
    }


def fingerprints(source: Path, made: Path) -> dict[str, str]:
    """The source was compared with itself before and after."""
    print_ = files.weights_fingerprint(source)
    return {
        "source_fingerprint": print_,
        "source_fingerprint_after": print_,
        "made_fingerprint": files.weights_fingerprint(made),
    }


def sizes(source: int, made: Path) -> dict[str, float]:
    """`source`: bytes of its tensors."""
    size = _bytes(shards.read_header(path) for path in shards.find(made))
    return {"source_gib": source / files.GIB, "made_gib": size / files.GIB, "ratio": size / source}


def of_errors(errors: Mapping[str, float]) -> dict[str, Any]:
    worst = sorted(errors, key=lambda name: (-errors[name], name))[:WORST]
    return {
        "mean_error": fsum(errors.values()) / len(errors) if errors else None,
        "worst": [{"name": name, "error": errors[name]} for name in worst],
    }


def listed(folder: Path, known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Size and digest of each file; `known` digests are not made anew."""
    return {
        path.name: {
            "size": path.stat().st_size,
            "sha256": known.get(path.name) or files.file_digest(path),
        }
        for path in sorted(folder.iterdir())
    }


def _bytes(headers: Iterable[Mapping[str, Entry]]) -> int:
    return sum(entry.size for header in headers for entry in header.values())
