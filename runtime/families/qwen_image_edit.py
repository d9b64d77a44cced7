"""Qwen-Image-Edit: at most one control, whose pixels the text encoder sees beside the prompt.

Models, template and packing are those of diffusers' QwenImageEditPipeline; ours are the size of
the control, which the pipeline always resizes to a megapixel, and prompts without a control.
"""

import contextlib
from collections.abc import Iterator, Sequence
from math import exp
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import QwenImageEditPipeline
from torch import Tensor, nn

from runtime.config.model import VaeMode
from runtime.errors import DataError
from runtime.families import kinds, rotary, weights
from runtime.families import text_encoder as text_encoders
from runtime.families.base import Conditioning, Encoded, Encoders, PromptAsk
from runtime.families.facts import QWEN_IMAGE_EDIT
from runtime.memory import loading, modulation, spans
from runtime.memory import vae as single_images
from runtime.memory.loading import Placement
from runtime.memory.modulation import Request
from runtime.quantize import nf4
from runtime.quantize.made import is_packed

# Published schedule of Qwen-Image: mu runs on the line through these two points, sigma is
# shifted by exp(mu). 1024 px is 4096 tokens and gives 2.000802574061872.
SHIFT_POINTS = ((256, 0.5), (8192, 0.9))

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
RANGE_SLACK = 1e-3


