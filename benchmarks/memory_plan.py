"""The memory plan against the allocator: peaks of real steps at the published shape, beside what was planned.

    python benchmarks/memory_plan.py [--only PART ...] [--encoders] [--table]
    python benchmarks/memory_plan.py --tiny

The denoiser has random weights, loaded by the product's loader, and the adapter and each technique are the
product's; a case takes two steps. One JSON object a line: `peak_gib` allocated and `reserved_gib` at most, `plan_gib`
and `ratio`, plan / peak; with --table a table in Markdown after them. `--encoders` measures text encoder and VAE
too. `--tiny` is the embedded base's shape on the CPU, where tensors are counted in place of an allocator.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from live import Live
from memory_encoders import encoders
from torch import Tensor
from what_fits import write_configs

from runtime import device as devices
from runtime.config.learning import Checkpointing
from runtime.config.model import Lora
from runtime.demo.series import BASE
from runtime.device import Device
from runtime.families import registry
from runtime.families.base import Conditioning
from runtime.files import GIB
from runtime.memory import checkpointing, loading, modulation
from runtime.memory.loading import Piece, Placement, Wanted
from runtime.planning import architecture, estimate
from runtime.planning.estimate import Phase, Settings, Work
from runtime.quantize import nf4
from runtime.training import trainables
from runtime.training.objective import Predictor

STEPS = 2
TEXT = 400  # tokens
SIGMA = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    quantize: str = "none"
    size: tuple[int, int] = (384, 672)
    controls: int = 1
    batch: int = 1
    rank: int = 16
    targets: str | tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    checkpointing: Checkpointing = True
    cached: bool = False
    streamed: int = 0

    @property
    def name(self) -> str:
        told = [
            self.quantize,
            f"{self.size[0]}x{self.size[1]}",
            f"{self.controls} control{'s' * (self.controls > 1)}",
            f"batch {self.batch}",
            f"rank {self.rank}",
            self.mode,
        ]
        told += ["cached"] * self.cached + [f"{self.streamed} streamed"] * (self.streamed > 0)
        return ", ".join([*told, *([self.targets] if isinstance(self.targets, str) else [])])

    @property
    def mode(self) -> str:
        if isinstance(self.checkpointing, bool):
            return "every block" if self.checkpointing else "off"
        return "selective" if isinstance(self.checkpointing, str) else f"groups of {self.checkpointing}"


SMALL, LARGE = (384, 672), (1024, 1024)
CASES = (
    Case(),
    Case(rank=8, checkpointing=False),
    Case(rank=64, checkpointing=2),
    Case(checkpointing=6),
    Case(size=LARGE),
    Case(size=LARGE, checkpointing="selective"),
    Case(size=LARGE, controls=2, batch=2),
    Case(cached=True),
    Case(cached=True, size=LARGE, checkpointing="selective"),
    Case(cached=True, size=LARGE, streamed=20),
    Case(cached=True, streamed=40, rank=64, targets="attention+mlp"),
    Case(quantize="nf4"),
    Case(quantize="nf4", rank=64, batch=2, targets="attention"),
    Case(quantize="nf4", size=LARGE, controls=2),
    Case(quantize="nf4", rank=8, checkpointing=False),
    Case(quantize="nf4", cached=True, rank=8),
    Case(quantize="nf4", cached=True, checkpointing="selective", batch=2),
    Case(quantize="nf4", cached=True, size=LARGE),
    Case(quantize="nf4", cached=True, size=LARGE, controls=2, checkpointing=2),
    Case(quantize="nf4", cached=True, streamed=30),
    Case(quantize="nf4", cached=True, size=LARGE, streamed=20, checkpointing="selective"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name holds all of these")
    parser.add_argument("--encoders", action="store_true", help="text encoder and VAE too")
    parser.add_argument("--table", action="store_true", help="a table in Markdown at the end")
    parser.add_argument("--tiny", action="store_true", help="the embedded base's shape on the CPU")
    wish = parser.parse_args()
    where = devices.pick("cpu" if wish.tiny else "auto")
    chosen = [case for case in CASES if all(part in case.name for part in wish.only)]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        root = BASE if not where.is_accelerator else write_configs(Path(folder) / "base", 1)
        for line in measure(root, Path(folder) / "tables", where, chosen):
            print(json.dumps(line), flush=True)
            lines.append(line)
        for line in encoders(root, where) if wish.encoders else ():
            print(json.dumps(line), flush=True)
    if wish.table:
        print(table(lines))


def measure(root: Path, tables: Path, where: Device, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Cases that share a base one after the other."""
    for quantize, cached in dict.fromkeys((case.quantize, case.cached) for case in cases):
        denoiser = load(root, tables, where, quantize, cached)
        for case in cases:
            if (case.quantize, case.cached) == (quantize, cached):
                yield {**one(root, denoiser, where, case), "device": where.name}
        del denoiser
        devices.free_cached(where)


