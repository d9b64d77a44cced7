"""The embedded tiny base: the real Qwen-Image-Edit classes at a size that a CPU can train.

`build` makes the untrained pipeline, `load` reads a saved one, and `encode`, `latents`, `predict` and
`sample` hold the one conditioning convention that the base is trained, judged and used with (at 64 px: h = w
= 4):

- embeddings: `QwenImageEditPipeline.encode_prompt` with the control picture at its own size, not scaled up
to a   megapixel; the 64 tokens of the template's prefix dropped
- latents: `argmax` of the VAE's posterior, (z - latents_mean) / latents_std, packed 2x2 to [B, h*w, 64]
- input: x_t = (1 - sigma) x0 + sigma eps and the control's latents, joined along the tokens; timestep =
sigma,   in 0..1
- output: velocity eps - x0, read off the first h*w tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    import torch

HIDDEN = 64  # width of the text encoder: 4 heads of 16
LAYERS = (
    5  # of the denoiser; 4 heads of 32. 0.59 M parameters a layer: six would break the 12 MiB of the folder
)
LATENT_CHANNELS = 16

# As published with Qwen-Image and Qwen-Image-Edit (scheduler/scheduler_config.json).
SCHEDULER: dict[str, Any] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}


def without_video() -> None:
    """Let Qwen2VLProcessor be made of an image processor and a tokenizer alone.

    transformers 5 asks for a Qwen2VLVideoProcessor as well, which can't be constructed without torchvision,
    so that there even `QwenImageEditPipeline.from_pretrained` fails. No edit uses it.
    """
    from transformers import Qwen2VLProcessor

    Qwen2VLProcessor.get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])


def text_encoder(tokenizer: Any) -> Any:
    """A random Qwen2_5_VLForConditionalGeneration of 0.23 M parameters, which stays as it is drawn.

    Token embeddings are drawn five times wider (0.1) than the layers' weights (0.02): each hidden state is
    then mostly its own token, which keeps prompts apart, and an NF4 copy of the layers, which spares
    embeddings, moves it little.
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    token_id = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    encoder = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        encoder.get_input_embeddings().weight.normal_(0.0, 0.1)
    return encoder


def build(tokenizer: Any, *, seed: int) -> Any:
    """An untrained pipeline in fp32: VAE 2.58 M, denoiser 3.08 M, text encoder 0.23 M parameters."""
    import torch
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageEditPipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    without_video()
    torch.manual_seed(seed)
    return QwenImageEditPipeline(
        text_encoder=text_encoder(tokenizer),
        vae=AutoencoderKLQwenImage(
            base_dim=16,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ).eval(),
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=LAYERS,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=HIDDEN,
            axes_dims_rope=(8, 12, 12),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        tokenizer=tokenizer,
        processor=Qwen2VLProcessor(
            image_processor=Qwen2VLImageProcessorPil(), tokenizer=tokenizer, video_processor=None
        ),
    )


def load(folder: Path, **parts: Any) -> Any:
    """The saved pipeline in fp32; `parts` as in from_pretrained, where `vae=None` leaves it out."""
    import torch
    from diffusers import QwenImageEditPipeline

    without_video()
    pipe = QwenImageEditPipeline.from_pretrained(folder, dtype=torch.float32, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pixels(images: Sequence[Image.Image]) -> NDArray[np.uint8]:
    """[B, H, W, 3]."""
    return np.stack([np.asarray(image.convert("RGB")) for image in images])


def encode(
    pipe: Any, prompts: Sequence[str], controls: Sequence[Image.Image]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt embeddings [B, L, HIDDEN], padded on the right, and their bool mask [B, L]."""
    import torch

    with torch.no_grad():
        embeddings, mask = pipe.encode_prompt(prompt=list(prompts), image=list(controls))
    if mask is None:  # diffusers' way to say that nothing is padded
        mask = torch.ones(embeddings.shape[:2], device=embeddings.device)
    return embeddings, mask.bool()


def moments(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """latents_mean and latents_std of the VAE's config, each [1, C, 1, 1, 1]."""
    import torch

    mean, std = (torch.tensor(getattr(vae.config, name)) for name in ("latents_mean", "latents_std"))
    return mean.view(1, -1, 1, 1, 1).to(vae.device), std.view(1, -1, 1, 1, 1).to(vae.device)


def latents(vae: Any, images: NDArray[np.uint8]) -> torch.Tensor:
    """Normalised, packed latents [B, h*w, 64] of uint8 pictures [B, H, W, 3]."""
    import torch

    mean, std = moments(vae)
    frames = torch.from_numpy(images).to(vae.device).permute(0, 3, 1, 2).unsqueeze(2).float() / 127.5 - 1.0
    with torch.no_grad():
        z = (vae.encode(frames).latent_dist.mode() - mean) / std
    batch, channels, _, height, width = z.shape
    z = z.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    packed: torch.Tensor = z.reshape(batch, height * width // 4, 4 * channels)
    return packed


def decode(vae: Any, packed: torch.Tensor, height: int, width: int) -> NDArray[np.uint8]:
    """Pictures [B, height, width, 3] of packed latents: the inverse of `latents`, up to the VAE's loss."""
    import torch

    mean, std = moments(vae)
    h, w = height // 16, width // 16
    z = packed.view(len(packed), h, w, LATENT_CHANNELS, 2, 2).permute(0, 3, 1, 4, 2, 5)
    z = z.reshape(len(packed), LATENT_CHANNELS, 1, 2 * h, 2 * w)
    with torch.no_grad():
        frames = vae.decode(z * std + mean, return_dict=False)[0][:, :, 0]
    pictures: NDArray[np.uint8] = ((frames + 1.0) * 127.5).round().clamp(0, 255).byte().cpu().numpy()
    return pictures.transpose(0, 2, 3, 1)


def predict(
    transformer: Any, noisy: torch.Tensor, control: torch.Tensor, sigma: torch.Tensor, text: Any, mask: Any
) -> torch.Tensor:
    """Velocity [B, h*w, 64] of square pictures; `sigma` [B] in 0..1."""
    import torch

    side, control_side = (int(x.shape[1] ** 0.5) for x in (noisy, control))
    output: torch.Tensor = transformer(
        hidden_states=torch.cat([noisy, control], dim=1),
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        timestep=sigma,
        img_shapes=[[(1, side, side), (1, control_side, control_side)]] * len(noisy),
        return_dict=False,
    )[0]
    return output[:, : noisy.shape[1]]


def sample(
    pipe: Any, control: torch.Tensor, text: torch.Tensor, mask: torch.Tensor, *, steps: int, seed: int
) -> torch.Tensor:
    """Packed latents of the edit: `steps` Euler steps from noise drawn on the CPU, no guidance."""
    import torch
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_shift

    x = torch.randn(control.shape, generator=torch.Generator().manual_seed(seed)).to(control.device)
    config = pipe.scheduler.config
    shift = calculate_shift(
        x.shape[1], config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    pipe.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift, device=x.device)
    with torch.no_grad():
        for t in pipe.scheduler.timesteps:
            velocity = predict(pipe.transformer, x, control, (t / 1000).expand(len(x)), text, mask)
            x = pipe.scheduler.step(velocity, t, x, return_dict=False)[0]
    return x
