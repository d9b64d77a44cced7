import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from PIL import Image

from runtime import files
from runtime.data import manifest
from runtime.data.manifest import Manifest, Sample
from runtime.errors import DataError
from runtime.workspace import Workspace

SCHEMAS = Path(__file__).parents[3] / "schemas"


def record(workspace: Workspace, root: Path, holdout: int | None = None) -> Manifest:
    found = manifest.build(root, holdout, reference=workspace.refer(root, "dataset"))
    workspace.begin_evidence(manifest.EVIDENCE, "test").write(inputs={}, data=found.to_json())
    return found


def test_manifest_holds_size_digest_and_upright_measure_of_each_file(make_dataset: Any) -> None:
    root = make_dataset(count=2, size=(40, 24), controls=2)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 24)).save(root / "training_images" / "s00.png", exif=exif)
    found = manifest.build(root)
    first = found.samples[0]
    path = root / "training_images" / "s00.png"
    assert (first.target.width, first.target.height) == (24, 40)
    assert first.target.sha256 == files.file_digest(path) and first.target.size == path.stat().st_size
    assert first.target.path == "training_images/s00.png"
    assert [control.path for control in first.controls] == [
        "control_images/s00.png",
        "control_images/s00_control_1.png",
    ]
    assert (
        first.prompt == "edit number 0" and first.caption and first.caption.path == "training_images/s00.txt"
    )


