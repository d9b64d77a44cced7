"""A denoiser's weights, wherever they lie, load as the base's own do; anything else is told in one line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import files, shards
from runtime.errors import UserError
from runtime.families import kinds, weights
from runtime.families.base import Conditioning
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.families.qwen_image_edit_plus import QwenImageEditPlus

BLOCK = "transformer_blocks.0.attn.to_q.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def stored(nano: Path) -> Tensors:
    return load_file(nano / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.fixture
def single(tmp_path: Path) -> Callable[..., Path]:
    def write(tensors: Tensors, name: str = "dit.safetensors") -> Path:
        path = tmp_path / "single" / name
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt"})
        return path

    return write


@pytest.fixture(scope="module")
def sharded(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import QwenImageTransformer2DModel

    folder = tmp_path_factory.mktemp("sharded") / "transformer"
    QwenImageTransformer2DModel.from_pretrained(nano / "transformer").save_pretrained(
        folder, max_shard_size="1MB"
    )
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def load(nano: Path, weight: Path | None, *, plus: bool = False, quantize: str = "none", **named: Any) -> Any:
    family = QwenImageEditPlus() if plus else QwenImageEdit()
    return family.load_denoiser(
        nano, device="cpu", dtype=named.get("dtype", torch.float32), quantize=quantize, weight=weight
    )


def answer(denoiser: Any) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    image = torch.randn(1, 16, 8, 8, generator=draw)
    told = Conditioning(embeds=torch.randn(1, 7, 64, generator=draw), mask=None, controls=(image.flip(0),))
    dtype = denoiser.dtype
    with torch.no_grad():
        return QwenImageEdit().predict(
            denoiser, image.to(dtype), torch.tensor([0.5], dtype=dtype), told.to("cpu", dtype)
        )


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


PLACES = {
    "the component's folder": lambda nano, sharded, single, stored: sharded,
    "the model's folder": lambda nano, sharded, single, stored: nano,
    "index": lambda nano, sharded, single, stored: next(sharded.glob("*.index.json")),
    "first shard": lambda nano, sharded, single, stored: min(sharded.glob("*-00001-of-*.safetensors")),
    "last shard": lambda nano, sharded, single, stored: max(sharded.glob("*-of-*.safetensors")),
    "single file": lambda nano, sharded, single, stored: single(stored),
    "model.diffusion_model.": lambda nano, sharded, single, stored: single(
        prefixed(stored, "model.diffusion_model.")
    ),
    "diffusion_model.": lambda nano, sharded, single, stored: single(prefixed(stored, "diffusion_model.")),
    "transformer.": lambda nano, sharded, single, stored: single(prefixed(stored, "transformer.")),
    "compiled": lambda nano, sharded, single, stored: single(prefixed(stored, "_orig_mod.")),
    "a whole pipeline": lambda nano, sharded, single, stored: single(
        prefixed(stored, "model.diffusion_model.")
        | {"vae.encoder.conv1.weight": torch.ones(2), "text_encoders.model.norm.weight": torch.ones(2)}
    ),
}


@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.parametrize("place", PLACES)
def test_every_place_loads_equal(
    nano: Path, sharded: Path, single: Any, stored: Tensors, place: str, quantize: str
) -> None:
    own = load(nano, None, quantize=quantize)
    other = load(nano, PLACES[place](nano, sharded, single, stored), quantize=quantize)
    assert not other.training and type(other) is type(own)
    assert getattr(other, "is_loaded_in_4bit", False) is (quantize == "nf4")
    assert not any(parameter.requires_grad for parameter in other.parameters())
    ours, theirs = own.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(answer(own), answer(other))


def test_other_weights_are_loaded_in_the_asked_dtype(nano: Path, single: Any, stored: Tensors) -> None:
    changed = {name: tensor * 1.5 if name == BLOCK else tensor for name, tensor in stored.items()}
    loaded = load(nano, single(changed), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.state_dict()[BLOCK], changed[BLOCK].bfloat16())
    assert not torch.equal(answer(loaded), answer(load(nano, None, dtype=torch.bfloat16)))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_marker_of_2511_is_no_weight_and_sets_the_variant(
    nano: Path, single: Any, stored: Tensors, prefix: str
) -> None:
    marked = single(prefixed(stored | {weights.MARKER: torch.tensor(0.0)}, prefix), "marked.safetensors")
    plain = single(stored)
    assert weights.open_denoiser_weights(marked).places.keys() == stored.keys()
    variant, base = load(nano, marked, plus=True), load(nano, plain, plus=True)
    assert (variant.config.zero_cond_t, base.config.zero_cond_t) == (True, False)
    assert not torch.equal(answer(variant), answer(base)), "the variant modulates controls otherwise"
    with pytest.raises(UserError, match=r"2511, the base is of the family qwen-image-edit,"):
        load(nano, marked, plus=False)


@pytest.mark.parametrize("said", [True, False])
def test_a_folder_says_its_variant_and_a_single_file_leaves_it_to_the_base(
    nano: Path, tmp_path: Path, single: Any, stored: Tensors, said: bool
) -> None:
    def with_variant(name: str, value: bool) -> Path:
        shutil.copytree(nano, tmp_path / name)
        path = tmp_path / name / "transformer" / "config.json"
        files.write_json(path, {**files.read_json(path), "zero_cond_t": value})
        return tmp_path / name

    base, folder = with_variant("base", not said), with_variant("other", said)
    assert load(base, folder, plus=True).config.zero_cond_t is said
    assert load(base, single(stored), plus=True).config.zero_cond_t is not said


def float8(stored: Tensors, scales: Callable[[Tensor], Tensor], leaf: str) -> Tensors:
    """Block linears in fp8; `scales` of a weight's largest values by row gives what is stored beside it."""
    out: Tensors = {}
    for name, tensor in stored.items():
        if tensor.ndim != 2 or "blocks" not in name:
            out[name] = tensor
            continue
        scale = scales(tensor.abs().amax(dim=1) / 448)
        by_row = scale.reshape(-1, 1) if scale.numel() > 1 else scale
        out[name] = (tensor / by_row).to(torch.float8_e4m3fn)
        out[name.replace(".weight", f".{leaf}")] = scale
    return out


