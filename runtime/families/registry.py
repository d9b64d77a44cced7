"""Which family a model folder belongs to, read from its model_index.json."""

from pathlib import Path
from typing import TYPE_CHECKING

from runtime import files
from runtime.errors import UserError
from runtime.families.facts import QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS, Facts

if TYPE_CHECKING:
    from runtime.families.base import Family

PIPELINES = {
    "QwenImageEditPipeline": QWEN_IMAGE_EDIT,
    "QwenImageEditPlusPipeline": QWEN_IMAGE_EDIT_PLUS,
}


def facts(model: Path) -> Facts:
    """Those of a diffusers-style folder's family; imports no torch. Raises UserError for any other folder."""
    index = model / "model_index.json"
    if not index.is_file():
        raise UserError(
            f"{model} is no diffusers model folder: it has no model_index.json",
            remedy="give model.pretrained_model_name_or_path the folder that holds transformer/, vae/, ...",
        )
    try:
        pipeline = files.read_json(index).get("_class_name")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{index} can't be read: {error}", remedy="fetch the model again") from error
    if pipeline not in PIPELINES:
        raise UserError(
            f"{index} names {pipeline}, expected one of {', '.join(PIPELINES)}",
            remedy="choose a Qwen-Image-Edit base: finetune init --model FOLDER",
        )
    return PIPELINES[pipeline]


def load_family(model: Path) -> "Family":
    """The family of a diffusers-style folder; no weights are read. Raises UserError as `facts` does."""
    from runtime.families.qwen_image_edit import QwenImageEdit
    from runtime.families.qwen_image_edit_plus import QwenImageEditPlus

    families: tuple[Family, ...] = (QwenImageEdit(), QwenImageEditPlus())
    return {family.facts.name: family for family in families}[facts(model).name]


def locate(reference: str, resolve: "Path | None" = None) -> Path:
    """The local folder of a model: `resolve`d path if it exists, else a snapshot of the hub name."""
    if resolve is not None and resolve.is_dir():
        return resolve
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(reference))
    except Exception as error:  # the hub client has no common base for its many errors
        raise UserError(
            f"{reference} is neither a folder here nor a model that the hub gives: {error}",
            remedy="finetune init --model FOLDER_OR_HUB_NAME",
        ) from error
