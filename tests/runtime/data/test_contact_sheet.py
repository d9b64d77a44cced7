"""The table of sizes and the pages of pictures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from runtime.data import buckets, contact_sheet
from runtime.data.buckets import Places, Sizing
from runtime.data.contact_sheet import ALARM, CELL, HEAD, MARGIN, SheetRow, Tile
from runtime.data.sample import ImageFile, Sample
from runtime.errors import DataError

PHOTOS = Path(__file__).parents[2] / "photos"
PLAIN = Sizing(
    target=(32, 64), step=16, enable_bucket=False, no_upscale=False, controls=None, controls_resize="cover"
)
Colour = tuple[int, int, int]
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def picture(path: str, height: int, width: int) -> ImageFile:
    return ImageFile(path=path, size=1, sha256="0" * 64, width=width, height=height)


def sample(
    target: ImageFile,
    controls: tuple[ImageFile, ...] = (),
    mask: ImageFile | None = None,
    name: str = "a",
    alternatives: tuple[str, ...] = (),
) -> Sample:
    return Sample(
        id=name,
        source="main",
        split="train",
        prompt="make it red",
        alternatives=alternatives,
        caption=None,
        target=target,
        controls=controls,
        mask=mask,
    )


def places(made: Sample, sizing: Sizing = PLAIN) -> Places:
    mask = made.mask
    return buckets.place(
        sizing,
        (made.target.height, made.target.width),
        [(control.height, control.width) for control in made.controls],
        (mask.height, mask.width) if mask else None,
    )


def test_table() -> None:
    square, wide, ribbon = picture("s.png", 64, 64), picture("w.png", 32, 64), picture("r.png", 4, 5000)
    made = [
        sample(square, (square, wide, ribbon)),
        replace(sample(wide, (), wide, "猫\nb"), split="holdout", source="other"),
    ]
    assert contact_sheet.table_rows((one, places(one)) for one in made) == [
        ("a", "train", "main", "64 x 64", "32 x 64", "32 x 64 (cut 50%), 32 x 64, 32 x 64 (cut 99%)", "50%"),
        ("猫\nb", "holdout", "other", "32 x 64", "32 x 64", "-", "0%"),
    ]
    assert len(contact_sheet.COLUMNS) == 7


def test_table_has_a_row_per_sample_without_opening_a_file() -> None:
    one = sample(picture("is/not/there.png", 100, 50), (picture("nor/this.png", 10, 10),))
    rows = contact_sheet.table_rows([(one, places(one))] * 3)
    assert len(rows) == 3 and all(len(row) == len(contact_sheet.COLUMNS) for row in rows)


def flat(colour: Colour, cut: float = 0.0) -> Tile:
    return Tile(picture=Image.new("RGB", (64, 64), colour), original=(64, 64), final=(32, 64), cut=cut)


def row(*controls: Tile, mask: Tile | None = None, target: Tile | None = None, caption: str = "") -> SheetRow:
    return SheetRow(
        id="a",
        split="train",
        source="main",
        caption=caption,
        controls=controls,
        target=target or flat(GREEN),
        mask=mask,
    )


def middles(page: Image.Image, rows: int, columns: int) -> list[list[object]]:
    height = (page.height - HEAD) // rows
    return [
        [
            page.getpixel(
                (
                    MARGIN + column * (CELL + MARGIN) + CELL // 2,
                    HEAD + index * height + MARGIN + CELL // 2,
                )
            )
            for column in range(columns)
        ]
        for index in range(rows)
    ]


def test_pictures_of_a_kind_stand_under_each_other() -> None:
    white, paper = (250, 250, 250), contact_sheet.PAPER
    rows = [row(flat(RED), flat(BLUE)), row(mask=flat(white)), row(flat(BLUE), mask=flat(white))]
    page = contact_sheet.draw(rows, title="three")
    assert middles(page, 3, 4) == [
        [RED, BLUE, GREEN, paper],
        [paper, paper, GREEN, white],
        [BLUE, paper, GREEN, white],
    ]


def test_a_page_is_as_wide_as_its_pictures() -> None:
    one, two = (contact_sheet.draw([row(*[flat(RED)] * count)], title="") for count in (1, 2))
    assert two.width - one.width == CELL + MARGIN and two.height == one.height
    assert contact_sheet.draw([], title="none").height == HEAD


def count(page: Image.Image, colour: Colour) -> int:
    return int(np.all(np.asarray(page) == colour, axis=-1).sum())


@pytest.mark.parametrize(("cut", "alarmed"), [(0.0, False), (0.2, False), (0.25, True), (0.9, True)])
def test_a_large_cut_is_marked(cut: float, alarmed: bool) -> None:
    page = contact_sheet.draw([row(target=flat(GREEN, cut))], title="")
    assert (count(page, ALARM) > 0) == alarmed


@pytest.mark.parametrize(
    "text",
    [
        "把圆圈涂成红色 \U0001f600 " + "long " * 200,
        "x" * 3000,
        "a\nb\r\n\tc\0\x07\x85\u202e\ud800",
        "",
        "größer",
    ],
)
def test_words_of_any_script_and_length_stay_in_their_column(text: str) -> None:
    made = replace(row(caption=text), id=text, source=text)
    page = np.asarray(contact_sheet.draw([made, made], title=text))
    empty = np.asarray(contact_sheet.draw([row(), row()], title=""))
    assert page.shape == empty.shape
    assert (page[:, -MARGIN:] == empty[:, -MARGIN:]).all()
    between = slice(HEAD + MARGIN + CELL + 2 * 17 + 1, HEAD + MARGIN + CELL + 2 * 17 + MARGIN)
    assert (page[between] == empty[between]).all()


def test_a_caption_is_drawn() -> None:
    ink = count(contact_sheet.draw([row()], title=""), contact_sheet.INK)
    assert count(contact_sheet.draw([row(caption="make it red")], title=""), contact_sheet.INK) > ink


def test_the_sheet_shows_what_is_trained_after_the_crop(tmp_path: Path) -> None:
    """Green is in the middle half of the height, which is all that a target of 1:2 keeps of a square."""
    target = Image.new("RGB", (64, 64), RED)
    target.paste(GREEN, (0, 16, 64, 48))
    target.save(tmp_path / "t.png")
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(tmp_path / "c.png")
    mask = Image.new("L", (128, 128))
    mask.paste(255, (0, 32, 128, 96))
    mask.save(tmp_path / "m.png")
    made = sample(
        picture("t.png", 64, 64),
        (picture("c.png", 64, 64),),
        picture("m.png", 128, 128),
        alternatives=("b", "c"),
    )
    found = contact_sheet.read_row(made, tmp_path, places(made), background=BLUE)
    assert found.mask is not None
    tiles = (*found.controls, found.target, found.mask)
    assert [tile.picture.size for tile in tiles] == [(64, 32)] * 3
    inner = [tile.picture.crop((0, 6, 64, 26)).getcolors() for tile in tiles]
    assert inner == [[(1280, BLUE)], [(1280, GREEN)], [(1280, (255, 255, 255))]]
    assert [(tile.original, tile.final, tile.cut) for tile in tiles] == [
        ((64, 64), (32, 64), 0.5),
        ((64, 64), (32, 64), 0.5),
        ((128, 128), (32, 64), 0.5),
    ]
    assert found.caption == "make it red (and 2 more captions)"


def test_photos_on_pages(tmp_path: Path) -> None:
    sizes = {"chelsea.jpg": (190, 256), "coffee.png": (192, 192), "rocket.jpg": (240, 160)}
    files = [picture(name, *size) for name, size in sizes.items()]
    made = [sample(file, (file,), name=f"{number}") for number in range(5) for file in files]
    sizing = replace(PLAIN, target=(1024, 1024), enable_bucket=True)
    entries = [(one, PHOTOS, places(one, sizing)) for one in made]
    pages = list(contact_sheet.sheets(entries, title="photos"))
    heights = [(page.height - HEAD) / contact_sheet._row_height() for page in pages]
    assert heights == [contact_sheet.ROWS_PER_PAGE, 3]
    assert all(np.asarray(page).std() > 30 for page in pages)
    shown = contact_sheet.read_row(*entries[0]).target.picture
    assert max(shown.size) == CELL  # a page holds thumbnails, not pictures of a megapixel
    assert list(contact_sheet.sheets([], title="none")) == []


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    made = sample(picture("gone.png", 64, 64))
    with pytest.raises(DataError, match=r"gone\.png"):
        list(contact_sheet.sheets([(made, tmp_path, places(made))], title=""))
