"""What follows from the probes: fallbacks, what `auto` becomes, and which explicit values can't work here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from runtime.adaptation.probes import Finding
from runtime.config.model import Config
from runtime.errors import ConfigError
from runtime.planning.choice import Choice
from runtime.workspace import Workspace

EVIDENCE = "05-adaptation"
ADAMW = "torch.optim.AdamW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """What to do where a probe does not pass. No settings: the fit does so anyhow."""

    settings: Mapping[str, Any]
    """Dotted config key to the value that avoids what does not work"""
    instead: str

    def to_json(self) -> dict[str, Any]:
        return {"settings": dict(self.settings), "instead": self.instead}


FALLBACKS = {
    "bf16-kernel": Fallback(settings={"train.mixed_precision": "no"}, instead="compute in fp32"),
    "adam8bit-step": Fallback(
        settings={"optimizer.class_path": ADAMW}, instead="keep the optimizer's state in fp32"
    ),
    "nf4-layer": Fallback(
        settings={"model.quantize": "none", "model.quantize_text_encoder": "none"},
        instead="leave the weights unquantized",
    ),
    "masked-sdpa": Fallback(
        settings={"data.batch_size": 1}, instead="one sample a micro-batch, which needs no mask"
    ),
    "attention-backends": Fallback(
        settings={}, instead="nothing: what torch picks for attention has to be right"
    ),
    "compile": Fallback(settings={"train.compile": False}, instead="eager execution"),
}

# Explicit values that rest on what a probe tried, by dotted key.
RESTS_ON: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "train.mixed_precision": ("bf16-kernel", lambda value: value == "bf16"),
    "optimizer.class_path": ("adam8bit-step", lambda value: "8bit" in value),
    "model.quantize": ("nf4-layer", lambda value: value == "nf4"),
    "model.quantize_text_encoder": ("nf4-layer", lambda value: value == "nf4"),
    "data.batch_size": ("masked-sdpa", lambda value: value > 1),
    "train.compile": ("compile", lambda value: value is True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    value: Any
    reason: str
    probe: str

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "reason": self.reason, "probe": self.probe}


def choose(device: str, found: Mapping[str, Finding]) -> dict[str, Chosen]:
    """By dotted key, what the probes settle: each fallback, and where they pass, precision and optimizer."""
    chosen = {}
    for name, finding in found.items():
        if not finding.ok:
            for key, value in FALLBACKS[name].settings.items():
                chosen[key] = Chosen(value=value, reason=finding.told, probe=name)
    if found["bf16-kernel"].ok:
        chosen["train.mixed_precision"] = _precision(device, found["bf16-kernel"])
    if found["adam8bit-step"].ok:
        reason = "8-bit Adam works here; an adapter's state is small, so fp32 state costs little"
        chosen["optimizer.class_path"] = Chosen(value=ADAMW, reason=reason, probe="adam8bit-step")
    return chosen


def _precision(device: str, finding: Finding) -> Chosen:
    if device == "cpu":
        reason = "bf16 works here, and on a CPU measured twice as slow as fp32 at small sizes"
        return Chosen(value="no", reason=reason, probe=finding.name)
    reason = f"bf16 works here, {finding.error or 0.0:.1e} from the CPU's fp32"
    return Chosen(value="bf16", reason=reason, probe=finding.name)


def recorded(workspace: Workspace, device: str) -> dict[str, Choice] | None:
    """What step 05 settled for `device`; None where it has not run, or ran on another device or torch."""
    data = _data(workspace, device)
    if data is None:
        return None
    return {
        key: Choice(value=choice["value"], reason=f"auto: step 05: {choice['reason']}")
        for key, choice in data["choices"].items()
    }


def probed(workspace: Workspace, device: str) -> dict[str, dict[str, Any]] | None:
    """By name, what step 05 probed on `device`; None as for `recorded`."""
    data = _data(workspace, device)
    return None if data is None else {probe["name"]: probe for probe in data["probes"]}


def refuse_broken(workspace: Workspace, config: Config, device: str) -> None:
    """Raises ConfigError where `config`, as the user wrote it, asks for what a probe found not to work."""
    data = _data(workspace, device)
    if data is None:
        return
    probes = {probe["name"]: probe for probe in data["probes"]}
    document = config.model_dump(mode="json")
    for key, (name, asks_for_it) in RESTS_ON.items():
        section, _, leaf = key.partition(".")
        value, probe = document[section].get(leaf), probes[name]
        if value not in ("auto", None) and probe["status"] != "ok" and asks_for_it(value):
            instead = 1 if key == "data.batch_size" else "auto"
            raise ConfigError(
                f"{key}: {value} does not work on this {device}: "
                f"probe {name} {probe['status']}: {probe['reason']}",
                remedy=f"set {key}: {instead} in config.yaml, then finetune plan and finetune adapt",
            )


def _data(workspace: Workspace, device: str) -> dict[str, Any] | None:
    data = workspace.evidence(EVIDENCE)
    if data is None or data["device"]["type"] != device:
        return None
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    return data if data["versions"]["torch"] == installed else None