class Drawn:
    """A source of weights in the shapes of a model: N(0, 0.02), scales of norms near 1."""

    def __init__(self, shapes: Mapping[str, torch.Size], where: Device) -> None:
        self.shapes, self.where = shapes, where

    def pieces(self, wanted: Wanted) -> Iterator[Piece]:
        generator = torch.Generator(self.where.type).manual_seed(0)
        for name, shape in self.shapes.items():
            if wanted(name):
                drawn = (
                    torch.randn(shape, generator=generator, device=self.where.type, dtype=torch.bfloat16)
                    * 0.02
                )
                scale = "norm" in name and len(shape) == 1 and name.endswith("weight")
                yield Piece(name=name, tensor=drawn + 1 if scale else drawn)


def load(root: Path, tables: Path, where: Device, quantize: str, cached: bool) -> Any:
    """The denoiser of the config in `root`, in bf16 or NF4, with its modulation or with a table of it."""
    from diffusers import QwenImageTransformer2DModel

    folder, facts = root / "transformer", registry.facts(root)
    empty = loading.empty(QwenImageTransformer2DModel, folder)
    source = Drawn({name: tensor.shape for name, tensor in empty.state_dict().items()}, where)
    rule = nf4.rule_for("transformer", facts.blocks) if quantize == "nf4" else None
    placement = Placement(dtype=torch.bfloat16, device=where.type, rule=rule)
    denoiser = loading.load(
        QwenImageTransformer2DModel,
        folder,
        source,
        placement,
        left_out=lambda name: cached and facts.is_modulation(name),
    )
    if cached:
        request = modulation.Request(folder=tables, groups=[[SIGMA]], made_from={"quantize": quantize})
        modulation.install(denoiser, facts, source, placement, request)
    devices.free_cached(where)
    return denoiser


def one(root: Path, denoiser: Any, where: Device, case: Case) -> dict[str, Any]:
    """Two steps with a new adapter, which is taken out again."""
    from runtime.memory import offload

    if not where.is_accelerator:
        case = replace(case, size=(96, 160) if case.size == SMALL else (192, 192), streamed=0)
    facts = registry.facts(root)
    checkpointing.apply(denoiser, case.checkpointing, facts.blocks, dropout=False, compiled=False)
    adapter = trainables.add_adapter(
        denoiser, Lora(r=case.rank, lora_alpha=case.rank, target_modules=case.targets), seed=1
    )
    streamed = None
    if case.streamed:
        streamed = offload.stream(getattr(denoiser, facts.blocks), case.streamed, where)
    devices.free_cached(where)
    try:
        taken = steps(root, denoiser.train(), where, case, adapter.parameters())
    finally:
        if streamed is not None:
            streamed.close()
        denoiser.unload_lora()
        gc.collect()
    phase = planned(root, where, case)
    return {
        "case": case.name,
        **taken,
        "plan_gib": _allocated(phase),
        "ratio": round(_allocated(phase) / taken["peak_gib"], 3),
        "reserve_plan_gib": round(phase.reserve_gib, 3),
        "components_gib": {name: round(gib, 3) for name, gib in phase.components_gib.items()},
    }


def _allocated(phase: Phase) -> float:
    """What an allocator of tensors counts of it."""
    left_out = ("process", "read_ahead")
    return round(sum(gib for name, gib in phase.components_gib.items() if name not in left_out), 4)


