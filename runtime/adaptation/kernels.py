"""What a capability probe does on the device, and how far the result is from the CPU's in fp32.

These run in a child process (`children/capabilities.py`): any of them may end it. Inputs are drawn
on the CPU and kept small, for a kernel that is wrong is wrong at 96 tokens as well.
"""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime import device as devices
from runtime.training import draws

# Relative errors. bf16 keeps 8 bits (0.4 %), of which a chain of a few operations loses some more; an
# fp32 kernel sums in another order only. A wrong kernel is off by tens of percent, or NaN.
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}
ADAM_TOLERANCE = 0.05  # 256 levels of an 8-bit state; measured 0.3 % after three steps on a CPU
NF4_TOLERANCE = 0.15  # NF4 of normal weights in blocks of 64: 9.4 %
ADAM_SIZE = 8192  # bitsandbytes keeps 32-bit state below 4096 elements, and would test nothing
HEAD_DIMS = (64, 128)
TEXT, IMAGE, BATCH, HEADS = 32, 64, 3, 4  # tokens, samples, heads

Say = Callable[[str], None]


class AbsentError(Exception):
    """A package that the probe is about is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    error: float
    """Relative to the CPU's fp32 result, in the Euclidean norm; the worst of what was compared"""
    tolerance: float
    facts: dict[str, Any] = field(default_factory=dict)


def drawn(*shape: int, name: str) -> Tensor:
    return draws.noise(shape, "probe", name)


def distance(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact||, on the CPU in fp32; NaN where anything is."""
    exact = exact.detach().float().cpu()
    return float((found.detach().float().cpu() - exact).norm() / exact.norm())


def worst(errors: Iterator[float] | list[float]) -> float:
    """The largest; NaN if any is, which max() may hide."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def bf16_kernel(device: str, dtype: torch.dtype, say: Say) -> Measured:
    """Matrix product, sum, normalisation and activation in bf16."""
    a, b, c = drawn(64, 256, name="a"), drawn(256, 128, name="b"), drawn(128, name="c")

    def chain(*inputs: Tensor) -> list[Tensor]:
        left, right, bias = inputs
        product = left @ right
        total = product + bias
        return [product, functional.silu(total), functional.layer_norm(total, total.shape[-1:])]

    rounded = [tensor.bfloat16() for tensor in (a, b, c)]
    found = chain(*(tensor.to(device) for tensor in rounded))
    exact = chain(*(tensor.float() for tensor in rounded))
    errors = [distance(x, y) for x, y in zip(found, exact, strict=True)]
    return Measured(error=worst(errors), tolerance=TOLERANCE[torch.bfloat16])


def adam8bit_step(device: str, dtype: torch.dtype, say: Say) -> Measured:
    """Three steps of bitsandbytes' Adam8bit on one parameter, beside torch's Adam."""
    say("import bitsandbytes")
    try:
        from bitsandbytes.optim import Adam8bit
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise AbsentError("bitsandbytes") from error
    say("Adam8bit.step")
    start = drawn(ADAM_SIZE, name="parameter")
    moved = []
    state: dict[str, Any] = {}
    for kind, place in ((Adam8bit, device), (torch.optim.Adam, "cpu")):
        parameter = nn.Parameter(start.to(place, copy=True))
        optimizer = kind([parameter], lr=1e-2)
        for step in range(3):
            parameter.grad = drawn(ADAM_SIZE, name=f"gradient {step}").to(place)
            optimizer.step()
        state = state or optimizer.state[parameter]
        moved.append(parameter.detach().cpu() - start)
    kept = str(state["state1"].dtype).removeprefix("torch.")
    if kept != "uint8":
        raise TypeError(f"the state is kept as {kept}, expected uint8")
    return Measured(error=distance(*moved), tolerance=ADAM_TOLERANCE)


def nf4_layer(device: str, dtype: torch.dtype, say: Say) -> Measured:
    """Forward and backward through an NF4 linear with a LoRA, as in the fit."""
    say("import bitsandbytes")
    try:
        from bitsandbytes.functional import dequantize_4bit
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise AbsentError("bitsandbytes") from error
    from runtime.quantize import layers, nf4

    plain = nn.Linear(256, 128)
    weight, bias = drawn(128, 256, name="weight") * 0.02, drawn(128, name="bias")
    plain.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)
    place = devices.quantizing(device)
    say(f"quantize_4bit on {place}")
    packed, state = nf4.quantize(weight, place)
    restored = dequantize_4bit(packed, state).float().cpu()
    say(f"Linear4bit forward and backward on {device}")
    linear = layers.nf4_linear(plain, packed, state, device, dtype)

    def exact(x: Tensor) -> Tensor:
        return functional.linear(x, restored, bias)

    found = _lora_gradients(linear, device, dtype)
    reference = _lora_gradients(exact, "cpu", torch.float32)
    lost = distance(restored, weight)
    if not lost <= NF4_TOLERANCE:
        raise ValueError(f"quantizing lost {lost:.3f} of the weight, at most {NF4_TOLERANCE} is NF4's own")
    errors = [distance(x, y) for x, y in zip(found, reference, strict=True)]
    return Measured(error=worst(errors), tolerance=TOLERANCE[dtype], facts={"quantization_error": lost})


