"""SIGKILL while a cache is filled: each rerun goes on, and none costs more than the batch at hand."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import demo, files
from runtime.cache import build
from runtime.commands import dataset as dataset_command
from runtime.commands.init import write_target
from runtime.config import load
from runtime.config.resolve import resolve
from runtime.demo import shapes
from runtime.errors import CacheError
from runtime.progress import Progress
from runtime.workspace import Workspace

BASE = Path(demo.__file__).parent / "base"
SAMPLES, BATCH = 28, 4
# In which batch of a run it is killed: seven are of prompts, then seven of pictures, and ten kills begin thirteen.
KILLED_IN = (1, 2, 1, 1, 2, 1, 1, 2, 1, 1)
TOLERANCE = 1e-5  # as of batches: after a kill the rest is batched otherwise
CONFIG = {
    "model": {"pretrained_model_name_or_path": "external:model"},
    "data": {"processor": {"target_size": [64, 64]}},
    "cache": {"use_cache": True, "batch_size": BATCH},
    "train": {"max_train_steps": 2},
    "hardware": {"device": "cpu"},
}
# The command itself; each batch is noted as it begins, so that what a kill cost can be counted. Imports take longer
# than all batches: where a process can be forked, each run is a fork of one that has imported, and loaded, already.
SERVER = """
import json, os, sys
from pathlib import Path
import torch
from runtime.cache import encode
from runtime.cli import main
from runtime.families.registry import load_family
root, log, base = sys.argv[1:]
original = encode.encode
def noted(family, encoders, config, wants, reads=None):
    if reads is not None:  # what is made again for the evidence has none
        with open(log, "a", encoding="utf-8") as file:
            file.write(" ".join([*encode.loaded(encoders), *(want.folder for want in wants)]) + "\\n")
    return original(family, encoders, config, wants, reads)
encode.encode = noted
def run(number):
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{name}{number}", os.O_WRONLY | os.O_CREAT), stream)
    return main(["cache", "--json", "--workspace", root])
where = {"text_device": "cpu", "vae_device": "cpu", "text_dtype": torch.float32, "vae_dtype": torch.float32}
forks = hasattr(os, "fork")
if forks:
    load_family(Path(base)).load_encoders(Path(base), **where)
for line in sys.stdin:
    number = int(line)
    pid = os.fork() if forks else 0
    if pid == 0:
        if not forks:
            print(os.getpid(), flush=True)
        code = run(number)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(pid, flush=True)
    Path(f"{log}.code{number}").write_text(str(os.waitpid(pid, 0)[1]))
