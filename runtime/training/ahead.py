"""Every sigma that a run will ask for, known before its denoiser is loaded: a consequence of the determinism rule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime import device, files
from runtime.config.model import Config
from runtime.families.base import Family
from runtime.families.weights import open_denoiser_weights
from runtime.inference import sampler
from runtime.memory.modulation import Request
from runtime.training.batches import Batches
from runtime.training.objective import FlowMatching
from runtime.training.probe import Probe
from runtime.training.sigmas import Sigmas
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from runtime.training.prepared import Prepared

FOLDER = "models/modulation"

Report = Callable[[str], None]


def silent(text: str) -> None:
    """A report to nobody."""


def objective(family: Family, config: Config, batches: Batches) -> FlowMatching:
    largest = max(share.batch_size for share in batches.order.shares.values())
    return FlowMatching(
        family=family,
        seed=config.train.seed,
        sigmas=Sigmas.of(config.loss, largest * config.train.gradient_accumulation_steps),
        weighting=config.loss.weighting,
        mask_floor=config.loss.mask_floor,
        prior_weight=config.loss.prior_weight,
    )


def probe(batches: Batches, objective: FlowMatching, config: Config) -> Probe:
    return Probe(batches, objective, samples=config.train.probe_samples, count=config.train.probe_draws)


def table(prepared: "Prepared", report: Report = silent) -> Request:
    """What the run needs of a table of modulations: sigmas of its steps, its probe and its pictures."""
    config, job = prepared.config, prepared.job
    asked = probe(prepared.batches, prepared.objective, config).sigmas
    tasks = [subject.task for subject in prepared.painting.subjects] if prepared.painting else []
    groups = [list(_of_steps(prepared)), asked, *of_pictures(job.family, job.model, tasks)]
    return request(job.workspace, config, job.model, job.made, groups, report)


def request(
    workspace: Workspace,
    config: Config,
    model: Path,
    made: Mapping[str, Path],
    groups: Sequence[Sequence[float]],
    report: Report = silent,
) -> Request:
    """A table for `groups` of sigmas, of the weights that the resolved `config` loads."""
    return Request(
        folder=workspace.root / FOLDER,
        groups=[torch.tensor(list(group)).tolist() for group in groups],  # as fp32 has them
        made_from={
            "weights": _loaded(model, made),
            "quantize": config.model.quantize,
            "nf4_keep": list(config.model.nf4_keep),
            "device": device.pick(config.hardware.device).name,
            "torch": torch.__version__,
        },
        report=report,
    )


def of_pictures(family: Family, model: Path, tasks: Iterable[sampler.Task]) -> list[list[float]]:
    """One group for each kind of picture; a negative prompt is asked at the same sigmas."""
    kinds = {(task.size, task.steps): task for task in tasks}
    return [sampler.sigmas(family, model, task) for task in kinds.values()]


def _loaded(model: Path, made: Mapping[str, Path]) -> str:
    if "transformer_weight" in made:
        return str(open_denoiser_weights(made["transformer_weight"]).fingerprint())
    return files.weights_fingerprint(made.get("transformer", model / "transformer"))


def _of_steps(prepared: "Prepared") -> Iterator[float]:
    """In the order of the run, from its first step on: a resumed run reads the rows of the run before."""
    accumulation = prepared.config.train.gradient_accumulation_steps
    sizes = {
        want.id: want.document["sizes"]["target"] for want in prepared.job.wants if want.split == "train"
    }
    for step in range(1, prepared.planned_steps + 1):
        slot = 0
        for ids in prepared.batches.ids_of(step, accumulation):
            height, width = sizes[ids[0]]
            shape = (prepared.job.facts.latent_channels, height // 8, width // 8)
            yield from prepared.objective.sigmas_of(shape, len(ids), step, slot)
            slot += len(ids)
