import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from runtime.data.sources import dataset_file, directory, layout, names
from runtime.errors import DataError

Shape = tuple[str, tuple[str, ...], str | None, str | None]


def touch(root: Path, *names: str) -> None:
    """Empty files: the layout looks at names only."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def shapes(root: Path) -> dict[str, Shape]:
    def relative(path: Path | None) -> str | None:
        return path.relative_to(root.resolve()).as_posix() if path else None

    return {
        item.id: (
            str(relative(item.target)),
            tuple(str(relative(path)) for path in item.controls),
            relative(item.mask),
            relative(item.caption),
        )
        for item in layout.scan(root).samples
    }


def reasons(root: Path) -> dict[str, str]:
    return {note.path: note.reason for note in layout.scan(root).dropped}


@pytest.mark.parametrize("targets", layout.TARGET_FOLDERS)
@pytest.mark.parametrize("controls", layout.CONTROL_FOLDERS)
def test_every_pair_of_folder_names(tmp_path: Path, targets: str, controls: str) -> None:
    touch(tmp_path, f"{targets}/a.png", f"{targets}/a.txt", f"{controls}/a.png")
    assert shapes(tmp_path) == {"a": (f"{targets}/a.png", (f"{controls}/a.png",), None, f"{targets}/a.txt")}
    assert reasons(tmp_path) == {}


def test_stems_that_begin_alike_keep_their_own_controls(tmp_path: Path) -> None:
    """The fault of prefix matching: a1 also took the controls of a10."""
    for stem in ("a1", "a10", "a1_2", "a1_control_1x"):
        touch(
            tmp_path,
            f"images/{stem}.png",
            f"images/{stem}.txt",
            f"control/{stem}.png",
            f"control/{stem}_control_1.png",
        )
    found = shapes(tmp_path)
    assert {stem: item[1] for stem, item in found.items()} == {
        stem: (f"control/{stem}.png", f"control/{stem}_control_1.png")
        for stem in ("a1", "a10", "a1_2", "a1_control_1x")
    }
    assert reasons(tmp_path) == {}


STEMS = [
    "a.b",
    "v1.2.final",
    "with space",
    "two  spaces",
    "猫の写真",
    "🎨",
    "👩‍👩‍👧",
    "é",
    "UPPER",
    "a-b_c",
    "-leading",
    "--help",
    ".leading",
    "'quoted'",
    "100%",
    "{0}",
    "x" * 200,
    "control_1",
    "mask",
    "a (1)",
]


@pytest.mark.parametrize("stem", STEMS)
def test_any_stem(tmp_path: Path, stem: str) -> None:
    touch(
        tmp_path,
        f"images/{stem}.JPG",
        f"images/{stem}.txt",
        f"controls/{stem}_control_2.Png",
        f"controls/{stem}.webp",
    )
    assert shapes(tmp_path) == {
        stem: (
            f"images/{stem}.JPG",
            (f"controls/{stem}.webp", f"controls/{stem}_control_2.Png"),
            None,
            f"images/{stem}.txt",
        )
    }
    assert reasons(tmp_path) == {}


@pytest.mark.parametrize("suffix", sorted(names.IMAGE_SUFFIXES))
@pytest.mark.parametrize("case", [str.lower, str.upper, str.title])
def test_every_suffix_in_every_case(tmp_path: Path, suffix: str, case: Callable[[str], str]) -> None:
    touch(tmp_path, f"images/a{case(suffix)}", f"images/a{case('.txt')}", f"control/a{case(suffix)}")
    found = shapes(tmp_path)["a"]
    assert found[:2] == (f"images/a{case(suffix)}", (f"control/a{case(suffix)}",))


def test_avif_is_a_picture(tmp_path: Path) -> None:
    touch(tmp_path, "images/a.avif", "images/a.txt", "control/a.avif")
    assert list(shapes(tmp_path)) == ["a"]


def test_captions_are_files_and_no_manifest_decides(tmp_path: Path) -> None:
    touch(tmp_path, "images/a.png", "images/a.txt", "control/a.png")
    scan = layout.scan(tmp_path)
    assert [item.text for item in scan.samples] == [None]
    assert (scan.warnings, scan.files) == ((), ())


def test_two_spellings_of_an_accent_are_one_name(tmp_path: Path) -> None:
    touch(tmp_path, "images/e\u0301.png", "images/\u00e9.txt", "control/\u00e9.png")
    assert list(shapes(tmp_path)) == ["\u00e9"]


def test_a_control_in_the_target_folder_is_known_whatever_its_spelling_sorts_to(tmp_path: Path) -> None:
    touch(tmp_path, "images/\u00e9.png", "images/\u00e9.txt", "images/e\u0301_control_1.png")
    assert shapes(tmp_path)["\u00e9"][1] == ("images/e\u0301_control_1.png",)
    assert reasons(tmp_path) == {}


def test_controls_are_ordered_by_number_and_found_in_both_folders(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "images/a.png",
        "images/a.txt",
        "images/a_control_2.png",
        "control/a_control_10.png",
        "control/a.png",
    )
    expected = ("control/a.png", "images/a_control_2.png", "control/a_control_10.png")
    assert shapes(tmp_path)["a"][1] == expected


def test_caption_and_mask_from_either_folder_the_target_folder_wins(tmp_path: Path) -> None:
    touch(tmp_path, "images/a.png", "control/a.png", "control/a.txt", "control/a_mask.png")
    touch(tmp_path, "images/b.png", "control/b.png", "images/b.txt", "control/b.txt")
    touch(tmp_path, "images/b_mask.png", "control/b_mask.png")
    found = shapes(tmp_path)
    assert found["a"][2:] == ("control/a_mask.png", "control/a.txt")
    assert found["b"][2:] == ("images/b_mask.png", "images/b.txt")
    assert set(reasons(tmp_path)) == {"control/b.txt", "control/b_mask.png"}


DROPPED = [
    (("images/b.png", "images/b.txt"), "images/b.png", "no control"),
    (("images/b.png", "control/b.png"), "images/b.png", "no caption"),
    (("control/b.png",), "control/b.png", "no target has this name"),
    (("images/b.txt",), "images/b.txt", "no target has this name"),
    (("images/a.png.bak",), "images/a.png.bak", "neither a picture"),
    (("images/c.heic",), "images/c.heic", "convert it to JPEG or PNG"),
    (("control/a_control_1.HEIF",), "control/a_control_1.HEIF", "convert it to JPEG or PNG"),
    (("z.heic",), "z.heic", "lies beside"),
    (("images/.DS_Store",), "images/.DS_Store", "neither a picture"),
    (("images/deeper/c.png",), "images/deeper", "a folder"),
    (("control/a.jpg",), "control/a.png", "same name as a.jpg"),
    (("images/a.webp",), "images/a.webp", "same name as a.png"),
    (("images/a_control_1.png", "control/a_control_1.png"), "control/a_control_1.png", "control 1 of a"),
    (("images/a_control_1.png", "control/a_control_01.png"), "control/a_control_01.png", "control 1 of a"),
    (("images/acontrol_1.png",), "images/acontrol_1.png", "no control"),
    (("control/a_control_1b.png",), "control/a_control_1b.png", "no target has this name"),
    (("control/a_control_.png",), "control/a_control_.png", "no target has this name"),
    (("target/z.png",), "target", "a second folder of targets"),
    (("controls/z.png",), "controls", "a second folder of controls"),
    (("z.png",), "z.png", "lies beside"),
]


@pytest.mark.parametrize(("extra", "path", "reason"), DROPPED)
def test_nothing_is_dropped_without_a_reason(
    tmp_path: Path, extra: tuple[str, ...], path: str, reason: str
) -> None:
    touch(tmp_path, "images/a.png", "images/a.txt", "control/a.png", "holdout.txt", *extra)
    assert list(shapes(tmp_path)) == ["a"]
    found = reasons(tmp_path)
    assert list(found) == [path]
    assert reason in found[path]


@pytest.mark.parametrize("names", [(), ("pictures/a.png",), ("control/a.png",)])
def test_unknown_layout_is_refused_with_what_was_seen(tmp_path: Path, names: tuple[str, ...]) -> None:
    touch(tmp_path, *names)
    with pytest.raises(DataError, match="no folder of targets") as caught:
        layout.scan(tmp_path)
    assert all(name.split("/")[0] in caught.value.message for name in names)


def test_pictures_without_folders_are_shown_the_dataset_file_to_write(tmp_path: Path) -> None:
    """The remedy's two lines, written where it says, open the folder."""
    root = tmp_path / 'my "pairs"'
    touch(root, "a.png", "a.txt")
    with pytest.raises(DataError, match="no folder of targets") as caught:
        layout.scan(root)
    _, _, lines = caught.value.remedy.partition("\n")
    assert lines.startswith("[[datasets]]\nimage_directory = ")
    (tmp_path / "dataset.toml").write_text(lines, encoding="utf-8")
    entry = dataset_file.read(tmp_path / "dataset.toml").entries[0]
    assert [item.id for item in directory.scan(entry.path, None, None).samples] == ["a"]


