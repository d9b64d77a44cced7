"""GiB that each phase holds on the device and in host memory, component by component, from sizes alone.

What the components are made of: weights by their number and width, activations as `activations` counts them, and a
process as it was measured. Rows of the table of modulations and cached samples that are mapped from disk are not
counted: the system takes such pages back when it needs them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.files import GIB
from runtime.memory import spans
from runtime.planning import activations
from runtime.planning.architecture import Architecture, Numbers

ADAPTER_BYTES = 4  # adapters and their gradients are fp32
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # weight, 8-bit scale per 64, fp32 scale per 256 of those
# Python and torch themselves. On a CPU 0.55 to 0.67 measured; with CUDA 1.7 resident after 10 steps (H200).
PROCESS_GIB, ACCELERATOR_PROCESS_GIB = 0.6, 1.7
READ_AHEAD_GIB = 0.25  # of cached samples, runtime.training.batches.KEPT_BYTES
# benchmarks/memory_plan.py on one H200, 21 cases: within 3 % of the peak allocated; the rest is measured there too.
WORKSPACE_GIB = 0.08  # of the matrix library, which torch counts as allocated
# Above the peak: what the allocator reserves and doesn't use (of the peak: 1 to 7 % at rank 16, up to 19 % at rank 64;
# at most 10 % where its segments may grow), and the device's context, which no allocator counts.
RESERVE_SHARE, CONTEXT_GIB = 0.15, 0.86
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
UPDATE_BYTES = 4  # for a moment in an update, where an accelerator makes that of all parameters at once

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
    entry_bytes: float = 0.0
    """Of all cached samples that a fit may keep in memory."""
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
    checkpointing: bool | int | str
    """train.gradient_checkpointing."""
    adapter_parameters: int
    optimizer: str
    text_encoder_device: str
    vae_device: str
    kept: frozenset[str] = frozenset()
    """Linears of blocks that NF4 leaves plain, by name."""
    targets: frozenset[str] = frozenset({"attention"})
    """Of attention, mlp, modulation: which of them have adapters."""
    dora: bool = False
    dropout: bool = False
    accumulation: int = 1
    text_encoder_quantize: str = "none"
    text_encoder_kept: frozenset[str] = frozenset()
    """Its linears that NF4 leaves plain, by name."""
    text_encoder_dtype: str = "bf16"
    vae_dtype: str = "bf16"
    vae: str = "exact"
    encoded_at_once: int = 1
    """Samples that an encoder takes at once in the cache phase."""
    ema: bool = False
    samples: bool = False
    """Whether pictures are painted in the fit."""
    cached_modulation: bool = False
    streamed_blocks: int = 0
    compiled: bool = False
    graphs: bool = False
    attention: str = "fused"
    """math: with a matrix of scores; unmasked: with one where a batch needs a mask."""

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.precision]

    def group(self, layers: int) -> int:
        """Blocks that are recomputed at once; without checkpointing all are there at once."""
        if self.checkpointing is False:
            return layers
        return 1 if isinstance(self.checkpointing, bool | str) else min(self.checkpointing, layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`components_gib`, of the device, holds what stays resident, and `activations`, on top at the peak.

    `host_gib` is what is in host memory beside; nothing where the device is the CPU, whose memory that is.
    """

    components_gib: dict[str, float]
    host_gib: dict[str, float] = field(default_factory=dict)
    reserve_gib: float = 0.0
    """Above the peak: the allocator's unused rest, and the device's context."""

    @property
    def resident_gib(self) -> float:
        return sum(gib for name, gib in self.components_gib.items() if name != "activations")

    @property
    def peak_gib(self) -> float:
        return sum(self.components_gib.values())

    @property
    def needed_gib(self) -> float:
        """On the device."""
        return self.peak_gib + self.reserve_gib

    @property
    def host_peak_gib(self) -> float:
        return sum(self.host_gib.values())

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
    """One encoder after the other, so the larger counts: of those on the plan's device, and of those in host memory."""
    passes = {"device": [{"activations": 0.0}], "host": [dict[str, float]()]}
    for where, parts in (
        (settings.text_encoder_device, _text_pass(architecture, settings, work)),
        (settings.vae_device, _picture_pass(architecture, settings, work)),
    ):
        passes["device" if where == settings.device else "host"].append(parts)
    largest = {name: max(found, key=lambda parts: sum(parts.values())) for name, found in passes.items()}
    encoder, width = architecture.text_encoder, DTYPE_BYTES[settings.text_encoder_dtype]
    # Its largest tensor, as it comes from disk in bf16, and a copy where that has to become another dtype.
    loading = encoder.vocabulary * encoder.hidden * (2 if width == 2 else 2 + width)
    host = {name.replace("activations", "encoding"): size for name, size in largest["host"].items()}
    return _phase(largest["device"], {**host, "loading": loading}, settings)


