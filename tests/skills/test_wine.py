"""train_xpu.bat under wine's cmd, where it and a compiler for Windows are installed.

    apt-get install --no-install-recommends wine wine64 gcc-mingw-w64-x86-64-win32

A small program stands in for python.exe: it writes down how it was called. What runs everywhere, of the same file,
is tests/skills/test_launchers.py.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

import pytest

BAT = (
    Path(__file__).resolve().parents[2]
    / "skills" / "qwen-image-edit-aipc-finetune-07-training" / "scripts" / "train_xpu.bat"
)  # fmt: skip
COMPILER = "x86_64-w64-mingw32-gcc"
KEEPS = "NoDefaultCurrentDirectoryInExePath"
NAMES = ("PYTHONUTF8", "SYCL_CACHE_PERSISTENT", "ONEAPI_MARK", KEEPS)
PYTHON = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv) {
    const char *names[] = {%s};
    FILE *log = fopen(getenv("STUB_LOG"), "a");
    int asks = 0;
    for (int i = 1; i < argc; i++) {
        fprintf(log, "%%s%%s", i > 1 ? "|" : "", argv[i]);
        asks |= !strcmp(argv[i], "--needs-oneapi");
    }
    for (int i = 0; i < %d; i++)
        fprintf(log, "\\t%%s", getenv(names[i]) ? getenv(names[i]) : "");
    fprintf(log, "\\n");
    fclose(log);
    return atoi(getenv(asks ? "STUB_NEEDS" : "STUB_CODE"));
}
"""
SETVARS = f"""@echo off
set "ONEAPI_MARK=%* {KEEPS}=%{KEEPS}%"
exit /b %SETVARS_CODE%
"""
RUN = "-P|-m|runtime.launcher"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("wine") and shutil.which(COMPILER)), reason=f"needs wine and {COMPILER}"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Done:
    status: int
    calls: list[tuple[str, dict[str, str]]]
    """arguments, and the variables of NAMES that were set"""


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wine")
    source = folder / "python.c"
    names = ", ".join(f'"{name}"' for name in NAMES)
    source.write_text(PYTHON % (names, len(NAMES)), encoding="utf-8")
    subprocess.run([COMPILER, "-o", folder / "python.exe", source], check=True, timeout=60)
    (folder / "one api").mkdir()
    (folder / "one api" / "setvars.bat").write_bytes(SETVARS.replace("\n", "\r\n").encode())
    return folder


def windows(path: Path) -> str:
    return str(PureWindowsPath("Z:" + path.as_posix()))


@pytest.fixture
def run(machine: Path, tmp_path: Path) -> Callable[..., Done]:
    def bat(
        *arguments: str, code: int = 0, needs: int = 0, setvars: int = 0, oneapi: bool = True, **more: str
    ) -> Done:
        log = tmp_path / "log"
        environment = {
            **os.environ, "WINEPREFIX": str(machine / "prefix"), "WINEDEBUG": "-all", "STUB_LOG": windows(log),
            "PYTHON": windows(machine / "python.exe"), "STUB_CODE": str(code), "STUB_NEEDS": str(needs),
            "SETVARS_CODE": str(setvars), "ONEAPI_ROOT": windows(machine / ("one api" if oneapi else "none")),
            **more,
        }  # fmt: skip
        line = ["wine", "cmd", "/c", windows(BAT), *arguments]
        ended = subprocess.run(
            line, env=environment, check=False, timeout=200, stdin=subprocess.DEVNULL, capture_output=True
        )
        calls = []
        for text in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
            called, *values = text.split("\t")
            calls.append((called, {n: v for n, v in zip(NAMES, values, strict=True) if v}))
        return Done(status=ended.returncode, calls=calls)

    return bat


CONFIG = r"Z:\my work\config.yaml"
SET = {"PYTHONUTF8": "1", "SYCL_CACHE_PERSISTENT": "1"}


@pytest.mark.parametrize("code", [0, 1, 3, 130])
def test_arguments_environment_and_exit_code(run: Callable[..., Done], code: int) -> None:
    done = run(CONFIG, "--cache", code=code, oneapi=False)
    assert done == Done(status=code, calls=[(f"{RUN}|{CONFIG}|--cache", SET)])


@pytest.mark.parametrize("kept", ["1", ""])
def test_oneapi_where_it_is_needed(run: Callable[..., Done], kept: str) -> None:
    done = run(CONFIG, code=2, **({KEEPS: kept} if kept else {}))
    variables = {**SET, **({KEEPS: kept} if kept else {})}
    assert done.status == 2
    assert done.calls == [
        (f"{RUN}|--needs-oneapi|{CONFIG}", variables),
        (f"{RUN}|{CONFIG}", {**variables, "ONEAPI_MARK": f"--force {KEEPS}="}),
    ]


@pytest.mark.parametrize(
    ("options", "count"), [({"needs": 1}, 2), ({"SETVARS_COMPLETED": "1"}, 1)], ids=["not needed", "active"]
)
def test_oneapi_is_left_alone(run: Callable[..., Done], options: dict[str, str], count: int) -> None:
    done = run(CONFIG, code=7, **options)
    assert done.status == 7 and len(done.calls) == count
    assert done.calls[-1] == (f"{RUN}|{CONFIG}", SET)


def test_it_stops_where_setvars_fails(run: Callable[..., Done]) -> None:
    done = run(CONFIG, setvars=7)
    assert done.status != 0  # which one, old versions of wine lose; test_launchers.py knows
    assert [called for called, _ in done.calls] == [f"{RUN}|--needs-oneapi|{CONFIG}"]
