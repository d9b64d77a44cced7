"""Step 08: held-out samples and prompts, painted by base, adapter and a zeroed adapter.

All three start from the same noise, a function of (seed, sample). The zeroed adapter is the
control experiment: a judge that took it for a trained one would prove nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from runtime import files
from runtime.cache import build as cache_build
from runtime.cache.build import Job
from runtime.config.load import Loaded
from runtime.config.model import Config, ValidationSample
from runtime.config.prompts import prompts_of
from runtime.config.resolve import resolve
from runtime.errors import UserError
from runtime.inference import heldout, sampler
from runtime.inference.comparison import Row, grid
from runtime.inference.painter import VARIANTS, Painter
from runtime.memory.modulation import Request
from runtime.planning import limit
from runtime.progress import Progress
from runtime.training import ahead, checkpoints, record, trainables
from runtime.workspace import Workspace

EVIDENCE = "08-validation"
COLUMNS = ("control", "base", "adapter", "target")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    run: Path
    checkpoint: str
    grid: Path
    data: dict[str, Any]


def find_checkpoint(project: Path, wanted: str, root: Path) -> Path:
    """The adapter folder that `best`, `last` or a path means. Raises UserError where there is none."""
    if wanted not in ("best", "last"):
        path = (root / wanted).resolve()
        if not (path / trainables.WEIGHTS).is_file():
            raise UserError(
                f"{path} holds no {trainables.WEIGHTS}", remedy="finetune validate --checkpoint last"
            )
        return path
    for run, document in record.runs(project):
        if document.get("kind") != "full":
            continue
        if wanted == "best" and (best := _best(project, run, document)):
            return best
        if found := [*checkpoints.plains(run), *checkpoints.lasts(run)]:
            return max(found, key=_step)
    raise UserError(f"no full run below {project} has a checkpoint", remedy="finetune fit")


def _best(project: Path, run: Path, document: dict[str, Any]) -> Path | None:
    """The checkpoint with the lowest held-out probe, of this run or of those that it continues."""
    candidates = []
    for link in record.lineage(project, run, document):
        best = link.document.get("best")
        if not best or best["step"] > link.until:
            continue
        if (link.path / best["checkpoint"] / trainables.WEIGHTS).is_file():
            candidates.append((best["holdout_loss"], link.path / str(best["checkpoint"])))
    return min(candidates)[1] if candidates else None


def _step(path: Path) -> int:
    matched = checkpoints.PLAIN.fullmatch(path.name) or checkpoints.LAST.fullmatch(path.name)
    return int(matched[2]) if matched else -1


def validate(workspace: Workspace, loaded: Loaded, checkpoint: Path, progress: Progress) -> Result:
    """Paint and measure everything of the cache that was not trained on. One failure fails it all."""
    recording = workspace.begin_evidence(EVIDENCE, "finetune validate")
    config = resolve(workspace, loaded.config).config
    limit.enforce(workspace, config, "validate", progress.say)
    job = cache_build.plan(workspace, config)
    entries = _entries(job)
    asked = {prompt.name: prompt.asked for prompt in prompts_of(config, workspace)}
    table = _table(job, entries, asked, progress) if config.train.cached_modulation is True else None
    painter = Painter(job.family, job.model, config, checkpoint, job.made, table)
    if painter.note:
        progress.say(f"note: {painter.note}")
    out = checkpoint.parent / "validation"
    rows, samples = [], []
    for entry in progress.over(entries, "validate", unit="sample"):
        own = asked[entry["id"]] if entry["split"] == "prompt" else None
        row, sample = _one(job, painter, entry, own, out, workspace)
        rows.append(row)
        samples.append(sample)
    page = grid(COLUMNS, rows)
    files.write_with(out / "grid.png", lambda path: page.save(path, format="PNG"))
    data = _data(workspace, config, checkpoint, job, samples)
    weights = (checkpoint / trainables.WEIGHTS).relative_to(workspace.root).as_posix()
    digests = {weights: data["adapter_sha256"]}
    recording.write(inputs={"files": digests, "config": loaded.raw.get("validation") or {}}, data=data)
    return Result(run=checkpoint.parent, checkpoint=checkpoint.name, grid=out / "grid.png", data=data)


def _entries(job: Job) -> list[dict[str, Any]]:
    """Held-out samples and prompts as cached now. Raises UserError where one has changed or come since."""
    known = {want.key for want in job.wants}
    entries = [entry for entry in job.store.manifest()["entries"] if entry["split"] != "train"]
    cached = {entry["key"] for entry in entries}
    stale = [entry["id"] for entry in entries if entry["key"] not in known]
    stale += [want.id for want in job.wants if want.split != "train" and want.key not in cached]
    if stale or not entries:
        what = (
            f"{', '.join(dict.fromkeys(stale[:5]))} changed since they were cached"
            if stale
            else "the cache has no such sample"
        )
        raise UserError(f"nothing to validate on: {what}", remedy="finetune cache")
    return entries


def _table(
    job: Job, entries: Sequence[dict[str, Any]], asked: Mapping[str, ValidationSample], progress: Progress
) -> Request:
    """All sigmas of the pictures and of the held-out losses."""
    tasks = [
        _task(job, entry, asked[entry["id"]] if entry["split"] == "prompt" else None) for entry in entries
    ]
    groups = [heldout.sigmas(), *ahead.of_pictures(job.family, job.model, tasks)]
    return ahead.request(job.workspace, job.config, job.model, job.made, groups, progress.say)


def _task(job: Job, entry: dict[str, Any], asked: ValidationSample | None) -> sampler.Task:
    height, width = job.store.entry(entry["folder"])["document"]["sizes"]["target"]
    return sampler.task_of(job.config.validation, entry["id"], (height, width), asked)


def _one(
    job: Job,
    painter: Painter,
    entry: dict[str, Any],
    asked: ValidationSample | None,
    out: Path,
    workspace: Workspace,
) -> tuple[Row, dict[str, Any]]:
    """One sample, painted by every variant and measured where it is held out: its row and its record."""
    validation, name = painter.config.validation, entry["id"]
    tensors = job.store.read(entry["folder"])
    document = job.store.entry(entry["folder"])["document"]
    task = _task(job, entry, asked)
    pictures, noise = dict(_decoded(painter, tensors)), {}
    for variant in VARIANTS:
        with painter.variant(variant):
            latents, noise[variant] = painter.sample(task, tensors)
        pictures[variant] = painter.picture(latents)
    written = {
        kind: _write(picture, out / kind / f"{_stem(entry)}.png", workspace)
        for kind, picture in pictures.items()
    }
    blank = Image.new("RGB", pictures["base"].size, (240, 240, 240))
    row = Row(
        caption=f"{name}: {document['prompt']}", pictures=tuple(pictures.get(c, blank) for c in COLUMNS)
    )
    return row, {
        "id": name,
        "split": entry["split"],
        "key": entry["key"],
        "prompt": document["prompt"],
        "noise_sha256": noise,
        "pictures": written,
        "draws": heldout.losses(painter, name, tensors, seed=validation.seed)
        if entry["split"] == "holdout"
        else [],
    }


def _stem(entry: dict[str, Any]) -> str:
    """A file name for every system. Two prompts may share an entry and differ in their seed."""
    return str(entry["id"] if entry["split"] == "prompt" else entry["folder"])


def _decoded(painter: Painter, tensors: dict[str, Any]) -> Iterator[tuple[str, Image.Image]]:
    """Control and target as the VAE gives them back: the best that any adapter could paint."""
    for kind, name in (("control", "control_0"), ("target", "target")):
        if name in tensors:
            yield kind, painter.picture(tensors[name][None])


def _write(picture: Image.Image, path: Path, workspace: Workspace) -> dict[str, Any]:
    files.write_with(path, lambda temporary: picture.save(temporary, format="PNG"))
    place = path.relative_to(workspace.root).as_posix()
    return {"path": place, "size": path.stat().st_size, "sha256": files.file_digest(path)}


def _data(
    workspace: Workspace, config: Config, checkpoint: Path, job: Job, samples: list[dict[str, Any]]
) -> dict[str, Any]:
    run = files.read_json(checkpoint.parent / "run.json")
    held = [line for sample in samples for line in sample["draws"]]
    mean = {variant: _mean([line[variant] for line in held]) for variant in ("base", "adapter")}
    return {
        "run": checkpoint.parent.relative_to(workspace.root).as_posix(),
        "run_id": run["run_id"],
        "checkpoint": checkpoint.name,
        "adapter_sha256": files.file_digest(checkpoint / trainables.WEIGHTS),
        "cache_digest": files.document_digest(job.store.manifest()["entries"]),
        "device": run["device"]["type"],
        "num_inference_steps": config.validation.num_inference_steps,
        "guidance_scale": config.validation.guidance_scale,
        "seed": config.validation.seed,
        "draws_per_sample": heldout.DRAWS,
        "heldout_mean": mean,
        "samples": samples,
    }


def _mean(losses: list[float | None]) -> float | None:
    """None where a loss is not finite, or where nothing was held out."""
    finite = [loss for loss in losses if loss is not None]
    return math.fsum(finite) / len(finite) if finite and len(finite) == len(losses) else None
