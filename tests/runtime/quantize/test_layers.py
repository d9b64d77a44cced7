"""NF4 layers compiled: the bits of bitsandbytes' own, and nothing kept that a checkpoint makes again."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.quantize import nf4
from runtime.quantize.layers import nf4_linear

WIDTH, HIDDEN = 64, 192  # neither is a size of what else is kept
BF16 = torch.bfloat16


def layer(inputs: int, outputs: int, *, dtype: torch.dtype, bias: bool = True, nested: bool = True) -> Any:
    torch.manual_seed(inputs)
    source = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    packed, state = nf4.quantize(source.weight.data, "cpu")
    if not nested:
        from bitsandbytes.functional import dequantize_blockwise

        state.absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
        state.nested, state.state2, state.offset = False, None, None
    return nf4_linear(source, packed, state, "cpu", dtype)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def results(run: Any, linear: Any, given: Tensor) -> list[Tensor]:
    given = given.clone().requires_grad_()
    made = run(given)
    wanted = [given, *(p for p in (linear.bias,) if p is not None and p.requires_grad)]
    return [made, *torch.autograd.grad(made, wanted, torch.ones_like(made) / 3)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("form", ["plain", "square", "no bias", "bias trained", "not nested"])
def test_compiled_it_gives_the_bits_of_bitsandbytes(form: str, dtype: torch.dtype) -> None:
    height = WIDTH if form == "square" else HIDDEN
    linear = layer(WIDTH, height, dtype=dtype, bias=form != "no bias", nested=form != "not nested")
    if form == "bias trained":
        linear.bias.requires_grad_()
    given = torch.randn(1, 5, WIDTH, dtype=dtype)
    graphs: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(str(module.graph))
        return module.forward

    compiled = torch.compile(linear, backend=backend, fullgraph=True)
    ours, theirs = results(compiled, linear, given), results(linear, linear, given)
    assert "aipc_finetune.nf4_product" in graphs[0]
    assert len(ours) == len(theirs) == (3 if form == "bias trained" else 2)
    for one, two in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(one, two)
    for one in ours[2:]:  # bitsandbytes sums a bias's gradient over the first axis alone
        assert torch.allclose(one, torch.full_like(one, 5 / 3), rtol=1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_checkpoint_keeps_the_input_and_packed_weights_alone() -> None:
    wide, back = layer(WIDTH, HIDDEN, dtype=BF16), layer(HIDDEN, WIDTH, dtype=BF16)
    kept: list[Tensor] = []

    def block(given: Tensor) -> Tensor:
        return back(nn.functional.gelu(wide(given)))  # type: ignore[no-any-return]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(given: Tensor) -> Tensor:
        return checkpoint(block, given, use_reentrant=False)  # type: ignore[no-any-return]

    given = torch.randn(1, 5, WIDTH, dtype=BF16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        made = run(given)
    made.sum().backward()
    wished = torch.autograd.grad(block(given).sum(), given)[0]
    assert given.grad is not None and torch.equal(given.grad, wished)
    floats = [tuple(tensor.shape) for tensor in kept if tensor.dtype == BF16 and tensor.dim() > 1]
    assert floats == [(1, 5, WIDTH)]
    assert {t.data_ptr() for t in kept} >= {wide.weight.data_ptr(), back.weight.data_ptr()}
