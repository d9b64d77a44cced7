"""How good the tiny base is, on pictures and prompts that it was not trained on.

python -m runtime.demo.bars runtime/demo/base
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from runtime.demo import shapes
from runtime.demo.components import decode, encode, latents, load, pixels, sample

HELD_OUT_SEED = 90_000  # training draws its chunks from seeds below 10,000

VAE_PSNR_DB = 27.0
EDITS_OF_100 = 90
# Mean absolute error over pixels and channels, of 255, against the wanted picture. Any two colours are at
# least 50 apart, so below half of that the edited region can't pass for another colour; the rest of the
# picture must be kept twice as well.
EDITED_ERROR = 25.0
KEPT_ERROR = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One edit: its mean absolute error (of 255) where a change was asked, and everywhere else."""

    prompt: str
    single: bool
    edited_error: float
    kept_error: float

    @property
    def passed(self) -> bool:
        return self.edited_error < EDITED_ERROR and self.kept_error < KEPT_ERROR


def psnr(wanted: NDArray[np.uint8], seen: NDArray[np.uint8]) -> float:
    """Of the mean squared error over all pictures, dB."""
    squared = np.mean((wanted.astype(np.float64) - seen) ** 2)
    return float(10 * np.log10(255.0**2 / squared))


def vae_psnr(vae: Any, images: NDArray[np.uint8]) -> float:
    parts = [images[i : i + 50] for i in range(0, len(images), 50)]
    size = images.shape[1]
    return psnr(images, np.concatenate([decode(vae, latents(vae, part), size, size) for part in parts]))


def judge(edit: shapes.Edit, seen: NDArray[np.uint8]) -> Judged:
    """Compare a picture [H, W, 3] with the wanted one; a pixel on each side of an edge is left out."""
    error = np.abs(pixels([shapes.draw(edit.target)])[0].astype(np.float64) - seen).mean(axis=-1)
    return Judged(
        prompt=edit.prompt,
        single=len(edit.control.shapes) == 1,
        edited_error=float(error[shapes.edited(edit, margin=1.0)].mean()),
        kept_error=float(error[~shapes.edited(edit, margin=-1.0)].mean()),
    )


def held_out(count: int, seed: int = HELD_OUT_SEED) -> list[shapes.Edit]:
    rng = np.random.default_rng(seed)
    return [shapes.edit(rng) for _ in range(count)]


def render(pipe: Any, edits: list[shapes.Edit], *, steps: int, seed: int = 0) -> NDArray[np.uint8]:
    """The base's pictures for `edits`: `steps` Euler steps, no guidance."""
    controls = [shapes.draw(edit.control) for edit in edits]
    text, mask = encode(pipe, [edit.prompt for edit in edits], controls)
    z = sample(pipe, latents(pipe.vae, pixels(controls)), text, mask, steps=steps, seed=seed)
    return decode(pipe.vae, z, shapes.SIZE, shapes.SIZE)


def contact_sheet(edits: list[shapes.Edit], seen: NDArray[np.uint8], columns: int = 5) -> Image.Image:
    """Triples of control, wanted, seen."""
    triples = [
        np.concatenate([*pixels([shapes.draw(e.control), shapes.draw(e.target)]), got], axis=1)
        for e, got in zip(edits, seen, strict=True)
    ]
    rows = [np.concatenate(triples[i : i + columns], axis=1) for i in range(0, len(triples), columns)]
    return Image.fromarray(np.concatenate([row for row in rows if row.shape == rows[0].shape], axis=0))


def report(pipe: Any, *, count: int = 100, sheet: Path | None = None) -> tuple[list[str], bool]:
    """Lines that state every bar and what was measured, and whether all were met."""
    rng = np.random.default_rng(HELD_OUT_SEED + 1)
    scenes = vae_psnr(pipe.vae, pixels([shapes.draw(shapes.scene(rng)) for _ in range(200)]))
    sketches = vae_psnr(pipe.vae, pixels([shapes.sketch(rng) for _ in range(200)]))
    lines = [
        f"vae: {scenes:.2f} dB on 200 held-out scenes (bar {VAE_PSNR_DB}), {sketches:.2f} dB on 200 sketches "
        "with gradients, lines, shadows and noise"
    ]
    met = scenes >= VAE_PSNR_DB
    edits = held_out(count)
    for steps in (8, 20):
        seen = render(pipe, edits, steps=steps)
        judged = [judge(edit, picture) for edit, picture in zip(edits, seen, strict=True)]
        passed, single = sum(j.passed for j in judged), [j for j in judged if j.single]
        met = met and passed * 100 >= EDITS_OF_100 * count
        lines.append(
            f"edits, {steps} steps: {passed} of {count} pass (bar {EDITS_OF_100} of 100; edited error < "
            f"{EDITED_ERROR}, kept error < {KEPT_ERROR}); {sum(j.passed for j in single)} of {len(single)} "
            f"with one shape; median edited error {np.median([j.edited_error for j in judged]):.1f}, "
            f"kept error {np.median([j.kept_error for j in judged]):.1f}"
        )
        if sheet and steps == 8:
            contact_sheet(edits, seen).save(sheet)
    return lines, met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("--count", type=int, default=100, help="held-out edits")
    parser.add_argument("--sheet", type=Path, help="write the pictures here: control, wanted, seen")
    args = parser.parse_args()
    lines, met = report(load(args.base), count=args.count, sheet=args.sheet)
    print(*lines, sep="\n")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
