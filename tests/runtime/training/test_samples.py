"""Pictures painted in a fit: when, of what, from which noise; and that nothing else comes of them."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runtime import files
from runtime.errors import UserError
from runtime.inference import sampler
from runtime.progress import Progress
from runtime.training import checkpoints, loop, samples

EVERY = {"validation.sample_steps": 2, "train.max_train_steps": 5, "train.checkpointing_steps": 3}
# All that a stray draw, a mode left behind or a kept gradient would show in.
DELICATE = {
    "model.lora.lora_dropout": 0.5,
    "data.batch_size": 1,
    "train.gradient_accumulation_steps": 3,
    "lr_scheduler.scheduler_type": "cosine",
    "lr_scheduler.warmup_steps": 2,
}
TIMES = ("at", "step_s", "alloc_gib", "reserved_gib", "peak_gib", "rss_gib")


def prompt(**more: Any) -> dict[str, Any]:
    """Its own list each time: YAML would write a shared one as an alias, which is refused."""
    return {"prompt": "make it green", "images": ["dataset/control_images/p0.png"], **more}


def painted(run: Any) -> list[str]:
    return sorted(path.name for path in (run.path / "samples").glob("*"))


def told(run: Path, name: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in files.read_json_lines(run / f"{name}.jsonl")
    ]


def pixels(path: Path) -> Any:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def interrupt_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = loop._step

    def stopping(session: Any, cursor: Any, window: Any) -> Any:
        if cursor.step == step:
            raise KeyboardInterrupt
        return original(session, cursor, window)

    monkeypatch.setattr(loop, "_step", stopping)


def test_at_the_start_every_so_many_steps_and_at_the_end(lab: Any, conforms: Any) -> None:
    changes = {**EVERY, "validation.samples": [prompt(), prompt(seed=9)]}
    lab.cache(changes)
    run = lab.fit(changes)
    steps = [0, 2, 4, 5]
    assert painted(run) == sorted(
        f"{name}.png"
        for step in steps
        for name in (f"{step:06d}-prompt-0", f"{step:06d}-prompt-1", f"step-{step:06d}")
    )
    document = files.read_json(run.path / "run.json")
    conforms(document, "run")
    assert document["samples"]["stopped"] is None
    assert [line["step"] for line in document["samples"]["painted"]] == steps
    first = document["samples"]["painted"][0]
    assert first["pictures"] == ["samples/000000-prompt-0.png", "samples/000000-prompt-1.png"]
    assert pixels(run.path / first["pictures"][0]).shape == (64, 64, 3)
    assert pixels(run.path / first["grid"]).shape[1] == 8 + 2 * (192 + 8)
    one, other = (pixels(run.path / name) for name in first["pictures"])
    assert np.abs(one - other).max() > 2, "another seed, another picture, though they share one cache entry"


def test_without_prompts_the_first_held_out_samples(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "HELD_OUT_MOST", 2)
    run = lab.fit({**EVERY, "train.max_train_steps": 1})
    held = [want.folder for want in lab.job().wants if want.split == "holdout"][:2]
    last = run.document["samples"]["painted"][-1]
    assert last["pictures"] == [f"samples/000001-{folder}.png" for folder in held]
    assert pixels(run.path / "samples" / "step-000001.png").shape[1] == 8 + 3 * (192 + 8), (
        "with their targets"
    )


def test_never_where_no_interval_is_given(lab: Any) -> None:
    run = lab.fit({"train.max_train_steps": 1})
    assert "samples" not in run.document and not (run.path / "samples").exists()


def test_nothing_to_paint_is_refused_before_the_run(lab: Any) -> None:
    lab.scan(holdout=0)
    lab.cache(EVERY)
    with pytest.raises(UserError, match="no prompt to paint, and no sample is held out"):
        lab.launch(EVERY)
    assert not lab.project.exists()


@pytest.mark.parametrize("more", [{}, {"train.ema_decay": 0.9}], ids=["weights", "their average"])
def test_what_validate_paints_of_the_same_adapter(
    lab: Any, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    from runtime.inference import heldout, validate

    monkeypatch.setattr(heldout, "DRAWS", 1)
    own = prompt(size=[32, 48], seed=9, num_inference_steps=3)
    changes = {**EVERY, "validation.samples": [prompt(), own], "optimizer.init_args.lr": 0.05, **more}
    lab.cache(changes)
    run = lab.fit(changes)
    checkpoint = validate.find_checkpoint(lab.project, "last", lab.root)
    validate.validate(lab.workspace, lab.configure(changes), checkpoint, Progress(quiet=True))
    for name, size in (("prompt-0", (64, 64)), ("prompt-1", (32, 48))):
        for variant, step in (("adapter", 5), ("base", 0)):
            one = pixels(run.path / "samples" / f"{step:06d}-{name}.png")
            other = pixels(run.path / "validation" / variant / f"{name}.png")
            assert one.shape[:2] == size and np.array_equal(one, other), (name, variant)
    first, last = (pixels(run.path / "samples" / f"{step:06d}-prompt-0.png") for step in (0, 5))
    assert np.abs(first - last).max() > 2, "the adapter has learned something by then"


@pytest.mark.parametrize("more", [{}, DELICATE, {**DELICATE, "train.gradient_checkpointing": False}])
def test_what_is_trained_stays_the_same_bit_for_bit(lab: Any, more: dict[str, Any]) -> None:
    changes = {**EVERY, **more}
    without = lab.fit({**changes, "validation.sample_steps": None})
    run = lab.fit({**changes, "validation.sample_steps": 1})
    assert len(run.document["samples"]["painted"]) == 6
    assert same(lab.adapter(without.path), lab.adapter(run.path))
    for name in ("metrics", "probe"):
        assert told(without.path, name) == told(run.path, name)
    states = [
        torch.load(checkpoints.lasts(path)[-1] / "optimizer.bin", weights_only=True)["state"]
        for path in (without.path, run.path)
    ]
    for one, other in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("exp_avg", "exp_avg_sq"))


def test_nor_does_a_resume_between_change_it(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**EVERY, **DELICATE}
    without = lab.fit({**changes, "validation.sample_steps": None})
    with monkeypatch.context() as patch:
        interrupt_before(patch, 2)
        broken = lab.launch(changes)
        with pytest.raises(KeyboardInterrupt):
            loop.fit(broken, Progress(quiet=True))
    run = lab.fit(changes, resume="latest")
    assert same(lab.adapter(without.path), lab.adapter(run.path))
    assert [line["step"] for line in broken.run.document["samples"]["painted"]] == [0, 2]
    assert [line["step"] for line in run.document["samples"]["painted"]] == [4, 5]


def test_modes_generators_and_gradients_are_as_before(lab: Any) -> None:
    session = lab.launch({**EVERY, **DELICATE})
    odd = session.denoiser.transformer_blocks[1].eval()
    for parameter in session.trained.adapter.parameters():
        parameter.grad = torch.ones_like(parameter)
    modes = {name: module.training for name, module in session.denoiser.named_modules()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    ask = session.samples.predict

    def predict(*given: Any) -> torch.Tensor:
        torch.rand(3)  # as a library may, that makes a model or a kernel's scratch
        return ask(*given)

    session.samples.predict = predict
    session.samples.paint(1, Progress(quiet=True))
    assert session.samples.stopped is None
    assert {name: module.training for name, module in session.denoiser.named_modules()} == modes
    assert not odd.training and session.denoiser.training and session.denoiser.is_gradient_checkpointing
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in session.trained.adapter.parameters())


def test_painting_is_without_dropout_and_without_gradient(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = lab.launch({**EVERY, **DELICATE, "train.max_train_steps": 1})
    seen = []
    ask = session.samples.predict

    def predict(*given: Any) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), session.denoiser.training))
        return ask(*given)

    session.samples.predict = predict
    loop.fit(session, Progress(quiet=True))
    assert set(seen) == {(False, False)}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.OutOfMemoryError("Tried to allocate 2 GiB.\nMore words"),
            "OutOfMemoryError: Tried to allocate 2 GiB.",
        ),
        (RuntimeError("a driver fell over"), "RuntimeError: a driver fell over"),
        (OSError(28, "No space left on device", "/home/someone/x"), "OSError: No space left on device"),
    ],
)
def test_a_failure_ends_the_painting_and_not_the_run(
    lab: Any, monkeypatch: pytest.MonkeyPatch, conforms: Any, capsys: Any, error: Exception, reason: str
) -> None:
    changes = {**EVERY, **DELICATE}
    without = lab.fit({**changes, "validation.sample_steps": None})
    session = lab.launch(changes)
    calls = []

    def decode(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 4:  # the first of step 2, after the three held-out samples of step 0
            raise error
        return original(*given)

    original = sampler.to_image
    monkeypatch.setattr(sampler, "to_image", decode)
    assert loop.fit(session, Progress()) == "completed"
    document = files.read_json(session.run.path / "run.json")
    conforms(document, "run")
    assert "OutOfMemory" not in reason or document["samples"]["stopped"].startswith("step 2: ")
    assert document["samples"]["stopped"].endswith(reason)
    assert [line["step"] for line in document["samples"]["painted"]] == [0]
    assert "no more samples in this run" in capsys.readouterr().err and len(calls) == 4
    assert session.denoiser.training
    assert same(lab.adapter(without.path), lab.adapter(session.run.path))


def test_a_wish_to_end_is_granted_within_a_picture(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Ctrl-C; an hour of painting on a small machine must not stand before the checkpoint."""
    session = lab.launch({**EVERY, "validation.num_inference_steps": 50})
    asked: list[int] = []
    ask = session.samples.predict

    def predict(*given: Any) -> torch.Tensor:
        asked.append(1)
        if len(asked) == 153:  # three held-out samples at step 0, and three steps into the first at step 2
            import signal

            signal.raise_signal(signal.SIGINT)
        return ask(*given)

    session.samples.predict = predict
    assert loop.fit(session, Progress(quiet=True)) == "interrupted"
    assert len(asked) == 153 and not list((session.run.path / "samples").glob("000002*"))
    document = files.read_json(session.run.path / "run.json")
    assert (document["state"], document["done_steps"]) == ("interrupted", 2)
    assert document["samples"]["stopped"] is None
    (last,) = checkpoints.lasts(session.run.path)
    assert checkpoints.read_state(last)["step"] == 2


def test_an_interrupt_at_once_leaves_the_checkpoint_too(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = lab.launch(EVERY)
    ask = session.samples.predict

    def predict(*given: Any) -> torch.Tensor:
        if files.read_json_lines(session.run.path / "metrics.jsonl"):
            raise KeyboardInterrupt
        return ask(*given)

    session.samples.predict = predict
    with pytest.raises(KeyboardInterrupt):
        loop.fit(session, Progress(quiet=True))
    assert json.loads((session.run.path / "run.json").read_text(encoding="utf-8"))["state"] == "interrupted"
    (last,) = checkpoints.lasts(session.run.path)
    assert checkpoints.read_state(last)["step"] == 2
    assert session.denoiser.training


def test_time_is_not_that_of_a_step(lab: Any) -> None:
    session = lab.launch(EVERY)
    ask = session.samples.predict

    def predict(*given: Any) -> torch.Tensor:
        import time

        time.sleep(0.2)
        return ask(*given)

    session.samples.predict = predict
    loop.fit(session, Progress(quiet=True))
    assert all(line["seconds"] > 1.0 for line in session.run.document["samples"]["painted"])
    assert all(line["step_s"] < 1.0 for line in files.read_json_lines(session.run.path / "metrics.jsonl"))
