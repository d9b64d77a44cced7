"""The fit as a whole: where it stops, what it records, what it does when something breaks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import files, progress
from runtime.progress import Progress
from runtime.training import checkpoints, loop


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in files.read_json_lines(run / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("changes", "steps", "samples"),
    [
        ({"train.max_train_steps": 3}, 3, 6),  # within the first epoch of 4 micro-batches
        ({"train.max_train_steps": 4}, 4, 8),  # at its end
        ({"train.max_train_steps": 5}, 5, 10),  # one into the second
        ({"train.max_train_steps": 3, "train.gradient_accumulation_steps": 3}, 3, 18),  # windows cross epochs
        ({"train.max_train_steps": None, "train.num_epochs": 1}, 4, 8),
        (
            {"train.max_train_steps": None, "train.num_epochs": 2, "train.gradient_accumulation_steps": 3},
            3,
            16,
        ),
        ({"train.max_train_steps": None, "train.num_epochs": 1, "data.batch_size": 3}, 3, 8),
        (
            {"train.max_train_steps": None, "train.num_epochs": 1, "train.gradient_accumulation_steps": 9},
            1,
            8,
        ),
    ],
)
def test_stops_exactly_at_the_planned_step(
    lab: Any, changes: dict[str, Any], steps: int, samples: int
) -> None:
    run = lab.fit(changes)
    lines = files.read_json_lines(run.path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert sum(len(line["samples"]) for line in lines) == samples
    assert run.document["planned_steps"] == run.document["done_steps"] == steps
    assert (run.document["state"], run.document["outcome"]) == ("completed", "trained")


def test_the_probe_is_measured_at_its_own_interval_and_changes_nothing(lab: Any) -> None:
    plain, often = lab.fit(), lab.fit({"train.probe_steps": 2})
    measured = [
        [line["step"] for line in files.read_json_lines(run.path / "probe.jsonl")] for run in (plain, often)
    ]
    assert measured == [[0, 3, 6], [0, 2, 3, 4, 6]]
    one, other = lab.adapter(plain.path), lab.adapter(often.path)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_sample_comes_once_in_each_epoch(lab: Any) -> None:
    run = lab.fit({"train.max_train_steps": None, "train.num_epochs": 3, "data.batch_size": 3})
    lines = files.read_json_lines(run.path / "metrics.jsonl")
    for epoch in range(3):
        seen = [name for line in lines if line["epoch"] == epoch for name in line["samples"]]
        assert sorted(seen) == sorted(set(seen)) and len(seen) == 8


@pytest.mark.parametrize(
    ("steps", "interval", "due"), [(6, 3, [3, 6]), (7, 3, [3, 6, 7]), (2, 100, [2]), (3, 1, [1, 2, 3])]
)
def test_checkpoints_as_planned(lab: Any, steps: int, interval: int, due: list[int]) -> None:
    run = lab.fit({"train.max_train_steps": steps, "train.checkpointing_steps": interval})
    assert run.document["planned_checkpoints"] == due
    assert [int(path.name.rpartition("-")[2]) for path in checkpoints.plains(run.path)] == due
    assert [path.name for path in checkpoints.lasts(run.path)] == [
        f"checkpoint-last-{(steps - 1) // 4}-{steps}-last"
    ]
    assert [line["step"] for line in files.read_json_lines(run.path / "probe.jsonl")] == [0, *due]


def test_what_a_run_writes_follows_the_schemas(lab: Any, conforms: Any) -> None:
    run = lab.fit({"train.checkpoints_total_limit": 1, "data.caption_dropout_rate": 0.0})
    conforms(files.read_json(run.path / "run.json"), "run")
    for name in ("metrics", "saves", "probe"):
        lines = files.read_json_lines(run.path / f"{name}.jsonl")
        assert lines
        for line in lines:
            conforms(line, name)
    line = files.read_json_lines(run.path / "metrics.jsonl")[0]
    assert line["bucket"] == "64x64+64x64"
    assert line["device"] == "cpu" and line["alloc_gib"] == 0.0 and line["rss_gib"] > 0.1
    assert len(line["sigmas"]) == len(line["samples"]) == 2
    assert not list(run.path.glob(".*"))


def test_saves_carry_the_digests_of_what_lies_there(lab: Any) -> None:
    run = lab.fit()
    for line in files.read_json_lines(run.path / "saves.jsonl"):
        folder = run.path / line["path"]
        if line["event"] == "save" and folder.is_dir():
            assert {item.name for item in folder.iterdir()} == set(line["files"])
            for name, recorded in line["files"].items():
                assert files.file_digest(folder / name) == recorded["sha256"]


def test_each_launch_gets_its_own_folder_and_spares_the_others(lab: Any) -> None:
    first = lab.fit()
    before = {path: files.file_digest(path) for path in first.path.rglob("*") if path.is_file()}
    second, smoke = lab.fit(), lab.fit(smoke=True)
    assert [run.path.name for run in (first, second, smoke)] == ["v0", "v1", "v2"]
    assert before == {path: files.file_digest(path) for path in first.path.rglob("*") if path.is_file()}


def test_same_config_gives_the_same_adapter(lab: Any) -> None:
    first, second = (lab.adapter(lab.fit().path) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_smoke_run_is_five_steps_and_one_checkpoint(lab: Any, conforms: Any) -> None:
    run = lab.fit({"train.max_train_steps": 40, "train.checkpointing_steps": 10}, smoke=True)
    document = files.read_json(run.path / "run.json")
    conforms(document, "run")
    assert document["kind"] == "smoke"
    assert document["overrides"] == {
        "train.max_train_steps": 5,
        "train.num_epochs": None,
        "train.checkpointing_steps": 5,
    }
    assert document["planned_checkpoints"] == [5] and steps_of(run.path) == [1, 2, 3, 4, 5]
    assert document["config"]["train"]["max_train_steps"] == 40  # as config.yaml has it
    assert document["resolved"]["train"]["max_train_steps"] == 5


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 4), (2, 2)])
def test_accumulation_equals_one_large_batch(lab: Any, batch: int, accumulation: int) -> None:
    """The mean is over samples; captions are of unequal length, so the large batch is padded and masked."""
    same = {
        "train.max_train_steps": 4,
        "train.checkpointing_steps": 2,
        "optimizer.class_path": "torch.optim.SGD",
    }
    same |= {"lr_scheduler.scheduler_type": "cosine", "lr_scheduler.warmup_steps": 2}
    whole = lab.adapter(lab.fit({**same, "data.batch_size": 4}).path)
    parts = lab.adapter(
        lab.fit({**same, "data.batch_size": batch, "train.gradient_accumulation_steps": accumulation}).path
    )
    one, other = (files.read_json_lines(path / "metrics.jsonl") for path in sorted(lab.project.iterdir()))
    for name in ("loss", "loss_ema", "grad_norm"):
        assert [line[name] for line in one] == pytest.approx([line[name] for line in other], rel=1e-6), name
    for name in ("step", "epoch", "lr", "samples", "sigmas", "tokens", "clipped"):
        assert [line[name] for line in one] == [line[name] for line in other], name
    saved = [[path.name for path in checkpoints.plains(run)] for run in sorted(lab.project.iterdir())]
    assert saved[0] == saved[1] == ["checkpoint-0-2", "checkpoint-1-4"]
    for name, tensor in whole.items():
        assert float((tensor - parts[name]).norm() / tensor.norm()) < 1e-6, name


@pytest.mark.parametrize(("whole", "batch", "accumulation"), [(4, 1, 4), (4, 2, 2), (8, 3, 3)])
def test_gradients_of_accumulation_equal_those_of_one_batch(
    lab: Any, monkeypatch: pytest.MonkeyPatch, whole: int, batch: int, accumulation: int
) -> None:
    """Before Adam, which divides by the gradient's own size and so enlarges rounding near zero.

    Three micro-batches of at most three are 3, 3 and 2 samples: each sample weighs the same.
    """
    seen: list[list[torch.Tensor]] = []

    def keep(session: Any) -> tuple[float, bool]:
        seen.append([p.grad.clone() for p in session.trained.adapter.parameters()])
        session.trained.optimizer.zero_grad()
        return 1.0, False

    monkeypatch.setattr(loop, "_clip", keep)
    same = {"train.max_train_steps": 2, "train.checkpointing_steps": 2}
    lab.fit({**same, "data.batch_size": whole})
    lab.fit({**same, "data.batch_size": batch, "train.gradient_accumulation_steps": accumulation})
    for together, parts in ((seen[0], seen[2]), (seen[1], seen[3])):
        one, other = (
            torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (together, parts)
        )
        assert float((one - other).norm() / one.norm()) <= 1e-6


def test_gradients_do_not_leak_into_the_next_step(lab: Any) -> None:
    session = lab.launch()
    loop.fit(session, Progress(quiet=True))
    assert all(parameter.grad is None for parameter in session.trained.adapter.parameters())


def test_loss_ema_is_that_of_the_losses(lab: Any) -> None:
    lines = files.read_json_lines(lab.fit().path / "metrics.jsonl")
    value = weight = 0.0
    for line in lines:
        value, weight = 0.95 * value + 0.05 * line["loss"], 0.95 * weight + 0.05
        assert line["loss_ema"] == pytest.approx(value / weight)


def test_learns(lab: Any) -> None:
    run = lab.fit({"train.max_train_steps": 30, "train.checkpointing_steps": 30, "train.probe_samples": 8})
    first, last = files.read_json_lines(run.path / "probe.jsonl")
    assert last["train_mean"] < 0.97 * first["train_mean"]


def spoil_steps(session: Any, monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Losses of these steps are no numbers."""
    losses = session.objective.step_losses

    def spoilt(objective: Any, predict: Any, base: Any, batch: Any, draw: Any) -> torch.Tensor:
        found = losses(predict, base, batch, draw)
        step = len(steps_of(session.run.path)) + 1
        return found * float("nan") if step in steps else found

    monkeypatch.setattr(type(session.objective), "step_losses", spoilt)


