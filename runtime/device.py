"""The only place that tells xpu from cuda from cpu.

Everything goes through `torch.accelerator` (torch >= 2.9), which has one interface for
every backend, so what runs on CUDA runs on XPU. On a machine without accelerator each
of its calls but `is_available` raises, which is why they are wrapped here.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError

if TYPE_CHECKING:
    import torch

# On AVX512-BF16 processors bitsandbytes warns about an optional kernel package at import,
# which peft and transformers trigger; nothing is wrong.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

GIB = 2**30
RAM_SHARE = 0.8  # of the RAM; the system and the user's browser live in the rest
# Lunar Lake refused 16.00 of 16.48 GiB with 16.07 free (torch-xpu-ops #5046); a plan counts the allocator's own rest.
ACCELERATOR_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where the tensors live: `type` is cpu, xpu or cuda."""

    type: str
    name: str
    total_gib: float
    reason: str

    @property
    def is_accelerator(self) -> bool:
        return self.type != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """GiB; the first three are the allocator's, read in this process, 0 on the CPU."""

    alloc_gib: float
    reserved_gib: float
    peak_gib: float
    rss_gib: float


def pick(requested: str = "auto") -> Device:
    """The device for `auto`, `cpu`, `xpu` or `cuda`. Raises UserError where it is absent."""
    found = accelerator_type()
    if requested == "auto":
        requested = found or "cpu"
        reason = f"auto: torch sees {found}" if found else "auto: torch sees no accelerator"
    else:
        reason = "as configured"
    if requested == "cpu":
        return Device(type="cpu", name=_processor(), total_gib=ram_gib(), reason=reason)
    if requested != found:
        import torch

        raise UserError(
            f"device {requested} is not there: torch {torch.__version__} sees {found or 'no accelerator'}",
            remedy="install the torch build for this device (README, On a real AI PC), "
            "or set hardware.device: auto",
        )
    _grow_segments(requested)
    name, total = _properties()
    return Device(type=requested, name=name, total_gib=total, reason=reason)


def _grow_segments(kind: str) -> None:
    """Let the allocator grow its segments rather than leave holes between them; a user's own settings stay.

    On one H200 what was reserved for NF4 steps ran 3 to 42 % over what was allocated, and 1 to 10 % so. Only CUDA's
    allocator on Linux is known to do it.
    """
    import torch

    if kind != "cuda" or sys.platform == "win32":
        return
    if any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return
    # torch >= 2.11; where it has another name, the allocator stays as it is.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is not None:
        change("expandable_segments:True")


def accelerator_type() -> str | None:
    import torch

    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    return current.type if current is not None else None


def memory(device: Device) -> Memory:
    import torch

    if not device.is_accelerator:
        return Memory(alloc_gib=0.0, reserved_gib=0.0, peak_gib=0.0, rss_gib=rss_gib())
    return Memory(
        alloc_gib=torch.accelerator.memory_allocated() / GIB,
        reserved_gib=torch.accelerator.memory_reserved() / GIB,
        peak_gib=torch.accelerator.max_memory_allocated() / GIB,
        rss_gib=rss_gib(),
    )


def memory_budget_gib(device: str) -> tuple[float, str]:
    """What a plan may fill on `device` (auto, cpu, xpu, cuda), and why."""
    chosen = pick(device)
    if chosen.is_accelerator:
        share, what = ACCELERATOR_SHARE, f"what {chosen.name} offers ({chosen.total_gib:.1f} GiB)"
    else:
        share, what = RAM_SHARE, f"this machine's RAM ({chosen.total_gib:.1f} GiB)"
    return chosen.total_gib * share, f"{share:.0%} of {what}"


def is_integrated() -> bool | None:
    """Whether the accelerator shares the host's memory; None where torch does not tell."""
    import torch

    properties = getattr(torch, str(accelerator_type())).get_device_properties(
        torch.accelerator.current_device_index()
    )
    told = getattr(properties, "is_integrated_gpu", getattr(properties, "is_integrated", None))
    return None if told is None else bool(told)


def limit_memory(device: Device, gib: float) -> str:
    """Let this process's allocator reserve at most `gib`; "", or why nothing holds it to that."""
    import torch

    if not device.is_accelerator:
        return "the system's memory on a CPU has no such limit"
    backend = torch.get_device_module(device.type)
    try:  # torch.accelerator has no such call
        backend.set_per_process_memory_fraction(min(1.0, gib / device.total_gib))
    except (AttributeError, RuntimeError) as error:
        return f"torch {torch.__version__} has no limit for {device.type}: {error}"
    return ""


def reset_peak(device: Device) -> None:
    if device.is_accelerator:
        import torch

        torch.accelerator.reset_peak_memory_stats()


def synchronize(device: Device) -> None:
    if device.is_accelerator:
        import torch

        torch.accelerator.synchronize()


