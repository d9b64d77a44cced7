"""Pictures of coloured shapes, and the edits that are asked of them. numpy and PIL only.

Everything here is a pure function of its arguments or of the `rng` that it is given. Pictures are rasterised
from signed distances rather than by PIL's drawing calls, so that they don't change with PIL's version.
Coordinates and sizes are pixels of a `SIZE` x `SIZE` picture, y pointing down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIZE = 64

Floats = NDArray[np.float64]
Colour = tuple[int, int, int]
Task = Literal["shape", "background"]

# Every two of these are at least 50/255 apart (mean over channels).
COLOURS: dict[str, Colour] = {
    "red": (205, 30, 40),
    "green": (40, 165, 70),
    "blue": (45, 75, 215),
    "yellow": (250, 225, 75),
    "orange": (245, 130, 20),
    "purple": (140, 50, 175),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
KINDS = ("circle", "square", "triangle", "star")
SHAPE_PROMPTS = (
    "paint the {kind} {colour}",
    "make the {kind} {colour}",
    "turn the {kind} {colour}",
    "change the colour of the {kind} to {colour}",
)
BACKGROUND_PROMPTS = (
    "make the background {colour}",
    "paint the background {colour}",
    "set the background to {colour}",
    "change the background to {colour}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One shape: its centre (x, y), its half-width, and the names of its colours."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    outline: str | None = None
    """Colour of a band of `outline_width` px along the inside of the edge."""
    outline_width: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    background: str
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What is shown, what is asked, what is wanted. `kind` names the shape that the prompt names."""

    control: Scene
    target: Scene
    prompt: str
    task: Task
    kind: str


def grid(size: int = SIZE) -> tuple[Floats, Floats]:
    """x and y of the pixel centres, each [size, size]."""
    y, x = np.mgrid[0:size, 0:size] + 0.5
    return x, y


def circle(x: Floats, y: Floats, r: float) -> Floats:
    return np.sqrt(x * x + y * y) - r


def square(x: Floats, y: Floats, r: float) -> Floats:
    return np.maximum(np.abs(x), np.abs(y)) - 0.88 * r


def triangle(x: Floats, y: Floats, r: float) -> Floats:
    """Isosceles, standing on its base: apex (0, -r), base corners (+-r, 0.75 r)."""
    slope = np.array([1.75, -1.0]) / np.hypot(1.75, 1.0)
    signed: Floats = np.maximum(np.abs(x) * slope[0] + (y + r) * slope[1], y - 0.75 * r)
    return signed


def star(x: Floats, y: Floats, r: float, inner: float = 0.45) -> Floats:
    """Five points: fold the plane into one of ten wedges, then measure to its one edge (iquilezles.org)."""
    x, y = np.abs(x), -y
    cos, sin = 0.8090169943749475, 0.5877852522924731
    for kx, ky in ((cos, -sin), (-cos, -sin)):
        fold = 2.0 * np.maximum(kx * x + ky * y, 0.0)
        x, y = x - fold * kx, y - fold * ky
    x, y = np.abs(x), y - r
    ex, ey = inner * sin, inner * cos - 1.0
    along = np.clip((x * ex + y * ey) / (ex * ex + ey * ey), 0.0, r)
    dx, dy = x - ex * along, y - ey * along
    signed: Floats = np.sqrt(dx * dx + dy * dy) * np.sign(y * ex - x * ey)
    return signed


DISTANCES: dict[str, Callable[[Floats, Floats, float], Floats]] = {
    "circle": circle,
    "square": square,
    "triangle": triangle,
    "star": star,
}


def distance(shape: Shape, size: int = SIZE) -> Floats:
    """Signed distance of each pixel's centre from the edge of `shape`, px, negative inside: [size, size]."""
    x, y = grid(size)
    return DISTANCES[shape.kind](x - shape.x, y - shape.y, shape.radius)


def blend(canvas: Floats, colour: Colour | Floats, signed: Floats, opacity: float = 1.0) -> Floats:
    """`canvas` [H, W, 3] with `colour` laid over where `signed` <= 0, anti-aliased over one pixel."""
    cover = opacity * np.clip(0.5 - signed, 0.0, 1.0)[..., None]
    return canvas * (1.0 - cover) + np.asarray(colour, dtype=np.float64) * cover


def to_image(canvas: Floats) -> Image.Image:
    return Image.fromarray(np.clip(np.rint(canvas), 0, 255).astype(np.uint8))


def draw(scene: Scene, size: int = SIZE) -> Image.Image:
    """RGB picture of `scene`, size x size."""
    canvas = np.empty((size, size, 3))
    canvas[:] = COLOURS[scene.background]
    for shape in scene.shapes:
        signed = distance(shape, size)
        if shape.outline is None:
            canvas = blend(canvas, COLOURS[shape.colour], signed)
        else:
            canvas = blend(canvas, COLOURS[shape.outline], signed)
            canvas = blend(canvas, COLOURS[shape.colour], signed + shape.outline_width)
    return to_image(canvas)