"""


class Command:
    """`finetune cache`, started again and again."""

    def __init__(self, workspace: Workspace, log: Path) -> None:
        self.line = [sys.executable, "-c", SERVER, str(workspace.root), str(log), str(BASE)]
        self.log, self.number, self.pid = log, 0, 0
        self.server: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if self.server is None or self.server.poll() is not None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.close()
            self.server = subprocess.Popen(self.line, env=environment, **pipes)
        self.number += 1
        assert self.server.stdin is not None and self.server.stdout is not None
        print(self.number, file=self.server.stdin, flush=True)
        self.pid = int(self.server.stdout.readline())

    def said(self, stream: str) -> str:
        return Path(f"{self.log}.{stream}{self.number}").read_text(encoding="utf-8")

    def runs(self) -> bool:
        assert self.server is not None
        return self.server.poll() is None and not Path(f"{self.log}.code{self.number}").exists()

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.runs():
            assert time.monotonic() < deadline, self.said("err")
            time.sleep(0.01)

    def kill(self) -> None:
        os.kill(self.pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows both end a process at once
        self.wait(30)

    def close(self) -> None:
        if self.server is not None:
            self.server.communicate()


@pytest.fixture
def pairs(tmp_path: Path) -> Workspace:
    folder, rng = tmp_path / "pairs", np.random.default_rng(3)
    for name in ("training_images", "control_images"):
        (folder / name).mkdir(parents=True)
    for index in range(SAMPLES):
        edit = shapes.edit(rng)
        shapes.draw(edit.control).save(folder / "control_images" / f"p{index:02d}.png")
        shapes.draw(edit.target).save(folder / "training_images" / f"p{index:02d}.png")
        caption = folder / "training_images" / f"p{index:02d}.txt"
        caption.write_text(f"{edit.prompt}, number {index}", encoding="utf-8")
    workspace = Workspace(tmp_path / "work")
    write_target(workspace, model=str(BASE), dataset=str(folder), device="cpu")
    dataset_command.scan(workspace)
    files.write_json(workspace.config_path, CONFIG)  # JSON is YAML
    return workspace


def job(workspace: Workspace, **changes: Any) -> build.Job:
    config = load.load_config(workspace.config_path).config
    cache = config.cache.model_copy(update=changes)
    return build.plan(workspace, resolve(workspace, config.model_copy(update={"cache": cache})).config)


def whole(planned: build.Job) -> set[str]:
    return {want.folder for want in planned.wants if not planned.store.fault(want)}


def prompted(planned: build.Job) -> set[str]:
    """Whose prompts need no encoding."""
    return whole(planned) | {want.folder for want in planned.wants if planned.store.has_part(want)}


def begun(log: Path) -> list[list[str]]:
    """Encoder and folders of each batch that was begun, of all runs."""
    return [line.split() for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def killed(command: Command, batch: int, part: float, step_s: float) -> tuple[str, float]:
    """Run until `batch` has been begun and `part` of `step_s`, the time of a batch, has passed, then kill.

    Returns what it said until then, and the time of a batch where two were seen.
    """
    before, times = len(begun(command.log)), []
    command.start()
    while len(times) < batch:
        assert command.runs(), command.said("err")
        time.sleep(0.003)
        times += [time.monotonic()] * (len(begun(command.log)) - before - len(times))
    time.sleep(part * step_s)
    command.kill()
    return command.said("err"), (times[1] - times[0] if batch > 1 else step_s)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_kills_cost_a_batch_each_and_the_end_is_whole(pairs: Workspace, tmp_path: Path) -> None:
    planned, log = job(pairs), tmp_path / "begun.txt"
    command = Command(pairs, log)
    rng = random.Random(11)
    done: dict[str, set[str]] = {"text_encoder": set(), "vae": set()}
    step_s = 0.05
    for number, batch in enumerate(KILLED_IN):
        said, step_s = killed(command, batch, rng.random(), step_s)
        assert f"encoding {SAMPLES - len(done['vae'])}: new" in said
        now = {"text_encoder": prompted(planned), "vae": whole(planned)}
        assert all(now[name] >= done[name] for name in done), f"kill {number} spoilt some"
        cost = {(b[0], folder) for b in begun(log) for folder in b[1:] if folder not in now[b[0]]}
        assert len(cost) <= BATCH, f"kill {number} cost {len(cost)} samples"
        done = now
        with pytest.raises(CacheError, match="is not finished"):
            build.open_for_fit(planned)
    assert BATCH * 3 <= sum(map(len, done.values())) < 2 * SAMPLES
    command.start()
    command.wait(240)
    summary = json.loads(command.said("out"))
    command.close()
    assert (summary["built"], summary["kept"]) == (SAMPLES - len(done["vae"]), len(done["vae"]))
    assert len(build.open_for_fit(planned)["entries"]) == SAMPLES
    assert list(planned.store.root.rglob("*.tmp")) == []
    assert pairs.evidence("07-cache-roundtrip") is not None
    same_as_uninterrupted(pairs, planned)


def same_as_uninterrupted(workspace: Workspace, planned: build.Job) -> None:
    other = job(workspace, cache_dir="uninterrupted")
    build.build(other, Progress(quiet=True))
    entries = [
        {e["key"]: (e["id"], e["split"]) for e in j.store.manifest()["entries"]} for j in (planned, other)
    ]
    assert entries[0] == entries[1] and len(entries[0]) == SAMPLES
    for want in planned.wants:
        one, two = planned.store.read(want.folder), other.store.read(want.folder)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert float((tensor - two[name]).norm() / tensor.norm()) <= TOLERANCE, (want.id, name)
