"""finetune quantize [--component transformer|text_encoder ...] [--model HUB_ID [--drop-fetched]] [--made FOLDER]"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.model import DEVICES
from runtime.progress import Progress
from runtime.quantize.making import COMPONENTS, Wish, quantize
from runtime.quantize.making import wanted as wanted
from runtime.workspace import Workspace

HURTS = 0.2  # relative error of a layer above which gate 06 says FAIL


@click.command(cls=LongCommand)
@click.option(
    "--component",
    "components",
    multiple=True,
    type=click.Choice(COMPONENTS),
    help="May be repeated.  [default: both, but one that config.yaml sets to none]",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Linears that stay as they are, by name with * and ?; may be repeated.  [default: "
    "model.nf4_keep, else as the last time; none forgets]",
)
@click.option(
    "--model",
    metavar="HUB_ID",
    help="Fetch this base, the large components shard by shard.  [default: config.yaml's]",
)
@click.option(
    "--drop-fetched",
    is_flag=True,
    help="Remove each shard that this command has fetched once it is quantized.",
)
@click.option(
    "--made",
    "folders",
    multiple=True,
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Take NF4 weights that are made already: a component's folder, or one that holds components.",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="Where to compute; auto is cuda, else the CPU, which needs no compiler as xpu would.",
)
@common.workspace_option
@common.json_option
def command(
    components: tuple[str, ...],
    keep: tuple[str, ...],
    model: str | None,
    drop_fetched: bool,
    folders: tuple[Path, ...],
    device: str,
    workspace: Workspace,
    as_json: bool,
) -> None:
    """Turn denoiser and text encoder into NF4, tensor by tensor; an interrupted run goes on from there."""
    wish = Wish(
        components=components,
        keep=keep,
        device=device,
        model=model,
        drop_fetched=drop_fetched,
        made=folders,
    )
    data = quantize(workspace, wish, Progress())
    if as_json:
        common.print_json(data)
    else:
        show(data)


def show(data: dict[str, Any]) -> None:
    rows = [
        (
            item["name"],
            str(item["linears"]),
            str(len(item["kept"])),
            f"{item['source_gib']:.3f} -> {item['made_gib']:.3f}",
            f"{item['mean_error']:.4f}" if item["worst"] else "not measured",
            f"{item['worst'][0]['error']:.4f} {item['worst'][0]['name']}" if item["worst"] else "",
        )
        for item in data["components"]
    ]
    columns = ("component", "linears", "kept", "GiB", "mean error", "worst")
    common.print_table(f"NF4 on {data['device']} in {data['seconds']:.0f} s", columns, rows)
    value = data["output_error"]["value"]
    if value is not None:
        click.echo(f"denoiser output: {value:.2%} off, {data['output_error']['reason']}")
    else:
        click.echo(f"denoiser output: {data['output_error']['reason']}")
    for item in data["components"]:
        for line in _told(item):
            click.echo(line)
    click.echo("next: gate check 06", err=True)


def _told(item: dict[str, Any]) -> Iterator[str]:
    if "taken" in item:
        yield f"{item['name']}: taken as it was made, from {item['taken']}"
    if "fetched" in item:
        fetched = item["fetched"]
        dropped = f", {len(fetched['dropped'])} of its shards dropped" if fetched["dropped"] else ""
        yield f"{item['name']}: fetched from {fetched['repo']} at {fetched['revision'][:12]}{dropped}"
    if item["keep"]:
        yield f"{item['name']}: kept as before unless --keep says otherwise: {' '.join(item['keep'])}"
    bad = [layer["name"] for layer in item["worst"] if layer["error"] > HURTS]
    if bad:
        patterns = " ".join(f'--keep "{name}"' for name in (*item["keep"], *bad))
        yield f"far off, better kept plain: finetune quantize --component {item['name']} {patterns}"
