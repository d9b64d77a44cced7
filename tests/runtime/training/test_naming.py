"""Names of adapter tensors: what is written is what other tools look for, and is read back as it was."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import UserError
from runtime.training import naming
from runtime.training.naming import Part

MODULES = (
    "transformer_blocks.1.attn.to_out.0",
    "transformer_blocks.1.img_mlp.net.0.proj",
    "transformer_blocks.11.txt_mod.1",
    "img_in",
)
M, FLAT = MODULES[0], "transformer_blocks_1_attn_to_out_0"

READ = {
    f"transformer.{M}.lora_A.weight": "down",
    f"transformer.{M}.lora_B.weight": "up",
    f"transformer.{M}.lora.down.weight": "down",
    f"transformer.{M}.lora.up.weight": "up",
    f"transformer.{M}.lora_linear_layer.up.weight": "up",
    f"base_model.model.{M}.lora_A.weight": "down",
    f"base_model.model.{M}.lora_B.default.weight": "up",
    f"base_model.model.transformer.{M}.lora_A.weight": "down",
    f"{M}.lora_A.default.weight": "down",
    f"{M}.lora_B.style.weight": "up",
    f"diffusion_model.{M}.lora_A.weight": "down",
    f"diffusion_model.{M}.lora_up.weight": "up",
    f"model.diffusion_model.{M}.lora_down.weight": "down",
    f"lora_unet_{FLAT}.lora_down.weight": "down",
    f"lora_unet_{FLAT}.alpha": "alpha",
    f"lora_unet_{FLAT}.dora_scale": "magnitude",
    f"lora_transformer_{FLAT}.lora_up.weight": "up",
    f"{M}.lora_down.weight": "down",
    f"{M}.alpha": "alpha",
    f"transformer.{M}.lora_magnitude_vector": "magnitude",
    f"transformer.{M}.lora_magnitude_vector.weight": "magnitude",
    f"{M}.lora_magnitude_vector.default.weight": "magnitude",
    f"_orig_mod.{M}.lora_A.weight": "down",
    f"transformer.{M.replace('.attn', '._orig_mod.attn')}.lora_B.weight": "up",
}


@pytest.mark.parametrize("key", READ)
def test_a_key_means_its_module_and_role(key: str) -> None:
    assert naming.reader(MODULES)(key) == Part(module=M, role=READ[key])


@pytest.mark.parametrize(
    "key",
    [
        f"lycoris_{FLAT}.lora_down.weight",
        f"lora_unet_{M}.lora_down.weight",
        f"{FLAT}.lora_down.weight",
        f"unet.{M}.lora_A.weight",
        f"{M}.lora_A",
        f"{M}.lora_A.weight.extra",
        f"{M}.lora_A.a.b.weight",
        f"{M}.diff",
        f"{M}.lora_C.weight",
        "transformer_blocks.2.attn.to_out.0.lora_A.weight",
        "transformer_blocks.1.attn.to_out.lora_A.weight",
        f"{M}s.alpha",
        "alpha",
        "",
    ],
)
def test_a_key_that_means_nothing(key: str) -> None:
    assert naming.reader(MODULES)(key) is None


def test_the_list_of_modules_gives_kohyas_dots_back() -> None:
    for name in ("blocks.0.a_b", "blocks.0_a.b"):
        assert naming.reader([name, "other"])("lora_unet_blocks_0_a_b.alpha") == Part(
            module=name, role="alpha"
        )
    with pytest.raises(UserError, match=r"may mean blocks\.0\.a_b or blocks\.0_a\.b"):
        naming.reader(["blocks.0.a_b", "blocks.0_a.b"])("lora_unet_blocks_0_a_b.alpha")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("text_encoder.layers.0.q.lora_A.weight", True),
        ("base_model.model.text_encoder.q.lora_A.weight", True),
        ("text_encoders.qwen25.q.lora_A.weight", True),
        ("lora_te_layers_0_q.alpha", True),
        ("lora_te1_layers_0_q.alpha", True),
        ("lora_test_q.alpha", False),
        ("transformer.text_encoder.q.lora_A.weight", False),
        (f"transformer.{M}.lora_A.weight", False),
    ],
)
def test_the_text_encoders_are_recognised(key: str, expected: bool) -> None:
    assert naming.of_text_encoder(key) is expected


COMFYUI = [
    f"diffusion_model.{module}.{leaf}"
    for module in MODULES
    for leaf in ("lora_A.weight", "lora_B.weight", "alpha", "dora_scale")
]
KOHYA = [
    f"lora_unet_{name}.{leaf}"
    for name in (
        "transformer_blocks_1_attn_to_out_0",
        "transformer_blocks_1_img_mlp_net_0_proj",
        "transformer_blocks_11_txt_mod_1",
        "img_in",
    )
    for leaf in ("lora_down.weight", "lora_up.weight", "alpha", "dora_scale")
]


@pytest.mark.parametrize(("form", "expected"), [("comfyui", COMFYUI), ("kohya", KOHYA)])
@pytest.mark.parametrize("compiled", ["", "_orig_mod."])
def test_exported_names_and_values(form: str, expected: list[str], compiled: str) -> None:
    shapes = {"lora_A.weight": (2, 6), "lora_B.weight": (5, 2), "lora_magnitude_vector": (5,)}
    tensors = {
        f"transformer.{compiled}{module}.{leaf}": torch.full(shape, float(index))
        for module in MODULES
        for index, (leaf, shape) in enumerate(shapes.items(), 1)
    }
    out = naming.exported(tensors, 8, form)
    assert sorted(out) == sorted(expected)
    found = {(read.role, tuple(out[key].shape), float(out[key].max())) for key in out if (read := _read(key))}
    assert found == {
        ("down", (2, 6), 1.0),
        ("up", (5, 2), 2.0),
        ("magnitude", (5, 1), 3.0),
        ("alpha", (), 8.0),
    }


def _read(key: str) -> Part | None:
    return naming.reader(MODULES)(key)


PIECE = st.text("abz_", min_size=1, max_size=4)


@given(st.lists(st.lists(PIECE, min_size=1, max_size=4).map(".".join), min_size=1, unique=True))
def test_every_naming_of_any_modules_is_read_back_or_told_apart(modules: list[str]) -> None:
    read = naming.reader(modules)
    for module in modules:
        for prefix in naming.PREFIXES:
            part = read(f"{prefix}{module}.lora_A.weight")
            assert part is not None and part.role == "down" and part.module == module
        flat = [name for name in modules if name.replace(".", "_") == module.replace(".", "_")]
        key = f"lora_unet_{module.replace('.', '_')}.lora_up.weight"
        if len(flat) == 1:
            assert read(key) == Part(module=module, role="up")
        elif key.partition(".")[0] not in modules:
            with pytest.raises(UserError, match="may mean"):
                read(key)
