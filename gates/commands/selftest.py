"""gate selftest"""

from pathlib import Path

import click

from gates.commands import common


@click.command()
@common.options
def command(workspace: str, as_json: bool) -> int:
    """Plant faults in healthy evidence: does each turn the right check? Needs no workspace and no torch."""
    import tempfile

    from gates.selftest import matrix, report
    from gates.selftest.faults import FAULTS
    from gates.selftest.shapes import SHAPES

    with tempfile.TemporaryDirectory(prefix="gate-selftest-") as folder:
        found = matrix.run(SHAPES, FAULTS, Path(folder))
    if as_json:
        common.print_json(report.document(found))
        click.echo(report.summary(found), err=True)
    else:
        click.echo(report.text(found))
    return 0 if found.passes else 1
