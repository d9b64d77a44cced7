import itertools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.sample import Settings
from runtime.data.sources import dataset_file
from runtime.data.sources.dataset_file import DatasetFile, Entry
from runtime.data.sources.dataset_keys import KEYS, RENAMED, SOURCES
from runtime.errors import DataError

# As the guide for full fine-tuning with musubi-tuner gives it, comments and all.
SEED = """\
# resolution, caption_extension, batch_size, num_repeats, enable_bucket, bucket_no_upscale should be set in either general or datasets
# otherwise, the default values will be used for each item

# general configurations
[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 1
enable_bucket = true
bucket_no_upscale = false

[[datasets]]
image_directory = "/path/to/image_dir"
cache_directory = "/path/to/cache_directory"
num_repeats = 1 # optional, default is 1. Number of times to repeat the dataset. Useful to balance the multiple datasets with different sizes.

# other datasets can be added here. each dataset can have different configurations
"""  # noqa: E501


def write(folder: Path, text: str, name: str = "d.toml", encoding: str = "utf-8") -> Path:
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


def read(folder: Path, text: str) -> DatasetFile:
    return dataset_file.read(write(folder, text))


def document(folder: Path, general: Any = None, *datasets: Any) -> DatasetFile:
    """The same as a JSON file, which takes any value as it is."""
    made = (
        {"datasets": list(datasets)} if general is None else {"general": general, "datasets": list(datasets)}
    )
    return dataset_file.read(write(folder, json.dumps(made), "d.json"))


