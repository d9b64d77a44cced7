"""What step 06 left in the workspace, and whether it is of the base at hand. No torch: a plan asks too."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from runtime import files
from runtime.config.model import Config
from runtime.errors import UserError
from runtime.workspace import Workspace

EVIDENCE = "06-quantize"
FOLDER = "models/nf4"
STATE = "fetch.json"
"""In the folder of a base that step 06 fetches."""
LISTING = "fetched.json"
"""In a component's folder: its shards and their headers, whether they are here, yet to come or dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    component: str
    folder: Path
    usable: bool
    reason: str
    """What it is, or why it is not used; to be read after `auto: `."""
    kept: tuple[str, ...] = ()
    """Linears that are plain in it, by name."""
    keep: tuple[str, ...] = ()
    """The patterns that it was made with."""
    taken: bool = False
    """Whether somebody else made it."""


def is_packed(folder: Path) -> bool:
    """Whether a component folder holds NF4 weights already. Raises UserError for another quantization."""
    path = folder / "config.json"
    found = files.read_json(path).get("quantization_config") if path.is_file() else None
    if found is None:
        return False
    kind = (found.get("quant_method"), found.get("load_in_4bit"), found.get("bnb_4bit_quant_type"))
    if kind != ("bitsandbytes", True, "nf4"):
        raise UserError(
            f"{folder} is quantized, and not as bitsandbytes' NF4: {', '.join(map(str, kind))}",
            remedy="choose a bf16 base: finetune init --model FOLDER_OR_HUB_ID",
        )
    return True


def partial(target: Path) -> Path:
    """Where a file is that is being fetched to `target`."""
    return target.with_name(f".{target.name}.part")


def folder_of(workspace: Workspace, component: str) -> Path:
    return workspace.root / FOLDER / component


def find(workspace: Workspace, model: Path, config: Config | None = None) -> dict[str, Made]:
    """By component, what evidence 06-quantize lists; empty where the step was skipped or did not finish.

    With a `config`, a denoiser is not usable whose weights it replaces (model.transformer_weight), or of whose linears
    it keeps others plain (model.nf4_keep).
    """
    evidence = workspace.evidence(EVIDENCE)
    if evidence is None:
        return {}
    found = {
        item["name"]: replace(
            _judge(workspace, model, item["name"], item["source_fingerprint"], item["made_fingerprint"]),
            kept=tuple(item.get("kept", ())),
            keep=tuple(item.get("keep", ())),
            taken="taken" in item,
        )
        for item in evidence["components"]
    }
    if config is None or "transformer" not in found:
        return found
    before, reason = found["transformer"].keep, None
    if config.model.transformer_weight is not None:
        reason = f"{FOLDER}/transformer was made of the base's own weights, not of model.transformer_weight"
    elif config.model.nf4_keep and set(config.model.nf4_keep) != set(before):
        patterns = " ".join(before) or "none"
        reason = f"{FOLDER}/transformer was made with --keep {patterns}, not as model.nf4_keep says"
    if reason is not None:
        found["transformer"] = replace(found["transformer"], usable=False, reason=reason)
    return found


def _judge(workspace: Workspace, model: Path, component: str, source: str, made: str) -> Made:
    folder = folder_of(workspace, component)
    name = f"{FOLDER}/{component}"
    if not (model / component).is_dir() or files.weights_fingerprint(model / component) != source:
        usable, reason = False, f"{name} was made of another base"
    elif not folder.is_dir():
        usable, reason = False, f"{name} is gone"
    elif files.weights_fingerprint(folder) != made:
        usable, reason = False, f"{name} has changed since step 06 made it"
    else:
        usable, reason = True, f"step 06 made {name} of this base"
    return Made(component=component, folder=folder, usable=usable, reason=reason)


def folders(workspace: Workspace, model: Path, config: Config) -> Mapping[str, Path]:
    """By component, what a resolved config loads in place of the base's own weights.

    What model.transformer_weight names is under `transformer_weight`. Raises UserError where an NF4 text
    encoder is asked for that step 06 has not made: only the denoiser can be quantized while loading.
    """
    found = find(workspace, model, config)
    asked = {"transformer": config.model.quantize, "text_encoder": config.model.quantize_text_encoder}
    taken = {
        name: found[name].folder
        for name, precision in asked.items()
        if precision == "nf4" and name in found and found[name].usable
    }
    if asked["text_encoder"] == "nf4" and "text_encoder" not in taken:
        why = found["text_encoder"].reason if "text_encoder" in found else "step 06 made none"
        raise UserError(
            f"model.quantize_text_encoder is nf4, but there is no such text encoder: {why}",
            remedy="finetune quantize --component text_encoder",
        )
    weight = config.model.transformer_weight
    return taken | ({"transformer_weight": workspace.resolve(weight)} if weight is not None else {})


def own_fingerprint(workspace: Workspace, model: Path, config: Config) -> str | None:
    """Of the NF4 denoiser that a resolved config loads, where quantizing it while loading gives other weights.

    So it is where step 06 kept other linears plain than model.nf4_keep says, and where somebody else has made it.
    """
    found = find(workspace, model, config).get("transformer")
    if config.model.quantize != "nf4" or found is None or not found.usable:
        return None
    as_loaded = not found.taken and set(found.keep) == set(config.model.nf4_keep)
    return None if as_loaded else files.weights_fingerprint(found.folder)
