"""Evidence 03-environment: this interpreter, its packages, and what they do when they are used."""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from runtime.probes import child, host, torch_facts
from runtime.probes.parsers import requirements
from runtime.workspace import Workspace

EVIDENCE = "03-environment"
DISTRIBUTION = "aipc-finetune"
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 180.0  # 6 s for all imports on two cores; a first start past a virus scanner takes minutes

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors")
# What training imports of each; diffusers and transformers load nothing before an attribute is asked for.
IMPORTS = (
    "torch:nn",
    "safetensors.torch:save_file",
    "diffusers:QwenImageTransformer2DModel",
    "diffusers:AutoencoderKLQwenImage",
    "transformers:Qwen2_5_VLForConditionalGeneration",
    "peft:LoraConfig",
    "accelerate:Accelerator",
    "bitsandbytes.nn:Linear4bit",
)
TRITONS = ("pytorch-triton", "pytorch-triton-xpu", "triton", "triton-windows", "triton-xpu")
IPEX = "intel-extension-for-pytorch"


def collect(workspace: Workspace, *, torch: dict[str, Any] | None = None) -> dict[str, Any]:
    """The data of the evidence. `torch`: what its probe gave, where that was asked already."""
    facts = torch if torch is not None else torch_facts.collect()
    device = resolve(str(workspace.target()["device"]), facts)
    return {
        "device": device,
        "python": host.python(),
        "packages": packages(),
        "torch": facts,
        "tritons": [found for name in TRITONS if (found := _installed(name))],
        "quantizer": quantizer(device),
        "imports": imports(),
        "names": names(),
        "ipex": ipex(),
    }


def resolve(device: str, facts: dict[str, Any]) -> str:
    return (torch_facts.accelerator(facts) or "cpu") if device == "auto" else device


def packages() -> list[dict[str, Any]]:
    """Each package that training needs, with the bounds that our own metadata has for it."""
    wanted = requirements.bounds(metadata.requires(DISTRIBUTION) or [], "train")
    return [{"name": name, "bounds": wanted.get(name, ""), "version": _version(name)} for name in PACKAGES]


def quantizer(device: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    outcome = child.ask("quantizer", device, limit_s=limit_s)
    told = {name: outcome.answer.get(name) for name in ("dequantize_error", "quantize_error")}
    return {**outcome.to_json(), "device": device, **told}


def imports(places: tuple[str, ...] = IMPORTS, limit_s: float = LIMIT_S) -> dict[str, Any]:
    outcome = child.ask("imports", *places, limit_s=limit_s)
    told = {name: child.shorten(reason) for name, reason in outcome.answer.get("modules", {}).items()}
    return {**outcome.to_json(), "modules": told}


def names(root: Path = ROOT) -> dict[str, Any]:
    outcome = child.ask("names", str(root), limit_s=LIMIT_S)
    lists = {name: outcome.answer.get(name, []) for name in ("packages", "distributions", "scripts")}
    return {**outcome.to_json(), **lists}


def ipex() -> dict[str, Any] | None:
    found = _installed(IPEX)
    if found is None:
        return None
    return {**child.ask("ipex", limit_s=LIMIT_S).to_json(), "version": found["version"]}


def _installed(name: str) -> dict[str, str] | None:
    version = _version(name)
    return {"name": re.sub(r"[-_.]+", "-", name).lower(), "version": version} if version else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
