"""Step 06 on the embedded base: the same bits as in memory, resumable, one tensor alive, the source untouched."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Params4bit
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import files, shards
from runtime.errors import UserError
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.memory import loading
from runtime.progress import Progress
from runtime.quantize import nf4, streaming
from runtime.quantize.streaming import Job

SINGLE = "diffusion_pytorch_model.safetensors"
BLOCKS = "transformer_blocks"


def job(source: Path, target: Path, component: str = "transformer", keep: tuple[str, ...] = ()) -> Job:
    rule = nf4.rule_for(component, BLOCKS, keep)
    return Job(component=component, source=source, target=target, rule=rule, device="cpu")


def make(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    return streaming.quantize(job(source, target, **options), Progress(quiet=True))


def load_made(folder: Path) -> Any:
    placement = loading.Placement(device="cpu", dtype=torch.float32)
    return loading.load(QwenImageTransformer2DModel, folder, loading.Folder(folder), placement)


@pytest.fixture(scope="module")
def sharded(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The denoiser in three files with an index, a layer's weight and bias in different ones."""
    folder = tmp_path_factory.mktemp("sharded") / "transformer"
    folder.mkdir()
    shutil.copyfile(nano / "transformer" / "config.json", folder / "config.json")
    tensors = load_file(nano / "transformer" / SINGLE)
    names = sorted(tensors, key=lambda name: (name.endswith(".bias"), name))
    weight_map = {}
    for part in range(3):
        shard = f"diffusion_pytorch_model-0000{part + 1}-of-00003.safetensors"
        mine = names[part::3]
        save_file({name: tensors[name] for name in mine}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    files.write_json(folder / f"{SINGLE}.index.json", index)
    return folder


@pytest.fixture(scope="module")
def made(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    for component in nf4.COMPONENTS:
        make(nano / component, root / component, component=component)
    return {component: root / component for component in nf4.COMPONENTS}


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def parts(parameter: Any) -> dict[str, Tensor]:
    state = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in parameter.quant_state.as_dict(packed=False).items()
    }
    return {"weight": parameter.data, **state}


# ---- the bits


def test_names_are_those_that_bitsandbytes_saves(made: dict[str, Path], nano: Path) -> None:
    """Against the state_dict of a Linear4bit with the same weight."""
    tensors = load_file(made["transformer"] / SINGLE)
    denoiser = QwenImageEdit().load_denoiser(nano, device="cpu", dtype=torch.bfloat16, quantize="nf4")
    name = "transformer_blocks.0.attn.to_q"
    saved: dict[str, Tensor] = denoiser.get_submodule(name).state_dict()
    assert {n.removeprefix(f"{name}.") for n in tensors if n.startswith(f"{name}.")} == set(saved)
    for leaf, tensor in saved.items():
        ours = tensors[f"{name}.{leaf}"]
        assert ours.dtype == tensor.dtype and torch.equal(ours, tensor), leaf


def test_each_weight_is_what_bitsandbytes_makes_of_it_in_memory(made: dict[str, Path], nano: Path) -> None:
    tensors, source = load_file(made["transformer"] / SINGLE), load_file(nano / "transformer" / SINGLE)
    packed = [n.removesuffix(f".{nf4.STATE}") for n in tensors if n.endswith(nf4.STATE)]
    assert len(packed) == 28  # 14 linears in each of two blocks
    for name in packed:
        expected = Params4bit(source[name].clone(), quant_type="nf4").to("cpu")
        stats = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.")}
        restored = Params4bit.from_prequantized(tensors[name], stats, device="cpu")
        assert torch.equal(restored.data, expected.data), name
        assert restored.quant_state == expected.quant_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_made_beforehand_and_while_loading_are_the_same_bits(
    made: dict[str, Path], nano: Path, dtype: torch.dtype
) -> None:
    family = QwenImageEdit()
    online = family.load_denoiser(nano, device="cpu", dtype=dtype, quantize="nf4")
    read = family.load_denoiser(nano, device="cpu", dtype=dtype, quantize="nf4", made=made["transformer"])
    others = dict(read.named_parameters())
    assert others.keys() == dict(online.named_parameters()).keys()
    for name, parameter in online.named_parameters():
        if isinstance(parameter, Params4bit):
            one, two = parts(parameter), parts(others[name])
            assert all(
                torch.equal(one[key], two[key]) if isinstance(one[key], Tensor) else one[key] == two[key]
                for key in one
            ), name
        else:
            assert parameter.dtype == dtype and torch.equal(parameter, others[name]), name
    assert not any(p.requires_grad or p.is_meta for p in read.parameters())


def test_what_is_not_quantized_is_copied(made: dict[str, Path], nano: Path) -> None:
    for component, path in made.items():
        name = SINGLE if component == "transformer" else "model.safetensors"
        source, tensors = load_file(nano / component / name), load_file(path / name)
        for key, tensor in source.items():
            if f"{key}.{nf4.STATE}" not in tensors:
                assert tensors[key].dtype == tensor.dtype and torch.equal(tensors[key], tensor), key


def test_shards_give_the_same_tensors_as_one_file(
    sharded: Path, made: dict[str, Path], tmp_path: Path
) -> None:
    record = make(sharded, tmp_path / "out")
    single = load_file(made["transformer"] / SINGLE)
    found = dict(shards.tensors(tmp_path / "out"))
    assert found.keys() == single.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in single.items())
    index = files.read_json(tmp_path / "out" / f"{SINGLE}.index.json")
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert len([name for name in record["files"] if name.endswith(".safetensors")]) == 3
    load_made(tmp_path / "out")


