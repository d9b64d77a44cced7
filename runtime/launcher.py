"""What train_xpu.bat and train_xpu.sh call: a config's path instead of a workspace.

    python -P -m runtime.launcher <config> [--cache | options of finetune fit]

The folder that holds the config is the workspace, so the config must be called config.yaml.
`--cache` runs `finetune cache`; anything else runs `finetune fit` with what follows. The exit
status is that of the command.

    python -P -m runtime.launcher --needs-oneapi <config>

Exit status 0 where the run compiles Triton kernels, for which Windows needs oneAPI's variables.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: train_xpu <config.yaml> [--cache | options of finetune fit]"
TRITON_OPTIMIZERS = "bitsandbytes."  # its 8-bit optimizers are Triton kernels, compiled at their first step


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--needs-oneapi"]:
        return 0 if len(given) > 1 and needs_oneapi(Path(given[1])) else 1
    try:
        line = command_line(given)
    except ValueError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    from runtime.cli import main as finetune

    print(f"[train_xpu] finetune {' '.join(line)}", file=sys.stderr, flush=True)
    return finetune(line)


def command_line(given: Sequence[str]) -> list[str]:
    """The arguments of `finetune`. Raises ValueError for what is no workspace's config."""
    if not given or given[0].startswith("-"):
        raise ValueError("the first argument is the path of config.yaml")
    config, options = Path(given[0]), list(given[1:])
    if config.name != "config.yaml":
        raise ValueError(f"{config} is not called config.yaml: the folder that holds it is the workspace")
    if "--workspace" in options:
        raise ValueError("--workspace is the folder of the config, and can't be given")
    command = "cache" if "--cache" in options else "fit"
    rest = [option for option in options if option != "--cache"]
    return [command, *rest, "--workspace", str(config.parent)]


def needs_oneapi(config: Path) -> bool:
    """False too where the config can't be read: the run itself says why."""
    from runtime.config.load import load_config
    from runtime.errors import ConfigError

    try:
        return load_config(config).config.optimizer.class_path.startswith(TRITON_OPTIMIZERS)
    except ConfigError:
        return False


if __name__ == "__main__":
    sys.exit(main())
