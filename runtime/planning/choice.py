"""What an `auto` became, and the memory of a config in which each has become something."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.config.learning import Checkpointing
from runtime.config.model import Config
from runtime.data.manifest import Manifest
from runtime.planning import architecture, estimate, work
from runtime.planning.architecture import Architecture
from runtime.planning.budget import Budget
from runtime.planning.estimate import Phase, Settings, Work
from runtime.quantize.made import Made

MASKED_BACKENDS = ("efficient_attention", "cudnn_attention", "overrideable")
"""Kernels of attention that take a mask and keep no matrix of scores; on a CPU flash does too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Case:
    """A config for a dataset, a base and a budget."""

    config: Config
    base: Architecture
    found: Budget
    largest: Work
    kept: frozenset[str] = frozenset()
    """Linears of blocks that NF4 leaves plain."""
    text_encoder_kept: frozenset[str] = frozenset()
    """As step 06 left them: no key of the config says what it keeps of the text encoder."""
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        config: Config,
        listed: Manifest,
        base: Architecture,
        found: Budget,
        quantized: Mapping[str, Made] | None = None,
    ) -> "Case":
        """`quantized`: by component, what step 06 made."""
        lies = {name: frozenset(it.kept) for name, it in (quantized or {}).items() if it.usable}
        kept = lies.get("transformer", base.denoiser.kept(config.model.nf4_keep))
        largest = work.largest(config, listed, base)
        return cls(config, base, found, largest, kept, lies.get("text_encoder", frozenset()))

    def settings(self, choices: Mapping[str, Choice], **changes: Any) -> Settings:
        """Each `auto` as in `choices`; what is not chosen yet counts as off."""
        config, lora, train = self.config, self.config.model.lora, self.config.train

        def value(key: str, other: Any) -> Any:
            return choices[key].value if key in choices else other

        made = Settings(
            device=self.found.device,
            quantize=value("model.quantize", "none"),
            kept=self.kept,
            precision=value("train.mixed_precision", "no"),
            checkpointing=value("train.gradient_checkpointing", self.least_checkpointing()),
            adapter_parameters=self._once("parameters", self._adapter_parameters),
            targets=self._once("targets", self._targets),
            dora=lora.use_dora,
            dropout=lora.lora_dropout > 0,
            accumulation=train.gradient_accumulation_steps,
            optimizer=value("optimizer.class_path", "torch.optim.AdamW"),
            ema=train.ema_decay is not None,
            text_encoder_device=value("cache.devices.text_encoder", self.found.device),
            vae_device=value("cache.devices.vae", self.found.device),
            text_encoder_quantize=value("model.quantize_text_encoder", "none"),
            text_encoder_kept=self.text_encoder_kept,
            text_encoder_dtype=value("cache.dtypes.text_encoder", "bf16"),
            vae_dtype=value("cache.dtypes.vae", "bf16"),
            vae=config.cache.vae,
            encoded_at_once=value("cache.batch_size", 1),
            samples=config.validation.sample_steps is not None,
            cached_modulation=value("train.cached_modulation", False),
            streamed_blocks=value("train.streamed_blocks", 0),
            compiled=value("train.compile", False),
            graphs=value("train.graphs", False),
            attention=self.attention(),
        )
        return replace(made, **changes)

    def phases(self, choices: Mapping[str, Choice], **changes: Any) -> dict[str, Phase]:
        return estimate.phases(self.base, self.settings(choices, **changes), self.largest)

    def spare_gib(self, choices: Mapping[str, Choice], *names: str, **changes: Any) -> float:
        """What the tightest of the named phases leaves; of all, where none is named."""
        phases = self.phases(choices, **changes)
        return min(self.found.spare_gib(phases[name]) for name in names or phases)

    def least_checkpointing(self) -> Checkpointing:
        """As configured, or what `auto` falls back on."""
        mode = self.config.train.gradient_checkpointing
        return True if mode == "auto" else mode

    def attention(self) -> str:
        """fused; math, where only plain attention works or is left; unmasked, where it is what a mask leaves."""
        probe = (self.found.probes or {}).get("attention-backends", {})
        facts = probe.get("facts")  # none where the probe ended before it knew any
        works = {name for name, good in facts.items() if good is True} if facts else None
        if works is not None and works <= {"math"}:
            return "math"
        if self.found.device == "cpu":
            return "fused"
        masked = works is None or bool(works & set(MASKED_BACKENDS))
        return "fused" if masked and not self.config.train.deterministic else "unmasked"

    def touched(self) -> list[str]:
        """Linears with an adapter that would change what the modulations say at a sigma."""
        names: list[str] = self._once("names", self._names)
        return self.base.family.move_modulation(names)

    def _names(self) -> list[str]:
        return self.base.denoiser.targeted(self.config.model.lora.target_modules)

    def _adapter_parameters(self) -> int:
        lora = self.config.model.lora
        return architecture.adapter_parameters(
            self.base.denoiser, lora.r, lora.target_modules, dora=lora.use_dora
        )

    def _targets(self) -> frozenset[str]:
        kinds = {"attention": ".attn.", "mlp": "_mlp.", "modulation": "_mod."}
        names: list[str] = self._once("names", self._names)
        return frozenset(kind for kind, mark in kinds.items() if any(mark in name for name in names))

    def _once(self, name: str, make: Any) -> Any:
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]


def given(value: Any) -> Choice | None:
    if value is None or value == "auto":
        return None
    return Choice(value=list(value) if isinstance(value, tuple) else value, reason="as configured")
