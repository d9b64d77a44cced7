"""The size at which a sample is trained, counted from the config and its dataset's settings alone.

The rules are musubi-tuner's, for its dataset files are read unchanged (`BucketSelector` in
src/musubi_tuner/dataset/bucket.py at 30c658c), made whole where a ribbon or a tiny area would give it a
side of no pixels. Sizes go in and out as (height, width); `schemas/vectors/sizes.json` has rows of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import isqrt, sqrt
from typing import Any

Size = tuple[int, int]
"""Height, width in pixels."""

SIZE_MULTIPLES = {"qwen-image-edit": 16, "qwen-image-edit-plus": 16}
"""Of each family, in pixels: the VAE shrinks by 8 and the denoiser joins 2x2 latents."""
UNSTATED: Mapping[str, Any] = dict.fromkeys(
    ("resolution", "enable_bucket", "bucket_no_upscale", "control_resolution", "no_resize_control")
)
"""The settings of a source whose dataset file says nothing of sizes."""
REACH = 2  # widths tried on each side of the ideal one, in steps


def final_sizes(
    processor: Mapping[str, Any],
    settings: Mapping[str, Any],
    step: int,
    target: Size | None,
    controls: Sequence[Size],
) -> dict[str, Any]:
    """`{"target": [h, w], "controls": [[h, w], ...]}` of pictures of these sizes.

    `processor` is data.processor of the config with its defaults, `settings` those of the sample's source
    in evidence 02-dataset, `step` the family's size multiple. A prompt has no target, None: it is painted as
    a target would be that is as large as its first control.
    """
    wanted: Size = tuple(settings["resolution"] or processor["target_size"])
    picture = target or (controls[0] if controls else wanted)
    painted = _target(processor, settings, step, picture)
    how, limit = _controls_rule(processor, settings)
    shown: list[Size] = []
    for control in controls:
        if how == "cover":
            shown.append(limit or painted)
        elif how == "keep":
            shown.append(_kept(control, limit, step))
        else:
            # Of a control that lies over the target, pixel for pixel, the same part is taken.
            shown.append(area_bucket(limit or wanted, painted if control == picture else control, step))
    return {"target": list(painted), "controls": [list(size) for size in shown]}


def _target(processor: Mapping[str, Any], settings: Mapping[str, Any], step: int, picture: Size) -> Size:
    height, width = settings["resolution"] or processor["target_size"]
    if not _stated(settings, processor, "enable_bucket"):
        return height, width
    area = height * width
    if _stated(settings, processor, "bucket_no_upscale") and picture[0] * picture[1] <= area:
        return _cut(picture, step)
    return _nearest(buckets(area, step), picture)


def _stated(settings: Mapping[str, Any], processor: Mapping[str, Any], name: str) -> bool:
    own = settings[name]
    return bool(processor[name] if own is None else own)


def _controls_rule(processor: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[str, Size | None]:
    """cover, area or keep, and the size that goes with it: the dataset file's word before the config's."""
    limit = settings["control_resolution"]
    if settings["no_resize_control"]:
        return "keep", tuple(limit) if limit else None
    if limit:
        return "area", tuple(limit)
    if settings["no_resize_control"] is False and processor["controls_resize"] == "keep":
        return "cover", None  # the file says that they are resized, and names no size
    size = processor["controls_size"]
    return processor["controls_resize"], tuple(size) if size else None


def _kept(picture: Size, limit: Size | None, step: int) -> Size:
    if limit and picture[0] * picture[1] > limit[0] * limit[1]:
        return area_bucket(limit, picture, step)
    return _cut(picture, step)


def _cut(picture: Size, step: int) -> Size:
    height, width = (max(side - side % step, step) for side in picture)
    return height, width


@lru_cache
def buckets(area: int, step: int) -> tuple[Size, ...]:
    """The sizes of about `area` pixels from 1:4 to 4:1, in order of width, then height."""
    side = isqrt(area)
    start = side // 2 // step * step or step
    found = {
        size
        for width in range(start, side + step, step)
        if (height := area // width // step * step)
        for size in ((height, width), (width, height))
    }
    return tuple(sorted(found, key=lambda size: (size[1], size[0]))) or ((step, step),)


def _nearest(sizes: Sequence[Size], picture: Size) -> Size:
    wanted = picture[1] / picture[0]
    return min(sizes, key=lambda size: abs(size[1] / size[0] - wanted))


def area_bucket(wanted: Size, picture: Size, step: int) -> Size:
    """Of the sizes of about the area of `wanted`, of a width near the ideal one, that of the nearest aspect."""
    area = wanted[0] * wanted[1]
    near = tuple(_near(area, picture, step))
    return _nearest(near, picture) if near else (step, max(area // step // step * step, step))


def _near(area: int, picture: Size, step: int) -> Iterator[Size]:
    ideal = int(sqrt(area * (picture[1] / picture[0]))) // step * step
    for width in range(ideal - REACH * step, ideal + REACH * step + 1, step):
        height = area // width // step * step if width > 0 else 0
        if height:
            yield height, width
