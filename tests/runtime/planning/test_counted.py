"""The plan against the tensors of real steps, counted on a CPU: the product's own modules on the embedded base."""

import contextlib
import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from runtime import device  # noqa: E402
from runtime.config.model import Lora  # noqa: E402
from runtime.families import registry  # noqa: E402
from runtime.families.base import Conditioning  # noqa: E402
from runtime.files import GIB  # noqa: E402
from runtime.memory import checkpointing, modulation  # noqa: E402
from runtime.planning import activations, architecture, estimate  # noqa: E402
from runtime.planning.estimate import Settings, Work  # noqa: E402
from runtime.training import trainables  # noqa: E402
from runtime.training.objective import Predictor  # noqa: E402

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LATENT, TEXT, LAYERS = 32, 48, 5  # latent pixels a side, tokens, blocks
IMAGE_TOKENS = (LATENT // 2) ** 2
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TOLERANCE = 0.05
PLAIN = Settings(
    device="cpu",
    quantize="none",
    precision="no",
    checkpointing=True,
    adapter_parameters=0,
    optimizer="torch.optim.SGD",
    text_encoder_device="cpu",
    vae_device="cpu",
)


def _live() -> Any:
    spec = importlib.util.spec_from_file_location("live", BENCHMARKS / "live.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Live


Live = _live()


@pytest.fixture(scope="module")
def base() -> Path:
    from runtime import demo

    return Path(next(iter(demo.__path__))) / "base"


def step(denoiser: Any, family: Any, dtype: Any, *, batch: int, controls: int, grad: bool = True) -> Any:
    """Live tensors of forward and backward, or of one prediction; parameters are known."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(dtype)

    noisy, sigma = drawn(batch, 16, LATENT, LATENT), torch.full((batch,), 0.5)
    pictures = tuple(drawn(batch, 16, LATENT, LATENT) for _ in range(controls))
    known = Conditioning(embeds=drawn(batch, TEXT, 64), mask=None, controls=pictures)
    tables = [denoiser.pos_embed.pos_freqs, denoiser.pos_embed.neg_freqs]
    inputs = [noisy, sigma, known.embeds, *known.controls, *denoiser.parameters(), *tables]
    predict = Predictor(family, denoiser, device.pick("cpu"), dtype)
    with Live(inputs) as live, contextlib.nullcontext() if grad else torch.no_grad():
        velocity = predict(noisy, sigma, known)
        if grad:
            torch.autograd.backward((velocity.float() - noisy).square().mean())
    return live


def counted(
    base: Path,
    tmp_path: Path,
    settings: Settings,
    lora: Lora,
    *,
    batch: int = 1,
    controls: int = 1,
    grad: bool = True,
) -> float:
    """GiB at the peak of a step: weights, adapter, and what was counted."""
    family = registry.load_family(base)
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    table = (
        modulation.Request(folder=tmp_path, groups=[[0.5]], made_from={})
        if settings.cached_modulation
        else None
    )
    denoiser: Any = family.load_denoiser(
        base, device="cpu", dtype=dtype, quantize=settings.quantize, table=table, keep=tuple(settings.kept)
    )
    checkpointing.apply(
        denoiser, settings.checkpointing, "transformer_blocks", dropout=settings.dropout, compiled=False
    )
    trainables.add_adapter(denoiser, lora, seed=1)
    denoiser.train(grad)
    live = step(denoiser, family, dtype, batch=batch, controls=controls, grad=grad)
    return (live.peak + held(denoiser.parameters())) / GIB


def held(parameters: Iterable[Any]) -> int:
    """Bytes, with the quantization state of packed weights."""
    total = 0
    for parameter in parameters:
        total += parameter.numel() * parameter.element_size()
        state = getattr(parameter, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            total += part.absmax.numel() * part.absmax.element_size() if part is not None else 0
    return total


def planned(
    base: Path, settings: Settings, lora: Lora, *, batch: int = 1, controls: int = 1, work: int = 1
) -> float:
    """GiB of the same parts; without `work` of weights and adapter alone."""
    sizes = architecture.read(base)
    parameters = architecture.adapter_parameters(
        sizes.denoiser, lora.r, lora.target_modules, dora=lora.use_dora
    )
    asked = Work(
        target_pixels=256 * 256,
        control_pixels=256 * 256,
        text_tokens=TEXT,
        image_tokens=(1 + controls) * IMAGE_TOKENS,
        batch_size=batch,
    )
    phase = estimate.fit_phase(sizes, replace(settings, adapter_parameters=parameters), asked)
    left_out = {"process", "read_ahead", "optimizer", "modulation_rows"}
    left_out |= set() if work else {"activations", "gradients"}
    return sum(gib for name, gib in phase.components_gib.items() if name not in left_out)


MOST = frozenset(
    f"transformer_blocks.{layer}.{name}"
    for layer in (0, 2, 3)
    for name in ("img_mod.1", "txt_mod.1", "img_mlp.net.2", "attn.to_q")
)
MLP = frozenset({"attention", "mlp"})
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "every block": ({}, {}, {}),
    "bf16": ({"precision": "bf16"}, {}, {}),
    "off": ({"checkpointing": False}, {}, {}),
    "off, bf16": ({"checkpointing": False, "precision": "bf16"}, {}, {}),
    "groups of 2": ({"checkpointing": 2}, {}, {}),
    "selective": ({"checkpointing": "selective"}, {}, {}),
    "cached modulation": ({"cached_modulation": True}, {}, {}),
    "cached modulation, off, bf16": (
        {"cached_modulation": True, "checkpointing": False, "precision": "bf16"}, {}, {}
    ),
    "batch 2": ({}, {}, {"batch": 2}),
    "two controls": ({"precision": "bf16"}, {}, {"controls": 2}),
    "rank 64": ({}, {"r": 64}, {}),
    "NF4": ({"quantize": "nf4"}, {}, {}),
    "NF4, cached modulation, bf16": (
        {"quantize": "nf4", "cached_modulation": True, "precision": "bf16"}, {}, {}
    ),
    "NF4, most kept": ({"quantize": "nf4", "kept": MOST, "precision": "bf16"}, {}, {}),
    "MLP too": ({"checkpointing": False, "targets": MLP}, {"target_modules": "attention+mlp"}, {}),
    "modulation too": (
        {"checkpointing": False, "targets": MLP | {"modulation"}}, {"target_modules": "all-linear"}, {}
    ),
    "DoRA": ({"dora": True}, {"use_dora": True}, {}),
    "dropout": ({"dropout": True, "checkpointing": False}, {"lora_dropout": 0.1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_plan_agrees_with_the_tensors_of_a_step(base: Path, tmp_path: Path, name: str) -> None:
    changes, adapter, work = CASES[name]
    settings = replace(PLAIN, **changes)
    lora = Lora(**{"r": 4, "target_modules": ATTENTION, **adapter})
    found, plan = counted(base, tmp_path, settings, lora, **work), planned(base, settings, lora, **work)
    print(f"{name}: counted {found * 1024:.2f} MiB, planned {plan * 1024:.2f}, ratio {plan / found:.3f}")
    assert plan == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("mode", [True, False])
def test_plain_attention_holds_its_scores(base: Path, tmp_path: Path, mode: bool, precision: str) -> None:
    """Twice as much as all the rest, at this size."""
    settings = replace(PLAIN, checkpointing=mode, precision=precision)
    lora = Lora(r=4, target_modules=ATTENTION)
    with sdpa_kernel(SDPBackend.MATH):
        found = counted(base, tmp_path, settings, lora)
    plain = planned(base, settings, lora)
    plan = planned(base, replace(settings, attention="math"), lora)
    assert plan == pytest.approx(found, rel=0.1) and plan > 1.5 * plain


def test_selective_keeps_no_output_of_plain_attention(base: Path, tmp_path: Path) -> None:
    """It is three operations then, of which none is attention's: as `true`, counted and planned."""
    lora = Lora(r=4, target_modules=ATTENTION)
    modes = [replace(PLAIN, checkpointing=mode, attention="math") for mode in (True, "selective")]
    plain = [planned(base, settings, lora) for settings in modes]
    fused = [planned(base, replace(settings, attention="fused"), lora) for settings in modes]
    with sdpa_kernel(SDPBackend.MATH):
        found = [counted(base, tmp_path, settings, lora) for settings in modes]
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert plain[1] == plain[0] and fused[1] > 1.02 * fused[0]


@pytest.mark.parametrize(("precision", "targets"), [("no", ATTENTION), ("bf16", "attention+mlp")])
def test_sampling_keeps_nothing(base: Path, tmp_path: Path, precision: str, targets: Any) -> None:
    kinds = frozenset({"attention"}) if targets == ATTENTION else MLP
    settings = replace(PLAIN, precision=precision, targets=kinds)
    lora = Lora(r=4, target_modules=targets)
    sizes = architecture.read(base)
    found = counted(base, tmp_path, settings, lora, grad=False)
    weights = planned(base, replace(settings, checkpointing=True), lora, work=0)
    tokens = TEXT + 2 * IMAGE_TOKENS
    plan = weights + activations.sampling_bytes(sizes.denoiser, settings, tokens) / GIB
    assert plan == pytest.approx(found, rel=TOLERANCE)
