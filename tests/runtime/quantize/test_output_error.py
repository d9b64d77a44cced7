"""The denoiser's answer, plain and packed, block by block: as with the whole of it in memory, one block alive."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import device
from runtime.errors import UserError
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.memory.loading import Placement
from runtime.progress import Progress
from runtime.quantize import nf4, output_error, streaming

SINGLE = "diffusion_pytorch_model.safetensors"
QUIET = Progress(quiet=True)
FAMILY = QwenImageEdit()


@pytest.fixture(scope="module")
def packed(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packed") / "transformer"
    rule = nf4.rule_for("transformer", FAMILY.facts.blocks)
    job = streaming.Job(
        component="transformer", source=nano / "transformer", target=target, rule=rule, device="cpu"
    )
    streaming.quantize(job, QUIET)
    return target


def answer(folder: Path) -> Tensor:
    return output_error.answer(FAMILY, folder, device.pick("cpu"), torch.float32, QUIET)


def test_as_with_all_of_it_in_memory(nano: Path, packed: Path) -> None:
    answers = []
    for quantize, made in (("none", None), ("nf4", packed)):
        whole = FAMILY.load_denoiser(nano, device="cpu", dtype=torch.float32, quantize=quantize, made=made)
        expected = output_error._ask(FAMILY, whole, "cpu", torch.float32)
        answers.append(expected)
        assert torch.equal(answer(made or nano / "transformer"), expected)
    plain, moved = answers
    found = output_error.measure(FAMILY, nano / "transformer", packed, "cpu", QUIET)
    gaps = [float((one - other).norm() / other.norm()) for one, other in zip(moved, plain, strict=True)]
    assert len(gaps) == 3 and found.value == pytest.approx(max(gaps), rel=1e-5)
    assert found.reason.startswith(
        f"{gaps[0]:.2%} at sigma 0.1, {gaps[1]:.2%} at sigma 0.5, {gaps[2]:.2%} at"
    )


@pytest.mark.parametrize("damaged", ["plain", "packed"])
def test_an_answer_that_is_not_finite_is_no_error_of_zero(
    nano: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    """At the second of three sigmas, where a maximum would pass over it."""
    bad = nano / "transformer" if damaged == "plain" else packed

    def told(family: Any, folder: Path, *given: Any) -> Tensor:
        made = torch.ones(3, 1, 2, 2)
        made[1] = float("nan") if folder == bad else 1.0
        return made

    monkeypatch.setattr(output_error, "answer", told)
    with pytest.raises(UserError, match=r"NaN or infinity at sigma 0\.5") as caught:
        output_error.measure(FAMILY, nano / "transformer", packed, "cpu", QUIET)
    assert str(bad) in str(caught.value)


def test_low_middle_and_high_sigma_are_asked_in_one_pass(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[float]] = []
    predict = QwenImageEdit.predict

    def noted(self: Any, denoiser: Any, noisy: Tensor, sigma: Tensor, told: Any) -> Tensor:
        asked.append(sigma.tolist())
        assert len(noisy) == len(told.embeds) == len(told.controls[0]) == len(sigma)
        assert len({float(row.sum()) for row in noisy}) == len(sigma)
        return predict(self, denoiser, noisy, sigma, told)

    monkeypatch.setattr(QwenImageEdit, "predict", noted)
    found = answer(nano / "transformer")
    assert asked == [pytest.approx([0.1, 0.5, 0.9])] and len(found) == 3


def test_weights_of_one_block_are_in_memory(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, models, most = Placement.put, [], 0

    def counting(self: Placement, model: Any, piece: Any) -> None:
        nonlocal most
        put(self, model, piece)
        models[:] = [model]
        real = [
            index
            for index, block in enumerate(model.transformer_blocks)
            if any(not parameter.is_meta for parameter in block.parameters())
        ]
        most = max(most, len(real))

    monkeypatch.setattr(Placement, "put", counting)
    answer(nano / "transformer")
    assert most == 1 and models


def test_a_planted_bad_layer_is_found(nano: Path, packed: Path, tmp_path: Path) -> None:
    good = output_error.measure(FAMILY, nano / "transformer", packed, "cpu", QUIET)
    spoilt = tmp_path / "transformer"
    shutil.copytree(packed, spoilt)
    tensors = {name: tensor.clone() for name, tensor in load_file(packed / SINGLE).items()}
    tensors["transformer_blocks.0.img_mod.1.weight.nested_absmax"] *= 50
    save_file(tensors, spoilt / SINGLE, metadata={"format": "pt"})
    bad = output_error.measure(FAMILY, nano / "transformer", spoilt, "cpu", QUIET)
    assert good.value is not None and bad.value is not None
    assert good.value < 0.5 < bad.value


def test_where_there_is_nothing_to_compare_with(packed: Path, tmp_path: Path) -> None:
    found = output_error.measure(FAMILY, packed, packed, "cpu", QUIET)
    assert found.value is None and "own denoiser is NF4" in found.reason
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    found = output_error.measure(FAMILY, tmp_path, packed, "cpu", QUIET)
    assert found.value is None and "not here any more" in found.reason
