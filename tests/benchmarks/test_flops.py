"""benchmarks/flops.py against torch's own counter, on small denoisers with the trainer's adapter."""

import json
from typing import Any

import flops
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from true_size import Shape, read_denoiser

from runtime import device as devices
from runtime.config.model import Lora
from runtime.demo.series import BASE
from runtime.training import trainables

CONFIG: dict[str, Any] = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "axes_dims_rope": (8, 12, 12),
    "joint_attention_dim": 48,
    "in_channels": 64,
    "out_channels": 16,
    "patch_size": 2,
}
RANK = 4
EDIT = Shape(size=(48, 64), controls=1, tokens=(7,))


def counted(config: dict[str, Any], shape: Shape) -> tuple[int, int]:
    """Forward and backward of one step, by torch; attention as plain products, or it would count its own ways."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    denoiser = QwenImageTransformer2DModel(**config).requires_grad_(False)
    trainables.add_adapter(denoiser, Lora(r=RANK, lora_alpha=RANK), seed=1)
    grid = (1, shape.size[0] // 16, shape.size[1] // 16)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            (velocity,) = denoiser(
                hidden_states=torch.randn(1, shape.image_tokens, config["in_channels"]),
                encoder_hidden_states=torch.randn(1, shape.tokens[0], config["joint_attention_dim"]),
                timestep=torch.tensor([0.5]),
                img_shapes=[[grid] * (1 + shape.controls)],
                return_dict=False,
            )
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(velocity.square().mean())
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, EDIT),
        ({"num_layers": 2}, Shape(size=(32, 32), controls=2, tokens=(19,))),
        (
            {"num_attention_heads": 3, "joint_attention_dim": 16},
            Shape(size=(32, 48), controls=0, tokens=(5,)),
        ),
        ({"zero_cond_t": True}, EDIT),
    ],
)
def test_equal_to_torchs_count(changes: dict[str, Any], shape: Shape) -> None:
    config = {**CONFIG, **changes}
    own = flops.step_flops(config, shape, RANK)
    assert (own.forward, own.backward) == counted(config, shape)


def test_published_size() -> None:
    """A third of 20.4 billion weights; what two for each weight and token would give is the wrong count."""
    assert flops.met_by_a_token(flops.PUBLISHED) == 6_794_772_480
    large = flops.step_flops(flops.PUBLISHED, Shape(size=(1024, 1024)))
    small = flops.step_flops(flops.PUBLISHED, Shape(size=(384, 672)))
    assert large.forward / 1e12 == pytest.approx(171.6, abs=0.1)
    assert (large.step / 1e12, small.step / 1e12) == pytest.approx((397.4, 78.7), abs=0.1)


@pytest.mark.parametrize(
    ("words", "config", "shape"),
    [
        ((), flops.PUBLISHED, Shape(size=(1024, 1024))),
        (
            ("--size", "384", "672", "--controls", "2", "--tokens", "90"),
            flops.PUBLISHED,
            Shape(size=(384, 672), controls=2, tokens=(90,)),
        ),
        (("--base", str(BASE)), read_denoiser(BASE), Shape(size=(1024, 1024))),
        (("--tiny",), read_denoiser(BASE), Shape(size=(1024, 1024))),
    ],
)
def test_its_command_counts_what_is_asked(
    words: tuple[str, ...],
    config: dict[str, Any],
    shape: Shape,
    call: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = devices.pick("cpu")
    monkeypatch.setattr(devices, "pick", lambda: cpu)
    call(flops.main, "--rank", "8", *words)
    line = json.loads(capsys.readouterr().out)
    rate = line.pop("matrix_tflop_s", None)
    assert (rate is not None and rate > 0) == ("--tiny" in words)
    own = flops.step_flops(config, shape, 8)
    assert line == {
        "weights_a_token_meets": flops.met_by_a_token(config),
        "forward_tflop": own.forward / 1e12,
        "backward_tflop": own.backward / 1e12,
        "step_tflop": own.step / 1e12,
    }