def _lora_gradients(base: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of the input and of both LoRA matrices, with fp32 LoRA over a `dtype` base."""
    x, down, up = (
        (drawn(*shape, name=name) * scale).to(device).requires_grad_()
        for name, shape, scale in (("x", (32, 256), 1.0), ("down", (8, 256), 0.05), ("up", (128, 8), 0.05))
    )
    seen = x.to(dtype)
    output = base(seen) + functional.linear(functional.linear(seen, down.to(dtype)), up.to(dtype))
    _sum_backward(output.float() * drawn(32, 128, name="direction").to(device))
    gradients = [tensor.grad for tensor in (x, down, up)]
    assert all(gradient is not None for gradient in gradients)
    return [output, *(gradient for gradient in gradients if gradient is not None)]


def masked_sdpa(device: str, dtype: torch.dtype, say: Say) -> Measured:
    """Attention over text and image keys where one sample's text is half padding, another's all."""
    mask = torch.ones(BATCH, 1, 1, TEXT + IMAGE, dtype=torch.bool)
    mask[1, ..., TEXT // 2 : TEXT] = False
    mask[2, ..., :TEXT] = False
    errors = {}
    for width in HEAD_DIMS:
        say(f"masked attention, head dim {width}")
        errors[str(width)] = _attention_error(width, mask, device, dtype)
    return Measured(error=worst(list(errors.values())), tolerance=TOLERANCE[dtype], facts=errors)


def _attention_error(width: int, mask: Tensor | None, device: str, dtype: torch.dtype) -> float:
    """Of the output and the three gradients, the worst."""
    shape = (BATCH, HEADS, TEXT + IMAGE, width)
    rounded = [drawn(*shape, name=name).to(dtype) for name in ("query", "key", "value")]
    direction = drawn(*shape, name="direction")

    def run(place: str, kind: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(place, kind, copy=True).requires_grad_() for tensor in rounded]
        query, key, value = leaves
        seen = None if mask is None else mask.to(place)
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        _sum_backward(output.float() * direction.to(place))
        return [output, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    found = run(device, dtype)
    with _only("MATH"):
        exact = run("cpu", torch.float32)
    return worst([distance(x, y) for x, y in zip(found, exact, strict=True)])


def attention_backends(device: str, dtype: torch.dtype, say: Say) -> Measured:
    """What torch picks for attention without a mask, and which of its implementations give the right numbers."""
    from torch.nn.attention import SDPBackend

    say("the attention that torch picks")
    picked = _attention_error(HEAD_DIMS[-1], None, device, dtype)
    works: dict[str, Any] = {}
    for backend in SDPBackend.__members__:
        if backend == "ERROR":
            continue
        say(f"attention by {backend}")
        try:
            with _only(backend):
                lost = _attention_error(HEAD_DIMS[-1], None, device, dtype)
        except RuntimeError as error:  # torch's word for "not on this device, or not for these inputs"
            if type(error) is not RuntimeError:  # but a lost device or a full memory has a class of its own
                raise
            works[backend.lower()] = False
            continue
        works[backend.lower()] = bool(lost <= TOLERANCE[dtype])
    return Measured(error=picked, tolerance=TOLERANCE[dtype], facts=works)


@contextlib.contextmanager
def _only(backend: str) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reasons why a backend can't
        with sdpa_kernel(getattr(SDPBackend, backend)):
            yield


def compile_block(device: str, dtype: torch.dtype, say: Say) -> Measured:
    """torch.compile of a small function and its gradient, from an empty cache."""
    # A cache of another torch or driver is a known source of erratic failures; this probe reads none.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = folder
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        weight = drawn(64, 64, name="weight")

        def gated(x: Tensor, w: Tensor) -> Tensor:
            return functional.silu(x @ w) * x

        def run(function: Callable[..., Tensor], place: str, kind: torch.dtype) -> list[Tensor]:
            x = drawn(8, 64, name="x").to(kind).to(place, kind, copy=True).requires_grad_()
            output = function(x, weight.to(kind).to(place, kind))
            _sum_backward(output.float())
            assert x.grad is not None
            return [output, x.grad]

        say("torch.compile")
        compiled: Callable[..., Tensor] = torch.compile(gated)
        found = run(compiled, device, dtype)
        exact = run(gated, device, dtype)
    errors = [distance(x, y) for x, y in zip(found, exact, strict=True)]
    return Measured(error=worst(errors), tolerance=TOLERANCE[dtype])


def _sum_backward(tensor: Tensor) -> None:
    torch.autograd.backward(tensor.sum())


def _device(kind: str) -> devices.Device:
    return devices.Device(type=kind, name=kind, total_gib=0.0, reason="probe")


KERNELS: dict[str, Callable[[str, torch.dtype, Say], Measured]] = {
    "bf16-kernel": bf16_kernel,
    "adam8bit-step": adam8bit_step,
    "nf4-layer": nf4_layer,
    "masked-sdpa": masked_sdpa,
    "attention-backends": attention_backends,
    "compile": compile_block,
}
