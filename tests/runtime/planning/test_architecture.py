import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.errors import UserError
from runtime.planning import architecture


def test_published_sizes_from_configs_alone(make_model: Any) -> None:
    base = architecture.read(make_model(real=True))
    assert base.denoiser.parameters / 1e6 == pytest.approx(20430.4, abs=0.1)
    assert base.denoiser.quantizable / 1e9 == pytest.approx(20.38, abs=0.01)
    assert base.text_encoder.parameters == 8_292_166_656 - 152_064 * 3584  # published, without its head
    assert base.vae.parameters / 1e6 == pytest.approx(126.9, abs=0.1)
    assert base.size_multiple == 16
    assert base.text_encoder.token_side == 28


@pytest.mark.parametrize(("rank", "millions"), [(8, 11.8), (16, 23.6), (32, 47.2)])
def test_published_adapter_sizes(make_model: Any, rank: int, millions: float) -> None:
    denoiser = architecture.read(make_model(real=True)).denoiser
    found = architecture.adapter_parameters(denoiser, rank, ("to_q", "to_k", "to_v", "to_out.0"))
    assert found / 1e6 == pytest.approx(millions, abs=0.05)


D, LAYERS = 128, 2
TARGETS = [
    (("to_q",), LAYERS * 2 * D),
    (("attn.to_q",), LAYERS * 2 * D),
    (("add_q_proj", "to_add_out"), LAYERS * 4 * D),
    (("img_mlp.net.0.proj",), LAYERS * 5 * D),
    (("img_mlp.net.2", "txt_mlp.net.2"), LAYERS * 10 * D),
    (("img_mod.1",), LAYERS * 7 * D),
    (("proj_out",), D + 64),
    (("img_in",), 64 + D),
    ("attention", LAYERS * 16 * D),
    ("attention+mlp", LAYERS * (16 + 20) * D),
    ("all-linear", LAYERS * (16 + 20 + 14) * D),
    (("transformer_blocks.1.attn.to_*",), 10 * D),
]


@pytest.mark.parametrize(("targets", "expected"), TARGETS)
def test_adapter_size_is_rank_times_inputs_and_outputs(
    make_model: Any, targets: tuple[str, ...], expected: int
) -> None:
    denoiser = architecture.read(make_model()).denoiser
    assert architecture.adapter_parameters(denoiser, 4, targets) == 4 * expected


@pytest.mark.parametrize("target", ["q", "to_out", "to_qq", "attn"])
def test_target_that_names_no_linear_is_refused(make_model: Any, target: str) -> None:
    with pytest.raises(UserError, match="no linear of the denoiser is called") as caught:
        architecture.adapter_parameters(architecture.read(make_model()).denoiser, 4, ("to_q", target))
    assert "attn.to_q" in caught.value.message


def test_weights_on_disk_are_counted_instead(make_model: Any) -> None:
    model = make_model()
    save_file(
        {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}, model / "vae" / "x.safetensors"
    )
    assert architecture.read(model).vae.parameters == 22


def test_shards_are_counted_only_when_all_are_there(make_model: Any) -> None:
    folder = make_model() / "transformer"
    for name in ("1", "2"):
        save_file({name: np.zeros((10, 10), np.float32)}, folder / f"{name}.safetensors")
    save_file({"other": np.zeros(9, np.float32)}, folder / "variant.fp16.safetensors")
    index = {"weight_map": {"1": "1.safetensors", "2": "2.safetensors"}}
    (folder / "m.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert architecture.count_parameters(folder) == 200
    (folder / "2.safetensors").unlink()
    assert architecture.count_parameters(folder) is None


@pytest.mark.parametrize("data", [b"", b"abc", struct.pack("<Q", 10**9) + b"{}"])
def test_damaged_weights_are_named(make_model: Any, data: bytes) -> None:
    model = make_model()
    (model / "vae" / "x.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"x\.safetensors is no safetensors file"):
        architecture.read(model)


def drop(key: str) -> Any:
    def change(path: Path) -> None:
        document = json.loads(path.read_text(encoding="utf-8"))
        del document[key]
        path.write_text(json.dumps(document), encoding="utf-8")

    return change


BAD = [
    ("model_index.json", lambda path: path.unlink(), "it has no model_index.json"),
    ("model_index.json", lambda path: path.write_text('{"_class_name": "FluxPipeline"}'), "FluxPipeline"),
    ("model_index.json", lambda path: path.write_text("[]"), "can't be read"),
    ("transformer/config.json", lambda path: path.write_text("[]"), "holds no object"),
    ("transformer/config.json", lambda path: path.unlink(), "is missing"),
    ("transformer/config.json", lambda path: path.write_text("{"), "is not JSON"),
    ("transformer/config.json", drop("num_layers"), "lacks 'num_layers'"),
]


@pytest.mark.parametrize(("name", "change", "reason"), BAD)
def test_folder_that_is_no_base_is_refused(make_model: Any, name: str, change: Any, reason: str) -> None:
    model = make_model()
    change(model / name)
    with pytest.raises(UserError, match=reason) as caught:
        architecture.read(model)
    assert caught.value.remedy