def test_target_only_data_needs_to_be_asked_for(tmp_path: Path) -> None:
    touch(tmp_path, "images/a.png", "images/a.txt")
    assert shapes(tmp_path) == {}
    assert reasons(tmp_path)["images/a.png"].startswith("no control")


def test_recognised_wants_a_folder(tmp_path: Path) -> None:
    assert not layout.recognised(tmp_path)
    touch(tmp_path, "images")
    assert not layout.recognised(tmp_path)
    (tmp_path / "Targets").mkdir()
    assert layout.recognised(tmp_path)


def test_missing_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        layout.scan(tmp_path / "nowhere")


def link(path: Path, target: Path) -> None:
    try:
        path.symlink_to(target, target_is_directory=target.is_dir())
    except OSError:
        pytest.skip("links need a privilege here")


def test_links_out_of_the_root_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    Image.new("RGB", (8, 8)).save(outside)
    root = tmp_path / "data"
    touch(root, "images/a.png", "images/a.txt", "control/a.png", "images/b.txt", "control/b.png")
    link(root / "images" / "b.png", outside)
    link(root / "images" / "c.png", root / "nowhere.png")
    link(root / "images" / "d.png", root / "images" / "d.png")
    link(root / "control" / "a_control_1.png", root / "images" / "a.png")
    assert shapes(root)["a"][1] == ("control/a.png", "control/a_control_1.png")
    found = reasons(root)
    assert found["images/b.png"] == "a link that leads out of the dataset"
    assert found["images/c.png"] == "a broken link"
    assert "link" in found["images/d.png"]


def test_folder_that_is_a_link_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    touch(tmp_path, "elsewhere/a.png", "data/control/a.png", "data/images/a.txt")
    link(tmp_path / "data" / "target", tmp_path / "elsewhere")
    assert "target" in reasons(tmp_path / "data")
    assert shapes(tmp_path / "data") == {}


@pytest.mark.skipif(sys.platform == "win32", reason="names there are Unicode")
def test_name_that_is_not_unicode_is_dropped(tmp_path: Path) -> None:
    touch(tmp_path, "images/a.png", "images/a.txt", "control/a.png")
    try:
        Path(os.fsdecode(os.fsencode(tmp_path / "images") + b"/\xff.png")).touch()
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    assert reasons(tmp_path) == {"images/\\udcff.png": "its name is not Unicode: rename it"}
