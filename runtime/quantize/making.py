"""Step 06 as a whole: which components, from where, with how much room on the disk, and what the evidence says."""

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import files, locks
from runtime.config.load import load_config
from runtime.config.model import Config
from runtime.errors import DiskFullError, UserError
from runtime.files import GIB
from runtime.progress import Progress
from runtime.quantize import made
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from runtime.families.base import Family
    from runtime.quantize.fetching import Base
    from runtime.quantize.streaming import Job
    from runtime.quantize.taking import Taken

COMPONENTS = ("transformer", "text_encoder")
SPARE_GIB = 1.0
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
LOCK = ".lock"
NOTHING = ("none",)
"""`--keep none` forgets the patterns of the last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    components: tuple[str, ...] = ()
    """Those that config.yaml wants, if none are given."""
    keep: tuple[str, ...] = ()
    """model.nf4_keep for the denoiser, else as the last time, if none are given."""
    device: str = "auto"
    model: str | None = None
    """A hub id; config.yaml's model if None."""
    drop_fetched: bool = False
    made: tuple[Path, ...] = ()
    """Folders of ready-made NF4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The base that step 06 works on."""

    reference: str
    folder: Path
    base: "Base | None"
    """Where it is fetched; None where it was here."""
    eventual: tuple[str, ...]
    """Components that this command makes, now or in another call."""
    names: tuple[str, ...]
    """Those of this call."""
    keep: tuple[str, ...]
    """model.nf4_keep."""


def quantize(workspace: Workspace, wish: Wish, progress: Progress) -> dict[str, Any]:
    """Make models/nf4/, write the evidence and return its data. Whole shards of an earlier run are kept.

    Alone among processes: a second one waits, then keeps what the first one made.
    """
    config = _config(workspace, wish)  # first: where there is no workspace, no lock is left either
    with locks.alone(workspace.root / made.FOLDER / LOCK, progress, f"makes {made.FOLDER}"):
        try:
            return _quantize(workspace, config, wish, progress)
        except BaseException as error:
            if not files.disk_full(error):
                raise
            raise DiskFullError(
                "the disk is full: what is whole so far is kept",
                remedy="free some space, then finetune quantize",
            ) from error


def _quantize(workspace: Workspace, config: Config | None, wish: Wish, progress: Progress) -> dict[str, Any]:
    from runtime import device  # first: it quietens what bitsandbytes says at import
    from runtime.families.registry import load_family
    from runtime.quantize import streaming, taking
    from runtime.quantize.streaming import Job

    model = _model(workspace, config, wish, progress)
    family = load_family(model.folder)
    chosen = device.pick(wish.device).type
    place = device.quantizing(chosen) if wish.device == "auto" else chosen
    old = workspace.evidence(made.EVIDENCE) or {"components": [], "model": None}
    jobs = _jobs(workspace, wish, model, family, place, old)
    _refuse_full_disk(workspace, model, jobs, wish.drop_fetched)
    others = [item for item in old["components"] if _stands(workspace, model, item)]
    recording = workspace.begin_evidence(made.EVIDENCE, "finetune quantize")
    _fetch_rest(model, progress)
    started = time.monotonic()
    records = [
        streaming.quantize(job, progress) if isinstance(job, Job) else taking.take(job, progress)
        for job in jobs
    ]
    data = {
        "model": model.reference,
        "components": sorted([*others, *records], key=lambda item: COMPONENTS.index(item["name"])),
        "device": place,
        "seconds": round(time.monotonic() - started, 3),
        "output_error": _output_error(family, model, jobs, records, old, place, progress),
    }
    inputs = {"config": {"model.pretrained_model_name_or_path": model.reference}}
    recording.write(inputs=inputs, data=data)
    return data


# ---- the base


def _model(workspace: Workspace, config: Config | None, wish: Wish, progress: Progress) -> Model:
    reference = config.model.pretrained_model_name_or_path if config else str(wish.model)
    names = tuple(dict.fromkeys(wish.components)) or (wanted(config) if config else COMPONENTS)
    folder, base = _locate(workspace, reference, progress)
    return Model(
        reference=reference,
        folder=folder,
        base=base,
        eventual=tuple({*names, *_unless_none(config)}),
        names=names,
        keep=config.model.nf4_keep if config else (),
    )


