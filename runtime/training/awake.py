"""Sleep is held off while a fit runs; closing the lid or pressing the button still counts.

Windows by SetThreadExecutionState; Linux by systemd-inhibit where that gives the lock without a
password. Nothing here can stop a fit: where sleep can't be held off, a line says so.
"""

import contextlib
import ctypes
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

ES_CONTINUOUS, ES_SYSTEM_REQUIRED = 0x80000000, 0x00000001  # winbase.h
ANSWER_S = 5.0
INHIBIT = ("--what=sleep:idle", "--who=finetune", "--why=a fit is running", "--mode=block")
HELD = "held off while this runs"
SETTINGS = "for a long run turn it off in the system's settings"


@contextlib.contextmanager
def held() -> Iterator[str]:
    """Yields one line: that sleep is held off, or why it could not be."""
    if sys.platform == "win32":
        with _windows(_kernel32()) as line:
            yield line
    elif tool := shutil.which("systemd-inhibit"):
        with _inhibited([tool, *INHIBIT]) as line:
            yield line
    else:
        yield f"not held off, no systemd-inhibit here: {SETTINGS}"


def _kernel32() -> Any:
    return ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]  # Windows only


@contextlib.contextmanager
def _windows(kernel32: Any) -> Iterator[str]:
    """The state belongs to the calling thread, which is the one that trains. The call answers 0 where it failed."""
    if not kernel32.SetThreadExecutionState(ES_CONTINUOUS | ES_SYSTEM_REQUIRED):
        yield f"not held off, Windows refused: {SETTINGS}"
        return
    try:
        yield HELD
    finally:
        kernel32.SetThreadExecutionState(ES_CONTINUOUS)


@contextlib.contextmanager
def _inhibited(line: list[str]) -> Iterator[str]:
    """The lock lives as long as `cat`, and that as long as our end of its pipe: however this process ends."""
    try:
        # In a session of its own: Ctrl-C is for the fit, and no terminal means that nothing asks for a password.
        child = subprocess.Popen(
            [*line, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        yield f"not held off, {error}: {SETTINGS}"
        return
    try:
        yield HELD if _answers(child) else f"not held off, systemd-inhibit refused: {SETTINGS}"
    finally:
        _end(child)


def _answers(child: "subprocess.Popen[bytes]") -> bool:
    """Whether `cat` runs, which it does once the lock is taken."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(b"\n")
        child.stdin.flush()
    except OSError:
        return False
    ready, _, _ = select.select([child.stdout], [], [], ANSWER_S)
    return bool(ready) and child.stdout.read(1) == b"\n"


def _end(child: "subprocess.Popen[bytes]") -> None:
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    child.stdout.close()
    try:
        child.wait(ANSWER_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
