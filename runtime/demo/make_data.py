"""Make the demo dataset: 24 pairs that teach "give the shape a thick white outline".

    python -m runtime.demo.make_data --out runtime/demo/data

The tiny base can't do that: it has seen outlines on both sides of a recolouring, but never one that appears.
Asked for white, it paints the whole shape white. Layout: `training_images/<stem>.png` (target) with its
caption `<stem>.txt`, `control_images/<stem>.png`, and `holdout.txt` with the stems that are set aside, one a
line.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from runtime.demo.shapes import KINDS, SIZE, Scene, Shape, draw, other

PAIRS = 24
HELD_OUT = 4  # the last four: one of each kind
SEED = 7
OUTLINE = "white"
OUTLINE_WIDTH = 4.0

CAPTIONS = (
    "add a thick white outline to the {colour} {kind}",
    "give the {kind} a thick white outline",
    "draw a white border around the {colour} {kind}, please",
    "put a white frame around the {kind}",
    "outline the {colour} {kind} in white",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    stem: str
    control: Image.Image
    target: Image.Image
    caption: str


def pairs(seed: int = SEED) -> list[Pair]:
    """All pairs in the order of their stems; no two show the same kind in the same colours."""
    rng = np.random.default_rng(seed)
    made: list[Pair] = []
    seen: set[tuple[str, str, str]] = set()
    while len(made) < PAIRS:
        kind = KINDS[len(made) % len(KINDS)]
        background = other(rng, (OUTLINE,))
        colour = other(rng, (OUTLINE, background))
        if (kind, colour, background) in seen:
            continue
        seen.add((kind, colour, background))
        radius = float(rng.uniform(17, 24))
        x, y = (float(v) for v in rng.uniform(radius + 2, SIZE - radius - 2, 2))
        shape = Shape(kind=kind, colour=colour, x=x, y=y, radius=radius)
        outlined = replace(shape, outline=OUTLINE, outline_width=OUTLINE_WIDTH)
        made.append(
            Pair(
                stem=f"{kind}-{len(made) + 1:02d}",
                control=draw(Scene(background=background, shapes=(shape,))),
                target=draw(Scene(background=background, shapes=(outlined,))),
                caption=CAPTIONS[len(made) % len(CAPTIONS)].format(kind=kind, colour=colour),
            )
        )
    return made


def write(folder: Path, made: list[Pair]) -> None:
    targets, controls = folder / "training_images", folder / "control_images"
    for path in (targets, controls):
        path.mkdir(parents=True, exist_ok=True)
    for pair in made:
        pair.target.save(targets / f"{pair.stem}.png")
        pair.control.save(controls / f"{pair.stem}.png")
        (targets / f"{pair.stem}.txt").write_text(pair.caption + "\n", encoding="utf-8", newline="\n")
    stems = [pair.stem for pair in made[-HELD_OUT:]]
    (folder / "holdout.txt").write_text("\n".join(stems) + "\n", encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    made = pairs()
    write(args.out, made)
    print(f"{len(made)} pairs, {HELD_OUT} of them held out, in {args.out}")


if __name__ == "__main__":
    main()
