"""Sleep is held off while a fit runs, and not a moment longer; nothing here can stop a fit."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from runtime.training import awake

linux = pytest.mark.skipif(sys.platform != "linux", reason="shell scripts stand for systemd-inhibit")


class Kernel32:
    def __init__(self, answer: int) -> None:
        self.answer, self.states = answer, list[int]()

    def SetThreadExecutionState(self, state: int) -> int:  # noqa: N802
        self.states.append(state)
        return self.answer


@pytest.mark.parametrize(
    ("answer", "line", "states"),
    [
        (0x80000000, awake.HELD, [0x80000001, 0x80000000]),
        (0, "not held off, Windows refused", [0x80000001]),
    ],
)
def test_windows(monkeypatch: pytest.MonkeyPatch, answer: int, line: str, states: list[int]) -> None:
    kernel32 = Kernel32(answer)
    monkeypatch.setattr(awake.sys, "platform", "win32")
    monkeypatch.setattr(awake, "_kernel32", lambda: kernel32)
    with awake.held() as said:
        assert said.startswith(line) and kernel32.states == [0x80000001]
    assert kernel32.states == states


def test_windows_gets_its_sleep_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel32 = Kernel32(1)
    monkeypatch.setattr(awake.sys, "platform", "win32")
    monkeypatch.setattr(awake, "_kernel32", lambda: kernel32)
    with pytest.raises(RuntimeError), awake.held():
        raise RuntimeError
    assert kernel32.states[-1] == 0x80000000


def tool(folder: Path, script: str) -> Path:
    path = folder / "systemd-inhibit"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


# As the real one: the lock is held, then the command runs in its place as a child.
GRANTS = 'while [ "${1#--}" != "$1" ]; do shift; done; echo $$ > "$0.pid"; "$@"'


@linux
def test_linux_holds_the_lock_for_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tool(tmp_path, GRANTS)
    monkeypatch.setattr(awake.shutil, "which", lambda name: str(path))
    with awake.held() as said:
        pid = int(path.with_suffix(".pid").read_text(encoding="utf-8"))
        assert said == awake.HELD and os.getsid(pid) == pid != os.getsid(0), "Ctrl-C must not reach it"
    assert not psutil.pid_exists(pid)


REFUSED = "not held off, systemd-inhibit refused: "


@linux
@pytest.mark.parametrize("script", ["exit 1", "echo Failed to connect to bus >&2; exit 1", "sleep 60"])
def test_linux_says_that_it_was_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tool(tmp_path, script)
    monkeypatch.setattr(awake, "ANSWER_S", 0.3)
    monkeypatch.setattr(awake.shutil, "which", lambda name: str(path))
    children, before = set(psutil.Process().children()), time.monotonic()
    with awake.held() as said:
        assert said.startswith(REFUSED)
    assert time.monotonic() - before < 5, "a tool that asks or hangs holds nothing up"
    assert set(psutil.Process().children()) <= children


@pytest.mark.parametrize("found", [None, "/nowhere/systemd-inhibit"])
def test_without_the_tool_a_line_says_so(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr(awake.sys, "platform", "linux")
    monkeypatch.setattr(awake.shutil, "which", lambda name: found)
    with awake.held() as said:
        assert said.startswith("not held off, ") and "settings" in said


@linux
def test_the_lock_dies_with_a_fit_that_is_killed(tmp_path: Path) -> None:
    path = tool(tmp_path, GRANTS)
    program = f"""
        import time
        from runtime.training import awake
        awake.shutil.which = lambda name: {str(path)!r}
        with awake.held() as said:
            print(said, flush=True)
            time.sleep(60)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline().strip() == awake.HELD
    pid = int(path.with_suffix(".pid").read_text(encoding="utf-8"))
    assert psutil.pid_exists(pid)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the lock outlives the fit"
        time.sleep(0.02)
