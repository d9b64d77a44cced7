"""A run across its resumes, and the line that says it only remembers."""

from typing import Any

import pytest

from runtime import files
from runtime.training import history


def points(held: list[float | None], train: list[float]) -> list[dict[str, Any]]:
    pairs = enumerate(zip(held, train, strict=True))
    return [{"step": index * 10, "holdout_mean": h, "train_mean": t} for index, (h, t) in pairs]


FALL = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
NAMES = {10: "v0/checkpoint-1-10", 20: "v0/checkpoint-2-20", 30: "v1/checkpoint-3-30"}

CASES = [
    ("no probe", [], [], ""),
    ("falls", FALL, FALL, ""),
    ("two rises", [0.9, 0.8, 0.5, 0.6, 0.7], FALL[:5], ""),
    ("three rises", [0.9, 0.5, 0.6, 0.7, 0.8], FALL[:5], "the best checkpoint is v0/checkpoint-1-10"),
    ("three that stand still", [0.9, 0.5, 0.6, 0.6, 0.8], FALL[:5], ""),
    ("training rises too", [0.9, 0.5, 0.6, 0.7, 0.8], [0.5, 0.6, 0.7, 0.8, 0.9], ""),
    ("later dip, still above", [0.9, 0.5, 0.6, 0.7, 0.8, 0.75], FALL, "v0/checkpoint-1-10"),
    ("better again at last", [0.9, 0.5, 0.6, 0.7, 0.8, 0.4], FALL, ""),
    (
        "from the start",
        [0.5, 0.6, 0.7, 0.8],
        FALL[:4],
        "the best checkpoint that there is, v0/checkpoint-1-10, is past it",
    ),
    ("no held-out samples", [None] * 5, FALL[:5], ""),
]


@pytest.mark.parametrize(("case", "held", "train", "said"), CASES, ids=[case[0] for case in CASES])
def test_overfitting(case: str, held: list[float | None], train: list[float], said: str) -> None:
    line = history.overfitting(points(held, train), NAMES)
    assert bool(line) == bool(said) and said in line and "\n" not in line


def test_the_line_has_the_numbers() -> None:
    line = history.overfitting(points([0.9, 0.5, 0.6, 0.7, 0.8], FALL[:5]), NAMES)
    assert line == (
        "overfitting: since step 10 the held-out loss rose from 0.5000 to 0.8000 while the training loss fell "
        "from 0.8000 to 0.5000; the best checkpoint is v0/checkpoint-1-10"
    )


def test_without_a_checkpoint_there_is_none_to_name() -> None:
    assert "save more often" in history.overfitting(points([0.5, 0.6, 0.7, 0.8], FALL[:4]), {})


def test_a_resumed_run_is_read_from_its_first_step_on(lab: Any) -> None:
    """v0 went on to 6 after the save at 4 that v1 resumed: its lines 5 and 6 don't count."""
    changes = {"train.max_train_steps": 6, "train.checkpointing_steps": 2}
    first = lab.fit(changes).path
    second = first.with_name("v1")
    document = files.read_json(first / "run.json")
    origin = {"run_id": document["run_id"], "run": "v0", "step": 4, "checkpoint": "c", "digest": "0" * 64}
    resumed = {**document, "run_id": "other", "resumed_from": origin}
    files.write_json(second / "run.json", resumed)
    for name in ("metrics.jsonl", "probe.jsonl", "saves.jsonl"):
        for line in files.read_json_lines(first / name):
            if line["step"] > 4:
                files.append_json_line(second / name, line)
    past = history.read(second, resumed)
    assert [(line["run"], line["step"]) for line in past.metrics] == [
        *[("v0", step) for step in (1, 2, 3, 4)],
        ("v1", 5),
        ("v1", 6),
    ]
    assert [line["step"] for line in past.probes] == [0, 2, 4, 6]
    assert {step: name[:2] for step, name in past.checkpoints.items()} == {2: "v0", 4: "v0", 6: "v1"}


def test_a_pruned_checkpoint_is_not_named(lab: Any) -> None:
    run = lab.fit(
        {"train.max_train_steps": 6, "train.checkpointing_steps": 2, "train.checkpoints_total_limit": 1}
    )
    named = history.read(run.path, run.document).checkpoints
    there = {f"v0/{path.name}" for path in run.path.glob("checkpoint-[0-9]*")}
    assert set(named.values()) == there and len(there) < 3
