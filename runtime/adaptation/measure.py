"""Step 05: what this device can really do, measured; the data of evidence 05-adaptation."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from runtime.adaptation import choices, parity, probes
from runtime.adaptation.choices import Chosen
from runtime.adaptation.probes import Finding
from runtime.config.model import Config
from runtime.errors import UserError
from runtime.probes import child, torch_facts
from runtime.training import record

EVIDENCE = choices.EVIDENCE
DTYPES = {"no": "float32", "bf16": "bfloat16"}

Report = Callable[[str], None]


def inputs(config: Config) -> dict[str, Any]:
    """The config keys that the measurement follows from, as the user wrote them."""
    return {
        "hardware.device": config.hardware.device,
        "optimizer.class_path": config.optimizer.class_path,
        "train.gradient_checkpointing": config.train.gradient_checkpointing,
        "train.mixed_precision": config.train.mixed_precision,
    }


def measure(config: Config, report: Report, *, ask: probes.Ask = child.ask) -> dict[str, Any]:
    """Probe the device, choose, take a step. Raises UserError where there is no such device or no torch."""
    report("look for the device")
    device = find_device(config.hardware.device, torch_facts.collect())
    kind = device["type"]
    dtype = DTYPES.get(config.train.mixed_precision) or ("float32" if kind == "cpu" else "bfloat16")
    report(f"probe {kind}: {', '.join(probes.NAMES)}")
    with ThreadPoolExecutor() as pool:
        # It takes 12 s on a CPU, and nothing else waits for it there; a device that it may hang is not shared.
        compiled = pool.submit(probes.probe, ["compile"], kind, dtype, ask=ask)
        if kind != "cpu":
            compiled.result()
        found = probes.probe([name for name in probes.NAMES if name != "compile"], kind, dtype, ask=ask)
        chosen = choices.choose(kind, found)
        report(f"one training step on {kind}, beside the CPU's")
        steps = parity.compare_steps(settle(config, kind, found, chosen), ask=ask)
        found |= compiled.result()
    return {
        "device": device,
        "probes": [to_json(finding) for finding in found.values()],
        "choices": {key: choice.to_json() for key, choice in sorted(chosen.items())},
        "step_parity": steps,
        "versions": record.packages(),
    }


def find_device(requested: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Type, name and driver of `requested`, or of what torch sees where that is `auto`."""
    if facts["status"] == "absent":
        raise UserError(
            "torch is not installed here, and the probes are about it",
            remedy='pip install -e ".[train]" -c constraints.txt',
        )
    seen = torch_facts.accelerator(facts)
    wanted = (seen or "cpu") if requested == "auto" else requested
    if wanted == "cpu":
        return {"type": "cpu", "name": "cpu", "driver": None}
    if wanted != seen:
        why = f" ({facts['reason']})" if facts["reason"] else ""
        raise UserError(
            f"device {wanted} is not there: torch {facts['version']} sees {seen or 'no accelerator'}{why}",
            remedy="finetune probe, then gate check 03",
        )
    first = facts[wanted]["devices"][0]
    return {"type": wanted, "name": first["name"], "driver": first["driver"]}


def settle(
    config: Config, device: str, found: Mapping[str, Finding], chosen: Mapping[str, Chosen]
) -> dict[str, Any]:
    """The step as the fit would take it: explicit values as they are, the rest as chosen.

    What of the activations is kept is chosen with the plan, and changes no gradient: `auto` keeps least here.
    """

    def value(configured: Any, key: str, default: Any) -> Any:
        return configured if configured != "auto" else chosen[key].value if key in chosen else default

    masked = found["masked-sdpa"].ok
    return {
        "device": device,
        "precision": value(config.train.mixed_precision, "train.mixed_precision", "no"),
        "optimizer": value(config.optimizer.class_path, "optimizer.class_path", choices.ADAMW),
        "checkpointing": value(config.train.gradient_checkpointing, "train.gradient_checkpointing", True),
        "masked": masked,
    }


def to_json(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "status": finding.status,
        "seconds": finding.seconds,
        "reason": finding.reason,
        "error": finding.error,
        "tolerance": finding.tolerance,
        "facts": finding.facts,
        "fallback": None if finding.ok else choices.FALLBACKS[finding.name].to_json(),
    }
