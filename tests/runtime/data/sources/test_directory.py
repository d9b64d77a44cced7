from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.sample import Found, Scan
from runtime.data.sources import directory
from runtime.data.sources.names import Ledger, Parts
from runtime.errors import DataError

Shape = tuple[str, tuple[str, ...], str | None, str | None]


def touch(root: Path, *names: str) -> None:
    """Empty files: only their names are looked at."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def scan(root: Path, controls: str | None = "ctl", extension: str | None = None) -> Scan:
    return directory.scan(root / "img", root / controls if controls else None, extension)


def shape(item: Found, root: Path) -> Shape:
    def relative(path: Path | None) -> str | None:
        return path.relative_to(root).as_posix() if path else None

    controls = tuple(str(relative(path)) for path in item.controls)
    return (str(relative(item.target)), controls, relative(item.mask), relative(item.caption))


def shapes(root: Path, controls: str | None = "ctl", extension: str | None = None) -> dict[str, Shape]:
    """Paths relative to `root`, whatever the source's own root is."""
    return {item.id: shape(item, root.resolve()) for item in scan(root, controls, extension).samples}


def reasons(root: Path, controls: str | None = "ctl", extension: str | None = None) -> dict[str, str]:
    return {note.path: note.reason for note in scan(root, controls, extension).dropped}


def test_stems_that_begin_alike_keep_their_own_controls(tmp_path: Path) -> None:
    """The fault of prefix matching: a1 also took the controls of a10."""
    for stem in ("a1", "a10", "a1_2"):
        touch(tmp_path, f"img/{stem}.png", f"img/{stem}.txt")
        touch(tmp_path, f"ctl/{stem}.jpg", f"ctl/{stem}_0.png", f"ctl/{stem}_0001.png")
    assert {stem: item[1] for stem, item in shapes(tmp_path).items()} == {
        stem: (f"ctl/{stem}.jpg", f"ctl/{stem}_0.png", f"ctl/{stem}_0001.png")
        for stem in ("a1", "a10", "a1_2")
    }
    assert reasons(tmp_path) == {}


CONTROLS = [
    (("a.png",), ("a.png",)),
    (("a_0.png", "a_1.png"), ("a_0.png", "a_1.png")),
    (("a_0000.png", "a_0001.png"), ("a_0000.png", "a_0001.png")),
    (("a_10.png", "a_9.png", "a.png"), ("a.png", "a_9.png", "a_10.png")),
    (("a_02.png", "a_1.png"), ("a_1.png", "a_02.png")),
    (("a_control_2.png", "a_1.png", "a.png"), ("a.png", "a_1.png", "a_control_2.png")),
    (("a.WEBP", "a_7.JPG"), ("a.WEBP", "a_7.JPG")),
]