@pytest.mark.parametrize("leaf", weights.SCALES)
@pytest.mark.parametrize("rows", [True, False])
def test_fp8_is_multiplied_by_its_scale(
    nano: Path, single: Any, stored: Tensors, leaf: str, rows: bool
) -> None:
    packed = float8(stored, (lambda most: most) if rows else (lambda most: most.max()), leaf)
    note = torch.frombuffer(bytearray(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    extras = {"scaled_fp8": torch.zeros(2), BLOCK.replace("weight", "comfy_quant"): note}
    loaded = load(nano, single(packed | extras)).state_dict()
    scale = packed[BLOCK.replace(".weight", f".{leaf}")]
    expected = packed[BLOCK].float() * (scale[:, None] if rows else scale)
    assert torch.equal(loaded[BLOCK], expected)
    assert (loaded[BLOCK] - stored[BLOCK]).norm() / stored[BLOCK].norm() < 0.05


@pytest.mark.parametrize("rows", [True, False])
def test_fp8_is_quantized_from_its_values_in_full(
    nano: Path, single: Any, stored: Tensors, rows: bool
) -> None:
    """NF4 of what fp8 times its scale says in fp32, the same bits; not of the bare fp8 numbers."""
    packed = float8(stored, (lambda most: most) if rows else (lambda most: most.max()), "scale_weight")
    scales = {
        n: packed[s] for n in packed if (s := n.replace(".weight", ".scale_weight")) in packed and s != n
    }
    full = {n: packed[n].float() * (scales[n][:, None] if rows else scales[n]) for n in scales}
    ours = load(nano, single(packed, "fp8.safetensors"), quantize="nf4", dtype=torch.bfloat16)
    theirs = load(nano, single({**stored, **full}), quantize="nf4", dtype=torch.bfloat16)
    one, other = ours.state_dict(), theirs.state_dict()
    assert len(scales) > 20 and one[BLOCK].dtype == torch.uint8
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_fp8_without_scales_is_what_it_says(nano: Path, single: Any, stored: Tensors) -> None:
    cast = {n: t.to(torch.float8_e5m2) if "blocks" in n else t for n, t in stored.items()}
    assert torch.equal(load(nano, single(cast)).state_dict()[BLOCK], cast[BLOCK].float())


def _fp8(stored: Tensors, extra: Tensors) -> Tensors:
    return {**stored, BLOCK: stored[BLOCK].to(torch.float8_e4m3fn), **extra}


NOTE = torch.frombuffer(bytearray(b'{"format": "nvfp4"}'), dtype=torch.uint8)
QKV = "transformer_blocks.0.attn.to_q"
REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a tensor too few": (
        lambda s: {n: t for n, t in s.items() if n != BLOCK},
        rf"no denoiser of this base: 1 missing: {BLOCK}$",
    ),
    "tensors too many": (
        lambda s: s | {f"extra.{i}": torch.ones(1) for i in range(7)},
        r"7 unexpected: extra\.0, extra\.1, extra\.2, extra\.3, extra\.4$",
    ),
    "another shape": (
        lambda s: s | {BLOCK: torch.ones(4, 4)},
        rf"1 of another shape: {BLOCK} \[4, 4\] instead of \[128, 128\]$",
    ),
    "fewer blocks, under a prefix": (
        lambda s: prefixed({n: t for n, t in s.items() if "blocks.1." not in n}, "diffusion_model."),
        r"32 missing: transformer_blocks\.1\.",
    ),
    "scales by block": (
        lambda s: _fp8(s, {f"{QKV}.scale_weight": torch.ones(128, 2, 1)}),
        r"the scale \[128, 2, 1\] of .*to_q\.weight is of a scheme",
    ),
    "a scale of no fp8 weight": (
        lambda s: _fp8(s, {"img_in.weight_scale": torch.ones(())}),
        r"the scale \[\] of img_in\.weight is of a scheme",
    ),
    "another scheme by name": (
        lambda s: _fp8(s, {f"{QKV}.comfy_quant": NOTE}),
        r"to_q\.comfy_quant says nvfp4, which is not read here; float8_e4m3fn and",
    ),
    "a scheme that can't be read": (
        lambda s: _fp8(s, {f"{QKV}.comfy_quant": torch.tensor([123, 1], dtype=torch.uint8)}),
        r"to_q\.comfy_quant says b'\{\\x01', which is not read here",
    ),
    "no denoiser": (
        lambda s: {"blocks.0.self_attn.q.weight": torch.ones(2)},
        r"is no weights of a kind known here, expected a Qwen-Image DiT; it begins with blocks\.0",
    ),
    "an adapter": (
        lambda s: {f"{QKV}.lora_A.weight": torch.ones(2, 2)},
        r"is a LoRA adapter, expected a Qwen-Image DiT$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(nano: Path, single: Any, stored: Tensors, case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        load(nano, single(change(stored)))
    assert "\n" not in caught.value.message and caught.value.remedy


def test_a_shard_that_is_absent_is_named(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded, tmp_path / "torn")
    first, second, *_ = sorted((tmp_path / "torn").glob("*.safetensors"))
    second.unlink()
    index = next((tmp_path / "torn").glob("*.index.json"))
    for path in (first, index, tmp_path / "torn"):
        with pytest.raises(UserError, match=f"incomplete; shards not there: {second.name}$"):
            weights.open_denoiser_weights(path)


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"no json", "a.index.json"), (b"{}", "b.index.json"), (b"GGUF....", "c.gguf"), (b"", "d.safetensors")],
)
def test_files_of_another_form(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is no"):
        weights.open_denoiser_weights(tmp_path / name)


def test_what_is_not_there_and_what_is_there_twice(tmp_path: Path, single: Any, stored: Tensors) -> None:
    with pytest.raises(UserError, match="absent is not there"):
        weights.open_denoiser_weights(tmp_path / "absent")
    one = single(stored, "one.safetensors")
    single(stored, "two.safetensors")
    with pytest.raises(UserError, match=r"twice, in one\.safetensors and two\.safetensors"):
        weights.open_denoiser_weights(one.parent)


def test_opening_reads_headers_only(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "read_tensor", lambda *given: pytest.fail("a tensor was read"))
    opened = weights.open_denoiser_weights(sharded)
    assert len(opened.files) > 2 and len({place.file for place in opened.places.values()}) > 2


def test_the_fingerprint_is_of_what_is_loaded(
    tmp_path: Path, sharded: Path, single: Any, stored: Tensors
) -> None:
    shutil.copytree(sharded, tmp_path / "copy")
    first = min(sharded.glob("*.safetensors"))
    alone = weights.open_denoiser_weights(first).fingerprint()
    assert alone == weights.open_denoiser_weights(tmp_path / "copy" / first.name).fingerprint()
    whole = weights.open_denoiser_weights(tmp_path / "copy").fingerprint()
    (tmp_path / "copy" / "notes.txt").write_text("no weights", encoding="utf-8")
    assert weights.open_denoiser_weights(tmp_path / "copy").fingerprint() == whole
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("false", "true"), encoding="utf-8")
    assert weights.open_denoiser_weights(tmp_path / "copy").fingerprint() != whole != alone
    file = single(stored)
    before = weights.open_denoiser_weights(file).fingerprint()
    assert before == files.weights_fingerprint(file.parent)
    save_file(stored | {BLOCK: stored[BLOCK] + 1}, file)
    assert weights.open_denoiser_weights(file).fingerprint() != before


