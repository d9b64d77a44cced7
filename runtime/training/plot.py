"""A run as a picture: the loss of each step, its smooth line, and both probes at each checkpoint."""

from collections.abc import Callable, Sequence
from io import BytesIO
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from runtime import drawing, files
from runtime.training.history import History

WIDTH, HEIGHT = 1200, 760
LEFT, RIGHT, TOP, GAP, FOOT = 84, 28, 84, 84, 44
SPLIT = 0.5  # share of the height that the steps' loss takes
FAINT, SMOOTH, TRAIN, HELD = (190, 204, 222), (31, 90, 168), (38, 132, 74), (204, 82, 20)
GRID, SHADE, GREY = (228, 228, 228), (244, 240, 226), (110, 110, 110)
SPREAD = 0.02  # of single steps' losses the highest and lowest share that may run out of the picture

Colour = tuple[int, int, int]
Series = list[tuple[float, float]]
Place = Callable[[float, float], tuple[float, float]]


def write(path: Path, title: str, history: History, planned: int) -> None:
    """A PNG at `path`."""
    buffer = BytesIO()
    draw(title, history, planned).save(buffer, "PNG")
    files.write_bytes(path, buffer.getvalue())


def draw(title: str, history: History, planned: int) -> Image.Image:
    """Steps up to `planned` from left to right; the warm-up is shaded."""
    warmup = warmup_of(history.metrics)
    image = Image.new("RGB", (WIDTH, HEIGHT), drawing.PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((LEFT, 14), drawing.drawable(title), drawing.INK, drawing.font(20))
    loss, smooth = _series(history.metrics, "loss"), _series(history.metrics, "loss_ema")
    train, held = _series(history.probes, "train_mean"), _series(history.probes, "holdout_mean")
    middle = TOP + round((HEIGHT - TOP - GAP - FOOT) * SPLIT)
    upper, lower = (TOP, middle), (middle + GAP, HEIGHT - FOOT)
    place = _panel(pen, upper, "loss per step", _inner(loss) + _values(smooth), planned, warmup)
    _points(pen, place, loss, FAINT, 1.5, upper)
    _line(pen, place, smooth, SMOOTH, 3)
    _legend(pen, TOP - 22, [("single steps", FAINT), ("smoothed", SMOOTH)])
    label = "probe: fixed samples and noise"
    if held:
        step, value = min(held, key=lambda point: point[1])
        label += f"; lowest held out {value:.4f} at step {step:.0f}"
    place = _panel(pen, lower, label, _values(train) + _values(held), planned, warmup)
    for series, colour in ((train, TRAIN), (held, HELD)):
        _line(pen, place, series, colour, 3)
        _points(pen, place, series, colour, 5, lower)
    names = [("training samples", TRAIN), ("held-out samples", HELD)]
    _legend(pen, lower[0] - 22, names if held else names[:1])
    if held:
        column, row = place(step, value)
        pen.ellipse((column - 9, row - 9, column + 9, row + 9), outline=HELD, width=2)
    return image


def warmup_of(metrics: Sequence[dict[str, Any]]) -> int:
    """Steps before the learning rate was first at its highest."""
    highest = max(metrics, key=lambda line: float(line["lr"]), default=None)  # of equal ones the first
    return 0 if highest is None else int(highest["step"]) - 1


def _series(lines: Sequence[dict[str, Any]], name: str) -> Series:
    return [(line["step"], line[name]) for line in lines if line[name] is not None]


def _values(series: Series) -> list[float]:
    return [value for _, value in series]


def _inner(series: Series) -> list[float]:
    """Without the few that would press the rest flat."""
    values = sorted(_values(series))
    cut = floor(len(values) * SPREAD)
    return values[cut : len(values) - cut]


def _panel(
    pen: ImageDraw.ImageDraw,
    rows: tuple[int, int],
    label: str,
    values: Sequence[float],
    last: int,
    warmup: int,
) -> Place:
    """Axes; returns where (step, value) lies in pixels."""
    top, bottom = rows
    ticks = nice(min(values, default=0.0), max(values, default=1.0))
    low, high = ticks[0], ticks[-1]

    def place(step: float, value: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, last)
        return across, bottom - (bottom - top) * (value - low) / (high - low)

    if warmup:
        edge = place(min(warmup, last), low)[0]
        pen.rectangle((LEFT, top, edge, bottom), SHADE)
        pen.text((LEFT + 6, bottom - 20), "warm-up", GREY, drawing.font(13))
    for tick in ticks:
        row = place(0, tick)[1]
        pen.line((LEFT, row, WIDTH - RIGHT, row), GRID)
        pen.text((LEFT - 8, row), f"{tick:.10g}", GREY, drawing.font(14), anchor="rm")
    for step in (tick for tick in nice(0, max(1, last), 8) if tick <= last and tick == round(tick)):
        column = place(step, low)[0]
        pen.line((column, bottom, column, bottom + 5), GREY)
        pen.text((column, bottom + 8), f"{step:.0f}", GREY, drawing.font(14), anchor="ma")
    pen.line((LEFT, bottom, WIDTH - RIGHT, bottom), GREY)
    pen.text((LEFT, top - 8), label, drawing.INK, drawing.font(15), anchor="ls")
    pen.text((WIDTH - RIGHT, bottom + 24), "step", GREY, drawing.font(14), anchor="ra")
    return place


def nice(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) that enclose low..high."""
    if not high > low:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [float(f"{index * step:.12g}") for index in range(floor(low / step), ceil(high / step) + 1)]


def _line(pen: ImageDraw.ImageDraw, place: Place, series: Series, colour: Colour, width: int) -> None:
    if len(series) > 1:
        pen.line([place(*point) for point in series], colour, width, joint="curve")


def _points(
    pen: ImageDraw.ImageDraw,
    place: Place,
    series: Series,
    colour: Colour,
    radius: float,
    rows: tuple[int, int],
) -> None:
    """Dots; one that lies out of the picture is put at its edge."""
    for point in series:
        column, row = place(*point)
        row = min(max(row, rows[0]), rows[1])
        pen.ellipse((column - radius, row - radius, column + radius, row + radius), colour)


def _legend(pen: ImageDraw.ImageDraw, row: int, names: Sequence[tuple[str, Colour]]) -> None:
    face, column = drawing.font(14), float(WIDTH - RIGHT)
    for name, colour in reversed(names):
        column -= face.getlength(name)
        pen.text((column, row), name, drawing.INK, face, anchor="lm")
        column -= 26
        pen.line((column, row, column + 18, row), colour, 4)
        column -= 18
