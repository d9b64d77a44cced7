"""gate diagnose LOG"""

from pathlib import Path

import click

from gates.commands import common


@click.command()
@click.argument("log", metavar="LOG", type=click.Path(path_type=Path))
@click.option("--exit-code", type=int, metavar="N", help="What the process ended with; 1 if you don't know.")
@click.option("--json", "as_json", is_flag=True, help="JSON to stdout.")
def command(log: Path, exit_code: int | None, as_json: bool) -> int:
    """Name the known fault that a log, or a run's directory, shows, with its cause and what mends it.

    Exit status: 0 a fault is named, 1 nothing known, 3 not readable. It judges nothing.
    """
    from gates import diagnose as doctor
    from gates.evidence import EvidenceError

    try:
        found = doctor.diagnose(log, exit_code=exit_code)
    except EvidenceError as error:
        click.echo(f"gate: {error}", err=True)
        return 3
    if as_json:
        common.print_json(doctor.to_json(found))
    else:
        click.echo(doctor.render(found), nl=False)
    return found.exit_code