def test_losses_that_are_no_numbers_stop_the_run_after_a_few_and_keep_the_last_good_checkpoint(
    lab: Any, monkeypatch: pytest.MonkeyPatch, conforms: Any
) -> None:
    session = lab.launch({"train.nonfinite_limit": 2})
    spoil_steps(session, monkeypatch, {4, 5})
    with pytest.raises(loop.NonFiniteError, match=r"step 4: loss nan.*samples p.*\n  step 5") as caught:
        loop.fit(session, Progress(quiet=True))
    assert "optimizer.init_args.lr" in caught.value.remedy
    document = files.read_json(session.run.path / "run.json")
    conforms(document, "run")
    assert (document["state"], document["outcome"], document["done_steps"]) == ("failed", "NonFiniteError", 4)
    lines = files.read_json_lines(session.run.path / "metrics.jsonl")
    for line in lines:
        conforms(line, "metrics")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if line.get("skipped")] == [4, 5]
    assert all(line["loss"] is line["grad_norm"] is None for line in lines[3:])
    assert [path.name for path in checkpoints.lasts(session.run.path)] == ["checkpoint-last-0-3-last"]
    assert [path.name for path in checkpoints.plains(session.run.path)] == ["checkpoint-0-3"]


def test_one_step_that_is_not_finite_is_left_out_and_the_run_goes_on(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update is missing, and nothing else: rate, draws and the rest are those of a run without it."""
    plain = lab.fit()
    session = lab.launch()
    weights: dict[int, list[torch.Tensor]] = {}
    advance = loop._advance

    def watched(session: Any, cursor: Any, line: Any) -> None:
        advance(session, cursor, line)
        weights[cursor.step] = [p.detach().clone() for p in session.trained.adapter.parameters()]

    monkeypatch.setattr(loop, "_advance", watched)
    spoil_steps(session, monkeypatch, {2, 4})
    assert loop.fit(session, Progress(quiet=True)) == "completed"
    assert all(torch.equal(one, other) for one, other in zip(weights[1], weights[2], strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(weights[2], weights[3], strict=True))
    for one, other in zip(
        files.read_json_lines(plain.path / "metrics.jsonl"),
        files.read_json_lines(session.run.path / "metrics.jsonl"),
        strict=True,
    ):
        assert all(one[name] == other[name] for name in ("step", "lr", "sigmas", "samples", "epoch"))
    assert all(bool(tensor.isfinite().all()) for tensor in weights[6])


def test_an_infinite_gradient_is_not_finite_either(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = lab.launch({"train.nonfinite_limit": 1})
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: torch.tensor(float("inf"))
    )
    with pytest.raises(loop.NonFiniteError, match="gradient norm inf"):
        loop.fit(session, Progress(quiet=True))
    assert not checkpoints.lasts(session.run.path)


@pytest.mark.parametrize("how", ["detached", "disabled", "unread"])
def test_a_first_step_without_gradient_is_an_error(lab: Any, how: str) -> None:
    """diffusers and peft offer many ways to cut the graph; the loss stays finite in all of them."""
    # The text stream's last query is computed and read by nobody: its gradient is there, and zero.
    unread = {"model.lora.target_modules": ["transformer_blocks.1.attn.add_q_proj"]}
    session = lab.launch(unread if how == "unread" else {})
    if how == "disabled":
        session.denoiser.disable_adapters()
    elif how == "detached":
        for _, module in session.denoiser.named_modules():
            if hasattr(module, "lora_B"):
                module.lora_B["default"].register_forward_hook(lambda module, given, out: out.detach())
                module.base_layer.register_forward_hook(lambda module, given, out: out.detach())
    with pytest.raises(loop.NoGradientError):
        loop.fit(session, Progress(quiet=True))
    document = files.read_json(session.run.path / "run.json")
    assert (document["state"], document["outcome"]) == ("failed", "NoGradientError")
    assert not checkpoints.lasts(session.run.path)


def test_an_exception_between_boundaries_leaves_a_resumable_checkpoint_of_that_step(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = lab.launch()
    original = loop._step

    def step(session: Any, cursor: Any, window: Any) -> Any:
        if cursor.step == 4:
            raise RuntimeError("a driver fell over")
        return original(session, cursor, window)

    monkeypatch.setattr(loop, "_step", step)
    with pytest.raises(RuntimeError, match="fell over"):
        loop.fit(session, Progress(quiet=True))
    document = files.read_json(session.run.path / "run.json")
    assert (document["state"], document["outcome"]) == ("failed", "RuntimeError")
    assert document["reason"] == "RuntimeError: a driver fell over"
    (last,) = checkpoints.lasts(session.run.path)
    assert checkpoints.read_state(last)["step"] == 4


def test_a_failure_within_the_update_saves_nothing_half_done(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter may be that of the next step already, and the schedule that of this one."""
    session = lab.launch()
    kind = type(session.trained.schedule)
    original, calls = kind.step, []

    def step(schedule: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        original(schedule)

    monkeypatch.setattr(kind, "step", step)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(session, Progress(quiet=True))
    assert [path.name for path in checkpoints.lasts(session.run.path)] == ["checkpoint-last-0-3-last"]
    assert files.read_json(session.run.path / "run.json")["state"] == "interrupted"


def test_a_step_whose_metrics_could_not_be_written_is_not_saved(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the resumed run would go on after a step that no record knows."""
    session = lab.launch()
    write = session.run.metrics

    def metrics(line: dict[str, Any]) -> None:
        if line["step"] == 5:
            raise OSError("no space left on device")
        write(line)

    monkeypatch.setattr(type(session.run), "metrics", lambda self, line: metrics(line))
    with pytest.raises(OSError, match="no space"):
        loop.fit(session, Progress(quiet=True))
    (last,) = checkpoints.lasts(session.run.path)
    assert checkpoints.read_state(last)["step"] == 3


def test_a_disk_that_takes_no_checkpoint_still_ends_the_run(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = lab.launch()

    def full(*given: Any, **named: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoints, "save_last", full)
    with pytest.raises(OSError, match="no space"):
        loop.fit(session, Progress(quiet=True))
    document = files.read_json(session.run.path / "run.json")
    assert (document["state"], document["outcome"]) == ("failed", "OSError")


def test_best_is_the_checkpoint_with_the_lowest_held_out_loss(lab: Any) -> None:
    run = lab.fit({"train.max_train_steps": 4, "train.checkpointing_steps": 1})
    probes = {
        line["step"]: line["holdout_mean"]
        for line in files.read_json_lines(run.path / "probe.jsonl")
        if line["step"]
    }
    best = files.read_json(run.path / "run.json")["best"]
    assert best["step"] == min(probes, key=lambda step: probes[step])
    assert best["holdout_loss"] == min(probes.values())
    assert (run.path / best["checkpoint"]).is_dir()


def test_the_line_of_a_step_has_all_that_a_person_watches(
    lab: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_S", 0.0)
    session = lab.launch({"lr_scheduler.scheduler_type": "linear"})
    loop.fit(session, Progress())
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fit ")]
    for told, line in zip(said, files.read_json_lines(session.run.path / "metrics.jsonl"), strict=True):
        expected = (
            f"fit {line['step']}/6  loss {line['loss']:.4f} (smooth {line['loss_ema']:.4f})  "
            f"lr {line['lr']:.2e}  {line['step_s']:.2f} s/step  {line['rss_gib']:.1f} GiB  "
        )
        assert re.fullmatch(re.escape(expected) + r"ETA \d+ s", told)


def test_a_first_step_that_is_left_out_raises_no_warning_of_torch(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings are errors here."""
    session = lab.launch()
    spoil_steps(session, monkeypatch, {1})
    assert loop.fit(session, Progress(quiet=True)) == "completed"