@pytest.mark.parametrize(("names", "expected"), CONTROLS)
def test_controls_come_by_number_the_unnumbered_first(
    tmp_path: Path, names: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    touch(tmp_path, "img/a.png", "img/a.txt", *(f"ctl/{name}" for name in names))
    assert shapes(tmp_path)["a"][1] == tuple(f"ctl/{name}" for name in expected)
    assert reasons(tmp_path) == {}


OWNERS = [
    # (pictures with a caption, pictures without, control, whose it is)
    (("a", "a_1"), (), "a_1", "a_1"),
    (("a", "a_1"), (), "a_1_2", "a_1"),
    (("a", "a_control"), (), "a_control_1", "a_control"),
    (("a", "a_control_1"), (), "a_control_1", "a_control_1"),
    (("a", "a_mask"), (), "a_mask_1", "a_mask"),
    (("a",), ("a_1",), "a_1", None),
    (("a",), ("a_1",), "a_1_5", None),
    (("a",), ("a_control",), "a_control_1", None),
    (("a",), (), "a_1x", None),
    (("a",), (), "a_", None),
    (("a",), (), "a_-1", None),
    (("a",), (), "A_1", None),
    (("a",), (), "a_\u0661", None),
]


@pytest.mark.parametrize(("captioned", "bare", "control", "owner"), OWNERS)
def test_a_control_goes_to_the_longest_name_or_to_nobody(
    tmp_path: Path, captioned: tuple[str, ...], bare: tuple[str, ...], control: str, owner: str | None
) -> None:
    for stem in captioned:
        touch(tmp_path, f"img/{stem}.png", f"img/{stem}.txt", f"ctl/{stem}_9999.png")
    touch(tmp_path, *(f"img/{stem}.png" for stem in bare), f"ctl/{control}.png")
    holders = [stem for stem, item in shapes(tmp_path).items() if f"ctl/{control}.png" in item[1]]
    assert holders == ([owner] if owner else [])
    assert (f"ctl/{control}.png" in reasons(tmp_path)) == (owner is None)


@pytest.mark.parametrize("stem", ["a.b", "with space", "猫", "🎨", "-x", ".x", "{0}", "a_1", "_", "1"])
def test_any_stem(tmp_path: Path, stem: str) -> None:
    touch(tmp_path, f"img/{stem}.PNG", f"img/{stem}.txt", f"ctl/{stem}_3.Jpeg")
    assert shapes(tmp_path) == {stem: (f"img/{stem}.PNG", (f"ctl/{stem}_3.Jpeg",), None, f"img/{stem}.txt")}
    assert reasons(tmp_path) == {}


@pytest.mark.parametrize(
    ("extension", "caption"),
    [(None, "a.txt"), (".txt", "a.TXT"), (".caption", "a.caption"), (".en.txt", "a.en.txt")],
)
def test_captions_have_the_extension_that_was_asked_for(
    tmp_path: Path, extension: str | None, caption: str
) -> None:
    touch(tmp_path, "img/a.png", f"img/{caption}")
    assert shapes(tmp_path, None, extension) == {"a": ("img/a.png", (), None, f"img/{caption}")}


def test_without_a_control_folder_samples_are_target_only(tmp_path: Path) -> None:
    touch(tmp_path, "img/a.png", "img/a.txt", "img/a_mask.png", "img/b.jpg", "img/b.txt")
    assert shapes(tmp_path, None) == {
        "a": ("img/a.png", (), "img/a_mask.png", "img/a.txt"),
        "b": ("img/b.jpg", (), None, "img/b.txt"),
    }
    assert directory.common_root(tmp_path / "img", None) == (tmp_path / "img").resolve()


def test_a_mask_is_found_in_either_folder_unless_it_is_a_captioned_picture(tmp_path: Path) -> None:
    touch(tmp_path, "img/a.png", "img/a.txt", "ctl/a.png", "ctl/a_mask.png")
    touch(
        tmp_path, "img/b.png", "img/b.txt", "ctl/b.png", "img/b_mask.png", "img/b_mask.txt", "ctl/b_mask.png"
    )
    found = shapes(tmp_path)
    assert {stem: item[2] for stem, item in found.items()} == {
        "a": "ctl/a_mask.png",
        "b": None,
        "b_mask": None,
    }
    assert found["b_mask"][1] == ("ctl/b_mask.png",)


DROPPED = [
    (("img/b.png",), "img/b.png", "no caption: expected b.txt beside it"),
    (("img/a_control_1.png",), "img/a_control_1.png", "a control belongs in control_directory"),
    (("img/b.png", "img/b.txt"), "img/b.png", "no control: expected b.<ext> or b_0.<ext> in ctl"),
    (("img/b.txt",), "img/b.txt", "no target has this name"),
    (("img/holdout.txt",), "img/holdout.txt", "beside the dataset file"),
    (("img/b.caption",), "img/b.caption", "nor a caption (.txt)"),
    (("img/a.webp",), "img/a.webp", "same name as a.png"),
    (("img/deeper/c.png",), "img/deeper", "a folder"),
    (("img/c.HEIC",), "img/c.HEIC", "convert it to JPEG or PNG"),
    (("ctl/b.png",), "ctl/b.png", "no target has this name"),
    (("ctl/a.txt",), "ctl/a.txt", "read beside the pictures only, in img"),
    (("ctl/a.jpg",), "ctl/a.png", "same name as a.jpg"),
    (("ctl/a_1.png", "ctl/a_01.png"), "ctl/a_1.png", "control 1 of a is a_01.png already"),
    (("ctl/a_1.png", "ctl/a_control_1.png"), "ctl/a_control_1.png", "control 1 of a is a_1.png already"),
    (("ctl/a_mask.png", "ctl/a_mask.webp"), "ctl/a_mask.webp", "the mask of a is a_mask.png already"),
]


@pytest.mark.parametrize(("extra", "path", "reason"), DROPPED)
def test_nothing_is_dropped_without_a_reason(
    tmp_path: Path, extra: tuple[str, ...], path: str, reason: str
) -> None:
    touch(tmp_path, "img/a.png", "img/a.txt", "ctl/a.png", *extra)
    assert list(shapes(tmp_path)) == ["a"]
    found = reasons(tmp_path)
    assert list(found) == [path]
    assert reason in found[path]


@pytest.mark.parametrize(
    ("images", "controls", "root"),
    [
        ("img", "ctl", "."),
        ("x/img", "x/ctl", "x"),
        ("x", "x/ctl", "x"),
        ("x/img", "x", "x"),
        ("x/deep/img", "ctl", "."),
        ("ab", "abc", "."),
    ],
)
def test_root_is_the_deepest_common_parent_and_no_way_to_the_other_folder_is_dropped(
    tmp_path: Path, images: str, controls: str, root: str
) -> None:
    touch(tmp_path, f"{images}/a.png", f"{images}/a.txt", f"{controls}/a.jpg")
    assert directory.common_root(tmp_path / images, tmp_path / controls) == (tmp_path / root).resolve()
    found = directory.scan(tmp_path / images, tmp_path / controls, None)
    assert [shape(item, tmp_path.resolve())[:2] for item in found.samples] == [
        (f"{images}/a.png", (f"{controls}/a.jpg",))
    ]
    assert found.dropped == ()


@pytest.mark.parametrize(
    ("images", "controls", "message"),
    [
        ("nowhere", None, "image_directory .*nowhere is not a folder"),
        ("img/a.png", None, "image_directory .*a.png is not a folder"),
        ("img", "nowhere", "control_directory .*nowhere is not a folder"),
        ("img", "img/../img", "its own control"),
    ],
)
def test_folders_that_can_not_serve_are_refused(
    tmp_path: Path, images: str, controls: str | None, message: str
) -> None:
    touch(tmp_path, "img/a.png")
    with pytest.raises(DataError, match=message):
        directory.scan(tmp_path / images, tmp_path / controls if controls else None, None)


def test_links_out_of_both_folders_are_not_followed(tmp_path: Path) -> None:
    """Also where the link stays under the common root."""
    touch(tmp_path, "img/a.png", "img/a.txt", "img/b.txt", "ctl/b.png", "other/b.png", "other/a.png")
    for name, target in (
        ("img/b.png", "other/b.png"),
        ("ctl/a_1.png", "other/a.png"),
        ("ctl/a_2.png", "img/a.png"),
    ):
        try:
            (tmp_path / name).symlink_to(tmp_path / target)
        except OSError:
            pytest.skip("links need a privilege here")
    assert {stem: item[1] for stem, item in shapes(tmp_path).items()} == {"a": ("ctl/a_2.png",)}
    found = reasons(tmp_path)
    assert found["img/b.png"] == found["ctl/a_1.png"] == "a link that leads out of the dataset"


def test_two_spellings_of_an_accent_are_one_name(tmp_path: Path) -> None:
    touch(tmp_path, "img/e\u0301.png", "img/\u00e9.txt", "ctl/e\u0301_1.png")
    assert list(shapes(tmp_path)) == ["\u00e9"]


STEMS = st.text(alphabet="a1_", min_size=1, max_size=5)


@given(targets=st.sets(STEMS, min_size=1, max_size=6), controls=st.sets(STEMS, max_size=8))
def test_each_control_is_used_once_or_dropped_once(targets: set[str], controls: set[str]) -> None:
    ledger = Ledger(root=Path("/d"), bounds=())
    for stem in targets:
        ledger.parts[stem] = Parts(target=Path(f"/d/img/{stem}.png"))
    pictures = [Path(f"/d/ctl/{stem}.png") for stem in sorted(controls)]
    directory._read_controls(ledger, pictures, {})
    used = [path for parts in ledger.parts.values() for path in parts.controls()]
    dropped = [Path("/d") / note.path for note in ledger.dropped]
    assert sorted(used + dropped) == pictures
    for stem in targets & controls:
        assert ledger.parts[stem].exact == Path(f"/d/ctl/{stem}.png")
    for stem, parts in ledger.parts.items():
        for number, path in parts.numbered.items():
            digits = path.stem.removeprefix(f"{stem}_")
            assert path.stem.startswith(f"{stem}_") and int(digits) == number
