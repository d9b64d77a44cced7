"""A child that aborts, hangs, prints garbage or is not there is a finding, and the parent goes on."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.probes import child
from runtime.probes.child import Outcome

Ask = Callable[..., Outcome]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    def run(source: str, *arguments: str, limit_s: float = 60.0) -> Outcome:
        path = tmp_path / "probe.py"
        path.write_text(f"import json, os, sys, time\n{source}\n", encoding="utf-8", newline="\n")
        return child.ask(path, *arguments, limit_s=limit_s)

    return run


def test_an_answer_is_what_was_said_together(ask: Ask) -> None:
    outcome = ask("""print('@{"a": 1}'); print('@' + json.dumps({"b": sys.argv[1], "done": True}))""", "Ä→é")
    assert (outcome.status, outcome.exit, outcome.reason) == ("ok", 0, "")
    assert outcome.answer == {"a": 1, "b": "Ä→é"}
    assert outcome.seconds > 0


ENDS = {
    "abort": (
        'print(\'@{"stage": "the driver", "seen": 1}\', flush=True); os.abort()',
        "failed",
        "in the driver",
    ),
    "exception": (
        "raise OSError('no kernel for this device')",
        "failed",
        "OSError: no kernel for this device",
    ),
    "exit": ("sys.exit(127)", "failed", "exit 127"),
    "silent end": ("os._exit(0)", "failed", "it ended without an answer"),
    "garbage": ("sys.stdout.buffer.write(bytes(range(256)) * 99)", "failed", "it ended without an answer"),
    "torn answer": ("print('@{\"done\": tr')", "failed", "it ended without an answer"),
    "absent": ('print(\'@{"absent": "torch"}\')', "absent", "torch is not installed"),
    "no memory": ('print(\'@{"stage": "allocate"}\', flush=True); bytearray(2**60)', "failed", "MemoryError"),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends(name: str, ask: Ask) -> None:
    source, status, reason = ENDS[name]
    outcome = ask(source)
    assert outcome.status == status
    assert reason in outcome.reason
    assert len(outcome.reason) <= child.REASON_MAX


def test_an_abort_keeps_what_was_said_before(ask: Ask) -> None:
    outcome = ask(ENDS["abort"][0])
    assert outcome.answer == {"seen": 1}
    assert outcome.exit not in (0, None)
    assert "abort" in outcome.reason.lower()


def test_a_hang_ends_at_the_limit(ask: Ask) -> None:
    started = time.monotonic()
    outcome = ask("""print('@{"stage": "a kernel"}', flush=True); time.sleep(600)""", limit_s=1.5)
    assert time.monotonic() - started < 20
    assert (outcome.status, outcome.exit) == ("timeout", None)
    assert outcome.reason == "in a kernel: no answer within 1.5 s"


def test_a_grandchild_that_holds_the_output_does_not_hold_us(ask: Ask) -> None:
    grandchild = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9)'])"
    source = f"import subprocess; {grandchild}; time.sleep(600)"
    started = time.monotonic()
    assert ask(source, limit_s=1.5).status == "timeout"
    assert time.monotonic() - started < 8


def test_no_such_program() -> None:
    outcome = child.run(["no-such-program-here"], limit_s=5.0)
    assert (outcome.status, outcome.exit) == ("absent", None)
    assert outcome.reason.startswith("no-such-program-here can't be started")


def test_another_interpreter_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    assert child.ask("torch_facts", limit_s=5.0, interpreter=missing).status == "absent"


def test_nothing_beside_the_script_shadows_a_package(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('shadowed')", encoding="utf-8", newline="\n")
    assert ask("import colorsys; print('@{\"done\": true}')").ok


def test_reasons_name_no_path_of_this_machine(ask: Ask) -> None:
    outcome = ask("raise OSError(os.path.expanduser('~/x'), sys.prefix)")
    assert str(Path.home()) not in outcome.reason
    assert sys.prefix not in outcome.reason


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-signal.SIGTERM, "killed by SIGTERM"),
        (-999, "killed by signal 999"),
        (0xC0000005, "exit 0xc0000005, access violation"),
        (0xC0000409, "exit 0xc0000409, abort (fail fast)"),
        (0xC0000FFF, "exit 0xc0000fff, a Windows status"),
        (1, "exit 1"),
    ],
)
def test_exits_in_words(code: int, told: str) -> None:
    assert child.describe_exit(code) == told


def test_the_fatal_error_is_told_rather_than_the_last_line() -> None:
    text = "warning\nWindows fatal exception: access violation\n\nCurrent thread 0x1:\n  File x\n"
    assert child.last_words(text) == "Windows fatal exception: access violation"