def _config(workspace: Workspace, wish: Wish) -> Config | None:
    """None where --model says what there is no config.yaml for yet."""
    if wish.model is None:
        return load_config(workspace.config_path).config
    if not HUB_ID.fullmatch(wish.model):
        raise UserError(
            f"--model {wish.model} is no hub id like Qwen/Qwen-Image-Edit",
            remedy="a folder is given to finetune init --model FOLDER",
        )
    if not workspace.config_path.is_file():
        return None
    config = load_config(workspace.config_path).config
    configured = config.model.pretrained_model_name_or_path
    if configured != wish.model:
        raise UserError(
            f"config.yaml is for the base {configured}, --model is {wish.model}",
            remedy=f"set model.pretrained_model_name_or_path to {wish.model}, then finetune plan",
        )
    return config


def _locate(workspace: Workspace, reference: str, progress: Progress) -> "tuple[Path, Base | None]":
    """The base's folder; what is fetched goes to where the hub id leads as a path in the workspace."""
    from runtime.families.registry import locate
    from runtime.quantize import fetching

    folder = workspace.resolve(reference)
    begun = folder.is_dir() and fetching.standing(folder) is not None
    if not HUB_ID.fullmatch(reference) or (folder.is_dir() and not begun):
        return locate(reference, folder), None
    cached = None if begun else _cached(reference)
    if cached is not None:
        return cached, None
    return folder, fetching.open_base(reference, folder, progress)


def _cached(reference: str) -> Path | None:
    """A whole snapshot in the hub client's own cache."""
    from huggingface_hub import snapshot_download

    from runtime import shards

    try:
        folder = Path(snapshot_download(reference, local_files_only=True))
        found = [shards.find(folder / component) for component in (*COMPONENTS, "vae")]
    except Exception:  # not there, or in part; the client has no common base for its errors
        return None
    return folder if all(found) else None


def _fetch_rest(model: Model, progress: Progress) -> None:
    from runtime.quantize import fetching

    if model.base is not None:
        fetching.fetch_rest(model.base, _streamed(model), progress)


def _streamed(model: Model) -> list[str]:
    """Components that are fetched shard by shard: those that this command makes, unless they are NF4 already."""
    return [name for name in model.eventual if not made.is_packed(model.folder / name)]


def _unless_none(config: Config | None) -> tuple[str, ...]:
    if config is None:
        return COMPONENTS
    asked = {"transformer": config.model.quantize, "text_encoder": config.model.quantize_text_encoder}
    replaced = config.model.transformer_weight is not None
    return tuple(
        name for name in COMPONENTS if asked[name] != "none" and not (replaced and name == "transformer")
    )


def wanted(config: Config) -> tuple[str, ...]:
    """The components that config.yaml doesn't set to none. Raises UserError where nothing is left.

    The weights of model.transformer_weight are quantized while loading, the same bits.
    """
    names = _unless_none(config)
    if not names:
        raise UserError(
            "config.yaml sets model.quantize and model.quantize_text_encoder to none: nothing is to be done"
            if config.model.transformer_weight is None
            else "config.yaml replaces the denoiser (model.transformer_weight) and sets "
            "model.quantize_text_encoder to none: nothing is to be done",
            remedy='gate skip 06 --reason "plain weights, as config.yaml says"',
        )
    return names


# ---- what is to be done


def _jobs(
    workspace: Workspace, wish: Wish, model: Model, family: "Family", place: str, old: dict[str, Any]
) -> "list[Job | Taken]":
    from runtime.quantize import fetching, nf4
    from runtime.quantize.streaming import Job
    from runtime.quantize.taking import Taken

    ready = _ready_made(workspace, wish, model)
    jobs: list[Job | Taken] = []
    for name in model.names:
        source, target = model.folder / name, made.folder_of(workspace, name)
        if name in ready:
            folder, reference = ready[name]
            rule = nf4.rule_for(name, family.facts.blocks)
            jobs.append(
                Taken(
                    component=name, base=source, folder=folder, target=target, rule=rule, reference=reference
                )
            )
            continue
        supply = None
        if model.base is not None:
            supply = fetching.component_of(model.base, name, drop=wish.drop_fetched)
        rule = nf4.rule_for(name, family.facts.blocks, _keep(wish, model, name, old))
        jobs.append(Job(component=name, source=source, target=target, rule=rule, device=place, supply=supply))
    return jobs


def _keep(wish: Wish, model: Model, name: str, old: dict[str, Any]) -> tuple[str, ...]:
    if wish.keep == NOTHING:
        return ()
    configured = model.keep if name == "transformer" else ()
    before = [item.get("keep", []) for item in old["components"] if item["name"] == name]
    same = old.get("model") == model.reference
    return wish.keep or configured or (tuple(before[0]) if before and same else ())


