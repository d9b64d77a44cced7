"""A workspace remembered by content, so that a spoilt one is whole again in a moment."""

import shutil
from pathlib import Path


class Snapshot:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self.folders = {path for path in root.rglob("*") if path.is_dir()}

    def restore(self) -> None:
        for path in list(self.root.rglob("*")):
            if path.is_symlink() or (path.is_file() and path not in self.contents):
                path.unlink()
            elif path.is_dir() and path not in self.folders:
                shutil.rmtree(path)
        for folder in sorted(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
        for path, content in self.contents.items():
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)
