"""finetune sample --prompt TEXT [--image FILE ...] [--checkpoint best|last|none|PATH]"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import files
from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.config.model import Config
from runtime.config.resolve import resolve
from runtime.data import buckets
from runtime.data import images as pictures
from runtime.data.sample import Settings, Size
from runtime.errors import UserError
from runtime.families.facts import Facts
from runtime.inference import validate
from runtime.progress import Progress
from runtime.quantize import made
from runtime.training import record
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from runtime.cache.key import Wanted


@click.command(cls=LongCommand)
@click.option("--prompt", required=True, help="What to do with the picture.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="The picture to edit; may be repeated. Without one the prompt alone is painted.",
)
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    metavar="best|last|none|PATH",
    help="none is the base alone.",
)
@click.option(
    "--size",
    nargs=2,
    type=int,
    metavar="H W",
    help="Pixels.  [default: as for a target of the picture's size]",
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
    from runtime.cache.build import refuse_control_count
    from runtime.families.registry import load_family, locate
    from runtime.inference import sampler
    from runtime.inference.painter import Painter
    from runtime.training import ahead

    config = resolve(workspace, load_config(workspace.config_path).config).config
    reference = config.model.pretrained_model_name_or_path
    model = locate(reference, workspace.resolve(reference))
    family, quantized = load_family(model), made.folders(workspace, model, config)
    if size is not None:
        _refuse_broken(size, family.facts.size_multiple)
    controls = tuple(_existing(image) for image in images)
    refuse_control_count(family.facts, "this picture", len(controls))
    want, usual = _wanted(config, prompt, controls, family.facts)
    project = record.project(workspace, config.logging)
    folder = None if checkpoint == "none" else validate.find_checkpoint(project, checkpoint, workspace.root)
    progress = Progress()
    progress.say("encoding the prompt" + (" with its picture" if images else ""))
    encoded = encode.one_after_other(family, model, config, quantized, want)
    for note in encoded.notes:
        progress.say(note)
    progress.say("painting")
    chosen = config.validation.seed if seed is None else seed
    task = replace(sampler.task_of(config.validation, "own", size or usual), seed=chosen)
    table = None
    if config.train.cached_modulation is True:
        groups = ahead.of_pictures(family, model, [task])
        table = ahead.request(workspace, config, model, quantized, groups, progress.say)
    painter = Painter(family, model, config, folder, quantized, table)
    latents, _ = painter.sample(task, encoded.tensors)
    picture = painter.picture(latents)
    path = Path(out).expanduser().resolve()
    files.write_with(path, lambda temporary: picture.save(temporary, format="PNG"))
    _print(path, folder, chosen, as_json)


def _refuse_broken(size: Size, step: int) -> None:
    if any(side % step or side <= 0 for side in size):
        near = [max(1, round(side / step)) * step for side in size]
        raise UserError(
            f"--size {size[0]} {size[1]}: both must be multiples of {step}",
            remedy=f"finetune sample --size {near[0]} {near[1]}",
        )


def _wanted(config: Config, prompt: str, paths: tuple[Path, ...], facts: Facts) -> "tuple[Wanted, Size]":
    """What to encode, which is never stored and so has no key, and the size that its target would have."""
    from runtime.cache.key import Picture, Wanted

    processor, validation = config.data.processor, config.validation
    sizes = [pictures.load(path, background=processor.background).size[::-1] for path in paths]
    sizing = buckets.sizing(processor, Settings(), facts.size_multiple)
    placed = buckets.place(sizing, target=None, controls=sizes, mask=None)
    document = {
        "prompt": prompt,
        "alternatives": [],
        "empty_prompt": False,
        "negative_prompt": validation.negative_prompt if validation.guidance_scale > 1 else None,
    }
    pairs = zip(paths, placed.controls, strict=True)
    controls = tuple(Picture(path=path, placed=place) for path, place in pairs)
    want = Wanted(id="own", split="prompt", document=document, key="", target=None, controls=controls)
    return want, placed.size


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
