"""Record a workspace that passes all eight gates, for `gate selftest` to plant faults in.

    python -m gates.selftest.record WORKSPACE NAME

Writes gates/selftest/recordings/NAME.zip: what the gates read, without the base's weights, and judges
what it wrote. README.md beside it has to say where and how the workspace was made.
"""

import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gates import chain, registry
from gates.selftest import recordings
from gates.workspace import Workspace

MAX_BYTES = 3 * 2**20  # it travels in the wheel
EPOCH = (2020, 1, 1, 0, 0, 0)  # of every member: the same workspace gives the same bytes
# Local to a machine, made anew by each `gate check`, or for people to look at: no check reads them.
LEFT_OUT = (".gates/local.json", ".gates/index.json", ".gates/error.log", "cache/.lock", "models/nf4/.lock")
LEFT_OUT_FOLDERS = (".gates/verdicts/", "models/")
LEFT_OUT_NAMES = ("probe.png", "grid.png")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    root, name = Path(arguments[0]).resolve(), arguments[1]
    pack(root, recordings.place(name))
    size = recordings.place(name).stat().st_size
    faults = judged(name)
    if size > MAX_BYTES:
        faults.append(f"{size} bytes, more than {MAX_BYTES}: record a smaller adapter")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{recordings.place(name).name}: {size / 2**20:.2f} MiB", file=sys.stderr)
    return 1 if faults else 0


def pack(root: Path, place: Path) -> None:
    index = Workspace.open(root).resolve("external:model") / "model_index.json"
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in travelling(root):
            _add(archive, path.relative_to(root).as_posix(), path)
        _add(archive, f"{recordings.BASE}/model_index.json", index)


def travelling(root: Path) -> Iterator[Path]:
    for path in sorted(item for item in root.rglob("*") if item.is_file()):
        name = path.relative_to(root).as_posix()
        local = name in LEFT_OUT or path.name in LEFT_OUT_NAMES
        if not local and not name.startswith(LEFT_OUT_FOLDERS):
            yield path


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    member = zipfile.ZipInfo(name, EPOCH)
    member.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(member, path.read_bytes())


def judged(name: str) -> list[str]:
    """What does not pass in the recording as it will be unpacked elsewhere."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / name
        recordings.unpack(name, root)
        whole = [item.whole for item in chain.judge_up_to(Workspace.open(root), registry.numbers()[-1])]
        return [f"gate {v.gate}: {v.outcome}: {v.summary}" for v in whole if not v.passes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
