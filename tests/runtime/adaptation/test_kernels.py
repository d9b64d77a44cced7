"""Each probe passes on the CPU, and sees a kernel that is wrong."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runtime.adaptation import kernels
from runtime.adaptation.kernels import Measured

QUICK = [name for name in kernels.KERNELS if name != "compile"]
DTYPES = (torch.float32, torch.bfloat16)
SDPA = functional.scaled_dot_product_attention


def run(name: str, dtype: torch.dtype = torch.float32) -> Measured:
    return kernels.KERNELS[name]("cpu", dtype, lambda stage: None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUICK)
def test_the_cpu_passes(name: str, dtype: torch.dtype) -> None:
    measured = run(name, dtype)
    assert measured.error <= measured.tolerance / 2, "a healthy device is far from the limit"


def _without_mask(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    return SDPA(*args, **kwargs)


def _nan_where_masked(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    found = SDPA(*args, attn_mask=attn_mask, **kwargs)
    return found if attn_mask is None or attn_mask.all() else found * math.nan


@pytest.mark.parametrize("wrong", [_without_mask, _nan_where_masked])
def test_masked_attention_that_is_wrong(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([wrong, SDPA] * len(kernels.HEAD_DIMS))  # the device's, then the reference's

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return next(calls)(*args, **kwargs)  # type: ignore[no-any-return]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    measured = run("masked-sdpa")
    assert not measured.error <= measured.tolerance


def test_an_optimizer_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.optim import Adam8bit

    step = Adam8bit.step

    def still(self: Any, closure: Any = None) -> Any:
        with torch.no_grad():
            kept = [p.clone() for group in self.param_groups for p in group["params"]]
            found = step(self, closure)
            for parameter, value in zip(self.param_groups[0]["params"], kept, strict=True):
                parameter.copy_(value)
        return found

    monkeypatch.setattr(Adam8bit, "step", still)
    measured = run("adam8bit-step")
    assert measured.error == pytest.approx(1.0) and measured.error > measured.tolerance


def test_a_state_that_is_not_8_bit_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ADAM_SIZE", 1024)
    with pytest.raises(TypeError, match="kept as float32, expected uint8"):
        run("adam8bit-step")


def test_nf4_that_dequantizes_another_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.quantize import layers

    made = layers.nf4_linear

    def scaled(*args: Any) -> Any:
        linear = made(*args)
        return lambda x: linear(x) * 1.5

    monkeypatch.setattr(layers, "nf4_linear", scaled)
    assert run("nf4-layer").error > 0.1


def test_quantization_that_loses_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NF4_TOLERANCE", 0.05)
    with pytest.raises(ValueError, match=r"quantizing lost 0\.09"):
        run("nf4-layer")


def test_a_package_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("bitsandbytes", "bitsandbytes.optim", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("adam8bit-step", "nf4-layer"):
        with pytest.raises((kernels.AbsentError, ModuleNotFoundError), match="bitsandbytes"):
            run(name)


def test_attention_backends_are_told() -> None:
    facts = run("attention-backends").facts
    assert facts["math"] is True and facts["cudnn_attention"] is False


def test_a_lost_device_is_not_called_a_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class LostError(RuntimeError):
        pass

    attention = kernels._attention_error

    def error(*args: Any) -> float:
        if torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled():
            raise LostError("device lost")
        return attention(*args)

    monkeypatch.setattr(kernels, "_attention_error", error)
    with pytest.raises(LostError):
        run("attention-backends")


def test_the_worst_of_several_hides_no_nan() -> None:
    assert math.isnan(kernels.worst([0.1, math.nan, 0.2]))
    assert kernels.worst([0.1, 0.3, 0.2]) == 0.3
