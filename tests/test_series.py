"""The whole series as its users walk it: `gate next` alone, from an empty folder to eight PASS."""

import contextlib
import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gates.cli import main as gate
from runtime.cli import main as finetune
from runtime.demo.series import BASE, DATA

MAX_ACTIONS = 30  # the straight way takes 13; a circle would go on for ever


def captured(main: Any, line: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line)
    return code, out.getvalue(), err.getvalue()


class Walker:
    """Does what `gate next` says, and nothing else; the two words that only a person knows are filled in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.typed: list[str] = []

    def next(self) -> dict[str, Any]:
        code, out, err = captured(gate, ["next", "--json", "--workspace", str(self.root)])
        assert code == 0, err
        action: dict[str, Any] = json.loads(out)
        return action

    def obey(self, action: dict[str, Any]) -> None:
        command = action["command"]
        assert action["kind"] in ("run", "wait") and command, action
        self.typed.append(command)
        words = shlex.split(
            command.replace("MODEL", BASE.as_posix()).replace("FOLDER", str(self.root / "dataset"))
        )
        main = {"finetune": finetune, "gate": gate}[words[0]]
        extra = ["--device", "cpu"] if words[1] == "init" else []
        code, out, err = captured(main, [*words[1:], *extra, "--workspace", str(self.root)])
        assert code == 0 or words[0] == "gate", (command, out, err)

    def walk(self, until: str | None = None) -> None:
        """On to the end, or to where `until` is the next command."""
        while (action := self.next())["kind"] != "done" and action["command"] != until:
            assert len(self.typed) < MAX_ACTIONS, self.typed
            self.obey(action)


def shorten(root: Path) -> None:
    """The recommended config with a run that is short enough for a test and long enough to learn."""
    path = root / "config.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    wanted = {"max_train_steps": "100", "checkpointing_steps": "20", "warmup_steps": "5", "lr": "2.0e-3",
              "num_inference_steps": "6"}  # fmt: skip
    changed = []
    for line in lines:
        key = line.strip().partition(":")[0]
        indent = line[: len(line) - len(line.lstrip())]
        changed.append(f"{indent}{key}: {wanted.pop(key)}" if key in wanted else line)
    assert not wanted, f"the recommended config has no {sorted(wanted)}"
    path.write_text("\n".join(changed) + "\n", encoding="utf-8", newline="\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gate_next_alone_leads_from_an_empty_folder_to_eight_pass(tmp_path: Path) -> None:
    walker = Walker(tmp_path)
    assert walker.next()["command"].startswith("finetune init")
    shutil.copytree(DATA, tmp_path / "dataset")
    walker.walk(until="finetune plan")
    shorten(tmp_path)
    walker.walk(until="finetune fit")
    kill_a_fit(tmp_path)
    assert walker.next()["command"] == "finetune monitor --wait", "a run that says running is waited for"
    walker.walk()
    assert "finetune fit --resume latest" in walker.typed
    code, out, _ = captured(gate, ["check", "all", "--json", "--workspace", str(tmp_path)])
    verdicts = json.loads(out)
    assert code == 0 and [v["verdict"] for v in verdicts] == ["PASS"] * 8
    assert walker.next()["command"] == "finetune export --format diffusers"
    assert_judges_alike_elsewhere(tmp_path, verdicts)


def kill_a_fit(root: Path) -> None:
    """SIGKILL after the first checkpoint: run.json stays at `running`, whose process is gone."""
    line = [sys.executable, "-m", "runtime", "fit", "--workspace", str(root)]
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(root.glob("outputs/*/v1/checkpoint-last-*-last")):
        assert child.poll() is None and time.monotonic() < deadline, "the fit wrote no checkpoint"
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()


def assert_judges_alike_elsewhere(root: Path, verdicts: list[dict[str, Any]]) -> None:
    """Moved to another folder the workspace gets the same judgements: they are functions of its files."""
    moved = root.with_name(root.name + "-moved")
    shutil.move(root, moved)
    _, out, _ = captured(gate, ["check", "all", "--json", "--workspace", str(moved)])
    assert [v["judgement_digest"] for v in json.loads(out)] == [v["judgement_digest"] for v in verdicts]