def _text_pass(architecture: Architecture, settings: Settings, work: Work) -> dict[str, float]:
    width, tokens = DTYPE_BYTES[settings.text_encoder_dtype], work.text_tokens
    return {
        "text_encoder": _text_encoder(architecture, settings, width),
        "activations": activations.text_encoder_bytes(architecture, settings, tokens, width),
    }


def _picture_pass(architecture: Architecture, settings: Settings, work: Work) -> dict[str, float]:
    """A batch encoded, and one picture decoded as evidence."""
    width = DTYPE_BYTES[settings.vae_dtype]
    pixels = settings.encoded_at_once * max(work.target_pixels, work.control_pixels)
    encoding = activations.encode_bytes(architecture, settings, pixels, width)
    decoding = activations.decode_bytes(architecture, settings, work.target_pixels, width)
    return {
        "vae": activations.vae_weights(architecture, settings, width),
        "activations": max(encoding, decoding),
    }


def _text_encoder(architecture: Architecture, settings: Settings, width: int) -> float:
    encoder = architecture.text_encoder
    nf4 = encoder.packed or settings.text_encoder_quantize == "nf4"
    packed = encoder.quantizable - encoder.kept_weights(settings.text_encoder_kept) if nf4 else 0
    return packed * NF4_BYTES + (encoder.parameters - packed) * width


def fit_phase(architecture: Architecture, settings: Settings, work: Work) -> Phase:
    trained = settings.adapter_parameters
    state = OPTIMIZER_BYTES.get(settings.optimizer.rpartition(".")[2], ADAM_BYTES)
    painting = _painting(architecture, settings, work) if settings.samples else 0.0
    stepping = _step(architecture, settings, work)
    components = {
        "denoiser": _denoiser_bytes(architecture, settings),
        **_rows(architecture, settings, work.batch_size),
        "adapter": trained * ADAPTER_BYTES,
        "gradients": trained * ADAPTER_BYTES,
        "optimizer": trained * state,
        **({"ema": trained * ADAPTER_BYTES} if settings.ema else {}),
        "activations": max(stepping, painting - trained * ADAPTER_BYTES),
    }
    # A recorded step has a pool of its own beside that of what runs eagerly.
    graphs = stepping if settings.graphs else 0.0
    ahead = min(READ_AHEAD_GIB * GIB, work.entry_bytes)
    host = {
        **_streamed(architecture, settings),
        "read_ahead": ahead,
        "loading": _loading(architecture, settings),
    }
    return _phase(components, host, settings, more=graphs)


def _step(architecture: Architecture, settings: Settings, work: Work) -> float:
    """Above weights and gradients. Inputs of blocks go as gradients come: only accumulation holds all of both."""
    denoiser, gradients = architecture.denoiser, settings.adapter_parameters * ADAPTER_BYTES
    whole = activations.step_bytes(denoiser, settings, work)
    if settings.accumulation > 1:
        return whole
    last = activations.step_bytes(denoiser, settings, work, inputs=1)
    update = 0 if settings.device == "cpu" else settings.adapter_parameters * UPDATE_BYTES
    return max(whole - gradients, last, update)


def _painting(architecture: Architecture, settings: Settings, work: Work) -> float:
    """Between two steps, with nothing kept for a backward pass: a picture sampled, then the VAE, loaded to decode."""
    sampling = activations.sampling_bytes(architecture.denoiser, settings, work.one_painted)
    if settings.vae_device != settings.device:
        return sampling
    width = DTYPE_BYTES[settings.vae_dtype]
    decode = activations.decode_bytes(architecture, settings, work.pixels_painted, width)
    return max(sampling, activations.vae_weights(architecture, settings, width) + decode)


