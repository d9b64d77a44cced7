"""Gate 02: a healthy dataset passes, and each planted fault turns its check and no other."""

import json
import shutil
from typing import Any

import pytest
from PIL import Image

from gates.datasets import looking
from gates.evidence import file_digest
from gates.selftest.faults.dataset import _again, _data, _no_controls, _note, _sample
from gates.workspace import Workspace

TARGET, CONTROL, CAPTION = "training_images/s05.png", "control_images/s05.png", "training_images/s05.txt"


def test_healthy(made: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(made, "02")
    assert verdict.passes and verdict.counts["pass"] == 10
    assert_turned(verdict)


@pytest.mark.parametrize("path", ["../secret.png", "/etc/secret.png", "C:\\secret.png", "a/../../b.png"])
def test_paths_that_leave_the_dataset_are_an_error(
    path: str, made: Any, judge: Any, assert_turned: Any
) -> None:
    _data(lambda d: _sample(d)["target"].update(path=path))(made)
    assert_turned(judge(made, "02"), error={"layout-recognised"})


def test_advisory_alone_passes_and_strict_fails(made: Any, judge: Any) -> None:
    from gates import chain, registry
    from gates.workspace import Workspace

    shutil.copy(made.dataset / "training_images/s06.png", made.dataset / TARGET)
    _again(made)
    assert judge(made, "02").passes
    strict = chain.judge(registry.load("02"), Workspace.open(made.root), strict=True).whole
    assert (strict.outcome, strict.first_failure) == ("failed", "no-duplicates")


def test_one_caption_for_all_is_told_and_passes(made: Any, judge: Any) -> None:
    def change(data: dict[str, Any]) -> None:
        for sample in data["samples"]:
            sample["prompt"] = "paint it blue"

    for path in (made.dataset / "training_images").glob("*.txt"):
        path.write_text("paint it blue\n", encoding="utf-8", newline="\n")
    for index in range(14):
        _again(made, f"s{index:02d}")
    _data(change)(made)
    verdict = judge(made, "02")
    assert verdict.passes
    assert next(c for c in verdict.checks if c.id == "captions-varied").status == "info"


def test_no_control_at_all_is_told_both_ways_out(made: Any, judge: Any) -> None:
    _no_controls(made)
    verdict = judge(made, "02")
    remedy = next(check.remedy for check in verdict.checks if check.id == "pairs-complete")
    assert "control_images/" in remedy and "image_directory" in remedy and "finetune dataset" in remedy


def test_a_capped_dataset_passes(made: Any, judge: Any, assert_turned: Any) -> None:
    """Of a JSON dataset file: what is beyond max_samples is left out, and not even opened."""

    def change(data: dict[str, Any]) -> None:
        source = data["sources"][0]
        source["name"] = "data"
        source["settings"]["max_samples"] = 12
        for sample in data["samples"]:
            sample.update(id=f"data/{sample['id']}", source="data")
        for sample in data["samples"][12:]:
            _note(data, f"data/{sample['target']['path']}", "beyond max_samples, 12 of 14 are taken")
        del data["samples"][12:]
        record = {"path": "sets.json", "size": file.stat().st_size, "sha256": file_digest(file)}
        data.update(layout="toml", root="sets.json", dataset_file=record)

    file = made.root / "sets.json"
    file.write_text(json.dumps({"datasets": [{"folder": "data", "max_samples": 12}]}), encoding="utf-8")
    (made.dataset / "training_images/s13.png").write_bytes(b"no picture")
    made.edit(".gates/target.json", lambda d: d.update(dataset="sets.json"))
    _data(change)(made)
    assert_turned(judge(made, "02"))
    _data(lambda d: (d["samples"].pop(), d["sources"][0].update(dropped=2)))(made)
    assert_turned(judge(made, "02"), fail={"manifest-matches-files"})


def test_each_picture_is_measured_under_its_own_name(made: Any) -> None:
    """They are decoded side by side."""
    expected = {}
    for number, path in enumerate(sorted((made.dataset / "training_images").glob("*.png"))):
        Image.new("RGB", (40 + number, 50)).save(path)
        expected[f"training_images/{path.name}"] = (40 + number, 50)
    broken = next(iter(expected))
    (made.dataset / broken).write_bytes((made.dataset / broken).read_bytes()[:60])
    workspace = Workspace.open(made.root)
    seen = looking.look(workspace, workspace.evidence("02-dataset"))
    found = {path: (size.width, size.height) for path, size in seen.pictures.items()}
    assert {path: size for path, size in found.items() if path in expected} == {
        path: size for path, size in expected.items() if path != broken
    }
    assert list(seen.undecodable) == [broken]
