"""Training steps of other tools, on a denoiser of random weights made on the device.

    musubi      musubi-tuner's own model, LoRA and float8 code, as its trainer uses them: fp32 LoRA under bf16 autocast,
                8-bit AdamW, checkpointing of each block, sdpa, no block swap
    diffusers   its class and peft's adapter as its example scripts do: bf16 LoRA, autocast, checkpointing of each block

Both adapt to_q, to_k, to_v and to_out.0 of each block. musubi-tuner is imported from a checkout's `src`, whose path is
in the environment variable MUSUBI_SRC; nothing of it is copied.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from true_size import Shape

from runtime.device import Device

MUSUBI = "MUSUBI_SRC"
RANK = 16
RATE = 1e-4
RECOMPILES = (
    64  # an adapter's forward is each layer's own to the compiler, so each of 60 blocks is compiled anew
)
ONLY_ATTENTION = {
    "exclude_patterns": "['.*']",
    "include_patterns": r"['.*attn\.to_(q|k|v)', '.*attn\.to_out\.0']",
}
"""musubi-tuner's own targets are all linears of a block; these are those of the example scripts, and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    step: Callable[[], Tensor]
    """One optimizer update; returns the loss."""
    adapted: int
    """Linears with an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A sample as the published class takes it, batch 1."""

    latents: Tensor
    control: Tensor
    text: Tensor
    shapes: list[list[tuple[int, int, int]]]

    def noisy(self) -> tuple[Tensor, Tensor, Tensor]:
        """Timestep, noised latents and noise."""
        t = torch.rand(1, device=self.latents.device)
        noise = torch.randn_like(self.latents)
        return t, ((1 - t) * self.latents + t * noise).to(noise.dtype), noise


def missing(name: str) -> str:
    """Why a peer can't run here; empty where it can."""
    if name.startswith("musubi") and MUSUBI not in os.environ:
        return f"{MUSUBI} is not set: the `src` folder of a musubi-tuner checkout"
    return ""


def build(names: list[str], config: Mapping[str, Any], shape: Shape, where: Device) -> list[Peer]:
    """Those of one base weight: `musubi` and `musubi-compiled` share theirs, as nothing else differs."""
    (group,) = {weights_of(name) for name in names}
    if group in ("musubi", "musubi-fp8"):
        return Musubi(config, shape, where, float8=group == "musubi-fp8").peers(names)
    return [diffusers(config, shape, where, nf4=group == "diffusers-nf4")]


def weights_of(name: str) -> str:
    """Peers for which it is the same are steps of one model."""
    return name.removesuffix("-compiled")


