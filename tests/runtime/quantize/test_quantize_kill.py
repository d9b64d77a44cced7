"""`finetune quantize` killed in the middle of a shard: the next one waits for it, then goes on to the same bytes."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from runtime import files
from runtime.progress import Progress
from runtime.quantize import making, nf4, streaming
from runtime.quantize.making import Wish

SINGLE = "diffusion_pytorch_model.safetensors"
WEIGHTS = [f"diffusion_pytorch_model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
# The command itself, which stops as it reads the 15th of 28 linears, in the second shard, and waits to be killed.
COMMAND = """
import sys, time
from pathlib import Path
from runtime import shards
from runtime.cli import main
root, mark = sys.argv[1:]
read, count = shards.read_tensor, 0
def stopping(path, entry):
    global count
    count += 1
    if count == 15:
        Path(mark).touch()
        time.sleep(600)
    return read(path, entry)
shards.read_tensor = stopping
sys.exit(main(["quantize", "--component", "transformer", "--workspace", root]))
"""


@pytest.fixture
def base(nano: Path, tmp_path: Path) -> Path:
    """The embedded one with its denoiser in three shards."""
    root = tmp_path / "base"
    shutil.copytree(nano, root)
    folder, weight_map = root / "transformer", {}
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    for part, shard in enumerate(WEIGHTS):
        mine = sorted(tensors)[part::3]
        save_file({name: tensors[name] for name in mine}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, shard)
    files.write_json(folder / f"{SINGLE}.index.json", {"metadata": {}, "weight_map": weight_map})
    return root


def journalled(folder: Path) -> set[str]:
    return set((streaming.read_journal(folder) or {"shards": ()})["shards"])


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Killing(Progress):
    """Of the second one, which kills the first as it waits for it."""

    def __init__(self, first: "subprocess.Popen[bytes]", folder: Path) -> None:
        super().__init__()
        self.first, self.folder = first, folder
        self.left: list[Path] = []

    def say(self, line: str) -> None:
        if line == "another process makes models/nf4: waiting for it":
            self.left = list(self.folder.glob(".*.tmp"))
            self.first.kill()  # on Windows too this ends it at once


def test_killed_in_a_shard_the_next_one_goes_on_to_the_same_bytes(
    lab: Any, base: Path, tmp_path: Path
) -> None:
    files.write_json(lab.workspace.local_path, {"external": {"model": str(base)}})
    lab.configure()
    folder, mark = lab.root / "models/nf4/transformer", tmp_path / "mark"
    line = [sys.executable, "-c", COMMAND, str(lab.root), str(mark)]
    with subprocess.Popen(line) as child:
        try:
            rule = nf4.rule_for("transformer", "transformer_blocks")
            source, target = base / "transformer", tmp_path / "at-once"
            job = streaming.Job(
                component="transformer", source=source, target=target, rule=rule, device="cpu"
            )
            whole = streaming.quantize(job, Progress(quiet=True))
            deadline = time.monotonic() + 120
            while not (mark.exists() and journalled(folder) == set(WEIGHTS[:1])):
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            finished = (folder / WEIGHTS[0]).stat().st_mtime_ns
            killing = Killing(child, folder)
            data = making.quantize(lab.workspace, Wish(components=("transformer",)), killing)
        finally:
            child.kill()
    assert [path.name for path in killing.left] == [f".{WEIGHTS[1]}.{child.pid}.tmp"]  # left alone until then
    assert (folder / WEIGHTS[0]).stat().st_mtime_ns == finished  # kept
    assert data["components"] == [whole] and everything(folder) == everything(target)
