"""Gate 02: a healthy dataset passes, and each planted fault turns its check and no other."""

import contextlib
import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from gates.evidence import file_digest

TARGET, CONTROL, CAPTION = "training_images/s05.png", "control_images/s05.png", "training_images/s05.txt"


def _document(made: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(made.evidence("02-dataset").read_text(encoding="utf-8"))
    return document


def _data(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    """A fault in the evidence, its dataset digest put right again."""

    def edit(document: dict[str, Any]) -> None:
        change(document["data"])

    def spoil(made: Any) -> None:
        made.edit(made.evidence("02-dataset"), edit)
        made.rescan()

    return spoil


def _sample(data: dict[str, Any], stem: str = "s05") -> dict[str, Any]:
    return next(sample for sample in data["samples"] if sample["id"] == stem)


def _again(made: Any, stem: str = "s05") -> None:
    """Record the files of a sample as they are now."""

    def change(data: dict[str, Any]) -> None:
        sample = _sample(data, stem)
        for record in (sample["target"], *sample["controls"], sample["caption"]):
            path = made.dataset / record["path"]
            record.update(size=path.stat().st_size, sha256=file_digest(path))
            if "width" in record:
                with contextlib.suppress(UnidentifiedImageError), Image.open(path) as image:
                    record.update(width=image.width, height=image.height)

    _data(change)(made)


def _write(path: str, content: bytes, *, record: bool = True) -> Callable[[Any], None]:
    def spoil(made: Any) -> None:
        (made.dataset / path).write_bytes(content)
        if record:
            _again(made)

    return spoil


def _picture(path: str, width: int, height: int) -> Callable[[Any], None]:
    def spoil(made: Any) -> None:
        Image.fromarray(np.full((height, width, 3), 77, np.uint8)).save(made.dataset / path)
        _again(made)

    return spoil


def _truncate(made: Any) -> None:
    path = made.dataset / TARGET
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:4000])
    _again(made)


def _note(data: dict[str, Any], path: str, reason: str) -> None:
    data["dropped"].append({"path": path, "reason": reason})
    data["sources"][0]["dropped"] += 1


def _drop(made: Any) -> None:
    """As the runtime does with a sample that it can't read: out of the samples, into `dropped`."""

    def change(data: dict[str, Any]) -> None:
        data["samples"] = [sample for sample in data["samples"] if sample["id"] != "s05"]
        _note(data, TARGET, "can't be read")

    (made.dataset / TARGET).write_bytes(b"no picture")
    _data(change)(made)


def _drop_for_partner(made: Any) -> None:
    def change(data: dict[str, Any]) -> None:
        data["samples"] = [sample for sample in data["samples"] if sample["id"] != "s05"]
        _note(data, TARGET, "no control")

    (made.dataset / CONTROL).unlink()
    _data(change)(made)


def _copy_into_train(made: Any) -> None:
    """s04, trained on, becomes a copy of s00, held out."""
    shutil.copy(made.dataset / "training_images/s00.png", made.dataset / "training_images/s04.png")
    _again(made, "s04")


def _few(data: dict[str, Any]) -> None:
    for sample in data["samples"][4:]:
        sample["split"] = "holdout"
    for sample in data["samples"][:4]:
        sample["split"] = "train"


def _no_holdout(data: dict[str, Any]) -> None:
    for sample in data["samples"]:
        sample["split"] = "train"


def _no_controls(made: Any) -> None:
    """As somebody who wants text-to-image gives it; every sample loses its control in the manifest, too."""
    shutil.rmtree(made.dataset / "control_images")

    def change(data: dict[str, Any]) -> None:
        for sample in data["samples"]:
            sample["controls"] = []
        data["samples"].pop()  # and one that nobody mentions

    _data(change)(made)


def _move_targets(made: Any) -> None:
    (made.dataset / "training_images").rename(made.dataset / "pictures")


def _wish(*stems: str) -> Callable[[Any], Any]:
    text = "\n".join(stems) + "\n"
    return lambda made: (made.dataset / "holdout.txt").write_text(text, encoding="utf-8", newline="\n")


