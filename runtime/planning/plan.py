"""What a config will need before any weight is loaded: memory, steps, disk; and what each `auto` becomes.

The numbers behind it are in `runtime.planning.estimate`.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from runtime.adaptation.choices import probed, recorded
from runtime.config.load import Loaded
from runtime.config.model import Config
from runtime.config.prompts import gathered, prompts_of, refuse_broken_sizes
from runtime.data import manifest, order
from runtime.data.manifest import Manifest
from runtime.errors import ConfigError, DataError, UserError
from runtime.files import GIB
from runtime.planning import architecture, budget, estimate, techniques
from runtime.planning.advice import find_problems, overruled, rounded
from runtime.planning.architecture import Architecture
from runtime.planning.budget import Budget
from runtime.planning.choice import Case
from runtime.planning.choice import Choice as Choice
from runtime.planning.choices import choose_for
from runtime.planning.estimate import Phase
from runtime.quantize import made
from runtime.quantize.made import Made
from runtime.workspace import EXTERNAL, Workspace

EVIDENCE, HOST_EVIDENCE = "04-plan", "01-host"
NUMBER_BYTES = 4  # of an adapter
TABLE_ROWS = 64  # of a file of the table of modulations, full or not; see runtime.memory.modulation
SMOKE_ROWS, HELD_OUT_ROWS = 5, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    samples: int
    """Training samples."""
    per_epoch: int
    """Steps that an epoch spans, rounded up: accumulation runs across its end."""
    planned: int
    epochs: float
    checkpoints: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    family: str
    size_multiple: int
    device: str
    found: Budget
    dataset_digest: str
    config_digest: str
    phases: dict[str, Phase]
    steps: Steps
    disk_needed_gib: float
    disk_free_gib: float
    choices: dict[str, Choice]
    problems: tuple[UserError, ...]
    """Why the run would fail as configured; empty when nothing is known to be in its way."""
    notes: tuple[str, ...] = ()
    """What is asked for and is not had here, a line each."""

    @property
    def budget_gib(self) -> float:
        return self.found.gib

    @property
    def budget_source(self) -> str:
        return self.found.source

    @property
    def margin_gib(self) -> float:
        """What the phase that needs the most leaves of the tightest limit: the device's, or that of both together."""
        return min(self.found.spare_gib(phase) for phase in self.phases.values())

    def to_json(self) -> dict[str, Any]:
        """The data of evidence 04-plan."""
        return {
            "family": self.family,
            "size_multiple": self.size_multiple,
            "device": self.device,
            "budget_gib": self.budget_gib,
            "budget_source": self.budget_source,
            "host_budget_gib": self.found.host_gib,
            "unified_memory": self.found.unified,
            "margin_gib": self.margin_gib,
            "dataset_digest": self.dataset_digest,
            "config_digest": self.config_digest,
            "phases": {name: _phase_json(phase) for name, phase in self.phases.items()},
            "steps": {name: getattr(self.steps, name) for name in Steps.__slots__},
            "disk": {"needed_gib": self.disk_needed_gib, "free_gib": self.disk_free_gib},
            "choices": {key: {"value": c.value, "reason": c.reason} for key, c in self.choices.items()},
        }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "components_gib": phase.components_gib,
        "resident_gib": phase.resident_gib,
        "peak_gib": phase.peak_gib,
        "largest": phase.largest,
        "reserve_gib": phase.reserve_gib,
        "host_gib": phase.host_gib,
        "host_peak_gib": phase.host_peak_gib,
    }


def make_plan(workspace: Workspace, loaded: Loaded, found: Budget | None = None) -> Plan:
    """The plan for the workspace's dataset and `loaded`, on this machine or within `found`.

    Raises UserError where one can't be made.
    """
    listed = manifest.load(workspace)
    model = locate_model(workspace, loaded.config.model.pretrained_model_name_or_path)
    base = architecture.read(model)
    found = found or look(workspace, loaded.config)
    _refuse_empty(listed)
    refuse_broken_sizes(prompts_of(loaded.config, workspace), base.size_multiple)
    loaded = replace(loaded, config=gathered(loaded.config, workspace))
    free = shutil.disk_usage(workspace.root).free / GIB
    return draw(
        loaded,
        listed,
        base,
        found,
        disk_free_gib=free,
        quantized=made.find(workspace, model, loaded.config),
    )


def draw(
    loaded: Loaded,
    listed: Manifest,
    base: Architecture,
    found: Budget,
    *,
    disk_free_gib: float,
    quantized: Mapping[str, Made] | None = None,
) -> Plan:
    """The plan, from data alone. What step 06 made is counted as it lies there."""
    quantized = quantized or {}
    case = Case.of(rounded(loaded.config, base), listed, base, found, quantized)
    choices = choose_for(case, quantized)
    phases, steps = case.phases(choices), _steps(case.config, listed, base)
    needed = _disk_gib(case, choices, listed, steps)
    return Plan(
        family=base.family.name,
        size_multiple=base.size_multiple,
        device=found.device,
        found=found,
        dataset_digest=listed.dataset_digest,
        config_digest=loaded.digest,
        phases=phases,
        steps=steps,
        disk_needed_gib=needed,
        disk_free_gib=disk_free_gib,
        choices=choices,
        problems=find_problems(
            loaded.config,
            listed,
            case,
            phases,
            quantized,
            disk_needed_gib=needed,
            disk_free_gib=disk_free_gib,
        ),
        notes=techniques.notes(case),
    )


