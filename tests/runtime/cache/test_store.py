"""Entries on disk: whole or not there, ours or never touched."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import files
from runtime.cache.encode import Encoded
from runtime.cache.key import Wanted
from runtime.cache.store import Store
from runtime.errors import CacheError
from runtime.index import Index
from runtime.progress import Progress


def want(name: str = "a", **changes: Any) -> Wanted:
    document = {
        "schema": "cache-key/2",
        "settings": {"family": "f"},
        "sizes": {"target": [64, 64], "controls": [[64, 64]]},
        "boxes": {"target": [0.0, 0.0, 64.0, 64.0], "controls": [[0.0, 0.0, 64.0, 64.0]]},
        "prompt": name,
        "alternatives": [],
        "negative_prompt": None,
        "target": "0" * 64,
        "controls": ["1" * 64],
        "mask": None,
        "empty_prompt": False,
        **changes,
    }
    return Wanted(
        id=name,
        split="train",
        document=document,
        key=files.document_digest(document),
        target=None,
        controls=(),
    )


def tensors() -> dict[str, torch.Tensor]:
    return {"target": torch.arange(8.0).reshape(2, 2, 2), "prompt_embeds": torch.ones(3, 4).bfloat16()}


def encoded(notes: tuple[str, ...] = ()) -> Encoded:
    return Encoded(tensors=tensors(), notes=list(notes))


def write_manifest(store: Store, wants: list[Wanted], *, complete: bool = True) -> None:
    entries = {want.folder: store.entry(want.folder) for want in wants} if complete else None
    store.write_manifest(wants, {"family": "f"}, "2" * 64, entries)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", Index(path=tmp_path / "index.json"))


def test_what_was_written_is_read_and_without_fault(store: Store, conforms: Any) -> None:
    store.write(want(), encoded())
    assert store.fault(want()) == ""
    read = store.read(want().folder)
    for name, tensor in tensors().items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
    entry = store.entry(want().folder)
    conforms(entry, "cache-entry")
    assert files.document_digest(entry["document"]) == entry["key"] == want().key
    assert entry["tensors"]["prompt_embeds"] == {"shape": [3, 4], "dtype": "bfloat16"}
    assert sorted(path.name for path in (store.root / want().folder).iterdir()) == [
        "entry.json",
        "tensors.safetensors",
    ]


def test_a_view_is_saved_without_the_storage_behind_it(store: Store) -> None:
    large = torch.randn(64, 100, 100)
    store.write(
        want(), Encoded(tensors={"target": large[3], "turned": large[5].T, "prompt_embeds": large[:, 0, 0]})
    )
    payload = 4 * (100 * 100 + 100 * 100 + 64)
    size = (store.root / want().folder / "tensors.safetensors").stat().st_size
    assert payload <= size < payload + 1000
    assert torch.equal(store.read(want().folder)["turned"], large[5].T)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def other(path: Path) -> None:
    document = files.read_json(path)
    files.write_json(path, {**document, "document": {**document["document"], "prompt": "b"}})


@pytest.mark.parametrize(
    ("name", "spoil", "fault"),
    [
        ("tensors.safetensors", Path.unlink, "tensors.safetensors is missing"),
        ("tensors.safetensors", zero, "tensors.safetensors has 0 bytes, "),
        ("tensors.safetensors", cut, "tensors.safetensors has "),
        ("tensors.safetensors", flip, "tensors.safetensors has changed since it was written"),
        ("entry.json", Path.unlink, "not there"),
        ("entry.json", zero, "entry.json is damaged"),
        ("entry.json", cut, "entry.json is damaged"),
        ("entry.json", lambda path: path.write_text("[]", encoding="utf-8"), "entry.json is damaged"),
        (
            "entry.json",
            lambda path: path.write_text('{"files": {}}', encoding="utf-8"),
            "entry.json is damaged",
        ),
        ("entry.json", lambda path: path.write_bytes(b"\xff\xfe{}"), "entry.json is damaged"),
        ("entry.json", other, "made for something else"),
    ],
)
def test_faults(store: Store, name: str, spoil: Any, fault: str) -> None:
    store.write(want(), encoded())
    spoil(store.root / want().folder / name)
    assert store.fault(want()).startswith(fault)
    store.write(want(), encoded())
    assert store.fault(want()) == ""


def test_a_kill_before_entry_json_leaves_no_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.write(want(), encoded())
    assert store.fault(want()) == "not there"


def test_manifest(store: Store, conforms: Any) -> None:
    with pytest.raises(CacheError, match=r"manifest\.json is missing"):
        store.manifest()
    wants = [want("a"), want("b")]
    for item in wants:
        store.write(item, encoded())
    write_manifest(store, wants, complete=False)
    conforms(files.read_json(store.manifest_path), "cache-manifest")
    with pytest.raises(CacheError, match="is not finished"):
        store.manifest()
    write_manifest(store, wants)
    document = store.manifest()
    conforms(document, "cache-manifest")
    assert [(e["id"], e["folder"]) for e in document["entries"]] == [(w.id, w.folder) for w in wants]
    assert document["counts"] == {"train": 2, "holdout": 0, "prompt": 0}


def test_a_manifest_that_says_the_same_is_left_alone(store: Store) -> None:
    """Evidence names its digest, and would go stale at every look."""
    store.write(want("a"), encoded())
    write_manifest(store, [want("a")])
    before = store.manifest_path.read_bytes()
    write_manifest(store, [want("a")])
    assert store.manifest_path.read_bytes() == before
    write_manifest(store, [])
    assert store.manifest_path.read_bytes() != before


def test_what_was_cached_before_is_known_after_a_kill(store: Store) -> None:
    store.write(want("a"), encoded())
    assert store.documents() == {}
    write_manifest(store, [want("a")])
    write_manifest(store, [want("a", prompt="b")], complete=False)
    assert store.documents() == {("train", "a"): want("a").document}


def test_what_a_killed_process_left_half_written_is_taken_away(store: Store) -> None:
    store.write(want(), encoded())
    folder = store.root / want().folder
    for name in (".tensors.safetensors.77.tmp", ".entry.json.78.tmp", ".others.79.tmp"):
        (folder / name).write_bytes(b"x")
    store.write(want(), encoded())
    assert sorted(path.name for path in folder.glob(".*")) == [".others.79.tmp"]


def test_notes_stay_with_the_entry(store: Store, conforms: Any) -> None:
    store.write(want(), encoded(("prompt_embeds: longer than 8 tokens",)))
    entry = store.entry(want().folder)
    conforms(entry, "cache-entry")
    assert entry["notes"] == ["prompt_embeds: longer than 8 tokens"]


def test_a_whole_entry_is_hashed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(want(), encoded())
    path = store.root / want().folder / "tensors.safetensors"
    os.utime(path, (1_000_000_000, 1_000_000_000))
    read: list[Path] = []
    original = files.file_digest
    monkeypatch.setattr(files, "file_digest", lambda path: (read.append(path), original(path))[1])
    assert (store.fault(want()), store.fault(want()), read) == ("", "", [path])
    os.utime(path, (1_000_000_001, 1_000_000_001))
    assert (store.fault(want()), len(read)) == ("", 2)


def test_a_second_one_waits_and_says_so(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    entered, leave, order = threading.Event(), threading.Event(), []

    def first() -> None:
        with Store(store.root, store.index).locked(Progress(quiet=True)):
            entered.set()
            leave.wait(10)
            order.append("first left")

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    threading.Timer(0.2, leave.set).start()
    with store.locked(Progress()):
        order.append("second in")
    thread.join()
    assert order == ["first left", "second in"]
    assert capsys.readouterr().err == "another process fills cache: waiting for it\n"
    with store.locked(Progress()):  # alone: nothing to say
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xff"])
def test_a_damaged_manifest_is_no_traceback(store: Store, data: bytes) -> None:
    store.root.mkdir()
    store.manifest_path.write_bytes(data)
    with pytest.raises(CacheError, match="can't be read") as caught:
        store.manifest()
    assert caught.value.remedy == "finetune cache"


@pytest.mark.parametrize("spoil", [zero, cut, Path.unlink])
def test_reading_damaged_files_is_no_traceback(store: Store, spoil: Any) -> None:
    store.write(want(), encoded())
    spoil(store.root / want().folder / "tensors.safetensors")
    with pytest.raises(CacheError, match="can't be read"):
        store.read(want().folder)
    spoil(store.root / want().folder / "entry.json")
    with pytest.raises(CacheError, match="can't be read"):
        store.entry(want().folder)


def test_unlisted_are_whole_entries_of_ours_only(store: Store) -> None:
    for item in (want("a"), want("b")):
        store.write(item, encoded())
    (store.root / "photos").mkdir()
    (store.root / "photos" / "own.safetensors").write_bytes(b"x")
    (store.root / "photos" / "entry.json").write_bytes(b"{}")
    write_manifest(store, [want("a")])
    assert store.unlisted() == [store.root / want("b").folder]
