"""step-parity: the device's training step beside the CPU's in fp32, each taken in a process of its own.

Where the target is the CPU in fp32, both are the same computation, and the comparison shows that it gives
the same numbers twice. The embedded base is enough for that.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from runtime.probes import child
from runtime.probes.child import Outcome

CHILD = Path(__file__).resolve().parent / "children" / "step.py"
LIMIT_S = 600.0  # 10 s on two CPU cores; a PC that pages 1.5 GiB of weights in needs minutes
EMBEDDED_BASE, TRUE_WIDTH = "embedded base", "block of true width"
BASES = (EMBEDDED_BASE, TRUE_WIDTH)

Ask = Callable[..., Outcome]
Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def bases_for(device: str, precision: str) -> tuple[str, ...]:
    return (EMBEDDED_BASE,) if (device, precision) == ("cpu", "no") else BASES


def compare_steps(setting: Mapping[str, Any], *, ask: Ask = child.ask) -> list[dict[str, Any]]:
    """One record per base. `setting`: device, precision, optimizer, checkpointing, masked."""
    bases = bases_for(setting["device"], setting["precision"])
    exact = {**setting, "device": "cpu", "precision": "no", "checkpointing": False}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        # The reference runs on the CPU, so the two don't disturb each other but in time.
        reference = pool.submit(_run, exact, bases, folder / "reference", ask)
        found = _run(setting, bases, folder / "device", ask)
        wanted = reference.result()
        return [
            {
                "what": base,
                "masked": setting["masked"],
                "checkpointing": setting["checkpointing"],
                "optimizer": setting["optimizer"],
                **compare(base, found, wanted, folder),
            }
            for base in bases
        ]


def _run(setting: Mapping[str, Any], bases: Sequence[str], folder: Path, ask: Ask) -> Outcome:
    folder.mkdir()
    orders = [
        [{**setting, "base": base}, str(folder / f"{index}.safetensors")] for index, base in enumerate(bases)
    ]
    order = folder / "order.json"
    order.write_text(json.dumps(orders), encoding="utf-8")
    return ask(CHILD, str(order), limit_s=LIMIT_S)


def compare(base: str, found: Outcome, wanted: Outcome, folder: Path) -> dict[str, Any]:
    """How far the device's step on `base` is from the reference; a step that was not taken says why."""
    missing = [
        f"{what} ended: {outcome.reason or 'no answer'}"
        for what, outcome in (("the step", found), ("the CPU's step", wanted))
        if base not in outcome.answer
    ]
    if missing:
        status = "timeout" if "timeout" in (found.status, wanted.status) else "failed"
        return {**NOTHING, "status": status, "reason": "; ".join(missing)}
    device, cpu = found.answer[base], wanted.answer[base]
    name = f"{BASES.index(base)}.safetensors"
    here, there = _load(folder / "device" / name), _load(folder / "reference" / name)
    return {
        "status": "ok",
        "reason": "",
        "seconds": device["seconds"],
        "samples": device["samples"],
        "compute": device["compute"],
        "loss_device": device["loss"],
        "loss_reference": cpu["loss"],
        "loss_error": scalar_error(device["loss"], cpu["loss"]),
        "gradient_norm": norm(here, "gradient."),
        "gradient_error": relative_error(here, there, "gradient."),
        "update_norm": norm(here, "update."),
        "update_error": relative_error(here, there, "update."),
        "devices": device["devices"],
        "dtypes": device["dtypes"],
        "memory": device["memory"],
    }


NOTHING: dict[str, Any] = {
    "seconds": None,
    "samples": None,
    "compute": None,
    "loss_device": None,
    "loss_reference": None,
    "loss_error": None,
    "gradient_norm": None,
    "gradient_error": None,
    "update_norm": None,
    "update_error": None,
    "devices": {},
    "dtypes": {},
    "memory": {},
}


def scalar_error(found: float | None, exact: float | None) -> float | None:
    if found is None or not exact:
        return None
    return abs(found - exact) / abs(exact)


def norm(tensors: Arrays, kind: str) -> float | None:
    """Euclidean, over all tensors whose name starts with `kind`; None where it is not finite."""
    total = sum(float(np.square(t, dtype=np.float64).sum()) for n, t in tensors.items() if n.startswith(kind))
    return float(np.sqrt(total)) if np.isfinite(total) else None


def relative_error(found: Arrays, exact: Arrays, kind: str) -> float | None:
    """||found - exact|| / ||exact|| over all tensors of `kind` together; None where that is no number."""
    names = {name for name in (*found, *exact) if name.startswith(kind)}
    if any(name not in found or name not in exact for name in names):
        return None
    gap = norm({name: found[name].astype(np.float64) - exact[name] for name in names}, kind)
    whole = norm(exact, kind)
    return gap / whole if gap is not None and whole else None


def _load(path: Path) -> "dict[str, np.ndarray[Any, Any]]":
    from safetensors.numpy import load_file

    return dict(load_file(path))
