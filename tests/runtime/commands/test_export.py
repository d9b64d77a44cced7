"""`finetune export`: every naming loads in diffusers with the same effect, alpha included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime import cli
from runtime.commands import export
from runtime.config.model import Lora
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.training import adapter_file, naming, trainables


@pytest.fixture
def run(lab: Any) -> Any:
    return lab.fit()


def _difference(nano: Path, path: Path) -> torch.Tensor:
    """What the adapter at `path` adds to the output of the denoiser, loaded by diffusers' own reader."""
    from diffusers import QwenImageEditPipeline

    family = QwenImageEdit()
    denoiser = family.load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "hidden_states": torch.randn(1, 32, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, 9, 64, generator=generator),
        "timestep": torch.tensor([0.4]),
        "img_shapes": [[(1, 4, 4), (1, 4, 4)]],
        "return_dict": False,
    }
    with torch.no_grad():
        before = denoiser(**inputs)[0]
        pipeline = QwenImageEditPipeline(
            scheduler=None, vae=None, text_encoder=None, tokenizer=None, processor=None, transformer=denoiser
        )
        pipeline.load_lora_weights(path.parent, weight_name=path.name)
        return denoiser(**inputs)[0] - before  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", naming.FORMATS)
def test_each_form_loads_with_the_adapters_own_effect(lab: Any, run: Any, nano: Path, form: str) -> None:
    out = lab.root / f"{form}.safetensors"
    line = [
        "export",
        "--workspace",
        str(lab.root),
        "--format",
        form,
        "--checkpoint",
        "last",
        "--out",
        str(out),
    ]
    assert cli.main(line) == 0
    newest = max(
        run.path.glob("checkpoint-*"), key=lambda path: int(path.name.rstrip("-last").split("-")[-1])
    )
    wanted = _difference(nano, newest / trainables.WEIGHTS)
    assert wanted.abs().max() > 1e-3, "an adapter without effect would prove nothing"
    torch.testing.assert_close(_difference(nano, out), wanted, rtol=1e-5, atol=1e-6)


def test_names(lab: Any, run: Any) -> None:
    module = "transformer_blocks.1.attn.to_out.0"
    expected = {
        "comfyui": {
            f"diffusion_model.{module}.{leaf}" for leaf in ("lora_A.weight", "lora_B.weight", "alpha")
        },
        "kohya": {
            f"lora_unet_transformer_blocks_1_attn_to_out_0.{leaf}"
            for leaf in ("lora_down.weight", "lora_up.weight", "alpha")
        },
    }
    for form, names in expected.items():
        assert cli.main(["export", "--workspace", str(lab.root), "--format", form]) == 0
        tensors = load_file(lab.root / "exports" / f"edit-lora-{form}.safetensors")
        assert names <= tensors.keys() and len(tensors) == 2 * 4 * 3
        assert {float(t) for n, t in tensors.items() if n.endswith(".alpha")} == {8.0}


@pytest.mark.parametrize("form", naming.FORMATS)
@pytest.mark.parametrize("rslora", [False, True])
def test_a_rank_stabilised_scale_is_kept(nano: Path, tmp_path: Path, form: str, rslora: bool) -> None:
    """alpha / sqrt(r) is told to tools that know alpha / r only."""
    denoiser = QwenImageEdit().load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
    adapter = trainables.add_adapter(denoiser, Lora(r=4, lora_alpha=6, use_rslora=rslora), seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in adapter.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    adapter.save(tmp_path)
    export.write(tmp_path / trainables.WEIGHTS, tmp_path / "out.safetensors", form)
    found = adapter_file.read_adapter(tmp_path / "out.safetensors", adapter_file.linears(denoiser))
    assert {factors.scale for factors in found.modules.values()} == {3.0 if rslora else 1.5}
    wanted = _difference(nano, tmp_path / trainables.WEIGHTS)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(_difference(nano, tmp_path / "out.safetensors"), wanted, rtol=1e-4, atol=1e-5)


def test_an_existing_file_is_kept(lab: Any, run: Any, capsys: Any) -> None:
    line = ["export", "--workspace", str(lab.root)]
    assert cli.main(line) == 0
    assert cli.main(line) == 1 and "is left as it is" in capsys.readouterr().err
    assert cli.main([*line, "--force"]) == 0
