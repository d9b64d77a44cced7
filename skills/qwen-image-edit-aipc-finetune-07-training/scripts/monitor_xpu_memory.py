"""Print the memory of a run at a fixed interval, from the run's own record.

    python scripts/monitor_xpu_memory.py --workspace DIR [--interval 2] [--count 0]

Equal to `finetune monitor`, in fewer words. torch.xpu.memory_allocated() belongs to the training
process: called here it would read 0, whatever the fit uses. Stops by itself when the run has ended.
"""

import itertools
import sys
import time
from datetime import datetime
from typing import Any

import click

from runtime.commands import common, monitor
from runtime.workspace import Workspace


@click.command(cls=common.Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between readings.")
@click.option("--count", type=int, default=0, show_default=True, help="Readings; 0 is until the run's end.")
@click.option("--run", "run_dir", metavar="DIR", help="A run's directory.  [default: the newest]")
@common.workspace_option
def main(interval: float, count: int, run_dir: str | None, workspace: Workspace) -> None:
    """Print the memory of a run at a fixed interval, from the run's own record."""
    path = workspace.resolve(run_dir) if run_dir else monitor.newest(workspace)
    for shown in itertools.count(1):
        reading = monitor.read(path)
        click.echo(spoken(reading, datetime.now().astimezone()))
        if reading["state"] != "running" or shown == count:
            return
        time.sleep(interval)


def spoken(reading: dict[str, Any], now: datetime) -> str:
    """[HH:MM:SS] xpu alloc: N GiB reserved: N GiB (N GiB) step n/N state; the one in brackets is the capacity."""
    device, step = reading["device"], f"step {reading['step']}/{reading['planned_steps']} {reading['state']}"
    capacity = f"({reading['capacity_gib']:.1f} GiB)"
    if reading["rss_gib"] is None:
        memory = "no step yet"
    elif device == "cpu":
        memory = f"process: {reading['rss_gib']:.2f} GiB"
    else:
        memory = f"alloc: {reading['alloc_gib']:.2f} GiB reserved: {reading['reserved_gib']:.2f} GiB"
    return f"[{now:%H:%M:%S}] {device} {memory} {capacity} {step}"


if __name__ == "__main__":
    sys.exit(main())