def free_cached(device: Device) -> None:
    """Give memory that nothing uses back to the system, after a phase's models are gone."""
    import gc

    gc.collect()
    if device.is_accelerator:
        import torch

        torch.accelerator.empty_cache()


def trim_heap() -> None:
    """Give memory of the host that was freed back to the system, after many tensors of some MiB have gone.

    glibc keeps those up to 32 MiB for itself: of the blocks that a 16 GiB PC streams that was 1.4 GiB. What
    is needed again has to be asked for anew, which takes time: not for memory that comes and goes.
    """
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):  # another libc, which has nothing to trim
            ctypes.CDLL(None).malloc_trim(0)


def compute_dtype(device: Device, mixed_precision: str) -> "torch.dtype":
    """bf16 on accelerators; fp32 on the CPU, where bf16 measured twice as slow at tiny size."""
    import torch

    if mixed_precision == "auto":
        return torch.bfloat16 if device.is_accelerator else torch.float32
    return {"no": torch.float32, "bf16": torch.bfloat16}[mixed_precision]


def dtype_of(name: str) -> "torch.dtype":
    """`fp32` or `bf16`."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def deterministic(wanted: bool) -> None:
    """For the rest of the process: only kernels that give the same bits each time, or the usual ones.

    Of attention's kernels the memory-efficient and cuDNN's have no such backward pass; what is left is flash, or
    the plain one where there is a mask. Call it before the accelerator has done anything.
    """
    import torch

    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cuda.enable_mem_efficient_sdp(not wanted)
    torch.backends.cuda.enable_cudnn_sdp(not wanted)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Global generators (dropout, initialisation) set to `seed`, on every device.

    What runs inside depends on `seed` alone, so nothing needs restoring on a resume.
    """
    import torch

    torch.manual_seed(seed % 2**63)
    yield


@contextlib.contextmanager
def generators_kept(device: Device) -> Iterator[None]:
    """Global generators, the device's too, are afterwards as they were before."""
    import torch

    if not device.is_accelerator:
        with torch.random.fork_rng(devices=()):
            yield
        return
    with torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=device.type):
        yield


def has_graphs(kind: str) -> bool:
    """Whether whole updates are known to be recorded and replayed rightly on this backend; xpu's were never run."""
    return kind == "cuda"


def _graph_class(kind: str) -> "Callable[..., Any] | None":
    import torch

    name = {"cuda": "CUDAGraph", "xpu": "XPUGraph"}.get(kind)
    return getattr(torch.get_device_module(kind), name, None) if name else None


class Recordings:
    """Work on the current accelerator, recorded as graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, work: "Callable[[], torch.Tensor]") -> "Callable[[], torch.Tensor]":
        """Record `work`, which has run before, without running it; a call of what is returned does.

        Raises RuntimeError where the backend can't.
        """
        import torch

        kind = accelerator_type() or "cpu"
        graph_class = _graph_class(kind)
        if graph_class is None:
            raise RuntimeError(f"torch {torch.__version__} has no graphs on {kind}")
        backend: Any = torch.get_device_module(kind)
        graph: Any = graph_class()
        torch.accelerator.synchronize()
        with backend.graph(graph, pool=self._pool):
            result = work()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def quantizing(kind: str) -> str:
    """Where to quantize to NF4 for a model that will run on `kind`.

    On XPU bitsandbytes quantizes by Triton kernels, which need a compiler and a matching driver; the CPU
    needs neither, and what it makes is dequantized on XPU by kernels that bitsandbytes brings.
    """
    return kind if kind == "cuda" else "cpu"


def replayed(update: "Callable[[], torch.Tensor]", where: "torch.device") -> "Callable[[], torch.Tensor]":
    """`update` as a recorded graph where the backend has them (CUDA), else as it is.

    Pays where launching kernels takes most of the time: with the embedded base's networks on one H200 the
    denoiser's step at batch 512 takes 12 ms replayed and 52 ms launched anew, the VAE's at batch 128 20 and 50 ms.
    """
    import torch

    if not has_graphs(where.type):
        return update
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # lets libraries choose their kernels, and the optimizer make its state
            update()
    torch.cuda.current_stream().wait_stream(stream)
    return Recordings().record(update)


def ram_gib() -> float:
    import psutil

    return float(psutil.virtual_memory().total) / GIB


def rss_gib() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss) / GIB


def _processor() -> str:
    import platform

    return platform.processor() or platform.machine()


def _properties() -> tuple[str, float]:
    """Name and total GiB of the current accelerator."""
    import torch

    kind = accelerator_type()
    backend = getattr(torch, str(kind))
    properties = backend.get_device_properties(torch.accelerator.current_device_index())
    return str(properties.name), float(properties.total_memory) / GIB
