"""hardware.memory_limit_gib, held to: what the device's allocator may take of it in a phase."""

from collections.abc import Callable

from runtime.config.model import Config
from runtime.planning.choices import choose_for
from runtime.planning.estimate import CONTEXT_GIB
from runtime.planning.plan import at_hand
from runtime.workspace import Workspace


def enforce(workspace: Workspace, config: Config, phase: str, say: Callable[[str], None]) -> None:
    """Cap the allocator of this process for `phase` where a limit is configured; `say` why, where nothing can.

    With unified memory what the plan counts in host memory is not the device's to take.
    """
    limit = config.hardware.memory_limit_gib
    if limit is None:
        return
    from runtime import device

    case, quantized = at_hand(workspace, config)
    planned = case.phases(choose_for(case, quantized))[phase]
    beside = planned.host_peak_gib if case.found.unified else 0.0
    room = max(0.0, limit - beside - CONTEXT_GIB)
    why = device.limit_memory(device.pick(case.found.device), room)
    if why:
        say(f"note: hardware.memory_limit_gib is planned with, but nothing holds the run to it: {why}")
