"""The measuring scripts are no package: each finds the others beside itself."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

SCRIPTS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if SCRIPTS not in sys.path:
    sys.path.append(SCRIPTS)

Call = Callable[..., None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """`main` of a script as its command line would call it."""

    def run(main: Callable[[], int | None], *words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["script", *words])
        assert not main()

    return run
