from pathlib import Path

import pytest

from gates.datasets import folders
from gates.datasets.counts import Pair

T, C = "training_images/", "control_images/"

# files, (target, controls, mask, caption) of each pair, faults
CASES: dict[str, tuple[list[str], list[tuple[str, list[str], str | None, str | None]], list[str]]] = {
    "names match whole": (
        [T + "a1.png", T + "a10.png", T + "a1_2.png", C + "a1.png", C + "a10.png", C + "a1_2.png"],
        [
            (T + "a1.png", [C + "a1.png"], None, None),
            (T + "a10.png", [C + "a10.png"], None, None),
            (T + "a1_2.png", [C + "a1_2.png"], None, None),
        ],
        [],
    ),
    "controls by number, the exact one first, from either folder": (
        [T + "a.png", C + "a_control_10.png", T + "a_control_2.png", C + "a.jpg", C + "a_control_3.PNG"],
        [
            (
                T + "a.png",
                [C + "a.jpg", T + "a_control_2.png", C + "a_control_3.PNG", C + "a_control_10.png"],
                None,
                None,
            )
        ],
        [],
    ),
    "a number twice": (
        [T + "a.png", T + "a_control_1.png", C + "a_control_01.png"],
        [(T + "a.png", [T + "a_control_1.png"], None, None)],
        [C + "a_control_01.png belongs to no target"],
    ),
    "masks": (
        [T + "a.png", C + "a.png", C + "a_mask.png", T + "b.png", C + "b.png", T + "b_mask.webp"],
        [
            (T + "a.png", [C + "a.png"], C + "a_mask.png", None),
            (T + "b.png", [C + "b.png"], T + "b_mask.webp", None),
        ],
        [],
    ),
    "captions, that of the target folder first": (
        [T + "a.png", T + "a.TXT", C + "a.txt", C + "b.txt", T + "b.c.png", C + "b.c.txt"],
        [(T + "a.png", [], None, T + "a.TXT"), (T + "b.c.png", [], None, C + "b.c.txt")],
        [],
    ),
    "accents in two spellings": (
        [T + "e\u0301.png", C + "\u00e9.png", C + "\u00e9.txt"],
        [(T + "e\u0301.png", [C + "\u00e9.png"], None, C + "\u00e9.txt")],
        [],
    ),
    "a dash, a space, CJK": (
        [T + "-x y.png", C + "-x y.png", T + "\u7532 1.png", C + "\u7532 1_control_1.png"],
        [
            (T + "-x y.png", [C + "-x y.png"], None, None),
            (T + "\u7532 1.png", [C + "\u7532 1_control_1.png"], None, None),
        ],
        [],
    ),
    "two of one name, and strays": (
        [T + "a.jpg", T + "a.png", C + "x.png", C + "x_control_1.png", C + "notes.md"],
        [(T + "a.jpg", [], None, None)],
        [f"{name} belongs to no target" for name in (T + "a.png", C + "x.png", C + "x_control_1.png")],
    ),
}


def _fill(root: Path, files: list[str]) -> None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize("case", CASES)
def test_pairs(case: str, tmp_path: Path) -> None:
    files, pairs, faults = CASES[case]
    _fill(tmp_path, files)
    found = folders.count(tmp_path, controls_needed=True)
    assert found.pairs == tuple(
        Pair(target=target, controls=tuple(controls), needs_control=True, mask=mask, caption=caption)
        for target, controls, mask, caption in pairs
    )
    assert list(found.faults) == faults and not found.unrecognised


def test_other_names_of_the_folders_in_their_order(tmp_path: Path) -> None:
    _fill(tmp_path, ["Images/a.png", "target/b.png", "condition_images/a.png"])
    found = folders.count(tmp_path, controls_needed=True)
    assert [pair.target for pair in found.pairs] == ["Images/a.png"]
    assert found.pairs[0].controls == ("condition_images/a.png",)
    assert found.found == "targets in Images, controls in condition_images"


def test_no_target_folder(tmp_path: Path) -> None:
    _fill(tmp_path, ["control_images/a.png"])
    assert "training_images/" in folders.count(tmp_path, controls_needed=True).unrecognised


@pytest.mark.parametrize(("needed", "missing"), [(True, ["control", "caption"]), (False, ["caption"])])
def test_what_a_pair_misses(needed: bool, missing: list[str], tmp_path: Path) -> None:
    _fill(tmp_path, [T + "a.png"])
    (pair,) = folders.count(tmp_path, controls_needed=needed).pairs
    assert list(pair.missing()) == missing
