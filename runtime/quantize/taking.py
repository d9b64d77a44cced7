"""Step 06 with NF4 weights that somebody else has made: taken as they are, and measured as far as can be.

They come into models/nf4/<component>, by hard links where the volume is the same, so that nothing after this step
has a case of its own. Beside a plain base each layer's error is measured against it, as if it had been made here. A
base that is NF4 itself has nothing to compare with: then the record says so with `mean_error` null.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime import files, shards
from runtime.errors import UserError
from runtime.progress import Progress
from runtime.quantize import made, nf4, streaming
from runtime.quantize.crew import crew
from runtime.quantize.meter import Meter
from runtime.quantize.nf4 import Rule
from runtime.shards import Entry

# transformers puts a level more before the names than the published files have
NAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    component: str
    base: Path
    """The base's folder of that component: plain, or the NF4 weights themselves."""
    folder: Path
    target: Path
    rule: Rule
    reference: str
    """How the evidence names `folder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    path: Path
    entry: Entry

    def read(self) -> Tensor:
        return shards.read_tensor(self.path, self.entry)


def take(job: Taken, progress: Progress) -> dict[str, Any]:
    """Bring `job.folder` to `job.target` and return its record. Raises UserError for weights that are no NF4 of it."""
    there = places(job.folder)
    packed = _packed(job, there)
    _bring(job)
    errors = _errors(job, there, packed, progress)
    skeleton = _plain_sizes(there, packed)
    kept = sorted(
        nf4.module_of(name)
        for name, place in there.items()
        if name not in packed and job.rule.is_linear(name, place.entry.dtype, place.entry.shape)
    )
    return {
        "name": job.component,
        **streaming.fingerprints(job.base, job.target),
        **streaming.sizes(_plain_bytes(job) or skeleton, job.target),
        **streaming.of_errors(errors),
        "linears": len(packed),
        "keep": [],
        "kept": kept,
        "files": streaming.listed(job.target, {}),
        "taken": job.reference,
    }


def places(folder: Path) -> dict[str, Place]:
    """Every tensor of a component by its published name."""
    found = {}
    for path in shards.find(folder):
        for name, entry in shards.read_header(path).items():
            found[published(name)] = Place(path=path, entry=entry)
    return found


def published(name: str) -> str:
    for longer, shorter in NAMES:
        if name.startswith(longer):
            return shorter + name.removeprefix(longer)
    return name


def _packed(job: Taken, there: Mapping[str, Place]) -> dict[str, dict[str, Any]]:
    """By weight, what its state's text says; the text alone is read."""
    found = {}
    for name, place in there.items():
        if name.endswith(f".{nf4.STATE}"):
            state = json.loads(bytes(place.read().tolist()))
            if (state["quant_type"], state["blocksize"]) != ("nf4", nf4.BLOCK):
                raise UserError(
                    f"{job.folder}: {name} is {state['quant_type']} in blocks of {state['blocksize']}, "
                    f"read here is nf4 in blocks of {nf4.BLOCK}",
                    remedy=f"finetune quantize --component {job.component}, without --made",
                )
            found[name.removesuffix(f".{nf4.STATE}")] = state
    if not found:
        raise UserError(
            f"{job.folder} says NF4 in its config.json, and no tensor of it is", remedy=shards.FETCH
        )
    return found


# ---- into the workspace


def to_copy(job: Taken, coming: int = 0) -> int:
    """Bytes that `take` will add to the disk of `job.target`: of files that can't be linked and are not there yet.

    `coming`: bytes of shards that are yet to be fetched into `job.folder`. What a copy cut short left is removed first.
    """
    present = _present(job.folder) if is_whole(job.folder) else []
    if present and _same(present, job.target):
        return 0
    copied = sum(path.stat().st_size for path in present if not _can_link(path, job.target))
    if not present and not _can_link(job.folder / "config.json", job.target):
        copied = coming
    left = job.target.iterdir() if job.target.is_dir() else ()
    stats = [path.stat() for path in left if path.is_file()]
    return max(0, copied - sum(stat.st_size for stat in stats if stat.st_nlink == 1))


def _can_link(path: Path, target: Path) -> bool:
    """Tried: it takes the same volume, one that has links, and the right to make them."""
    trial = target.with_name(f".{target.name}.{os.getpid()}.link")
    trial.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path.resolve(), trial)
    except OSError:
        return False
    trial.unlink()
    return True


