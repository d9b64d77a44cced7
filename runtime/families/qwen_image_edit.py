"""Qwen-Image-Edit: one control, whose pixels the text encoder sees beside the prompt.

Models, template and packing are those of diffusers' QwenImageEditPipeline; only the size
of the control is ours, since the pipeline always resizes it to a megapixel.
"""

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import QwenImageEditPipeline
from PIL import Image
from torch import Tensor, nn

from runtime.families.base import Conditioning, Encoders

# Published schedule of Qwen-Image: mu runs on the line through these two points, sigma is
# shifted by exp(mu). 1024 px is 4096 tokens and gives 2.000802574061872.
SHIFT_POINTS = ((256, 0.5), (8192, 0.9))


class QwenImageEdit:
    name = "qwen-image-edit"
    template_version = "edit-1"
    latent_channels = 16
    size_multiple = 16
    vl_pixels = 1024 * 1024
    dropped_tokens = 64
    min_controls = 1
    max_controls = 1
    blocks = "transformer_blocks"
    pipeline_class: ClassVar[Any] = QwenImageEditPipeline

    def load_encoders(
        self,
        model: Path,
        *,
        text_device: str,
        vae_device: str,
        dtype: torch.dtype,
        made_text_encoder: Path | None = None,
    ) -> Encoders:
        from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
        from transformers.utils.logging import disable_progress_bar

        from runtime.memory.quantize import compute_in

        disable_progress_bar()  # ours shows the whole phase, and logs stay readable
        tokenizer = Qwen2Tokenizer.from_pretrained(model / "tokenizer", local_files_only=True)
        images = AutoImageProcessor.from_pretrained(model / "processor", local_files_only=True)
        text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            made_text_encoder or model / "text_encoder",
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            # Without a map a packed model goes to whatever accelerator there is, after one large
            # warm-up allocation; with this one it is read on the CPU and moved.
            device_map={"": "cpu"} if made_text_encoder else None,
        )
        if made_text_encoder:
            compute_in(text_encoder, dtype)
        pipeline = self.pipeline_class(
            scheduler=None,
            vae=self.load_vae(model, device=vae_device, dtype=dtype),
            text_encoder=text_encoder.requires_grad_(False).eval().to(text_device),
            tokenizer=tokenizer,
            processor=_processor_class()(image_processor=images, tokenizer=tokenizer),
            transformer=None,
        )
        return Encoders(pipeline=pipeline, text_device=text_device, vae_device=vae_device)

    def load_vae(self, model: Path, *, device: str, dtype: torch.dtype) -> Any:
        from diffusers import AutoencoderKLQwenImage

        vae = AutoencoderKLQwenImage.from_pretrained(
            model / "vae", torch_dtype=dtype, local_files_only=True, use_safetensors=True
        )
        return vae.requires_grad_(False).eval().to(device)

    def load_denoiser(
        self, model: Path, *, device: str, dtype: torch.dtype, quantize: str, made: Path | None = None
    ) -> nn.Module:
        from diffusers import QwenImageTransformer2DModel
        from diffusers.utils.logging import disable_progress_bar

        from runtime.memory.quantize import load_made, load_nf4

        disable_progress_bar()  # ours shows the whole phase, and logs stay readable
        folder = model / "transformer"
        if quantize == "nf4" and made is not None:
            return load_made(QwenImageTransformer2DModel, made, device, dtype)
        if quantize == "nf4":
            return load_nf4(QwenImageTransformer2DModel, folder, device, dtype, blocks=self.blocks)
        denoiser = QwenImageTransformer2DModel.from_pretrained(
            folder, torch_dtype=dtype, local_files_only=True, use_safetensors=True
        )
        return denoiser.requires_grad_(False).to(device)  # type: ignore[no-any-return]

    @torch.no_grad()
    def encode_prompt(self, encoders: Encoders, prompt: str, controls: Sequence[Image.Image]) -> Tensor:
        embeds, _ = encoders.pipeline.encode_prompt(
            prompt=[prompt], image=self._prompt_images(controls), device=torch.device(encoders.text_device)
        )
        return embeds[0]  # type: ignore[no-any-return]

    def _prompt_images(self, controls: Sequence[Image.Image]) -> Any:
        return controls[0]

    @torch.no_grad()
    def encode_image(self, encoders: Encoders, pixels: Tensor) -> Tensor:
        vae = encoders.pipeline.vae
        image = pixels[None, :, None].to(vae.device, vae.dtype)
        return encoders.pipeline._encode_vae_image(image, None)[0, :, 0]  # type: ignore[no-any-return]

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        images = [noisy, *conditioning.controls]
        shapes = [(1, image.shape[2] // 2, image.shape[3] // 2) for image in images]
        packed = [_pack(image) for image in images]
        velocity = denoiser(
            hidden_states=torch.cat(packed, dim=1),
            timestep=sigma,
            encoder_hidden_states=conditioning.embeds,
            encoder_hidden_states_mask=conditioning.mask,
            img_shapes=[shapes] * len(noisy),
            return_dict=False,
        )[0][:, : packed[0].shape[1]]
        return _unpack(velocity, noisy)

    @torch.no_grad()
    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(values, device=latents.device, dtype=torch.float32)[:, None, None, None]
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        raw = latents.float()[:, :, None] * std + mean
        return vae.decode(raw.to(vae.dtype), return_dict=False)[0][:, :, 0]  # type: ignore[no-any-return]

    def tokens(self, target: Sequence[int], conditioning: Conditioning) -> int:
        images = [target[-2:], *(control.shape[-2:] for control in conditioning.controls)]
        return int(conditioning.embeds.shape[1]) + sum(h * w // 4 for h, w in images)

    def shift(self, tokens: int) -> float:
        (low, low_mu), (high, high_mu) = SHIFT_POINTS
        slope = (high_mu - low_mu) / (high - low)
        return exp(low_mu + slope * (tokens - low))

    def scheduler(self, model: Path, tokens: int, steps: int) -> Any:
        from math import log

        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
            model / "scheduler", local_files_only=True
        )
        sigmas = torch.linspace(1.0, 1.0 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=sigmas, mu=log(self.shift(tokens)))
        return scheduler


def _pack(latents: Tensor) -> Tensor:
    """[B, C, h, w] to [B, (h/2)(w/2), 4C]."""
    batch, channels, height, width = latents.shape
    return QwenImageEditPipeline._pack_latents(latents.contiguous(), batch, channels, height, width)  # type: ignore[no-any-return]


def _unpack(packed: Tensor, like: Tensor) -> Tensor:
    """[B, (h/2)(w/2), 4C] to the shape of `like`, [B, C, h, w]."""
    height, width = like.shape[2] * 8, like.shape[3] * 8
    return QwenImageEditPipeline._unpack_latents(packed, height, width, 8)[:, :, 0]  # type: ignore[no-any-return]


def _processor_class() -> Any:
    """Qwen2VLProcessor without its video half, which transformers refuses to make without torchvision."""
    from transformers import Qwen2VLProcessor

    class ImageTextProcessor(Qwen2VLProcessor):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    return ImageTextProcessor
