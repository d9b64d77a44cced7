"""Step 01, host: look at the machine, its graphics, memory and disk, then judge.

    python scripts/run.py --workspace DIR

Equal to `finetune probe --host` followed by `gate check 01`; does nothing where the gate passes already.
"""

import sys
from collections.abc import Sequence

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.skill import Step, follow

STEPS = [Step(work=[["probe", "--host"]], judged_by=["check", "01"])]


def main(argv: Sequence[str] | None = None) -> int:
    return follow(str(__doc__), STEPS, finetune=finetune, gate=gate, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
