"""gate status"""

from typing import TYPE_CHECKING, Any

import click

from gates.commands import common

if TYPE_CHECKING:
    from gates.verdict import Verdict


@click.command()
@common.options
def command(workspace: str, as_json: bool) -> int:
    """Judge everything now: a line per gate, and the next command."""
    from gates import registry
    from gates.chain import judge_up_to
    from gates.reports import text

    opened = common.opened(workspace)
    verdicts = [judged.whole for judged in judge_up_to(opened, registry.numbers()[-1])]
    if as_json:
        common.print_json([_brief(verdict) for verdict in verdicts])
    else:
        rows = [("gate", "skill", "verdict", "outcome", "first failing check", "next")]
        rows += [
            (v.gate, v.name, v.verdict, v.outcome, text.first_failure(v), v.next_command) for v in verdicts
        ]
        click.echo(text.table(rows, common.style()))
    for verdict in verdicts:
        if not verdict.passes:
            return verdict.exit_code
    return 0


def _brief(verdict: "Verdict") -> dict[str, Any]:
    document = verdict.to_json()
    names = ("gate", "name", "skill", "verdict", "outcome", "summary", "first_failure", "blocked_by")
    return {name: document[name] for name in (*names, "next_command", "device", "run", "counts")}
