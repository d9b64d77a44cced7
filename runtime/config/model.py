"""The typed config: accepted keys, their types, defaults and meaning; `learning` has those of train to loss.

`schemas/config.schema.json` is generated from here (`python -m runtime.config.schema`).
Values are strict: text is never read as a number, nor `true` as 1.
"""

import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from runtime.config.learning import Loss, LrScheduler, Optimizer, Switch, Train
from runtime.config.values import Colour, Number, Section, Size, Targets, Text, Texts, as_tuple

Quantize = Literal["auto", "none", "nf4"]
Device = Literal["auto", "cpu", "xpu", "cuda"]
DEVICES: tuple[str, ...] = get_args(Device)
ControlsResize = Literal["cover", "area", "keep"]
EncoderDtype = Literal["auto", "fp32", "bf16"]
VaeMode = Literal["exact", "folded", "tiled"]
Tracker = Literal[
    "tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab"
]

ATTENTION_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
USE_CACHE_REASON = (
    "must be true: without the cache the text encoder (15 GiB) and the denoiser would be resident together, "
    "which no AI PC holds; the cache is filled once by `finetune cache`"
)
# What Windows refuses in a file name; a run made on Linux must be copyable there.
_BAD_NAME = re.compile(r'[\\/:*?"<>|\x00-\x1f]')


class Lora(Section):
    r: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the adapter."""
    lora_alpha: Annotated[int, Field(ge=1)] = 16
    """The adapter's output is scaled by lora_alpha / r, with use_rslora by lora_alpha / sqrt(r)."""
    lora_dropout: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the adapter's input."""
    init_lora_weights: Literal["gaussian", True] = "gaussian"
    """How lora_A starts; lora_B starts at zero. true: Kaiming, peft's own default."""
    target_modules: Targets = ATTENTION_TARGETS
    """Linears that get an adapter: a list of names (to_q) and patterns (transformer_blocks.1*.attn.to_*); or
    attention (both streams), attention+mlp, or all-linear (the modulations too) of each transformer block."""
    use_dora: bool = False
    """DoRA: the length of each row of the weight is learned too. Slower, and takes more memory."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r), so that a higher rank is not a weaker adapter."""
    pretrained_weight: Text | None = None
    """Start from this adapter, in any common naming, with fresh optimizer state: a .safetensors file or its folder,
    in the workspace, absolute, or external:NAME. Its rank may be smaller than r. null: start from nothing."""

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _not_one(cls, value: Any) -> Any:
        if value == 1 and value is not True:  # Literal compares by equality, and 1 == True
            raise ValueError("expected 'gaussian' or true")
        return value


class Model(Section):
    pretrained_model_name_or_path: Text
    """The base: a folder in the diffusers layout, a hub id, or external:NAME."""
    transformer_weight: Text | None = None
    """Weights of the denoiser instead of the base's own: a single file, a shard, an index or a folder, in the
    workspace, absolute, or external:NAME. With nf4 they are quantized while loading; step 06 leaves them out."""
    quantize: Quantize = "auto"
    """Weights of the frozen denoiser. auto: nf4 on an accelerator and wherever step 06 made it; else, on a
    CPU, only if it wouldn't fit plain."""
    nf4_keep: Texts = ()
    """Linears of the denoiser that NF4 leaves in train.mixed_precision, by name with * and ?: transformer_blocks.0.*.
    finetune quantize keeps them (--keep goes before), and so does quantizing while loading."""
    quantize_text_encoder: Quantize = "auto"
    """Weights of the text encoder in the cache phase. auto: nf4 where step 06 made it, else none."""
    lora: Lora = Lora()
    """The adapter that is trained."""