# ---- kinds


@pytest.mark.parametrize(
    ("component", "kind"), [("transformer", "denoiser"), ("text_encoder", "text encoder"), ("vae", "vae")]
)
def test_kind_of_the_bases_own_components(nano: Path, component: str, kind: str) -> None:
    folder = nano / component
    assert kinds.kind_of(folder) == kinds.kind_of(next(folder.glob("*.safetensors"))) == kind
    assert set(kinds.CALLED) == {*kinds.PATTERNS, "unknown"}


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["model.diffusion_model.transformer_blocks.59.txt_mod.1.weight"], "denoiser"),
        (["transformer_blocks.7.attn.add_k_proj.weight_scale"], "denoiser"),
        (["lora_unet_transformer_blocks_0_img_mlp_net_2.lora_down.weight"], "adapter"),
        (["transformer_blocks.0.img_mod.1.lora.up.weight"], "adapter"),
        (["transformer_blocks.0.img_mod.1.lokr_w1"], "adapter"),
        (["model.language_model.layers.0.self_attn.q_proj.weight"], "text encoder"),
        (["visual.blocks.3.norm1.weight"], "text encoder"),
        (["first_stage_model.decoder.conv_in.weight"], "vae"),
        (["encoder.downsamples.0.residual.0.gamma"], "vae"),
        (["double_blocks.0.img_attn.qkv.weight", "encoder.layer.0.weight"], "unknown"),
        (["transformer_blocks.0.norm1.linear.weight"], "unknown"),
        ([], "unknown"),
    ],
)
def test_kinds_by_name(names: list[str], kind: str) -> None:
    assert kinds.of_names(names) == kind


