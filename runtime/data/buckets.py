"""The size at which a picture is trained, and the part of it that is: pure functions of sizes.

The bucket rules are those of musubi-tuner, whose dataset files are read unchanged, with one guard more: no side
is ever below one step, however narrow the picture or small the area. `step` is the family's size multiple.
All sizes are (height, width) in pixels of the upright picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, sqrt
from typing import TYPE_CHECKING

from runtime.data.sample import Settings, Size
from runtime.errors import DataError

if TYPE_CHECKING:
    from runtime.config.model import ControlsResize, Processor

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, as Pillow takes it."""

REACH = 2  # widths tried on each side of the ideal one, in steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What decides the sizes of one source's samples."""

    target: Size
    """With buckets an area; without, the size itself."""
    step: int
    enable_bucket: bool
    no_upscale: bool
    controls: Size | None
    """None: cover takes the target's final size, area the area of `target`, keep has no limit."""
    controls_resize: "ControlsResize"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """`box` of the picture is scaled to `size`."""

    size: Size
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    size: Size
    """Of what is trained or painted, also where there is no target yet."""
    target: Placed | None
    controls: tuple[Placed, ...]
    mask: Placed | None


@lru_cache
def buckets(area: Size, step: int) -> tuple[Size, ...]:
    """The sizes of about the area of `area`, from about 1:4 to 4:1, narrowest first; never none."""
    pixels = area[0] * area[1]
    side = isqrt(pixels)
    found: set[Size] = set()
    for width in range(_floor(side // 2, step), side + step, step):
        height = pixels // width // step * step
        if height:
            found |= {(height, width), (width, height)}
    return tuple(sorted(found or {(step, step)}, key=lambda size: (size[1], size[0])))


def nearest(picture: Size, area: Size, step: int, *, no_upscale: bool = False) -> Size:
    """The bucket whose width / height is nearest to the picture's, the narrower of two as near.

    With `no_upscale` a picture of at most that area keeps its size, rounded down to the step.
    """
    if no_upscale and _within(picture, area):
        return _cut(picture, step)
    ratio = picture[1] / picture[0]
    return min(buckets(area, step), key=lambda size: abs(size[1] / size[0] - ratio))


def area_size(picture: Size, wanted: Size, step: int) -> Size:
    """A size of about the area of `wanted` and about the picture's aspect, however extreme."""
    pixels, ratio = wanted[0] * wanted[1], picture[1] / picture[0]
    ideal = int(sqrt(pixels * ratio)) // step * step
    near = []
    for width in range(ideal - REACH * step, ideal + (REACH + 1) * step, step):
        height = pixels // width // step * step if width > 0 else 0
        if height:
            near.append((height, width))
    if not near:  # wider than even one step of height allows
        return step, _floor(pixels // step, step)
    return min(near, key=lambda size: abs(size[1] / size[0] - ratio))


def _floor(side: int, step: int) -> int:
    return max(side // step * step, step)


def _within(picture: Size, area: Size) -> bool:
    return picture[0] * picture[1] <= area[0] * area[1]


def _cut(picture: Size, step: int) -> Size:
    return _floor(picture[0], step), _floor(picture[1], step)


def cover(picture: Size, size: Size) -> Placed:
    """The largest centred part of the picture with the aspect of `size`."""
    height, width = picture
    # Compared as integers: a scale in floats can put the box a hair outside, which Pillow refuses.
    if width * size[0] <= height * size[1]:
        part = width * size[0] / size[1]
        box = (0.0, (height - part) / 2, float(width), (height + part) / 2)
    else:
        part = height * size[1] / size[0]
        box = ((width - part) / 2, 0.0, (width + part) / 2, float(height))
    return Placed(size=size, box=box)


def keep(picture: Size, step: int) -> Placed:
    """The centred part of whole steps, not resized; a picture below one step is enlarged to it."""
    size = _cut(picture, step)
    if size[0] > picture[0] or size[1] > picture[1]:
        return cover(picture, size)
    top, left = (picture[0] - size[0]) // 2, (picture[1] - size[1]) // 2
    return Placed(size=size, box=(left, top, left + size[1], top + size[0]))


def cut_share(picture: Size, placed: Placed) -> float:
    """Share of the picture's area outside the box, 0 to 1."""
    left, top, right, bottom = placed.box
    return 1 - (right - left) * (bottom - top) / (picture[0] * picture[1])


def place(sizing: Sizing, target: Size | None, controls: Sequence[Size], mask: Size | None) -> Places:
    """Final size and crop box of each picture, whose sizes are given.

    A prompt to paint has no target: it gets the size of a target that is as large as its first control, and
    the controls are placed as beside that one, so that an adapter meets what it was trained on.
    """
    picture = target or (controls[0] if controls else sizing.target)
    placed = _place_target(sizing, picture)
    return Places(
        size=placed.size,
        target=placed if target is not None else None,
        controls=tuple(_place_control(sizing, control, picture, placed) for control in controls),
        mask=_over(placed, picture, mask) if mask is not None and target is not None else None,
    )


def _place_target(sizing: Sizing, picture: Size) -> Placed:
    if not sizing.enable_bucket:
        return cover(picture, sizing.target)
    if sizing.no_upscale and _within(picture, sizing.target):
        return keep(picture, sizing.step)
    return cover(picture, nearest(picture, sizing.target, sizing.step))


def _place_control(sizing: Sizing, control: Size, picture: Size, target: Placed) -> Placed:
    """`picture` is the target's own size. A control that lies over the target shows the same part of the scene."""
    step, limit, over = sizing.step, sizing.controls, control == picture
    if sizing.controls_resize == "area":
        if over:
            return Placed(size=area_size(target.size, limit or sizing.target, step), box=target.box)
        return cover(control, area_size(control, limit or sizing.target, step))
    if sizing.controls_resize == "cover":
        placed = cover(control, limit or target.size)
    elif limit is not None and not _within(control, limit):
        placed = cover(control, area_size(control, limit, step))
    else:
        placed = keep(control, step)
    return target if over and placed.size == target.size else placed


def _over(target: Placed, picture: Size, mask: Size) -> Placed:
    """The target's box on a mask of another size: masks are drawn over the target, whatever their scale."""
    down, across = mask[0] / picture[0], mask[1] / picture[1]
    left, top, right, bottom = target.box
    box = (left * across, top * down, min(right * across, mask[1]), min(bottom * down, mask[0]))
    return Placed(size=target.size, box=box)


def sizing(processor: "Processor", settings: Settings, step: int) -> Sizing:
    """What the dataset file says wins over config.yaml. Raises DataError for a size that is no multiple of `step`."""
    resize, controls = _controls(processor, settings)
    made = Sizing(
        target=settings.resolution or processor.target_size,
        step=step,
        enable_bucket=_stated(settings.enable_bucket, processor.enable_bucket),
        no_upscale=_stated(settings.bucket_no_upscale, processor.bucket_no_upscale),
        controls=controls,
        controls_resize=resize,
    )
    if not made.enable_bucket:
        where = "resolution of the dataset file" if settings.resolution else "data.processor.target_size"
        _refuse_broken(where, made.target, step)
    if made.controls_resize == "cover" and controls is not None:
        _refuse_broken("data.processor.controls_size", controls, step)
    return made


def _stated(dataset: bool | None, config: bool) -> bool:
    return config if dataset is None else dataset


def _controls(processor: "Processor", settings: Settings) -> "tuple[ControlsResize, Size | None]":
    if settings.no_resize_control:
        return "keep", settings.control_resolution
    if settings.control_resolution is not None:
        return "area", settings.control_resolution
    if settings.no_resize_control is False and processor.controls_resize == "keep":
        return "cover", None  # the file asks for resized controls and names no size: that of the target
    return processor.controls_resize, processor.controls_size


def _refuse_broken(where: str, size: Size, step: int) -> None:
    if size[0] % step or size[1] % step:
        near = [max(round(side / step), 1) * step for side in size]
        raise DataError(
            f"{where} is {size[0]} x {size[1]} (height x width); both must be multiples of {step}",
            remedy=f"write height {near[0]}, width {near[1]}, or switch on enable_bucket",
        )
