"""The typed config: the only list of accepted keys, their types, defaults and meaning.

`schemas/config.schema.json` is generated from here (`python -m runtime.config.schema`).
Values are strict: text is never read as a number, nor `true` as 1.
"""

import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

Quantize = Literal["auto", "none", "nf4"]
Device = Literal["auto", "cpu", "xpu", "cuda"]
DEVICES: tuple[str, ...] = get_args(Device)
Precision = Literal["auto", "no", "bf16"]
Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine"]
SigmaSampling = Literal["uniform", "sigmoid", "shift"]

ATTENTION_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
USE_CACHE_REASON = (
    "must be true: without the cache the text encoder (15 GiB) and the denoiser would be resident together, "
    "which no AI PC holds; the cache is filled once by `finetune cache`"
)
# What Windows refuses in a file name; a run made on Linux must be copyable there.
_BAD_NAME = re.compile(r'[\\/:*?"<>|\x00-\x1f]')


def _as_tuple(value: Any) -> Any:
    """YAML and JSON have lists only; the frozen model keeps tuples."""
    return tuple(value) if isinstance(value, list) else value


def _argument(value: Any) -> bool | int | float | tuple[int | float, ...]:
    """Optimizers take flags, numbers and lists of numbers; text would be a number gone wrong."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple) and all(type(item) in (int, float) for item in value):
        return tuple(value)
    raise ValueError("expected a number, true or false, or a list of numbers")


Text = Annotated[str, Field(min_length=1)]
Pixels = Annotated[int, Field(gt=0, le=16384)]
Size = Annotated[tuple[Pixels, Pixels], BeforeValidator(_as_tuple)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_as_tuple)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Argument = Annotated[
    Any,
    PlainValidator(_argument),
    WithJsonSchema({"type": ["boolean", "number", "array"], "items": {"type": "number"}}),
]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Lora(Section):
    r: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the adapter."""
    lora_alpha: Annotated[int, Field(ge=1)] = 16
    """The adapter's output is scaled by lora_alpha / r."""
    lora_dropout: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the adapter's input."""
    init_lora_weights: Literal["gaussian", True] = "gaussian"
    """How lora_A starts; lora_B starts at zero. true: Kaiming, peft's own default."""
    target_modules: Annotated[Texts, Field(min_length=1)] = ATTENTION_TARGETS
    """Names of the linears of each transformer block that get an adapter."""

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _not_one(cls, value: Any) -> Any:
        if value == 1 and value is not True:  # Literal compares by equality, and 1 == True
            raise ValueError("expected 'gaussian' or true")
        return value

    @field_validator("target_modules")
    @classmethod
    def _no_repeats(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("expected each module once")
        return value


class Model(Section):
    pretrained_model_name_or_path: Text
    """The base: a folder in the diffusers layout, a hub id, or external:NAME."""
    quantize: Quantize = "auto"
    """Weights of the frozen denoiser. auto: nf4 on an accelerator and wherever step 06 made it; else, on a
    CPU, only if it wouldn't fit plain."""
    quantize_text_encoder: Quantize = "auto"
    """Weights of the text encoder in the cache phase. auto: nf4 where step 06 made it, else none."""
    lora: Lora = Lora()
    """The adapter that is trained."""


class Processor(Section):
    target_size: Size = (384, 672)
    """Height and width that targets are resized and centre-cropped to."""
    controls_size: Size | None = None
    """Height and width of control images. null: as target_size. The edit pipelines of diffusers and ComfyUI
    take about a megapixel whatever the output's size: near that, an adapter meets there what it was trained on."""
    vl_pixels: Annotated[int, Field(gt=0)] | None = None
    """Largest area in pixels of the control as the text encoder sees it: as fitted to controls_size, shrunk to
    this where larger, never enlarged. The edit pipelines of diffusers and ComfyUI enlarge it too, so a small
    controls_size means fewer image tokens in training than there: validate at the size of use. null: the
    family's published value."""


class Data(Section):
    batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples per micro-batch; all of a micro-batch have the same shapes."""
    shuffle: bool = True
    """Draw a new order for each epoch, from train.seed and the epoch alone."""
    caption_dropout_rate: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.0
    """Share of samples trained with the empty caption."""
    processor: Processor = Processor()
    """Sizes that images are brought to."""


class CacheDevices(Section):
    text_encoder: Device = "auto"
    """Where the text encoder runs in the cache phase. auto: hardware.device."""
    vae: Device = "auto"
    """Where the VAE runs in the cache phase. auto: hardware.device."""


class Cache(Section):
    use_cache: Literal[True] = True
    """Mandatory: embeddings and latents are computed once, so that the fit holds the denoiser only."""
    cache_dir: Text = "cache"
    """Folder of the cache, relative to the workspace."""
    devices: CacheDevices = CacheDevices()
    """Devices of the encoders."""

    @field_validator("use_cache", mode="before")
    @classmethod
    def _mandatory(cls, value: Any) -> Any:
        if value is not True:
            raise ValueError(USE_CACHE_REASON)
        return value


class Train(Section):
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {name: {"type": "integer"}}, "required": [name]}
                for name in ("max_train_steps", "num_epochs")
            ]
        }
    )

    max_train_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps (optimizer updates) after which the run stops exactly. Exactly one of this and num_epochs."""
    num_epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the training samples. Exactly one of this and max_train_steps."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per step."""
    checkpointing_steps: Annotated[int, Field(ge=1)] = 100
    """Steps between checkpoints."""
    checkpoints_total_limit: Annotated[int, Field(ge=1)] | None = None
    """Number of plain checkpoints to keep, the oldest go first. null: all."""
    max_grad_norm: Annotated[Number, Field(ge=0.0)] = 1.0
    """Gradients are clipped to this norm. 0: off."""
    mixed_precision: Precision = "auto"
    """Compute dtype of the denoiser. auto: bf16 on an accelerator, no (fp32) on CPU."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: a third more time for far less memory."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Noise, sigma, order and dropout choices are functions of it."""
    probe_samples: Annotated[int, Field(ge=1)] = 8
    """Training samples whose loss is measured on fixed noise at each checkpoint."""
    probe_draws: Annotated[int, Field(ge=1)] = 4
    """Fixed (sigma, noise) pairs per probe sample."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("max_train_steps", "num_epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            seen = "both" if given else "neither"
            raise ValueError(f"saw {seen}, expected exactly one of max_train_steps and num_epochs")
        return self


class OptimizerArguments(Section):
    """Keyword arguments of the optimizer's class; those beyond lr go to it as they are."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Argument] = Field(init=False)

    lr: Annotated[Number, Field(gt=0.0)] = 1e-4
    """Peak learning rate."""


class Optimizer(Section):
    class_path: Text = "auto"
    """Dotted path of the optimizer's class. auto: torch.optim.AdamW."""
    init_args: OptimizerArguments = OptimizerArguments()
    """Its keyword arguments."""

    @field_validator("class_path")
    @classmethod
    def _dotted(cls, value: str) -> str:
        parts = value.split(".")
        if value != "auto" and (len(parts) < 2 or not all(part.isidentifier() for part in parts)):
            raise ValueError("expected auto or a dotted path such as torch.optim.AdamW")
        return value


class LrScheduler(Section):
    scheduler_type: Schedule = "cosine"
    """Shape of the learning rate over the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    """Steps over which the learning rate rises from zero; constant has none."""


class Loss(Section):
    sigma_sampling: SigmaSampling = "sigmoid"
    """Distribution of the noise level: uniform, sigmoid of a normal, or that shifted by the token count."""


class Logging(Section):
    output_dir: Text = "outputs"
    """Folder of all runs, relative to the workspace."""
    tracker_project_name: Text = "edit-lora"
    """Folder of this project's runs v0, v1, ... in output_dir."""

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
    """Control images, relative to the workspace."""


class Validation(Section):
    num_inference_steps: Annotated[int, Field(ge=2, le=1000)] = 20
    """Steps of the sampler; the published schedule, stretched to a last sigma of 0.02, has no single step."""
    guidance_scale: Annotated[Number, Field(ge=1.0)] = 1.0
    """True classifier-free guidance; above 1 every step runs the denoiser twice. 1: off."""
    negative_prompt: str = " "
    """What guidance moves away from; encoded in the cache when guidance_scale is above 1."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Base and adapter are sampled from the same noise, a function of it."""
    samples: Annotated[tuple[ValidationSample, ...], BeforeValidator(_as_tuple)] = ()
    """Prompts of your own to sample beside the held-out pairs."""

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
    def _separate_folders(self) -> Self:
        if self.cache.cache_dir.strip("./") == self.logging.output_dir.strip("./"):
            raise ValueError("cache.cache_dir and logging.output_dir must differ")
        return self
