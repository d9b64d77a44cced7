import json
import os
import shutil
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gates import chain, cli
from gates.reports import bundle
from gates.workspace import Workspace


@pytest.fixture
def stored(made: Any) -> Any:
    workspace = Workspace.open(made.root)
    for item in chain.judge_up_to(workspace, "08"):
        item.write(workspace)
    return made


def _write(root: Path, path: Path, **options: Any) -> bundle.Packed:
    return bundle.write(Workspace.open(root), path, **options)


def _verify(path: Path, *arguments: str) -> int:
    return cli.main(["verify", "--bundle", str(path), *arguments])


ALLOW = "--allow-absent"


@pytest.mark.parametrize(
    ("options", "arguments", "code"),
    [
        ({}, (), 3),
        ({}, (ALLOW, "weights,dataset,cache"), 0),
        ({}, (ALLOW, "weights"), 3),
        ({"also": ("cache", "dataset")}, (ALLOW, "weights"), 0),
        ({"also": ("cache",)}, (ALLOW, "weights,dataset"), 0),
        ({"without": ("weights",)}, (ALLOW, "weights,dataset,cache"), 0),
        ({"without": ("weights",)}, (ALLOW, "dataset,cache"), 3),
    ],
)
def test_a_bundle_is_verified_elsewhere(
    stored: Any, tmp_path: Path, options: dict[str, Any], arguments: tuple[str, ...], code: int
) -> None:
    path = tmp_path / "elsewhere" / "b.zip"
    packed = _write(stored.root, path, **options)
    shutil.rmtree(stored.root)
    assert _verify(path, *arguments) == code
    allowed = arguments[1].split(",") if arguments else []
    assert (set(packed.absent) <= set(allowed)) == (code == 0)


