"""gate explain NN [CHECK]"""

import click

from gates.commands import common


@click.command()
@click.argument("nn", metavar="NN")
@click.argument("check_id", metavar="[CHECK]", required=False)
@click.option("--trainer", type=click.Choice(("qflux",)), help="How gate 07 judges that trainer's runs.")
@common.options
def command(nn: str, check_id: str | None, trainer: str | None, workspace: str, as_json: bool) -> int:
    """What gate NN measures, its thresholds, why, and what mends it. Needs no workspace."""
    from gates import explain as explaining
    from gates.registry import load

    numbers = common.numbers(nn)
    if trainer and numbers != ["07"]:
        raise click.UsageError("--trainer goes with gate 07, which judges runs")
    if trainer:
        from gates.qflux.checks import CACHE, FULL, SMOKE

        pairs = [(spec, explaining.FOREIGN) for part in (CACHE, SMOKE, FULL) for spec in part.specs]
    else:
        pairs = [(spec, explaining.EVIDENCE[n, spec.phase]) for n in numbers for spec in load(n).specs]
    chosen = [explaining.document(spec, files) for spec, files in pairs if check_id in (None, spec.id)]
    if not chosen:
        known = ", ".join(dict.fromkeys(spec.id for spec, _ in pairs))
        raise click.BadParameter(f"{check_id}: no such check; there are {known}", param_hint="CHECK")
    if as_json:
        common.print_json(chosen)
    else:
        click.echo("\n\n".join(map(explaining.text, chosen)))
    return 0