class Processor(Section):
    target_size: Size = (384, 672)
    """Height and width that targets are resized and centre-cropped to; with buckets, their area. What a dataset
    file says (resolution) wins."""
    enable_bucket: bool = False
    """Aspect buckets: each target keeps about its aspect, at about the area of target_size."""
    bucket_no_upscale: bool = False
    """With buckets, a target smaller than that area keeps its size, cut to the family's multiple."""
    controls_size: Size | None = None
    """Height and width of control images. null: the size of their target. The edit pipelines of diffusers and
    ComfyUI take about a megapixel whatever the output's size: near that, an adapter meets there what it was
    trained on."""
    controls_resize: ControlsResize = "cover"
    """cover: to exactly controls_size; area: aspect kept, at about the area of controls_size; keep: not resized
    but where larger than that area, cut to the family's multiple."""
    background: Colour = (255, 255, 255)
    """Red, green and blue behind transparent pixels, for families without an alpha channel."""
    vl_pixels: Annotated[int, Field(gt=0)] | None = None
    """Largest area in pixels of the control as the text encoder sees it: as fitted to controls_size, shrunk to
    this where larger, never enlarged. The edit pipelines of diffusers and ComfyUI enlarge it too, so a small
    controls_size means fewer image tokens in training than there: validate at the size of use. null: the
    family's published value."""


class Data(Section):
    batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples per micro-batch; all of a micro-batch have the same shapes. What a dataset file says wins."""
    num_workers: Annotated[int, Field(ge=0, le=32)] = 1
    """Threads that read cached samples ahead of the step; 0: read when the step asks."""
    shuffle: bool = True
    """Draw a new order for each epoch, from train.seed and the epoch alone."""
    caption_dropout_rate: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.0
    """Share of samples trained with the empty caption."""
    max_prompt_tokens: Annotated[int, Field(ge=8, le=4096)] = 1024
    """Longest prompt, without template and images; what is over is cut, and said. The published pipelines' limit."""
    processor: Processor = Processor()
    """Sizes that images are brought to."""


class CacheDevices(Section):
    text_encoder: Device = "auto"
    """Where the text encoder runs in the cache phase. auto: hardware.device."""
    vae: Device = "auto"
    """Where the VAE runs in the cache phase. auto: hardware.device."""


class CacheDtypes(Section):
    text_encoder: EncoderDtype = "auto"
    """Precision of the text encoder, part of the cache's key. auto: bf16 on an accelerator, fp32 on a
    CPU; bf16 there halves its memory."""
    vae: EncoderDtype = "auto"
    """Precision of the VAE, part of the cache's key. auto: bf16 on an accelerator, fp32 on a CPU."""


CacheBatch = Literal["auto"] | Annotated[int, Field(ge=1, le=256)]


class Cache(Section):
    use_cache: Literal[True] = True
    """Mandatory: embeddings and latents are computed once, so that the fit holds the denoiser only."""
    cache_dir: Text = "cache"
    """Folder of the cache, relative to the workspace."""
    devices: CacheDevices = CacheDevices()
    """Devices of the encoders."""
    dtypes: CacheDtypes = CacheDtypes()
    """Precisions of the encoders."""
    vae: VaeMode = "exact"
    """How the VAE runs, in the cache phase and wherever a picture is painted; part of the cache's key. exact: bit
    for bit diffusers'. folded: its convolutions as 2D ones, 1.6 times as fast in two thirds of the memory, equal to
    rounding. tiled: in tiles of 256 pixels, for pictures that fit no other way; slower, and some percent off."""
    batch_size: CacheBatch = "auto"
    """Samples that an encoder takes at once, and the most that a kill costs: auto, or a number up to 256. auto: as
    many of 1, 2, 4, 8 as fit; 1 on a CPU."""

    @field_validator("use_cache", mode="before")
    @classmethod
    def _mandatory(cls, value: Any) -> Any:
        if value is not True:
            raise ValueError(USE_CACHE_REASON)
        return value


