"""Build the wheel, install it without dependencies into a folder, use it from an empty one.

    python .ci/wheel.py

Skills, schemas and the demo base must travel in it: `gate` and `finetune` have to find them there.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A module that is None can't be imported: the judge does without.
SELFTEST = """
import sys
sys.modules["torch"] = None
from gates.cli import main
sys.exit(main(["selftest"]))
"""


def run(*command: str, cwd: Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        site, empty, dist = (Path(scratch) / name for name in ("site", "empty", "dist"))
        empty.mkdir()
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
        run(*pip, "wheel", "--no-deps", "-w", str(dist), str(ROOT), cwd=empty)
        (wheel,) = dist.glob("*.whl")
        run(*pip, "install", "--no-deps", "--target", str(site), str(wheel), cwd=empty)
        here = {"PYTHONPATH": str(site)}
        where = run(
            sys.executable,
            "-P",
            "-c",
            "import gates, runtime; print(gates.__file__, runtime.__file__)",
            cwd=empty,
            **here,
        )
        assert where.count(str(site)) == 2, where
        assert "loss-fell" in run(sys.executable, "-P", "-m", "gates", "explain", "07", cwd=empty, **here)
        print(run(sys.executable, "-P", "-c", SELFTEST, cwd=empty, **here).splitlines()[-1])
        print(run(sys.executable, "-P", "-m", "runtime", "demo", "--workspace", "demo", cwd=empty, **here))
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, the demo passes from it")


if __name__ == "__main__":
    main()
