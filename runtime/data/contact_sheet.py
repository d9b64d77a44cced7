"""What a fit will see of each sample: a table of sizes, and pages of the pictures as they are trained."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from runtime import drawing
from runtime.data import images
from runtime.data.buckets import Placed, Places, cut_share
from runtime.data.sample import ImageFile, Sample, Size
from runtime.drawing import INK, PAPER

COLUMNS = ("id", "split", "source", "picture", "final", "controls", "cut")
"""Of the table. Sizes are height x width; cut is the target's share that no fit sees."""
ROWS_PER_PAGE = 12
MUCH = 0.25  # a cut that a person should look at

MARGIN, CELL, WORDS = 12, 176, 320
TEXT, LINE, HEAD = 13, 17, 56  # heights: of a letter, of a line, of title and column names
FAINT, ALARM, RULE, BEHIND = (110, 110, 110), (190, 20, 20), (215, 215, 215), (240, 240, 240)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One picture of a sample, after crop and resize; `original` is the size of the upright file."""

    picture: Image.Image
    original: Size
    final: Size
    cut: float
    """Share of the original that was cut away, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetRow:
    id: str
    split: str
    source: str
    caption: str
    controls: tuple[Tile, ...]
    target: Tile
    mask: Tile | None


def table_rows(entries: Iterable[tuple[Sample, Places]]) -> list[tuple[str, ...]]:
    """A row of texts under COLUMNS for each sample."""
    return [_table_row(sample, places) for sample, places in entries]


def _table_row(sample: Sample, places: Places) -> tuple[str, ...]:
    assert places.target is not None  # a sample has a target
    size = _size(sample.target)
    controls = [
        _final(placed, _size(control))
        for control, placed in zip(sample.controls, places.controls, strict=True)
    ]
    return (
        sample.id,
        sample.split,
        sample.source,
        _shown(size),
        _shown(places.size),
        ", ".join(controls) or "-",
        _percent(cut_share(size, places.target)),
    )


def _final(placed: Placed, picture: Size) -> str:
    cut = _percent(cut_share(picture, placed))
    return _shown(placed.size) + ("" if cut == "0%" else f" (cut {cut})")


def _size(file: ImageFile) -> Size:
    return file.height, file.width


def _shown(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


def _percent(share: float) -> str:
    return f"{min(round(100 * share), 99)}%"  # something is always left


def sheets(
    entries: Sequence[tuple[Sample, Path, Places]],
    *,
    title: str,
    background: images.Colour = images.BACKGROUND,
) -> Iterator[Image.Image]:
    """The pages of samples, each with the folder of its source. Raises DataError that names a bad file."""
    pages = -(-len(entries) // ROWS_PER_PAGE)
    for page in range(pages):
        part = entries[page * ROWS_PER_PAGE : (page + 1) * ROWS_PER_PAGE]
        rows = [read_row(*entry, background=background) for entry in part]
        yield draw(rows, title=title + (f", page {page + 1} of {pages}" if pages > 1 else ""))


def read_row(
    sample: Sample, root: Path, places: Places, *, background: images.Colour = images.BACKGROUND
) -> SheetRow:
    """Pictures no larger than the sheet shows them."""
    assert places.target is not None  # a sample has a target
    more = f" (and {len(sample.alternatives)} more captions)" if sample.alternatives else ""
    return SheetRow(
        id=sample.id,
        split=sample.split,
        source=sample.source,
        caption=sample.prompt + more,
        controls=tuple(
            _tile(root, control, placed, background)
            for control, placed in zip(sample.controls, places.controls, strict=True)
        ),
        target=_tile(root, sample.target, places.target, background),
        mask=_tile(root, sample.mask, places.mask, (0, 0, 0)) if sample.mask and places.mask else None,
    )


def _tile(root: Path, file: ImageFile, placed: Placed, background: images.Colour) -> Tile:
    picture = images.fit(images.load(root / file.path, background), placed)
    picture.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
    size = _size(file)
    return Tile(picture=picture, original=size, final=placed.size, cut=cut_share(size, placed))


def draw(rows: Sequence[SheetRow], *, title: str) -> Image.Image:
    """One page: controls, target and mask side by side, the words right of them."""
    controls = max((len(row.controls) for row in rows), default=0)
    masks = any(row.mask is not None for row in rows)
    names = [f"control {number}" for number in range(1, controls + 1)]
    names += ["target"] + (["mask"] if masks else [])
    words = MARGIN + len(names) * (CELL + MARGIN)
    page = Image.new("RGB", (words + WORDS + MARGIN, HEAD + len(rows) * _row_height()), PAPER)
    pen = ImageDraw.Draw(page)
    _line(pen, (MARGIN, MARGIN), title, page.width - 2 * MARGIN, size=TEXT + 3)
    for column, name in enumerate(names):
        _line(pen, (_left(column), HEAD - LINE - 2), name, CELL, FAINT)
    _line(pen, (words, HEAD - LINE - 2), "height x width of the file -> as trained", WORDS, FAINT)
    for index, row in enumerate(rows):
        top = HEAD + index * _row_height()
        pen.line((MARGIN, top, page.width - MARGIN, top), RULE)
        for column, tile in _columns(row, controls):
            _draw_tile(page, pen, tile, (_left(column), top + MARGIN))
        _draw_words(pen, row, (words, top + MARGIN))
    return page


def _row_height() -> int:
    return CELL + 2 * LINE + 2 * MARGIN


def _left(column: int) -> int:
    return MARGIN + column * (CELL + MARGIN)


def _columns(row: SheetRow, controls: int) -> Iterator[tuple[int, Tile]]:
    """Targets stand under each other, however many controls a sample has."""
    yield from enumerate(row.controls)
    yield controls, row.target
    if row.mask is not None:
        yield controls + 1, row.mask


def _draw_tile(page: Image.Image, pen: ImageDraw.ImageDraw, tile: Tile, place: tuple[int, int]) -> None:
    left, top = place
    page.paste(drawing.cell(tile.picture, CELL, BEHIND), place)
    sizes = f"{_shown(tile.original)} -> {_shown(tile.final)}"
    _line(pen, (left, top + CELL + 2), sizes, CELL)
    colour = ALARM if tile.cut >= MUCH else FAINT
    _line(pen, (left, top + CELL + 2 + LINE), f"cut {_percent(tile.cut)}", CELL, colour)


def _draw_words(pen: ImageDraw.ImageDraw, row: SheetRow, place: tuple[int, int]) -> None:
    left, top = place
    _line(pen, (left, top), row.id, WORDS, size=TEXT + 1)
    _line(pen, (left, top + LINE), f"{row.split} / {row.source}", WORDS, FAINT)
    room = (CELL - LINE // 2) // LINE
    for number, line in enumerate(drawing.wrap(row.caption, drawing.font(TEXT), WORDS, room)):
        _line(pen, (left, top + 2 * LINE + LINE // 2 + number * LINE), line, WORDS)


def _line(
    pen: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    width: int,
    colour: tuple[int, int, int] = INK,
    size: int = TEXT,
) -> None:
    face = drawing.font(size)
    pen.text(place, "".join(drawing.wrap(text, face, width, 1)), fill=colour, font=face)
