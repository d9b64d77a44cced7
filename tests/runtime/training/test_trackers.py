"""Trackers get the run's numbers; what happens to them never happens to the fit."""

import gc
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image

from runtime.config.load import parse
from runtime.config.model import Config, Tracker
from runtime.errors import ConfigError
from runtime.training import trackers

METRICS = {
    "step": 7,
    "epoch": 2,
    "loss": 0.123456789,
    "loss_ema": 0.5,
    "lr": 1e-4,
    "grad_norm": 3.0,
    "clipped": True,
    "step_s": 0.25,
    "tokens": 96,
    "samples": ["a"],
    "sigmas": [0.5],
    "device": "cpu",
    "alloc_gib": 0.0,
    "rss_gib": 0.75,
}
PROBE = {"step": 7, "items": [], "train_mean": 0.25, "holdout_mean": None}


def config(**logging: Any) -> Config:
    return parse(
        {
            "model": {"pretrained_model_name_or_path": "external:model"},
            "train": {"max_train_steps": 1},
            "logging": logging,
        }
    )


def events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run / "tensorboard")).Reload()


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    found = events(run)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


class Recorder(GeneralTracker):  # type: ignore[misc]
    """Stands for a service's package."""

    name = "wandb"
    requires_logging_directory = False
    main_process_only = False
    calls: list[tuple[Any, ...]] = []  # noqa: RUF012
    breaks_at = ""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.note("init", options)

    @property
    def tracker(self) -> None:
        return None

    def note(self, name: str, *given: Any) -> None:
        Recorder.calls.append((name, *given))
        print("chatter of a package")
        if name == Recorder.breaks_at:
            raise ConnectionError("no route\nto host")

    def start(self) -> None:
        self.note("start", sys.stdin.isatty())

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.note("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **given: Any) -> None:
        self.note("log", step, values)

    def log_images(self, values: dict[str, Any], step: int | None = None, **given: Any) -> None:
        self.note("images", step, values)

    def finish(self) -> None:
        self.note("finish")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    Recorder.calls, Recorder.breaks_at = [], ""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Recorder)
    monkeypatch.setattr(trackers, "absent", lambda logging: [])
    return Recorder


def test_tensorboard_is_the_default_and_holds_what_was_logged(tmp_path: Path) -> None:
    said: list[str] = []
    with trackers.opened(config(), tmp_path, said.append) as followed:
        followed.step(METRICS)
        followed.step({**METRICS, "step": 8, "loss": None, "loss_ema": float("nan")})
        followed.probe(PROBE)
        followed.images(8, {"held/a": Image.new("RGB", (8, 4), (250, 0, 0))})
    assert said == []
    found = scalars(tmp_path)
    assert found["train/loss"] == [(7, float(np.float32(0.123456789)))], "a step left out has no loss"
    assert found["train/lr"] == [(7, float(np.float32(1e-4))), (8, float(np.float32(1e-4)))]
    assert found["train/clipped"] == [(7, 1.0), (8, 1.0)]
    assert found["probe/train_mean"] == [(7, 0.25)]
    fields = (
        "epoch",
        "loss",
        "loss_ema",
        "lr",
        "grad_norm",
        "clipped",
        "step_s",
        "tokens",
        "alloc_gib",
        "rss_gib",
    )
    assert set(found) == {f"train/{name}" for name in fields} | {"probe/train_mean"}
    (picture,) = events(tmp_path).Images("held/a")
    assert (picture.step, picture.width, picture.height) == (8, 8, 4)
    assert "model.lora.r: 16" in str(events(tmp_path).Tensors("config/text_summary")[0].tensor_proto)
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


