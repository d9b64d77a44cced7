"""From files to samples: every picture once, everything left out with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runtime import files
from runtime.data import images, reading
from runtime.data.manifest import Manifest
from runtime.workspace import Workspace


def read(workspace: Workspace, dataset: Path, count: int | None = None) -> Manifest:
    return reading.build(workspace, workspace.refer(dataset, "dataset"), count)


def sets(root: Path, text: str) -> Path:
    path = root.parent / "sets.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_holds_size_digest_and_upright_measure_of_each_file(workspace: Workspace, make_dataset: Any) -> None:
    root = make_dataset(count=2, size=(40, 24), controls=2, name="other")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 24)).save(root / "training_images" / "s00.png", exif=exif)
    first = read(workspace, root).samples[0]
    path = root / "training_images" / "s00.png"
    assert (first.target.width, first.target.height) == (24, 40)
    assert first.target.sha256 == files.file_digest(path) and first.target.size == path.stat().st_size
    assert first.target.path == "training_images/s00.png"
    assert [control.path for control in first.controls] == [
        "control_images/s00.png",
        "control_images/s00_control_1.png",
    ]
    assert first.prompt == "edit number 0"
    assert first.caption is not None and first.caption.path == "training_images/s00.txt"


@pytest.mark.parametrize("part", ["training_images/s01.png", "control_images/s01.png"])
def test_sample_with_a_damaged_picture_is_dropped_by_name(
    workspace: Workspace, make_dataset: Any, part: str
) -> None:
    root = make_dataset(count=3, name="other")
    (root / part).write_bytes(b"")
    found = read(workspace, root)
    assert [sample.id for sample in found.samples] == ["s00", "s02"]
    assert found.dropped[0].path == "training_images/s01.png"
    assert part in found.dropped[0].reason and "the file is empty" in found.dropped[0].reason
    assert found.sources[0].dropped == 1


def test_a_second_scan_opens_what_changed_alone(
    workspace: Workspace, make_dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    root = make_dataset(count=4, name="other")
    for path in root.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    first = read(workspace, root)
    opened: list[str] = []
    load = images.load
    monkeypatch.setattr(images, "load", lambda path, **named: opened.append(path.name) or load(path, **named))
    assert read(workspace, root) == first and opened == []
    Image.new("RGB", (64, 64), "red").save(root / "training_images" / "s02.png")
    assert read(workspace, root) != first and opened == ["s02.png"]


def test_holdout_list_lies_in_the_dataset(workspace: Workspace, make_dataset: Any) -> None:
    root = make_dataset(name="other")
    (root / "holdout.txt").write_text("s03\ns07\nnobody\n", encoding="utf-8")
    found = read(workspace, root, 1)
    assert [sample.id for sample in found.of("holdout")] == ["s03", "s07"]
    assert found.holdout_rule == "holdout.txt: 2 of 12"
    assert [note.reason for note in found.warnings] == ["nobody: no usable sample has this name"]


def test_several_sources_keep_their_names_apart(workspace: Workspace, make_dataset: Any) -> None:
    """Case C5: one name in two folders."""
    one, two = make_dataset(count=5, name="one"), make_dataset(count=5, name="two")
    Image.new("RGB", (64, 64), "white").save(two / "training_images" / "s00.png")
    (two / "training_images" / "s04.png").write_bytes(b"")
    listed = sets(
        one,
        '[[datasets]]\nfolder = "one"\nnum_repeats = 3\n[[datasets]]\nfolder = "two"\nregularisation = true\n',
    )
    found = read(workspace, listed, 2)
    ids = [sample.id for sample in found.samples]
    assert ids == [f"one/s0{i}" for i in range(5)] + [f"two/s0{i}" for i in range(4)]
    by_id = {sample.id: sample for sample in found.samples}
    assert by_id["one/s00"].target.sha256 != by_id["two/s00"].target.sha256
    assert by_id["one/s00"].target.path == by_id["two/s00"].target.path == "training_images/s00.png"
    assert {sample.source for sample in found.of("holdout")} == {"one"}
    assert [note.path for note in found.dropped] == ["two/training_images/s04.png"]
    assert [(source.name, source.dropped) for source in found.sources] == [("one", 0), ("two", 1)]
    assert found.settings["one"].views == 3 and found.settings["two"].regularisation
    assert {source.root for source in found.sources} == {"external:dataset.one", "external:dataset.two"}


def test_max_samples_is_the_same_subset_at_every_scan(workspace: Workspace, make_dataset: Any) -> None:
    root = make_dataset(count=10, name="other")
    listed = sets(root, '[[datasets]]\nfolder = "other"\nmax_samples = 6\n')
    found = read(workspace, listed, 1)
    kept = {sample.id for sample in found.samples}
    assert len(kept) == 6
    assert len(found.dropped) == 4 and all("beyond max_samples, 6 of 10" in n.reason for n in found.dropped)
    for path in (root / "training_images").glob("s0[0-3].*"):
        if f"other/{path.stem}" not in kept and path.stem not in kept:
            path.unlink()
    again = {sample.id for sample in read(workspace, listed, 1).samples}
    assert again == kept


def test_trigger_word_and_one_caption_a_line(workspace: Workspace, make_dataset: Any) -> None:
    root = make_dataset(count=2, name="other")
    (root / "training_images" / "s00.txt").write_bytes(b"paint it\r\n\r\n  [trigger] in the sky \r\n")
    listed = sets(root, '[[datasets]]\nfolder = "other"\ntrigger_word = "sks"\ncaption_lines = true\n')
    first, second = read(workspace, listed, 0).samples
    assert (first.prompt, first.alternatives) == ("sks, paint it", ("sks in the sky",))
    assert (second.prompt, second.alternatives) == ("sks, edit number 1", ())


def test_a_listing_holds_the_captions(workspace: Workspace, make_dataset: Any) -> None:
    root = make_dataset(count=3, name="other")
    rows = [
        {
            "image_path": "training_images/s00.png",
            "control_path": "control_images/s00.png",
            "caption": "a\nb",
        },
        {"image_path": "training_images/s01.png", "caption": "  "},
        {"image_path": "training_images/s02.png", "caption": "no control"},
    ]
    listing = root / "list.jsonl"
    listing.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    found = read(workspace, listing, 0)
    assert [(s.prompt, len(s.controls), s.caption) for s in found.samples] == [
        ("a\nb", 1, None),
        ("no control", 0, None),
    ]
    assert len(found.dropped) == 1 and "empty" in found.dropped[0].reason
    assert [file.path for file in found.sources[0].files] == ["list.jsonl"]
    assert found.layout == found.sources[0].kind == "jsonl"
