"""Faults of gate 02: the pairs."""

import contextlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from gates.evidence import file_digest
from gates.selftest.faults.row import Fault, Spoil, each, fault

TARGET, CONTROL, CAPTION = "training_images/s05.png", "control_images/s05.png", "training_images/s05.txt"


def _data(change: Callable[[dict[str, Any]], Any]) -> Spoil:
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


def _write(path: str, content: bytes, *, record: bool = True) -> Spoil:
    def spoil(made: Any) -> None:
        (made.dataset / path).write_bytes(content)
        if record:
            _again(made)

    return spoil


def _picture(path: str, width: int, height: int) -> Spoil:
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


def _leave_out(reason: str) -> Spoil:
    """A sample that nothing is wrong with goes into `dropped`."""

    def change(data: dict[str, Any]) -> None:
        data["samples"].remove(_sample(data))
        _note(data, TARGET, reason)

    return _data(change)


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


def _all_held_out(data: dict[str, Any]) -> None:
    for sample in data["samples"]:
        sample["split"] = "holdout"


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


def _wish(*stems: str) -> Spoil:
    text = "\n".join(stems) + "\n"
    return lambda made: (made.dataset / "holdout.txt").write_text(text, encoding="utf-8", newline="\n")


FAULTS: tuple[Fault, ...] = (
    fault(
        "holdout.txt asks for another sample", {"manifest-matches-files"}, _wish("s00", "s01", "s02", "s07")
    ),
    fault("holdout.txt asks for fewer", {"manifest-matches-files"}, _wish("s00")),
    fault(
        "holdout.txt is gone",
        {"manifest-matches-files"},
        lambda m: m.edit(
            m.evidence("02-dataset"), lambda d: d["data"].update(holdout_rule="holdout.txt: 3 of 12")
        ),
    ),
    fault("no evidence", {"layout-recognised"}, lambda m: m.evidence("02-dataset").unlink()),
    fault(
        "evidence only begun",
        {"layout-recognised"},
        lambda m: m.edit(m.evidence("02-dataset"), lambda d: d.update(complete=False, data={})),
    ),
    fault(
        "another dataset than the target's",
        {"layout-recognised"},
        lambda m: m.edit(".gates/target.json", lambda d: d.update(dataset="other")),
    ),
    fault("no target folder", {"layout-recognised"}, _move_targets),
    fault("no dataset at all", {"layout-recognised"}, lambda m: shutil.rmtree(m.dataset)),
    fault(
        "a file changed",
        {"manifest-matches-files"},
        _write(CAPTION, b"paint square number 5  blue\n", record=False),
    ),
    fault(
        "a target appeared",
        {"manifest-matches-files"},
        lambda m: [
            shutil.copy(m.dataset / path, m.dataset / path.replace("s05", "new"))
            for path in (TARGET, CONTROL, CAPTION)
        ],
    ),
    fault(
        "the digest was edited",
        {"manifest-matches-files"},
        lambda m: m.edit(m.evidence("02-dataset"), lambda d: d["data"].update(dataset_digest="0" * 64)),
    ),
    fault(
        "another size than the picture's",
        {"manifest-matches-files"},
        _data(lambda d: _sample(d)["target"].update(width=640)),
    ),
    fault(
        "a sample twice",
        {"manifest-matches-files", "no-duplicates"},
        _data(lambda d: d["samples"].append(dict(_sample(d)))),
    ),
    fault("four to train on", {"samples-enough"}, _data(_few)),
    fault("none to train on", {"samples-enough"}, _data(_all_held_out)),
    fault(
        "no caption",
        {"pairs-complete", "captions-usable"},
        lambda m: (
            (m.dataset / CAPTION).unlink(),
            _data(lambda d: _sample(d).update(prompt="", caption=None))(m),
        ),
    ),
    fault(
        "a control without target", {"pairs-complete"}, _write("control_images/s99.png", b"", record=False)
    ),
    fault(
        "a1 does not own a10",
        {"pairs-complete", "manifest-matches-files"},
        lambda m: (m.dataset / CONTROL).rename(m.dataset / "control_images/s055.png"),
    ),
    fault("dropped for want of a control", {"pairs-complete"}, _drop_for_partner),
    fault("a target cut short", {"images-decode"}, _truncate),
    fault("no picture", {"images-decode"}, _write(CONTROL, b"not a picture at all")),
    fault("dropped as unreadable", {"images-decode"}, _drop),
    fault("empty caption", {"captions-usable"}, _write(CAPTION, b" \n")),
    fault("caption in cp1252", {"captions-usable"}, _write(CAPTION, "schön".encode("cp1252"))),
    fault(
        "prompt lost in decoding",
        {"captions-usable"},
        each(
            _write(CAPTION, "sch\ufffdn".encode()),
            _data(lambda d: _sample(d).update(prompt="sch\ufffdn")),
        ),
    ),
    fault(
        "prompt is not the caption", {"captions-usable"}, _data(lambda d: _sample(d).update(prompt="another"))
    ),
    fault("31 pixels", {"sizes-usable"}, _picture(TARGET, 31, 64)),
    fault("a ribbon", {"sizes-usable"}, _picture(CONTROL, 40, 400)),
    fault("a control of 16 pixels", {"sizes-usable"}, _picture(CONTROL, 16, 16)),
    fault(
        "dropped and nothing wrong with it",
        {"pairs-complete"},
        _leave_out("not wanted"),
    ),
    fault(
        "dropped without being counted",
        {"manifest-matches-files"},
        _data(lambda d: d["dropped"].append({"path": "training_images/x.md", "reason": "no picture"})),
    ),
    fault("no control at all", {"pairs-complete", "manifest-matches-files"}, _no_controls),
    fault(
        "a further control is left out",
        {"manifest-matches-files"},
        lambda m: shutil.copy(m.dataset / CONTROL, m.dataset / "control_images/s05_control_1.png"),
    ),
    fault(
        "a mask is left out",
        {"manifest-matches-files"},
        lambda m: shutil.copy(m.dataset / CONTROL, m.dataset / "control_images/s05_mask.png"),
    ),
    fault(
        "a sample that is nowhere",
        {"manifest-matches-files"},
        _data(lambda d: _sample(d)["target"].update(path="control_images/s06.png")),
    ),
    fault(
        "a sample of no source",
        {"manifest-matches-files"},
        _data(lambda d: _sample(d).update(source="other")),
    ),
    fault(
        "samples beyond a max_samples that is not set",
        {"manifest-matches-files"},
        _leave_out("beyond max_samples, 13 of 14"),
    ),
    fault(
        "settings that a folder doesn't state",
        {"layout-recognised"},
        _data(lambda d: d["sources"][0]["settings"].update(views=2)),
    ),
    fault(
        "a kind that a folder is not",
        {"layout-recognised"},
        _data(lambda d: d["sources"][0].update(kind="directory")),
    ),
    fault(
        "another folder than the dataset's",
        {"layout-recognised"},
        _data(lambda d: d["sources"][0].update(root="models", origin="models")),
    ),
    fault("nothing held out", {"holdout-reserved"}, _data(_no_holdout)),
    fault("held out and trained on", {"holdout-reserved", "no-duplicates"}, _copy_into_train),
)
