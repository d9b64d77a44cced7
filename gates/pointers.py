"""What config.yaml points at: the model, weights beside it, prompts and their images; whether each is there."""

import re
from pathlib import Path
from typing import Any

from gates import prompt_file
from gates.evidence import Reading, attempt, read_json
from gates.workspace import Workspace


def model(workspace: Workspace, config: dict[str, Any]) -> str:
    """folder, hub (the target's id), other (a folder that is no model) or nothing."""
    name = _get(config, "model", "pretrained_model_name_or_path")
    if not isinstance(name, str) or not name:
        return "nothing"
    folder = workspace.resolve(name)
    if folder.is_dir():
        index = attempt(lambda: read_json(folder / "model_index.json", "model_index.json"))
        return "folder" if isinstance(index.value, dict) else "other"
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    return "hub" if is_hub_id and workspace.target["model"] == name else "nothing"


def images(workspace: Workspace, config: dict[str, Any]) -> dict[str, bool]:
    """By name as written in validation.samples, whether it is a file."""
    samples = _get(config, "validation", "samples")
    lists = [item.get("images", []) for item in samples if isinstance(item, dict)] if samples else []
    names = [name for images in lists if isinstance(images, list) for name in images if isinstance(name, str)]
    return {name: _is_file(attempt(lambda name=name: workspace.resolve(name))) for name in names}  # type: ignore[misc]


def prompts(workspace: Workspace, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of validation.prompt_file. Raises EvidenceError."""
    named = _get(config, "validation", "prompt_file")
    return prompt_file.read(workspace, named) if isinstance(named, str) else []


def weights(workspace: Workspace, config: dict[str, Any]) -> dict[str, bool]:
    """By key, whether what it names beside the base is there."""
    lora = _get(config, "model", "lora")
    named = {
        "model.transformer_weight": _get(config, "model", "transformer_weight"),
        "model.lora.pretrained_weight": lora.get("pretrained_weight") if isinstance(lora, dict) else None,
    }
    places = {
        key: attempt(lambda name=name: workspace.resolve(name))  # type: ignore[misc]
        for key, name in named.items()
        if isinstance(name, str)
    }
    return {key: place.value is not None and place.value.exists() for key, place in places.items()}


def _is_file(path: Reading[Path]) -> bool:
    return path.value is not None and path.value.is_file()


def _get(config: dict[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    return part.get(key) if isinstance(part, dict) else None
