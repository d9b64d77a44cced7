"""The record of a dataset: to JSON and back, its digest, and its files as they are now."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runtime import files
from runtime.commands.init import write_target
from runtime.data import manifest, reading
from runtime.data.manifest import Manifest
from runtime.errors import DataError
from runtime.workspace import Workspace


def record(workspace: Workspace, dataset: Path, count: int | None = None) -> Manifest:
    write_target(workspace, model=None, dataset=str(dataset), device=None)
    found = reading.build(workspace, workspace.target()["dataset"], count)
    workspace.begin_evidence(manifest.EVIDENCE, "test").write(inputs={}, data=found.to_json())
    return found


def test_json_is_that_of_the_schema_and_reads_back(
    workspace: Workspace, make_dataset: Any, conforms: Any, tmp_path: Path
) -> None:
    root = make_dataset(name="other")
    Image.new("L", (64, 64)).save(root / "control_images" / "s03_mask.png")
    (root / "training_images" / "s04.txt").write_bytes(b"dog\x92s")
    (root / "training_images" / "s05.txt").write_bytes(b"")
    found = record(workspace, root)
    document = files.read_json(workspace.evidence_path(manifest.EVIDENCE))
    conforms(document, "evidence")
    assert Manifest.from_json(document["data"]) == found
    assert [note.path for note in found.warnings] == ["training_images/s04.txt"]
    assert [note.path for note in found.dropped] == ["training_images/s05.png"]
    assert str(tmp_path) not in json.dumps(document)


def test_a_dataset_file_reads_back_too(workspace: Workspace, make_dataset: Any, conforms: Any) -> None:
    root = make_dataset(name="other")
    listed = root.parent / "sets.toml"
    listed.write_text(
        '[general]\nresolution = [960, 544]\n[[datasets]]\nfolder = "other"\nweight = 2.0\n'
        '[[datasets]]\nimage_directory = "other/training_images"\nname = "alone"\nweight = 1.0\n'
        "control_resolution = 1024\nmax_samples = 4\n",
        encoding="utf-8",
    )
    found = record(workspace, listed)
    document = files.read_json(workspace.evidence_path(manifest.EVIDENCE))
    conforms(document, "evidence")
    assert Manifest.from_json(document["data"]) == found
    assert found.layout == "toml" and found.dataset_file and found.dataset_file.path == "sets.toml"
    assert found.settings["alone"].control_resolution == (1024, 1024)
    assert found.settings["other"].resolution == (544, 960)


def test_digest_is_that_of_the_contract_and_follows_every_part(
    workspace: Workspace, make_dataset: Any
) -> None:
    root = make_dataset(count=3, name="other")
    found = record(workspace, root, 1)
    listed = {
        "samples": [
            {
                "id": sample.id,
                "source": "dataset",
                "split": sample.split,
                "prompt": sample.prompt,
                "alternatives": [],
                "target": sample.target.sha256,
                "controls": [control.sha256 for control in sample.controls],
                "mask": None,
            }
            for sample in found.samples
        ],
        "sources": [{"name": "dataset", "settings": found.to_json()["sources"][0]["settings"]}],
    }
    digests = {found.dataset_digest, record(workspace, root, 0).dataset_digest}
    assert found.dataset_digest == files.document_digest(listed)
    (root / "training_images" / "s00.txt").write_text("another edit", encoding="utf-8")
    digests.add(record(workspace, root, 1).dataset_digest)
    Image.new("RGB", (64, 64), (1, 2, 3)).save(root / "control_images" / "s00.png")
    digests.add(record(workspace, root, 1).dataset_digest)
    Image.new("L", (64, 64)).save(root / "control_images" / "s00_mask.png")
    digests.add(record(workspace, root, 1).dataset_digest)
    for change in ("num_repeats = 2", "caption_lines = true", 'trigger_word = "sks"', "max_samples = 2"):
        listed_in = root.parent / "sets.toml"
        listed_in.write_text(f'[[datasets]]\nfolder = "other"\n{change}\n', encoding="utf-8")
        digests.add(record(workspace, listed_in, 1).dataset_digest)
    assert len(digests) == 9


def test_load_gives_back_what_was_recorded(workspace: Workspace, make_dataset: Any) -> None:
    found = record(workspace, make_dataset(name="other"))
    loaded = manifest.load(workspace)
    assert loaded == found
    sample = loaded.samples[0]
    assert (manifest.roots(workspace, loaded)[sample.source] / sample.target.path).is_file()


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
    manifest.load(workspace)
    change(root / part)
    with pytest.raises(DataError, match=f"{part} {reason}") as caught:
        manifest.load(workspace)
    assert caught.value.remedy == "finetune dataset"


@pytest.mark.parametrize("which", ["the listing", "the dataset file"])
def test_a_changed_list_of_samples_is_refused(workspace: Workspace, make_dataset: Any, which: str) -> None:
    root = make_dataset(name="other")
    listing, listed = root / "list.jsonl", root / "sets.toml"
    lines = [
        json.dumps({"image_path": f"training_images/s{i:02d}.png", "caption": "an edit"}) for i in range(12)
    ]
    listing.write_text("\n".join(lines) + "\n", encoding="utf-8")
    listed.write_text('[[datasets]]\nimage_jsonl_file = "list.jsonl"\n', encoding="utf-8")
    record(workspace, listed)
    manifest.load(workspace)
    changed = listing if which == "the listing" else listed
    changed.write_text(changed.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"{changed.name} has "):
        manifest.load(workspace)


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


def test_evidence_of_an_earlier_version_is_made_anew(workspace: Workspace) -> None:
    data = {"layout": "folders", "root": "d", "samples": [], "dropped": [], "warnings": []}
    workspace.begin_evidence(manifest.EVIDENCE, "test").write(inputs={}, data=data)
    with pytest.raises(DataError, match="another version") as caught:
        manifest.load(workspace)
    assert caught.value.remedy == "finetune dataset"
