import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from gates.reports.charts import HEIGHT, WIDTH, Curve, Marks, chart, thinned, ticks


def _svg(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[: text.index("</svg>") + len("</svg>")])


def _draw(points: list[tuple[float, float]], **options: object) -> str:
    marks = Marks(last=options.pop("last", 100), warmup=10, checkpoints=(50, 100))  # type: ignore[arg-type]
    return chart(
        "x", "A <title>", "falls & rises", "loss", [Curve(name="a<b", style="c1", points=points)], marks
    )


@pytest.mark.parametrize(
    ("top", "whole", "wanted"),
    [
        (1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0123, False, [0, 0.0025, 0.005, 0.0075, 0.01]),
        (2.4, False, [0, 0.5, 1.0, 1.5, 2.0]),
        (200, True, [0, 50, 100, 150, 200]),
        (5, True, [0, 1, 2, 3, 4, 5]),
        (1, True, [0, 1]),
        (7, True, [0, 2, 4, 6]),
    ],
)
def test_ticks_are_round_and_within(top: float, whole: bool, wanted: list[float]) -> None:
    assert ticks(top, whole=whole) == pytest.approx(wanted)


def test_a_chart_is_sound_xml_that_says_what_it_shows() -> None:
    text = _draw([(0, 1.0), (100, 0.5)])
    svg = _svg(text)
    assert [child.text for child in svg[:2]] == ["A <title>", "falls & rises"]
    assert svg.get("aria-labelledby") == "x-t x-d" and svg.get("role") == "img"
    assert "a&lt;b" in text and "warm-up, 10 steps" in text
    marks = [line for line in svg.iter("line") if line.get("class") == "mark"]
    assert len(marks) == 2
    (warm,) = (rect for rect in svg.iter("rect") if rect.get("class") == "warm")
    assert float(warm.get("width", "")) == pytest.approx((WIDTH - 68) * 0.1, abs=0.1)


def test_points_lie_where_they_belong() -> None:
    (line,) = _svg(_draw([(0, 1.0), (50, 0.0), (100, 1.0)])).iter("polyline")
    found = [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]
    (x0, y0), (x1, y1), (x2, y2) = found
    assert (x0, x1, x2) == (56.0, 382.0, 708.0) and y0 == y2 and y1 == HEIGHT - 40
    assert y0 == pytest.approx(HEIGHT - 40 - (HEIGHT - 62) / 1.08, abs=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_a_gap_with_one_mark(bad: float) -> None:
    points = [(step, bad if 40 <= step < 60 else 1.0) for step in range(101)]
    svg = _svg(text := _draw(points))
    assert len(list(svg.iter("polyline"))) == 2
    assert len([item for item in svg.iter("text") if item.get("class") == "bad"]) == 1
    assert "not finite" in text and not re.search("nan|inf", "".join(p.get("points", "") for p in svg.iter()))


@pytest.mark.parametrize("points", [[], [(0, math.nan)]])
def test_nothing_to_draw_is_said(points: list[tuple[float, float]]) -> None:
    assert _draw(points) == "<p>A &lt;title&gt;: nothing was recorded.</p>"


@pytest.mark.parametrize("points", [[(0, 0.0)], [(1, 0.0), (2, 0.0)], [(1, 5.0)], [(3, -1.0), (4, -2.0)]])
def test_odd_curves_are_drawn(points: list[tuple[float, float]]) -> None:
    assert list(_svg(_draw(points, last=0)))


def test_thinning_keeps_spikes_gaps_and_order() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[1234], points[5678] = (1234.0, 99.0), (5678.0, math.nan)
    found = thinned(points)
    assert len(found) <= 610 and (1234.0, 99.0) in found
    assert any(math.isnan(value) for _, value in found)
    steps = [step for step, _ in found]
    assert steps == sorted(steps)
