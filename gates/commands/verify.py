"""gate verify [NN]"""

from pathlib import Path

import click

from gates.commands import common


def _allowed(ctx: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    from gates.verify import ALLOWABLE

    words = [word.strip() for word in value.split(",") if word.strip()]
    if unknown := [word for word in words if word not in ALLOWABLE]:
        raise click.BadParameter(f"{unknown[0]}: there are {', '.join(ALLOWABLE)}")
    return words


@click.command()
@click.argument("nn", metavar="[NN]", default="all")
@click.option("--bundle", type=click.Path(path_type=Path), metavar="ZIP", help="Of gate report --bundle.")
@click.option(
    "--allow-absent",
    "allowed",
    default="",
    metavar="LIST",
    callback=_allowed,
    help="Of weights,dataset,cache: what may rest on recorded digests.",
)
@common.options
def command(nn: str, bundle: Path | None, allowed: list[str], workspace: str, as_json: bool) -> int:
    """Judge the stored verdicts again, here or on another machine, without looking at this one.

    Exit status: 0 each check confirmed, 1 one contradicted, 3 one unverifiable, for its input is absent.
    """
    import tempfile

    from gates.reports import bundle as bundles
    from gates.reports import verified
    from gates.verify import exit_code
    from gates.verify import verify as judge_again
    from gates.workspace import NotAWorkspaceError

    numbers = common.numbers(nn)
    with tempfile.TemporaryDirectory(prefix="gate-verify-") as folder:
        try:
            root = bundles.unpack(bundle, Path(folder)) if bundle else Path(workspace)
            found = judge_again(bundles.opened(root), numbers, allowed)
        except NotAWorkspaceError as error:
            raise click.UsageError(str(error)) from error
        except bundles.BundleError as error:
            click.echo(f"gate: {error}", err=True)
            return 3
    if as_json:
        common.print_json(verified.to_json(found))
        click.echo(verified.last_line(found), err=True)
    else:
        click.echo(verified.render(found), nl=False)
    return exit_code(found)
