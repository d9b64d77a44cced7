"""finetune dataset [--holdout N]"""

import click

from runtime.commands import common
from runtime.data import manifest
from runtime.data.layout import Note
from runtime.data.manifest import Manifest
from runtime.errors import DataError
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
@common.workspace_option
@common.json_option
def command(holdout: int | None, workspace: Workspace, as_json: bool) -> None:
    """Scan the target's dataset and record it as evidence 02-dataset."""
    found = scan(workspace, holdout)
    if as_json:
        common.print_json(found.to_json())
    else:
        show(found)
    if not found.samples:
        raise DataError(
            "the dataset has no usable sample",
            remedy="mend the files listed as dropped, then finetune dataset",
        )


def scan(workspace: Workspace, holdout: int | None = None) -> Manifest:
    """Build the manifest and write the evidence."""
    reference = str(workspace.target()["dataset"])
    recording = workspace.begin_evidence(manifest.EVIDENCE, "finetune dataset")
    found = manifest.build(workspace.resolve(reference), holdout, reference=reference)
    recording.write(inputs={}, data=found.to_json())
    return found


def show(found: Manifest) -> None:
    rows = [
        ("training samples", str(len(found.of("train")))),
        ("held-out samples", str(len(found.of("holdout")))),
        ("holdout rule", found.holdout_rule),
        ("files dropped", str(len(found.dropped))),
        ("warnings", str(len(found.warnings))),
    ]
    common.print_table(f"dataset {found.root}", ("what", "value"), rows)
    _show_notes("dropped", found.dropped)
    _show_notes("warning", found.warnings)


def _show_notes(word: str, notes: tuple[Note, ...]) -> None:
    for note in notes[:SHOWN]:
        click.echo(f"{word}: {note.path}: {note.reason}", err=True)
    if len(notes) > SHOWN:
        click.echo(f"{word}: and {len(notes) - SHOWN} more, all in the evidence and in --json", err=True)
