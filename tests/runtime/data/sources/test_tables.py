import io
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runtime.data.sample import Kind, Scan
from runtime.data.sources import tables
from runtime.data.sources.archives import Columns, open_archive
from runtime.errors import DataError

datasets = pytest.importorskip("datasets", reason="needs the extra [datasets]")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

Cell = bytes | dict[str, Any] | None
PICTURE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cache but a temporary one, no bars, no network."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def picture(shade: int, form: str = "PNG") -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (6, 4), (shade, 40, 90)).save(held, form)
    return held.getvalue()


def cell(data: bytes | None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": path}


def saved(rows: dict[str, list[Any]], *pictures: str, lists: tuple[str, ...] = ()) -> Any:
    made = datasets.Dataset.from_dict(rows)
    for name in pictures:
        made = made.cast_column(name, datasets.Image())
    for name in lists:
        made = made.cast_column(name, datasets.List(datasets.Image()))
    return made


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, **options)
    return path


def unpack(kind: Kind, path: Path, columns: Columns = Columns()) -> Scan:  # noqa: B008 (frozen)
    return open_archive(kind, path, path.parent / "into", columns)


def contents(scan: Scan) -> dict[str, tuple[list[bytes], bytes | None, str]]:
    return {
        found.id: (
            [path.read_bytes() for path in (found.target, *found.controls)],
            found.mask.read_bytes() if found.mask else None,
            found.caption.read_text(encoding="utf-8") if found.caption else "",
        )
        for found in scan.samples
    }


ROWS: dict[str, list[Any]] = {
    "target": [cell(picture(1, "JPEG")), cell(picture(2))],
    "control": [cell(picture(3)), None],
    "mask": [cell(picture(4)), None],
    "prompt": ["größer 猫", "two\nlines"],
    "id": [7, 12],
}
CONTENTS = {
    "7": ([picture(1, "JPEG"), picture(3)], picture(4), "größer 猫"),
    "12": ([picture(2)], None, "two\nlines"),
}


def test_saved_dataset_with_the_very_bytes(tmp_path: Path) -> None:
    saved(ROWS, "target", "control", "mask").save_to_disk(tmp_path / "set")
    scan = unpack("huggingface", tmp_path / "set")
    assert contents(scan) == CONTENTS
    assert [found.target.name for found in scan.samples] == ["12.png", "7.jpg"]
    assert (scan.dropped, scan.warnings) == ((), ())
    names = {"state.json", "dataset_info.json", "data-00000-of-00001.arrow"}
    assert {path.name for path in scan.files} == names


def test_parquet_that_datasets_wrote(tmp_path: Path) -> None:
    saved(ROWS, "target", "control", "mask").to_parquet(tmp_path / "set.parquet")
    scan = unpack("parquet", tmp_path / "set.parquet")
    assert contents(scan) == CONTENTS
    assert scan.files == (tmp_path / "set.parquet",)