def ask(config: Mapping[str, Any], shape: Shape, where: Device, dtype: torch.dtype) -> Question:
    generator = torch.Generator(where.type).manual_seed(1)
    grid = (1, shape.size[0] // 16, shape.size[1] // 16)

    def drawn(tokens: int, channels: int) -> Tensor:
        return torch.randn(1, tokens, channels, generator=generator, device=where.type, dtype=dtype)

    channels, target = config["in_channels"], grid[1] * grid[2]
    return Question(
        latents=drawn(target, channels),
        control=drawn(shape.image_tokens - target, channels),
        text=drawn(shape.tokens[0], config["joint_attention_dim"]),
        shapes=[[grid] * (1 + shape.controls)],
    )


def autocast(where: Device) -> AbstractContextManager[Any]:
    return torch.autocast(where.type, torch.bfloat16)


class Musubi:
    """One model, with its blocks as they are and compiled."""

    def __init__(
        self,
        config: Mapping[str, Any],
        shape: Shape,
        where: Device,
        *,
        float8: bool,
    ) -> None:
        if os.environ[MUSUBI] not in sys.path:
            sys.path.insert(0, os.environ[MUSUBI])
        import bitsandbytes as bnb

        self.where, self.float8 = where, float8
        self.model = self._model(config)
        self.network = self._network()
        self.parameters = list(self.network.parameters())
        self.optimizer = bnb.optim.AdamW8bit(self.parameters, lr=RATE)
        self.question = ask(config, shape, where, torch.float32)
        self.plain = list(self.model.transformer_blocks)
        self.compiled: list[nn.Module] = []

    def _model(self, config: Mapping[str, Any]) -> Any:
        from accelerate import init_empty_weights
        from musubi_tuner.qwen_image import qwen_image_model as theirs

        with init_empty_weights():
            model = theirs.QwenImageTransformer2DModel(attn_mode="torch", split_attn=False, **config)
        draw(model, self.where)
        if self.float8:
            from musubi_tuner.modules import fp8_optimization_utils as fp8

            state = fp8.optimize_state_dict_with_fp8(
                model.state_dict(),
                self.where.type,
                theirs.FP8_OPTIMIZATION_TARGET_KEYS,
                theirs.FP8_OPTIMIZATION_EXCLUDE_KEYS,
                move_to_device=True,
            )
            fp8.apply_fp8_monkey_patch(model, state, use_scaled_mm=False)
            model.load_state_dict(state, strict=True, assign=True)
        model.requires_grad_(False)
        model.enable_gradient_checkpointing()
        return model.train()

    def _network(self) -> Any:
        from musubi_tuner.networks import lora_qwen_image

        network = lora_qwen_image.create_arch_network(
            1.0, RANK, RANK, None, None, self.model, **ONLY_ATTENTION
        )
        network.apply_to(None, self.model, apply_text_encoder=False, apply_unet=True)
        network.to(self.where.type)
        network.prepare_grad_etc(self.model)
        return network

    def peers(self, names: list[str]) -> list[Peer]:
        adapted = len(self.network.unet_loras)
        return [
            Peer(
                name=name, step=self._compiled if name.endswith("-compiled") else self._eager, adapted=adapted
            )
            for name in names
        ]

    def _eager(self) -> Tensor:
        return self._step(self.plain)

    def _compiled(self) -> Tensor:
        import torch._dynamo

        # Their guide raises the limit too; back to what it was afterwards, for ours is another model's.
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            self.compiled = self.compiled or self._compile()
            return self._step(self.compiled)

    def _compile(self) -> list[nn.Module]:
        """By their own function, with the defaults of their arguments."""
        from musubi_tuner.utils import model_utils

        blocks = list(self.plain)
        given = SimpleNamespace(
            compile_backend="inductor",
            compile_mode="default",
            compile_dynamic=None,
            compile_fullgraph=False,
            compile_cache_size_limit=None,
        )
        model_utils.compile_transformer(given, self.model, [blocks], disable_linear=False)
        return blocks

    def _step(self, blocks: list[nn.Module]) -> Tensor:
        self.model.transformer_blocks = nn.ModuleList(blocks)
        t, noisy, noise = self.question.noisy()
        text = self.question.text.detach().clone()
        # Their trainer asks for gradients of the inputs, so that checkpointed blocks have some.
        noisy.requires_grad_(True)
        text.requires_grad_(True)
        with autocast(self.where):
            predicted = self.model(
                hidden_states=torch.cat([noisy, self.question.control], 1),
                timestep=t,
                guidance=None,
                encoder_hidden_states_mask=None,
                encoder_hidden_states=text,
                img_shapes=self.question.shapes,
                txt_seq_lens=[text.shape[1]],
                additional_t_cond=None,
            )[:, : noisy.shape[1]]
        loss = nn.functional.mse_loss(predicted.float(), noise - self.question.latents)
        return finish(loss, self.parameters, self.optimizer)


def diffusers(config: Mapping[str, Any], shape: Shape, where: Device, *, nf4: bool) -> Peer:
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel
    from peft import LoraConfig

    with init_empty_weights(include_buffers=False):
        model = QwenImageTransformer2DModel(**config)
    if nf4:
        quantize(model, where)
    draw(model, where)
    model.requires_grad_(False)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    model.add_adapter(
        LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=targets)
    )
    model.enable_gradient_checkpointing()
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(parameters, eight_bit=nf4)
    question = ask(config, shape, where, torch.bfloat16)

    def step() -> Tensor:
        t, noisy, noise = question.noisy()
        with autocast(where):
            predicted = model(
                hidden_states=torch.cat([noisy, question.control], 1),
                timestep=t,
                encoder_hidden_states=question.text,
                encoder_hidden_states_mask=None,
                img_shapes=question.shapes,
                return_dict=False,
            )[0][:, : noisy.shape[1]]
        loss = nn.functional.mse_loss(predicted.float(), (noise - question.latents).float())
        return finish(loss, parameters, optimizer)

    return Peer(name="diffusers-nf4" if nf4 else "diffusers", step=step, adapted=len(parameters) // 2)


def adamw(parameters: list[nn.Parameter], *, eight_bit: bool) -> Any:
    if not eight_bit:
        return torch.optim.AdamW(parameters, lr=RATE, weight_decay=1e-2)
    import bitsandbytes as bnb

    return bnb.optim.AdamW8bit(parameters, lr=RATE, weight_decay=1e-2)


def finish(loss: Tensor, parameters: list[nn.Parameter], optimizer: Any) -> Tensor:
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()  # every trainer reads the loss of each step
    return loss.detach()


def draw(model: nn.Module, where: Device) -> None:
    """Random weights in place of those on the meta device: N(0, 0.02), scales of norms around 1."""
    torch.manual_seed(0)
    for name, module in model.named_modules():
        for leaf, empty in list(module.named_parameters(recurse=False)):
            if empty.is_meta:
                scale = "norm" in f"{name}.{leaf}" and leaf == "weight"
                made = torch.empty(empty.shape, device=where.type, dtype=torch.bfloat16)
                made.normal_(1.0, 0.05) if scale else made.normal_(0.0, 0.02)
                setattr(module, leaf, nn.Parameter(made, requires_grad=False))


def quantize(model: nn.Module, where: Device) -> None:
    """Every linear of a model on the meta device as bitsandbytes' NF4, as its loader in diffusers would leave it."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        made = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
            compress_statistics=False,
            device="meta",
        )
        drawn = torch.empty(module.weight.shape, device=where.type, dtype=torch.bfloat16).normal_(0.0, 0.02)
        made.weight = bnb.nn.Params4bit(
            drawn, requires_grad=False, quant_type="nf4", compress_statistics=False, module=made
        ).to(where.type)
        if hasattr(made, "support_avx512bf16_for_cpu"):
            made.support_avx512bf16_for_cpu = False  # else it repacks on such CPUs, and training fails
        model.set_submodule(name, made)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # or peft wraps the layers as plain ones
