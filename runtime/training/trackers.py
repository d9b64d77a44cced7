"""The run's numbers for TensorBoard, or any other of accelerate's trackers (`logging.report_to`).

metrics.jsonl and probe.jsonl are the record; a tracker is a copy for the eye. So one that fails is left
out with a warning and never stops a fit. TensorBoard's files lie in <run>/tensorboard/.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config.model import Config, Logging
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

INSTALL = {"comet_ml": "comet-ml"}  # where pip's name is another than the module's
# From these accelerate concludes that several processes train, and would wait for the others.
LAUNCHERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE",
             "MV2_COMM_WORLD_SIZE", "FORK_LAUNCHED")  # fmt: skip
TOLD = "metrics.jsonl has every number"

Say = Callable[[str], None]


def absent(logging: Logging) -> list[str]:
    """Trackers of `report_to` whose package is not installed."""
    return [name for name in logging.report_to if find_spec(name) is None]


def refuse_absent(logging: Logging) -> None:
    """Before anything is loaded. Raises ConfigError for a missing tracker that config.yaml names itself."""
    missing = absent(logging)
    if missing and "report_to" in logging.model_fields_set:
        packages = " ".join(INSTALL.get(name, name) for name in missing)
        raise ConfigError(
            f"logging.report_to: {', '.join(missing)} is not installed",
            remedy=f"pip install {packages}, or take it out of logging.report_to in config.yaml",
        )


@contextlib.contextmanager
def opened(config: Config, run: Path, say: Say) -> Iterator["Trackers"]:
    """The trackers of a run, from its start to its end. A default one that is not installed is noted."""
    trackers = Trackers(run=run, say=say)
    missing = absent(config.logging)
    for name in dict.fromkeys(config.logging.report_to):
        if name in missing:
            say(f"note: no {name} here, so none is written; {TOLD} (pip install {INSTALL.get(name, name)})")
        else:
            trackers.start(name, config)
    try:
        yield trackers
    finally:
        trackers.finish()


@dataclass(slots=True, kw_only=True)
class Trackers:
    """Each call goes to every tracker that still works."""

    run: Path
    say: Say
    active: dict[str, Any] = field(default_factory=dict)

    def start(self, name: str, config: Config) -> None:
        project = config.logging.tracker_project_name
        with self._guarded(name):
            tracker = _made(name, project, self.run)
            tracker.start()
            self.active[name] = tracker
            settings = flat(config.model_dump(mode="json"))
            if name == "tensorboard":  # its own way makes a run of its own beside the real one
                tracker.log({"config": "\n".join(f"    {k}: {v}" for k, v in settings.items())}, step=0)
            else:
                tracker.store_init_configuration(settings)

    def step(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, under its own step also after a resume."""
        self._log({f"train/{name}": value for name, value in numbers(line).items()}, line["step"])

    def probe(self, line: Mapping[str, Any]) -> None:
        """A line of probe.jsonl: its means."""
        means = {name: line.get(name) for name in ("train_mean", "holdout_mean")}
        self._log({f"probe/{name}": value for name, value in numbers(means).items()}, line["step"])

    def images(self, step: int, pictures: "Mapping[str, Image.Image]") -> None:
        """What was painted at `step`, by name; left out by trackers that take no pictures from accelerate."""
        for name, tracker in list(self.active.items()):
            if hasattr(tracker, "log_images"):
                with self._guarded(name):
                    options = {"dataformats": "NHWC"} if name == "tensorboard" else {}
                    tracker.log_images(_shaped(name, pictures), step=step, **options)

    def painted(self, line: Mapping[str, Any]) -> None:
        """An entry of run.json's `samples.painted`: each picture by its name, the same at every step."""
        if not self.active:
            return
        from PIL import Image

        pictures = {}
        try:
            for name in line["pictures"]:
                with Image.open(self.run / name) as opened:
                    pictures[f"samples/{Path(name).stem.partition('-')[2]}"] = opened.copy()
        except OSError as error:
            self.say(f"warning: the trackers get no pictures of step {line['step']}: {error}")
        else:
            self.images(line["step"], pictures)

    def finish(self) -> None:
        for name, tracker in list(self.active.items()):
            with self._guarded(name):
                tracker.finish()
        self.active.clear()

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, tracker in list(self.active.items()):
            with self._guarded(name):
                tracker.log(values, step=step)

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            with _aside():
                yield
        except Exception as error:  # of any package, on a network or a full disk; the fit goes on without it
            self.active.pop(name, None)
            first = (str(error).splitlines() or ["no message"])[0]
            self.say(f"warning: {name} is off from here on, {type(error).__name__}: {first}; {TOLD}")


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record but its step; true and false as 1 and 0."""
    return {
        name: value if isinstance(value, float) else int(value)
        for name, value in line.items()
        if isinstance(value, int | float) and name != "step" and isfinite(value)
    }


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """A config by dotted keys; lists as text."""
    if isinstance(value, dict):
        under = [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
        return {key: leaf for path, item in under for key, leaf in flat(item, path).items()}
    return {name: value if isinstance(value, bool | int | float | str) else str(value)}


def _made(name: str, project: str, run: Path) -> Any:
    _single_process()
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": str(run)},
        "wandb": {"run_name": project, "name": run.name, "dir": str(run)},
        "trackio": {"run_name": project, "name": run.name},
        "mlflow": {"experiment_name": project, "run_name": run.name},
        "aim": {"run_name": project, "logging_dir": str(run)},
        "dvclive": {"run_name": project, "dir": str(run / "dvclive")},
        "swanlab": {"run_name": project, "experiment_name": run.name, "logdir": str(run / "swanlab")},
    }
    return kind(**options.get(name, {"run_name": project}))


def _single_process() -> None:
    """Make the state that accelerate's trackers need; one that is there already is left alone.

    On the CPU and without a launcher's variables it makes no process group and looks at no device.
    """
    from accelerate import PartialState

    hidden = {n: v for n, v in os.environ.items() if n in LAUNCHERS or n.startswith("ACCELERATE_")}
    for name in hidden:
        del os.environ[name]
    try:
        PartialState(cpu=True)
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Stdout is for data and no command asks: what a tracker prints goes to stderr, and a login finds no terminal."""
    before = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing, contextlib.redirect_stdout(sys.stderr):
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def _shaped(name: str, pictures: "Mapping[str, Image.Image]") -> dict[str, Any]:
    """As that tracker's `log_images` takes them."""
    if name in ("wandb", "swanlab"):
        return {key: [picture] for key, picture in pictures.items()}
    if name == "tensorboard":
        import numpy as np

        return {key: np.asarray(picture.convert("RGB"))[None] for key, picture in pictures.items()}
    return dict(pictures)
