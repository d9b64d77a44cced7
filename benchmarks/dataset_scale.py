"""Time and memory of `finetune dataset` and of a `finetune cache` with nothing to do, by the number of samples.

    python benchmarks/dataset_scale.py [--samples 1000 10000] [--keep DIR]

Makes pairs of 64 x 64 in a temporary workspace over the embedded base. The cache is filled without the encoders:
every entry is written by the cache's own code, with tensors of the right shapes that were made once, for what is
measured is what a rerun costs. Each command runs in a process of its own; the peak is that of its resident set.
Needs a POSIX system.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from runtime import files
from runtime.commands.init import write_target
from runtime.demo.series import BASE
from runtime.workspace import Workspace

SIDE = 64
TOKENS, WIDTH = 20, 64  # of an embedding of the embedded base
COMMAND = "import sys; from runtime.cli import main; sys.exit(main(sys.argv[1:]))"
CONFIG = {
    "model": {"pretrained_model_name_or_path": "external:model"},
    "data": {"processor": {"target_size": [SIDE, SIDE]}},
    "cache": {"use_cache": True},
    "train": {"max_train_steps": 2},
    "hardware": {"device": "cpu"},
}
LONG_AGO_NS = 1_600_000_000 * 10**9  # of a file's time
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    samples: int
    phase: str
    seconds: float
    peak_mib: float

    def __str__(self) -> str:
        each = self.seconds / self.samples * 1000
        return f"{self.samples:8,}  {self.phase:<34}{self.seconds:9.2f}{each:12.3f}{self.peak_mib:9.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[1000])
    parser.add_argument("--keep", type=Path, help="leave the workspaces in this folder")
    parser.add_argument("--fill", type=Path, help="only fill the cache of this workspace")
    wish = parser.parse_args()
    if wish.fill is not None:
        return fill(Workspace(wish.fill))
    print(f"{'samples':>8}  {'phase':<34}{'seconds':>9}{'s per 1,000':>12}{'peak MiB':>9}")
    for count in wish.samples:
        folder = Path(tempfile.mkdtemp()) if wish.keep is None else wish.keep / str(count)
        try:
            for row in measure(folder, count):
                print(row, flush=True)
        finally:
            if wish.keep is None:
                shutil.rmtree(folder)


def measure(folder: Path, count: int) -> Iterator[Row]:
    make_pairs(folder / "pairs", count)
    workspace = Workspace(folder / "work")
    write_target(workspace, model=str(BASE), dataset=str(folder / "pairs"), device="cpu")
    files.write_json(workspace.config_path, CONFIG)  # JSON is YAML
    age(folder / "pairs")
    where = ("--workspace", str(workspace.root))
    yield run(count, "dataset, first", "-c", COMMAND, "dataset", *where)
    yield run(count, "dataset, nothing changed", "-c", COMMAND, "dataset", *where)
    yield run(count, "filling, without encoders", __file__, "--fill", str(workspace.root))
    age(workspace.root / "cache")
    yield run(count, "cache, full: digests taken", "-c", COMMAND, "cache", *where)
    yield run(count, "cache, nothing changed", "-c", COMMAND, "cache", *where)


def make_pairs(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for name in ("training_images", "control_images"):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            # Smooth, as pictures are: noise would make the files ten times as large.
            small = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            picture = Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            picture.save(folder / name / f"p{index:05d}.png")
    for index in range(count):
        caption = folder / "training_images" / f"p{index:05d}.txt"
        caption.write_text(f"paint number {index} red", encoding="utf-8")


def age(folder: Path) -> None:
    """Files of this very moment are not remembered, and a user's are older."""
    for path in folder.rglob("*"):
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))


def fill(workspace: Workspace) -> None:
    """What `finetune cache` would leave behind, evidence of its roundtrip included, with made-up tensors."""
    import torch

    from runtime.cache import build, roundtrip
    from runtime.cache.encode import Encoded
    from runtime.config.load import load_config
    from runtime.config.resolve import resolve

    job = build.plan(workspace, resolve(workspace, load_config(workspace.config_path).config).config)
    rng = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(16, SIDE // 8, SIDE // 8, generator=rng) for name in ("target", "control_0")}
    encoded = Encoded(tensors={**tensors, "prompt_embeds": torch.randn(TOKENS, WIDTH, generator=rng)})
    for want in job.wants:
        job.store.write(want, encoded)
    entries = {want.folder: job.store.entry(want.folder) for want in job.wants}
    job.store.write_manifest(job.wants, job.common, job.dataset_digest, entries)
    recording = workspace.begin_evidence(roundtrip.NAME, "benchmarks/dataset_scale.py")
    inputs = {f"cache/{job.store.manifest_path.name}": files.file_digest(job.store.manifest_path)}
    recording.write(inputs={"files": inputs}, data={})


def run(count: int, phase: str, *line: str) -> Row:
    """One Python process. Raises RuntimeError where it fails."""
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    started = time.monotonic()
    child = os.posix_spawn(sys.executable, [sys.executable, *line], os.environ, file_actions=quiet)
    # Of this one child, as getrusage is only of all together. Linux counts the parent's own resident set at
    # the start, so this process imports nothing large.
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - started
    if status:
        raise RuntimeError(f"{phase}: {' '.join(line)} ended with {os.waitstatus_to_exitcode(status)}")
    return Row(samples=count, phase=phase, seconds=seconds, peak_mib=usage.ru_maxrss * PEAK_UNIT / files.MIB)


if __name__ == "__main__":
    main()
