"""A run that was stopped and resumed is, bit for bit, the run that was left alone."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime import files
from runtime.errors import CacheError, ResumeError
from runtime.progress import Progress
from runtime.training import checkpoints, loop
from runtime.training.ema import STATE as AVERAGE
from runtime.training.trainables import WEIGHTS

FIT = [sys.executable, "-m", "runtime", "fit", "--workspace"]


class StopError(Exception):
    """Thrown in the place of whatever ends a run."""


def stop_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = loop._step

    def stopping(session: Any, cursor: Any, window: Any) -> Any:
        if cursor.step == step:
            raise StopError
        return original(session, cursor, window)

    monkeypatch.setattr(loop, "_step", stopping)


def fit_until(lab: Any, monkeypatch: pytest.MonkeyPatch, step: int, changes: dict[str, Any]) -> Path:
    """The folder of a run that broke off before `step` + 1."""
    with monkeypatch.context() as patch:
        stop_before(patch, step)
        session = lab.launch(changes)
        with pytest.raises(StopError):
            loop.fit(session, Progress(quiet=True))
    return session.run.path


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


COSINE = {"lr_scheduler.scheduler_type": "cosine", "lr_scheduler.warmup_steps": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "constant": (2, {}),
    "at a boundary": (3, {}),
    "at the end of an epoch": (4, {}),
    "cosine": (2, COSINE),
    "cosine, stopped in the warm-up": (1, COSINE),
    "accumulation": (2, {"data.batch_size": 1, "train.gradient_accumulation_steps": 3, **COSINE}),
    "dropout of the adapter": (4, {"model.lora.lora_dropout": 0.5}),
    "dropout and accumulation": (
        2,
        {"model.lora.lora_dropout": 0.5, "data.batch_size": 1, "train.gradient_accumulation_steps": 3},
    ),
    "dropout of captions": (5, {"data.caption_dropout_rate": 0.5}),
    "epochs": (
        2,
        {"train.max_train_steps": None, "train.num_epochs": 2, "train.gradient_accumulation_steps": 3},
    ),
    "nf4": (2, {"model.quantize": "nf4"}),
    "dora": (2, {"model.lora.use_dora": True}),
    "clipping by value": (2, {"train.max_grad_norm": 0.0, "train.clip_grad_value": 1e-4}),
    "adafactor": (2, {"optimizer.class_path": "torch.optim.Adafactor"}),
    "restarts": (2, {"lr_scheduler.scheduler_type": "cosine_with_restarts", "lr_scheduler.num_cycles": 2}),
    "polynomial": (2, {"lr_scheduler.scheduler_type": "polynomial", "lr_scheduler.warmup_steps": 0.3}),
    "average": (4, {"train.ema_decay": 0.5}),
    "without checkpointing of activations": (2, {"train.gradient_checkpointing": False}),
    "bf16": (2, {"train.mixed_precision": "bf16"}),
    "8-bit optimizer": (2, {"optimizer.class_path": "bitsandbytes.optim.AdamW8bit", "model.lora.r": 32}),
    "momentum": (
        2,
        {"optimizer.class_path": "torch.optim.SGD", "optimizer.init_args": {"lr": 0.1, "momentum": 0.9}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_resume_is_exact(lab: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    step, changes = CASES[name]
    if {"data.caption_dropout_rate", "train.mixed_precision"} & changes.keys():
        lab.cache(changes)
    whole = lab.fit(changes)
    part = fit_until(lab, monkeypatch, step, changes)
    session = lab.launch(changes, resume="latest")
    assert session.state["step"] == step
    assert loop.fit(session, Progress(quiet=True)) == "completed"
    assert same(lab.adapter(whole.path), lab.adapter(session.run.path))
    joined = [
        line for path in (part, session.run.path) for line in files.read_json_lines(path / "metrics.jsonl")
    ]
    for one, other in zip(files.read_json_lines(whole.path / "metrics.jsonl"), joined, strict=True):
        for key in ("step", "epoch", "loss", "loss_ema", "lr", "grad_norm", "samples", "sigmas", "dropped"):
            assert one[key] == other[key], (key, one["step"])
    offered, other = (load_file(checkpoints.plains(p)[-1] / WEIGHTS) for p in (whole.path, session.run.path))
    assert same(offered, other)
    ends = [files.read_json_lines(path / "probe.jsonl")[-1] for path in (whole.path, session.run.path)]
    assert ends[0]["items"] == ends[1]["items"]


def test_checkpoints_offer_the_average_and_training_goes_on_without_it(lab: Any, conforms: Any) -> None:
    plain, averaged = lab.fit(), lab.fit({"train.ema_decay": 0.5})
    assert same(lab.adapter(plain.path), lab.adapter(averaged.path))
    for path, other in zip(checkpoints.plains(plain.path), checkpoints.plains(averaged.path), strict=True):
        assert not same(load_file(path / WEIGHTS), load_file(other / WEIGHTS))
    last = checkpoints.lasts(averaged.path)[-1]
    average, offered = load_file(last / AVERAGE), load_file(last / WEIGHTS)
    name = "transformer_blocks.0.attn.to_q"
    assert torch.equal(average[f"{name}.lora_B.default.weight"], offered[f"transformer.{name}.lora_B.weight"])
    first, end = (
        [files.read_json_lines(run.path / "probe.jsonl")[at]["items"] for run in (plain, averaged)]
        for at in (0, -1)
    )
    assert first[0] == first[1]
    assert end[0] != end[1]
    document = files.read_json(averaged.path / "run.json")
    conforms(document, "run")
    assert document["trainable"]["weights"] == "ema"


def test_a_last_without_its_average_is_refused(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"train.ema_decay": 0.5}
    part = fit_until(lab, monkeypatch, 4, changes)
    (checkpoints.lasts(part)[-1] / AVERAGE).unlink()
    with pytest.raises(ResumeError, match=r"lacks ema\.safetensors"):
        lab.launch(changes, resume="latest")


def test_optimizer_state_is_eight_bit_where_that_case_says_so(lab: Any) -> None:
    """Tensors below 4096 elements keep 32-bit state: the rank of the case above must stay large enough."""
    _, changes = CASES["8-bit optimizer"]
    session = lab.launch(changes)
    loop.fit(session, Progress(quiet=True))
    states = session.trained.optimizer.state.values()
    assert any(state["state1"].dtype == torch.uint8 for state in states)


def test_a_chain_of_resumes(lab: Any, monkeypatch: pytest.MonkeyPatch, conforms: Any) -> None:
    whole = lab.fit()
    fit_until(lab, monkeypatch, 1, {})
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        session = lab.launch(resume="latest")
        with pytest.raises(StopError):
            loop.fit(session, Progress(quiet=True))
    run = lab.fit(resume="latest")
    assert same(lab.adapter(whole.path), lab.adapter(run.path))
    document = files.read_json(run.path / "run.json")
    conforms(document, "run")
    origin = document["resumed_from"]
    last = checkpoints.lasts(session.run.path)[-1]
    assert origin == {
        "run_id": session.run.document["run_id"],
        "run": "v2",
        "step": 4,
        "checkpoint": last.name,
        "digest": files.file_digest(last / "model.safetensors"),
    }
    assert document["done_steps"] == 6
    # Step 0 was measured by the first run of the lineage.
    assert [line["step"] for line in files.read_json_lines(run.path / "probe.jsonl")] == [6]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_at_hand_and_leaves_it_resumable(
    lab: Any, monkeypatch: pytest.MonkeyPatch, conforms: Any, number: signal.Signals
) -> None:
    whole = lab.fit()
    session = lab.launch()
    original = loop._step

    def signalled(session: Any, cursor: Any, window: Any) -> Any:
        if cursor.step == 3:
            signal.raise_signal(number)
        return original(session, cursor, window)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", signalled)
        assert loop.fit(session, Progress(quiet=True)) == "interrupted"
    assert signal.getsignal(number) is before
    document = files.read_json(session.run.path / "run.json")
    conforms(document, "run")
    assert (document["state"], document["done_steps"]) == ("interrupted", 4)
    assert document["reason"] == f"{number.name} after step 4 of 6"
    assert len(files.read_json_lines(session.run.path / "metrics.jsonl")) == 4
    assert same(lab.adapter(whole.path), lab.adapter(lab.fit(resume="latest").path))


def test_a_signal_before_the_first_step_leaves_nothing_to_resume(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = lab.launch()
    monkeypatch.setattr(
        loop, "_probe", lambda session, step: signal.raise_signal(signal.SIGINT) or {"step": 0}
    )
    assert loop.fit(session, Progress(quiet=True)) == "interrupted"
    with pytest.raises(ResumeError, match="nothing to resume"):
        lab.launch(resume="latest")


def test_a_second_signal_does_not_wait(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = lab.launch()
    original = loop._step

    def signalled(session: Any, cursor: Any, window: Any) -> Any:
        if cursor.step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(session, cursor, window)

    monkeypatch.setattr(loop, "_step", signalled)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(session, Progress(quiet=True))
    assert files.read_json(session.run.path / "run.json")["state"] == "interrupted"
    assert checkpoints.read_state(checkpoints.lasts(session.run.path)[-1])["step"] == 4


@pytest.mark.slow
def test_killed_at_step_7_of_20_and_resumed(lab: Any) -> None:
    """SIGKILL runs no handler: what counts is what lay on the disk at that moment."""
    changes = {"train.max_train_steps": 20, "train.checkpointing_steps": 5, **COSINE}
    whole = lab.fit(changes)
    run = lab.project / "v1"
    with subprocess.Popen([*FIT, str(lab.root)], stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        while len(files.read_json_lines(run / "metrics.jsonl")) < 7:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
    assert files.read_json(run / "run.json")["state"] == "running"
    assert len(files.read_json_lines(run / "metrics.jsonl")) < 20
    kept = checkpoints.read_state(checkpoints.lasts(run)[-1])["step"]
    assert kept >= 5
    subprocess.run([*FIT, str(lab.root), "--resume", "latest"], check=True, capture_output=True)
    document = files.read_json(lab.project / "v2" / "run.json")
    assert (document["state"], document["resumed_from"]["step"]) == ("completed", kept)
    assert same(lab.adapter(whole.path), lab.adapter(lab.project / "v2"))


def test_two_lasts_left_by_a_kill_are_reduced(
    lab: Any, monkeypatch: pytest.MonkeyPatch, conforms: Any
) -> None:
    """The kill came between the rename of the new one and the removal of the old one."""
    whole = lab.fit()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "remove", lambda *given: None)
        part = fit_until(lab, monkeypatch, 4, {})
    both = checkpoints.lasts(part)
    assert [checkpoints.read_state(path)["step"] for path in both] == [
        3,
        4,
    ]  # each whole, the newest is taken
    (part / ".checkpoint-last-1-5-last.tmp").mkdir()  # and one before, while it was filled
    session = lab.launch(resume="latest")
    assert session.state["step"] == 4
    assert [path.name for path in checkpoints.lasts(part)] == ["checkpoint-last-0-4-last"]
    line = files.read_json_lines(part / "saves.jsonl")[-1]
    conforms(line, "saves")
    assert (line["event"], line["kind"], line["step"], line["reason"]) == (
        "prune",
        "last",
        3,
        "left by a kill",
    )
    loop.fit(session, Progress(quiet=True))
    assert same(lab.adapter(whole.path), lab.adapter(session.run.path))


def test_a_torn_line_of_metrics_does_not_hinder(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part = fit_until(lab, monkeypatch, 4, {})
    with (part / "metrics.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"step": 5, "lo')
    assert lab.fit(resume="latest").document["state"] == "completed"
    assert [line["step"] for line in files.read_json_lines(part / "metrics.jsonl")] == [1, 2, 3, 4]


def test_latest_passes_over_smoke_runs_and_runs_without_checkpoint(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = fit_until(lab, monkeypatch, 4, {})
    lab.fit(smoke=True)
    fit_until(lab, monkeypatch, 0, {})
    (lab.project / "v9").mkdir()  # a kill before run.json
    session = lab.launch(resume="latest")
    assert session.run.document["resumed_from"]["run"] == part.name
    assert session.run.path.name == "v10"


def test_resume_by_path(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lab.fit()
    part = fit_until(lab, monkeypatch, 4, {})
    relative = checkpoints.lasts(part)[-1].relative_to(lab.root).as_posix()
    assert same(lab.adapter(whole.path), lab.adapter(lab.fit(resume=relative).path))


def test_what_can_not_be_resumed(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResumeError, match="nothing to resume"):
        lab.launch(resume="latest")
    run = lab.fit().path
    with pytest.raises(ResumeError, match="is the end of a finished run of 6 steps"):
        lab.launch(resume="latest")
    with pytest.raises(ResumeError, match="holds the adapter alone") as caught:
        lab.launch(resume="outputs/edit-lora/v0/checkpoint-0-3")
    assert caught.value.remedy == "finetune fit --resume outputs/edit-lora/v0/checkpoint-last-1-6-last"
    with pytest.raises(ResumeError, match="no resumable checkpoint at"):
        lab.launch(resume="outputs/edit-lora/v7")
    part = fit_until(lab, monkeypatch, 4, {})
    (checkpoints.lasts(part)[-1] / "optimizer.bin").unlink()
    with pytest.raises(ResumeError, match=r"lacks optimizer\.bin"):
        lab.launch(resume="latest")
    assert {path.name for path in lab.project.iterdir()} == {run.name, part.name}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train.max_train_steps": 5}, "train steps: 6 then, 5 now"),
        ({"data.batch_size": 1}, "data.batch_size: 2 then, 1 now"),
        ({"train.seed": 7}, "train.seed: 42 then, 7 now"),
        ({"data.shuffle": False}, "data.shuffle: True then, False now"),
        ({"model.lora.r": 8}, "model.lora.r: 4 then, 8 now"),
        ({"model.lora.lora_alpha": 4}, "model.lora.lora_alpha: 8 then, 4 now"),
        ({"model.lora.lora_dropout": 0.1}, "model.lora.lora_dropout: 0.0 then, 0.1 now"),
        ({"model.lora.target_modules": ["to_q"]}, "model.lora.target_modules: "),
        ({"model.lora.use_dora": True}, "model.lora.use_dora: False then, True now"),
        ({"model.lora.use_rslora": True}, "model.lora.use_rslora: False then, True now"),
        ({"optimizer.init_args.lr": 2e-2}, "optimizer.init_args.lr: 0.01 then, 0.02 now"),
        ({"optimizer.init_args.weight_decay": 0.1}, "optimizer.init_args.weight_decay: None then, 0.1 now"),
        (
            {"optimizer.class_path": "torch.optim.SGD"},
            "optimizer.class_path: torch.optim.AdamW then, torch.optim.SGD now",
        ),
        (
            {"lr_scheduler.scheduler_type": "cosine"},
            "lr_scheduler.scheduler_type: constant then, cosine now",
        ),
        ({"loss.sigma_sampling": "uniform"}, "loss.sigma_sampling: sigmoid then, uniform now"),
        ({"loss.sigma_min": 0.1}, "loss.sigma_min: 0.0 then, 0.1 now"),
        ({"loss.sigma_max": 0.9}, "loss.sigma_max: 1.0 then, 0.9 now"),
        ({"loss.sigma_strata": 4}, "loss.sigma_strata: None then, 4 now"),
        ({"loss.weighting": "cosmap"}, "loss.weighting: none then, cosmap now"),
        ({"loss.mask_floor": 0.5}, "loss.mask_floor: 0.0 then, 0.5 now"),
        ({"loss.prior_weight": 0.5}, "loss.prior_weight: 1.0 then, 0.5 now"),
        ({"train.max_grad_norm": 0.5}, "train.max_grad_norm: 1.0 then, 0.5 now"),
        ({"train.ema_decay": 0.9}, "train.ema_decay: None then, 0.9 now"),
        ({"train.mixed_precision": "bf16"}, "train.mixed_precision: no then, bf16 now"),
        ({"train.gradient_accumulation_steps": 2}, "train.gradient_accumulation_steps: 1 then, 2 now"),
        ({"model.quantize": "nf4"}, "model.quantize: none then, nf4 now"),
        ({"model.nf4_keep": ["*.to_q"]}, "model.nf4_keep: [] then, ['*.to_q'] now"),
    ],
)
def test_a_resume_of_another_training_is_refused_by_name(
    lab: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], named: str
) -> None:
    fit_until(lab, monkeypatch, 2, {})
    with pytest.raises(ResumeError) as caught:
        lab.launch(change, resume="latest")
    assert named in caught.value.message
    assert len(caught.value.message.splitlines()) == 2
    assert [path.name for path in lab.project.iterdir()] == ["v0"]


LONGER = {"train.max_train_steps": 10}


def test_all_that_differs_is_listed(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"loss.sigma_sampling": "shift", "loss.shift": 3.0}
    fit_until(lab, monkeypatch, 2, before)
    after = {"loss.sigma_sampling": "logit_normal", "loss.logit_mean": 0.5, "loss.logit_std": 0.8}
    with pytest.raises(ResumeError) as caught:
        lab.launch({**after, "train.seed": 7}, resume="latest")
    assert sorted(caught.value.message.splitlines()[1:]) == [
        "  loss.logit_mean: None then, 0.5 now",
        "  loss.logit_std: None then, 0.8 now",
        "  loss.shift: 3.0 then, None now",
        "  loss.sigma_sampling: shift then, logit_normal now",
        "  train.seed: 42 then, 7 now",
    ]


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_is_made_longer_goes_on_as_the_longer_run_would_have(
    lab: Any, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """With a constant rate it is that run, bit for bit, whether the shorter one had ended or broke off."""
    whole = lab.fit(LONGER)
    if finished:
        lab.fit()
    else:
        fit_until(lab, monkeypatch, 4, {})
    longer = lab.fit(LONGER, resume="latest")
    assert longer.document["planned_steps"] == 10 == longer.document["done_steps"]
    assert same(lab.adapter(whole.path), lab.adapter(longer.path))


def test_the_rate_of_a_longer_run_is_that_of_its_own_schedule(lab: Any) -> None:
    """The cosine had ended at zero; the next step has the rate that ten planned steps have there."""
    rates = [
        line["lr"] for line in files.read_json_lines(lab.fit({**LONGER, **COSINE}).path / "metrics.jsonl")
    ]
    short = lab.fit(COSINE)
    longer = lab.fit({**LONGER, **COSINE}, resume="latest")
    before, after = (
        [line["lr"] for line in files.read_json_lines(path / "metrics.jsonl")]
        for path in (short.path, longer.path)
    )
    assert after == rates[6:]
    assert before != rates[:6]


def test_a_run_stopped_among_steps_that_are_not_finite_counts_on(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume must not start the count anew, or a run that is lost would be resumed for ever."""
    original = loop._gradients

    def spoilt(session: Any, step: int, window: Any) -> Any:
        losses, sigmas = original(session, step, window)
        return (losses * float("nan") if step >= 3 else losses), sigmas

    monkeypatch.setattr(loop, "_gradients", spoilt)
    fit_until(lab, monkeypatch, 4, {})
    session = lab.launch(resume="latest")
    assert [line.partition(":")[0] for line in session.state["not_finite"]] == ["step 3", "step 4"]
    with pytest.raises(loop.NonFiniteError, match="step 3"):
        loop.fit(session, Progress(quiet=True))


