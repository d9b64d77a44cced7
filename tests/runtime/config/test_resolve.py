"""After resolution no `auto` is left, and each choice has its reason."""

from typing import Any

import pytest

from runtime.config.resolve import resolve
from runtime.errors import DataError, UserError


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for n, item in value.items() for k, v in leaves(item, f"{path}.{n}" if path else n).items()}


def test_no_auto_is_left(lab: Any) -> None:
    found = resolve(lab.workspace, lab.configure({"hardware.device": "auto"}).config)
    document = leaves(found.config.model_dump(mode="json"))
    assert "auto" not in document.values()
    assert document["cache.dtypes.text_encoder"] == document["cache.dtypes.vae"] == "fp32"
    assert document["data.processor.vl_pixels"] == 1024 * 1024
    for key, choice in found.choices.items():
        assert document[key] == choice.value and choice.reason


def test_what_was_given_stays(lab: Any) -> None:
    given = {
        "model.quantize": "nf4",
        "train.mixed_precision": "bf16",
        "optimizer.class_path": "torch.optim.SGD",
        "data.processor.vl_pixels": 999,
        "cache.dtypes.vae": "bf16",
        "cache.devices.vae": "cpu",
        "hardware.device": "cpu",
    }
    found = resolve(lab.workspace, lab.configure(given).config)
    document = leaves(found.config.model_dump(mode="json"))
    for key, value in given.items():
        assert document[key] == value and found.choices[key].reason == "as configured"


def test_resolving_twice_changes_nothing(lab: Any) -> None:
    once = resolve(lab.workspace, lab.configure().config).config
    assert resolve(lab.workspace, once).config == once


def test_a_device_that_is_not_there(lab: Any) -> None:
    with pytest.raises(UserError, match="device xpu is not there"):
        resolve(lab.workspace, lab.configure({"hardware.device": "xpu"}).config)


def test_without_the_list_of_the_dataset(lab: Any) -> None:
    lab.workspace.evidence_path("02-dataset").unlink()
    with pytest.raises(DataError, match="has not been scanned") as caught:
        resolve(lab.workspace, lab.configure().config)
    assert caught.value.remedy == "finetune dataset"


def test_an_empty_dataset_is_no_traceback(lab: Any) -> None:
    for path in (lab.root / "dataset" / "training_images").iterdir():
        path.unlink()
    lab.scan(holdout=0)
    with pytest.raises(DataError, match="no training sample"):
        resolve(lab.workspace, lab.configure().config)