def problems(folder: Path, general: Any, *datasets: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        document(folder, general, *datasets)
    first, *lines = caught.value.message.split("\n")
    assert first == "d.json"
    assert caught.value.remedy == "mend d.json, then finetune dataset"
    return lines


def test_the_seeds_file_loads_unchanged(tmp_path: Path) -> None:
    found = read(tmp_path, SEED)
    assert found.entries == (
        Entry(
            name="image_dir",
            kind="directory",
            path=Path("/path/to/image_dir"),
            caption_extension=".txt",
            settings=Settings(
                resolution=(544, 960), batch_size=1, enable_bucket=True, bucket_no_upscale=False, views=1
            ),
        ),
    )
    assert found.cache_directories == ("/path/to/cache_directory",)
    assert found.holdout is None
    assert found.warnings == ()


def test_nothing_said_leaves_everything_to_config_yaml(tmp_path: Path) -> None:
    found = read(tmp_path, '[[datasets]]\nimage_directory = "x"')
    assert found.entries == (Entry(name="x", kind="directory", path=tmp_path / "x"),)
    assert found.entries[0].settings == Settings()
    assert (found.holdout, found.cache_directories, found.warnings) == (None, (), ())


ASCENDABLE: dict[str, tuple[Any, Any, Any, str, Any]] = {
    # key: (general, dataset, where nobody says, where it is kept, value as kept)
    "resolution": (
        [64, 32],
        48,
        None,
        "resolution",
        lambda v: (v, v) if isinstance(v, int) else (v[1], v[0]),
    ),
    "caption_extension": (".a", ".b", None, "caption_extension", lambda v: v),
    "batch_size": (2, 3, None, "batch_size", lambda v: v),
    "num_repeats": (2, 3, 1, "views", lambda v: v),
    "repeats": (2, 0, 1, "views", lambda v: v + 1),
    "enable_bucket": (True, False, None, "enable_bucket", lambda v: v),
    "bucket_no_upscale": (True, False, None, "bucket_no_upscale", lambda v: v),
    "control_resolution": (
        1024,
        [640, 480],
        None,
        "control_resolution",
        lambda v: (v, v) if isinstance(v, int) else (v[1], v[0]),
    ),
    "no_resize_control": (True, False, None, "no_resize_control", lambda v: v),
    "max_samples": (9, 4, None, "max_samples", lambda v: v),
    "trigger_word": ("tok", "", "", "trigger_word", lambda v: v),
    "caption_lines": (True, False, False, "caption_lines", lambda v: v),
}


def test_the_truth_table_has_every_key_that_may_stand_in_both_tables() -> None:
    assert set(ASCENDABLE) == {name for name, key in KEYS.items() if key.sections == ("general", "datasets")}


@pytest.mark.parametrize("name", ASCENDABLE)
@pytest.mark.parametrize(("in_general", "in_dataset"), [*itertools.product((False, True), repeat=2)])
def test_precedence(tmp_path: Path, name: str, in_general: bool, in_dataset: bool) -> None:
    """The dataset's value, else the general one, else none; a second dataset is not touched by the first's."""
    general, dataset, default, kept, as_kept = ASCENDABLE[name]
    made = document(
        tmp_path,
        {name: general} if in_general else {},
        {"image_directory": "x", **({name: dataset} if in_dataset else {})},
        {"image_directory": "y"},
    )

    def seen(entry: Entry) -> Any:
        return entry.caption_extension if kept == "caption_extension" else getattr(entry.settings, kept)

    below = as_kept(general) if in_general else default
    assert [seen(entry) for entry in made.entries] == [as_kept(dataset) if in_dataset else below, below]
    others = {item.name for item in fields(Settings)} - {kept}
    assert all(getattr(made.entries[0].settings, item) == getattr(Settings(), item) for item in others)


REPEATS = [
    ({}, {}, 1),
    ({"num_repeats": 4}, {"repeats": 1}, 2),
    ({"repeats": 4}, {"num_repeats": 2}, 2),
    ({"repeats": 4}, {"repeats": 0}, 1),
    ({"num_repeats": 4}, {"num_repeats": 1}, 1),
]


@pytest.mark.parametrize(("general", "dataset", "views"), REPEATS)
def test_repeats_and_num_repeats_are_one_thing(
    tmp_path: Path, general: dict[str, int], dataset: dict[str, int], views: int
) -> None:
    found = document(tmp_path, general, {"image_directory": "x", **dataset})
    assert found.entries[0].settings.views == views


def test_keys_of_a_dataset_alone(tmp_path: Path) -> None:
    found = document(
        tmp_path,
        {"holdout": 0},
        {
            "name": "Faces",
            "image_directory": "x",
            "control_directory": "y",
            "weight": 2,
            "regularisation": True,
        },
        {
            "parquet": "p.parquet",
            "weight": 0.5,
            "image_key": "out",
            "control_keys": ["in", "in2"],
            "mask_key": "m",
            "caption_key": "t",
        },
    )
    assert found.holdout == 0
    assert found.entries == (
        Entry(
            name="Faces",
            kind="directory",
            path=tmp_path / "x",
            controls=tmp_path / "y",
            settings=Settings(weight=2.0, regularisation=True),
        ),
        Entry(
            name="p",
            kind="parquet",
            path=tmp_path / "p.parquet",
            image_key="out",
            control_keys=("in", "in2"),
            mask_key="m",
            caption_key="t",
            settings=Settings(weight=0.5),
        ),
    )


@pytest.mark.parametrize(("key", "kind"), SOURCES.items())
def test_each_source(tmp_path: Path, key: str, kind: str) -> None:
    found = document(tmp_path, None, {key: "some/where"})
    assert [(entry.kind, entry.path) for entry in found.entries] == [(kind, tmp_path / "some/where")]


def test_paths_are_relative_to_the_file_and_know_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "me"))
    (tmp_path / "sub").mkdir()
    outside = json.dumps(str(tmp_path / "z"))
    text = (
        '[[datasets]]\nimage_directory = "../pictures"\ncontrol_directory = "~/controls"\n'
        f"[[datasets]]\nfolder = {outside}\n"
    )
    found = read(tmp_path / "sub", text)
    assert [entry.path.resolve() for entry in found.entries] == [
        tmp_path.resolve() / "pictures",
        tmp_path.resolve() / "z",
    ]
    assert found.entries[0].controls == tmp_path / "me" / "controls"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