class QwenImageEdit:
    facts = QWEN_IMAGE_EDIT
    pipeline_class: ClassVar[Any] = QwenImageEditPipeline

    def load_encoders(
        self,
        model: Path,
        *,
        text_device: str,
        text_dtype: torch.dtype,
        vae_device: str,
        vae_dtype: torch.dtype,
        made_text_encoder: Path | None = None,
        text_encoder: bool = True,
        vae: bool = True,
        vae_mode: VaeMode = "exact",
    ) -> Encoders:
        processor = _load_processor(model) if text_encoder else None
        folder = made_text_encoder or model / "text_encoder"
        encoder = text_encoders.load(folder, device=text_device, dtype=text_dtype) if text_encoder else None
        pipeline = self.pipeline_class(
            scheduler=None,
            vae=self.load_vae(model, device=vae_device, dtype=vae_dtype, mode=vae_mode) if vae else None,
            text_encoder=encoder,
            tokenizer=processor.tokenizer if processor is not None else None,
            processor=processor,
            transformer=None,
        )
        return Encoders(pipeline=pipeline, text_device=text_device, vae_device=vae_device)

    def load_vae(self, model: Path, *, device: str, dtype: torch.dtype, mode: VaeMode = "exact") -> Any:
        from diffusers import AutoencoderKLQwenImage

        from runtime.families import kinds
        from runtime.memory.vae import arrange

        kinds.expect(model / "vae", "vae")
        vae = AutoencoderKLQwenImage.from_pretrained(
            model / "vae", torch_dtype=dtype, local_files_only=True, use_safetensors=True
        )
        return arrange(vae.requires_grad_(False).eval(), mode).to(device)

    def load_denoiser(
        self,
        model: Path,
        *,
        device: str,
        dtype: torch.dtype,
        quantize: str,
        made: Path | None = None,
        weight: Path | None = None,
        table: Request | None = None,
        streamed: int = 0,
        keep: tuple[str, ...] = (),
    ) -> nn.Module:
        from diffusers import QwenImageTransformer2DModel

        facts, changes = self.facts, dict[str, Any]()
        folder = made if made is not None and weight is None and quantize == "nf4" else model / "transformer"
        source: loading.Source = loading.Folder(folder)
        if weight is not None:
            source = weights.open_denoiser_weights(weight)
            changes = weights.changes_of(source, facts)
            weights.refuse_differences(loading.empty(QwenImageTransformer2DModel, folder, changes), source)
        elif folder == model / "transformer":
            kinds.expect(folder, "denoiser")
        # What lies packed has been decided on: its plain linears were kept, and stay so.
        packing = quantize == "nf4" and (weight is not None or not is_packed(folder))
        layers = int(QwenImageTransformer2DModel.load_config(folder)["num_layers"])
        away = tuple(f"{facts.blocks}.{index}." for index in spans.picked(layers, streamed) if streamed)
        placement = Placement(
            device=device,
            dtype=dtype,
            rule=nf4.rule_for("transformer", facts.blocks, keep) if packing else None,
            on_host=lambda name: name.startswith(away),
        )
        denoiser = loading.load(
            QwenImageTransformer2DModel,
            folder,
            source,
            placement,
            changes=changes,
            left_out=lambda name: table is not None and facts.is_modulation(name),
        ).eval()
        if table is not None:
            modulation.install(denoiser, facts, source, placement, table)
        return denoiser

    @torch.no_grad()
    def encode_prompts(self, encoders: Encoders, asks: Sequence[PromptAsk], max_tokens: int) -> list[Encoded]:
        """As the protocol says. Equal, bit for bit, to the pipeline's encode_prompt for one prompt with the grid.

        The pipeline asks for the states of all layers and for logits, and uses the last state only. The
        base model gives that one alone: for a prompt of 1,400 tokens the logits of Qwen2.5-VL are 0.4 GiB in
        bf16, the states 0.3 GiB, for each row of a batch.
        """
        pipeline = encoders.pipeline
        parts = [cut_prompt(pipeline.tokenizer, ask.prompt, max_tokens) for ask in asks]
        texts = [
            self._text(pipeline.prompt_template_encode, kept, len(ask.images))
            for ask, (kept, _) in zip(asks, parts, strict=True)
        ]
        # Flat and in order: the processor gives each image to the next placeholder of the texts.
        pictures = [image for ask in asks for image in ask.images]
        inputs = pipeline.processor(text=texts, images=pictures or None, padding=True, return_tensors="pt")
        inputs = inputs.to(encoders.text_device)
        # The pipelines of diffusers 0.42 leave mm_token_type_ids out; under transformers 5 image tokens then have
        # positions in one line with the text, where the model was trained on a grid (diffusers issue 14194).
        states = pipeline.text_encoder.model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            pixel_values=inputs.get("pixel_values"),
            image_grid_thw=inputs.get("image_grid_thw"),
            mm_token_type_ids=inputs.get("mm_token_type_ids"),
            use_cache=False,
        ).last_hidden_state
        dropped = pipeline.prompt_template_encode_start_idx
        rows = (
            state[seen][dropped:] for state, seen in zip(states, inputs["attention_mask"].bool(), strict=True)
        )
        return [Encoded(embeds=row, cut=cut) for row, (_, cut) in zip(rows, parts, strict=True)]

    def _text(self, template: str, prompt: str, images: int) -> str:
        """The system prompt and `prompt` with a placeholder for each of its images.

        Without images the template's own placeholder goes too, and 64 tokens are dropped all the same.
        musubi-tuner agrees for Edit-Plus; for Edit it keeps the placeholder, which stands for no picture then.
        """
        if images > self.facts.max_controls:
            raise ValueError(f"{images} images for one prompt, expected at most {self.facts.max_controls}")
        return template.replace(PICTURE, "").format(self._placeholders(images) + prompt)

    def _placeholders(self, images: int) -> str:
        return PICTURE * images

    @torch.no_grad()
    def encode_images(self, encoders: Encoders, pixels: Tensor) -> Tensor:
        channels = self.facts.pixel_channels
        if pixels.ndim != 4 or pixels.shape[1] != channels:
            raise ValueError(f"pixels have shape {tuple(pixels.shape)}, expected [B, {channels}, H, W]")
        low, high = (float(end) for end in pixels.aminmax())
        if not (low >= -1 - RANGE_SLACK and high <= 1 + RANGE_SLACK):  # written so that NaN fails too
            raise ValueError(f"pixels range from {low:.4g} to {high:.4g}, expected -1 to 1")
        vae = encoders.pipeline.vae
        latents = single_images.encode(vae, pixels.to(vae.device, vae.dtype))
        # In the precision of the VAE, as the pipelines do it.
        mean, std = (part.to(latents.dtype) for part in _statistics(vae, latents.device))
        return (latents - mean) / std

    def make_compilable(self, denoiser: nn.Module) -> None:
        rotary.make_real(denoiser)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        images = [noisy, *conditioning.controls]
        shapes = [(1, image.shape[2] // 2, image.shape[3] // 2) for image in images]
        packed = [_pack(image) for image in images]
        with _exact(denoiser, sigma):
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
        mean, std = _statistics(vae, latents.device)
        return single_images.decode(vae, (latents.float() * std + mean).to(vae.dtype))

    def tokens(self, target: Sequence[int], conditioning: Conditioning) -> int:
        images = [target[-2:], *(control.shape[-2:] for control in conditioning.controls)]
        samples, length = conditioning.embeds.shape[:2]
        text = samples * length if conditioning.mask is None else int(conditioning.mask.sum())
        return text + samples * sum(h * w // 4 for h, w in images)

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


def _statistics(vae: Any, where: torch.device) -> list[Tensor]:
    """Mean and deviation that normalise latents, fp32 [C, 1, 1] each."""
    both = (vae.config.latents_mean, vae.config.latents_std)
    return [torch.tensor(values, dtype=torch.float32, device=where)[:, None, None] for values in both]


@contextlib.contextmanager
def _exact(denoiser: nn.Module, sigma: Tensor) -> Iterator[None]:
    """Let the time embedding see `sigma` in fp32: the model rounds it to its own precision first.

    In bf16 that makes 1 of all sigmas above 0.998, and moves those near 0.6 by up to 0.002.
    """

    def replace(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        rounded, *rest = given
        # 2511 gives control tokens the modulation of sigma 0, in the second half of a doubled batch.
        exact = sigma if len(rounded) == len(sigma) else torch.cat([sigma, sigma * 0])
        return (exact.float(), *rest)

    handle = denoiser.time_text_embed.register_forward_pre_hook(replace)  # type: ignore[union-attr]
    try:
        yield
    finally:
        handle.remove()


def _pack(latents: Tensor) -> Tensor:
    """[B, C, h, w] to [B, (h/2)(w/2), 4C]."""
    batch, channels, height, width = latents.shape
    return QwenImageEditPipeline._pack_latents(latents.contiguous(), batch, channels, height, width)  # type: ignore[no-any-return]


def _unpack(packed: Tensor, like: Tensor) -> Tensor:
    """[B, (h/2)(w/2), 4C] to the shape of `like`, [B, C, h, w]."""
    height, width = like.shape[2] * 8, like.shape[3] * 8
    return QwenImageEditPipeline._unpack_latents(packed, height, width, 8)[:, :, 0]  # type: ignore[no-any-return]


def cut_prompt(tokenizer: Any, prompt: str, max_tokens: int) -> tuple[str, str]:
    """`prompt` up to `max_tokens` tokens, and the rest; a character of several tokens is never split.

    Raises DataError for a prompt with a control token: a placeholder would take another prompt's picture.
    """
    control = [token for token in tokenizer.get_added_vocab() if token in prompt]
    if control:
        raise DataError(
            f"the prompt {prompt[:60]!r} contains {control[0]}, which steers the text encoder and is no text",
            remedy=f"take {control[0]} out of the caption, then finetune dataset",
        )
    spans = tokenizer(prompt, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    if len(spans) <= max_tokens:
        return prompt, ""
    end = spans[max_tokens][0]
    return prompt[:end], prompt[end:]


def _load_processor(model: Path) -> Any:
    from transformers import AutoImageProcessor, Qwen2Tokenizer

    # Padded on the right whatever the folder says: a row that began with padding would have positions that
    # attend to nothing, which some kernels answer with NaN.
    tokenizer = Qwen2Tokenizer.from_pretrained(
        model / "tokenizer", padding_side="right", local_files_only=True
    )
    images = AutoImageProcessor.from_pretrained(model / "processor", local_files_only=True)
    return _processor_class()(image_processor=images, tokenizer=tokenizer)


def _processor_class() -> Any:
    """Qwen2VLProcessor without its video half, which transformers refuses to make without torchvision."""
    from transformers import Qwen2VLProcessor

    class ImageTextProcessor(Qwen2VLProcessor):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    return ImageTextProcessor
