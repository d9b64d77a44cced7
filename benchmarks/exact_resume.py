"""Whether a run that is stopped and resumed is the run left alone, on this machine's accelerator.

    python benchmarks/exact_resume.py [--device auto] [--steps 8] [--stop 5] [--only CASE ...]

Trains the embedded base on its own data, whole and in two parts, with `train.deterministic` on and off, and compares
the adapters: equal bits, else the largest difference relative to the largest weight; before that, a run with pictures
painted in between against one without. Then each optimizer of
`runtime.training.optimizers.PROVEN` on weights of 320 x 320, whole and restored. One JSON object a line.
"""

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from runtime import demo, device
from runtime.cache import build
from runtime.commands.dataset import scan
from runtime.commands.init import write_target
from runtime.config import load
from runtime.config.learning import Optimizer
from runtime.config.resolve import resolve
from runtime.errors import UserError
from runtime.progress import Progress
from runtime.training import checkpoints, loop, optimizers, session
from runtime.workspace import Workspace

HERE = Path(demo.__file__).parent
RECIPE: dict[str, Any] = {
    "model": {"pretrained_model_name_or_path": "external:model", "lora": {"r": 8, "lora_alpha": 8}},
    "data": {"batch_size": 2, "processor": {"target_size": [64, 64]}, "caption_dropout_rate": 0.2},
    "train": {"checkpointing_steps": 1000, "probe_samples": 1, "probe_draws": 1},
    "lr_scheduler": {"scheduler_type": "cosine", "warmup_steps": 2},
    "optimizer": {"init_args": {"lr": 1e-3}},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "nf4": {"model.quantize": "nf4"},
    "fp32": {"model.quantize": "none", "train.mixed_precision": "no"},
    "dropout, accumulation": {"model.lora.lora_dropout": 0.3, "train.gradient_accumulation_steps": 2},
}


class StopError(Exception):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--stop", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES), metavar="CASE")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder).resolve())
        write_target(workspace, model=str(HERE / "base"), dataset=str(HERE / "data"), device=wish.device)
        scan(workspace)
        print(json.dumps({"case": "pictures painted in the fit", **painted(workspace, wish)}), flush=True)
        for deterministic in (True, False):
            for name in wish.only:
                given = {"train.deterministic": deterministic, "train.max_train_steps": wish.steps}
                given |= CASES[name]
                print(
                    json.dumps(
                        {"case": name, "deterministic": deterministic, **compare(workspace, wish, given)}
                    )
                )
    for proven in optimizers.PROVEN:
        print(
            json.dumps({"optimizer": proven.path, **restored(proven, device.pick(wish.device).type)}),
            flush=True,
        )


def painted(workspace: Workspace, wish: argparse.Namespace) -> dict[str, Any]:
    """A run with pictures every second step against the same without, dropout on."""
    changes = {
        "train.max_train_steps": min(6, wish.steps),
        "model.lora.lora_dropout": 0.3,
        "validation.num_inference_steps": 2,
    }
    runs = [
        fit(workspace, prepare(workspace, wish, {**changes, **more}), None, None)
        for more in ({}, {"validation.sample_steps": 2})
    ]
    return {"equal": all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])}


def compare(workspace: Workspace, wish: argparse.Namespace, changes: dict[str, Any]) -> dict[str, Any]:
    loaded = prepare(workspace, wish, changes)
    whole = fit(workspace, loaded, None, None)
    fit(workspace, loaded, wish.stop, None)
    resumed = fit(workspace, loaded, None, "latest")
    difference = max(float((whole[n] - resumed[n]).abs().max()) for n in whole)
    largest = max(float(tensor.abs().max()) for tensor in whole.values())
    return {"equal": difference == 0.0, "difference": difference / largest}


def prepare(workspace: Workspace, wish: argparse.Namespace, changes: dict[str, Any]) -> load.Loaded:
    """config.yaml with `changes`, and the cache that it asks for."""
    document = load.apply_overrides(RECIPE, {"hardware.device": wish.device, **changes})
    workspace.config_path.write_text(yaml.safe_dump(document), encoding="utf-8", newline="\n")
    loaded = load.load_config(workspace.config_path)
    build.build(build.plan(workspace, resolve(workspace, loaded.config).config), Progress(quiet=True))
    return loaded


def fit(workspace: Workspace, loaded: load.Loaded, stop: int | None, resume: str | None) -> dict[str, Tensor]:
    """The adapter after the run, or after it broke off before step `stop` + 1."""
    opened = session.launch(workspace, loaded, smoke=False, resume=resume)
    step = loop._step

    def stopping(given: Any, cursor: Any, window: Any) -> Any:
        if cursor.step == stop:
            raise StopError
        return step(given, cursor, window)

    loop._step = stopping
    try:
        loop.fit(opened, Progress(quiet=True))
    except StopError:
        pass
    finally:
        loop._step = step
    return load_file(checkpoints.lasts(opened.run.path)[-1] / "model.safetensors")


def restored(proven: optimizers.Proven, where: str) -> dict[str, Any]:
    try:
        whole = weights(proven, where, stop=None)
        return {"device": where, "equal": torch.equal(whole, weights(proven, where, stop=3))}
    except UserError as error:
        return {"device": where, "refused": error.message}


def weights(proven: optimizers.Proven, where: str, stop: int | None) -> Tensor:
    """After six steps, with state saved and read back before step `stop` + 1."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 320 * 320).reshape(320, 320).to(where))
    config = Optimizer.model_validate(
        {"class_path": proven.path, "init_args": {"lr": 1e-3, **proven.arguments}}
    )
    made = optimizers.make_optimizer(config, [parameter])
    for step in range(6):
        if step == stop:
            written = io.BytesIO()
            torch.save(made.state_dict(), written)
            written.seek(0)
            made = optimizers.make_optimizer(config, [parameter])
            made.load_state_dict(torch.load(written, map_location="cpu", weights_only=True))
        draw = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(320, 320, generator=draw).to(where)
        made.step()
    return parameter.detach().cpu()


if __name__ == "__main__":
    main()