def steps(root: Path, denoiser: Any, where: Device, case: Case, trained: list[Any]) -> dict[str, float]:
    predict = Predictor(registry.load_family(root), denoiser, where, torch.bfloat16)
    noisy, sigma, conditioning = question(where, denoiser, case)
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    devices.reset_peak(where)
    known = [noisy, sigma, conditioning.embeds, *conditioning.controls, *denoiser.parameters()]
    known += [denoiser.pos_embed.pos_freqs, denoiser.pos_embed.neg_freqs]
    with Live(known) if not where.is_accelerator else Off() as live:
        for _ in range(STEPS):
            velocity = predict(noisy, sigma, conditioning)
            torch.autograd.backward((velocity.float() - noisy.float()).square().mean())
            del velocity
            optimizer.step()
            optimizer.zero_grad()
    devices.synchronize(where)
    if not where.is_accelerator:
        resident = held(list(denoiser.parameters()))
        return {"peak_gib": (live.peak + resident) / GIB, "reserved_gib": 0.0, "resident_gib": resident / GIB}
    seen = devices.memory(where)
    reserved = torch.accelerator.max_memory_reserved() / GIB
    beside = _beside(where)
    return {
        "peak_gib": round(seen.peak_gib, 4),
        "reserved_gib": round(reserved, 4),
        "resident_gib": round(seen.alloc_gib, 4),
        "context_gib": round(beside, 4),
        "rss_gib": round(seen.rss_gib, 4),
    }


class Off:
    """In place of a count."""

    peak = 0

    def __enter__(self) -> "Off":
        return self

    def __exit__(self, *given: Any) -> None:
        pass


def _beside(where: Device) -> float:
    """What the device has in use beside what this process's allocator reserved."""
    free, total = torch.get_device_module(where.type).mem_get_info()
    return float(total - free) / GIB - devices.memory(where).reserved_gib


def held(parameters: list[Any]) -> int:
    """Bytes, with the quantization state of packed weights."""
    total = 0
    for parameter in parameters:
        state = getattr(parameter, "quant_state", None)
        parts = [
            parameter,
            *(part.absmax for part in (state, getattr(state, "state2", None)) if part is not None),
        ]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


def question(where: Device, denoiser: Any, case: Case) -> tuple[Tensor, Tensor, Conditioning]:
    """Latents of target and controls, and a prompt, on the CPU as a fit has them."""
    generator = torch.Generator().manual_seed(1)
    height, width = (side // 8 for side in case.size)

    def drawn(*shape: int) -> Tensor:
        return torch.randn((case.batch, *shape), generator=generator)

    channels = denoiser.config.out_channels
    controls = tuple(drawn(channels, height, width) for _ in range(case.controls))
    embeds = drawn(TEXT if where.is_accelerator else TEXT // 10, denoiser.config.joint_attention_dim)
    conditioning = Conditioning(embeds=embeds, mask=None, controls=controls).to(where.type, torch.bfloat16)
    noisy = drawn(channels, height, width).to(where.type)
    return noisy, torch.full((case.batch,), SIGMA), conditioning


def planned(root: Path, where: Device, case: Case) -> Phase:
    base = architecture.read(root)
    names = base.denoiser.targeted(case.targets)
    marks = {"attention": ".attn.", "mlp": "_mlp.", "modulation": "_mod."}
    settings = Settings(
        device=where.type,
        quantize=case.quantize,
        precision="bf16",
        checkpointing=case.checkpointing,
        adapter_parameters=architecture.adapter_parameters(base.denoiser, case.rank, case.targets),
        optimizer="torch.optim.AdamW",
        text_encoder_device=where.type,
        vae_device=where.type,
        targets=frozenset(kind for kind, mark in marks.items() if any(mark in name for name in names)),
        cached_modulation=case.cached,
        streamed_blocks=case.streamed,
    )
    pixels = case.size[0] * case.size[1]
    work = Work(
        target_pixels=pixels,
        control_pixels=pixels,
        text_tokens=TEXT if where.is_accelerator else TEXT // 10,
        image_tokens=(1 + case.controls) * pixels // 256,
        batch_size=case.batch,
    )
    return estimate.fit_phase(base, settings, work)


def table(lines: list[dict[str, Any]]) -> str:
    head = (
        "| case | peak allocated | planned | planned / peak | reserved | reserved / peak |\n"
        + "|---" * 6
        + "|"
    )
    rows = [
        f"| {line['case']} | {line['peak_gib']:.2f} | {line['plan_gib']:.2f} | {line['ratio']:.3f} "
        f"| {line['reserved_gib']:.2f} | {line['reserved_gib'] / line['peak_gib']:.3f} |"
        for line in lines
    ]
    return "\n".join([head, *rows])


if __name__ == "__main__":
    main()
