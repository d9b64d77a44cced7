"""Which family a model folder belongs to, read from its model_index.json."""

from pathlib import Path

from runtime import files
from runtime.errors import UserError
from runtime.families.base import Family

PIPELINES = {
    "QwenImageEditPipeline": "qwen-image-edit",
    "QwenImageEditPlusPipeline": "qwen-image-edit-plus",
}


def family_name(model: Path) -> str:
    """The family's name for a diffusers-style folder. Raises UserError for anything else."""
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
            remedy="choose a Qwen-Image-Edit model",
        )
    return PIPELINES[pipeline]


def load_family(model: Path) -> Family:
    from runtime.families.qwen_image_edit import QwenImageEdit
    from runtime.families.qwen_image_edit_plus import QwenImageEditPlus

    families: dict[str, Family] = {
        "qwen-image-edit": QwenImageEdit(),
        "qwen-image-edit-plus": QwenImageEditPlus(),
    }
    return families[family_name(model)]


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