def resolve_choices(workspace: Workspace, config: Config) -> dict[str, Choice]:
    """Value and reason of every key that the config left to the machine, by dotted key."""
    case, quantized = at_hand(workspace, config)
    if (refusal := techniques.refused(case)) is not None:
        raise ConfigError(refusal[0], remedy=refusal[1])
    return choose_for(case, quantized)


def at_hand(workspace: Workspace, config: Config) -> tuple[Case, dict[str, Made]]:
    """`config` on this machine, for the dataset as it was listed, and by component what step 06 made."""
    listed = manifest.standing(workspace)
    _refuse_empty(listed)
    for problem in overruled(config, listed):
        raise problem
    model = locate_model(workspace, config.model.pretrained_model_name_or_path)
    base, found = architecture.read(model), look(workspace, config)
    config = gathered(config, workspace)
    quantized = made.find(workspace, model, config)
    return Case.of(config, listed, base, found, quantized), quantized


def _refuse_empty(listed: Manifest) -> None:
    if not listed.of("train"):
        raise DataError("the dataset has no training sample", remedy="finetune dataset")


def look(workspace: Workspace, config: Config) -> Budget:
    """The device of `config`, what may be filled there, and what step 05 settled for it."""
    found = budget.find(config.hardware, workspace.evidence(HOST_EVIDENCE))
    device = found.device
    return replace(found, measured=recorded(workspace, device), probes=probed(workspace, device))


def locate_model(workspace: Workspace, reference: str) -> Path:
    """The base's local folder; a hub id only if its files are here already, for a plan downloads nothing."""
    folder = workspace.resolve(reference)
    if folder.is_dir():
        return folder
    hub = not reference.startswith(EXTERNAL) and reference.count("/") == 1
    if hub:
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(reference, local_files_only=True))
        except Exception:  # absent package or absent snapshot, for which the client has many classes
            pass
    fetching = f"finetune quantize --model {reference} --drop-fetched; or, to keep all of it, hf download {reference}"
    raise UserError(
        f"the base {reference} is not on this machine: {folder} is no folder",
        remedy=fetching if hub else "fetch it, then finetune init --model FOLDER",
    )


def _steps(config: Config, listed: Manifest, base: Architecture) -> Steps:
    train = config.train
    ordered = order.order_of(config, listed.samples, listed.settings, base.size_multiple)
    micro = ordered.count(1)
    planned = order.planned_steps(
        ordered,
        max_train_steps=train.max_train_steps,
        num_epochs=train.num_epochs,
        accumulation=train.gradient_accumulation_steps,
    )
    return Steps(
        samples=len(ordered.items),
        per_epoch=ceil(micro / train.gradient_accumulation_steps),
        planned=planned,
        epochs=round(planned * train.gradient_accumulation_steps / micro, 3),
        checkpoints=len(order.planned_checkpoints(planned, train.checkpointing_steps)),
    )


def _disk_gib(case: Case, choices: Mapping[str, Choice], listed: Manifest, steps: Steps) -> float:
    """The cache, every checkpoint that is kept, the rolling one twice, for it is replaced by rename, and the table."""
    config, base, largest = case.config, case.base, case.largest
    made = case.settings(choices)
    adapter = made.adapter_parameters * NUMBER_BYTES
    kept = min(steps.checkpoints, config.train.checkpoints_total_limit or steps.checkpoints)
    latents = 64 * largest.image_tokens
    prompts = 2 if config.data.caption_dropout_rate > 0 or config.validation.guidance_scale > 1 else 1
    entry = (latents + prompts * largest.text_tokens * base.text_encoder.hidden) * NUMBER_BYTES
    entries = len(listed.samples) + len(config.validation.samples)
    rolling = 2 * (2 * adapter + made.adapter_parameters * estimate.ADAM_BYTES)
    table = (
        _sigmas(case, steps) * base.denoiser.row_numbers * made.dtype_bytes if made.cached_modulation else 0
    )
    return (entries * entry + kept * adapter + rolling + table) / GIB


def _sigmas(case: Case, steps: Steps) -> int:
    """Of all steps, the probe, and a sampler of each length in use: a row of the table of modulations for each."""
    train, validation = case.config.train, case.config.validation
    drawn = steps.planned * train.gradient_accumulation_steps * case.largest.batch_size
    lengths = {validation.num_inference_steps, *(ask.num_inference_steps or 0 for ask in validation.samples)}
    groups = (drawn, SMOKE_ROWS, train.probe_draws, HELD_OUT_ROWS, *lengths)
    return sum(ceil(group / TABLE_ROWS) * TABLE_ROWS for group in groups)
