"""gate next"""

from pathlib import Path

import click

from gates.commands import common


@click.command()
@common.options
def command(workspace: str, as_json: bool) -> int:
    """The one action that leads on: a command, or what to edit before it."""
    from dataclasses import asdict

    from gates import advice, registry
    from gates.chain import judge_up_to
    from gates.workspace import NotAWorkspaceError, Workspace

    try:
        judged = judge_up_to(Workspace.open(Path(workspace)), registry.numbers()[-1])
        action = advice.next_action(judged)
    except NotAWorkspaceError as error:
        action = advice.no_workspace(str(error))
    if as_json:
        common.print_json(asdict(action))
    else:
        click.echo(action.instruction)
        click.echo(f"{action.kind}: {action.because}", err=True)
    return 0
