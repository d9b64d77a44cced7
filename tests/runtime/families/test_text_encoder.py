"""The text encoder comes tensor by tensor, without its head, and says bit for bit what transformers' own says."""

import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import files, shards
from runtime.demo import shapes
from runtime.errors import UserError
from runtime.families import text_encoder
from runtime.families.base import Encoders, PromptAsk
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.progress import Progress
from runtime.quantize import nf4, streaming

FAMILY, WEIGHTS = QwenImageEdit(), "model.safetensors"
PICTURE = shapes.draw(shapes.edit(np.random.default_rng(4)).control)
ASKS = [PromptAsk(prompt="paint it red", images=(PICTURE,)), PromptAsk(prompt="a blue square")]


@pytest.fixture(scope="module")
def folders(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain as published, NF4 as step 06 makes it, and both as a library saves them: a level more in the names."""
    root = tmp_path_factory.mktemp("encoders")
    rule = nf4.rule_for("text_encoder", "")
    job = streaming.Job(
        component="text_encoder", source=nano / "text_encoder", target=root / "nf4", rule=rule, device="cpu"
    )
    streaming.quantize(job, Progress(quiet=True))
    found = {"plain": nano / "text_encoder", "nf4": root / "nf4"}
    for name, folder in list(found.items()):
        longer = root / f"{name}-longer"
        shutil.copytree(folder, longer)
        tensors = {
            text_encoder.module_name(key): tensor for key, tensor in load_file(folder / WEIGHTS).items()
        }
        save_file(
            {**tensors, "lm_head.weight": torch.ones(3, 64)}, longer / WEIGHTS, metadata={"format": "pt"}
        )
        found[f"{name}-longer"] = longer
    return found


def as_transformers_loads(folder: Path, dtype: torch.dtype) -> Any:
    """Its NF4 layers made to compute in `dtype`, and what is plain beside them brought to it."""
    from bitsandbytes.nn import Linear4bit
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype, device_map={"": "cpu"})
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = module.weight.quant_state.dtype = dtype
            module.support_avx512bf16_for_cpu = False
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


def embeds(encoders: Encoders) -> list[Tensor]:
    return [one.embeds for one in FAMILY.encode_prompts(encoders, ASKS, 64)]


def load(model: Path, dtype: torch.dtype = torch.float32, made: Path | None = None) -> Encoders:
    return FAMILY.load_encoders(
        model,
        text_device="cpu",
        vae_device="cpu",
        text_dtype=dtype,
        vae_dtype=dtype,
        made_text_encoder=made,
        vae=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "nf4"])
def test_it_says_what_transformers_own_says(
    nano: Path, folders: dict[str, Path], kind: str, dtype: torch.dtype
) -> None:
    encoders = load(nano, dtype, folders[kind])
    ours = embeds(encoders)
    own = encoders.pipeline.text_encoder
    assert {type(module).__name__ for name, module in own.named_modules() if name.endswith("q_proj")} == {
        "Linear" if kind == "plain" else "Linear4bit"
    }
    assert not any(p.is_meta or p.requires_grad for p in own.parameters()) and not own.training
    assert {p.dtype for p in own.parameters() if p.is_floating_point()} == {dtype}
    encoders.pipeline.register_modules(text_encoder=as_transformers_loads(folders[kind], dtype))
    for one, other in zip(ours, embeds(encoders), strict=True):
        assert one.dtype == dtype and torch.equal(one, other)
    # The names that a library gives, with a head of any size: the same.
    again = embeds(load(nano, dtype, folders[f"{kind}-longer"]))
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))


def test_a_base_that_is_nf4_itself_needs_no_step(
    nano: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(nano, base)
    shutil.rmtree(base / "text_encoder")
    shutil.copytree(folders["nf4"], base / "text_encoder")
    found, made = embeds(load(base)), embeds(load(nano, made=folders["nf4"]))
    assert all(torch.equal(one, other) for one, other in zip(found, made, strict=True))


def test_one_tensor_of_the_file_at_a_time_and_never_the_head(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That at hand and the one read next; in fp32, so that what is kept is another tensor than what was read."""
    read, alive, most, sizes = shards.read_tensor, list[Any](), 0, list[tuple[int, ...]]()

    def counting(path: Path, entry: shards.Entry) -> Tensor:
        nonlocal most
        tensor = read(path, entry)
        alive[:] = [other for other in alive if other() is not None]
        alive.append(weakref.ref(tensor))
        most = max(most, len(alive))
        sizes.append(entry.shape)
        return tensor

    monkeypatch.setattr(shards, "read_tensor", counting)
    model = text_encoder.load(folders["plain-longer"], device="cpu", dtype=torch.float32)
    assert most == 2 and len(sizes) == len(list(model.parameters())) and (3, 64) not in sizes
    assert not any(name.startswith(text_encoder.HEAD) for name in model.state_dict())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.pop("model.norm.weight"),
            "lacks 1 tensors, first model.language_model.norm",
        ),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "extra .* no such tensor"),
    ],
)
def test_weights_of_another_model_are_refused(
    folders: dict[str, Path], tmp_path: Path, change: Any, said: str
) -> None:
    tensors = load_file(folders["plain"] / WEIGHTS)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    files.write_bytes(tmp_path / "config.json", (folders["plain"] / "config.json").read_bytes())
    with pytest.raises(UserError, match=said):
        text_encoder.load(tmp_path, device="cpu", dtype=torch.float32)


def test_names_of_files_and_of_modules() -> None:
    cases = {
        "model.layers.0.mlp.up_proj.weight": "model.language_model.layers.0.mlp.up_proj.weight",
        "visual.blocks.0.attn.qkv.bias": "model.visual.blocks.0.attn.qkv.bias",
        "model.language_model.norm.weight": "model.language_model.norm.weight",
        "model.visual.merger.ln_q.weight": "model.visual.merger.ln_q.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: text_encoder.module_name(name) for name in cases} == cases


def test_pictures_are_seen(nano: Path) -> None:
    """Or the tower's weights would not matter above."""
    encoders = load(nano)
    white = PromptAsk(prompt=ASKS[0].prompt, images=(Image.new("RGB", PICTURE.size, "white"),))
    (other,) = FAMILY.encode_prompts(encoders, [white], 64)
    assert not torch.equal(other.embeds, embeds(encoders)[0])
