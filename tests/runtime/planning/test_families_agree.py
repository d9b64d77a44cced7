"""The plan's facts and formulas against the classes that really run."""

from pathlib import Path

import pytest

from runtime.config.targets import PRESETS, Targets
from runtime.planning import architecture
from runtime.planning.architecture import is_modulation

pytest.importorskip("diffusers")
torch = pytest.importorskip("torch")


def test_facts_are_those_of_the_models(nano: Path) -> None:
    from runtime.families import registry

    family, base = registry.load_family(nano), architecture.read(nano)
    denoiser = family.load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
    vae = family.load_vae(nano, device="cpu", dtype=torch.float32)
    assert family.facts == base.family
    assert family.facts.size_multiple == base.size_multiple
    assert family.facts.latent_channels == vae.config.z_dim == denoiser.config.out_channels
    assert family.facts.pixel_channels == vae.config.get("input_channels", 3)
    assert len(denoiser.get_submodule(family.facts.blocks)) == base.denoiser.layers


def test_counted_tensors_are_those_of_the_class(make_model: object) -> None:
    from diffusers import QwenImageTransformer2DModel

    assert callable(make_model)
    base = architecture.read(make_model())
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(
            num_layers=2,
            num_attention_heads=4,
            attention_head_dim=32,
            joint_attention_dim=64,
            in_channels=64,
            out_channels=16,
            patch_size=2,
            axes_dims_rope=(8, 12, 12),
        )
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    block = "transformer_blocks.0."
    inside = {name.removeprefix(block): shape for name, shape in linears.items() if name.startswith(block)}
    outside = {name: shape for name, shape in linears.items() if not name.startswith("transformer_blocks.")}
    assert base.denoiser.block_linears == inside
    assert base.denoiser.outer_linears == outside
    assert base.denoiser.parameters == sum(parameter.numel() for parameter in model.parameters())
    replaced = base.family.move_modulation(linears)
    assert {name for name in linears if is_modulation(name)} == set(replaced)
    numbers = sum(p.numel() for name in replaced for p in model.get_submodule(name).parameters())
    live, table = (
        base.denoiser.layers * (block.packable + block.plain) + base.denoiser.outside(modulation=on)
        for on in (True, False)
        for block in [base.denoiser.block(modulation=on)]
    )
    assert live == base.denoiser.parameters and live - table == numbers


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "targets", [*PRESETS, ("to_q", "to_out.0"), ("transformer_blocks.1.*", "proj_out"), ("*.net.2",)]
)
def test_counted_adapters_are_those_that_are_trained(targets: Targets, dora: bool) -> None:
    """Of the embedded base, whose weights are there to be adapted."""
    from diffusers import QwenImageTransformer2DModel

    from runtime import demo
    from runtime.config.model import Lora
    from runtime.training import trainables

    folder = Path(next(iter(demo.__path__))) / "base"
    model = QwenImageTransformer2DModel.from_pretrained(folder / "transformer").requires_grad_(False)
    lora = Lora(r=3, target_modules=targets, use_dora=dora)
    trained = trainables.add_adapter(model, lora, seed=1).parameters()
    denoiser = architecture.read(folder).denoiser
    planned = architecture.adapter_parameters(denoiser, lora.r, lora.target_modules, dora=dora)
    assert planned == sum(parameter.numel() for parameter in trained)


def test_counted_linears_of_the_text_encoder_are_those_of_the_class(make_model: object) -> None:
    """What NF4 takes of it, by the configs that a plan reads."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from runtime import demo
    from runtime.quantize.nf4 import BLOCK
    from runtime.quantize.taking import published

    folder = next(iter(demo.__path__)) + "/base/text_encoder"
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder))
    linears = {
        published(name): (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    base = architecture.read(Path(folder).parent)
    assert base.text_encoder.linears == linears
    assert base.text_encoder.quantizable == sum(a * b for a, b in linears.values() if a % BLOCK == 0)
    without_head = [p.numel() for name, p in model.named_parameters() if name != "lm_head.weight"]
    assert base.text_encoder.parameters == sum(without_head)
    assert architecture.NF4_BLOCK == BLOCK