def _present(folder: Path) -> list[Path]:
    names = ["config.json", *streaming.COPIED, *(path.name for path in shards.find(folder))]
    names += [path.name for path in folder.glob("*.safetensors.index.json")]
    return [folder / name for name in names if (folder / name).is_file()]


def _bring(job: Taken) -> None:
    """Links or copies, unless they are there from an earlier call."""
    present = _present(job.folder)
    if job.target.is_dir() and _same(present, job.target):
        return
    if job.target.is_dir():
        if streaming.read_journal(job.target) is None and any(job.target.glob("*.safetensors")):
            raise UserError(
                f"{job.target} holds weights that this command did not make",
                remedy="move it away, then finetune quantize",
            )
        shutil.rmtree(job.target)
    job.target.mkdir(parents=True)
    settings = {"component": job.component, "taken": files.files_fingerprint(present)}
    streaming.Journal(path=job.target / streaming.JOURNAL, settings=settings).write()
    for path in present:
        _link(path.resolve(), job.target / path.name)  # the hub's cache holds links


def _same(paths: list[Path], target: Path) -> bool:
    journal = streaming.read_journal(target)
    copies = [target / path.name for path in paths]
    return (
        journal is not None
        and all(copy.is_file() for copy in copies)
        and journal["settings"].get("taken")
        == files.files_fingerprint(paths)
        == files.files_fingerprint(copies)
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another volume, or one without links
        shutil.copyfile(source, target)


# ---- what can be measured


def _errors(
    job: Taken, there: Mapping[str, Place], packed: Mapping[str, Any], progress: Progress
) -> dict[str, float]:
    """Of each packed weight against the plain base; empty where that is NF4 too, or is not here."""
    if made.is_packed(job.base) or not is_whole(job.base):
        return {}
    plain = places(job.base)
    _refuse_other(job, packed, plain)
    total = sum(plain[name].entry.size for name in packed)
    meter = Meter(progress, f"measure {job.component}", total)
    try:
        with crew() as pool:
            return dict(_measured(there, packed, plain, pool, meter))
    finally:
        meter.stop()


def is_whole(folder: Path) -> bool:
    """Whether each shard of a component is here."""
    try:
        return bool(shards.find(folder))
    except UserError:
        return False


def _refuse_other(job: Taken, packed: Mapping[str, Any], plain: Mapping[str, Place]) -> None:
    strange = [
        name
        for name, state in packed.items()
        if name not in plain or list(plain[name].entry.shape) != list(state["shape"])
    ]
    if strange:
        raise UserError(
            f"{job.folder} is not of this base: {len(strange)} weights are of no such name or shape, "
            f"first {min(strange)}",
            remedy=f"finetune quantize --component {job.component}, without --made",
        )


def _measured(
    there: Mapping[str, Place],
    packed: Mapping[str, Any],
    plain: Mapping[str, Place],
    pool: Executor,
    meter: Meter,
) -> Iterator[tuple[str, float]]:
    import torch
    from bitsandbytes.functional import QuantState

    for name in sorted(packed):
        parts = {
            other.removeprefix(f"{name}."): there[other].read()
            for other in (f"{name}.{part}" for part in nf4.PARTS)
            if other in there
        }
        state = QuantState.from_dict(parts, torch.device("cpu"))
        weight = plain[name].read()
        error = nf4.relative_error(weight, there[name].read(), state, pool)
        meter.advance(plain[name].entry.size, name)
        yield nf4.module_of(name), error


def _plain_bytes(job: Taken) -> int:
    """Of the base's tensors; 0 where they are NF4 themselves, or not here."""
    if made.is_packed(job.base) or not is_whole(job.base):
        return 0
    return sum(place.entry.size for place in places(job.base).values())


def _plain_sizes(there: Mapping[str, Place], packed: Mapping[str, Any]) -> int:
    """Bytes of the same weights in bf16, as published ones are."""
    parts = {f"{name}.{part}" for name in packed for part in nf4.PARTS}
    rest = sum(place.entry.size for name, place in there.items() if name not in parts and name not in packed)
    return rest + sum(2 * int(prod(state["shape"])) for state in packed.values())