FAULTS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "holdout.txt asks for another sample": (_wish("s00", "s01", "s02", "s07"), {"manifest-matches-files"}),
    "holdout.txt asks for fewer": (_wish("s00"), {"manifest-matches-files"}),
    "holdout.txt is gone": (
        lambda m: m.edit(
            m.evidence("02-dataset"), lambda d: d["data"].update(holdout_rule="holdout.txt: 3 of 12")
        ),
        {"manifest-matches-files"},
    ),
    "no evidence": (lambda m: m.evidence("02-dataset").unlink(), {"layout-recognised"}),
    "evidence only begun": (
        lambda m: m.edit(m.evidence("02-dataset"), lambda d: d.update(complete=False, data={})),
        {"layout-recognised"},
    ),
    "another dataset than the target's": (
        lambda m: m.edit(".gates/target.json", lambda d: d.update(dataset="other")),
        {"layout-recognised"},
    ),
    "no target folder": (_move_targets, {"layout-recognised"}),
    "no dataset at all": (lambda m: shutil.rmtree(m.dataset), {"layout-recognised"}),
    "a file changed": (
        _write(CAPTION, b"paint square number 5  blue\n", record=False),
        {"manifest-matches-files"},
    ),
    "a target appeared": (
        lambda m: [
            shutil.copy(m.dataset / path, m.dataset / path.replace("s05", "new"))
            for path in (TARGET, CONTROL, CAPTION)
        ],
        {"manifest-matches-files"},
    ),
    "the digest was edited": (
        lambda m: m.edit(m.evidence("02-dataset"), lambda d: d["data"].update(dataset_digest="0" * 64)),
        {"manifest-matches-files"},
    ),
    "another size than the picture's": (
        _data(lambda d: _sample(d)["target"].update(width=640)),
        {"manifest-matches-files"},
    ),
    "a sample twice": (
        _data(lambda d: d["samples"].append(dict(_sample(d)))),
        {"manifest-matches-files", "no-duplicates"},
    ),
    "four to train on": (_data(_few), {"samples-enough"}),
    "no caption": (
        lambda m: (
            (m.dataset / CAPTION).unlink(),
            _data(lambda d: _sample(d).update(prompt="", caption=None))(m),
        ),
        {"pairs-complete", "captions-usable"},
    ),
    "a control without target": (_write("control_images/s99.png", b"", record=False), {"pairs-complete"}),
    "a1 does not own a10": (
        lambda m: (m.dataset / CONTROL).rename(m.dataset / "control_images/s055.png"),
        {"pairs-complete", "manifest-matches-files"},
    ),
    "dropped for want of a control": (_drop_for_partner, {"pairs-complete"}),
    "a target cut short": (_truncate, {"images-decode"}),
    "no picture": (_write(CONTROL, b"not a picture at all"), {"images-decode"}),
    "dropped as unreadable": (_drop, {"images-decode"}),
    "empty caption": (_write(CAPTION, b" \n"), {"captions-usable"}),
    "caption in cp1252": (_write(CAPTION, "schön".encode("cp1252")), {"captions-usable"}),
    "prompt lost in decoding": (
        lambda m: (
            (m.dataset / CAPTION).write_text("sch\ufffdn", encoding="utf-8"),
            _again(m),
            _data(lambda d: _sample(d).update(prompt="sch\ufffdn"))(m),
        ),
        {"captions-usable"},
    ),
    "prompt is not the caption": (_data(lambda d: _sample(d).update(prompt="another")), {"captions-usable"}),
    "31 pixels": (_picture(TARGET, 31, 64), {"sizes-usable"}),
    "a ribbon": (_picture(CONTROL, 40, 400), {"sizes-usable"}),
    "dropped and nothing wrong with it": (
        _data(lambda d: (d["samples"].remove(_sample(d)), _note(d, TARGET, "not wanted"))),
        {"pairs-complete"},
    ),
    "dropped without being counted": (
        _data(lambda d: d["dropped"].append({"path": "training_images/x.md", "reason": "no picture"})),
        {"manifest-matches-files"},
    ),
    "no control at all": (_no_controls, {"pairs-complete", "manifest-matches-files"}),
    "a further control is left out": (
        lambda m: shutil.copy(m.dataset / CONTROL, m.dataset / "control_images/s05_control_1.png"),
        {"manifest-matches-files"},
    ),
    "a mask is left out": (
        lambda m: shutil.copy(m.dataset / CONTROL, m.dataset / "control_images/s05_mask.png"),
        {"manifest-matches-files"},
    ),
    "a sample that is nowhere": (
        _data(lambda d: _sample(d)["target"].update(path="control_images/s06.png")),
        {"manifest-matches-files"},
    ),
    "a sample of no source": (_data(lambda d: _sample(d).update(source="other")), {"manifest-matches-files"}),
    "samples beyond a max_samples that is not set": (
        _data(lambda d: (d["samples"].remove(_sample(d)), _note(d, TARGET, "beyond max_samples, 13 of 14"))),
        {"manifest-matches-files"},
    ),
    "settings that a folder doesn't state": (
        _data(lambda d: d["sources"][0]["settings"].update(views=2)),
        {"layout-recognised"},
    ),
    "a kind that a folder is not": (
        _data(lambda d: d["sources"][0].update(kind="directory")),
        {"layout-recognised"},
    ),
    "another folder than the dataset's": (
        _data(lambda d: d["sources"][0].update(root="models", origin="models")),
        {"layout-recognised"},
    ),
    "nothing held out": (_data(_no_holdout), {"holdout-reserved"}),
    "held out and trained on": (_copy_into_train, {"holdout-reserved", "no-duplicates"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_its_check(fault: str, made: Any, judge: Any, assert_turned: Any) -> None:
    spoil, expected = FAULTS[fault]
    spoil(made)
    assert_turned(judge(made, "02"), fail=expected)


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
