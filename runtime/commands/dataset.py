"""finetune dataset [--holdout N] [--table] [--contact-sheet FILE]"""

from functools import partial
from pathlib import Path

import click

from runtime import files
from runtime.commands import common
from runtime.config.load import load_config
from runtime.config.model import Processor
from runtime.data import buckets, contact_sheet, manifest, order, reading
from runtime.data.buckets import Places
from runtime.data.manifest import Manifest
from runtime.data.sample import Note, Sample
from runtime.errors import DataError, UserError
from runtime.families import registry
from runtime.families.facts import QWEN_IMAGE_EDIT
from runtime.progress import Progress
from runtime.workspace import Workspace

SHOWN = 20


@click.command(cls=common.Command)
@click.option(
    "--holdout",
    type=click.IntRange(min=0),
    metavar="N",
    help="Samples to set aside for validation; holdout.txt in the dataset wins.  "
    "[default: one in 10, 3 to 16, from 10 samples on]",
)
@click.option("--table", is_flag=True, help="Also print each sample with its final sizes.")
@click.option(
    "--contact-sheet",
    "sheet",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also draw the samples as they are trained on, into a .png.",
)
@common.workspace_option
@common.json_option
def command(
    holdout: int | None, table: bool, sheet: Path | None, workspace: Workspace, as_json: bool
) -> None:
    """Scan the target's dataset and record it as evidence 02-dataset."""
    found = scan(workspace, holdout, Progress())
    if as_json:
        common.print_json(found.to_json())
    else:
        show(found)
    if not found.samples:
        raise DataError(
            "the dataset has no usable sample",
            remedy="mend the files listed as dropped, then finetune dataset",
        )
    if table or sheet is not None:
        processor, step = _processing(workspace)
        entries = _placed(workspace, found, processor, step)
        if table and not as_json:
            rows = contact_sheet.table_rows((sample, places) for sample, _, places in entries)
            common.print_table("final sizes, height x width", contact_sheet.COLUMNS, rows)
        if sheet is not None:
            _draw(f"dataset {found.root}", entries, processor, sheet)


def scan(workspace: Workspace, holdout: int | None = None, progress: Progress | None = None) -> Manifest:
    """Build the manifest and write the evidence."""
    reference = str(workspace.target()["dataset"])
    recording = workspace.begin_evidence(manifest.EVIDENCE, "finetune dataset")
    found = reading.build(workspace, reference, holdout, progress=progress)
    recording.write(inputs={}, data=found.to_json())
    return found


def _processing(workspace: Workspace) -> tuple[Processor, int]:
    """How config.yaml brings pictures to size, or the defaults while there is none; and the family's step."""
    processor = Processor()
    if workspace.config_path.is_file():
        processor = load_config(workspace.config_path).config.data.processor
    else:
        click.echo("no config.yaml yet: sizes are those of the defaults", err=True)
    model = workspace.resolve(str(workspace.target()["model"]))
    return processor, registry.facts(model).size_multiple if model.is_dir() else QWEN_IMAGE_EDIT.size_multiple


def _placed(
    workspace: Workspace, found: Manifest, processor: Processor, step: int
) -> list[tuple[Sample, Path, Places]]:
    """Each sample with the folder of its source and its final sizes."""
    roots = manifest.roots(workspace, found)
    sizings = {name: buckets.sizing(processor, kept, step) for name, kept in found.settings.items()}
    return [
        (sample, roots[sample.source], order.places(sample, sizings[sample.source]))
        for sample in found.samples
    ]


def _draw(title: str, entries: list[tuple[Sample, Path, Places]], processor: Processor, path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UserError(
            f"--contact-sheet {path}: expected a .png", remedy="finetune dataset --contact-sheet sheet.png"
        )
    pages = contact_sheet.sheets(entries, title=title, background=processor.background)
    for number, page in enumerate(pages, 1):
        place = path if number == 1 else path.with_name(f"{path.stem}-{number}.png")
        files.write_with(place, partial(page.save, format="PNG"))
        click.echo(f"wrote {place}", err=True)


def show(found: Manifest) -> None:
    rows = [
        ("training samples", str(len(found.of("train")))),
        ("held-out samples", str(len(found.of("holdout")))),
        ("holdout rule", found.holdout_rule),
        ("dropped", str(len(found.dropped))),
        ("warnings", str(len(found.warnings))),
    ]
    for source in found.sources if len(found.sources) > 1 else ():
        own = [sample for sample in found.samples if sample.source == source.name]
        kept = source.settings
        share = f"weight {kept.weight:g}" if kept.weight is not None else f"{kept.views} times an epoch"
        held = ", holds the base's behaviour" if kept.regularisation else ""
        rows.append(
            (source.name, f"{source.kind}, {len(own)} samples, {source.dropped} dropped, {share}{held}")
        )
    common.print_table(f"dataset {found.root}", ("what", "value"), rows)
    _show_notes("dropped", found.dropped)
    _show_notes("warning", found.warnings)


def _show_notes(word: str, notes: tuple[Note, ...]) -> None:
    for note in notes[:SHOWN]:
        click.echo(f"{word}: {note.path}: {note.reason}", err=True)
    if len(notes) > SHOWN:
        click.echo(f"{word}: and {len(notes) - SHOWN} more, all in the evidence and in --json", err=True)
