"""gate skip 06 --reason TEXT"""

import click

from gates.commands import common


@click.command()
@click.argument("nn", metavar="NN")
@click.option("--reason", required=True, metavar="TEXT", help="Why; the verdict will say it.")
@common.options
def command(nn: str, reason: str, workspace: str, as_json: bool) -> int:
    """Leave a step out on purpose. Only 06 may be, and its gate still asks whether the plan fits without it."""
    from gates import registry
    from gates.verdict import render, utc_now, write_text

    (number, *others) = common.numbers(nn)
    if others or not registry.load(number).may_be_skipped:
        raise click.UsageError(f"gate {nn} can't be skipped; only 06 can")
    if not reason.strip():
        raise click.BadParameter("say why, in a few words", param_hint="--reason")
    opened = common.opened(workspace)
    document = {"schema": "skip/1", "gate": number, "reason": reason.strip(), "at": utc_now()}
    write_text(opened.root / ".gates" / "skips" / f"{number}.json", render(document))
    if as_json:
        common.print_json(document)
    else:
        click.echo(f"gate {number} is to be skipped: {document['reason']}")
        click.echo(f"next: gate check {number}", err=True)
    return 0
