"""The folder of a run and the lines in it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime import files
from runtime.training import record
from runtime.training.record import Run


def test_versions_count_up_from_the_highest(tmp_path: Path) -> None:
    for name in ("v0", "v2", "v10", "v", "v1x", "wip"):
        (tmp_path / name).mkdir()
    (tmp_path / "v99").write_text("a file", encoding="utf-8")
    assert [number for number, _ in record.versions(tmp_path)] == [0, 2, 10]
    assert record.open_run(tmp_path, {}, {}).path.name == "v11"
    assert record.versions(tmp_path / "absent") == []


def test_a_race_for_a_folder_is_settled_by_the_next_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = record.versions
    seen: list[int] = []

    def late(project: Path) -> Any:
        listed = found(project)
        if not seen:  # another launch comes between our look and our mkdir
            (project / f"v{len(listed)}").mkdir()
        seen.append(1)
        return listed

    monkeypatch.setattr(record, "versions", late)
    assert record.open_run(tmp_path, {}, {}).path.name == "v1"


def test_the_resolved_config_lies_beside_run_json(tmp_path: Path) -> None:
    run = record.open_run(tmp_path, {"train": {"seed": 1}, "text": "gr\u00fcn"}, {"run_id": "r"})
    text = (run.path / "config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {"train": {"seed": 1}, "text": "gr\u00fcn"}
    assert files.read_json(run.path / "run.json")["run_id"] == "r"


def test_a_change_is_on_disk_at_once_with_a_heartbeat(tmp_path: Path) -> None:
    run = Run(path=tmp_path, document={"heartbeat_at": ""})
    run.write(done_steps=3)
    document = files.read_json(tmp_path / "run.json")
    assert document["done_steps"] == 3 and document["heartbeat_at"].endswith("Z")
    run.finish("failed", "OSError", "no space")
    document = files.read_json(tmp_path / "run.json")
    assert (document["state"], document["outcome"], document["reason"]) == ("failed", "OSError", "no space")
    assert document["ended_at"] is not None


def test_runs_come_newest_first_without_those_that_can_not_be_read(tmp_path: Path) -> None:
    for number, text in enumerate(('{"n": 0}', "", '{"n": 2}', '{"n"')):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "run.json").write_text(text, encoding="utf-8")
    (tmp_path / "v4").mkdir()
    assert [document["n"] for _, document in record.runs(tmp_path)] == [2, 0]


def test_lines_are_whole_and_torn_ones_passed_over(tmp_path: Path) -> None:
    run = Run(path=tmp_path)
    run.metrics({"step": 1})
    run.metrics({"step": 2})
    with (tmp_path / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"step": 3')
    assert [line["step"] for line in files.read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_packages_are_named_with_versions() -> None:
    found = record.packages()
    assert set(found) == {"python", *record.PACKAGES}
    assert "absent" not in found.values()
