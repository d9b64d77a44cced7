"""Curves over steps as inline SVG. Colours are classes: the page's style knows light from dark."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 22, 40
POINTS_MAX = 600  # in a curve; more are less than a pixel apart
LABELS_MAX = 8  # of checkpoints; more would overlap
HEADROOM = 1.08
OUTLIERS = 0.98  # share of a noisy curve that the scale must hold; the rest is drawn at its upper edge


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    name: str
    style: str
    """class of the line: c1 to c4"""
    points: Sequence[tuple[float, float]]
    """step and value; what is not finite makes a gap"""
    dots: bool = False
    noisy: bool = False
    """outliers of it do not set the scale"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    last: int
    """the step at which the axis ends"""
    warmup: int = 0
    checkpoints: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Scale:
    last: float
    top: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last

    def y(self, value: float) -> float:
        share = min(max(value / self.top, 0.0), 1.0)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def chart(id: str, title: str, told: str, unit: str, curves: Sequence[Curve], marks: Marks) -> str:
    """An <svg> with a title and a description for who can't see it, and its legend."""
    shown = [curve for curve in curves if any(math.isfinite(value) for _, value in curve.points)]
    if not shown:
        return f"<p>{escape(title)}: nothing was recorded.</p>"
    scale = _Scale(max(marks.last, 1), _top(shown))
    body = "".join(
        [
            *_warmup(scale, marks.warmup),
            *_grid(scale, unit),
            *_checkpoints(scale, marks.checkpoints),
            *(part for curve in shown for part in _curve(scale, curve)),
        ]
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{id}-t {id}-d">'
        f'<title id="{id}-t">{escape(title)}</title><desc id="{id}-d">{escape(told)}</desc>{body}</svg>'
        f"{_legend(shown, marks)}"
    )


def _top(curves: Sequence[Curve]) -> float:
    top = max(_quantile(curve) for curve in curves)
    return top * HEADROOM if top > 0 else 1.0


def _quantile(curve: Curve) -> float:
    values = sorted(value for _, value in curve.points if math.isfinite(value))
    if not values:
        return 0.0
    return values[int((len(values) - 1) * OUTLIERS)] if curve.noisy else values[-1]


def _warmup(scale: _Scale, steps: int) -> Iterator[str]:
    if steps > 0:
        width = scale.x(min(steps, scale.last)) - LEFT
        height = HEIGHT - TOP - BOTTOM
        yield f'<rect class="warm" x="{LEFT}" y="{TOP}" width="{width:.1f}" height="{height}"/>'


def _grid(scale: _Scale, unit: str) -> Iterator[str]:
    for value in ticks(scale.top):
        y = scale.y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for step in ticks(scale.last, whole=True):
        anchor = "end" if step == scale.last else "middle"
        yield f'<text x="{scale.x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{step:g}</text>'
    yield f'<text x="{(WIDTH + LEFT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>'
    yield f'<text x="4" y="14">{escape(unit)}</text>'


def ticks(top: float, *, whole: bool = False) -> list[float]:
    """Round values from 0 to `top`, four to six of them."""
    raw = top / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    step = max(1.0, math.ceil(step)) if whole else step
    return [round(index * step, 12) for index in range(int(top / step + 1e-9) + 1)]


def _checkpoints(scale: _Scale, steps: Sequence[int]) -> Iterator[str]:
    every = math.ceil(len(steps) / LABELS_MAX) or 1
    for index, step in enumerate(steps):
        x = scale.x(step)
        yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        if (len(steps) - 1 - index) % every == 0:
            anchor = "end" if step >= scale.last else "middle"
            yield f'<text class="small" x="{x:.1f}" y="{TOP - 6}" text-anchor="{anchor}">{step}</text>'


def _curve(scale: _Scale, curve: Curve) -> Iterator[str]:
    for run in _runs(thinned(curve.points)):
        path = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in run)
        if len(run) > 1:
            yield f'<polyline class="{curve.style}" points="{path}"/>'
        if curve.dots or len(run) == 1:
            yield from (
                f'<circle class="{curve.style}" cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="3.5"/>'
                for step, value in run
            )
    before = 0.0
    for step, value in curve.points:
        if not math.isfinite(value) and math.isfinite(before):  # one mark for a stretch of any length
            yield f'<text class="bad" x="{scale.x(step):.1f}" y="{TOP + 12}" text-anchor="middle">&#215;</text>'
        before = value


def _runs(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Stretches without a gap."""
    run: list[tuple[float, float]] = []
    for step, value in points:
        if math.isfinite(value):
            run.append((step, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about POINTS_MAX, the lowest and the highest of each group, so that no spike is lost."""
    if len(points) <= POINTS_MAX:
        return list(points)
    size = math.ceil(len(points) * 2 / POINTS_MAX)
    found: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        gaps = [point for point in group if not math.isfinite(point[1])][:1]
        whole = [point for point in group if math.isfinite(point[1])]
        ends = {min(whole, key=lambda p: p[1]), max(whole, key=lambda p: p[1])} if whole else set()
        found += sorted([*ends, *gaps], key=lambda point: point[0])
    return found


def _legend(curves: Sequence[Curve], marks: Marks) -> str:
    items = [f'<li><i class="key {curve.style}"></i>{escape(curve.name)}</li>' for curve in curves]
    if marks.warmup:
        items.append(f'<li><i class="key warm"></i>warm-up, {marks.warmup} steps</li>')
    if marks.checkpoints:
        items.append('<li><i class="key mark"></i>checkpoint</li>')
    if any(not math.isfinite(value) for curve in curves for _, value in curve.points):
        items.append('<li><b class="bad">&#215;</b>not finite</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'