class Logging(Section):
    output_dir: Text = "outputs"
    """Folder of all runs, relative to the workspace."""
    tracker_project_name: Text = "edit-lora"
    """Folder of this project's runs v0, v1, ... in output_dir."""
    report_to: Annotated[tuple[Tracker, ...], BeforeValidator(as_tuple)] = ("tensorboard",)
    """Trackers that get the numbers too, by accelerate's names; tensorboard's files lie in the run's folder. []: none.
    Keys and addresses of a service come from its own login or environment, never from here."""

    @field_validator("output_dir")
    @classmethod
    def _inside(cls, value: str) -> str:
        path = PurePosixPath(value.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or PureWindowsPath(value).drive:
            raise ValueError("expected a folder inside the workspace; the gates find the runs there")
        return value

    @field_validator("tracker_project_name")
    @classmethod
    def _one_folder(cls, value: str) -> str:
        if _BAD_NAME.search(value) or value != value.strip() or value.endswith("."):
            raise ValueError(
                'expected a folder name without \\ / : * ? " < > | and no dot or space at its end'
            )
        return value


class ValidationSample(Section):
    prompt: Text
    """What to ask for."""
    images: Texts = Field(min_length=1)
    """Control images, relative to the workspace; those of a prompt file are relative to it."""
    size: Size | None = None
    """Height and width to paint, multiples of the family's. null: as for a target of the first control's size."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """null: validation.seed."""
    num_inference_steps: Annotated[int, Field(ge=2, le=1000)] | None = None
    """null: validation.num_inference_steps."""
    negative_prompt: Text | None = None
    """null: validation.negative_prompt."""


class Validation(Section):
    num_inference_steps: Annotated[int, Field(ge=2, le=1000)] = 20
    """Steps of the sampler; the published schedule, stretched to a last sigma of 0.02, has no single step."""
    guidance_scale: Annotated[Number, Field(ge=1.0)] = 1.0
    """True classifier-free guidance; above 1 every step runs the denoiser twice. 1: off."""
    negative_prompt: str = " "
    """What guidance moves away from; encoded in the cache when guidance_scale is above 1."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Base and adapter are sampled from the same noise, a function of it."""
    samples: Annotated[tuple[ValidationSample, ...], BeforeValidator(as_tuple)] = ()
    """Prompts of your own to sample beside the held-out pairs."""
    prompt_file: Text | None = None
    """More of them, in the workspace, absolute, or external:NAME: a .jsonl with the keys of validation.samples, or
    lines of musubi-tuner's form, `a prompt --ci control.png --w 672 --h 384`."""
    sample_steps: Annotated[int, Field(ge=1)] | None = None
    """Paint the prompts, else the first held-out samples, in the fit: at its start, every so many steps, and at
    its end. What is trained stays the same, bit for bit. null: never."""

    @model_validator(mode="after")
    def _guidance_has_negative(self) -> Self:
        if self.guidance_scale > 1 and not self.negative_prompt:
            raise ValueError(
                f"guidance_scale {self.guidance_scale:g} requires negative_prompt, saw an empty text; "
                "the published pipeline uses one space"
            )
        return self


class Hardware(Section):
    device: Device = "auto"
    """Where the denoiser runs. auto: the accelerator if there is one, else the CPU."""
    memory_limit_gib: Annotated[Number, Field(gt=0.0)] | None = None
    """What a run may fill, on the device and in the host's RAM, where they are one together: the plan keeps to it, and
    the device's allocator is held to it where the backend can (CUDA, XPU). null: what the machine offers."""
    unified_memory: Switch = "auto"
    """Device and host share one memory, so a plan adds up what is in both. auto: as torch or step 01 say of the
    device."""


class Config(Section):
    """config.yaml of a workspace."""

    model: Model
    """The base and the adapter."""
    data: Data = Data()
    """How samples become micro-batches."""
    cache: Cache = Cache()
    """Embeddings and latents on disk."""
    train: Train
    """Length, precision and memory of the fit."""
    optimizer: Optimizer = Optimizer()
    """What updates the adapter."""
    lr_scheduler: LrScheduler = LrScheduler()
    """Learning rate over the run."""
    loss: Loss = Loss()
    """The training objective."""
    logging: Logging = Logging()
    """Where runs go."""
    validation: Validation = Validation()
    """How base and adapter are compared."""
    hardware: Hardware = Hardware()
    """The device."""
    resume: Text | None = None
    """Continue a run: latest, or a checkpoint folder. null: start anew."""

    @model_validator(mode="after")
    def _no_dropout_in_a_recording(self) -> Self:
        if self.train.graphs is True and self.model.lora.lora_dropout > 0:
            raise ValueError(
                f"train.graphs: true and model.lora.lora_dropout {self.model.lora.lora_dropout:g}, expected one of "
                "them; a recorded step draws nothing anew"
            )
        return self

    @model_validator(mode="after")
    def _separate_folders(self) -> Self:
        if self.cache.cache_dir.strip("./") == self.logging.output_dir.strip("./"):
            raise ValueError("cache.cache_dir and logging.output_dir must differ")
        return self
