"""`finetune cache` as it is run: what a no-op imports, and two at once."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from filelock import FileLock

from runtime.cache import build

HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "bitsandbytes")
NO_OP = f"""
import sys
from runtime.cli import main
status = main(["cache", "--json", "--workspace", sys.argv[1]])
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
sys.exit(status)
"""
COMMAND = "import sys; from runtime.cli import main; sys.exit(main(sys.argv[1:]))"


def test_with_nothing_to_do_no_model_library_is_imported(lab: Any) -> None:
    lab.configure()
    line = [sys.executable, "-c", NO_OP, str(lab.root)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["built"] == 0
    assert done.stderr.splitlines()[-1] == "[]"


@contextlib.contextmanager
def started(lab: Any) -> Iterator["subprocess.Popen[str]"]:
    line = [sys.executable, "-c", COMMAND, "cache", "--json", "--workspace", str(lab.root)]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_two_at_once_make_one_whole_cache(lab: Any, held: Any) -> None:
    changes = {"data.processor.target_size": [32, 32]}
    lab.configure(changes)
    with started(lab) as one, started(lab) as other:
        told = [process.communicate(timeout=240) for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), told
    assert sorted(json.loads(out)["built"] for out, _ in told) == [0, 11]
    waiting = ["another process fills cache: waiting for it" in err for _, err in told]
    assert sorted(waiting) == [False, True]
    assert json.loads(told[waiting.index(True)][0])["built"] == 0
    build.open_for_fit(lab.job(changes))
    assert held.store.manifest()["counts"] == {"train": 8, "holdout": 3, "prompt": 0}


@pytest.mark.skipif(sys.platform == "win32", reason="a console's Ctrl-C can't be sent to one child there")
def test_ctrl_c_ends_the_waiting_at_once(lab: Any, held: Any) -> None:
    lab.configure()
    with FileLock(held.root / ".lock"), started(lab) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "another process fills cache: waiting for it\n"
        before = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - before < 2
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1].endswith("interrupted")