def test_none_is_none(tmp_path: Path) -> None:
    with trackers.opened(config(report_to=[]), tmp_path, print) as followed:
        followed.step(METRICS)
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_a_fit_are_those_of_its_record_also_after_a_resume(lab: Any) -> None:
    from runtime import files
    from runtime.progress import Progress
    from runtime.training import loop

    def stopping(line: dict[str, Any]) -> str:
        if line["step"] == 3:
            raise RuntimeError("stopped")
        return ""

    changes = {"train.max_train_steps": 4, "train.checkpointing_steps": 2}
    opened = lab.launch(changes)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr(loop, "_live", stopping)
        loop.fit(opened, Progress(quiet=True))
    second = lab.fit(changes, resume="latest")
    for run, steps, probed in ((opened.run, [1, 2, 3], [0, 2]), (second, [4], [4])):
        lines = files.read_json_lines(run.path / "metrics.jsonl")
        found = scalars(run.path)
        for name in ("loss", "loss_ema", "lr", "grad_norm", "step_s", "rss_gib"):
            expected = [(line["step"], float(np.float32(line[name]))) for line in lines]
            assert found[f"train/{name}"] == expected and [step for step, _ in expected] == steps
        probes = files.read_json_lines(run.path / "probe.jsonl")
        for name in ("train_mean", "holdout_mean"):
            expected = [(line["step"], float(np.float32(line[name]))) for line in probes]
            assert found[f"probe/{name}"] == expected and [step for step, _ in expected] == probed


def test_pictures_of_a_fit_are_shown_by_name_and_step(lab: Any) -> None:
    from PIL import Image

    run = lab.fit({"train.max_train_steps": 2, "train.checkpointing_steps": 2, "validation.sample_steps": 2})
    painted = run.document["samples"]["painted"]
    assert [entry["step"] for entry in painted] == [0, 2]
    tags = events(run.path).Tags()["images"]
    assert len(tags) == len(painted[0]["pictures"]) == 3
    for tag in tags:
        found = events(run.path).Images(tag)
        assert [event.step for event in found] == [0, 2]
        path = run.path / "samples" / f"000002-{tag.removeprefix('samples/')}.png"
        with Image.open(path) as own, Image.open(io.BytesIO(found[-1].encoded_image_string)) as shown:
            assert np.array_equal(np.asarray(own.convert("RGB")), np.asarray(shown.convert("RGB")))


def test_a_picture_that_is_gone_is_only_a_warning(recorder: type[Recorder], tmp_path: Path) -> None:
    said: list[str] = []
    with trackers.opened(config(report_to=["wandb"]), tmp_path, said.append) as followed:
        followed.painted({"step": 3, "pictures": ["samples/000003-a.png"]})
    assert len(said) == 1 and said[0].startswith("warning: the trackers get no pictures of step 3: ")
    assert recorder.calls[-1] == ("finish",)


