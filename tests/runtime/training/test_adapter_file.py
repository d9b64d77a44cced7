"""Adapters of other tools: the same adapter in every naming is the same delta; what is none of it is told."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from runtime import files
from runtime.config.model import Lora
from runtime.errors import UserError
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.training import adapter_file, naming, trainables

Tensors = dict[str, Tensor]
# Outputs and inputs; ranks and alphas differ from module to module (G9), and no alpha is its rank.
MODULES = {
    "transformer_blocks.0.attn.to_q": (6, 5),
    "transformer_blocks.0.attn.to_out.0": (5, 6),
    "transformer_blocks.10.img_mlp.net.0.proj": (9, 5),
}
RANKS = dict(zip(MODULES, (4, 8, 4), strict=True))
ALPHAS = dict(zip(MODULES, (8.0, 2.0, 1.0), strict=True))
Q = "transformer_blocks.0.attn.to_q"


def toy() -> dict[str, tuple[Tensor, Tensor]]:
    """A [r, in] and B [out, r] of each module."""
    draw = torch.Generator().manual_seed(7)
    return {
        module: (
            torch.randn(RANKS[module], inputs, generator=draw),
            torch.randn(outputs, RANKS[module], generator=draw),
        )
        for module, (outputs, inputs) in MODULES.items()
    }


def deltas(alphas: dict[str, float]) -> Tensors:
    return {
        module: alphas[module] / RANKS[module] * (b.double() @ a.double()) for module, (a, b) in toy().items()
    }


def named(
    name: Callable[[str], str], down: str, up: str, *, alpha: bool, reverse: bool = False
) -> list[tuple[str, Tensor]]:
    pairs = []
    for module, (a, b) in toy().items():
        pairs += [(f"{name(module)}.{down}.weight", a), (f"{name(module)}.{up}.weight", b)]
        pairs += [(f"{name(module)}.alpha", torch.tensor(ALPHAS[module]))] * alpha
    return pairs[::-1] if reverse else pairs


def flat(module: str) -> str:
    return "lora_unet_" + module.replace(".", "_")


NAMINGS: dict[str, tuple[Callable[[str], str], str, str, bool]] = {
    "diffusers": (lambda m: f"transformer.{m}", "lora_A", "lora_B", False),
    "old diffusers": (lambda m: f"transformer.{m}", "lora.down", "lora.up", False),
    "peft": (lambda m: f"base_model.model.{m}", "lora_A", "lora_B", False),
    "DiffSynth": (lambda m: m, "lora_A.default", "lora_B.default", False),
    "ComfyUI": (lambda m: f"diffusion_model.{m}", "lora_A", "lora_B", True),
    "ComfyUI, down and up": (lambda m: f"diffusion_model.{m}", "lora_down", "lora_up", True),
    "kohya": (flat, "lora_down", "lora_up", True),
    "distillation": (lambda m: m, "lora_down", "lora_up", True),
}


def write(path: Path, tensors: Any, metadata: dict[str, str] | None = None) -> Path:
    save_file({name: tensor.clone() for name, tensor in dict(tensors).items()}, path, metadata=metadata)
    return path


def same(found: adapter_file.AdapterFile, expected: Tensors) -> None:
    assert found.modules.keys() == expected.keys()
    for module, delta in expected.items():
        torch.testing.assert_close(found.modules[module].delta(), delta, rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", NAMINGS)
def test_one_adapter_in_every_naming_is_one_delta(tmp_path: Path, form: str) -> None:
    name, down, up, alpha = NAMINGS[form]
    path = write(tmp_path / "a.safetensors", named(name, down, up, alpha=alpha))
    found = adapter_file.read_adapter(path, MODULES)
    same(found, deltas(ALPHAS if alpha else {module: float(rank) for module, rank in RANKS.items()}))
    assert found.ignored == () and found.sha256 == files.file_digest(path) and found.path == path


@pytest.mark.parametrize("reverse", [False, True])
def test_without_alpha_it_is_each_modules_own_rank_whatever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    """G9: ranks 4 and 8, in both orders of keys and of modules; safetensors' own writer would sort them."""
    name, down, up, _ = NAMINGS["diffusers"]
    pairs = dict(named(name, down, up, alpha=False, reverse=reverse))
    monkeypatch.setattr(adapter_file, "_load", lambda file: (pairs, {}))
    path = write(tmp_path / "a.safetensors", pairs)
    modules = dict(reversed(MODULES.items())) if reverse else MODULES
    found = adapter_file.read_adapter(path, modules)
    same(found, deltas({module: float(rank) for module, rank in RANKS.items()}))
    assert [factors.rank for factors in found.modules.values()] == [RANKS[module] for module in found.modules]


