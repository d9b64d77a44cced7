"""The adapter: what is trained, saved, switched off and read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runtime.config.model import Lora
from runtime.errors import ConfigError, UserError
from runtime.families.registry import load_family
from runtime.training import trainables

LORA = Lora(r=4, lora_alpha=8)


@pytest.fixture
def family(nano: Path) -> Any:
    return load_family(nano)


def load(family: Any, model: Path, quantize: str = "none", dtype: torch.dtype = torch.float32) -> Any:
    return family.load_denoiser(model, device="cpu", dtype=dtype, quantize=quantize)


def shake(adapter: trainables.Adapter) -> None:
    """lora_B starts at zero; give the adapter something to say."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.fixture
def ask() -> Any:
    """The denoiser's answer to one fixed question."""
    generator = torch.Generator().manual_seed(7)
    latents = torch.randn((1, 2 * 4 * 4, 64), generator=generator)

    def predict(denoiser: Any) -> torch.Tensor:
        texts = torch.randn((1, 9, denoiser.config.joint_attention_dim), generator=generator.manual_seed(8))
        with torch.no_grad():
            answer: torch.Tensor = denoiser(
                hidden_states=latents.to(denoiser.dtype),
                encoder_hidden_states=texts.to(denoiser.dtype),
                timestep=torch.tensor([0.5]).to(denoiser.dtype),
                img_shapes=[[(1, 4, 4), (1, 4, 4)]],
                return_dict=False,
            )[0]
        return answer

    return predict


# Every shape that an adapter can have.
KINDS = {
    "plain": LORA,
    "rslora": Lora(r=4, lora_alpha=8, use_rslora=True),
    "dora": Lora(r=4, lora_alpha=8, use_dora=True),
    "preset": Lora(r=4, lora_alpha=8, target_modules="all-linear"),
    "pattern": Lora(r=4, lora_alpha=8, target_modules=("transformer_blocks.1.attn.*", "proj_out")),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def test_only_the_adapter_is_trained(family: Any, nano: Path) -> None:
    denoiser = load(family, nano)
    assert not any(p.requires_grad for p in denoiser.parameters())
    adapter = trainables.add_adapter(denoiser, LORA, seed=1)
    names = [name for name, _ in adapter.named_parameters()]
    assert len(names) == 2 * 4 * 2  # A and B of four linears in two blocks
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert adapter.scale == 2.0


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_the_adapter_is_fp32_over_a_bf16_base(family: Any, nano: Path, quantize: str) -> None:
    adapter = trainables.add_adapter(load(family, nano, quantize, torch.bfloat16), LORA, seed=1)
    assert {p.dtype for p in adapter.parameters()} == {torch.float32}


@kinds
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_fresh_adapter_changes_nothing(family: Any, nano: Path, ask: Any, kind: str, quantize: str) -> None:
    denoiser = load(family, nano, quantize, torch.bfloat16)
    before = ask(denoiser)
    trainables.add_adapter(denoiser, KINDS[kind], seed=1)
    assert torch.equal(before, ask(denoiser))


@kinds
def test_a_zeroed_adapter_is_the_base_and_comes_back(family: Any, nano: Path, ask: Any, kind: str) -> None:
    denoiser = load(family, nano)
    base = ask(denoiser)
    adapter = trainables.add_adapter(denoiser, KINDS[kind], seed=1)
    shake(adapter)
    trained = ask(denoiser)
    assert not torch.equal(trained, base)
    with adapter.zeroed():
        assert torch.equal(ask(denoiser), base)
    assert torch.equal(ask(denoiser), trained)


@pytest.mark.parametrize(("kind", "scale"), [("plain", 8 / 4), ("dora", 8 / 4), ("rslora", 8 / 4**0.5)])
def test_scale_is_the_one_that_is_applied(family: Any, nano: Path, kind: str, scale: float) -> None:
    denoiser = load(family, nano)
    adapter = trainables.add_adapter(denoiser, KINDS[kind], seed=1)
    layer = denoiser.transformer_blocks[0].attn.to_q
    assert adapter.scale == scale == layer.scaling["default"]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("preset", {f"transformer_blocks.{i}.{n}" for i in (0, 1) for n in ("attn.to_out.0", "img_mod.1")}),
        ("pattern", {"transformer_blocks.1.attn.to_add_out", "proj_out"}),
    ],
)
def test_presets_and_patterns_reach_their_linears(
    family: Any, nano: Path, kind: str, names: set[str]
) -> None:
    adapter = trainables.add_adapter(load(family, nano), KINDS[kind], seed=1)
    adapted = {name.partition(".lora_")[0] for name, _ in adapter.named_parameters()}
    assert names <= adapted
    assert len(adapted) == {"preset": 2 * 14, "pattern": 8 + 1}[kind]


