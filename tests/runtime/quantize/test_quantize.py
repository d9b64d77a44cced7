"""NF4 weights on this machine's CPU, from one file and from shards."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.config.model import Lora
from runtime.errors import UserError
from runtime.families.base import Conditioning
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.memory import loading
from runtime.quantize import nf4
from runtime.training import trainables

SINGLE = "diffusion_pytorch_model.safetensors"
SHARDS = [f"diffusion_pytorch_model-0000{part}-of-00002.safetensors" for part in (1, 2)]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    rule = nf4.rule_for("transformer", "transformer_blocks")
    placement = loading.Placement(device="cpu", dtype=dtype, rule=rule)
    return loading.load(QwenImageTransformer2DModel, folder, loading.Folder(folder), placement)


@pytest.fixture(scope="module")
def sharded(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights in two files, a layer's weight and bias in different ones."""
    folder = tmp_path_factory.mktemp("sharded") / "transformer"
    folder.mkdir()
    shutil.copyfile(nano / "transformer" / "config.json", folder / "config.json")
    tensors = load_file(nano / "transformer" / SINGLE)
    names = sorted(tensors, key=lambda name: (name.endswith(".bias"), name))
    parts = (names[: len(names) // 2], names[len(names) // 2 :])
    for shard, part in zip(SHARDS, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, part in zip(SHARDS, parts, strict=True) for name in part}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / f"{SINGLE}.index.json").write_text(index, encoding="utf-8")
    return folder


def ask(denoiser: Any, family: QwenImageEdit | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    told = Conditioning(
        embeds=torch.randn(1, 9, 64, generator=generator),
        mask=None,
        controls=(torch.randn(1, 16, 8, 8, generator=generator),),
    )
    noisy = torch.randn(1, 16, 8, 8, generator=generator)
    dtype = denoiser.proj_out.weight.dtype
    return QwenImageEdit().predict(denoiser, noisy.to(dtype), torch.tensor([0.5]), told.to("cpu", dtype))


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_close_to_those_of_the_plain_base(nano: Path, dtype: torch.dtype) -> None:
    plain = QwenImageEdit().load_denoiser(nano, device="cpu", dtype=dtype, quantize="none")
    with torch.no_grad():
        error = relative(ask(load(nano / "transformer", dtype)), ask(plain))
    assert 1e-4 < error < 0.1


def test_the_linears_of_the_blocks_are_packed_and_nothing_else(nano: Path) -> None:
    denoiser = load(nano / "transformer")
    packed = {name for name, p in denoiser.named_parameters() if p.dtype == torch.uint8}
    plain = QwenImageTransformer2DModel.from_pretrained(nano / "transformer")
    expected = {
        f"{name}.weight"
        for name, module in plain.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("transformer_blocks.")
    }
    assert packed == expected
    assert {p.dtype for n, p in denoiser.named_parameters() if n not in packed} == {torch.float32}
    weight = denoiser.transformer_blocks[0].attn.to_q.weight
    assert weight.shape == (128 * 128 // 2, 1)  # two weights a byte
    assert not any(p.is_meta or p.requires_grad for p in denoiser.parameters())


def test_what_is_not_packed_is_what_the_file_holds(nano: Path) -> None:
    file = load_file(nano / "transformer" / SINGLE)
    for name, parameter in load(nano / "transformer").named_parameters():
        if parameter.dtype != torch.uint8:
            assert torch.equal(parameter, file[name].float()), name


def test_shards_give_the_same_base_as_one_file(nano: Path, sharded: Path) -> None:
    with torch.no_grad():
        assert torch.equal(ask(load(sharded)), ask(load(nano / "transformer")))


@pytest.mark.parametrize("shard", SHARDS)
def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "transformer"
    shutil.copytree(sharded, folder)
    (folder / shard).unlink()
    with pytest.raises(UserError, match=f"shards not there: {shard}") as caught:
        load(folder)
    assert caught.value.remedy == "fetch the model again"


def test_missing_tensors_are_named(nano: Path, tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    shutil.copytree(nano / "transformer", folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    tensors.pop("transformer_blocks.1.attn.to_k.weight")
    save_file(tensors, folder / SINGLE)
    with pytest.raises(UserError, match=r"lacks 1 tensors, first transformer_blocks\.1\.attn\.to_k\.weight"):
        load(folder)


def test_a_folder_without_weights(nano: Path, tmp_path: Path) -> None:
    shutil.copyfile(nano / "transformer" / "config.json", tmp_path / "config.json")
    with pytest.raises(UserError, match=r"holds no \.safetensors weights"):
        load(tmp_path)


def test_a_file_that_the_index_does_not_list_is_not_read(sharded: Path, tmp_path: Path) -> None:
    """A snapshot may hold another variant of the weights beside the shards."""
    folder = tmp_path / "transformer"
    shutil.copytree(sharded, folder)
    with torch.no_grad():
        before = ask(load(folder))
    tensors = load_file(folder / SHARDS[0])
    save_file(
        {name: t * 0 for name, t in tensors.items()}, folder / "diffusion_pytorch_model.fp8.safetensors"
    )
    with torch.no_grad():
        assert torch.equal(ask(load(folder)), before)


def test_train_eval_and_train_again_agree(nano: Path) -> None:
    """On some processors bitsandbytes repacks the weight in eval mode, and training then fails."""
    denoiser = load(nano / "transformer")
    adapter = trainables.add_adapter(denoiser, Lora(r=4), seed=1)
    flags = [getattr(m, "support_avx512bf16_for_cpu", False) for m in denoiser.modules()]
    assert not any(flags)  # whatever this processor has
    outputs = []
    for mode in (True, False, True):
        denoiser.train(mode)
        with torch.set_grad_enabled(mode):
            outputs.append(ask(denoiser))
        if mode:
            outputs[-1].square().mean().backward()
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert all(p.grad is not None for p in adapter.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_every_part_of_the_adapter(nano: Path, checkpointing: bool) -> None:
    denoiser = load(nano / "transformer")
    if checkpointing:
        denoiser.enable_gradient_checkpointing()
    adapter = trainables.add_adapter(denoiser, Lora(r=4), seed=1)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    denoiser.train()
    ask(denoiser).square().mean().backward()
    for name, parameter in adapter.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.norm()) > 0, name


def test_peft_knows_that_the_base_is_packed(nano: Path) -> None:
    """Else it wraps it as a plain linear, and a merge later is wrong."""
    from peft.tuners.lora.bnb import Linear4bit

    denoiser = load(nano / "transformer")
    trainables.add_adapter(denoiser, Lora(r=4), seed=1)
    assert isinstance(denoiser.transformer_blocks[0].attn.to_q, Linear4bit)
