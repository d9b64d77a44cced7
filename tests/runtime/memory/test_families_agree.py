"""The plan's facts and formulas against the classes that really run."""

from pathlib import Path

import pytest

from runtime.memory import architecture

pytest.importorskip("diffusers")


@pytest.mark.parametrize("pipeline", architecture.FAMILIES)
def test_facts_are_those_of_the_families(pipeline: str) -> None:
    from runtime.families.qwen_image_edit import QwenImageEdit
    from runtime.families.qwen_image_edit_plus import QwenImageEditPlus
    from runtime.families.registry import PIPELINES

    facts = architecture.FAMILIES[pipeline]
    family = {made.name: made for made in (QwenImageEdit(), QwenImageEditPlus())}[facts.name]
    assert PIPELINES[pipeline] == facts.name
    assert (family.vl_pixels, family.max_controls) == (facts.vl_pixels, facts.max_controls)
    assert set(PIPELINES) == set(architecture.FAMILIES)


def test_counted_tensors_are_those_of_the_class(make_model: object) -> None:
    import torch
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


def test_counted_linears_of_the_text_encoder_are_those_of_the_class(make_model: object) -> None:
    """What NF4 takes of it, by the configs that a plan reads."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from runtime import demo
    from runtime.memory.nf4 import BLOCK

    folder = next(iter(demo.__path__)) + "/base/text_encoder"
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder))
    linears = [
        (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    base = architecture.read(Path(folder).parent)
    assert base.text_encoder.quantizable == sum(a * b for a, b in linears if a % BLOCK == 0)
    assert architecture.NF4_BLOCK == BLOCK
