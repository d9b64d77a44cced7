"""Step 08, validation: paint and measure the held-out samples with base and adapter, then judge.

    python scripts/run.py --workspace DIR

Equal to `finetune validate` followed by `gate check 08`; does nothing where the gate passes already.
"""

import sys
from collections.abc import Sequence

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.skill import Step, follow

STEPS = [Step(work=[["validate"]], judged_by=["check", "08"])]


def main(argv: Sequence[str] | None = None) -> int:
    return follow(str(__doc__), STEPS, finetune=finetune, gate=gate, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
