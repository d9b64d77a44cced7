"""Pictures painted between two steps of a fit, which leave what is trained as it is, bit for bit.

    <run>/samples/000120-prompt-0.png  ...  step-000120.png, a grid of all

The run's own denoiser paints, with the adapter as it stands; noise is a function of (seed, name). The VAE is read
anew each time, decodes and goes: 0.25 GiB that no step has to share the memory with, for a second of reading.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from runtime import device, files
from runtime.cache.build import Job
from runtime.cache.encode import fitted
from runtime.cache.key import Wanted
from runtime.config.model import ValidationSample
from runtime.config.prompts import prompts_of
from runtime.device import Device
from runtime.errors import UserError
from runtime.families.base import Conditioning
from runtime.inference import sampler
from runtime.inference.comparison import Row, grid
from runtime.progress import Progress, duration
from runtime.training.objective import Predict
from runtime.training.record import Run

FOLDER = "samples"
HELD_OUT_MOST = 4  # painted where there is no prompt: a moment's look, not a validation


class _WishedError(Exception):
    """The user wants the fit to end; a picture is not worth the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A cached entry to paint."""

    want: Wanted
    task: sampler.Task

    @property
    def stem(self) -> str:
        """A file name for every system; an id of the dataset may be any path."""
        return self.want.id if self.want.split == "prompt" else self.want.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run paints, and how often; made before the denoiser is loaded."""

    job: Job
    subjects: tuple[Subject, ...]
    every: int


def plan(job: Job) -> Plan | None:
    """For a resolved config; None where `validation.sample_steps` is null. Raises UserError with nothing to paint."""
    validation = job.config.validation
    if validation.sample_steps is None:
        return None
    asked = {prompt.name: prompt.asked for prompt in prompts_of(job.config, job.workspace)}
    chosen = [want for want in job.wants if want.split == "prompt"]
    chosen = chosen or [want for want in job.wants if want.split == "holdout"][:HELD_OUT_MOST]
    if not chosen:
        raise UserError(
            "validation.sample_steps: there is no prompt to paint, and no sample is held out",
            remedy="add validation.samples or validation.prompt_file to config.yaml, then finetune cache",
        )
    return Plan(
        job=job,
        subjects=tuple(_subject(job, want, asked) for want in chosen),
        every=validation.sample_steps,
    )


def _subject(job: Job, want: Wanted, asked: Mapping[str, ValidationSample]) -> Subject:
    height, width = want.document["sizes"]["target"]
    own = asked[want.id] if want.split == "prompt" else None
    return Subject(want=want, task=sampler.task_of(job.config.validation, want.id, (height, width), own))


@dataclass(slots=True, kw_only=True)
class Samples:
    """Paints in a run, until a failure ends that: training is never stopped by it."""

    plan: Plan
    where: Device
    denoiser: nn.Module
    predict: Predict
    run: Run
    stopped: str | None = None

    def due(self, step: int, planned: int) -> bool:
        return self.stopped is None and (step % self.plan.every == 0 or step == planned)

    def paint(self, step: int, progress: Progress, wish: Callable[[], bool] = lambda: False) -> None:
        """All pictures of `step`, or as many as were painted when `wish` turned true."""
        started, fault = time.monotonic(), None
        try:
            with _untouched(self.denoiser, self.where):
                made = self._paint(step, wish)
        except _WishedError:
            made = {}
        except (
            Exception
        ) as error:  # hours of training are worth more than a picture, whatever is wrong with it
            made, fault = {}, _told(error)
        # Here, for an exception holds the tensors of all that it passed through.
        device.free_cached(self.where)
        if made:
            seconds = time.monotonic() - started
            self._record(painted={"step": step, "seconds": round(seconds, 3), **made})
            progress.say(f"step {step}: {made['grid']}, painted in {duration(seconds)}")
        if fault is not None:
            self.stopped = f"step {step}: {fault}"
            self._record()
            progress.say(f"warning: no more samples in this run, the training goes on; {self.stopped}")

    def _record(self, painted: dict[str, Any] | None = None) -> None:
        before = self.run.document.get("samples", {"painted": []})["painted"]
        painted_now = [*before, painted] if painted else before
        self.run.write(samples={"painted": painted_now, "stopped": self.stopped})

    def _paint(self, step: int, wish: Callable[[], bool]) -> dict[str, Any]:
        job = self.plan.job

        def predict(noisy: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
            if wish():
                raise _WishedError
            return self.predict(noisy, sigma, conditioning)

        latents = []
        for subject in self.plan.subjects:
            tensors = job.store.read(subject.want.folder)
            latents.append(sampler.paint(job.family, predict, job.model, subject.task, tensors)[0])
        pictures = _decoded(job, latents)
        folder = self.run.path / FOLDER
        names = [f"{step:06d}-{subject.stem}.png" for subject in self.plan.subjects]
        for name, picture in zip(names, pictures, strict=True):
            _write(picture, folder / name)
        _write(_page(job, self.plan.subjects, pictures), folder / f"step-{step:06d}.png")
        return {
            "pictures": [f"{FOLDER}/{name}" for name in names],
            "grid": f"{FOLDER}/step-{step:06d}.png",
        }


@contextlib.contextmanager
def _untouched(denoiser: nn.Module, where: Device) -> Iterator[None]:
    """Without dropout; modes and generators are afterwards as they were."""
    training = [(module, module.training) for module in denoiser.modules()]
    denoiser.eval()
    try:
        with device.generators_kept(where):
            yield
    finally:
        for module, mode in training:
            module.training = mode


def _decoded(job: Job, latents: Sequence[Tensor]) -> list[Image.Image]:
    """One after another, by a VAE where and as the cache phase had it."""
    cache = job.config.cache
    vae = job.family.load_vae(
        job.model, device=cache.devices.vae, dtype=device.dtype_of(cache.dtypes.vae), mode=cache.vae
    )
    return [sampler.to_image(job.family.decode(vae, latent.to(cache.devices.vae))[0]) for latent in latents]


def _page(job: Job, subjects: Sequence[Subject], pictures: Sequence[Image.Image]) -> Image.Image:
    """Prompt, control, picture; and the target, where samples are held out."""
    background = job.config.data.processor.background
    targets = any(subject.want.target is not None for subject in subjects)
    rows = []
    for subject, picture in zip(subjects, pictures, strict=True):
        want = subject.want
        control = fitted(want.controls[0], background) if want.controls else _blank(picture)
        cells = [control, picture]
        if targets:
            cells.append(fitted(want.target, background) if want.target else _blank(picture))
        rows.append(Row(caption=f"{want.id}: {want.document['prompt']}", pictures=tuple(cells)))
    return grid(("control", "sample", *(["target"] if targets else [])), rows)


def _blank(like: Image.Image) -> Image.Image:
    return Image.new("RGB", like.size, (240, 240, 240))


def _write(picture: Image.Image, path: Path) -> None:
    files.write_with(path, lambda temporary: picture.save(temporary, format="PNG"))


def _told(error: Exception) -> str:
    """One line, without the paths of this machine that the system's own errors hold."""
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror}"
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]
