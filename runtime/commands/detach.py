"""A fit in the background: survives the shell that started it, on Windows too."""

import subprocess
import sys
import time
from typing import Any

from runtime.errors import UserError
from runtime.training import record
from runtime.workspace import Workspace

LAUNCH_S = 600.0  # loading and quantizing a 20-billion-parameter base comes before run.json
TAIL = 5


def fit(workspace: Workspace, *, smoke: bool, resume: str | None) -> dict[str, Any]:
    """Start `finetune fit`; returns once its run exists. Raises UserError with the log's end where it died."""
    from runtime.config.load import load_config

    logging = load_config(workspace.config_path).config.logging
    project = workspace.resolve(logging.output_dir) / logging.tracker_project_name
    line = [sys.executable, "-m", "runtime", "fit", "--workspace", str(workspace.root)]
    line += ["--smoke"] * smoke + (["--resume", resume] if resume else [])
    log = workspace.root / ".gates" / "logs" / f"fit-{int(time.time())}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **_apart())
    deadline = time.monotonic() + LAUNCH_S
    while time.monotonic() < deadline:
        for path, document in record.runs(project):
            if document.get("pid") == child.pid:
                child.returncode = 0  # it outlives us on purpose; Popen would warn of a child not waited for
                place = path.relative_to(workspace.root).as_posix()
                return {"run": place, "pid": child.pid, "log": log.relative_to(workspace.root).as_posix()}
        if child.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            raise UserError(
                f"the fit ended with {child.returncode} before it opened a run:\n  " + "\n  ".join(lines),
                remedy="finetune fit, to see all of it",
            )
        time.sleep(0.2)
    raise UserError(f"no run after {LAUNCH_S:.0f} s; see {log}", remedy="finetune monitor")


def _apart() -> dict[str, Any]:
    """A session of its own, so that closing the terminal doesn't take the fit along."""
    if sys.platform == "win32":
        flags = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
        return {"creationflags": flags}
    return {"start_new_session": True}