def test_initial_values_follow_from_the_seed_alone(family: Any, nano: Path) -> None:
    def drawn(seed: int, init: Any = "gaussian") -> list[torch.Tensor]:
        torch.manual_seed(torch.seed())
        lora = Lora(r=4, lora_alpha=8, init_lora_weights=init)
        return trainables.add_adapter(load(family, nano), lora, seed=seed).parameters()

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one[::2], other[::2], strict=True))
    kaiming = drawn(1, True)
    assert not any(torch.equal(a, b) for a, b in zip(one[::2], kaiming[::2], strict=True))
    assert all(not b.any() for b in [*one[1::2], *kaiming[1::2]])


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_disabled_is_the_base_and_restores_even_on_an_exception(
    family: Any, nano: Path, ask: Any, quantize: str
) -> None:
    denoiser = load(family, nano, quantize)
    base = ask(denoiser)
    adapter = trainables.add_adapter(denoiser, LORA, seed=1)
    shake(adapter)
    trained, count = ask(denoiser), len(adapter.parameters())
    with adapter.disabled():
        assert torch.equal(ask(denoiser), base)
    assert torch.equal(ask(denoiser), trained)
    with pytest.raises(RuntimeError, match="inside"), adapter.disabled():
        raise RuntimeError("inside")
    assert torch.equal(ask(denoiser), trained)
    assert len(adapter.parameters()) == count  # peft drops requires_grad while an adapter is off
    assert not torch.equal(trained, base)


def test_disabled_within_disabled_stays_off(family: Any, nano: Path, ask: Any) -> None:
    denoiser = load(family, nano)
    base = ask(denoiser)
    adapter = trainables.add_adapter(denoiser, LORA, seed=1)
    shake(adapter)
    with adapter.disabled():
        with adapter.disabled():
            pass
        assert torch.equal(ask(denoiser), base)
    assert not torch.equal(ask(denoiser), base)


def test_magnitudes_are_saved_as_peft_names_them(family: Any, nano: Path, tmp_path: Path) -> None:
    trainables.add_adapter(load(family, nano), KINDS["dora"], seed=1).save(tmp_path)
    saved = load_file(tmp_path / trainables.WEIGHTS)
    found = {name: tuple(t.shape) for name, t in saved.items() if "magnitude" in name}
    width = saved["transformer.transformer_blocks.0.attn.to_q.lora_B.weight"].shape[0]
    assert found == {
        f"transformer.transformer_blocks.{block}.attn.{linear}.lora_magnitude_vector": (width,)
        for block in (0, 1)
        for linear in LORA.target_modules
    }


def test_saved_file_is_what_diffusers_and_peft_expect(family: Any, nano: Path, tmp_path: Path) -> None:
    adapter = trainables.add_adapter(load(family, nano), LORA, seed=1)
    adapter.save(tmp_path)
    with safe_open(tmp_path / trainables.WEIGHTS, "pt") as handle:
        metadata = json.loads(handle.metadata()["lora_adapter_metadata"])
        names = set(handle.keys())
        assert {handle.get_tensor(name).dtype for name in names} == {torch.float32}
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (4, 8)
    assert sorted(metadata["transformer.target_modules"]) == sorted(LORA.target_modules)
    expected = {
        f"transformer.transformer_blocks.{block}.attn.{linear}.lora_{part}.weight"
        for block in (0, 1)
        for linear in LORA.target_modules
        for part in "AB"
    }
    assert names == expected


