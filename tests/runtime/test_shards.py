"""Shards written into a file laid out beforehand, and read tensor by tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runtime import shards
from runtime.errors import UserError
from runtime.shards import Writer

TENSORS = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "wide": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5),
}
PLANNED = {name: (shards.NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def write(path: Path, order: list[str], late: dict[str, bytes] | None = None) -> None:
    late = late or {}
    writer = Writer(path, PLANNED, list(late))
    for name in order:
        writer.put(name, TENSORS[name])
    for name, text in late.items():
        writer.put_late(name, text)
    writer.close()


def test_what_is_written_is_read_by_the_library_whatever_the_order(tmp_path: Path) -> None:
    late = {"note": b'{"a": 1}', "other": b""}
    for number, order in enumerate((list(TENSORS), list(reversed(TENSORS)))):
        write(tmp_path / str(number), order, late)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    with safe_open(tmp_path / "0", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
        assert set(handle.keys()) == {*TENSORS, *late}
        for name, tensor in TENSORS.items():
            assert torch.equal(handle.get_tensor(name), tensor), name
        assert bytes(handle.get_tensor("note").tolist()) == late["note"]


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = dict(shards.tensors(tmp_path))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_tensor_that_is_not_as_planned_or_not_there_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", PLANNED, ["note"])
    with pytest.raises(ValueError, match="is not the planned"):
        writer.put("odd", TENSORS["wide"])
    with pytest.raises(ValueError, match="are reserved"):
        writer.put_late("note", b"x" * (shards.LATE_BYTES + 1))
    with pytest.raises(ValueError, match="5 tensors were not written, first empty"):
        writer.close()
    writer.abandon()


@pytest.mark.parametrize("cut", [3, 20, -1])
def test_a_cut_file_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match="cut off") as caught:
        shards.read_header(path)
    assert caught.value.remedy == shards.FETCH


def test_only_what_the_index_names_are_the_weights(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({name[0]: torch.ones(2)}, tmp_path / name)
    assert [path.name for path in shards.find(tmp_path)] == ["a.safetensors", "b.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "b.safetensors"}}), encoding="utf-8")
    assert [path.name for path in shards.find(tmp_path)] == ["b.safetensors"]
    index.write_text(json.dumps({"weight_map": {"c": "c.safetensors"}}), encoding="utf-8")
    with pytest.raises(UserError, match=r"shards not there: c\.safetensors"):
        shards.find(tmp_path)
