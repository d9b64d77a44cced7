"""What comes and goes on top of resident weights: bytes of a training step, of sampling, of the VAE.

A denoiser's activations are counted in units of `tokens x dim x dtype`, one hidden-sized tensor. Units of a step were
counted tensor by tensor on a CPU (tests/runtime/planning/test_counted.py) and agree with the peaks that the allocator
of one H200 showed for the published shape (benchmarks/memory_plan.py): 86 units with every block checkpointed, 17
more for each block that is not, at 2416 and 8592 tokens and more, bf16, adapters on attention.

For the VAE, elements per pixel at base_dim 96, and for the text encoder units as above, from peaks on the same machine
(`--encoders`). No XPU was measured.
"""

from math import ceil
from typing import TYPE_CHECKING

from runtime.planning.architecture import Architecture, Denoiser

if TYPE_CHECKING:
    from runtime.planning.estimate import Settings, Work

KEPT = 13  # by a block for its backward pass: inputs of norms, projections and MLP, attention's q, k, v and output
KEPT_CASTS = 4  # fp32 copies of q and k in their norms, where the dtype is another; a compiler keeps none
KEPT_MLP, KEPT_MODULATION = 5, 4  # more of it where adapters are on these
KEPT_DORA, KEPT_DROPOUT = 7, 6  # with adapters on attention
TRANSIENT = 9  # in the backward pass of the block at work
SAMPLING, SAMPLING_MLP = 16, 3.5  # of a block without gradients, and adapters on its MLP
# Plain attention holds fp32 scores [batch, heads, tokens, tokens]: those that the backward pass needs, and on top.
SCORES_TRANSIENT, SCORES_SAMPLING = 1.5, 2.0
TEXT_UNITS = 24  # of the text encoder, vision tower included: 23 at 376 tokens, 25 at 1360
VAE_BASE_DIM = 96
VAE_ENCODE = {"exact": 965, "folded": 580, "tiled": 1352}
VAE_DECODE = {"exact": 1062, "folded": 677, "tiled": 2117}
VAE_FOLDED_WEIGHTS = 0.09 / 0.24  # the last tap of three, and those between frames go
VAE_TILE_PIXELS = 256 * 256
PIXEL_NUMBERS = 6  # of a tiled picture: its own three channels, and the joined ones


def kept_units(settings: "Settings") -> float:
    """Of one block, for its backward pass."""
    casts = KEPT_CASTS if settings.dtype_bytes < 4 and not settings.compiled else 0
    mlp, modulation = "mlp" in settings.targets, "modulation" in settings.targets
    extras = KEPT_DORA * settings.dora + KEPT_DROPOUT * settings.dropout
    return KEPT + casts + KEPT_MLP * mlp + KEPT_MODULATION * modulation + extras * (1 + mlp)


def is_plain(settings: "Settings", batch: int) -> bool:
    """Whether attention over so many samples is products and a softmax, and no operator of its own."""
    return settings.attention == "math" or (settings.attention == "unmasked" and batch > 1)


def step_units(layers: int, settings: "Settings", batch: int) -> float:
    """Hidden-sized tensors per token at the peak of forward and backward through `layers` blocks."""
    blocks = settings.group(layers)  # whose tensors for the backward pass are there at once
    stored = ceil(layers / blocks) if settings.checkpointing is not False else 0
    if settings.checkpointing == "selective" and not is_plain(settings, batch):
        stored += layers - 1  # outputs of attention; the block at work has its own anyway
    return stored + blocks * kept_units(settings) + TRANSIENT


def step_bytes(denoiser: Denoiser, settings: "Settings", work: "Work", *, inputs: int | None = None) -> float:
    """The peak of forward and backward of a micro-batch. `inputs`: of how many blocks these are kept; None: of all."""
    layers = denoiser.layers if inputs is None else inputs
    unit = work.tokens * denoiser.dim * settings.dtype_bytes
    scores = _scores(denoiser, settings, work.batch_size, work.tokens // work.batch_size)
    held = settings.group(layers) + SCORES_TRANSIENT
    units = step_units(layers, settings, work.batch_size)
    return units * unit + held * scores + _unpacked(denoiser, settings)


def sampling_bytes(denoiser: Denoiser, settings: "Settings", tokens: int) -> float:
    """Of one picture, nothing kept."""
    units = (
        SAMPLING + KEPT_CASTS / 2 * (settings.dtype_bytes < 4) + SAMPLING_MLP * ("mlp" in settings.targets)
    )
    scores = SCORES_SAMPLING * _scores(denoiser, settings, 1, tokens)
    return tokens * denoiser.dim * settings.dtype_bytes * units + scores + _unpacked(denoiser, settings)


def _scores(denoiser: Denoiser, settings: "Settings", batch: int, tokens: int) -> float:
    return 4.0 * batch * denoiser.heads * tokens**2 if is_plain(settings, batch) else 0.0


def _unpacked(denoiser: Denoiser, settings: "Settings") -> float:
    """The weight that is dequantized while it is used."""
    return float(denoiser.widest * settings.dtype_bytes) if settings.quantize == "nf4" else 0.0


def text_encoder_bytes(architecture: Architecture, settings: "Settings", tokens: int, width: int) -> float:
    encoder = architecture.text_encoder
    return float(settings.encoded_at_once * tokens * width * encoder.hidden * TEXT_UNITS)


def vae_weights(architecture: Architecture, settings: "Settings", width: int) -> float:
    share = VAE_FOLDED_WEIGHTS if settings.vae == "folded" else 1.0
    return architecture.vae.parameters * width * share


def encode_bytes(architecture: Architecture, settings: "Settings", pixels: int, width: int) -> float:
    return _vae(architecture, settings, VAE_ENCODE, pixels, width)


def decode_bytes(architecture: Architecture, settings: "Settings", pixels: int, width: int) -> float:
    return _vae(architecture, settings, VAE_DECODE, pixels, width)


def _vae(
    architecture: Architecture, settings: "Settings", elements: dict[str, int], pixels: int, width: int
) -> float:
    """Tiles go one after the other, with the copies that frames need; the picture that they join is whole."""
    scale = elements[settings.vae] * architecture.vae.base_dim / VAE_BASE_DIM * width
    if settings.vae != "tiled":
        return pixels * scale
    return min(pixels, VAE_TILE_PIXELS) * scale + pixels * PIXEL_NUMBERS * width