def test_errors_are_those_of_the_weights(made: dict[str, Path], nano: Path, tmp_path: Path) -> None:
    record = make(nano / "transformer", tmp_path / "out")
    assert 0.085 < record["mean_error"] < 0.1 and record["linears"] == 28
    assert [item["error"] for item in record["worst"]] == sorted(
        (item["error"] for item in record["worst"]), reverse=True
    )
    name = record["worst"][0]["name"]
    weight = load_file(nano / "transformer" / SINGLE)[f"{name}.weight"].float()
    packed, state = nf4.quantize(weight, "cpu")
    from bitsandbytes.functional import dequantize_4bit

    expected = float((dequantize_4bit(packed, state) - weight).norm() / weight.norm())
    assert record["worst"][0]["error"] == pytest.approx(expected, rel=1e-3)
    assert nf4.relative_error(torch.zeros(64, 64), *nf4.quantize(torch.zeros(64, 64), "cpu")) == 0.0


# ---- what is left as it is


def test_the_rule_takes_the_linears_of_the_classes(nano: Path, made: dict[str, Path]) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    plain = Qwen2_5_VLForConditionalGeneration.from_pretrained(nano / "text_encoder")
    linears = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): module
        for name, module in plain.named_modules()
        if type(module) is torch.nn.Linear and name != "lm_head"
    }
    journal = files.read_json(made["text_encoder"] / streaming.JOURNAL)
    taken = {name for shard in journal["shards"].values() for name in shard["errors"]}
    assert taken == {name for name, module in linears.items() if module.in_features % nf4.BLOCK == 0}
    kept = streaming.kept_linears(
        job(nano / "text_encoder", Path(), "text_encoder"), _header(nano, "text_encoder")
    )
    assert set(kept) == linears.keys() - taken and kept  # 32 inputs are no whole block


def _header(nano: Path, component: str) -> Any:
    (path,) = shards.find(nano / component)
    return shards.read_header(path)


