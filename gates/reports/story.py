"""What the HTML report tells, collected from a workspace in whatever state it is."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gates import pictures, runs
from gates.evidence import EvidenceError, MissingEvidenceError, attempt, inside
from gates.runs import Run
from gates.validation import EVIDENCE as VALIDATION
from gates.verdict import Verdict
from gates.workspace import MADE_BY, Workspace

T = TypeVar("T")
SAMPLES_MAX = 12  # shown; four pictures of 30 KB each make 1.5 MB
SIDE_MAX = 384  # pixels; what a phone shows of two side by side
SIDE_SHARP = 128  # below that a picture is kept as it is, and enlarged pixel by pixel
SHOWN = (
    ("control", "before: the control"),
    ("base", "the base alone"),
    ("adapter", "with the adapter"),
    ("target", "the target"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    label: str
    uri: str | None
    """a data URI; None where there is no picture to show"""
    width: int = 0
    height: int = 0
    why: str = ""
    """there is none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    id: str
    split: str
    prompt: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    verdicts: Sequence[Verdict]
    """of the eight gates, in order"""
    target: dict[str, Any]
    host: dict[str, Any] | None = None
    dataset: dict[str, Any] | None = None
    run: Run | None = None
    validation: dict[str, Any] | None = None
    samples: Sequence[Sample] = ()
    samples_left_out: int = 0
    digests: Sequence[tuple[str, str]] = ()
    commands: Sequence[str] = ()
    notes: Sequence[str] = ()
    """what could not be read"""
    hidden: Sequence[tuple[str, str]] = field(default=(), repr=False)
    """absolute paths of this machine, and what stands for them"""

    @property
    def passes(self) -> bool:
        return bool(self.verdicts) and all(verdict.passes for verdict in self.verdicts)


def collect(workspace: Workspace, verdicts: Sequence[Verdict]) -> Story:
    notes: list[str] = []

    def read(get: Callable[[], T]) -> T | None:
        reading = attempt(get)
        if reading.error is not None and not isinstance(reading.error, MissingEvidenceError):
            notes.append(str(reading.error))
        return reading.value

    target = read(lambda: workspace.target) or {}
    host = read(lambda: workspace.evidence("01-host"))
    dataset = read(lambda: workspace.evidence("02-dataset"))
    validation = read(lambda: workspace.evidence(VALIDATION))
    run = read(lambda: _run(workspace))
    samples = validation["samples"] if validation else []
    return Story(
        verdicts=verdicts,
        target=target,
        host=host,
        dataset=dataset,
        run=run,
        validation=validation,
        samples=tuple(_sample(workspace, sample) for sample in samples[:SAMPLES_MAX]),
        samples_left_out=max(len(samples) - SAMPLES_MAX, 0),
        digests=tuple(_digests(run, dataset, validation, verdicts)),
        commands=tuple(_commands(workspace, target, run)),
        notes=tuple(notes),
        hidden=tuple(_hidden(workspace)),
    )


def _run(workspace: Workspace) -> Run:
    """The newest full run, else the newest smoke run."""
    for kind in ("full", "smoke"):
        folder = runs.find(workspace, kind)
        if folder is not None:
            return runs.read(workspace, folder)
    raise MissingEvidenceError("runs", "there is none")


# ---- pictures


def _sample(workspace: Workspace, sample: dict[str, Any]) -> Sample:
    return Sample(
        id=sample["id"],
        split=sample["split"],
        prompt=sample["prompt"],
        pictures=tuple(_picture(workspace, label, sample["pictures"].get(kind)) for kind, label in SHOWN),
    )


def _picture(workspace: Workspace, label: str, record: dict[str, Any] | None) -> Picture:
    if record is None:
        return Picture(label=label, uri=None, why="was not made")
    try:
        path = inside(workspace.root, record["path"])
        pictures.picture_size(path, record["path"])
        uri, width, height = _embedded(path)
    except EvidenceError as error:
        return Picture(label=label, uri=None, why=error.message)
    except OSError:  # it was replaced or removed since
        return Picture(label=label, uri=None, why="can't be read")
    return Picture(label=label, uri=uri, width=width, height=height)


def _embedded(path: Path) -> tuple[str, int, int]:
    """A small picture as PNG, a larger one as JPEG of at most SIDE_MAX; nothing of its metadata."""
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    image.info.clear()
    image.thumbnail((SIDE_MAX, SIDE_MAX), Image.Resampling.LANCZOS)
    kind = "PNG" if max(image.size) <= SIDE_SHARP else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **({"quality": 85} if kind == "JPEG" else {"optimize": True}))
    text = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f"data:image/{kind.lower()};base64,{text}", *image.size


# ---- facts


def _digests(
    run: Run | None, dataset: dict[str, Any] | None, validation: dict[str, Any] | None, all: Sequence[Verdict]
) -> Iterator[tuple[str, str]]:
    if dataset is not None:
        yield "dataset", dataset["dataset_digest"]
    if run is not None:
        yield "config of the run", run.record["config_digest"]
        yield "cache of the run", run.record["cache_digest"]
        for name, digest in sorted(run.record["model"]["fingerprints"].items()):
            yield f"base {name}", digest
    if validation is not None:
        yield f"adapter validated ({validation['checkpoint']})", validation["adapter_sha256"]
    for verdict in all:
        yield f"judgement {verdict.gate} {verdict.name}", verdict.judgement_digest


def _commands(workspace: Workspace, target: dict[str, Any], run: Run | None) -> Iterator[str]:
    """As the evidence says that it was made; of the runs what they resumed."""
    if target:
        yield f"finetune init --model MODEL --dataset FOLDER --device {target['device']}"
    for name in MADE_BY:
        record = attempt(lambda name=name: workspace.record(name)).value  # type: ignore[misc]
        if name == VALIDATION and run is not None:
            yield "finetune fit --smoke"
            if run.record["kind"] == "full":
                yield "finetune fit" + ("" if run.record["resumed_from"] is None else " --resume latest")
        if record is not None:
            yield record["command"]
    yield "gate check all"


def _hidden(workspace: Workspace) -> Iterator[tuple[str, str]]:
    """Longest first, so that no path is cut by another that it starts with."""
    known = {str(workspace.root): "WORKSPACE", str(Path.home()): "~"}
    externals = attempt(lambda: workspace.externals).value or {}
    known |= {path: f"external:{name}" for name, path in externals.items()}
    spelled = {form: label for path, label in known.items() for form in (path, path.replace("\\", "/"))}
    useful = [(path, label) for path, label in spelled.items() if len(path) > 3]
    yield from sorted(useful, key=lambda item: -len(item[0]))