def swapped(nano: Path, place: Path, one: str, other: str) -> Path:
    """A base in which the weights of `one` are those of `other`."""
    shutil.copytree(nano, place)
    for old in (place / one).glob("*.safetensors"):
        old.unlink()
        shutil.copyfile(next((nano / other).glob("*.safetensors")), old)
    return place


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ("text_encoder", "transformer", "is a Qwen-Image DiT, expected a text encoder"),
        ("vae", "text_encoder", "is a text encoder, expected a VAE"),
        ("transformer", "vae", "is a VAE, expected a Qwen-Image DiT"),
    ],
)
def test_components_in_each_others_place_get_one_line(
    nano: Path, tmp_path: Path, one: str, other: str, told: str
) -> None:
    base = swapped(nano, tmp_path / "base", one, other)
    family, dtype = QwenImageEdit(), torch.float32

    def load_it() -> Any:
        if one == "transformer":
            return family.load_denoiser(base, device="cpu", dtype=dtype, quantize="none")
        return family.load_encoders(
            base, text_device="cpu", text_dtype=dtype, vae_device="cpu", vae_dtype=dtype
        )

    with pytest.raises(UserError) as caught:
        load_it()
    assert caught.value.message == f"{base / one} {told}"
    with pytest.raises(UserError, match=r"expected a Qwen-Image DiT$"):
        weights.open_denoiser_weights(nano / ("vae" if one == "transformer" else one))
