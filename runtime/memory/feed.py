"""Copies from host memory to the device that run beside its compute, and the memory that they come from."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.device import GIB, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`tensor` on the device; what it holds is there once `ready` has come, at once where that is None."""

    tensor: Tensor
    ready: torch.Event | None = None


class Feed:
    """Copies from host memory that run beside the device's compute, where it has streams for that.

    A copy's memory is taken in the order of the compute stream, so what was freed there may be used again at once
    and nothing needs to be recorded; and from a pool of its own, where the backend has them, for large buffers that
    come and go leave holes which small tensors settle in.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._side = _side_stream(device)
        self._own_memory = _memory_pool(device)

    def start(self, host: Tensor) -> Copy:
        """Begin to copy `host`, which must stay as it is until the copy is done."""
        with self._own_memory():
            tensor = torch.empty_like(host, device=self.device.type)
        if self._side is None:
            return Copy(tensor=tensor.copy_(host))
        self._side.wait_stream(torch.accelerator.current_stream())
        with self._side:
            tensor.copy_(host, non_blocking=True)
        return Copy(tensor=tensor, ready=self._side.record_event())

    def finish(self, copy: Copy) -> Tensor:
        """The copied tensor; what the device is asked from here on comes after the copy."""
        if copy.ready is not None:
            torch.accelerator.current_stream().wait_event(copy.ready)
        return copy.tensor


def _side_stream(device: Device) -> torch.Stream | None:
    if not device.is_accelerator:
        return None
    try:
        return torch.Stream(device.type)
    except RuntimeError:  # a backend without streams: copies then take their turn
        return None


def _memory_pool(device: Device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Enter what it gives to allocate from a pool apart from the rest; the usual one where there is no other."""
    if not device.is_accelerator:
        return contextlib.nullcontext
    backend = torch.get_device_module(device.type)
    try:
        pool = backend.MemPool()
        with backend.use_mem_pool(pool):
            torch.empty(1, device=device.type)
    except (AttributeError, RuntimeError):
        return contextlib.nullcontext
    return lambda: backend.use_mem_pool(pool)


def host_memory(size: int, device: Device) -> tuple[Tensor, str]:
    """uint8 [size] in host memory that the device reads by itself, and "".

    Where the system gives no such (pinned) memory, plain memory and a sentence that says so: copies out of it are
    slower and wait for the compute. For the CPU plain memory is the right one.
    """
    if not device.is_accelerator:
        return torch.empty(size, dtype=torch.uint8), ""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), ""
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        note = f"{size / GIB:.2f} GiB of host memory could not be pinned, copies are slower: {reason}"
        return torch.empty(size, dtype=torch.uint8), note
