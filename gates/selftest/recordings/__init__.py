"""Recordings of real workspaces, one zip each; README.md says where each was made, and how."""

import zipfile
from pathlib import Path

from gates.verdict import render, write_text

HERE = Path(__file__).resolve().parent
BASE = "base"  # of the base model only what gate 04 reads travels: its model_index.json
TOLD = {
    "demo-cpu": "a real run on a CPU, recorded: NF4 skipped, two micro-batches a step, interrupted and resumed, "
    "checkpoints pruned; the base's weights are left out",
    "demo-cuda": "a real run on an NVIDIA H200, recorded: NF4 skipped; the base's weights are left out",
    "demo-controls": "the same for the Plus family, one and two controls mixed, recorded",
}


def place(name: str) -> Path:
    return HERE / f"{name}.zip"


def unpack(name: str, root: Path) -> None:
    """The recorded workspace at `root`; its base lies inside of it, for no path of another machine travels."""
    with zipfile.ZipFile(place(name)) as archive:
        archive.extractall(root)
    local = {"external": {"model": str(root.resolve() / BASE)}}
    write_text(root / ".gates" / "local.json", render(local))
