"""finetune quantize [--component transformer|text_encoder ...] [--keep PATTERN ...] [--device DEVICE]"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.config.model import DEVICES, Config
from runtime.errors import UserError
from runtime.files import GIB
from runtime.memory import made
from runtime.progress import Progress
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from runtime.families.base import Family
    from runtime.memory.streaming import Job

COMPONENTS = ("transformer", "text_encoder")
SPARE_GIB = 1.0


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
    help="Linears that stay as they are, by name with * and ?; may be repeated.",
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
    device: str,
    workspace: Workspace,
    as_json: bool,
) -> None:
    """Turn denoiser and text encoder into NF4, tensor by tensor; an interrupted run goes on from there."""
    data = quantize(workspace, components, keep, device, Progress())
    if as_json:
        common.print_json(data)
    else:
        show(data)


def quantize(
    workspace: Workspace, components: Sequence[str], keep: tuple[str, ...], wished: str, progress: Progress
) -> dict[str, Any]:
    """Make models/nf4/, write the evidence and return its data. Whole shards of an earlier run are kept."""
    from runtime import device  # first: it quietens what bitsandbytes says at import
    from runtime.families.registry import load_family, locate
    from runtime.memory import nf4, streaming
    from runtime.memory.streaming import Job

    config = load_config(workspace.config_path).config
    reference = config.model.pretrained_model_name_or_path
    model = locate(reference, workspace.resolve(reference))
    family = load_family(model)
    names = tuple(dict.fromkeys(components)) or wanted(config)
    chosen = device.pick(wished).type
    place = device.quantizing(chosen) if wished == "auto" else chosen
    jobs = [
        Job(
            component=name,
            source=model / name,
            target=made.folder_of(workspace, name),
            rule=nf4.rule_for(name, family.facts.blocks, keep),
            device=place,
        )
        for name in names
    ]
    _refuse_full_disk(workspace, jobs)
    old = workspace.evidence(made.EVIDENCE) or {"components": []}
    others = [
        item for item in old["components"] if item["name"] not in names and _stands(workspace, model, item)
    ]
    recording = workspace.begin_evidence(made.EVIDENCE, "finetune quantize")
    started = time.monotonic()
    records = [streaming.quantize(job, progress) for job in jobs]
    data = {
        "model": reference,
        "components": sorted([*others, *records], key=lambda item: COMPONENTS.index(item["name"])),
        "device": place,
        "seconds": round(time.monotonic() - started, 3),
        "output_error": _output_error(family, model, jobs, records, old, place),
    }
    inputs = {"config": {"model.pretrained_model_name_or_path": reference}}
    recording.write(inputs=inputs, data=data)
    return data


def wanted(config: Config) -> tuple[str, ...]:
    """The components that config.yaml doesn't set to none. Raises UserError where nothing is left.

    The weights of model.transformer_weight are quantized while loading, the same bits.
    """
    asked = {"transformer": config.model.quantize, "text_encoder": config.model.quantize_text_encoder}
    replaced = config.model.transformer_weight is not None
    names = tuple(
        name for name in COMPONENTS if asked[name] != "none" and not (replaced and name == "transformer")
    )
    if not names:
        raise UserError(
            "config.yaml sets model.quantize and model.quantize_text_encoder to none: nothing is to be done"
            if not replaced
            else "config.yaml replaces the denoiser (model.transformer_weight) and sets "
            "model.quantize_text_encoder to none: nothing is to be done",
            remedy='gate skip 06 --reason "plain weights, as config.yaml says"',
        )
    return names


def _stands(workspace: Workspace, model: Path, item: dict[str, Any]) -> bool:
    found = made.find(workspace, model).get(item["name"])
    return found is not None and found.usable


def _refuse_full_disk(workspace: Workspace, jobs: "Sequence[Job]") -> None:
    from runtime.memory import streaming

    needed = sum(streaming.missing_bytes(job) for job in jobs) / GIB
    free = shutil.disk_usage(workspace.root).free / GIB
    if needed and needed + SPARE_GIB > free:
        raise UserError(
            f"the NF4 weights need {needed:.1f} GiB and {SPARE_GIB:.0f} GiB to spare, {free:.1f} GiB are free",
            remedy="free disk space, or make one at a time: finetune quantize --component transformer",
        )


def _output_error(
    family: "Family",
    model: Path,
    jobs: "Sequence[Job]",
    records: Sequence[dict[str, Any]],
    old: dict[str, Any],
    place: str,
) -> dict[str, Any]:
    """Of the denoiser made now; what was measured of the same weights before, or of none, is kept."""
    from runtime.memory import output_error

    known: dict[str, Any] = old.get("output_error") or {"value": None, "reason": "no denoiser was quantized"}
    prints = {item["made_fingerprint"] for item in old["components"]}
    for job, record in zip(jobs, records, strict=True):
        if job.component == "transformer" and record["made_fingerprint"] not in prints:
            found = output_error.measure(family, model, job.target, place)
            return {"value": found.value, "reason": found.reason}
    return known


def show(data: dict[str, Any]) -> None:
    rows = [
        (
            item["name"],
            str(item["linears"]),
            str(len(item["kept"])),
            f"{item['source_gib']:.3f} -> {item['made_gib']:.3f}",
            f"{item['mean_error']:.4f}",
            f"{item['worst'][0]['error']:.4f} {item['worst'][0]['name']}",
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
    click.echo("next: gate check 06", err=True)
