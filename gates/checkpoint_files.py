"""Which files a checkpoint of a denoiser is: a folder, an index, a shard of several, or one file."""

import re
from pathlib import Path

from gates.evidence import MissingEvidenceError, read_json

NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")


def files_of(path: Path, shown: str) -> list[Path]:
    """Its weights, and config.json where it is a folder. Raises EvidenceError where one is absent."""
    if path.is_dir():
        folder = path / "transformer" if (path / "transformer").is_dir() else path
        config = folder / "config.json"
        return [*_in_folder(folder, shown), *([config] if config.is_file() else [])]
    if path.name.endswith(".index.json"):
        return _indexed(path, shown)
    if matched := SHARD.fullmatch(path.name):
        count = int(matched[2])
        named = [f"{matched[1]}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        return _there([path.with_name(name) for name in named], shown)
    return _there([path], shown)


def _in_folder(folder: Path, shown: str) -> list[Path]:
    for name in NAMES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _indexed(index, shown)
        if (folder / name).is_file():
            return [folder / name]
    return _there(sorted(folder.glob("*.safetensors")), shown)


def _indexed(index: Path, shown: str) -> list[Path]:
    document = read_json(index, shown)
    named = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(named, dict):
        raise MissingEvidenceError(shown, "its index lists no weight_map")
    return _there([index.parent / str(name) for name in sorted(set(named.values()))], shown)


def _there(paths: list[Path], shown: str) -> list[Path]:
    absent = [path.name for path in paths if not path.is_file()]
    if absent or not paths:
        raise MissingEvidenceError(shown, f"has no {', '.join(absent) or 'weights'}")
    return paths