def _ready_made(workspace: Workspace, wish: Wish, model: Model) -> dict[str, tuple[Path, str]]:
    """By component, a folder of NF4 and how the evidence names it: what --made gives, else the base itself."""
    found = {
        name: (model.folder / name, f"{model.reference}/{name}")
        for name in model.names
        if made.is_packed(model.folder / name)
    }
    for given in wish.made:
        parts = {name: given / name for name in COMPONENTS if made.is_packed(given / name)}
        if not parts and made.is_packed(given):
            parts = {_component_of(given): given}
        if not parts:
            raise UserError(
                f"{given} holds no NF4 component: no config.json in it, or below, has a quantization_config",
                remedy="finetune quantize, without --made, makes the weights of the base",
            )
        for name, folder in parts.items():
            if name in model.names:
                found[name] = (folder, workspace.refer(folder, f"made-{name}"))
    return found


def _component_of(folder: Path) -> str:
    from runtime.families import kinds

    kind = kinds.kind_of(folder)
    if kind not in ("denoiser", "text encoder"):
        raise UserError(kinds.refusal(folder, kind, "denoiser"), remedy="give --made a component's folder")
    return "transformer" if kind == "denoiser" else "text_encoder"


def _stands(workspace: Workspace, model: Model, item: dict[str, Any]) -> bool:
    found = made.find(workspace, model.folder).get(item["name"])
    return item["name"] not in model.names and found is not None and found.usable


# ---- room on the disk


@dataclass(slots=True, kw_only=True)
class Room:
    """Bytes that must be on the disk at once, beside what is there."""

    made: int = 0
    copied: int = 0
    """Of ready-made weights that can't be linked."""
    rest: int = 0
    """Of the base, besides what is fetched shard by shard."""
    shards: list[int] = field(default_factory=list)

    def needed(self, *, drop: bool) -> float:
        fetched = max(self.shards, default=0) if drop else sum(self.shards)
        return (self.made + self.copied + self.rest + fetched) / GIB


def _refuse_full_disk(workspace: Workspace, model: Model, jobs: "Sequence[Job | Taken]", drop: bool) -> None:
    room = _room(model, jobs)
    needed, free = room.needed(drop=drop), shutil.disk_usage(workspace.root).free / GIB
    if not needed or needed + SPARE_GIB <= free:
        return
    ours = (room.made + room.copied) / GIB
    told = f"{ours:.1f} GiB of NF4 weights"
    if model.base is not None:
        told += f" and {needed - ours:.1f} GiB of the base at once"
    least = room.needed(drop=True)
    remedy = "free disk space, or make one at a time: finetune quantize --component transformer"
    if room.copied:
        remedy = (
            "free disk space; or have the ready-made weights on the workspace's volume, where they are linked"
        )
    elif least < needed:
        remedy = f"free disk space; or finetune quantize --drop-fetched, which needs {least:.1f} GiB"
    raise UserError(
        f"{told} and {SPARE_GIB:.0f} GiB to spare are needed, {free:.1f} GiB are free", remedy=remedy
    )


def _room(model: Model, jobs: "Sequence[Job | Taken]") -> Room:
    from runtime.quantize import fetching, streaming, taking
    from runtime.quantize.streaming import Job

    room = Room()
    if model.base is not None:
        room.rest = model.base.missing(fetching.rest(model.base, _streamed(model)))
    for job in jobs:
        if isinstance(job, Job):
            room.made += streaming.missing_bytes(job)
            absent = [name for name in job.shards.names if not (job.target / name).is_file()]
            room.shards += [job.shards.to_fetch(name) for name in absent]
        else:
            fetched = model.base if job.folder == job.base else None
            coming = fetching.weights_size(fetched, job.component) if fetched is not None else 0
            room.copied += taking.to_copy(job, coming)
    return room


# ---- the denoiser's answer


def _output_error(
    family: "Family",
    model: Model,
    jobs: "Sequence[Job | Taken]",
    records: Sequence[dict[str, Any]],
    old: dict[str, Any],
    place: str,
    progress: Progress,
) -> dict[str, Any]:
    """Of the denoiser made now; what was measured of the same weights before is kept."""
    from runtime.quantize import output_error

    known: dict[str, Any] = old.get("output_error") or {"value": None, "reason": "no denoiser was quantized"}
    prints = {item["made_fingerprint"] for item in old["components"]}
    for job, record in zip(jobs, records, strict=True):
        same = record["made_fingerprint"] in prints and known["value"] is not None
        if job.component == "transformer" and not same:
            found = output_error.measure(family, model.folder / "transformer", job.target, place, progress)
            return {"value": found.value, "reason": found.reason}
    return known
