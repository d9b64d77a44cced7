"""However a run ends it leaves one whole -last-, also where the disk is full, and goes on from there."""

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime import files
from runtime.errors import DiskFullError, ResumeError
from runtime.progress import Progress
from runtime.training import checkpoints, loop, trainables

EMA = {"train.ema_decay": 0.5}
SAVED = (
    "pytorch_lora_weights.safetensors",
    "model.safetensors",
    "ema.safetensors",
    "optimizer.bin",
    "scheduler.bin",
    "random_states_0.pkl",
    "trainer_state.json",
)


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    original = loop._step

    def acting(session: Any, cursor: Any, window: Any) -> Any:
        if cursor.step == step - 1:
            act()
        return original(session, cursor, window)

    monkeypatch.setattr(loop, "_step", acting)


def fails(error: BaseException) -> Callable[..., None]:
    def act(*given: Any, **named: Any) -> None:
        raise error

    return act


def twice() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


ENDS: dict[str, tuple[dict[str, Any], Callable[[], object] | None, str, int]] = {
    "max steps": ({}, None, "completed", 6),
    "epochs": ({"train.max_train_steps": None, "train.num_epochs": 2}, None, "completed", 8),
    "Ctrl-C": ({}, lambda: signal.raise_signal(signal.SIGINT), "interrupted", 5),
    "SIGTERM": ({}, lambda: signal.raise_signal(signal.SIGTERM), "interrupted", 5),
    "Ctrl-C twice": ({}, twice, "interrupted", 4),
    "exception": ({}, fails(RuntimeError("a driver fell over")), "failed", 4),
    "out of memory": ({}, fails(torch.OutOfMemoryError("16 GiB")), "failed", 4),
}


