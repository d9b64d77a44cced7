"""Run probes one after the other until one fails. Arguments: device, dtype, names; see ../probes.py."""

import json
import logging
import sys
import time
import warnings
from typing import Any


def say(**facts: Any) -> None:
    print("@" + json.dumps(facts), flush=True)


def attempt(name: str, device: str, dtype: str) -> dict[str, Any]:
    import torch

    from runtime.adaptation import kernels

    started = time.perf_counter()
    found: dict[str, Any] = {"status": "ok", "reason": "", "error": None, "tolerance": None, "facts": {}}
    try:
        measured = kernels.KERNELS[name](
            device, getattr(torch, dtype), lambda stage: say(stage=f"{name}, {stage}")
        )
        finite = measured.error == measured.error and measured.error != float("inf")
        found |= {
            "error": measured.error if finite else None,
            "tolerance": measured.tolerance,
            "facts": measured.facts,
        }
        if not measured.error <= measured.tolerance:
            told = f"{measured.error:.3g}" if finite else "no finite number"
            found |= {
                "status": "failed",
                "reason": f"its error against the CPU is {told}, at most {measured.tolerance:g} is rounding",
            }
    except kernels.AbsentError as error:
        found |= {"status": "absent", "reason": f"{error} is not installed"}
    except Exception as error:  # a driver raises what it likes, which is the finding
        first = (str(error).strip() or "no message").splitlines()[0]
        found |= {"status": "failed", "reason": f"{type(error).__name__}: {first}"}
    return {**found, "seconds": round(time.perf_counter() - started, 3)}


def main() -> None:
    device, dtype, *names = sys.argv[1:]
    logging.disable(logging.WARNING)  # of kernels that bitsandbytes would like to have
    warnings.simplefilter("ignore")
    say(stage="import torch")
    import torch  # noqa: F401

    import runtime.adaptation.kernels  # noqa: F401

    say(started=True)
    for name in names:
        say(stage=name)
        found = attempt(name, device, dtype)
        say(**{name: found})
        if found["status"] == "failed":  # what it left behind may spoil the next one
            break
    say(done=True)


if __name__ == "__main__":
    main()
