"""Rolling, pruning and finding checkpoints, on folders without tensors."""

from pathlib import Path
from typing import Any

import pytest

from runtime import files
from runtime.errors import ResumeError
from runtime.training import checkpoints
from runtime.training.record import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    path = tmp_path / "outputs" / "edit-lora" / "v0"
    path.mkdir(parents=True)
    return Run(path=path)


class Nothing:
    """A trained thing whose files are empty."""

    def save(self, folder: Path) -> None:
        (folder / "pytorch_lora_weights.safetensors").write_bytes(b"lora")

    def save_state(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"state")

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def trained() -> Any:
    thing: Any = Nothing()
    return checkpoints.Trained(adapter=thing, optimizer=thing, schedule=thing)


def state(step: int) -> dict[str, Any]:
    return {"run_id": "r", "step": step, "epoch": step // 10, "loss_ema": [0.0, 0.0], "fingerprint": {}}


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_order_is_that_of_the_steps_not_of_the_letters(run: Run, trained: Any) -> None:
    for step in (5, 100, 20):
        checkpoints.save_plain(run, trained, step=step, epoch=step // 10)
    for name in (
        "checkpoint-1",
        "checkpoint-1-2-3",
        "checkpoint-last-1-2",
        "xcheckpoint-1-2",
        ".checkpoint-0-7.tmp",
    ):
        (run.path / name).mkdir()
    (run.path / "checkpoint-0-9").write_text("a file", encoding="utf-8")
    assert names(checkpoints.plains(run.path)) == ["checkpoint-0-5", "checkpoint-2-20", "checkpoint-10-100"]


def test_last_rolls_forward(run: Run, trained: Any) -> None:
    for step in (5, 10, 15):
        path = checkpoints.save_last(run, trained, state(step))
        assert checkpoints.lasts(run.path) == [path]
        assert checkpoints.read_state(path)["schema"] == "trainer-state/1"
    lines = files.read_json_lines(run.path / "saves.jsonl")
    assert [(line["event"], line["step"]) for line in lines] == [
        ("save", 5),
        ("save", 10),
        ("prune", 5),
        ("save", 15),
        ("prune", 10),
    ]
    assert set(lines[0]["files"]) == {
        "pytorch_lora_weights.safetensors",
        "model.safetensors",
        "optimizer.bin",
        "scheduler.bin",
        "random_states_0.pkl",
        "trainer_state.json",
    }


def test_the_new_last_stands_before_the_old_one_goes(
    run: Run, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save_last(run, trained, state(5))
    monkeypatch.setattr(checkpoints, "remove", lambda *given: pytest.fail("killed here"))
    with pytest.raises(pytest.fail.Exception):
        checkpoints.save_last(run, trained, state(10))
    assert len(checkpoints.lasts(run.path)) == 2


def test_a_kill_while_a_checkpoint_is_filled_leaves_none_of_that_name(
    run: Run, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save_last(run, trained, state(5))

    def killed(self: Nothing, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"sta")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Nothing, "save_state", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save_last(run, trained, state(10))
    assert names(checkpoints.lasts(run.path)) == ["checkpoint-last-0-5-last"]
    path = checkpoints.save_last(run, trained, state(10))  # what lay there half filled does not hinder
    assert (path / "model.safetensors").read_bytes() == b"state"


def test_saving_the_same_step_twice(run: Run, trained: Any) -> None:
    for _ in range(2):
        path = checkpoints.save_last(run, trained, state(5))
    assert checkpoints.lasts(run.path) == [path]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [1, 2, 3, 4]),
        (9, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (2, "checkpoint-0-1", [1, 4]),
        (2, "checkpoint-0-4", [3, 4]),
        (1, None, [4]),
    ],
)
def test_prune_keeps_the_newest_and_the_best(
    run: Run, trained: Any, limit: int | None, best: str | None, kept: list[int], conforms: Any
) -> None:
    for step in (1, 2, 3, 4):
        checkpoints.save_plain(run, trained, step=step, epoch=0)
    checkpoints.prune(run, limit, best)
    assert names(checkpoints.plains(run.path)) == [f"checkpoint-0-{step}" for step in kept]
    pruned = [line for line in files.read_json_lines(run.path / "saves.jsonl") if line["event"] == "prune"]
    assert sorted([line["step"] for line in pruned] + kept) == [1, 2, 3, 4]
    for line in pruned:
        conforms(line, "saves")


def test_pruning_leaves_last_and_foreign_folders_alone(run: Run, trained: Any) -> None:
    for step in (1, 2, 3):
        checkpoints.save_plain(run, trained, step=step, epoch=0)
    checkpoints.save_last(run, trained, state(3))
    (run.path / "my notes").mkdir()
    checkpoints.prune(run, 1, None)
    assert {path.name for path in run.path.iterdir()} == {
        "checkpoint-0-3",
        "checkpoint-last-0-3-last",
        "my notes",
        "saves.jsonl",
    }


def test_find_latest_takes_the_newest_full_run_that_has_one(tmp_path: Path, trained: Any) -> None:
    project = tmp_path / "outputs" / "p"
    for number, kind in enumerate(("full", "full", "full", "smoke")):
        run = Run(path=project / f"v{number}", document={"kind": kind})
        run.path.mkdir(parents=True)
        run.write()
        if number != 2:
            checkpoints.save_last(run, trained, state(number + 1))
    assert checkpoints.find(project, "latest", tmp_path).parent.name == "v1"


@pytest.mark.parametrize("outputs", ["inside", "outside"])
def test_a_plain_checkpoint_is_no_resume_point(tmp_path: Path, trained: Any, outputs: str) -> None:
    """`logging.output_dir` may lie outside of the workspace."""
    root = tmp_path / "work"
    run = Run(path=(root if outputs == "inside" else tmp_path) / "outputs" / "p" / "v0")
    run.path.mkdir(parents=True)
    plain = checkpoints.save_plain(run, trained, step=5, epoch=0)
    with pytest.raises(ResumeError, match="holds the adapter alone") as caught:
        checkpoints.find(run.path.parent, str(plain), root)
    assert caught.value.remedy == "finetune fit --resume latest"
    checkpoints.save_last(run, trained, state(5))
    with pytest.raises(ResumeError) as caught:
        checkpoints.find(run.path.parent, str(plain), root)
    assert caught.value.remedy.endswith("v0/checkpoint-last-0-5-last")


@pytest.mark.parametrize("name", [*checkpoints.STATE_FILES, checkpoints.TRAINER_STATE])
def test_a_last_that_lacks_a_file_is_refused_by_its_name(run: Run, trained: Any, name: str) -> None:
    path = checkpoints.save_last(run, trained, state(5))
    (path / name).unlink()
    with pytest.raises(ResumeError, match=name.replace(".", r"\.")):
        checkpoints.read_state(path)


def test_differences_are_told_one_a_line() -> None:
    then = {"train.seed": 42, "data.batch_size": 1, "same": [1, 2]}
    checkpoints.refuse_differences(then, {"train.seed": 42, "same": [1, 2]})
    with pytest.raises(ResumeError) as caught:
        checkpoints.refuse_differences(
            then, {"train.seed": 7, "data.batch_size": 2, "same": [1, 2], "new": 1}
        )
    assert caught.value.message.splitlines()[1:] == [
        "  train.seed: 42 then, 7 now",
        "  data.batch_size: 1 then, 2 now",
        "  new: None then, 1 now",
    ]