@pytest.mark.parametrize("section", ["general", "datasets"])
@pytest.mark.parametrize("both", [False, True])
def test_old_names_warn_and_the_new_name_wins(
    tmp_path: Path, old: str, new: str, section: str, both: bool
) -> None:
    values: dict[str, Any] = {"no_resize_control": (True, False), "control_resolution": ([64, 32], 48)}
    given_old, given_new = values[new]
    table = {old: given_old, **({new: given_new} if both else {})}
    general, dataset = (table, {}) if section == "general" else ({}, table)
    found = document(tmp_path, general, {"image_directory": "x", **dataset})
    expected = {"no_resize_control": (True, False), "control_resolution": ((32, 64), (48, 48))}[new]
    assert getattr(found.entries[0].settings, new) == expected[both]
    where = "general" if section == "general" else "datasets[0]"
    assert [note.path for note in found.warnings] == ["d.json"]
    assert found.warnings[0].reason.startswith(f"{where}.{old} is the old name of {new}")


WRONG: list[tuple[str, Any, str]] = [
    ("resolution", "960x544", 'saw "960x544" (text), expected [width, height], or one number'),
    ("resolution", [960], "saw [960], expected [width, height]"),
    ("resolution", [960, 544, 3], "saw [960, 544, 3], expected"),
    ("resolution", [960.0, 544], "saw [960.0, 544], expected"),
    ("resolution", [960, 0], "saw [960, 0], expected"),
    ("resolution", [960, -16], "saw [960, -16], expected"),
    ("resolution", [True, 544], "saw [true, 544], expected"),
    ("resolution", 16385, "saw 16385, expected"),
    ("resolution", True, "saw true, expected"),
    ("control_resolution", 0, "saw 0, expected [width, height]"),
    ("caption_extension", "txt", 'saw "txt" (text), expected a suffix with its dot, as ".txt"'),
    ("caption_extension", ".", 'saw "." (text), expected a suffix'),
    ("caption_extension", ".png", 'saw ".png" (text), expected a suffix'),
    ("caption_extension", "./x", 'saw "./x" (text), expected a suffix'),
    ("batch_size", 0, "saw 0, expected a whole number from 1"),
    ("batch_size", 1.0, "saw 1.0, expected a whole number from 1"),
    ("batch_size", True, "saw true, expected a whole number from 1"),
    ("num_repeats", 0, "saw 0, expected a whole number from 1 (1: seen once)"),
    ("repeats", -1, "saw -1, expected a whole number from 0 (0: seen once)"),
    ("enable_bucket", 1, "saw 1, expected true or false"),
    ("enable_bucket", "true", 'saw "true" (text), expected true or false'),
    ("bucket_no_upscale", None, "saw null, expected true or false"),
    ("no_resize_control", 0, "saw 0, expected true or false"),
    ("max_samples", 0, "saw 0, expected a whole number from 1"),
    ("trigger_word", 5, "saw 5, expected text"),
    ("trigger_word", "\ud800", 'saw "\\ud800" (text), expected text'),
    ("caption_lines", "no", 'saw "no" (text), expected true or false'),
    ("name", "", 'saw "" (text), expected text'),
    ("weight", 0, "saw 0, expected a number above 0"),
    ("weight", True, "saw true, expected a number above 0"),
    ("weight", float("inf"), "saw Infinity, expected a number above 0"),
    ("weight", float("nan"), "saw NaN, expected a number above 0"),
    ("regularisation", "yes", 'saw "yes" (text), expected true or false'),
    ("cache_directory", 1, "saw 1, expected a path"),
    ("control_directory", ["a"], 'saw ["a"], expected the path of a folder'),
    ("image_directory", 3, "saw 3, expected the path of a folder of pictures"),
    ("image_directory", "a\0b", "expected the path of a folder of pictures"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_value_is_shown_with_what_is_expected(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    lines = problems(tmp_path, {}, {"image_directory": "x", name: value})
    assert len(lines) == 1
    assert lines[0].startswith(f"datasets[0].{name}: ")
    assert message in lines[0]


X = {"image_directory": "x"}
REFUSED: list[tuple[Any, Any, str]] = [
    # (general, dataset, how the only line begins)
    ({}, {**X, "video_directory": "v"}, "datasets[0].video_directory: is for video models"),
    ({}, {**X, "target_frames": [1]}, "datasets[0].target_frames: is for video models"),
    ({}, {**X, "source_fps": 30.0}, "datasets[0].source_fps: is for video models"),
    ({}, {**X, "fp_1f_no_post": True}, "datasets[0].fp_1f_no_post: is for FramePack"),
    ({}, {**X, "multiple_target": False}, "datasets[0].multiple_target: is for layered models"),
    ({}, {**X, "enable_buckets": 1}, "datasets[0].enable_buckets: unknown key; did you mean enable_bucket?"),
    ({"batchsize": 1}, X, "general.batchsize: unknown key; did you mean batch_size?"),
    ({"zzz": 1}, X, "general.zzz: unknown key; known here: resolution, caption_extension"),
    ({"image_directory": "y"}, X, "general.image_directory: belongs in [[datasets]]"),
    ({"cache_directory": "y"}, X, "general.cache_directory: belongs in [[datasets]]"),
    ({}, {**X, "holdout": 1}, "datasets[0].holdout: belongs in [general]"),
    ({"holdout": -1}, X, "general.holdout: saw -1, expected a whole number from 0"),
    ([], X, "general: saw [], expected a table"),
    (
        {},
        {},
        "datasets[0]: saw no source, expected one of image_directory, image_jsonl_file, folder, csv_file",
    ),
    ({}, {**X, "folder": "y"}, "datasets[0]: saw image_directory and folder, expected one of"),
    (
        {},
        {"image_jsonl_file": "x", "control_directory": "y"},
        "datasets[0].control_directory: means nothing with image_jsonl_file, only with image_directory",
    ),
    (
        {},
        {"csv_file": "x", "caption_key": "y"},
        "datasets[0].caption_key: means nothing with csv_file, only with huggingface, parquet, webdataset",
    ),
    ({}, {"parquet": "x", "control_keys": []}, "datasets[0].control_keys: saw [], expected a list of"),
    ({}, {"parquet": "x", "control_keys": ["a", "a"]}, 'datasets[0].control_keys: saw ["a", "a"], expected'),
    ({}, {"parquet": "x", "control_keys": ["a", 1]}, 'datasets[0].control_keys: saw ["a", 1], expected'),
    ({}, {"parquet": "x", "control_keys": "a"}, 'datasets[0].control_keys: saw "a" (text), expected'),
    ({}, {**X, "repeats": 1, "num_repeats": 2}, "datasets[0].repeats: num_repeats says the same"),
    ({"repeats": 1, "num_repeats": 2}, X, "general.repeats: num_repeats says the same"),
]


@pytest.mark.parametrize(("general", "dataset", "start"), REFUSED)
def test_what_is_refused_and_why(tmp_path: Path, general: Any, dataset: Any, start: str) -> None:
    lines = problems(tmp_path, general, dataset)
    assert len(lines) == 1
    assert lines[0].startswith(start)


def test_weights_are_for_all_or_none(tmp_path: Path) -> None:
    tables = [{"image_directory": name, **({"weight": 1} if name == "y" else {})} for name in "xyz"]
    assert problems(tmp_path, {}, *tables) == [
        "weight: missing in datasets[0], datasets[2]; give it to all datasets or to none"
    ]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = """
resolution = 512
[generl]
[general]
batch_size = "2"
[[datasets]]
image_directory = "x"
video_directory = "y"
[[datasets]]
folder = "x"
repeats = 0.5
[[datasets]]
name = "z"
"""
    with pytest.raises(DataError) as caught:
        read(tmp_path, text)
    assert [line.split(";")[0] for line in caught.value.message.split("\n")] == [
        "d.toml",
        "resolution: stands above the first table",
        "generl: unknown table",
        "datasets[0].video_directory: is for video models",
        "datasets[1].repeats: saw 0.5, expected a whole number from 0 (0: seen once)",
        "datasets[2]: saw no source, expected one of " + ", ".join(SOURCES),
        'general.batch_size: saw "2" (text), expected a whole number from 1',
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "datasets: none, expected one \\[\\[datasets\\]\\] at least"),
        (
            '[datasets]\nimage_directory = "x"',
            "datasets: saw .*, expected tables, each under \\[\\[datasets\\]\\]",
        ),
        ("datasets = [1]", "datasets: saw \\[1\\], expected tables"),
        ("[general\n", "d.toml is not TOML: "),
        ("a = 1\na = 2", "d.toml is not TOML: Cannot overwrite a value"),
        ('[[datasets]]\nimage_directory = "C:\\data"', "is not TOML: .*; in a path write / for"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "saw a list, expected an object with datasets"),
        ("{", "d.json is not JSON: "),
        ("[" * 100_000, "d.json is not JSON: "),
        ('{"datasets": [], "datasets": []}', "datasets: given twice in one object"),
    ],
)
def test_a_json_of_another_shape_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataset_file.read(write(tmp_path, text, "d.json"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be read: No such file"):
        dataset_file.read(tmp_path / "gone.toml")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_that_windows_writes(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, '[[datasets]]\r\nimage_directory = "猫"\r\n', encoding=encoding)
    assert dataset_file.read(path).entries[0].name == "猫"


NAMES = [
    (["a", "b"], ["a", "b"]),
    (["a", "a", "a"], ["a", "a-2", "a-3"]),
    (["a", "A", "a-2"], ["a", "A-2", "a-2-2"]),
    (["x/a", "y/a"], ["a", "a-2"]),
    (["v1.2"], ["v1.2"]),
    (["con", "face_mask"], ["con-set", "face_mask-set"]),
    (["/", ".hidden"], ["dataset", "hidden"]),
    (["猫 café"], ["猫 café"]),
    (["cafe\u0301"], ["caf\u00e9"]),
    (['a:b?"c'], ["a_b__c"]),
    (["x" * 300], ["dataset"]),
]


@pytest.mark.parametrize(("folders", "names"), NAMES)
def test_names_are_unique_and_fit_every_file_system(
    tmp_path: Path, folders: list[str], names: list[str]
) -> None:
    found = document(tmp_path, None, *({"image_directory": folder} for folder in folders))
    assert [entry.name for entry in found.entries] == names


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"image_jsonl_file": "x/rows.v2.jsonl"}, "rows.v2"),
        ({"csv_file": "Rows.CSV"}, "Rows"),
        ({"webdataset": "shard-000.tar"}, "shard-000"),
        ({"parquet": "data/"}, "data"),
        ({"folder": "x", "name": "LPT1/../y"}, "LPT1_.._y"),
        ({"folder": "x", "name": "..."}, "dataset"),
    ],
)
def test_a_name_comes_from_the_key_or_the_path(tmp_path: Path, table: dict[str, str], name: str) -> None:
    assert document(tmp_path, None, table).entries[0].name == name


@given(
    st.lists(
        st.text(min_size=1, max_size=8).filter(lambda text: text.strip() and "\0" not in text),
        min_size=1,
        max_size=6,
    )
)
def test_any_names_become_folders_of_their_own(names: list[str]) -> None:
    taken: set[str] = set()
    made = [dataset_file._name(name, taken) for name in names]
    assert len({name.casefold() for name in made}) == len(names)
    assert all(name and not set(name) & set('<>:"/\\|?*') and name == name.strip(" .") for name in made)


def test_caption_extension_where_it_means_nothing_is_told(tmp_path: Path) -> None:
    found = document(
        tmp_path,
        {"caption_extension": ".cap"},
        {"csv_file": "x"},
        {"csv_file": "y", "caption_extension": ".c"},
    )
    assert [note.reason for note in found.warnings] == [
        "datasets[1].caption_extension means nothing with csv_file, only with image_directory"
    ]


def test_cache_directories_are_kept_as_written_and_told_once(tmp_path: Path) -> None:
    tables = [{"image_directory": name, "cache_directory": f"c/{name}"} for name in "xy"]
    found = document(tmp_path, None, *tables, {"image_directory": "z"})
    assert found.cache_directories == ("c/x", "c/y")
    assert len(found.warnings) == 1