def validate_phase(architecture: Architecture, settings: Settings, work: Work) -> Phase:
    """Sampling one image, then decoding it; guidance runs the denoiser twice in turn, not at once."""
    width = settings.dtype_bytes
    decode = activations.decode_bytes(architecture, settings, work.pixels_painted, width)
    sampling = activations.sampling_bytes(architecture.denoiser, settings, work.one_painted)
    components = {
        "denoiser": _denoiser_bytes(architecture, settings),
        **_rows(architecture, settings, 1),
        "adapter": settings.adapter_parameters * ADAPTER_BYTES,
        "vae": activations.vae_weights(architecture, settings, width),
        "activations": max(sampling, decode),
    }
    host = {**_streamed(architecture, settings), "loading": _loading(architecture, settings)}
    return _phase(components, host, settings)


def _phase(
    components: Mapping[str, float], host: Mapping[str, float], settings: Settings, *, more: float = 0.0
) -> Phase:
    """From bytes; `more` is reserved, but nothing that torch counts as allocated."""
    here = {name: size / GIB for name, size in components.items()}
    beside = {name: size / GIB for name, size in host.items() if size}
    if settings.device == "cpu":  # what was loaded is the component itself
        kept = {name: gib for name, gib in beside.items() if name != "loading"}
        return Phase(components_gib={**here, **kept, "process": PROCESS_GIB})
    here = {**here, "workspace": WORKSPACE_GIB}
    peak = sum(here.values())
    return Phase(
        components_gib=here,
        host_gib={"process": ACCELERATOR_PROCESS_GIB, **beside},
        reserve_gib=RESERVE_SHARE * peak + CONTEXT_GIB + more / GIB,
    )


def _denoiser_bytes(architecture: Architecture, settings: Settings) -> float:
    """What is resident; of blocks that are streamed, those in flight."""
    denoiser, live = architecture.denoiser, not settings.cached_modulation
    layers, streamed = denoiser.layers, min(settings.streamed_blocks, denoiser.layers)
    in_flight = spans.in_flight(layers, streamed, settings.group(layers)) if streamed else 0
    blocks = min(layers, layers - streamed + in_flight)
    outside = denoiser.outside(modulation=live) * settings.dtype_bytes
    more, away = _more(architecture, settings), spans.picked(layers, streamed) if streamed else ()
    kept = sum(size for index, size in enumerate(more) if index not in away)
    kept += in_flight * max((more[index] for index in away), default=0.0)
    return blocks * _block_bytes(denoiser.block(modulation=live), settings) + outside + kept


def _more(architecture: Architecture, settings: Settings) -> list[float]:
    """Of each block, the bytes that linears take more than as NF4, where they are kept plain."""
    denoiser = architecture.denoiser
    if settings.quantize != "nf4":
        return [0.0] * denoiser.layers
    kept = denoiser.kept_weights(settings.kept, modulation=not settings.cached_modulation)
    return [weights * (settings.dtype_bytes - NF4_BYTES) for weights in kept]


def _block_bytes(block: Numbers, settings: Settings) -> float:
    width = NF4_BYTES if settings.quantize == "nf4" else settings.dtype_bytes
    return block.packable * width + block.plain * settings.dtype_bytes


def _rows(architecture: Architecture, settings: Settings, batch: int) -> dict[str, float]:
    """Of the table of modulations, those of a micro-batch."""
    if not settings.cached_modulation:
        return {}
    denoiser = architecture.denoiser
    rows = batch * (2 if denoiser.control_rows else 1)
    return {"modulation_rows": float(rows * denoiser.row_numbers * settings.dtype_bytes)}


def _streamed(architecture: Architecture, settings: Settings) -> dict[str, float]:
    """All of their bytes stay in host memory, in pinned allocations."""
    block = architecture.denoiser.block(modulation=not settings.cached_modulation)
    size, count = _block_bytes(block, settings), settings.streamed_blocks
    if not count:
        return {}
    more = _more(architecture, settings)
    sizes = [round(size + more[index]) for index in spans.picked(architecture.denoiser.layers, count)]
    return {"streamed_blocks": float(spans.host_bytes(sizes))}


def _loading(architecture: Architecture, settings: Settings) -> float:
    """The largest tensor, as it comes from disk in bf16, and what becomes of it."""
    largest = max(a * b for a, b in architecture.denoiser.block_linears.values())
    return float(largest * (2 + settings.dtype_bytes))
