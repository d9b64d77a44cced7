"""Ready-made NF4: of the base itself or beside it, as transformers, diffusers and others write it."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import device, files
from runtime.commands.quantize import command
from runtime.config.resolve import resolve
from runtime.errors import UserError
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.progress import Progress
from runtime.quantize import made, nf4, output_error, taking
from runtime.quantize.made import EVIDENCE
from runtime.quantize.taking import Taken

SINGLE = "diffusion_pytorch_model.safetensors"
QUIET = Progress(quiet=True)


def write_nf4(plain: Path, target: Path, *, nested: bool = True, shards: int = 1) -> Path:
    """The denoiser in `plain` as a library saves it: each linear packed, the parts of one in any shard."""
    tensors = load_file(plain / SINGLE)
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.ndim == 2 and tensor.shape[1] % 64 == 0:
            weight, state = quantize_4bit(tensor, blocksize=64, compress_statistics=nested, quant_type="nf4")
            packed[name] = weight
            packed |= {f"{name}.{part}": it for part, it in state.as_dict(packed=True).items()}
        else:
            packed[name] = tensor
    target.mkdir(parents=True)
    names = sorted(packed)
    weight_map = {}
    for part in range(shards):
        file = (
            SINGLE if shards == 1 else f"diffusion_pytorch_model-0000{part + 1}-of-0000{shards}.safetensors"
        )
        mine = {name: packed[name].clone() for name in names[part::shards]}
        save_file(mine, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    if shards > 1:
        files.write_json(target / f"{SINGLE}.index.json", {"metadata": {}, "weight_map": weight_map})
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    told = {**nf4.config_entry([]), "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "float16"}
    files.write_json(target / "config.json", {**config, "quantization_config": told})
    return target


def job(nano: Path, folder: Path, target: Path, base: Path | None = None) -> Taken:
    return Taken(
        component="transformer",
        base=base or nano / "transformer",
        folder=folder,
        target=target,
        rule=nf4.rule_for("transformer", "transformer_blocks"),
        reference="external:made-transformer",
    )


def quantize(lab: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--workspace", str(lab.root), *arguments])


def judged(lab: Any) -> dict[str, str]:
    """What gate 06 says, which passes."""
    from gates import chain, registry
    from gates.workspace import Workspace

    verdict = chain.judge(registry.load("06"), Workspace.open(lab.root)).whole
    assert verdict.outcome == "passed", [(check.id, check.message) for check in verdict.checks]
    return {check.id: check.message for check in verdict.checks}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_beside_a_plain_base_each_layer_is_measured(
    nano: Path, tmp_path: Path, nested: bool, shards: int
) -> None:
    folder = write_nf4(nano / "transformer", tmp_path / "theirs", nested=nested, shards=shards)
    before = contents(folder)
    record = taking.take(job(nano, folder, tmp_path / "made"), QUIET)
    tensors = load_file(nano / "transformer" / SINGLE)
    packed = [n for n in tensors if n.endswith(".weight") and tensors[n].ndim == 2]
    assert record["linears"] == len([name for name in packed if tensors[name].shape[1] % 64 == 0])
    assert 0.085 < record["mean_error"] < 0.1 and len(record["worst"]) == 5
    assert record["source_gib"] * files.GIB == sum(tensor.nbytes for tensor in tensors.values())
    assert record["taken"] == "external:made-transformer"
    loaded = output_error.answer(QwenImageEdit(), tmp_path / "made", device.pick("cpu"), torch.float32, QUIET)
    assert torch.isfinite(loaded).all()
    taken = contents(tmp_path / "made")
    assert {name: taken[name] for name in before} == before and contents(folder) == before
    assert record["made_fingerprint"] == files.weights_fingerprint(tmp_path / "made")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    assert taking.take(job(nano, folder, tmp_path / "made"), QUIET) == record
    assert times == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}


def test_links_cost_no_room_and_copies_are_the_way_elsewhere(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    taking.take(job(nano, folder, tmp_path / "linked"), QUIET)
    assert (tmp_path / "linked" / SINGLE).samefile(folder / SINGLE)

    def refuse(*given: Any) -> None:
        raise OSError("another volume")

    monkeypatch.setattr(os, "link", refuse)
    taking.take(job(nano, folder, tmp_path / "copied"), QUIET)
    assert not (tmp_path / "copied" / SINGLE).samefile(folder / SINGLE)
    assert contents(tmp_path / "copied") == contents(tmp_path / "linked")


def test_room_is_needed_for_copies_and_for_no_links(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    size = sum(path.stat().st_size for path in folder.iterdir())
    for name in ("unmade", "made"):
        assert taking.to_copy(job(nano, folder, tmp_path / name), 10**9) == 0
    taking.take(job(nano, folder, tmp_path / "made"), QUIET)
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copyfile(folder / "config.json", empty / "config.json")
    assert taking.to_copy(job(nano, empty, tmp_path / "fetched", base=empty), 10**9) == 0

    def refuse(*given: Any) -> None:
        raise OSError("another volume")

    monkeypatch.setattr(os, "link", refuse)
    assert taking.to_copy(job(nano, folder, tmp_path / "made")) == 0  # all of it is there
    assert taking.to_copy(job(nano, folder, tmp_path / "unmade")) == size
    assert taking.to_copy(job(nano, empty, tmp_path / "fetched", base=empty), 10**9) == 10**9
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / SINGLE).write_bytes(b"x" * 1000)  # removed before the copies are made
    assert taking.to_copy(job(nano, folder, tmp_path / "cut")) == size - 1000
    assert not list(tmp_path.glob(".*"))


def test_a_base_that_is_nf4_itself_has_nothing_to_compare_with(nano: Path, tmp_path: Path) -> None:
    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    record = taking.take(job(nano, folder, tmp_path / "made", base=folder), QUIET)
    assert (record["mean_error"], record["worst"]) == (None, [])
    tensors = load_file(nano / "transformer" / SINGLE)
    assert record["source_gib"] * files.GIB == pytest.approx(
        sum(2 * t.numel() if t.ndim == 2 and t.shape[1] % 64 == 0 else t.nbytes for t in tensors.values())
    )


def test_a_planted_bad_layer_is_the_worst(nano: Path, tmp_path: Path) -> None:
    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    name = "transformer_blocks.1.attn.to_k"
    tensors[f"{name}.weight.nested_absmax"] *= 3
    save_file(tensors, folder / SINGLE)
    record = taking.take(job(nano, folder, tmp_path / "made"), QUIET)
    assert record["worst"][0]["name"] == name
    assert record["worst"][0]["error"] > 0.2 > record["worst"][1]["error"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"load_in_4bit": False, "load_in_8bit": True}, "not as bitsandbytes' NF4"),
        ({"quant_method": "gptq"}, "not as bitsandbytes' NF4"),
        ({"bnb_4bit_quant_type": "fp4"}, "not as bitsandbytes' NF4"),
    ],
)
def test_other_quantizations_are_refused(
    nano: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    config = files.read_json(folder / "config.json")
    config["quantization_config"].update(change)
    files.write_json(folder / "config.json", config)
    with pytest.raises(UserError, match=said):
        made.is_packed(folder)


def test_weights_of_another_base_are_refused(nano: Path, tmp_path: Path) -> None:
    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    renamed = {
        name.replace("transformer_blocks.1.", "transformer_blocks.7."): it for name, it in tensors.items()
    }
    save_file(renamed, folder / SINGLE)
    with pytest.raises(UserError, match="is not of this base: 14 weights"):
        taking.take(job(nano, folder, tmp_path / "made"), QUIET)


def test_what_others_made_in_its_place_is_not_overwritten(nano: Path, tmp_path: Path) -> None:
    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    (tmp_path / "made").mkdir()
    save_file({"mine": torch.ones(2)}, tmp_path / "made" / SINGLE)
    with pytest.raises(UserError, match="did not make"):
        taking.take(job(nano, folder, tmp_path / "made"), QUIET)


# ---- by the command


def test_with_made_the_later_steps_use_it(lab: Any, nano: Path, tmp_path: Path, conforms: Any) -> None:
    """Linears outside of the blocks are packed too; ours are not."""
    write_nf4(nano / "transformer", tmp_path / "theirs" / "transformer")
    lab.configure()
    result = quantize(lab, "--made", str(tmp_path / "theirs"), "--component", "transformer")
    assert result.exit_code == 0, result.output
    assert "taken as it was made" in result.stdout
    conforms(files.read_json(lab.workspace.evidence_path(EVIDENCE)), "evidence")
    data = lab.workspace.evidence(EVIDENCE)
    assert data["components"][0]["taken"] == "external:made-transformer"
    assert 0 < data["output_error"]["value"] < 0.5
    choices = resolve(lab.workspace, lab.configure().config)
    assert choices.config.model.quantize == "nf4"
    folder = made.folders(lab.workspace, nano, choices.config)["transformer"]
    denoiser = QwenImageEdit().load_denoiser(
        nano, device="cpu", dtype=torch.float32, quantize="nf4", made=folder
    )
    assert type(denoiser.proj_out).__name__ == "Linear4bit"
    lab.configure({"model.quantize_text_encoder": "none"})
    assert "layers measured anew" in judged(lab)["error-bounded"]
    theirs = contents(tmp_path / "theirs" / "transformer")
    assert quantize(lab, "--component", "transformer").exit_code == 0  # without --made they are made here
    assert "taken" not in lab.workspace.evidence(EVIDENCE)["components"][0]
    assert contents(tmp_path / "theirs" / "transformer") == theirs


def test_a_base_of_nf4_is_taken_as_it_is(lab: Any, nano: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(nano, base)
    shutil.rmtree(base / "transformer")
    write_nf4(nano / "transformer", base / "transformer", nested=False)
    files.write_json(lab.workspace.local_path, {"external": {"model": str(base)}})
    lab.configure()
    result = quantize(lab)
    assert result.exit_code == 0, result.output
    data = lab.workspace.evidence(EVIDENCE)
    by_name = {item["name"]: item for item in data["components"]}
    assert (
        by_name["transformer"]["taken"] == "external:model/transformer"
        and "taken" not in by_name["text_encoder"]
    )
    assert data["output_error"]["value"] is None and "NF4" in data["output_error"]["reason"]
    assert "not measured" in result.stdout
    told = judged(lab)
    assert "transformer: error not measured, the base's own are NF4" in told["error-bounded"]
    assert "the denoiser's output error was not measured, the base's own are NF4" in told["error-bounded"]
    assert "transformer was made by somebody else" in told["source-untouched"]
    assert all(item.usable for item in made.find(lab.workspace, base).values())


def test_a_disk_too_full_for_a_copy_is_told_before(
    lab: Any, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError("another volume")

    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    lab.configure()
    size = sum(path.stat().st_size for path in folder.iterdir())
    free = size - 1 + files.GIB
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, free))
    line = ("--made", str(folder), "--component", "transformer")
    result = quantize(lab, *line)
    assert result.exit_code == 1 and "1 GiB to spare are needed" in result.stderr
    assert "ready-made weights on the workspace's volume" in result.stderr
    assert not made.folder_of(lab.workspace, "transformer").exists()
    free += 1
    assert quantize(lab, *line).exit_code == 0


def test_a_disk_that_fills_meanwhile_is_no_traceback(
    lab: Any, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = write_nf4(nano / "transformer", tmp_path / "theirs")
    lab.configure()
    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    result = quantize(lab, "--made", str(folder), "--component", "transformer")
    assert result.exit_code == 1 and "error: the disk is full" in result.stderr
    assert "next: free some space, then finetune quantize" in result.stderr


def test_a_folder_without_nf4_is_refused(lab: Any, nano: Path) -> None:
    lab.configure()
    result = quantize(lab, "--made", str(nano))
    assert result.exit_code == 1 and "holds no NF4 component" in result.stderr


def test_a_text_encoder_of_transformers_is_known_by_its_published_names() -> None:
    """As save_pretrained writes it, a level more."""
    names = ["model.language_model.layers.0.mlp.up_proj.weight", "model.visual.blocks.0.attn.qkv.weight"]
    assert [taking.published(name) for name in names] == [
        "model.layers.0.mlp.up_proj.weight",
        "visual.blocks.0.attn.qkv.weight",
    ]
    assert taking.published("lm_head.weight") == "lm_head.weight"


def test_single_scales_are_measured_as_bitsandbytes_reads_them() -> None:
    weight = torch.randn(48, 128)
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
    again = QuantState.from_dict(state.as_dict(packed=True), torch.device("cpu"))
    assert nf4.relative_error(weight, packed, again) == pytest.approx(0.09, abs=0.01)