@pytest.mark.parametrize("named", [["tensorboard"], ["mlflow", "tensorboard"]])
def test_an_absent_tracker_that_the_config_names_is_refused(
    monkeypatch: pytest.MonkeyPatch, named: list[str]
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{', '.join(named)} is not installed") as caught:
        trackers.refuse_absent(config(report_to=named).logging)
    assert caught.value.remedy.startswith(f"pip install {' '.join(named)},")


def test_pips_name_where_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        trackers.refuse_absent(config(report_to=["comet_ml"]).logging)
    assert caught.value.remedy.startswith("pip install comet-ml,")


def test_an_absent_default_is_noted_and_the_fit_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    trackers.refuse_absent(config().logging)
    said: list[str] = []
    with trackers.opened(config(), tmp_path, said.append) as followed:
        followed.step(METRICS)
    assert len(said) == 1 and said[0].startswith("note: no tensorboard here")
    assert list(tmp_path.iterdir()) == []


def test_a_launch_is_refused_before_the_denoiser_is_loaded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        lab.launch({"logging.report_to": ["wandb"]})
    assert not lab.project.exists()


def test_a_tracker_that_breaks_in_a_fit_leaves_its_record_alone(
    lab: Any, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.breaks_at = "log"
    run = lab.fit({"logging.report_to": ["wandb"]})
    assert run.document["state"] == "completed" and run.document["done_steps"] == 6
    assert [call[0] for call in recorder.calls] == ["init", "start", "config", "log"]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        config(report_to=["tensorbord"])
    assert all(name in caught.value.message for name in ("tensorbord", "'tensorboard'", "'wandb'"))


def test_the_known_are_accelerates() -> None:
    from typing import get_args

    assert set(get_args(Tracker)) == set(LOGGER_TYPE_TO_CLASS)


def test_a_service_is_called_with_what_it_knows(
    recorder: type[Recorder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "v3"
    with trackers.opened(config(report_to=["wandb", "wandb"]), run, print) as followed:
        followed.step(METRICS)
        followed.images(7, {"a": Image.new("RGB", (2, 2))})
    names = [call[0] for call in recorder.calls]
    assert names == ["init", "start", "config", "log", "images", "finish"]
    assert recorder.calls[0][1] == {"run_name": "edit-lora", "name": "v3", "dir": str(run)}
    assert recorder.calls[1][1] is False, "a login may not ask"
    assert recorder.calls[2][1]["train.max_train_steps"] == 1
    assert recorder.calls[3][1:] == (7, {f"train/{k}": v for k, v in trackers.numbers(METRICS).items()})
    assert isinstance(recorder.calls[4][2]["a"], list)
    out, err = capsys.readouterr()
    assert out == "" and "chatter of a package" in err, "stdout is for data"


@pytest.mark.parametrize("where", ["init", "start", "config", "log", "images", "finish"])
def test_one_that_fails_is_off_with_one_warning(recorder: type[Recorder], tmp_path: Path, where: str) -> None:
    recorder.breaks_at = where
    said: list[str] = []
    with trackers.opened(config(report_to=["wandb", "tensorboard"]), tmp_path, said.append) as followed:
        for step in (1, 2):
            followed.step({**METRICS, "step": step})
            followed.images(step, {"a": Image.new("RGB", (2, 2))})
    (line,) = said
    assert line.startswith("warning: wandb is off from here on, ConnectionError: no route; metrics.jsonl")
    assert [call[0] for call in recorder.calls].count(where) == 1 and recorder.calls[-1][0] == where
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [1, 2], "the other one goes on"


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_turns_tensorboard_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    monkeypatch.setattr(threading, "excepthook", lambda given: None)  # the package's own thread dies of it
    said: list[str] = []
    with trackers.opened(config(), tmp_path, said.append) as followed:
        followed.step(METRICS)

        def full(self: Any, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(RecordWriter, "write", full)
        for step in range(8, 40):
            followed.step({**METRICS, "step": step})
    for thread in threading.enumerate():
        if type(thread).__name__ == "_AsyncWriterThread":
            thread.join(10)
    gc.collect()  # the package leaves its file open
    (line,) = said
    assert "tensorboard is off from here on, OSError: [Errno 28] No space left on device" in line


def test_a_launchers_variables_make_no_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun, SLURM with Open MPI, and accelerate launch set them: with them accelerate would wait for others."""
    import torch

    given = {
        "LOCAL_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "ACCELERATE_TORCH_DEVICE": "cuda",
        "ACCELERATE_CPU_AFFINITY": "1",
        "SLURM_PROCID": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def waiting(*given: Any, **options: Any) -> None:
        raise AssertionError("this would wait for the other processes")

    monkeypatch.setattr(torch.distributed, "init_process_group", waiting)
    PartialState._reset_state()
    try:
        said: list[str] = []
        with trackers.opened(config(), tmp_path, said.append) as followed:
            followed.step(METRICS)
        assert said == [] and scalars(tmp_path)["train/epoch"] == [(7, 2.0)]
        assert not torch.distributed.is_initialized()
        assert (PartialState().num_processes, PartialState().device.type) == (1, "cpu")
        assert {name: os.environ[name] for name in given} == given, "the environment is as it was"
    finally:
        PartialState._reset_state()


def test_no_key_of_a_service_gets_into_the_record(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "c0ffee" * 7)
    run = lab.launch().run
    assert "c0ffee" not in json.dumps(run.document) + (run.path / "config.yaml").read_text(encoding="utf-8")


def test_flat() -> None:
    assert trackers.flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": "[1, 2]", "d": "None"}
