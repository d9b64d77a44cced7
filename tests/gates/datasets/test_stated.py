import json
from pathlib import Path
from typing import Any

import pytest

from gates.datasets.stated import UNSTATED, stated
from gates.evidence import EvidenceError, MissingEvidenceError

# [general], [[datasets]], what the source's settings differ in from those of a file that states nothing
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nothing": ("", "", {}),
    "width comes first": ("resolution = [960, 544]", "", {"resolution": [544, 960]}),
    "one number is a square": ("resolution = 512", "", {"resolution": [512, 512]}),
    "a dataset's own wins": (
        "resolution = [960, 544]\nbatch_size = 2\nenable_bucket = true\nbucket_no_upscale = true",
        "resolution = [64, 32]\nbatch_size = 1\nenable_bucket = false",
        {"resolution": [32, 64], "batch_size": 1, "enable_bucket": False, "bucket_no_upscale": True},
    ),
    "num_repeats counts the first time": ("", "num_repeats = 3", {"views": 3}),
    "repeats doesn't": ("", "repeats = 3", {"views": 4}),
    "repeats 0": ("", "repeats = 0", {"views": 1}),
    "a dataset's repeats win over general num_repeats": ("num_repeats = 5", "repeats = 1", {"views": 2}),
    "a dataset's num_repeats win over general repeats": ("repeats = 5", "num_repeats = 1", {"views": 1}),
    "general repeats": ("repeats = 5", "", {"views": 6}),
    "controls": (
        "control_resolution = [1024, 512]", "no_resize_control = false",
        {"control_resolution": [512, 1024], "no_resize_control": False},
    ),
    "old names": (
        "", "qwen_image_edit_no_resize_control = true\nqwen_image_edit_control_resolution = 64",
        {"control_resolution": [64, 64], "no_resize_control": True},
    ),
    "a new name wins over the old one": (
        "", "flux_kontext_no_resize_control = true\nno_resize_control = false", {"no_resize_control": False},
    ),
    "a dataset's old name wins over a general new one": (
        "no_resize_control = false", "flux_kontext_no_resize_control = true", {"no_resize_control": True},
    ),
    "our own": (
        'trigger_word = "zxc"\ncaption_lines = true',
        "weight = 2\nmax_samples = 10\nregularisation = true",
        {
            "trigger_word": "zxc", "caption_lines": True, "weight": 2, "max_samples": 10,
            "regularisation": True,
        },
    ),
}  # fmt: skip


def _write(folder: Path, general: str, dataset: str) -> Path:
    file = folder / "sets.toml"
    text = f'[general]\n{general}\n\n[[datasets]]\nimage_directory = "p"\n{dataset}\n'
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: str, tmp_path: Path) -> None:
    general, dataset, changed = SETTINGS[case]
    (said,) = stated(_write(tmp_path, general, dataset), "toml")
    assert said.settings == {**UNSTATED, **changed}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("image_directory", "directory"), ("image_jsonl_file", "jsonl"), ("csv_file", "csv"),
        ("folder", "folders"), ("huggingface", "huggingface"), ("parquet", "parquet"),
        ("webdataset", "webdataset"),
    ],
)  # fmt: skip
def test_kinds_and_places_of_a_json_file(key: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "sets.json"
    datasets = [{key: "in/x", "num_repeats": None}, {key: "/y"}]
    file.write_text(json.dumps({"datasets": datasets}), encoding="utf-8")
    first, second = stated(file, "toml")
    assert (first.kind, first.place, first.settings["views"]) == (kind, tmp_path / "in" / "x", 1)
    assert second.place == Path("/y") or second.place.is_absolute()


def test_the_folder_of_a_source(tmp_path: Path) -> None:
    for name in ("a/p", "a/c", "b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b" / "l.csv").touch()
    file = tmp_path / "sets.toml"
    file.write_text(
        '[general]\ncaption_extension = ".cap"\n'
        '[[datasets]]\nimage_directory = "a/p"\ncontrol_directory = "a/c"\n'
        '[[datasets]]\nimage_directory = "a/p"\ncaption_extension = ".x"\n'
        '[[datasets]]\ncsv_file = "b/l.csv"\n[[datasets]]\nfolder = "b"\n',
        encoding="utf-8",
    )
    said = stated(file, "toml")
    assert [one.folder for one in said] == [tmp_path / name for name in ("a", "a/p", "b", "b")]
    assert [one.extension for one in said[:2]] == [".cap", ".x"]


def test_the_guides_own_file(tmp_path: Path) -> None:
    """The template of the full fine-tuning guide, its comments left out."""
    file = tmp_path / "dataset.toml"
    file.write_text(
        '[general]\nresolution = [960, 544]\ncaption_extension = ".txt"\nbatch_size = 1\n'
        "enable_bucket = true\nbucket_no_upscale = false\n\n"
        '[[datasets]]\nimage_directory = "/path/to/image_dir"\n'
        'cache_directory = "/path/to/cache_directory"\nnum_repeats = 1\n',
        encoding="utf-8",
    )
    (said,) = stated(file, "toml")
    assert (said.kind, said.controls, said.extension) == ("directory", None, ".txt")
    assert said.settings == {
        **UNSTATED, "resolution": [544, 960], "batch_size": 1, "enable_bucket": True,
        "bucket_no_upscale": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "resolution = ", "general = 1", "datasets = 1", "datasets = [1]", "[[datasets]]\nname = 'x'",
        "[[datasets]]\nfolder = 7", "[[datasets]]\nfolder = 'x'\nrepeats = 'x'",
        "[[datasets]]\nfolder = 'x'\nresolution = true.5", "[[datasets]]\nfolder = 'x'\nresolution = 1.5",
    ],
)  # fmt: skip
def test_a_file_that_is_no_dataset_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text, encoding="utf-8")
    with pytest.raises(EvidenceError, match=r"^x\.toml: "):
        stated(tmp_path / "x.toml", "toml")


def test_a_dataset_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(MissingEvidenceError) as caught:
        stated(tmp_path / "x", "folders")
    assert caught.value.remedy.startswith("finetune init --dataset")