def packed(**config: Any) -> dict[str, str]:
    return {
        adapter_file.METADATA: json.dumps(
            {f"transformer.{k}": v for k, v in config.items()} | {"text_encoder.lora_alpha": 99}
        )
    }


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "one alpha": ({"lora_alpha": 16, "r": 4}, dict.fromkeys(MODULES, 16.0)),
    "a pattern by the end": (
        {"lora_alpha": 16, "alpha_pattern": {"to_q": 3}},
        dict.fromkeys(MODULES, 16.0) | {Q: 3.0},
    ),
    "no pattern within a word": (
        {"lora_alpha": 16, "alpha_pattern": {"o_q": 3, "transformer_blocks.0": 5}},
        dict.fromkeys(MODULES, 16.0),
    ),
    "rank-stabilised": (
        {"lora_alpha": 16, "use_rslora": True},
        {module: 16 * math.sqrt(rank) for module, rank in RANKS.items()},
    ),
    "nothing said": ({"r": 4}, {module: float(rank) for module, rank in RANKS.items()}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_alpha_from_metadata(tmp_path: Path, case: str) -> None:
    config, alphas = SETTINGS[case]
    name, down, up, _ = NAMINGS["diffusers"]
    pairs = named(name, down, up, alpha=False)
    same(
        adapter_file.read_adapter(write(tmp_path / "a.safetensors", pairs, packed(**config)), MODULES),
        deltas(alphas),
    )
    (tmp_path / "peft").mkdir()
    name, down, up, _ = NAMINGS["peft"]
    write(tmp_path / "peft" / "adapter_model.safetensors", named(name, down, up, alpha=False))
    files.write_json(tmp_path / "peft" / "adapter_config.json", config)
    same(adapter_file.read_adapter(tmp_path / "peft", MODULES), deltas(alphas))


def test_a_tensor_goes_before_metadata_and_zero_means_the_rank(tmp_path: Path) -> None:
    name, down, up, _ = NAMINGS["diffusers"]
    pairs = dict(named(name, down, up, alpha=False))
    pairs |= {f"transformer.{Q}.alpha": torch.tensor(5.0)}
    pairs |= {"transformer.transformer_blocks.0.attn.to_out.0.alpha": torch.tensor(0)}
    found = adapter_file.read_adapter(
        write(tmp_path / "a.safetensors", pairs, packed(lora_alpha=16)), MODULES
    )
    assert [factors.alpha for factors in found.modules.values()] == [5.0, 8.0, 16.0]


def test_the_text_encoders_part_is_named_and_left_out(tmp_path: Path) -> None:
    pairs = dict(named(*NAMINGS["kohya"][:3], alpha=True))
    extra = {"lora_te1_layers_0_q.lora_down.weight": torch.ones(2, 2), "text_encoder.q.alpha": torch.ones(())}
    found = adapter_file.read_adapter(write(tmp_path / "a.safetensors", pairs | extra), MODULES)
    assert sorted(found.ignored) == sorted(extra)
    same(found, deltas(ALPHAS))
    with pytest.raises(UserError, match="none of its 2 tensors belongs"):
        adapter_file.read_adapter(write(tmp_path / "b.safetensors", extra), MODULES)


A, B = torch.ones(2, 5), torch.ones(6, 2)
DOWN, UP = f"transformer.{Q}.lora_A.weight", f"transformer.{Q}.lora_B.weight"
REFUSED: dict[str, tuple[Tensors, str]] = {
    "an unknown prefix": (
        {f"lycoris.{Q}.lora_A.weight": A, f"lycoris.{Q}.lora_B.weight": B},
        rf"none of its 2 tensors belongs to a linear of this denoiser; it begins with lycoris\.{Q}\.lora_A\."
        r"weight, .*known namings of a module M: transformer\.M\.lora_A\.weight, ",
    ),
    "empty": ({}, "none of its 0 tensors .* begins with nothing"),
    "a denoiser": (
        {"transformer_blocks.0.img_mod.1.weight": A},
        "is a Qwen-Image DiT, expected a LoRA adapter$",
    ),
    "some of another model": (
        {DOWN: A, UP: B, "transformer.transformer_blocks.99.attn.to_q.lora_A.weight": A},
        r"1 of its 3 tensors belong to no linear of this denoiser: transformer\.transformer_blocks\.99\.",
    ),
    "A alone": ({DOWN: A}, rf"{Q} has no B \(up\)$"),
    "B alone": ({UP: B}, rf"{Q} has no A \(down\)$"),
    "alpha alone": ({f"{Q}.alpha": torch.ones(())}, rf"{Q} has no A \(down\) and no B \(up\)$"),
    "ranks of two kinds": (
        {DOWN: torch.ones(3, 5), UP: B},
        r"has A \[3, 5\] and B \[6, 2\], expected A \[r, 5\]",
    ),
    "other inputs": (
        {DOWN: torch.ones(2, 7), UP: B},
        r"has A \[2, 7\] .* expected A \[r, 5\] and B \[6, r\]",
    ),
    "other outputs": ({DOWN: A, UP: torch.ones(5, 2)}, r"has A \[2, 5\] and B \[5, 2\]"),
    "turned": ({DOWN: A.T.contiguous(), UP: B.T.contiguous()}, r"has A \[5, 2\] and B \[2, 6\]"),
    "a convolution": ({DOWN: A[..., None, None], UP: B}, r"has A \[2, 5, 1, 1\]"),
    "no rank": ({DOWN: torch.ones(0, 5), UP: torch.ones(6, 0)}, r"has A \[0, 5\]"),
    "not finite": ({DOWN: A, UP: B * math.nan}, f"{Q} holds values that are not finite"),
    "twice": (
        {DOWN: A, UP: B, f"{Q}.lora_A.default.weight": A},
        rf"holds {Q} twice: .*lora_A.* and .*lora_A",
    ),
    "magnitudes of the inputs": (
        {DOWN: A, UP: B, f"transformer.{Q}.dora_scale": torch.ones(1, 5)},
        r"DoRA magnitudes \[1, 5\], expected \[6\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    tensors, message = REFUSED[case]
    path = write(tmp_path / "a.safetensors", tensors)
    with pytest.raises(UserError, match=message) as caught:
        adapter_file.read_adapter(path, MODULES)
    assert str(path) in caught.value.message and caught.value.remedy


def test_files_that_are_none(tmp_path: Path) -> None:
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"\x10\x00")
    bad = write(tmp_path / "bad.safetensors", {DOWN: A, UP: B}, {adapter_file.METADATA: "[1]"})
    for path, message in (
        (torn, "torn.safetensors is no whole .safetensors file"),
        (bad, "bad.safetensors: its adapter settings can't be read"),
        (tmp_path, "given as an adapter, holds no pytorch_lora_weights.safetensors or adapter_model"),
        (tmp_path / "absent.safetensors", "given as an adapter, is not there"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            adapter_file.read_adapter(path, MODULES)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(1, 6),
    alpha=st.floats(0.25, 64, width=32),
    form=st.sampled_from([form for form in naming.FORMATS if form != "diffusers"]),
    dora=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_exported_reads_back_equal(
    tmp_path: Path, rank: int, alpha: float, form: str, dora: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for module, (outputs, inputs) in MODULES.items():
        tensors[f"transformer.{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw)
        tensors[f"transformer.{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw)
        if dora:
            tensors[f"transformer.{module}.lora_magnitude_vector"] = torch.randn(outputs, generator=draw)
    plain = write(tmp_path / "plain.safetensors", tensors, packed(lora_alpha=alpha))
    other = write(tmp_path / "other.safetensors", naming.exported(tensors, alpha, form))
    one, two = (adapter_file.read_adapter(path, MODULES) for path in (plain, other))
    assert one.modules.keys() == two.modules.keys() == MODULES.keys()
    for module in MODULES:
        a, b = one.modules[module], two.modules[module]
        assert torch.equal(a.delta(), b.delta()) and a.delta().abs().max() > 0
        if dora:
            assert a.magnitude is not None and b.magnitude is not None
            assert torch.equal(a.magnitude, b.magnitude)
        else:
            assert a.magnitude is b.magnitude is None


# ---- what the trainer and peft write


@pytest.fixture
def denoiser(nano: Path) -> Any:
    return QwenImageEdit().load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")


@pytest.mark.parametrize("choices", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_our_own_checkpoint_reads_as_it_is_applied(
    denoiser: Any, tmp_path: Path, choices: dict[str, bool]
) -> None:
    modules = adapter_file.linears(denoiser)
    adapter = trainables.add_adapter(denoiser, Lora(r=4, lora_alpha=6, **choices), seed=1)
    assert adapter_file.linears(denoiser) == modules, "the adapter's own linears are none of the base's"
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter.data)
    adapter.save(tmp_path)
    found = adapter_file.read_adapter(tmp_path, modules)
    assert len(found.modules) == 8
    for module, factors in found.modules.items():
        layer = denoiser.get_submodule(module)
        assert factors.scale == pytest.approx(layer.scaling["default"], rel=1e-12)
        assert torch.equal(factors.up, layer.lora_B["default"].weight.data)
        assert torch.equal(factors.down, layer.lora_A["default"].weight.data)
        if choices.get("use_dora"):
            assert factors.magnitude is not None
            assert torch.equal(factors.magnitude, layer.lora_magnitude_vector["default"].weight.data)


@pytest.mark.parametrize("dora", [False, True])
def test_pefts_own_folder_reads_as_it_is_applied(denoiser: Any, tmp_path: Path, dora: bool) -> None:
    from peft import LoraConfig, get_peft_model

    modules = adapter_file.linears(denoiser)
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "to_k"], use_dora=dora,
                        rank_pattern={"to_k": 4}, alpha_pattern={"to_k": 3}, init_lora_weights=False)  # fmt: skip
    model = get_peft_model(denoiser, config)
    model.save_pretrained(tmp_path)
    found = adapter_file.read_adapter(tmp_path, modules)
    assert {m: (f.rank, f.alpha, f.magnitude is not None) for m, f in found.modules.items()} == {
        f"transformer_blocks.{block}.attn.{name}": (*expected, dora)
        for block in (0, 1)
        for name, expected in (("to_q", (2, 6.0)), ("to_k", (4, 3.0)))
    }


def test_names_of_a_compiled_block_are_clean(nano: Path, tmp_path: Path) -> None:
    """F9: what a wrapper by torch.compile adds to names is in no file, and the state loads without it."""
    written = {}
    for wrapped in (False, True):
        denoiser: Any = QwenImageEdit().load_denoiser(
            nano, device="cpu", dtype=torch.float32, quantize="none"
        )
        modules = adapter_file.linears(denoiser)
        adapter = trainables.add_adapter(denoiser, Lora(r=2), seed=1)
        if wrapped:
            denoiser.transformer_blocks[1] = torch.compile(denoiser.transformer_blocks[1], backend="eager")
            assert any("_orig_mod" in name for name, _ in denoiser.named_parameters())
        assert adapter_file.linears(denoiser) == modules
        folder = tmp_path / str(wrapped)
        folder.mkdir()
        adapter.save(folder)
        adapter.save_state(folder)
        written[wrapped] = [load_keys(folder / name) for name in (trainables.WEIGHTS, trainables.STATE)]
        adapter.load_state(tmp_path / "False")
    assert written[True] == written[False]


def load_keys(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as handle:
        return sorted(handle.keys())
