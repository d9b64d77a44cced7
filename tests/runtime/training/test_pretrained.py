"""A run that starts from an adapter adds exactly what that adapter adds, and can learn on from there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime import files
from runtime.config.model import Config, Lora
from runtime.errors import UserError
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.training import adapter_file, pretrained, trainables
from runtime.training.pretrained import Pretrained
from runtime.workspace import Workspace

TARGETS = ("to_q", "to_out.0")
MODULES = [f"transformer_blocks.{block}.attn.{name}" for block in (0, 1) for name in TARGETS]


@pytest.fixture
def fresh(nano: Path) -> Any:
    def make(**lora: Any) -> trainables.Adapter:
        denoiser = QwenImageEdit().load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
        return trainables.add_adapter(denoiser, Lora(**{"target_modules": TARGETS, **lora}), seed=1)

    return make


def written(
    path: Path, adapter: trainables.Adapter, *, rank: int, alpha: float, modules: list[str] = MODULES
) -> adapter_file.AdapterFile:
    draw = torch.Generator().manual_seed(2)
    linears = adapter_file.linears(adapter.denoiser)
    tensors: dict[str, Tensor] = {}
    for module in modules:
        outputs, inputs = linears[module]
        tensors[f"{module}.lora_down.weight"] = torch.randn(rank, inputs, generator=draw)
        tensors[f"{module}.lora_up.weight"] = torch.randn(outputs, rank, generator=draw)
        tensors[f"{module}.alpha"] = torch.tensor(alpha)
    save_file(tensors, path)
    return adapter_file.read_adapter(path, linears)


def delta(adapter: trainables.Adapter, module: str) -> Tensor:
    """What the run's layer adds to its weight, [out, in] in fp64."""
    layer = adapter.denoiser.get_submodule(module)
    a, b = (factors["default"].weight.detach().double() for factors in (layer.lora_A, layer.lora_B))
    return layer.scaling["default"] * (b @ a)  # type: ignore[no-any-return]


CASES = [
    # run: r, alpha, rslora; file: rank, alpha; whether fp32 holds the folded factor without rounding
    (4, 8, False, 4, 8.0, True),
    (4, 8, False, 4, 1.0, True),
    (8, 8, False, 4, 8.0, True),
    (4, 6, False, 4, 7.0, False),
    (4, 8, True, 2, 3.0, False),
    (16, 16, False, 1, 1.0, True),
]


@pytest.mark.parametrize(("r", "alpha", "rslora", "rank", "file_alpha", "exact"), CASES)
def test_the_delta_is_the_files(
    fresh: Any, tmp_path: Path, r: int, alpha: int, rslora: bool, rank: int, file_alpha: float, exact: bool
) -> None:
    adapter = fresh(r=r, lora_alpha=alpha, use_rslora=rslora)
    drawn = {name: p.detach().clone() for name, p in adapter.named_parameters()}
    file = written(tmp_path / "a.safetensors", adapter, rank=rank, alpha=file_alpha)
    assert pretrained.load_pretrained(adapter, file) == Pretrained(
        sha256=files.file_digest(tmp_path / "a.safetensors"), modules=4, fresh_modules=0
    )
    for module, factors in file.modules.items():
        tolerance = 1e-12 if exact else 1e-6
        torch.testing.assert_close(
            delta(adapter, module), factors.delta(), rtol=tolerance, atol=tolerance if not exact else 1e-13
        )
        layer = adapter.denoiser.get_submodule(module)
        down = layer.lora_A["default"].weight
        assert torch.equal(down[:rank], factors.down), "B takes the factor between the scales, A none"
        assert torch.equal(down[rank:], drawn[f"{module}.lora_A.default.weight"][rank:])
        assert not layer.lora_B["default"].weight[:, rank:].any()


def test_the_padded_part_learns(fresh: Any, tmp_path: Path) -> None:
    """Were A's further rows zero like B's further columns, no gradient would ever reach either."""
    adapter = fresh(r=4, lora_alpha=4)
    pretrained.load_pretrained(adapter, written(tmp_path / "a.safetensors", adapter, rank=2, alpha=2.0))
    layer = adapter.denoiser.get_submodule(MODULES[0])
    layer(torch.ones(1, layer.in_features)).sum().backward()
    assert layer.lora_B["default"].weight.grad[:, 2:].abs().min() > 0


