"""gate install AGENT [DIR]"""

from pathlib import Path

import click

from gates.commands import common


@click.command()
@click.argument("agent", type=click.Choice(("claude", "codex", "gemini", "copilot", "cursor", "agents")))
@click.argument("folder", metavar="[DIR]", default=".")
@click.option("--user", is_flag=True, help="Into your home folder, for all projects, instead of DIR.")
@click.option("--remove", is_flag=True, help="Take the copies away again; what you changed is kept.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@common.options
def command(
    agent: str, folder: str, user: bool, remove: bool, dry_run: bool, workspace: str, as_json: bool
) -> int:
    """Copy the skills to where AGENT looks for them below DIR, and check the copies.

    Run it again after an upgrade. A file that you changed is kept, and named.
    """
    from gates import install as installer

    known = installer.AGENTS[agent]
    base, place = (Path.home(), known.user) if user else (Path(folder), known.project)
    do = installer.remove if remove else installer.install
    try:
        outcome = do(base, place, dry_run=dry_run)
    except installer.InstallError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        common.print_json(installer.to_json(agent, "remove" if remove else "install", outcome))
    else:
        click.echo(installer.to_text(outcome), nl=False)
    for problem in outcome.problems:
        click.echo(problem, err=True)
    return 1 if outcome.problems else 0
