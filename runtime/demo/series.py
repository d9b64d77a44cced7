"""The demo: the whole series on the embedded base, each skill's own script, in one process."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from runtime import files
from runtime.commands.init import write_target
from runtime.packaged import skills_dir
from runtime.training import record
from runtime.workspace import Workspace

HERE = Path(__file__).resolve().parent
BASE, DATA, CONFIG = HERE / "base", HERE / "data", HERE / "config.yaml"


def prepare(root: Path, device: str) -> None:
    """Target, dataset and config of the demo, where they are not there yet; what a user changed stays."""
    for source in sorted(path for path in DATA.rglob("*") if path.is_file()):
        place = root / "dataset" / source.relative_to(DATA)
        if not place.exists():
            files.write_with(place, lambda path, source=source: shutil.copyfile(source, path))  # type: ignore[misc]
    if not (root / "config.yaml").exists():
        files.write_bytes(root / "config.yaml", CONFIG.read_bytes())
    write_target(Workspace(root), model=str(BASE), dataset=str(root / "dataset"), device=device)


def run(root: Path) -> int:
    """Exit status of the first skill that fails, else 0."""
    for number, path in enumerate(scripts(), 1):
        say(f"\n=== {number} of {len(scripts())}: {path.parent.parent.name}")
        if code := int(load_script(path).main(["--workspace", str(root)])):
            return code
    return 0


def scripts() -> list[Path]:
    """The skills' scripts in the order of their steps."""
    return sorted(skills_dir().glob("*/scripts/run.py"))


def load_script(path: Path) -> ModuleType:
    name = path.parent.parent.name.replace("-", "_")
    spec = importlib.util.spec_from_file_location(f"skill_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def latest_grid(root: Path) -> Path | None:
    """The picture of the newest full run, if it has one."""
    for run, document in record.runs(root / "outputs" / "demo"):
        if document["kind"] == "full":
            grid = run / "validation" / "grid.png"
            return grid if grid.is_file() else None
    return None


def what_next(root: Path) -> list[str]:
    """What a person may want to type after the table of verdicts."""
    return [
        f"\nbefore and after   {latest_grid(root)}",
        f"every check        gate check 07 --workspace {root.name}",
        "why a check is     gate explain 07 loss-fell",
        "your own pictures  finetune init MY-WORKSPACE --model FOLDER_OR_HUB_NAME --dataset FOLDER",
    ]


def verdicts(root: Path) -> int:
    """The table of all gates, from the judge's own process."""
    return subprocess.run(
        [sys.executable, "-m", "gates", "status", "--workspace", str(root)], check=False
    ).returncode


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