def test_json_is_that_of_the_schema_and_reads_back(make_dataset: Any, tmp_path: Path) -> None:
    root = make_dataset()
    Image.new("L", (64, 64)).save(root / "control_images" / "s03_mask.png")
    (root / "training_images" / "s04.txt").write_bytes(b"dog\x92s")
    (root / "training_images" / "s05.txt").write_bytes(b"")
    found = manifest.build(root, reference="external:dataset")
    schema = json.loads((SCHEMAS / "evidence.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(found.to_json(), {**schema["$defs"]["02-dataset"], "$defs": schema["$defs"]})
    assert Manifest.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert {note.path for note in found.warnings} == {
        "training_images/s04.txt",
        "control_images/s03_mask.png",
    }
    assert [note.path for note in found.dropped] == ["training_images/s05.png"]
    assert str(tmp_path) not in json.dumps(found.to_json())


@pytest.mark.parametrize("part", ["training_images/s01.png", "control_images/s01.png"])
def test_sample_with_a_damaged_picture_is_dropped_by_name(make_dataset: Any, part: str) -> None:
    root = make_dataset(count=3)
    (root / part).write_bytes(b"")
    found = manifest.build(root)
    assert [sample.id for sample in found.samples] == ["s00", "s02"]
    assert found.dropped[0].path == "training_images/s01.png"
    assert part in found.dropped[0].reason and "the file is empty" in found.dropped[0].reason


@pytest.mark.parametrize(
    ("samples", "asked", "expected"),
    [(9, None, 0), (10, None, 3), (35, None, 3), (40, None, 4), (400, None, 16), (5, 2, 2), (12, 0, 0)],
)
def test_holdout_count(samples: int, asked: int | None, expected: int) -> None:
    split, rule, _ = manifest.split_off([fake(f"s{index}") for index in range(samples)], None, asked)
    assert sum(sample.split == "holdout" for sample in split) == expected
    assert f"{expected} of {samples}" in rule


def fake(identity: str) -> Sample:
    picture = manifest.ImageFile(path=identity, size=1, sha256="0" * 64, width=8, height=8)
    return Sample(
        id=identity, split="train", prompt="p", caption=None, target=picture, controls=(picture,), mask=None
    )


def test_holdout_is_a_function_of_the_ids_alone() -> None:
    forward = [fake(f"s{index}") for index in range(20)]
    splits = [manifest.split_off(order, None, 4)[0] for order in (forward, forward[::-1])]
    chosen = [{sample.id for sample in split if sample.split == "holdout"} for split in splits]
    assert chosen[0] == chosen[1] and len(chosen[0]) == 4
    fewer = manifest.split_off([sample for sample in forward if sample.id not in chosen[0]], None, 4)[0]
    assert not chosen[0] & {sample.id for sample in fewer}


def test_holdout_list_wins_and_names_what_it_does_not_find(make_dataset: Any) -> None:
    root = make_dataset()
    (root / "holdout.txt").write_bytes(b"\xef\xbb\xbfs03\r\n\r\n s07 \r\nnobody\r\n")
    found = manifest.build(root, 1)
    assert [sample.id for sample in found.of("holdout")] == ["s03", "s07"]
    assert len(found.of("train")) == 10
    assert found.holdout_rule == "holdout.txt: 2 of 12"
    assert [note.reason for note in found.warnings] == ["nobody: no usable sample has this name"]


@pytest.mark.parametrize("how", ["number", "list"])
def test_holdout_must_leave_something_to_train_on(make_dataset: Any, how: str) -> None:
    root = make_dataset(count=2)
    if how == "list":
        (root / "holdout.txt").write_text("s00\ns01\n", encoding="utf-8")
    with pytest.raises(DataError, match="leaves none"):
        manifest.build(root, 2 if how == "number" else None)


def test_digest_is_that_of_the_contract_and_follows_every_part(make_dataset: Any) -> None:
    root = make_dataset(count=3)
    found = manifest.build(root, 1)
    listed = [
        {
            "id": sample.id,
            "split": sample.split,
            "prompt": sample.prompt,
            "target": sample.target.sha256,
            "controls": [control.sha256 for control in sample.controls],
            "mask": None,
        }
        for sample in found.samples
    ]
    digests = {found.dataset_digest, manifest.build(root, 0).dataset_digest}
    assert found.dataset_digest == files.document_digest(listed)
    (root / "training_images" / "s00.txt").write_text("another edit", encoding="utf-8")
    digests.add(manifest.build(root, 1).dataset_digest)
    Image.new("RGB", (64, 64), (1, 2, 3)).save(root / "control_images" / "s00.png")
    digests.add(manifest.build(root, 1).dataset_digest)
    Image.new("L", (64, 64)).save(root / "control_images" / "s00_mask.png")
    digests.add(manifest.build(root, 1).dataset_digest)
    assert len(digests) == 5


def test_load_gives_back_what_was_recorded(workspace: Workspace, make_dataset: Any) -> None:
    found = record(workspace, make_dataset(name="other"))
    loaded, root = manifest.load(workspace)
    assert loaded == found
    assert (root / loaded.samples[0].target.path).is_file()


CHANGES = [
    ("is gone", lambda path: path.unlink()),
    ("has 3 bytes", lambda path: path.write_bytes(b"abc")),
    ("has other content", lambda path: path.write_bytes(bytes(path.stat().st_size))),
]


@pytest.mark.parametrize(("reason", "change"), CHANGES)
@pytest.mark.parametrize(
    "part", ["training_images/s01.png", "control_images/s02.png", "training_images/s03.txt"]
)
def test_changed_file_is_refused_by_name(
    workspace: Workspace, make_dataset: Any, part: str, reason: str, change: Any
) -> None:
    root = make_dataset(name="other")
    record(workspace, root)
    change(root / part)
    with pytest.raises(DataError, match=f"{part} {reason}") as caught:
        manifest.load(workspace)
    assert caught.value.remedy == "finetune dataset"


def test_many_changes_are_counted(workspace: Workspace, make_dataset: Any) -> None:
    root = make_dataset(name="other")
    record(workspace, root)
    for path in (root / "control_images").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="and 7 more"):
        manifest.load(workspace)


@pytest.mark.parametrize("incomplete", [False, True])
def test_missing_or_incomplete_evidence_is_refused(workspace: Workspace, incomplete: bool) -> None:
    if incomplete:
        workspace.begin_evidence(manifest.EVIDENCE, "test")
    with pytest.raises(DataError, match="not been scanned") as caught:
        manifest.load(workspace)
    assert caught.value.remedy == "finetune dataset"
