"""GiB that each phase holds, component by component, from sizes alone.

Activations follow `tokens x dtype x dim x units`, where units count the hidden-sized tensors held
per token. Calibrated on one H200, torch 2.11, random weights at real size (60 layers, dim 3072, LoRA
r16, checkpointed, `benchmarks/adapter_dtype.py`), peak over resident at 2416 and 8592 tokens:

    bf16 base   1.18 and 4.21 GiB -> layers + 26    (one kept input per layer, 26 in the block at work)
    NF4 base    1.24 GiB at 2416  -> the same, and the largest linear dequantized
    bf16 base without checkpointing, 10 layers, 2416 tokens: 2.50 GiB -> 16 x layers + 26

and for the VAE, encode 1352 and decode 2117 elements per pixel at base_dim 96, both at 1024 and 2048 px,
bf16 and fp32. Rough on other devices: no XPU was measured. The allocator's reserve (up to 2 GiB over what is
allocated there) is not counted; it lives in the share of the device that the budget leaves free.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.files import GIB
from runtime.memory.architecture import Architecture

WORKING_UNITS = 26
TEXT_UNITS = 37  # of the text encoder, not measured: as a block of the denoiser took once
UNITS_PER_LAYER = 16  # kept for the backward pass when nothing is recomputed
VAE_ENCODE_ELEMENTS, VAE_DECODE_ELEMENTS, VAE_BASE_DIM = 1352, 2117, 96
ADAPTER_BYTES = 4  # adapters and their gradients are fp32
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # weight, 8-bit scale per 64, fp32 scale per 256 of those
PROCESS_GIB = 0.6  # a CPU run also holds Python and torch themselves: 0.55 to 0.67 measured
OPTIMIZER_BYTES = {
    "SGD": 4,  # with momentum; without it keeps nothing
    "Adafactor": 1,
    "Adam8bit": 2,
    "AdamW8bit": 2,
    "PagedAdam8bit": 2,
    "PagedAdamW8bit": 2,
    "Lion": 4,
    "Lion8bit": 1,
    "PagedLion8bit": 1,
    "Prodigy": 16,
}
ADAM_BYTES = 8  # two fp32 moments; also assumed of an optimizer that is not in the list

DTYPE_BYTES = {"no": 4, "fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The largest sample, and how it is computed."""

    target_pixels: int
    control_pixels: int
    """Of one control."""
    text_tokens: int
    image_tokens: int
    """Of target and controls together."""
    batch_size: int
    encoded_at_once: int = 1
    """Samples that an encoder takes at once in the cache phase."""
    painted_pixels: int = 0
    """Of the largest prompt with a size of its own."""
    painted_tokens: int = 0
    """Of text, picture and controls of the costliest such prompt."""

    @property
    def tokens(self) -> int:
        return self.batch_size * (self.text_tokens + self.image_tokens)

    @property
    def one_painted(self) -> int:
        """Tokens of the costliest picture to paint."""
        return max(self.text_tokens + self.image_tokens, self.painted_tokens)

    @property
    def pixels_painted(self) -> int:
        return max(self.target_pixels, self.painted_pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What of a config decides the memory, each `auto` resolved."""

    device: str
    quantize: str
    precision: str
    checkpointing: bool
    adapter_parameters: int
    optimizer: str
    text_encoder_device: str
    vae_device: str
    text_encoder_quantize: str = "none"
    text_encoder_dtype: str = "bf16"
    vae_dtype: str = "bf16"
    ema: bool = False
    samples: bool = False
    """Whether pictures are painted in the fit."""

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`components_gib` holds what stays resident, and `activations`, which comes on top at the peak."""

    components_gib: dict[str, float]

    @property
    def resident_gib(self) -> float:
        return sum(gib for name, gib in self.components_gib.items() if name != "activations")

    @property
    def peak_gib(self) -> float:
        return sum(self.components_gib.values())

    @property
    def largest(self) -> str:
        return max(self.components_gib, key=lambda name: self.components_gib[name])


def phases(architecture: Architecture, settings: Settings, work: Work) -> dict[str, Phase]:
    return {
        "cache": cache_phase(architecture, settings, work),
        "fit": fit_phase(architecture, settings, work),
        "validate": validate_phase(architecture, settings, work),
    }


def cache_phase(architecture: Architecture, settings: Settings, work: Work) -> Phase:
    """Encoders that run on the plan's device; one that runs elsewhere takes nothing here."""
    encoder, vae, at_once = architecture.text_encoder, architecture.vae, work.encoded_at_once
    components: dict[str, float] = {}
    activations = [0.0]
    if settings.text_encoder_device == settings.device:
        width = DTYPE_BYTES[settings.text_encoder_dtype]
        packed = encoder.quantizable if settings.text_encoder_quantize == "nf4" else 0
        components["text_encoder"] = packed * NF4_BYTES + (encoder.parameters - packed) * width
        units = encoder.hidden * TEXT_UNITS
        activations.append(at_once * work.text_tokens * width * units)
    if settings.vae_device == settings.device:
        width = DTYPE_BYTES[settings.vae_dtype]
        components["vae"] = vae.parameters * width
        pixels = at_once * max(work.target_pixels, work.control_pixels)
        activations.append(_vae_bytes(architecture, VAE_ENCODE_ELEMENTS, pixels, width))
    return _phase({**components, "activations": max(activations)}, settings)


def fit_phase(architecture: Architecture, settings: Settings, work: Work) -> Phase:
    trained = settings.adapter_parameters
    state = OPTIMIZER_BYTES.get(settings.optimizer.rpartition(".")[2], ADAM_BYTES)
    kept = architecture.denoiser.layers * (1 if settings.checkpointing else UNITS_PER_LAYER)
    return _phase(
        {
            "denoiser": _denoiser_bytes(architecture, settings),
            "adapter": trained * ADAPTER_BYTES,
            "gradients": trained * ADAPTER_BYTES,
            "optimizer": trained * state,
            **({"ema": trained * ADAPTER_BYTES} if settings.ema else {}),
            "activations": max(
                _denoiser_activations(architecture, settings, work.tokens, kept),
                _painting(architecture, settings, work) if settings.samples else 0.0,
            ),
        },
        settings,
    )


def _painting(architecture: Architecture, settings: Settings, work: Work) -> float:
    """Between two steps, with nothing kept for a backward pass: a picture sampled, then the VAE, loaded to decode."""
    sampling = _denoiser_activations(architecture, settings, work.one_painted, 0)
    if settings.vae_device != settings.device:
        return sampling
    width = DTYPE_BYTES[settings.vae_dtype]
    decode = _vae_bytes(architecture, VAE_DECODE_ELEMENTS, work.pixels_painted, width)
    return max(sampling, architecture.vae.parameters * width + decode)


def validate_phase(architecture: Architecture, settings: Settings, work: Work) -> Phase:
    """Sampling one image, then decoding it; guidance runs the denoiser twice in turn, not at once."""
    width = settings.dtype_bytes
    decode = _vae_bytes(architecture, VAE_DECODE_ELEMENTS, work.pixels_painted, width)
    return _phase(
        {
            "denoiser": _denoiser_bytes(architecture, settings),
            "adapter": settings.adapter_parameters * ADAPTER_BYTES,
            "vae": architecture.vae.parameters * width,
            "activations": max(_denoiser_activations(architecture, settings, work.one_painted, 0), decode),
        },
        settings,
    )


def _phase(components: Mapping[str, float], settings: Settings) -> Phase:
    gib = {name: size / GIB for name, size in components.items()}
    if settings.device == "cpu":
        gib["process"] = PROCESS_GIB
    return Phase(components_gib=gib)


def _denoiser_bytes(architecture: Architecture, settings: Settings) -> float:
    denoiser = architecture.denoiser
    if settings.quantize == "none":
        return denoiser.parameters * settings.dtype_bytes
    rest = denoiser.parameters - denoiser.quantizable
    return denoiser.quantizable * NF4_BYTES + rest * settings.dtype_bytes


def _denoiser_activations(architecture: Architecture, settings: Settings, tokens: int, kept: int) -> float:
    denoiser = architecture.denoiser
    largest = max(inputs * outputs for inputs, outputs in denoiser.block_linears.values())
    dequantized = largest * settings.dtype_bytes if settings.quantize == "nf4" else 0
    return float(tokens * settings.dtype_bytes * denoiser.dim * (kept + WORKING_UNITS)) + dequantized


def _vae_bytes(architecture: Architecture, elements: int, pixels: int, width: int) -> float:
    return pixels * width * elements * architecture.vae.base_dim / VAE_BASE_DIM