@kinds
def test_diffusers_own_loader_gives_the_same_output(
    family: Any, nano: Path, ask: Any, tmp_path: Path, kind: str
) -> None:
    """alpha is twice the rank here: a reader that loses it is off by a factor of two."""
    from diffusers import QwenImageEditPipeline

    denoiser = load(family, nano)
    adapter = trainables.add_adapter(denoiser, KINDS[kind], seed=1)
    shake(adapter)
    adapter.save(tmp_path)
    fresh = load(family, nano)
    base = ask(fresh)
    pipeline = QwenImageEditPipeline(
        scheduler=None, vae=None, text_encoder=None, tokenizer=None, processor=None, transformer=fresh
    )
    pipeline.load_lora_weights(tmp_path)
    if kind == "dora":  # the lengths are computed another way
        torch.testing.assert_close(ask(fresh), ask(denoiser), rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(ask(fresh), ask(denoiser))
    assert not torch.allclose(ask(fresh), base, atol=1e-2)


@kinds
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_our_own_loader_gives_the_same_output(
    family: Any, nano: Path, ask: Any, tmp_path: Path, quantize: str, kind: str
) -> None:
    denoiser = load(family, nano, quantize)
    adapter = trainables.add_adapter(denoiser, KINDS[kind], seed=1)
    shake(adapter)
    adapter.save(tmp_path)
    fresh = load(family, nano, quantize)
    loaded = trainables.load_adapter(fresh, tmp_path)
    assert loaded.scale == adapter.scale
    assert torch.equal(ask(fresh), ask(denoiser))


@kinds
def test_state_holds_the_trained_parameters_and_nothing_else(
    family: Any, nano: Path, tmp_path: Path, kind: str
) -> None:
    adapter = trainables.add_adapter(load(family, nano), KINDS[kind], seed=1)
    shake(adapter)
    adapter.save_state(tmp_path)
    saved = load_file(tmp_path / trainables.STATE)
    assert saved.keys() == {name for name, _ in adapter.named_parameters()}
    other = trainables.add_adapter(load(family, nano), KINDS[kind], seed=2)
    other.load_state(tmp_path)
    for (name, one), (_, two) in zip(adapter.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_state_of_another_adapter_is_refused(family: Any, nano: Path, tmp_path: Path) -> None:
    adapter = trainables.add_adapter(load(family, nano), LORA, seed=1)
    adapter.save_state(tmp_path)
    saved = {name: tensor.clone() for name, tensor in load_file(tmp_path / trainables.STATE).items()}
    save_file({**saved, "base.weight": torch.zeros(1)}, tmp_path / trainables.STATE)
    with pytest.raises(KeyError, match="holds more than this adapter"):
        adapter.load_state(tmp_path)
    save_file(dict(list(saved.items())[1:]), tmp_path / trainables.STATE)
    with pytest.raises(KeyError):
        adapter.load_state(tmp_path)


def test_an_unknown_target_module_is_refused_with_those_that_exist(family: Any, nano: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trainables.add_adapter(load(family, nano), Lora(target_modules=("to_q", "to_queue")), seed=1)
    assert "no linear of the denoiser is called to_queue" in caught.value.message
    assert "attn.to_q" in caught.value.message and "img_mlp.net.2" in caught.value.message


def test_a_target_module_that_is_no_linear_is_refused(family: Any, nano: Path) -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        trainables.add_adapter(load(family, nano), Lora(target_modules=("attn",)), seed=1)


def copies(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(folder / trainables.WEIGHTS).items()}


def without_metadata(folder: Path) -> None:
    save_file(copies(folder), folder / trainables.WEIGHTS)


def of_a_larger_base(folder: Path) -> None:
    with safe_open(folder / trainables.WEIGHTS, "pt") as handle:
        metadata = handle.metadata()
    tensors = copies(folder)
    more = {
        name.replace("blocks.1", "blocks.7"): t.clone() for name, t in tensors.items() if "blocks.1" in name
    }
    save_file({**tensors, **more}, folder / trainables.WEIGHTS, metadata=metadata)


def of_a_smaller_base(folder: Path) -> None:
    with safe_open(folder / trainables.WEIGHTS, "pt") as handle:
        metadata = handle.metadata()
    tensors = copies(folder)
    kept = {name: t for name, t in tensors.items() if "transformer_blocks.1" not in name}
    save_file(kept, folder / trainables.WEIGHTS, metadata=metadata)


@pytest.mark.parametrize("spoil", [without_metadata, of_a_larger_base, of_a_smaller_base])
def test_an_adapter_file_that_does_not_fit_is_refused(
    family: Any, nano: Path, tmp_path: Path, spoil: Any
) -> None:
    trainables.add_adapter(load(family, nano), LORA, seed=1).save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=r"pytorch_lora_weights\.safetensors"):
        trainables.load_adapter(load(family, nano), tmp_path)
