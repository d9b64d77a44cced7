from pathlib import Path

import pytest

from gates.datasets import directories

# files below p/ (pictures) and c/ (controls), (target, controls, mask, caption), faults
CASES: dict[str, tuple[list[str], list[tuple[str, list[str], str | None, str | None]], list[str]]] = {
    "un-suffixed first, then by number": (
        ["p/a.png", "p/a.txt", "c/a_10.png", "c/a_2.png", "c/a.jpg", "c/a_control_3.png"],
        [("p/a.png", ["c/a.jpg", "c/a_2.png", "c/a_control_3.png", "c/a_10.png"], None, "p/a.txt")],
        [],
    ),
    "a1, a10 and a1_2": (
        ["p/a1.png", "p/a10.png", "p/a1_2.png", "c/a1.png", "c/a10_0.png", "c/a1_2.png", "c/a1_3.png"],
        [
            ("p/a1.png", ["c/a1.png", "c/a1_3.png"], None, None),
            ("p/a10.png", ["c/a10_0.png"], None, None),
            ("p/a1_2.png", ["c/a1_2.png"], None, None),
        ],
        [],
    ),
    "the longest name that fits": (
        ["p/a.png", "p/a_control.png", "c/a_control_1.png", "c/a.png"],
        [("p/a.png", ["c/a.png"], None, None), ("p/a_control.png", ["c/a_control_1.png"], None, None)],
        [],
    ),
    "masks in either folder, where they have no caption of their own": (
        ["p/a.png", "p/a.txt", "p/a_mask.png", "p/b.png", "p/b.txt", "c/b_mask.png", "c/a.png", "c/b.png",
         "p/x_mask.png", "p/x_mask.txt", "c/x_mask.png"],
        [
            ("p/a.png", ["c/a.png"], "p/a_mask.png", "p/a.txt"),
            ("p/b.png", ["c/b.png"], "c/b_mask.png", "p/b.txt"),
            ("p/x_mask.png", ["c/x_mask.png"], None, "p/x_mask.txt"),
        ],
        [],
    ),
    "no mask of a caption without a picture": (
        ["p/a.txt", "p/a_mask.png", "c/a_mask.png"], [("p/a_mask.png", ["c/a_mask.png"], None, None)], [],
    ),
    "strays": (
        ["p/a.jpg", "p/a.png", "c/a_1.png", "c/a_01.png", "c/b.png", "c/a_x.png"],
        [("p/a.jpg", ["c/a_01.png"], None, None)],
        [f"{name} belongs to no target" for name in ("p/a.png", "c/a_1.png", "c/a_x.png", "c/b.png")],
    ),
}  # fmt: skip


def _fill(root: Path, files: list[str]) -> None:
    for name in ("p", "c"):
        (root / name).mkdir()
    for name in files:
        (root / name).touch()


@pytest.mark.parametrize("case", CASES)
def test_pairs(case: str, tmp_path: Path) -> None:
    files, pairs, faults = CASES[case]
    _fill(tmp_path, files)
    found = directories.count(tmp_path / "p", tmp_path / "c", ".txt")
    assert [(p.target, list(p.controls), p.mask, p.caption) for p in found.pairs] == pairs
    assert list(found.faults) == faults
    assert all(pair.needs_control for pair in found.pairs)


def test_without_a_control_folder_samples_are_target_only(tmp_path: Path) -> None:
    _fill(tmp_path, ["p/a.png", "p/a.Caption", "p/a.txt"])
    found = directories.count(tmp_path / "p", None, ".caption")
    assert [(pair.target, pair.caption) for pair in found.pairs] == [("a.png", "a.Caption")]
    assert list(found.pairs[0].missing()) == [] and not found.faults


@pytest.mark.parametrize(
    ("images", "controls", "root"),
    [("a/p", "a/c", "a"), ("p", None, "p"), ("p", "p/c", "p"), ("x/p", "y", ".")],
)
def test_the_deepest_common_parent(images: str, controls: str | None, root: str, tmp_path: Path) -> None:
    found = directories.common_root(tmp_path / images, tmp_path / controls if controls else None)
    assert found == tmp_path / root


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    _fill(tmp_path, [])
    assert directories.count(tmp_path / "p", tmp_path / "q", ".txt").unrecognised == "q is not a folder"