def edited(edit: Edit, margin: float = 1.0) -> NDArray[np.bool_]:
    """Pixels that the prompt asks to change, `margin` px away from any edge: [SIZE, SIZE]."""
    inside = [distance(s) + (s.outline_width if s.outline else 0.0) for s in edit.target.shapes]
    if edit.task == "background":
        outside: NDArray[np.bool_] = np.min([distance(s) for s in edit.target.shapes], axis=0) > margin
        return outside
    named = [s.kind for s in edit.target.shapes].index(edit.kind)
    return inside[named] < -margin


def other(rng: np.random.Generator, taken: tuple[str, ...]) -> str:
    """A colour's name that is not in `taken`."""
    free = [name for name in COLOURS if name not in taken]
    return free[int(rng.integers(len(free)))]


def scene(rng: np.random.Generator, *, pair_rate: float = 0.25, outline_rate: float = 0.25) -> Scene:
    """One shape, or two kinds side by side; some large ones have an outline, which edits must keep."""
    background = other(rng, ())
    count = 2 if rng.random() < pair_rate else 1
    kinds = rng.permutation(KINDS)[:count]
    shapes: list[Shape] = []
    for i, kind in enumerate(kinds):
        radius = float(rng.uniform(10, 14) if count == 2 else rng.uniform(13, 24))
        low, high = (radius + 2, SIZE - radius - 2) if count == 1 else (16 + 32 * i - 1, 16 + 32 * i + 1)
        colour = other(rng, (background, *(s.colour for s in shapes)))
        x, y = float(rng.uniform(low, high)), float(rng.uniform(radius + 2, SIZE - radius - 2))
        shape = Shape(kind=str(kind), colour=colour, x=x, y=y, radius=radius)
        if radius > 15 and rng.random() < outline_rate:
            width = float(rng.uniform(2.5, 4.5))
            shape = replace(shape, outline=other(rng, (background, colour)), outline_width=width)
        shapes.append(shape)
    return Scene(background=background, shapes=tuple(shapes))


def edit(rng: np.random.Generator, *, pair_rate: float = 0.25) -> Edit:
    """A random scene and a random request to recolour its shape (2 of 3) or its background (1 of 3)."""
    control = scene(rng, pair_rate=pair_rate)
    named = int(rng.integers(len(control.shapes)))
    shape = control.shapes[named]
    used = (control.background, *(c for s in control.shapes for c in (s.colour, s.outline) if c))
    colour = other(rng, used)
    task: Task = "shape" if rng.random() < 2 / 3 else "background"
    prompts = SHAPE_PROMPTS if task == "shape" else BACKGROUND_PROMPTS
    prompt = prompts[int(rng.integers(len(prompts)))].format(kind=shape.kind, colour=colour)
    if task == "background":
        target = replace(control, background=colour)
    else:
        shapes = list(control.shapes)
        shapes[named] = replace(shape, colour=colour)
        target = replace(control, shapes=tuple(shapes))
    return Edit(control=control, target=target, prompt=prompt, task=task, kind=shape.kind)


def sketch(rng: np.random.Generator, size: int = SIZE) -> Image.Image:
    """A picture for the VAE alone: any colour, gradients, shapes, outlines, shadows, lines, texture."""
    x, y = grid(size)
    canvas = np.empty((size, size, 3))
    canvas[:] = rng.uniform(0, 255, 3)
    if rng.random() < 0.35:
        angle = rng.uniform(0, 2 * np.pi)
        ramp = (x * np.cos(angle) + y * np.sin(angle)) / size
        ramp = (ramp - ramp.min()) / (ramp.max() - ramp.min())
        canvas = canvas + ramp[..., None] * (rng.uniform(0, 255, 3) - canvas)
    for _ in range(int(rng.integers(1, 5))):
        colour, kind = rng.uniform(0, 255, 3), KINDS[int(rng.integers(4))]
        cx, cy = rng.uniform(0, size, 2)
        signed = DISTANCES[kind](x - cx, y - cy, float(rng.uniform(size / 12, size / 2.5)))
        if rng.random() < 0.25:
            dx, dy = rng.uniform(-6, 6, 2)
            shadow = DISTANCES[kind](x - cx - dx, y - cy - dy, float(rng.uniform(size / 8, size / 3)))
            canvas = blend(canvas, (20, 20, 20), shadow / rng.uniform(1, 4), rng.uniform(0.3, 0.8))
        canvas = blend(canvas, colour, signed)
        if rng.random() < 0.4:
            width = rng.uniform(1, 5)
            canvas = blend(canvas, rng.uniform(0, 255, 3), np.abs(signed + width / 2) - width / 2)
    for _ in range(int(rng.integers(0, 3))):
        angle, offset = rng.uniform(0, np.pi), rng.uniform(-size / 2, size / 2)
        signed = np.abs((x - size / 2) * np.cos(angle) + (y - size / 2) * np.sin(angle) - offset)
        canvas = blend(canvas, rng.uniform(0, 255, 3), signed - rng.uniform(0.7, 3))
    if rng.random() < 0.25:
        cells = int(2 ** rng.integers(2, 7)) * size // 64
        noise = rng.normal(0, rng.uniform(3, 25), (cells, cells, 1 if rng.random() < 0.5 else 3))
        canvas = canvas + np.repeat(np.repeat(noise, size // cells, 0), size // cells, 1)
    return to_image(canvas)
