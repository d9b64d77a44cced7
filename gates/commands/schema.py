"""gate schema [NAME]"""

import click

from gates.commands import common


@click.command()
@click.argument("name", required=False)
@common.options
def command(name: str | None, workspace: str, as_json: bool) -> int:
    """Print a published schema; without NAME list them."""
    from gates.schema import NAMES, load

    if name is None:
        if as_json:
            common.print_json(list(NAMES))
        else:
            click.echo("\n".join(NAMES))
        return 0
    if name not in NAMES:
        raise click.BadParameter(f"{name}: there are {', '.join(NAMES)}", param_hint="NAME")
    common.print_json(load(name))
    return 0
