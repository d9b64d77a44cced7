"""GiB that each phase holds, component by component, from sizes alone.

Activations follow `tokens x dtype x dim x units`, where units count the hidden-sized tensors held
per token. Calibrated on one H200, torch 2.11, random weights at real size (60 layers, dim 3072, LoRA
r16, checkpointed, autocast), peak over resident at 2416 and 8592 tokens:

    bf16 base   1.5 and 4.9 GiB -> layers + 37     (one kept input per layer, 37 in the block at work)
    NF4 base    2.4 and 8.2 GiB -> layers + 104    (autocast also keeps fp32 copies)
    bf16 base without checkpointing, 2416 tokens: 17.8 GiB -> 21 x layers + 37

and for the VAE, encode 1352 and decode 2117 elements per pixel at base_dim 96, both at 1024 and 2048 px,
bf16 and fp32. Rough on other devices: no XPU was measured. The allocator's reserve (up to 2 GiB over what is
allocated there) is not counted; it lives in the share of the device that the budget leaves free.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.files import GIB
from runtime.memory.architecture import Architecture

WORKING_UNITS = {"none": 37, "nf4": 104}
UNITS_PER_LAYER = 21  # kept for the backward pass when nothing is recomputed
VAE_ENCODE_ELEMENTS, VAE_DECODE_ELEMENTS, VAE_BASE_DIM = 1352, 2117, 96
ADAPTER_BYTES = 4  # adapters and their gradients are fp32
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # weight, 8-bit scale per 64, fp32 scale per 256 of those
PROCESS_GIB = 0.6  # a CPU run also holds Python and torch themselves: 0.55 to 0.67 measured
OPTIMIZER_BYTES = {"SGD": 4, "Adafactor": 1, "Adam8bit": 2, "AdamW8bit": 2, "PagedAdamW8bit": 2}
ADAM_BYTES = 8  # two fp32 moments; also assumed of an optimizer that is not in the list

DTYPE_BYTES = {"no": 4, "bf16": 2}


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

    @property
    def tokens(self) -> int:
        return self.batch_size * (self.text_tokens + self.image_tokens)


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
    width = settings.dtype_bytes
    encoder, vae = architecture.text_encoder, architecture.vae
    components: dict[str, float] = {}
    activations = [0.0]
    if settings.text_encoder_device == settings.device:
        packed = encoder.quantizable if settings.text_encoder_quantize == "nf4" else 0
        components["text_encoder"] = packed * NF4_BYTES + (encoder.parameters - packed) * width
        # The states of every layer and the logits are returned though only the last state is used.
        units = encoder.hidden * (encoder.layers + 1 + WORKING_UNITS["none"]) + encoder.vocabulary
        activations.append(work.text_tokens * width * units)
    if settings.vae_device == settings.device:
        components["vae"] = vae.parameters * width
        pixels = max(work.target_pixels, work.control_pixels)
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
            "activations": _denoiser_activations(architecture, settings, work.tokens, kept),
        },
        settings,
    )


def validate_phase(architecture: Architecture, settings: Settings, work: Work) -> Phase:
    """Sampling one image, then decoding it; guidance runs the denoiser twice in turn, not at once."""
    width = settings.dtype_bytes
    one = work.text_tokens + work.image_tokens
    decode = _vae_bytes(architecture, VAE_DECODE_ELEMENTS, work.target_pixels, width)
    return _phase(
        {
            "denoiser": _denoiser_bytes(architecture, settings),
            "adapter": settings.adapter_parameters * ADAPTER_BYTES,
            "vae": architecture.vae.parameters * width,
            "activations": max(_denoiser_activations(architecture, settings, one, 0), decode),
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
    # Without autocast (fp32 compute) an NF4 base makes no extra copies.
    mixed = settings.quantize if settings.precision == "bf16" else "none"
    units = kept + WORKING_UNITS[mixed]
    return float(tokens * settings.dtype_bytes * architecture.denoiser.dim * units)


def _vae_bytes(architecture: Architecture, elements: int, pixels: int, width: int) -> float:
    return pixels * width * elements * architecture.vae.base_dim / VAE_BASE_DIM
