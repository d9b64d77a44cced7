"""Step 05, adaptation: probe the device and take one training step on it, then judge.

    python scripts/run.py --workspace DIR

Equal to `finetune adapt` followed by `gate check 05`; does nothing where the gate passes already.
"""

import sys
from collections.abc import Sequence

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.skill import Step, follow

STEPS = [Step(work=[["adapt"]], judged_by=["check", "05"])]


def main(argv: Sequence[str] | None = None) -> int:
    return follow(str(__doc__), STEPS, finetune=finetune, gate=gate, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
