"""`finetune clean` takes away what a kill left, and nothing that anyone needs."""

import json
import shutil
from typing import Any

from runtime import cli, files
from runtime.training import checkpoints


def clean(lab: Any, *line: str) -> int:
    return cli.main(["clean", "--workspace", str(lab.root), *line])


def test_reduces_to_one_last_and_records_it(lab: Any, capsys: Any) -> None:
    run = lab.fit()
    (last,) = checkpoints.lasts(run.path)
    older = last.with_name("checkpoint-last-0-3-last")
    shutil.copytree(last, older)
    (run.path / ".checkpoint-last-0-4-last.tmp").mkdir()
    plain = checkpoints.plains(run.path)
    assert clean(lab, "--dry-run") == 0
    assert (
        older.is_dir()
        and "would remove outputs/edit-lora/v0/checkpoint-last-0-3-last" in capsys.readouterr().out
    )
    assert clean(lab) == 0
    assert checkpoints.lasts(run.path) == [last] and checkpoints.plains(run.path) == plain
    assert not (run.path / ".checkpoint-last-0-4-last.tmp").exists()
    line = files.read_json_lines(run.path / "saves.jsonl")[-1]
    assert (line["event"], line["path"]) == ("prune", older.name)
    capsys.readouterr()
    assert clean(lab, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [], "would_remove": []}


def test_leaves_a_run_alone_that_still_goes(lab: Any) -> None:
    run = lab.fit()
    (last,) = checkpoints.lasts(run.path)
    shutil.copytree(last, last.with_name("checkpoint-last-0-3-last"))
    files.write_json(run.path / "run.json", {**run.document, "state": "running"})
    assert clean(lab) == 0
    assert len(checkpoints.lasts(run.path)) == 2


def test_cache_entries_of_earlier_settings_go_only_when_asked(lab: Any) -> None:
    stranger = lab.root / "cache" / "notes.txt"
    stranger.write_text("mine", encoding="utf-8")
    lab.cache({"data.processor.target_size": [32, 32]})
    folders = [path for path in (lab.root / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 22
    (next(path for path in folders) / "keep.me").write_text("mine", encoding="utf-8")
    assert clean(lab) == 0 and all(path.is_dir() for path in folders)
    assert clean(lab, "--cache") == 0
    left = [path for path in (lab.root / "cache").iterdir() if path.is_dir()]
    assert len(left) in (11, 12) and stranger.is_file()
    assert all((path / "entry.json").is_file() or (path / "keep.me").is_file() for path in left)


def test_a_cache_on_another_disk_is_cleaned_too(lab: Any, tmp_path: Any) -> None:
    outside = {"cache.cache_dir": str(tmp_path / "disk" / "cache")}
    lab.cache({**outside, "data.processor.target_size": [32, 32]})
    lab.cache(outside)
    assert clean(lab, "--cache") == 0
    assert sum(path.is_dir() for path in (tmp_path / "disk" / "cache").iterdir()) == 11
