"""finetune sample --prompt TEXT --image FILE [--image FILE ...] [--checkpoint best|last|none|PATH]"""

from pathlib import Path
from typing import Any

import click

from runtime import device, files
from runtime.commands import common
from runtime.config.load import load_config
from runtime.config.resolve import resolve
from runtime.errors import UserError
from runtime.inference import validate
from runtime.memory import made
from runtime.progress import Progress
from runtime.training import record
from runtime.workspace import Workspace


@click.command(cls=common.Command)
@click.option("--prompt", required=True, help="What to do with the picture.")
@click.option(
    "--image",
    "images",
    required=True,
    multiple=True,
    metavar="FILE",
    help="The picture to edit; may be repeated.",
)
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    metavar="best|last|none|PATH",
    help="none is the base alone.",
)
@click.option(
    "--size", nargs=2, type=int, metavar="H W", help="Pixels.  [default: data.processor.target_size]"
)
@click.option("--seed", type=int, help="[default: validation.seed]")
@click.option("--out", default="sample.png", show_default=True, metavar="FILE")
@common.workspace_option
@common.json_option
def command(
    prompt: str,
    images: tuple[str, ...],
    checkpoint: str,
    size: tuple[int, int] | None,
    seed: int | None,
    out: str,
    workspace: Workspace,
    as_json: bool,
) -> None:
    """Edit a picture of your own with the base and an adapter."""
    from runtime.cache import encode
    from runtime.cache.encode import Ask
    from runtime.families.registry import load_family, locate
    from runtime.inference.painter import Painter

    config = resolve(workspace, load_config(workspace.config_path).config).config
    reference = config.model.pretrained_model_name_or_path
    model = locate(reference, workspace.resolve(reference))
    family, quantized = load_family(model), made.folders(workspace, model, config)
    height, width = size or config.data.processor.target_size
    if height % family.size_multiple or width % family.size_multiple or min(height, width) <= 0:
        near = [max(1, round(side / family.size_multiple)) * family.size_multiple for side in (height, width)]
        raise UserError(
            f"--size {height} {width}: both must be multiples of {family.size_multiple}",
            remedy=f"finetune sample --size {near[0]} {near[1]}",
        )
    controls = tuple(_existing(image) for image in images)
    encode.refuse_control_count(family, "this picture", len(controls))
    project = record.project(workspace, config.logging)
    folder = None if checkpoint == "none" else validate.find_checkpoint(project, checkpoint, workspace.root)
    progress = Progress()
    progress.say("encoding the prompt with its picture")
    guided = config.validation.guidance_scale > 1
    ask = Ask(
        prompt=prompt,
        controls=controls,
        negative=config.validation.negative_prompt if guided else None,
    )
    tensors = encode.encode(family, encode.load(family, model, config, quantized), config, ask)
    device.free_cached(
        device.pick(config.hardware.device)
    )  # the text encoder is gone before the denoiser comes
    progress.say("painting")
    painter = Painter(family, model, config, folder, quantized)
    chosen = config.validation.seed if seed is None else seed
    latents, _ = painter.sample("own", tensors, size=(height, width), seed=chosen)
    picture = painter.picture(latents)
    path = Path(out).expanduser().resolve()
    files.write_with(path, lambda temporary: picture.save(temporary, format="PNG"))
    _print(path, folder, chosen, as_json)


def _existing(image: str) -> Path:
    path = Path(image).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"--image {image}: no such file", remedy="finetune sample --image FILE")
    return path


def _print(path: Path, folder: Path | None, seed: int, as_json: bool) -> None:
    used: dict[str, Any] = {"path": str(path), "checkpoint": str(folder) if folder else None, "seed": seed}
    if as_json:
        common.print_json(used)
    else:
        click.echo(path)
