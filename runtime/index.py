"""What is known of files by their size and time, so that nothing is read twice that has not changed.

Lies in `.gates/index.json` and is no evidence: the gates read the files themselves. Known limit: bytes that
change under the same size with the old time put back are not seen here; a gate sees them.
"""

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime import files

SETTLED_NS = 2 * 10**9  # a file changed a moment ago may change again within its clock's grain (FAT: 2 s)


@dataclass(slots=True, kw_only=True)
class Index:
    """Facts by name; a name is a workspace path or reference, never an absolute path."""

    path: Path
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: bool = False

    @classmethod
    def open(cls, path: Path) -> "Index":
        """Empty where there is none, or a damaged one: then everything is read again."""
        facts: Any = None
        with contextlib.suppress(OSError, ValueError):
            facts = files.read_json(path)
        whole = isinstance(facts, dict) and all(isinstance(value, dict) for value in facts.values())
        return cls(path=path, facts=facts if whole else {})

    def digest(self, path: Path, name: str) -> str:
        """SHA-256 of the file's bytes, remembered. Raises OSError."""
        known = self.get(path, name).get("sha256")
        if isinstance(known, str):
            return known
        before = path.stat()
        digest = files.file_digest(path)
        self.put(path, name, before.st_size, before.st_mtime_ns, {"sha256": digest})
        return digest

    def get(self, path: Path, name: str) -> dict[str, Any]:
        """What was remembered of the file as it is now; empty where it changed."""
        known = self.facts.get(name)
        if known is None:
            return {}
        stat = path.stat()
        same = known.get("size") == stat.st_size and known.get("mtime_ns") == stat.st_mtime_ns
        return known if same else {}

    def put(self, path: Path, name: str, size: int, mtime_ns: int, facts: dict[str, Any]) -> None:
        """Remember facts read from a file that had this size and time before reading, and has them still."""
        stat = path.stat()
        settled = time.time_ns() - mtime_ns > SETTLED_NS
        if settled and (stat.st_size, stat.st_mtime_ns) == (size, mtime_ns):
            self.facts[name] = {"size": size, "mtime_ns": mtime_ns, **facts}
            self.changed = True

    def save(self) -> None:
        if self.changed:
            files.write_json(self.path, self.facts)
            self.changed = False
