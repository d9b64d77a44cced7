"""Take one training step on each base. Argument: a JSON file of [[setup, place for tensors], ...]; see ../parity.py."""

import json
import logging
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def say(**facts: Any) -> None:
    print("@" + json.dumps(facts), flush=True)


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    say(stage="import torch and diffusers")
    from safetensors.torch import save_file

    from runtime.adaptation import step

    for order, place in orders:
        setup = step.Setup(**order)
        say(stage=f"the step on the {setup.base}, {setup.device}")
        started = time.perf_counter()
        taken = step.take(setup)
        save_file(taken.tensors, place)
        facts = taken.facts
        if not math.isfinite(facts["loss"]):
            facts["loss"] = None
        say(**{setup.base: {**facts, "seconds": round(time.perf_counter() - started, 3)}})
    say(done=True)


if __name__ == "__main__":
    main()
