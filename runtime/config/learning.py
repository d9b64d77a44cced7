"""The sections of config.yaml that say how the adapter learns: train, optimizer, lr_scheduler, loss."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from runtime.config.values import Argument, Number, Section, Text, Warmup

WORDS = ("auto", "selective")


def as_checkpointing(value: Any) -> Any:
    if not (isinstance(value, bool) or value in WORDS or (isinstance(value, int) and value >= 2)):
        raise ValueError("expected auto, true, false, selective or a number from 2 on")
    return value


Precision = Literal["auto", "no", "bf16"]
Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
]
SigmaSampling = Literal["uniform", "sigmoid", "logit_normal", "shift", "family_shift"]
Weighting = Literal["none", "sigma_sqrt", "cosmap"]
Checkpointing = Annotated[
    Literal["auto", "selective"] | bool | Annotated[int, Field(ge=2, le=1000)],
    BeforeValidator(as_checkpointing),
]
Switch = Literal["auto"] | bool


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
    clip_grad_value: Annotated[Number, Field(gt=0.0)] | None = None
    """Each gradient is clipped to this magnitude instead; then max_grad_norm must be 0. null: off."""
    nonfinite_limit: Annotated[int, Field(ge=1)] = 3
    """The run stops at so many steps in a row whose loss or gradient is not finite; each is left out and recorded."""
    ema_decay: Annotated[Number, Field(gt=0.0, lt=1.0)] | None = None
    """Average the adapter over the steps with this decay, such as 0.99; checkpoints then hold the average, and step
    08 uses it. null: off."""
    mixed_precision: Precision = "auto"
    """Compute dtype of the denoiser. auto: bf16 on an accelerator, no (fp32) on CPU."""
    gradient_checkpointing: Checkpointing = True
    """What of the activations the backward pass makes again. true: each block's; a number: those of so many blocks at
    once, less memory still; selective: each block's but for the outputs of attention, faster; false: nothing. auto:
    the fastest with which the plan fits."""
    cached_modulation: Switch = "auto"
    """Take the modulation of all blocks, a third of the denoiser's weights, from a table of the run's sigmas on disk
    (4.2 MiB a sigma at the published size). auto: on an accelerator, where nothing that is trained touches it."""
    streamed_blocks: Literal["auto"] | Annotated[int, Field(ge=0, le=1000)] = "auto"
    """So many blocks of the frozen denoiser live in host memory and are copied ahead of use. auto: the fewest with
    which the plan fits."""
    compile: Switch = "auto"
    """Compile the blocks. auto: on an accelerator where step 05 found that the compiler works."""
    graphs: Switch = "auto"
    """Record a step for each bucket and text length and replay it, which frees small steps of the time it takes to
    launch kernels. auto: where the device has them, samples are small, and the plan leaves room."""
    deterministic: bool = False
    """Kernels that give the same bits each time, so that a resumed run is bit-equal on an accelerator too; slower.
    On a CPU they do so anyway."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Noise, sigma, order and dropout choices are functions of it."""
    probe_samples: Annotated[int, Field(ge=1)] = 8
    """Training samples whose loss is measured on fixed noise at each checkpoint."""
    probe_draws: Annotated[int, Field(ge=1)] = 4
    """Fixed (sigma, noise) pairs per probe sample."""
    probe_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between measurements of the probe beside those at checkpoints. null: at checkpoints only."""

    @property
    def streamed(self) -> int:
        """Blocks to stream, of a resolved config; none where `auto` was left."""
        return 0 if self.streamed_blocks == "auto" else self.streamed_blocks

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("max_train_steps", "num_epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            seen = "both" if given else "neither"
            raise ValueError(f"saw {seen}, expected exactly one of max_train_steps and num_epochs")
        return self

    @model_validator(mode="after")
    def _streamed_blocks_run_eagerly(self) -> Self:
        faster = [name for name in ("compile", "graphs") if getattr(self, name) is True]
        if faster and self.streamed_blocks not in ("auto", 0):
            raise ValueError(
                f"{faster[0]}: true and streamed_blocks {self.streamed_blocks}, expected one of them; the weights of "
                "a streamed block are elsewhere at each step"
            )
        return self

    @model_validator(mode="after")
    def _one_clipping(self) -> Self:
        if self.clip_grad_value is not None and self.max_grad_norm > 0:
            raise ValueError(
                f"clip_grad_value {self.clip_grad_value:g} requires max_grad_norm: 0, saw {self.max_grad_norm:g}; "
                "gradients are clipped by value or by norm"
            )
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
    warmup_steps: Warmup = None
    """Steps over which the learning rate rises from zero, or their share of the run (0.1). null: 50; constant has
    none."""
    num_cycles: Annotated[int, Field(ge=1)] | None = None
    """How often cosine_with_restarts falls. null: once."""
    power: Annotated[Number, Field(gt=0.0)] | None = None
    """Exponent of polynomial's fall to 1e-7. null: 1."""

    @model_validator(mode="after")
    def _every_key_counts(self) -> Self:
        kind = self.scheduler_type
        unused = {
            "warmup_steps": bool(self.warmup_steps) and kind == "constant",
            "num_cycles": self.num_cycles is not None and kind != "cosine_with_restarts",
            "power": self.power is not None and kind != "polynomial",
        }
        for name in (name for name, idle in unused.items() if idle):
            raise ValueError(f"{name}: {getattr(self, name)} does nothing for {kind}, expected it left out")
        return self


class Loss(Section):
    sigma_sampling: SigmaSampling = "sigmoid"
    """Distribution of the noise level: uniform; sigmoid of a normal; logit_normal, that with logit_mean and
    logit_std; shift, sigmoid's moved towards noise by `shift`; family_shift, by the family's factor for the tokens."""
    logit_mean: Number | None = None
    """Of logit_normal. null: 0; above, more noise."""
    logit_std: Annotated[Number, Field(gt=0.0)] | None = None
    """Of logit_normal. null: 1."""
    shift: Annotated[Number, Field(gt=0.0)] | None = None
    """Of shift: above 1 towards noise."""
    sigma_min: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    """Draws are spread over sigma_min..sigma_max."""
    sigma_max: Annotated[Number, Field(gt=0.0, le=1.0)] = 1.0
    """Draws are spread over sigma_min..sigma_max."""
    sigma_strata: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Of so many consecutive samples, each has its sigma in another equal share of the distribution. null: off."""
    weighting: Weighting = "none"
    """Weight of a sample by its sigma, as SD3's: sigma_sqrt 1/s^2, cosmap 2/(pi (1 - 2 s + 2 s^2))."""
    mask_floor: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.0
    """Where a sample has a mask: the weight of what is black in it; white has 1. 1: masks change nothing."""
    prior_weight: Annotated[Number, Field(gt=0.0)] = 1.0
    """Weight of samples of a regularisation set, which are held to the base's own prediction."""

    @model_validator(mode="after")
    def _every_key_counts(self) -> Self:
        kinds = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "shift": "shift"}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is not None and self.sigma_sampling != kind:
                raise ValueError(f"{name}: {value:g} does nothing for {self.sigma_sampling}, expected {kind}")
        if self.sigma_sampling == "shift" and self.shift is None:
            raise ValueError(
                "sigma_sampling: shift requires shift, say 3.0; family_shift takes the family's own"
            )
        if not self.sigma_min < self.sigma_max:
            raise ValueError(
                f"saw sigma_min {self.sigma_min:g} and sigma_max {self.sigma_max:g}, expected min < max"
            )
        return self