@pytest.mark.parametrize("name", ENDS)
def test_each_end_leaves_one_last_of_its_step(lab: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    changes, act, state, step = ENDS[name]
    session = lab.launch(changes)
    if act is not None:
        before_step(monkeypatch, 5, act)
    with contextlib.suppress(KeyboardInterrupt, RuntimeError):
        loop.fit(session, Progress(quiet=True))
    document = files.read_json(session.run.path / "run.json")
    assert (document["state"], document["done_steps"]) == (state, step)
    (last,) = checkpoints.lasts(session.run.path)
    assert checkpoints.read_state(last)["step"] == step
    saves = files.read_json_lines(session.run.path / "saves.jsonl")
    of_the_end = [s for s in saves if s["event"] == "save" and s["kind"] == "last" and s["step"] == step]
    assert [line["path"] for line in of_the_end] == [last.name]
    assert of_the_end[0]["files"] == {
        item.name: {"size": item.stat().st_size, "sha256": files.file_digest(item)} for item in last.iterdir()
    }
    assert not list(session.run.path.glob(".*"))


@contextlib.contextmanager
def full_at(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> Iterator[None]:
    """No room for the file `name` of a checkpoint of step 6, as each library tells it."""
    marker = "-6-last" if kind == "last" else "-6."

    def refuse(path: Path) -> None:
        if path.name == name and marker in path.parent.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for place, function in ((checkpoints, "_write"), (files, "write_json")):
            original = getattr(place, function)

            def written(one: Any, other: Any, original: Any = original) -> None:
                refuse(other if isinstance(other, Path) else one)
                original(one, other)

            patch.setattr(place, function, written)
        import safetensors.torch

        save = safetensors.torch.save_file

        def saved(tensors: Any, path: Any, **named: Any) -> None:
            try:
                refuse(Path(path))
            except OSError:
                text = "Error while serializing: I/O error: No space left on device (os error 28)"
                raise safetensors.SafetensorError(text) from None
            save(tensors, path, **named)

        patch.setattr(safetensors.torch, "save_file", saved)
        patch.setattr("diffusers.loaders.lora_base.safetensors.torch.save_file", saved)
        yield


@pytest.mark.parametrize(
    ("kind", "name"), [("plain", SAVED[0]), *(("last", name) for name in SAVED)], ids=lambda text: text
)
def test_a_full_disk_leaves_the_checkpoint_before_whole(
    lab: Any, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    whole = lab.fit(EMA)
    session = lab.launch(EMA)
    with full_at(monkeypatch, kind, name), pytest.raises(DiskFullError) as caught:
        loop.fit(session, Progress(quiet=True))
    run = session.run.path
    assert caught.value.message == (
        "the disk is full: what step 6 left could not be written; v1/checkpoint-last-0-3-last is whole"
    )
    assert caught.value.remedy == "free some space, then finetune fit --resume latest"
    document = files.read_json(run / "run.json")
    assert (document["state"], document["outcome"]) == ("failed", "DiskFullError")
    assert caught.value.message in document["reason"]
    (last,) = checkpoints.lasts(run)
    assert not checkpoints.unusable(last) and checkpoints.read_state(last)["step"] == 3
    assert not list(run.glob(".*"))  # what was half written takes no room
    resumed = lab.fit(EMA, resume="latest")
    assert_same(lab.adapter(whole.path), lab.adapter(resumed.path))


def test_a_disk_too_full_for_the_first_checkpoint_or_even_for_run_json(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = lab.launch()
    full = fails(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(type(session.run), "metrics", full)
    monkeypatch.setattr(type(session.run), "write", full)
    with pytest.raises(DiskFullError, match="v0 has no checkpoint to go on from") as caught:
        loop.fit(session, Progress(quiet=True))
    assert caught.value.remedy == "free some space, then finetune fit"


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("step", [3, 6])
@pytest.mark.parametrize("where", ["save_plain", "_measure", "save_last"])
def test_a_checkpoint_that_broke_off_is_made_up_for_by_the_resume(
    lab: Any, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    """Also the last one: all steps are done, and without it the run could neither pass nor go on."""
    whole = lab.fit()
    session = lab.launch()
    place: Any = loop if where == "_measure" else checkpoints
    original, broken = getattr(place, where), []

    def breaks(*given: Any, **named: Any) -> Any:
        if done(session.run.path) == step and not broken:
            broken.append(step)
            raise RuntimeError("a driver fell over")
        return original(*given, **named)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="fell over"):
        patch.setattr(place, where, breaks)
        loop.fit(session, Progress(quiet=True))
    assert_completed_alike(lab, whole.path, session.run.path)


def test_a_kill_after_the_last_save_and_before_the_end_can_be_resumed(lab: Any) -> None:
    whole, killed = lab.fit(), lab.fit()
    document = {**killed.document, "state": "running", "outcome": "", "reason": "", "pid": 2**22 + 5}
    files.write_json(killed.path / "run.json", {**document, "ended_at": None})
    assert_completed_alike(lab, whole.path, killed.path)


def assert_completed_alike(lab: Any, whole: Path, broken: Path) -> None:
    """The resume of `broken` ends as `whole` did, with nothing of its records missing."""
    resumed = lab.fit(resume="latest").path
    assert_same(lab.adapter(whole), lab.adapter(resumed))
    assert files.read_json(resumed / "run.json")["state"] == "completed"
    probes = [line for run in (broken, resumed) for line in files.read_json_lines(run / "probe.jsonl")]
    assert {line["step"] for line in probes} == {0, 3, 6}
    assert set(names(broken) + names(resumed)) == {"checkpoint-0-3", "checkpoint-1-6"}
    assert done(broken) + done(resumed) == 6
    assert len(checkpoints.lasts(resumed)) == 1
    with pytest.raises(ResumeError, match="is the end of a finished run"):
        lab.launch(resume="latest")


def done(run: Path) -> int:
    return len(files.read_json_lines(run / "metrics.jsonl"))


def test_nothing_but_tensors_and_numbers_is_unpickled(lab: Any, tmp_path: Path) -> None:
    session = lab.launch()
    loop.fit(session, Progress(quiet=True))
    (last,) = checkpoints.lasts(session.run.path)
    told = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(told),)

    for name in ("optimizer.bin", "scheduler.bin"):
        kept = (last / name).read_bytes()
        torch.save({"state": Evil()}, last / name)
        with pytest.raises(Exception, match="Weights only load failed"):
            checkpoints.restore(last, session.trained)
        (last / name).write_bytes(kept)
    assert not told.exists()
    checkpoints.restore(last, session.trained)


def test_the_best_of_an_ancestor_outlives_its_resume(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run prunes its own folder alone, and counts its own best; readers take the best of all."""
    from runtime.inference import validate

    changes = {"train.checkpointing_steps": 1, "train.checkpoints_total_limit": 1}
    measured = {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.35, 6: 0.9}
    original = loop._probe
    monkeypatch.setattr(
        loop, "_probe", lambda s, step: {**original(s, step), "holdout_mean": measured.get(step, 1.0)}
    )
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        before_step(patch, 4, fails(RuntimeError("stopped")))
        loop.fit(lab.launch(changes), Progress(quiet=True))
    run = lab.fit(changes, resume="latest")
    assert names(lab.project / "v0") == ["checkpoint-0-1"]
    assert names(run.path) == ["checkpoint-0-4"]
    assert run.document["best"] == {"step": 4, "checkpoint": "checkpoint-0-4", "holdout_loss": 0.3}
    best = validate.find_checkpoint(lab.project, "best", lab.root)
    assert best == lab.project / "v0" / "checkpoint-0-1"
    assert load_file(best / trainables.WEIGHTS)


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoints.plains(run)]
