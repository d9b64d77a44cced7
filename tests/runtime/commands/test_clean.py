"""`finetune clean` takes away what a kill left, and nothing that anyone needs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from runtime import cli, files
from runtime.cache.store import LOCK, PARTS
from runtime.commands import clean as command
from runtime.memory import modulation
from runtime.training import ahead, checkpoints


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


HEX = "0123456789abcdef"


@pytest.fixture
def tables(lab: Any) -> Path:
    """One of ours, one with a file of somebody's, and three that are not known to be ours."""
    folder: Path = lab.root / command.TABLES
    for name in (HEX, HEX[::-1], "notes", HEX[:15], "f" * 16):
        (folder / name).mkdir(parents=True)
        if name != "f" * 16:
            files.write_json(folder / name / "table.json", {"made_from": {}, "files": {}})
        (folder / name / f"{HEX}.bin").write_bytes(bytes(2**20))
        (folder / name / f".{HEX}.bin.tmp").write_bytes(b"half")
    (folder / HEX[::-1] / "mine.bin").write_bytes(b"mine")
    return folder


def test_tables_of_modulations_go_only_when_asked(lab: Any, tables: Path, capsys: Any) -> None:
    lab.configure()
    everything = sorted(tables.rglob("*"))
    assert clean(lab) == 0 and "modulation" not in capsys.readouterr().out
    assert clean(lab, "--cache", "--dry-run") == 0
    assert f"would remove {command.TABLES}/{HEX}, 1.00 MiB" in capsys.readouterr().out
    assert sorted(tables.rglob("*")) == everything
    assert clean(lab, "--cache") == 0
    assert capsys.readouterr().out.count(f"removed {command.TABLES}/") == 2
    spared = [path for path in everything if path.name not in (HEX, HEX[::-1])]
    spared = [path for path in spared if path.parent.name not in (HEX, HEX[::-1]) or path.name == "mine.bin"]
    assert sorted(tables.rglob("*")) == sorted([*spared, tables / HEX[::-1]])


def test_tables_stay_while_a_run_goes(lab: Any, tables: Path) -> None:
    run = lab.fit()
    files.write_json(run.path / "run.json", {**run.document, "state": "running"})
    assert clean(lab, "--cache") == 0
    assert (tables / HEX / f"{HEX}.bin").is_file()


def test_a_table_that_is_in_use_is_said(
    lab: Any, tables: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Windows says it; its index is still there, so that the next clean knows it."""
    lab.configure()
    unlink = Path.unlink

    def refused(path: Path, **named: Any) -> None:
        if path.name.endswith(".bin"):
            raise PermissionError(13, "used by another process")
        unlink(path, **named)

    monkeypatch.setattr(Path, "unlink", refused)
    assert clean(lab, "--cache") == 1
    assert "is in use" in capsys.readouterr().err
    assert (tables / HEX / "table.json").is_file()


def test_tables_are_called_as_they_are_made() -> None:
    assert (command.TABLES, command.TABLE_INDEX) == (ahead.FOLDER, modulation.INDEX)
    (name,) = modulation._chunks([[0.5]])
    assert command.ROWS.fullmatch(name) and command.ROWS.fullmatch(f".{name}.tmp")


def test_parts_of_a_killed_cache_phase(lab: Any, capsys: Any) -> None:
    """While it goes on they are needed; afterwards entries that it made are not yet known to be wanted."""
    lab.configure()
    cache = lab.root / "cache"
    manifest = files.read_json(cache / "manifest.json")
    files.write_json(cache / "manifest.json", {**manifest, "complete": False})
    (cache / PARTS).mkdir()
    part, stranger = cache / PARTS / f"{HEX}.safetensors", cache / PARTS / "mine.safetensors"
    part.write_bytes(bytes(2**20))
    stranger.write_bytes(b"mine")
    entries = sorted(cache.glob("*/entry.json"))
    assert clean(lab) == 0 and part.is_file()
    with FileLock(cache / LOCK):
        assert clean(lab, "--cache") == 1, "not finished"
    assert clean(lab, "--cache", "--dry-run") == 0 and part.is_file()
    assert f"would remove cache/{PARTS}, 1.00 MiB" in capsys.readouterr().out
    assert clean(lab, "--cache") == 0
    assert not part.exists() and stranger.is_file() and sorted(cache.glob("*/entry.json")) == entries
    stranger.unlink()
    part.write_bytes(b"x")
    assert clean(lab, "--cache") == 0 and not (cache / PARTS).exists()
