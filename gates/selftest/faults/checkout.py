"""Faults of gate 05 with another trainer's checkout: a scan of it, recorded on another machine."""

from typing import Any

from gates.selftest.faults.row import Fault, Spoil, fault

CALLS, LOOPS = "no-cuda-only-calls", "step-guard-present"
LOOP = {
    "kind": "step",
    "file": "train.py",
    "line": 5,
    "function": "train",
    "guard": 7,
    "code": "for batch in loader:",
}
EPOCHS = {**LOOP, "kind": "epoch", "line": 4, "code": "for epoch in range(3):"}
FINDING = {
    "kind": "cuda-call",
    "file": "a.py",
    "line": 9,
    "code": "torch.cuda.synchronize()",
    "mend": "the device's",
}
CLEAN: dict[str, Any] = {
    "checkout": "external:checkout", "read_at": "2026-11-30T12:00:00.000Z", "files": 3, "digest": "0" * 64,
    "findings": [], "loops": [EPOCHS, LOOP], "max_train_steps": True, "unread": [],
}  # fmt: skip


def _scanned(**changes: Any) -> Spoil:
    scan = {**CLEAN, **changes}
    return lambda made: made.edit(
        made.evidence("05-adaptation"), lambda document: document["data"].update(scan=scan)
    )


def _found(kind: str) -> Spoil:
    return _scanned(findings=[{**FINDING, "kind": kind}])


FAULTS: tuple[Fault, ...] = (
    fault("another trainer calls CUDA", {CALLS}, _found("cuda-call")),
    fault("another trainer needs flash attention", {CALLS}, _found("flash-attention")),
    fault("another trainer picks CUDA or the CPU", {CALLS}, _found("cuda-or-cpu")),
    fault("a source that was not read", {CALLS}, _scanned(unread=[{"file": "b.py", "reason": "not UTF-8"}])),
    fault("a step loop that does not stop", {LOOPS}, _scanned(loops=[EPOCHS, {**LOOP, "guard": None}])),
    fault("an epoch loop that does not stop", {LOOPS}, _scanned(loops=[{**EPOCHS, "guard": None}, LOOP])),
    fault("no training loop in the checkout", {LOOPS}, _scanned(loops=[])),
    fault("no limit of steps is taken", {LOOPS}, _scanned(max_train_steps=False)),
)
