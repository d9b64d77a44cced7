"""SIGKILL while a cache is filled: each rerun goes on, and none costs more than the batch at hand."""

import json
import os
import random
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
# The command itself; each batch is noted as it begins, so that what a kill cost can be counted.
RUN = """
import sys
from runtime.cache import encode
from runtime.cli import main
original = encode.encode
def noted(family, encoders, config, wants, reads=None):
    if reads is not None:  # what is made again for the evidence has none
        with open(sys.argv[2], "a", encoding="utf-8") as log:
            log.write(" ".join([*encode.loaded(encoders), *(want.folder for want in wants)]) + "\\n")
    return original(family, encoders, config, wants, reads)
encode.encode = noted
sys.exit(main(["cache", "--json", "--workspace", sys.argv[1]]))
"""


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
    base = Path(demo.__file__).parent / "base"
    write_target(workspace, model=str(base), dataset=str(folder), device="cpu")
    dataset_command.scan(workspace)
    files.write_json(workspace.config_path, CONFIG)  # JSON is YAML
    return workspace


def job(workspace: Workspace, **changes: Any) -> build.Job:
    config = load.load_config(workspace.config_path).config
    cache = config.cache.model_copy(update=changes)
    return build.plan(workspace, resolve(workspace, config.model_copy(update={"cache": cache})).config)


def start(workspace: Workspace, log: Path) -> "subprocess.Popen[str]":
    line = [sys.executable, "-c", RUN, str(workspace.root), str(log)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    )


def whole(planned: build.Job) -> set[str]:
    return {want.folder for want in planned.wants if not planned.store.fault(want)}


def prompted(planned: build.Job) -> set[str]:
    """Whose prompts need no encoding."""
    return whole(planned) | {want.folder for want in planned.wants if planned.store.has_part(want)}


def begun(log: Path) -> list[list[str]]:
    """Encoder and folders of each batch that was begun, of all runs."""
    return [line.split() for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def killed(workspace: Workspace, log: Path, batch: int, part: float, step_s: float) -> tuple[str, float]:
    """Run until `batch` has been begun and `part` of `step_s`, the time of a batch, has passed, then kill.

    Returns what it said until then, and the time of a batch where two were seen.
    """
    before, times = len(begun(log)), []
    process = start(workspace, log)
    while len(times) < batch:
        assert process.poll() is None, process.communicate()
        time.sleep(0.003)
        times += [time.monotonic()] * (len(begun(log)) - before - len(times))
    time.sleep(part * step_s)
    process.kill()
    return process.communicate()[1], (times[1] - times[0] if batch > 1 else step_s)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_kills_cost_a_batch_each_and_the_end_is_whole(pairs: Workspace, tmp_path: Path) -> None:
    planned, log = job(pairs), tmp_path / "begun.txt"
    rng = random.Random(11)
    done: dict[str, set[str]] = {"text_encoder": set(), "vae": set()}
    step_s = 0.05
    for number, batch in enumerate(KILLED_IN):
        said, step_s = killed(pairs, log, batch, rng.random(), step_s)
        assert f"encoding {SAMPLES - len(done['vae'])}: new" in said
        now = {"text_encoder": prompted(planned), "vae": whole(planned)}
        assert all(now[name] >= done[name] for name in done), f"kill {number} spoilt some"
        cost = {(b[0], folder) for b in begun(log) for folder in b[1:] if folder not in now[b[0]]}
        assert len(cost) <= BATCH, f"kill {number} cost {len(cost)} samples"
        done = now
        with pytest.raises(CacheError, match="is not finished"):
            build.open_for_fit(planned)
    assert BATCH * 3 <= sum(map(len, done.values())) < 2 * SAMPLES
    last = start(pairs, log)
    out, err = last.communicate(timeout=240)
    assert last.returncode == 0, err
    summary = json.loads(out)
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
