"""Step 07, training: cache phase, smoke fit, full fit, each with its gate, stopping at the first FAIL.

    python scripts/run.py --workspace DIR

Equal to `finetune cache`, `finetune fit --smoke` and `finetune fit`, each followed by
`gate check 07 --phase cache|smoke|full`; a phase whose gate passes already is left alone.
"""

import sys
from collections.abc import Sequence

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.skill import Step, follow

STEPS = [
    Step(work=[["cache"]], judged_by=["check", "07", "--phase", "cache"]),
    Step(work=[["fit", "--smoke"]], judged_by=["check", "07", "--phase", "smoke"]),
    Step(work=[["fit"]], judged_by=["check", "07", "--phase", "full"]),
]


def main(argv: Sequence[str] | None = None) -> int:
    return follow(str(__doc__), STEPS, finetune=finetune, gate=gate, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