def test_patterns_keep_linears_plain(nano: Path, tmp_path: Path) -> None:
    record = make(
        nano / "transformer", tmp_path / "out", keep=("*.attn.to_q", "transformer_blocks.1.*_mod.1")
    )
    assert record["kept"] == [
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.1.attn.to_q",
        "transformer_blocks.1.img_mod.1",
        "transformer_blocks.1.txt_mod.1",
    ]
    assert record["linears"] == 24
    config = files.read_json(tmp_path / "out" / "config.json")
    assert set(record["kept"]) < set(config["quantization_config"]["llm_int8_skip_modules"])
    read = load_made(tmp_path / "out")
    assert type(read.transformer_blocks[0].attn.to_q) is torch.nn.Linear
    with pytest.raises(UserError, match="no linear of transformer would be quantized"):
        make(nano / "transformer", tmp_path / "none", keep=("*",))


@pytest.mark.parametrize("component", nf4.COMPONENTS)
def test_config_says_what_the_libraries_must_leave_plain(made: dict[str, Path], component: str) -> None:
    config = files.read_json(made[component] / "config.json")["quantization_config"]
    assert (config["quant_method"], config["load_in_4bit"], config["bnb_4bit_quant_type"]) == (
        "bitsandbytes",
        True,
        "nf4",
    )
    assert config["bnb_4bit_use_double_quant"] and config["bnb_4bit_compute_dtype"] == "bfloat16"
    skipped = set(config["llm_int8_skip_modules"])
    if component == "transformer":
        from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear
        from diffusers.quantizers.quantization_config import BitsAndBytesConfig

        settings = {k: v for k, v in config.items() if not k.startswith("_") and k != "quant_method"}
        plain = QwenImageTransformer2DModel.load_config(made[component])
        plain.pop("quantization_config")
        with torch.device("meta"):
            model = QwenImageTransformer2DModel.from_config(plain)
        replaced = replace_with_bnb_linear(
            model, modules_to_not_convert=sorted(skipped), quantization_config=BitsAndBytesConfig(**settings)
        )
        packed = {n for n, m in replaced.named_modules() if type(m).__name__ == "Linear4bit"}
        tensors = load_file(made[component] / SINGLE)
        assert packed == {n.removesuffix(f".weight.{nf4.STATE}") for n in tensors if n.endswith(nf4.STATE)}
    else:
        assert "lm_head" in skipped


def test_transformers_loads_the_text_encoder(made: dict[str, Path], nano: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration as Encoder

    packed = Encoder.from_pretrained(made["text_encoder"], dtype=torch.bfloat16, device_map={"": "cpu"})
    plain = Encoder.from_pretrained(nano / "text_encoder", dtype=torch.bfloat16)
    kinds = {type(m).__name__ for n, m in packed.named_modules() if n.endswith("q_proj")}
    assert kinds == {"Linear4bit"}
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours, theirs = packed(input_ids=ids).logits, plain(input_ids=ids).logits
    assert 1e-4 < float((ours - theirs).norm() / theirs.norm()) < 0.1


# ---- interruption


@pytest.mark.parametrize(("after", "whole_shards"), [(0, 0), (5, 0), (13, 1), (24, 2)])
def test_killed_midway_it_goes_on_to_the_same_bytes(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, whole_shards: int
) -> None:
    whole = make(sharded, tmp_path / "whole")
    read, count = shards.read_tensor, 0

    def dying(path: Path, entry: Any) -> Tensor:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        return read(path, entry)

    monkeypatch.setattr(shards, "read_tensor", dying)
    with pytest.raises(KeyboardInterrupt):
        make(sharded, tmp_path / "cut")
    left = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*.safetensors")}
    assert len(left) == whole_shards
    monkeypatch.setattr(shards, "read_tensor", read)
    assert make(sharded, tmp_path / "cut") == whole
    assert everything(tmp_path / "cut") == everything(tmp_path / "whole")
    for name, time in left.items():
        assert (tmp_path / "cut" / name).stat().st_mtime_ns == time  # finished shards are kept


def test_a_torn_shard_is_made_again_and_no_other(sharded: Path, tmp_path: Path) -> None:
    whole = make(sharded, tmp_path / "out")
    before = everything(tmp_path / "out")
    first, second, _ = sorted((tmp_path / "out").glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-9])
    flipped = bytearray(second.read_bytes())
    flipped[-3000] ^= 1
    second.write_bytes(flipped)
    (tmp_path / "out" / ".left.tmp").write_bytes(b"x")
    assert make(sharded, tmp_path / "out") == whole
    assert everything(tmp_path / "out") == before