def test_a_bundle_with_adapters_leaves_only_these_unverifiable(
    stored: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Learning, memory, the adapter's tensors and the pictures are judged anew."""
    _write(stored.root, tmp_path / "b.zip", also=("cache", "dataset"))
    assert _verify(tmp_path / "b.zip", "--json") == 3
    document = json.loads(capsys.readouterr().out)
    found = {f["id"] for item in document["verdicts"] for f in item["findings"] if f["state"] != "confirmed"}
    assert found == {
        "paths-exist", "components-present", "quantization-recorded", "size-ratio", "error-bounded",
        "source-untouched", "resumable-last",
    }  # fmt: skip


def test_what_is_outside_of_the_workspace_has_its_place(
    stored: Any, tmp_path: Path, workspaces: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "pictures of mine"
    stored.dataset.rename(outside)
    local = {"external": {"dataset": str(outside)}}
    (stored.root / ".gates/local.json").write_text(json.dumps(local), encoding="utf-8")
    stored.edit(".gates/target.json", lambda document: document.update(dataset="external:dataset"))

    def move(document: Any) -> None:
        document["data"]["root"] = "external:dataset"
        document["data"]["sources"][0].update(root="external:dataset", origin="external:dataset")

    stored.edit(stored.evidence("02-dataset"), move)
    workspace = Workspace.open(stored.root)
    for item in chain.judge_up_to(workspace, "08"):
        item.write(workspace)
    _write(stored.root, tmp_path / "b.zip", also=("dataset",))
    shutil.rmtree(outside)
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        names = archive.namelist()
        assert "external/dataset/training_images/s05.png" in names
        assert "workspace/.gates/local.json" not in names
        data = b"".join(archive.read(name) for name in names)
    assert str(tmp_path).encode() not in data
    assert _verify(tmp_path / "b.zip", "02") == 0
    archive_folder = tmp_path / "unpacked"
    shutil.unpack_archive(tmp_path / "b.zip", archive_folder)
    for place in (archive_folder, archive_folder / "workspace"):
        assert cli.main(["verify", "02", "--workspace", str(place)]) == 0


def test_it_is_deterministic_and_holds_what_it_should(stored: Any, tmp_path: Path) -> None:
    for name in ("index.json", "error.log", "local.json", "jobs/1.json"):
        place = stored.root / ".gates" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text('{"external": {}}', encoding="utf-8")
    _write(stored.root, tmp_path / "a.zip")
    for path in stored.root.rglob("*"):
        os.utime(path, (10**9, 10**9))
    packed = _write(stored.root, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        names = archive.namelist()
        assert {info.date_time for info in archive.infolist()} == {bundle.EPOCH}
    assert names == sorted(names) and len(names) == packed.files and all(map(bundle.safe, names))
    gates = {name for name in names if name.startswith("workspace/.gates/")}
    folders = {name.split("/")[2] for name in gates}
    assert folders == {"evidence", "verdicts", "target.json"}
    endings = {name.rpartition("/")[2] for name in names if name.startswith("workspace/outputs/")}
    assert "optimizer.bin" not in endings and {"run.json", "model.safetensors"} <= endings
    assert not [name for name in names if name.startswith("workspace/data/")]
    assert not [name for name in names if name.startswith("workspace/cache/") and not name.endswith(".json")]


def test_a_bundle_too_large_says_how_to_make_it_smaller(
    stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 1000)
    code = cli.main(["report", "--bundle", str(tmp_path / "b.zip"), "--workspace", str(stored.root)])
    assert code == 3 and "try --without weights" in capsys.readouterr().err
    assert list(tmp_path.glob("*.zip")) == list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize(
    ("name", "sound"),
    [
        ("workspace/a/b.json", True),
        ("workspace/.gates/target.json", True),
        ("../a", False),
        ("workspace/../../a", False),
        ("workspace/./a", False),
        ("/etc/passwd", False),
        ("C:/a", False),
        ("workspace\\a", False),
        ("workspace//a", False),
        ("workspace/a:b", False),
        ("workspace/CON", False),
        ("workspace/nul.txt", False),
        ("workspace/a.", False),
        ("workspace/a /b", False),
        ("workspace/\x07", False),
        ("", False),
    ],
)
def test_names_that_stay_inside_and_that_windows_takes(name: str, sound: bool) -> None:
    assert bundle.safe(name) == sound


def _hostile(path: Path, members: list[tuple[str, bytes, int]]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, data)


FILE, LINK = stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777
TARGET = ("workspace/.gates/target.json", b"{}", FILE)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([TARGET, ("../evil.txt", b"x", FILE)], "no name that a bundle has"),
        ([TARGET, ("workspace/../../evil.txt", b"x", FILE)], "no name that a bundle has"),
        ([TARGET, ("elsewhere/evil.txt", b"x", FILE)], "no name that a bundle has"),
        ([TARGET, ("workspace/link", b"/etc", LINK)], "no plain file"),
        ([TARGET, ("workspace/folder/", b"", stat.S_IFDIR | 0o755)], "no plain file"),
        ([TARGET, ("workspace/A", b"x", FILE), ("workspace/a", b"y", FILE)], "in it twice"),
        ([TARGET, ("workspace/big", b"0" * 5000, FILE)], "more than is unpacked"),
        ([("external/a/b", b"x", FILE)], "is no bundle"),
    ],
)
def test_a_hostile_archive_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    members: list[tuple[str, bytes, int]],
    message: str,
) -> None:
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 4000)
    _hostile(tmp_path / "b.zip", members)
    inner = tmp_path / "in" / "ner"
    inner.mkdir(parents=True)
    with pytest.raises(bundle.BundleError, match=message):
        bundle.unpack(tmp_path / "b.zip", inner)
    assert not list(tmp_path.rglob("evil.txt"))
    assert _verify(tmp_path / "b.zip") == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 no archive", b"<html>"])
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "b.zip").write_bytes(data)
    assert _verify(tmp_path / "b.zip") == 3
    assert _verify(tmp_path / "absent.zip") == 3


def test_a_member_longer_than_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("workspace/a", b"0" * 100_000)
    raw = path.read_bytes().replace((100_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    path.write_bytes(raw)
    with pytest.raises(bundle.BundleError):
        bundle.unpack(path, tmp_path / "out")


def test_a_flipped_byte_is_seen(stored: Any, tmp_path: Path) -> None:
    _write(stored.root, tmp_path / "b.zip", also=("cache", "dataset"))
    root = bundle.unpack(tmp_path / "b.zip", tmp_path / "out")
    weights = sorted(root.glob("outputs/edit-lora/v1/checkpoint-5-60/*.safetensors"))[0]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    command = ["verify", "07", ALLOW, "weights", "--workspace", str(root)]
    assert cli.main(command) == 1


def test_an_unfinished_workspace_has_a_bundle_too(tmp_path: Path, workspaces: Any) -> None:
    root = tmp_path / "ws"
    (root / ".gates").mkdir(parents=True)
    target = {
        "schema": "target/1", "device": "cpu", "model": "m", "dataset": "d", "python": "3.11",
        "created_at": workspaces.NOW,
    }  # fmt: skip
    workspaces.write_json(root / ".gates/target.json", target)
    command = ["report", "--bundle", str(tmp_path / "b.zip"), "--workspace", str(root)]
    assert cli.main(command) == 0
    assert _verify(tmp_path / "b.zip") == 0
