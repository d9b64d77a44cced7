"""A probe runs in a child process with a time limit: an abort, a hang or a crash is a finding, not the end.

A child of ours prints lines of `@` and a JSON object, which add up to its answer, and says
`{"done": true}` at its end. Before each risky call it says `{"stage": ...}`, so that what a
driver kills still tells where it died.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

CHILDREN = Path(__file__).resolve().parent / "children"
OUTPUT_MAX = 4 * 2**20  # bytes kept of what a child prints; the end of it
REASON_MAX = 300  # characters
KILL_WAIT_S = 5.0  # a process stuck in a driver call does not die at once, or at all

# Nothing is fetched and no window opens because somebody asked what is there.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}

Status = Literal["ok", "failed", "timeout", "absent"]

ABORT_EXIT = 3  # with which abort() of Windows' C runtime ends a process
# NTSTATUS codes with which Windows ends a process
WINDOWS_EXITS = {
    0xC0000005: "access violation",
    0xC0000135: "a DLL is missing",
    0xC0000139: "a DLL lacks an entry point",
    0xC000001D: "illegal instruction",
    0xC00000FD: "stack overflow",
    0xC0000374: "heap corruption",
    0xC0000409: "abort (fail fast)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a child ended."""

    status: Status
    seconds: float
    exit: int | None
    """None where nothing was started, or it had to be killed"""
    reason: str
    """"" where all went well"""
    answer: dict[str, Any] = field(default_factory=dict)
    """What it had said before it ended, however it ended"""
    stdout: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_json(self) -> dict[str, Any]:
        """The finding, without the answer."""
        return {
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "exit": self.exit,
            "reason": self.reason,
        }


def ask(child: str | Path, *arguments: str, limit_s: float, interpreter: str = sys.executable) -> Outcome:
    """Run one of `children/`, or a file, with this interpreter and read its answer."""
    script = CHILDREN / f"{child}.py" if isinstance(child, str) else child
    # -P: the folder of the script is no place to import from, so nothing there shadows a package.
    command = [interpreter, "-P", "-X", "faulthandler", str(script), *arguments]
    return _answered(run(command, limit_s=limit_s))


def run(command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run `command`; `absent` where there is no such program, `failed` at an exit status but 0."""
    started = time.perf_counter()
    variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
    # Files, not pipes: a grandchild that outlives a kill would keep a pipe open for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=variables,
                start_new_session=sys.platform != "win32",
            )
        except OSError as error:
            reason = f"{Path(command[0]).name} can't be started: {error.strerror}"
            return Outcome(status="absent", seconds=time.perf_counter() - started, exit=None, reason=reason)
        code = _wait(process, limit_s)
        seconds = time.perf_counter() - started
        return _ended(code, seconds, limit_s, _read(out), _read(err))


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """The exit status, or None where the time was up. Whatever happens, the child does not stay."""
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "win32":
            tree = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
            subprocess.run(tree, capture_output=True, timeout=KILL_WAIT_S, check=False)
        else:
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait(timeout=KILL_WAIT_S)


def _read(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OUTPUT_MAX))
    return file.read().decode("utf-8", errors="replace")


def _ended(code: int | None, seconds: float, limit_s: float, out: str, err: str) -> Outcome:
    if code is None:
        reason = f"no answer within {limit_s:g} s"
        return Outcome(status="timeout", seconds=seconds, exit=None, reason=reason, stdout=out)
    if code == 0:
        return Outcome(status="ok", seconds=seconds, exit=0, reason="", stdout=out)
    reason = shorten(f"{describe_exit(code)}: {last_words(err)}".removesuffix(": "))
    return Outcome(status="failed", seconds=seconds, exit=code, reason=reason, stdout=out)


def _answered(outcome: Outcome) -> Outcome:
    """`outcome` with what the child said, and judged by it too."""
    answer = read_answer(outcome.stdout)
    done, stage = answer.pop("done", False), answer.pop("stage", None)
    answered = replace(outcome, answer=answer, stdout="")
    if absent := answer.pop("absent", None):
        return replace(answered, status="absent", reason=f"{absent} is not installed")
    if outcome.ok and not done:
        return replace(answered, status="failed", reason=_at(stage, "it ended without an answer"))
    return replace(answered, reason=_at(stage, outcome.reason) if outcome.reason else "")


def _at(stage: Any, reason: str) -> str:
    return shorten(f"in {stage}: {reason}" if stage else reason)


def read_answer(text: str) -> dict[str, Any]:
    """The `@{...}` lines of a child's output, merged; libraries print there as well."""
    answer: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("@{"):
            with contextlib.suppress(ValueError):  # a line that a kill tore
                answer |= json.loads(line[1:])
    return answer


def describe_exit(code: int) -> str:
    """`code` as `subprocess` gives it: negative for a signal on Linux, an NTSTATUS on Windows."""
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"killed by {known.get(-code, f'signal {-code}')}"
    if code > 0xFFFF:
        return f"exit {code:#010x}, {WINDOWS_EXITS.get(code, 'a Windows status')}"
    return f"exit {code}, abort" if code == ABORT_EXIT and sys.platform == "win32" else f"exit {code}"


def last_words(stderr: str) -> str:
    """The line that says what went wrong: faulthandler's first, else the last of a traceback."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith(("Fatal Python error", "Windows fatal exception"))]
    return (fatal or lines[-1:] or [""])[0]


def shorten(text: str) -> str:
    """One line without the paths of this machine, for the evidence travels."""
    for path, name in ((sys.prefix, "<env>"), (sys.base_prefix, "<python>"), (str(Path.home()), "~")):
        if len(path) > 1:
            text = text.replace(path, name)
    text = " ".join(text.split())
    return text if len(text) <= REASON_MAX else text[: REASON_MAX - 1] + "…"
