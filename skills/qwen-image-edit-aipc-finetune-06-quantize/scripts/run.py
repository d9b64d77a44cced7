"""Step 06, quantize: NF4 of denoiser and text encoder under models/nf4, then judge.

    python scripts/run.py --workspace DIR

Equal to `finetune quantize`, `finetune plan` (which now counts what was made) and `gate check 06`; does
nothing where the gate passes already, which it also does after a `gate skip 06 --reason TEXT` that the memory
plan allows.
"""

import sys
from collections.abc import Sequence

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.skill import Step, follow

STEPS = [Step(work=[["quantize"], ["plan"]], judged_by=["check", "06"])]


def main(argv: Sequence[str] | None = None) -> int:
    return follow(str(__doc__), STEPS, finetune=finetune, gate=gate, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
