"""What config.yaml would need on machines that are not at hand, and what has to change for it to fit there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime import files
from runtime.config.load import Loaded, apply_overrides, parse
from runtime.data import manifest
from runtime.planning import architecture, ladder, plan
from runtime.planning.ladder import Rung
from runtime.planning.machines import Machine
from runtime.planning.plan import Plan
from runtime.quantize import made
from runtime.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    machine: Machine
    plan: Plan
    """Of the config with `changes`."""
    changes: tuple[Rung, ...]
    """What has to be set; empty where it fits as it is, and where nothing helps."""

    @property
    def fits(self) -> bool:
        return self.plan.margin_gib >= 0

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.name,
            "told": self.machine.told,
            "fits": self.fits,
            "changes": {rung.key: rung.value for rung in self.changes},
            "plan": self.plan.to_json(),
        }


def survey(workspace: Workspace, loaded: Loaded, machines: Sequence[Machine]) -> list[Answer]:
    """Raises UserError where no plan can be made at all."""
    return [answer(workspace, loaded, machine) for machine in machines]


def answer(workspace: Workspace, loaded: Loaded, machine: Machine) -> Answer:
    loaded = _anywhere(loaded)
    found = machine.budget()
    drawn = plan.make_plan(workspace, loaded, found)
    model = plan.locate_model(workspace, loaded.config.model.pretrained_model_name_or_path)
    rungs = ladder.recommended(
        loaded.config,
        manifest.load(workspace),
        architecture.read(model),
        found,
        made.find(workspace, model, loaded.config),
    )
    changes = tuple(rungs or ())
    if changes:
        drawn = plan.make_plan(workspace, _changed(loaded, {rung.key: rung.value for rung in changes}), found)
    return Answer(machine=machine, plan=drawn, changes=changes)


def _anywhere(loaded: Loaded) -> Loaded:
    """Without what config.yaml says of the machine that it was written on."""
    section = loaded.raw.get("hardware")
    if not section:
        return loaded
    return _changed(
        loaded, {f"hardware.{name}": None if name == "memory_limit_gib" else "auto" for name in section}
    )


def _changed(loaded: Loaded, changes: dict[str, Any]) -> Loaded:
    raw = apply_overrides(loaded.raw, changes)
    return Loaded(raw=raw, digest=files.document_digest(raw), config=parse(raw))