def test_second_call_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(ROWS, "target", "control", "mask").save_to_disk(tmp_path / "set")
    first = unpack("huggingface", tmp_path / "set")
    monkeypatch.setattr(datasets, "load_from_disk", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert unpack("huggingface", tmp_path / "set") == first


def test_dict_of_splits_takes_train_and_says_so(tmp_path: Path) -> None:
    whole = saved(ROWS, "target", "control", "mask")
    splits = {"train": whole, "test": whole.select([0]), "extra": whole.select([1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    scan = unpack("huggingface", tmp_path / "set")
    assert contents(scan) == CONTENTS
    assert [(note.path, note.reason) for note in scan.warnings] == [
        ("set", "split train is taken; not used: test, extra")
    ]
    assert {path.parent.name for path in scan.files} == {"set", "train"}
    again = unpack("huggingface", tmp_path / "set")
    assert again == scan
    one = open_archive("huggingface", tmp_path / "set" / "test", tmp_path / "one", Columns())
    assert [found.id for found in one.samples] == ["7"] and one.warnings == ()


def test_dict_of_train_alone_has_nothing_to_say(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": saved(ROWS, "target", "control", "mask")}).save_to_disk(tmp_path / "set")
    assert unpack("huggingface", tmp_path / "set").warnings == ()


def test_dict_without_train_lists_its_splits(tmp_path: Path) -> None:
    whole = saved(ROWS, "target", "control", "mask")
    datasets.DatasetDict({"dev": whole, "test": whole}).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match="no split train; saw: dev, test") as caught:
        unpack("huggingface", tmp_path / "set")
    assert "set/dev" in caught.value.remedy


def test_rows_of_a_selection_and_of_several_files(tmp_path: Path) -> None:
    rows = {"image": [cell(picture(n)) for n in range(40)], "text": [f"t{n}" for n in range(40)]}
    order = [n * 7 % 40 for n in range(40)]
    saved(rows, "image").select(order).save_to_disk(tmp_path / "set", num_shards=3)
    found = contents(unpack("huggingface", tmp_path / "set"))
    assert found == {f"set-{n:06d}": ([picture(m)], None, f"t{m}") for n, m in enumerate(order)}


def test_list_of_controls_and_numbered_ones(tmp_path: Path) -> None:
    rows = {
        "image": [cell(picture(1)), cell(picture(2))],
        "control_images": [[cell(picture(3)), cell(picture(4))], []],
        "text": ["a", "b"],
    }
    saved(rows, "image", lists=("control_images",)).save_to_disk(tmp_path / "set")
    assert contents(unpack("huggingface", tmp_path / "set")) == {
        "set-000000": ([picture(1), picture(3), picture(4)], None, "a"),
        "set-000001": ([picture(2)], None, "b"),
    }
    path = write(
        tmp_path / "n.parquet",
        {"image": [picture(1)], "control_1": [picture(3)], "control_0": [picture(2)], "text": ["a"]},
    )
    found = contents(open_archive("parquet", path, tmp_path / "n", Columns()))
    assert found == {"n-000000": ([picture(1), picture(2), picture(3)], None, "a")}


def test_asked_columns_and_what_is_left_unused(tmp_path: Path) -> None:
    columns = {name: [picture(n)] for n, name in enumerate(("before", "after", "matte", "depth"))}
    path = write(tmp_path / "p.parquet", {**columns, "words": ["w"], "file_name": ["x\\y/z.v.png"]})
    asked = Columns(image="after", controls=("before",), mask="matte", caption="words")
    scan = unpack("parquet", path, asked)
    assert contents(scan) == {"z.v": ([picture(1), picture(0)], picture(2), "w")}
    assert [note.reason for note in scan.warnings] == ["picture columns that are not used: depth"]


DROPPED: list[tuple[Cell, Cell, str | None, str]] = [
    (None, None, "t", "no target picture"),
    (cell(None), None, "t", "no target picture"),
    (cell(b""), None, "t", "the target picture is empty"),
    (cell(b"?"), None, "t", "the target picture has no known format"),
    (cell(picture(1)), cell(b"?"), "t", "control 1 has no known format"),
    (cell(picture(1)), None, None, "no caption"),
    (cell(picture(1)), None, " \n", "no caption"),
    (cell(None, "gone.png"), None, "t", "target refers to gone.png, which is not in"),
    (cell(None, "../secret.png"), None, "t", "target refers to ../secret.png, outside of"),
    (cell(None, "https://example.com/a.png"), None, "t", "which is not in the dataset's folder"),
    (cell(None, "a\0.png"), None, "t", "outside of"),
]


@pytest.mark.parametrize(("target", "control", "text", "reason"), DROPPED)
def test_broken_row_is_dropped_alone(
    tmp_path: Path, target: Cell, control: Cell, text: str | None, reason: str
) -> None:
    (tmp_path / "secret.png").write_bytes(picture(9))
    columns = {
        "target": pa.array([target, cell(picture(5))], PICTURE),
        "control": pa.array([control, None], PICTURE),
        "text": pa.array([text, "good"]),
    }
    scan = unpack("parquet", write(tmp_path / "set" / "p.parquet", columns).parent)
    assert contents(scan) == {"p-000001": ([picture(5)], None, "good")}
    assert [note.path for note in scan.dropped] == ["p.parquet/0"]
    assert reason in scan.dropped[0].reason


def test_absolute_path_and_gap_between_controls_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(picture(9))
    columns = {
        "target": pa.array(
            [cell(None, str(tmp_path / "secret.png")), cell(picture(1)), cell(picture(2))], PICTURE
        ),
        "control_0": pa.array([None, None, cell(picture(3))], PICTURE),
        "control_1": pa.array([None, cell(picture(4)), None], PICTURE),
        "text": ["t", "t", "t"],
    }
    scan = unpack("parquet", write(tmp_path / "set" / "p.parquet", columns).parent)
    assert contents(scan) == {"p-000002": ([picture(2), picture(3)], None, "t")}
    outside, gap = scan.dropped
    assert "outside of the dataset's folder" in outside.reason
    assert gap.reason == "control_0 is empty, but control_1 isn't"


def test_picture_beside_the_table_is_read_and_watched(tmp_path: Path) -> None:
    columns = {"image": pa.array([cell(None, "pictures/a.png")], PICTURE), "text": ["t"]}
    folder = write(tmp_path / "set" / "p.parquet", columns).parent
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(picture(1))
    scan = unpack("parquet", folder)
    assert contents(scan) == {"p-000000": ([picture(1)], None, "t")}
    assert scan.files == (folder / "p.parquet", folder / "pictures" / "a.png")
    assert unpack("parquet", folder) == scan
    (folder / "pictures" / "a.png").write_bytes(picture(200))
    assert contents(unpack("parquet", folder)) == {"p-000000": ([picture(200)], None, "t")}


SPLIT = [
    (("train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"),
     ("data/train-00001-of-00002", "train-00000-of-00002"), "not used: data/test-00000-of-00001.parquet"),
    (("train", "validation"), ("train",), "not used: validation.parquet"),
    (("test-00000-of-00001",), ("test-00000-of-00001",), ""),
    (("train-00000-of-00001", "other"), ("other", "train-00000-of-00001"), ""),
    (("a", "b"), ("a", "b"), ""),
    (("data/0000", "deeper/x"), ("data/0000",), ""),
]  # fmt: skip


@pytest.mark.parametrize(("names", "used", "reason"), SPLIT)
@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_files_of_a_folder(
    tmp_path: Path, kind: Kind, names: tuple[str, ...], used: tuple[str, ...], reason: str
) -> None:
    for number, name in enumerate(names):
        write(tmp_path / "set" / f"{name}.parquet", {"image": [picture(number)], "text": [name]})
    scan = unpack(kind, tmp_path / "set")
    relative = sorted(path.relative_to(tmp_path / "set").with_suffix("").as_posix() for path in scan.files)
    assert tuple(relative) == used
    assert sorted(text for _, _, text in contents(scan).values()) == sorted(used)
    assert [reason in note.reason for note in scan.warnings] == ([True] if reason else [])


def test_splits_without_train_are_listed(tmp_path: Path) -> None:
    for name in ("test-00000-of-00001", "dev"):
        write(tmp_path / "set" / f"{name}.parquet", {"image": [picture(1)], "text": ["t"]})
    with pytest.raises(DataError, match="no split train; saw: dev, test"):
        unpack("parquet", tmp_path / "set")


TYPES: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: pa.array([picture(1)], pa.large_binary()), lambda: pa.array(["t"], pa.large_string())),
    (lambda: pa.array([[picture(1)]], pa.list_(pa.binary())), lambda: pa.array(["t"]).dictionary_encode()),
    (
        lambda: pa.array([cell(picture(1))], pa.struct({"path": pa.string(), "bytes": pa.large_binary()})),
        lambda: pa.array(["t"]),
    ),
]


@pytest.mark.parametrize(("pictures", "texts"), TYPES)
def test_other_types_of_the_same(
    tmp_path: Path, pictures: Callable[[], Any], texts: Callable[[], Any]
) -> None:
    path = write(
        tmp_path / "p.parquet", {"image": pictures(), "text": texts(), "output": ["words"], "id": [1.5]}
    )
    assert contents(unpack("parquet", path)) == {"p-000000": ([picture(1)], None, "t")}


def test_lists_where_one_picture_is_expected(tmp_path: Path) -> None:
    pictures = pa.array([[picture(1), picture(2)], [picture(3), None]], pa.list_(pa.binary()))
    scan = unpack("parquet", write(tmp_path / "p.parquet", {"image": pictures, "text": ["t", "t"]}))
    assert [note.reason for note in scan.dropped] == [
        "a list of several pictures where one is expected",
        "image has an empty picture in its list",
    ]


def test_wrong_column_in_any_file_is_found_before_anything_is_written(tmp_path: Path) -> None:
    write(tmp_path / "set" / "a.parquet", {"image": [picture(1)], "text": ["t"]})
    write(tmp_path / "set" / "b.parquet", {"photo": [picture(1)], "text": ["t"]})
    with pytest.raises(DataError) as caught:
        unpack("parquet", tmp_path / "set")
    assert "b.parquet" in caught.value.message and "saw the picture columns: photo" in caught.value.message
    assert "image_key" in caught.value.remedy
    assert not (tmp_path / "into" / "training_images").exists()


def test_few_rows_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "p.parquet", {"image": [picture(n) for n in range(50)], "text": ["t"] * 50})
    sizes = []
    rows = tables._Reader.rows

    def spy(self: Any, batches: Iterator[Any]) -> Iterator[Any]:
        return rows(self, (sizes.append(batch.num_rows) or batch for batch in batches))

    monkeypatch.setattr(tables._Reader, "rows", spy)
    assert len(unpack("parquet", path).samples) == 50
    assert max(sizes) == tables.ROWS and sum(sizes) == 50


@pytest.mark.parametrize(("kind", "hidden"), [("huggingface", "datasets"), ("parquet", "pyarrow.parquet")])
def test_missing_package_gives_the_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, hidden: str
) -> None:
    if kind == "huggingface":
        saved(ROWS, "target", "control", "mask").save_to_disk(tmp_path / "set")
    else:
        write(tmp_path / "set" / "a.parquet", {"image": [picture(1)], "text": ["t"]})
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(DataError, match="needs the package") as caught:
        unpack(kind, tmp_path / "set")
    assert caught.value.remedy == 'pip install -e ".[train,datasets]" -c constraints.txt'


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("damage", [None, b"", b"{}", b"[1]"])
def test_damaged_saved_dataset_is_named(tmp_path: Path, name: str, damage: bytes | None) -> None:
    saved(ROWS, "target", "control", "mask").save_to_disk(tmp_path / "set")
    if damage is None:
        (tmp_path / "set" / name).unlink()
    else:
        (tmp_path / "set" / name).write_bytes(damage)
    if name == "dataset_info.json" and damage == b"{}":
        assert contents(unpack("huggingface", tmp_path / "set")) == CONTENTS  # Arrow knows its columns itself
        return
    with pytest.raises(DataError, match="set") as caught:
        unpack("huggingface", tmp_path / "set")
    assert caught.value.remedy


