"""gate report [--output FILE | --bundle ZIP]"""

from pathlib import Path

import click

from gates.commands import common


@click.command()
@click.option("--output", metavar="FILE", help="Where to write the page.  [default: report.html in DIR]")
@click.option("--bundle", metavar="ZIP", help="Write what gate verify needs elsewhere, instead of the page.")
@click.option("--without", multiple=True, type=click.Choice(("weights",)), help="Leave it out of the bundle.")
@click.option(
    "--with", "also", multiple=True, type=click.Choice(("cache", "dataset")), help="Put it into the bundle."
)
@common.options
def command(
    output: str | None,
    bundle: str | None,
    without: tuple[str, ...],
    also: tuple[str, ...],
    workspace: str,
    as_json: bool,
) -> int:
    """Judge everything and write it down as one HTML page to send on; with --bundle as evidence to verify."""
    from gates import registry
    from gates.chain import judge_up_to
    from gates.reports.sending import send

    opened = common.opened(workspace)
    judged = judge_up_to(opened, registry.numbers()[-1])
    for item in judged:
        item.write(opened)
    page = Path(output) if output else None if bundle else opened.root / "report.html"
    sent = send(opened, judged, page, Path(bundle) if bundle else None, without=without, also=also)
    if as_json:
        common.print_json(sent.to_json())
    else:
        click.echo(sent.to_text(), nl=False)
    if sent.problem:
        click.echo(f"gate: {sent.problem}", err=True)
        return 3
    return 0
