"""`finetune cache` at true encoder shapes: pictures a second, peaks, and where the time goes.

    python benchmarks/cache_phase.py [BASE] [--work DIR] [--sizes 384x672 1024x1024] [--batches 1 2 4 8]
                                     [--text-encoders bf16 nf4] [--vae exact folded] [--pairs 16] [--tiny]

BASE is a folder of `benchmarks/random_base.py --encoders published`; without it one is written into DIR, its denoiser
of one block, for the cache phase loads none. For nf4 `finetune quantize` makes the text encoder first. Each case is
the product's cache phase over a fresh cache in DIR: pairs of a target and a control, one prompt each, as PNG files of
the largest size. JSON lines: wall_s is the whole phase with the loading of both encoders; encode_pictures_per_s and
encode_prompts_per_s are of the encoders alone, pictures_per_s of both passes without the loading and the evidence;
peak_gib is by encoder, as the allocator gave it out; reserved_gib and rss_gib are the most of the case, together_gib
that of their sum, which a machine with shared memory must have; left_gib is allocated after it.
--tiny: the embedded base at 64 pixels on whatever device there is, to see that the script works.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import measuring
import random_base
import true_size
from measuring import Line, Report
from true_size import Shape

from runtime import device as devices
from runtime.cache import build
from runtime.cache.build import Summary
from runtime.commands.dataset import scan
from runtime.commands.init import write_target
from runtime.commands.quantize import command
from runtime.config.resolve import resolve
from runtime.demo.series import BASE
from runtime.device import Device
from runtime.progress import Progress
from runtime.workspace import Workspace

TINY = {"sizes": ["64x96"], "batches": [1, 2], "pairs": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size: tuple[int, int]
    batch: int
    text_encoder: str
    """bf16 or nf4."""
    vae: str
    """As `cache.vae`."""

    def changes(self, folder: str) -> dict[str, Any]:
        return {
            "cache.batch_size": self.batch,
            "cache.vae": self.vae,
            "cache.cache_dir": folder,
            "cache.dtypes.text_encoder": "bf16",
            "cache.dtypes.vae": "bf16",
            "model.quantize_text_encoder": "nf4" if self.text_encoder == "nf4" else "none",
            "data.processor.target_size": list(self.size),
        }


def main() -> int:
    wish = _wish()
    report = Report()
    where = devices.pick(wish.device)
    report.tell(kind="machine", **measuring.describe(where))
    with _place(wish.work) as place:
        base = BASE if wish.tiny else wish.base or _base(place / "base", where, report)
        workspace = _workspace(place / "work", base, wish.sizes, wish.pairs, where)
        for text_encoder in wish.text_encoders:
            if text_encoder == "nf4":
                _quantize(workspace, where, report)
            for case in _cases(wish, text_encoder):
                told = {"size": case.size, "batch": case.batch, "text_encoder": text_encoder, "vae": case.vae}
                with report.trying(kind="cache", **told):
                    report.tell(kind="cache", **told, **measured(workspace, case, where))
    return int(report.failed)


def _wish() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, help="a folder to leave all in  [default: a temporary one]")
    parser.add_argument("--sizes", nargs="+", default=["384x672", "1024x1024"], help="HEIGHTxWIDTH")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--text-encoders", nargs="+", choices=("bf16", "nf4"), default=["bf16", "nf4"])
    parser.add_argument("--vae", nargs="+", choices=("exact", "folded", "tiled"), default=["exact"])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    wish = parser.parse_args()
    if wish.tiny:
        vars(wish).update(TINY)
    wish.sizes = [_size(text) for text in wish.sizes]
    return wish


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    return int(height), int(width)


@contextmanager
def _place(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _base(out: Path, where: Device, report: Report) -> Path:
    """Written once for a work folder."""
    if not out.is_dir():
        started = time.perf_counter()
        random_base.write(out, 1, where.type, random_base.PUBLISHED["num_hidden_layers"])
        devices.free_cached(where)
        report.tell(kind="base", seconds=time.perf_counter() - started)
    return out


def _workspace(root: Path, base: Path, sizes: list[tuple[int, int]], pairs: int, where: Device) -> Workspace:
    """Its pictures have the largest of `sizes`; for the others they are cut and resized, as photos are."""
    workspace = Workspace(root)
    if not root.is_dir():
        largest = max(sizes, key=lambda size: size[0] * size[1])
        true_size.make_pictures(root / "pairs", Shape(size=largest, tokens=(0,) * pairs))
    target = write_target(
        workspace, model=str(base.resolve()), dataset=str(root / "pairs"), device=where.type
    )
    scan(workspace, holdout=0)
    true_size.configure(workspace, {"model.pretrained_model_name_or_path": target["model"]})
    return workspace


def _quantize(workspace: Workspace, where: Device, report: Report) -> None:
    """Step 06 for the text encoder."""
    words = ["--component", "text_encoder", "--workspace", str(workspace.root)]
    with report.trying(kind="quantize"):
        started = time.perf_counter()
        command.main(words, standalone_mode=False)
        report.tell(kind="quantize", seconds=time.perf_counter() - started)
    devices.free_cached(where)


def _cases(wish: argparse.Namespace, text_encoder: str) -> Iterator[Case]:
    for size, vae, batch in product(wish.sizes, wish.vae, wish.batches):
        yield Case(size=size, batch=batch, text_encoder=text_encoder, vae=vae)


def measured(workspace: Workspace, case: Case, where: Device) -> Line:
    """One cache phase, from an empty cache."""
    folder = workspace.root / "cache-of-a-case"
    shutil.rmtree(folder, ignore_errors=True)
    config = true_size.configure(workspace, case.changes(folder.name)).config
    job = build.plan(workspace, resolve(workspace, config).config)
    devices.free_cached(where)
    devices.reset_peak(where)
    with measuring.watching(where) as watched:
        started = time.perf_counter()
        summary = build.build(job, Progress(quiet=True))
        wall = time.perf_counter() - started
    memory = watched.memory
    devices.free_cached(where)
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "samples": summary.built,
        "wall_s": wall,
        **rates(summary),
        "seconds": {name: float(f"{seconds:.4g}") for name, seconds in summary.seconds.items()},
        "peak_gib": {name: float(f"{gib:.4g}") for name, gib in summary.peak_gib.items()},
        "reserved_gib": memory.reserved_gib,
        "rss_gib": memory.rss_gib,
        "together_gib": watched.together_gib,
        "left_gib": devices.memory(where).alloc_gib,
    }


def rates(summary: Summary) -> Line:
    """Each a second."""
    took = summary.seconds
    passes = sum(seconds for stage, seconds in took.items() if not stage.startswith(("load", "evidence")))
    return {
        "pictures_per_s": summary.pictures / passes,
        "encode_pictures_per_s": summary.pictures / took["encode pictures"],
        "encode_prompts_per_s": summary.prompts / took["encode prompts"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
