"""The directory in which the user works: its places, its target, its evidence."""

import hashlib
import os
import platform
import sys
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from runtime import files
from runtime.errors import UserError

EXTERNAL = "external:"


def tool() -> dict[str, str]:
    return {"name": "aipc-finetune", "version": metadata.version("aipc-finetune")}


def host_id() -> str:
    """A digest that tells two machines apart and names neither."""
    # A name changes with a container or a whim; it stands in only where the system gives nothing better.
    facts = [_installation() or platform.node(), platform.machine(), platform.system()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _installation() -> str:
    """What the system itself tells its installations apart by; empty where it has no such thing."""
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"SOFTWARE\Microsoft\Cryptography") as key:
            return str(winreg.QueryValueEx(key, "MachineGuid")[0])
    path = Path("/etc/machine-id")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


@dataclass(frozen=True, slots=True)
class Workspace:
    root: Path

    @property
    def config_path(self) -> Path:
        return self.root / "config.yaml"

    @property
    def target_path(self) -> Path:
        return self.root / ".gates" / "target.json"

    @property
    def local_path(self) -> Path:
        return self.root / ".gates" / "local.json"

    @property
    def index_path(self) -> Path:
        return self.root / ".gates" / "index.json"

    def evidence_path(self, name: str) -> Path:
        return self.root / ".gates" / "evidence" / f"{name}.json"

    def target(self) -> dict[str, Any]:
        if not self.target_path.is_file():
            raise UserError(
                f"{self.root} is not a workspace: .gates/target.json is missing",
                remedy="finetune init --model MODEL --dataset FOLDER",
            )
        try:
            document: dict[str, Any] = files.read_json(self.target_path)
        except ValueError as error:
            raise UserError(
                f"{self.target_path} is damaged: {error}",
                remedy="finetune init --model MODEL --dataset FOLDER",
            ) from error
        return document

    def externals(self) -> dict[str, str]:
        """Absolute paths of this machine by name; empty where none was given."""
        try:
            external: dict[str, str] = dict(files.read_json(self.local_path)["external"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # absent, or damaged: `finetune init` writes it anew
        return external

    def resolve(self, reference: str) -> Path:
        """The path that a config or evidence means: `external:NAME`, absolute, or inside."""
        if not reference.startswith(EXTERNAL):
            # Links are not followed: what lies under the root by name is inside, wherever it is kept.
            return Path(os.path.abspath(self.root / Path(reference).expanduser()))  # noqa: PTH100
        name = reference.removeprefix(EXTERNAL)
        if name not in self.externals():
            raise UserError(
                f"{reference} is not known on this machine: .gates/local.json has no path for {name}",
                remedy="finetune dataset" if "." in name else f"finetune init --{name} PATH",
            )
        return Path(self.externals()[name])

    def refer(self, path: Path, name: str) -> str:
        """The portable way to write `path`; what lies outside is remembered as `external:name`."""
        path = path.expanduser().resolve()
        if path.is_relative_to(self.root.resolve()):
            return path.relative_to(self.root.resolve()).as_posix()
        files.write_json(self.local_path, {"external": {**self.externals(), name: str(path)}})
        return EXTERNAL + name

    def begin_evidence(self, name: str, command: str) -> "Recording":
        """Write the envelope as incomplete, so that a crash never leaves yesterday's."""
        recording = Recording(self, name, command, uuid.uuid4().hex)
        recording.write(inputs={"files": {}, "config": {}}, data={}, complete=False)
        return recording

    def evidence(self, name: str) -> dict[str, Any] | None:
        """The data of complete evidence, or None."""
        document = self.envelope(name)
        return dict(document["data"]) if document else None

    def envelope(self, name: str) -> dict[str, Any] | None:
        """Complete evidence as written; None where it is absent, unfinished or damaged: it gets made anew."""
        try:
            document = files.read_json(self.evidence_path(name))
            whole = document["complete"] is True and isinstance(document["data"], dict)
            return document if whole and isinstance(document["inputs"]["files"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Recording:
    workspace: Workspace
    name: str
    command: str
    run_id: str

    def write(self, *, inputs: dict[str, Any], data: dict[str, Any], complete: bool = True) -> None:
        document = {
            "schema": "evidence/1",
            "gate": self.name[:2],
            "name": self.name,
            "run_id": self.run_id,
            "measured_at": files.utc_now(),
            "host_id": host_id(),
            "tool": tool(),
            "command": self.command,
            "inputs": {"files": inputs.get("files", {}), "config": inputs.get("config", {})},
            "complete": complete,
            "data": data,
        }
        files.write_json(self.workspace.evidence_path(self.name), document)


def python_minor() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