def test_a_prompt_to_sample_may_be_added_before_a_resume(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains nothing, so the training is the same one."""
    whole = lab.fit()
    fit_until(lab, monkeypatch, 4, {})
    prompt = {"prompt": "make it green", "images": ["dataset/control_images/p0.png"]}
    changes = {"validation.samples": [prompt]}
    lab.cache(changes)
    assert same(lab.adapter(whole.path), lab.adapter(lab.fit(changes, resume="latest").path))


def test_a_cache_with_other_tensors_is_refused(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fit_until(lab, monkeypatch, 2, {})
    picture = lab.root / "dataset" / "control_images" / "p0.png"
    shutil.copyfile(lab.root / "dataset" / "control_images" / "p1.png", picture)
    lab.scan()
    with pytest.raises(CacheError, match=r"does not fit for 1 of 11 samples:\n  another controls \(p0\)"):
        lab.launch(resume="latest")
    lab.cache()
    with pytest.raises(ResumeError, match="dataset: "):
        lab.launch(resume="latest")


def test_a_resume_by_name_keeps_what_it_was_asked_for(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two -last- left by a kill, and the user wants the older one."""
    part = fit_until(lab, monkeypatch, 4, {})
    (older,) = checkpoints.lasts(part)
    newer = older.with_name("checkpoint-last-9-5-last")
    shutil.copytree(older, newer)
    session = lab.launch(resume=older.relative_to(lab.root).as_posix())
    assert session.run.document["resumed_from"]["checkpoint"] == older.name
    assert checkpoints.lasts(part) == [older]


def test_a_torn_record_is_mended_by_the_resume(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part = fit_until(lab, monkeypatch, 4, {})
    (last,) = checkpoints.lasts(part)
    shutil.copytree(last, last.with_name("checkpoint-last-0-1-last"))
    saves = part / "saves.jsonl"
    saves.write_bytes(saves.read_bytes() + b'{"event": "sa')
    lab.fit(resume="latest")
    *_, line = [json.loads(text) for text in saves.read_text(encoding="utf-8").splitlines()]
    assert (line["event"], line["path"]) == ("prune", "checkpoint-last-0-1-last")


def test_a_run_that_lives_is_not_resumed(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part = fit_until(lab, monkeypatch, 4, {})
    document = files.read_json(part / "run.json")
    files.write_json(part / "run.json", {**document, "state": "running"})
    with pytest.raises(ResumeError, match="still running") as caught:
        lab.launch(resume="latest")
    assert caught.value.remedy == "finetune monitor --wait"
    files.write_json(part / "run.json", {**document, "state": "running", "pid": 2**22 + 5})
    assert lab.launch(resume="latest").state["step"] == 4
    assert files.read_json(part / "run.json")["outcome"] == "vanished"


def test_latest_passes_over_a_broken_state(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part = fit_until(lab, monkeypatch, 4, {})
    (last,) = checkpoints.lasts(part)
    broken = last.with_name("checkpoint-last-0-5-last")
    shutil.copytree(last, broken)
    (broken / "scheduler.bin").unlink()
    assert lab.launch(resume="latest").state["step"] == 4


@pytest.mark.parametrize("spoil", ["cut", "text"])
@pytest.mark.parametrize("asked", ["latest", "by path"])
def test_a_damaged_state_is_named(lab: Any, monkeypatch: pytest.MonkeyPatch, spoil: str, asked: str) -> None:
    part = fit_until(lab, monkeypatch, 4, {})
    (last,) = checkpoints.lasts(part)
    name = "optimizer.bin" if spoil == "cut" else "trainer_state.json"
    (last / name).write_bytes((last / name).read_bytes()[:-9])
    resume = "latest" if asked == "latest" else last.relative_to(lab.root).as_posix()
    with pytest.raises(ResumeError, match=f"has other bytes than were saved: {name}") as caught:
        lab.launch(resume=resume)
    assert caught.value.remedy == "finetune fit"


def test_a_checkpoint_of_before_these_keys_is_resumed(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run had no table, compiled nothing and kept nothing in bf16; what it doesn't tell is no difference."""
    fit_until(lab, monkeypatch, 3, {})
    read = checkpoints.read_state

    def older(path: Path) -> dict[str, Any]:
        state = read(path)
        for key in ("train.cached_modulation", "train.compile", "model.nf4_keep"):
            del state["fingerprint"][key]
        return state

    monkeypatch.setattr(checkpoints, "read_state", older)
    assert lab.fit({}, resume="latest").document["state"] == "completed"


def test_what_auto_decides_over_the_last_bits_stays_at_a_resume(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 05 may have run, or memory been freed, between a run and its resume."""
    whole = lab.adapter(lab.fit({"train.cached_modulation": True}).path)
    fit_until(lab, monkeypatch, 3, {"train.cached_modulation": True})
    resumed = lab.fit({"train.cached_modulation": "auto"}, resume="latest")
    assert resumed.document["resolved"]["train"]["cached_modulation"] is True
    assert same(whole, lab.adapter(resumed.path))
    with pytest.raises(ResumeError, match=r"train\.cached_modulation"):
        fit_until(lab, monkeypatch, 3, {"train.cached_modulation": True})
        lab.fit({"train.cached_modulation": False}, resume="latest")
