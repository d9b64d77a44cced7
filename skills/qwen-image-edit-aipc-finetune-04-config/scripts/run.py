"""Step 04, config: write config.yaml where there is none, plan the memory, then judge.

    python scripts/run.py --workspace DIR

Equal to `finetune recommend` (which leaves an existing config.yaml alone with --keep),
`finetune plan` and `gate check 04`; does nothing where the gate passes already.
"""

import sys
from collections.abc import Sequence

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.skill import Step, follow

STEPS = [Step(work=[["recommend", "--keep"], ["plan"]], judged_by=["check", "04"])]


def main(argv: Sequence[str] | None = None) -> int:
    return follow(str(__doc__), STEPS, finetune=finetune, gate=gate, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
