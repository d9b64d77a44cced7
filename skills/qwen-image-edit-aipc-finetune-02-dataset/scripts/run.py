"""Step 02, dataset: list and hash every pair, set the held-out ones aside, then judge.

    python scripts/run.py --workspace DIR

Equal to `finetune dataset` followed by `gate check 02`; does nothing where the gate passes already.
"""

import sys
from collections.abc import Sequence

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.skill import Step, follow

STEPS = [Step(work=[["dataset"]], judged_by=["check", "02"])]


def main(argv: Sequence[str] | None = None) -> int:
    return follow(str(__doc__), STEPS, finetune=finetune, gate=gate, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
