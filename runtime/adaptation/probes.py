"""The capability probes: what each is, and how they are run so that none takes another down.

A child runs them in order and stops at the first that fails; the rest go to a fresh child. So an
abort or a spoiled driver costs the probe that caused it and no other, and a healthy device needs
one start of torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.probes import child
from runtime.probes.child import Outcome

CHILD = Path(__file__).resolve().parent / "children" / "capabilities.py"
START_S = 60.0  # torch's first import, past a virus scanner, and the device's first kernel
# Seconds that a probe may add; Triton compiles its kernels at their first use.
LIMITS_S = {
    "bf16-kernel": 20.0,
    "adam8bit-step": 40.0,
    "nf4-layer": 40.0,
    "masked-sdpa": 20.0,
    "attention-backends": 40.0,
    "compile": 120.0,  # 12 s on two CPU cores
}
NAMES = tuple(LIMITS_S)

Ask = Callable[..., Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    name: str
    status: child.Status
    seconds: float
    reason: str
    """"" where it is ok"""
    error: float | None = None
    """Relative to the CPU in fp32; None where nothing finite was measured"""
    tolerance: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def told(self) -> str:
        """What went wrong, for a reason."""
        return f"probe {self.name} {self.status}: {self.reason}"


def probe(names: Sequence[str], device: str, dtype: str, *, ask: Ask = child.ask) -> dict[str, Finding]:
    """Each of `names` once. Where bf16 turns out not to work, what follows it is probed in fp32."""
    found: dict[str, Finding] = {}
    while left := [name for name in names if name not in found]:
        outcome = ask(CHILD, device, dtype, *left, limit_s=START_S + sum(LIMITS_S[name] for name in left))
        found |= _read(left, outcome)
        if "bf16-kernel" in found and not found["bf16-kernel"].ok:
            dtype = "float32"
    return found


def _read(names: Sequence[str], outcome: Outcome) -> dict[str, Finding]:
    """What the child told, and, where it ended before its time, the probe that it died in. Never nothing."""
    told = [name for name in names if name in outcome.answer]
    found = {name: _finding(name, outcome.answer[name]) for name in told}
    left = [name for name in names if name not in found]
    if not left or (outcome.ok and found):
        return found
    # Without torch there is no use in asking again.
    culprits = left[:1] if outcome.answer.get("started") else left
    spent = sum(finding.seconds for finding in found.values())
    for name in culprits:
        status = "failed" if outcome.ok else outcome.status
        seconds = round(max(0.0, outcome.seconds - spent), 3)
        found[name] = Finding(name=name, status=status, seconds=seconds, reason=outcome.reason or "no answer")
    return found


def _finding(name: str, told: dict[str, Any]) -> Finding:
    return Finding(name=name, **{**told, "reason": child.shorten(told["reason"])})