def test_modules_that_the_file_has_not_start_fresh(fresh: Any, tmp_path: Path) -> None:
    adapter = fresh(r=4, lora_alpha=8)
    drawn = {name: p.detach().clone() for name, p in adapter.named_parameters()}
    file = written(tmp_path / "a.safetensors", adapter, rank=4, alpha=4.0, modules=MODULES[:1])
    started = pretrained.load_pretrained(adapter, file)
    assert (started.modules, started.fresh_modules) == (1, 3)
    assert started.to_json() == {"sha256": file.sha256, "modules": 1, "fresh_modules": 3}
    for name, parameter in adapter.named_parameters():
        assert torch.equal(parameter, drawn[name]) is not name.startswith(MODULES[0])


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_the_answer_is_that_of_the_adapter_it_started_from(nano: Path, tmp_path: Path, quantize: str) -> None:
    """Through peft's own layers, DoRA too, over plain and packed weights in bf16."""

    def make(seed: int, **lora: Any) -> trainables.Adapter:
        denoiser = QwenImageEdit().load_denoiser(nano, device="cpu", dtype=torch.bfloat16, quantize=quantize)
        return trainables.add_adapter(
            denoiser, Lora(target_modules=TARGETS, use_dora=True, **lora), seed=seed
        )

    one, two = make(1, r=4, lora_alpha=8), make(2, r=8, lora_alpha=4)
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter.data, std=0.2)
    one.save(tmp_path)
    file = adapter_file.read_adapter(tmp_path, adapter_file.linears(two.denoiser))
    question = torch.randn(3, 128, dtype=torch.bfloat16)
    before = [two.denoiser.get_submodule(module)(question) for module in MODULES]
    pretrained.load_pretrained(two, file)
    for module, earlier in zip(MODULES, before, strict=True):
        wanted = one.denoiser.get_submodule(module)(question)
        torch.testing.assert_close(two.denoiser.get_submodule(module)(question), wanted, rtol=0.02, atol=0.02)
        assert (earlier - wanted).abs().max() > 0.1
    assert {parameter.dtype for parameter in two.parameters()} == {torch.float32}


def test_refusals_leave_the_adapter_as_it_was(fresh: Any, tmp_path: Path) -> None:
    adapter = fresh(r=4, lora_alpha=8, target_modules=["to_q"])
    drawn = {name: p.detach().clone() for name, p in adapter.named_parameters()}
    larger = written(tmp_path / "large.safetensors", adapter, rank=5, alpha=5.0, modules=MODULES[::2])
    others = written(tmp_path / "other.safetensors", adapter, rank=4, alpha=4.0)
    dora = fresh(r=4, use_dora=True)
    torch.nn.init.normal_(dora.parameters()[1].data)
    dora.save(tmp_path)
    weighed = adapter_file.read_adapter(tmp_path, adapter_file.linears(adapter.denoiser))
    cases = [
        (adapter, larger, r"large\.safetensors has rank 5 at .*0\.attn\.to_q, this run has rank 4$"),
        (
            adapter,
            others,
            r"adapts 2 modules that this run does not: transformer_blocks\.0\.attn\.to_out\.0, ",
        ),
        (fresh(r=4), weighed, r"is a DoRA at .*to_q, this run is not$"),
        (dora, others, r"other\.safetensors is no DoRA at .*to_q, this run is$"),
    ]
    for run, file, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            pretrained.load_pretrained(run, file)
        assert "config.yaml" in caught.value.remedy
    assert all(torch.equal(parameter, drawn[name]) for name, parameter in adapter.named_parameters())


# ---- by the config


def config_of(named: str | None) -> Config:
    return Config.model_validate(
        {
            "model": {"pretrained_model_name_or_path": "base", "lora": {"r": 4, "pretrained_weight": named}},
            "train": {"max_train_steps": 1},
        }
    )


@pytest.mark.parametrize("how", ["inside", "absolute", "external", "folder"])
def test_where_the_config_may_point(fresh: Any, tmp_path: Path, how: str) -> None:
    workspace = Workspace(tmp_path / "work")
    adapter = fresh(r=4)
    path = tmp_path / "work" / "in" / adapter_file.FILES[0]
    path.parent.mkdir(parents=True)
    written(path, adapter, rank=4, alpha=4.0)
    files.write_json(workspace.local_path, {"external": {"mine": str(path)}})
    named = {
        "inside": f"in/{path.name}",
        "absolute": str(path),
        "external": "external:mine",
        "folder": "in",
    }[how]
    started = pretrained.start(workspace, config_of(named), adapter)
    assert started is not None
    assert started.sha256 == files.file_digest(path) == pretrained.digest(workspace, config_of(named))


def test_none_named_and_none_there(fresh: Any, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert pretrained.start(workspace, config_of(None), fresh(r=4)) is None
    assert pretrained.digest(workspace, config_of(None)) is None
    with pytest.raises(UserError, match=r"absent\.safetensors, given as an adapter, is not there"):
        pretrained.digest(workspace, config_of("absent.safetensors"))
