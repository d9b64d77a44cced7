"""`finetune`: parse, dispatch, exit. A command's module is imported only when it is called.

Exit status: 0 done, 1 a failure that the user can mend (two lines on stderr), 2 a bad command
line, 130 Ctrl-C.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import click

from runtime.commands import common

COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("runtime.commands.init", "Make a workspace: its base, its dataset, its device."),
    "demo": ("runtime.commands.demo", "Run all steps and gates on the embedded tiny base."),
    "probe": ("runtime.commands.probe", "Look at the machine and its packages, record both."),
    "dataset": ("runtime.commands.dataset", "Scan the dataset, set a holdout aside, record it."),
    "recommend": ("runtime.commands.recommend", "Write config.yaml with a reason for each value."),
    "plan": ("runtime.commands.plan", "Say what the config needs: memory, steps, disk."),
    "adapt": ("runtime.commands.adapt", "Probe the device; compare a training step with the CPU's."),
    "quantize": ("runtime.commands.quantize", "Make NF4 weights of the base, shard by shard."),
    "cache": ("runtime.commands.cache", "Encode every sample once, so that the fit needs no encoders."),
    "fit": ("runtime.commands.fit", "Train the adapter; --smoke for a few steps, --resume to go on."),
    "validate": ("runtime.commands.validate", "Compare base and adapter on the held-out samples."),
    "sample": ("runtime.commands.sample", "Edit a picture of your own with base and adapter."),
    "export": ("runtime.commands.export", "Write the adapter for diffusers, ComfyUI or kohya's tools."),
    "monitor": ("runtime.commands.monitor", "Show how far a run is, or wait for its end."),
    "clean": ("runtime.commands.clean", "Reduce what a kill left behind; list what could go."),
}
"""Name -> module with the attribute `command`, and the line in `finetune --help`."""


class LazyGroup(click.Group):
    """Lists commands from the table above, so that --help imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            ctx.fail(common.unknown("command", args[0], list(COMMANDS)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        with common.boundary(None):
            return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="aipc-finetune", prog_name="finetune")
def cli() -> None:
    """Fine-tune Qwen-Image-Edit on an AI PC, step by step; `gate` judges each step."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the command line `argv`, or of this process's own."""
    try:
        cli.main(args=None if argv is None else list(argv), prog_name="finetune")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