def test_saved_dataset_whose_state_leads_out_is_refused(tmp_path: Path) -> None:
    saved(ROWS, "target", "control", "mask").save_to_disk(tmp_path / "set")
    data = "data-00000-of-00001.arrow"
    shutil.move(tmp_path / "set" / data, tmp_path / data)
    state = (tmp_path / "set" / "state.json").read_text(encoding="utf-8")
    (tmp_path / "set" / "state.json").write_text(state.replace(data, f"../{data}"), encoding="utf-8")
    with pytest.raises(DataError, match="leads out of it"):
        unpack("huggingface", tmp_path / "set")


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_damaged_parquet_is_named(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "p.parquet", {"image": [picture(1)], "text": ["t"]})
    data = path.read_bytes()
    path.write_bytes(
        data[:keep] if keep >= 0 else data[:4] + bytes(len(data) // 3) + data[4 + len(data) // 3 :]
    )
    with pytest.raises(DataError, match=r"p\.parquet can't be read"):
        unpack("parquet", path)


def test_folder_without_tables_says_what_it_saw(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.csv").touch()
    with pytest.raises(DataError, match=r"no \.parquet file in it or in data/; saw a\.csv"):
        unpack("huggingface", tmp_path / "set")


def test_reading_leaves_the_dataset_and_the_bars_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(ROWS, "target", "control", "mask").save_to_disk(tmp_path / "set")
    before = sorted(path for path in (tmp_path / "set").rglob("*"))
    datasets.enable_progress_bars()
    capsys.readouterr()
    unpack("huggingface", tmp_path / "set")
    assert not datasets.are_progress_bars_disabled()
    assert capsys.readouterr() == ("", "")
    assert sorted(path for path in (tmp_path / "set").rglob("*")) == before


def test_memory_is_that_of_a_row_group_not_of_the_file(tmp_path: Path) -> None:
    """Arrow's own default holds all twelve groups by the end: 24 MiB and more."""
    pictures = [picture(1) + bytes([number]) * 2**19 for number in range(48)]
    table = {"image": pictures, "text": ["t"] * 48}
    path = write(tmp_path / "p.parquet", table, row_group_size=4, use_dictionary=False, compression="none")
    held = []
    before = pa.total_allocated_bytes()
    for _ in tables.open_parquet(path, Columns()).rows():
        held.append(pa.total_allocated_bytes() - before)
    assert len(held) == 48 and max(held) < 12 * 2**20