@pytest.mark.parametrize("damage", ["{", "[]", '{"settings": {}}'])
def test_without_a_journal_nothing_foreign_is_overwritten(nano: Path, tmp_path: Path, damage: str) -> None:
    (tmp_path / "out").mkdir()
    save_file({"mine": torch.ones(2)}, tmp_path / "out" / SINGLE)
    (tmp_path / "out" / streaming.JOURNAL).write_text(damage, encoding="utf-8")
    with pytest.raises(UserError, match="did not make") as caught:
        make(nano / "transformer", tmp_path / "out")
    assert "move it away" in caught.value.remedy


def test_other_settings_or_another_base_start_anew(nano: Path, tmp_path: Path) -> None:
    make(nano / "transformer", tmp_path / "out")
    again = make(nano / "transformer", tmp_path / "out", keep=("*.to_q",))
    assert again["linears"] == 26
    base = tmp_path / "base"
    shutil.copytree(nano / "transformer", base)
    tensors = {name: tensor.clone() for name, tensor in load_file(base / SINGLE).items()}
    tensors["transformer_blocks.0.attn.to_q.weight"] *= 2
    save_file(tensors, base / SINGLE)
    other = make(base, tmp_path / "out")
    assert other["made_fingerprint"] not in (again["made_fingerprint"],) and other["linears"] == 28


# ---- memory and source


@pytest.mark.parametrize("component", nf4.COMPONENTS)
def test_two_layers_of_the_source_are_alive_at_a_time(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, component: str
) -> None:
    """That at hand and the one read ahead; what stays plain is never a tensor."""
    read = shards.read_tensor
    alive: list[Any] = []
    most = total = 0

    def counting(path: Path, entry: Any) -> Tensor:
        nonlocal most, total
        tensor = read(path, entry)
        alive[:] = [other for other in alive if other() is not None]
        alive.append(weakref.ref(tensor))
        most, total = max(most, len(alive)), total + 1
        return tensor

    monkeypatch.setattr(shards, "read_tensor", counting)
    record = make(nano / component, tmp_path / "out", component=component)
    assert most == 2 and total == record["linears"]


def test_the_source_is_only_read(nano: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(nano / "transformer", source)
    before = everything(source)
    record = make(source, tmp_path / "out")
    assert everything(source) == before
    assert (
        record["source_fingerprint"]
        == record["source_fingerprint_after"]
        == files.weights_fingerprint(source)
    )
    assert record["made_fingerprint"] == files.weights_fingerprint(tmp_path / "out")


def test_a_source_that_changes_meanwhile_is_refused(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(nano / "transformer", source)
    write = streaming._write_config

    def meddling(*given: Any) -> None:
        write(*given)
        (source / "note.txt").write_text("x", encoding="utf-8")

    monkeypatch.setattr(streaming, "_write_config", meddling)
    with pytest.raises(UserError, match="has changed while it was read"):
        make(source, tmp_path / "out")
    assert not (tmp_path / "out" / streaming.JOURNAL).exists()


def test_what_is_missing_is_counted_before(sharded: Path, tmp_path: Path) -> None:
    task = job(sharded, tmp_path / "out")
    before = streaming.missing_bytes(task)
    make(sharded, tmp_path / "out")
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert 0.75 * size < before < size  # headers are not counted
    assert streaming.missing_bytes(task) == 0


def test_json_of_the_folder_is_plain(made: dict[str, Path]) -> None:
    for folder in made.values():
        for path in folder.glob("*.json"):
            json.loads(path.read_text(encoding="utf-8"))
