"""Gate 02 over the other kinds of datasets: each passes when healthy, and each planted fault turns its check."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gates.evidence import file_digest

COUNT, HELD = 8, 2


class Set:
    """A dataset of some kind in a workspace, and the evidence that a right scan of it gives."""

    def __init__(self, made: Any, tools: Any) -> None:
        self.made, self.tools, self.root = made, tools, made.root
        self.sources: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.dropped: list[dict[str, str]] = []

    def picture(self, path: str, shade: int, width: int = 64) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((48, width, 3), shade, np.uint8)).save(place)

    def text(self, path: str, text: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8", newline="\n")

    def source(self, name: str, kind: str, root: str, files: tuple[str, ...] = (), **settings: Any) -> None:
        self.sources.append(
            {
                "name": name, "kind": kind, "root": root, "origin": settings.pop("origin", root), "dropped": 0,
                "files": [{"path": path} for path in files],
                "settings": {**self.tools.SETTINGS, **settings},
            }
        )  # fmt: skip

    def sample(
        self, name: str, target: str, *controls: str, prompt: str, caption: str | None = None, **more: Any
    ) -> None:
        mask = more.pop("mask", None)
        self.samples.append(
            {
                "id": name, "source": self.sources[-1]["name"], "split": "train", "prompt": prompt,
                "alternatives": [], "caption": {"path": caption} if caption else None,
                "target": {"path": target}, "controls": [{"path": path} for path in controls],
                "mask": {"path": mask} if mask else None, **more,
            }
        )  # fmt: skip

    def write(self, layout: str, reference: str, *, file: bool = False) -> None:
        self.made.edit(".gates/target.json", lambda d: d.update(dataset=reference))
        for sample in [s for s in self.samples if not self._of(s)["settings"]["regularisation"]][:HELD]:
            sample["split"] = "holdout"
        data = {
            "layout": layout, "root": reference, "holdout_rule": "lowest sha256", "warnings": [],
            "dataset_file": {"path": Path(reference).name} if file else None, "sources": self.sources,
            "samples": sorted(self.samples, key=lambda sample: sample["id"]), "dropped": self.dropped,
        }  # fmt: skip
        self.made.edit(self.made.evidence("02-dataset"), lambda document: document.update(data=data))
        record(self.made)

    def _of(self, sample: dict[str, Any]) -> dict[str, Any]:
        return next(source for source in self.sources if source["name"] == sample["source"])


def record(made: Any) -> None:
    """Let the evidence have all listed files as they are now."""

    def change(document: dict[str, Any]) -> None:
        data = document["data"]
        roots = {source["name"]: made.root / source["root"] for source in data["sources"]}
        for sample in data["samples"]:
            images = [sample["target"], *sample["controls"], *([sample["mask"]] if sample["mask"] else [])]
            for entry in images:
                with Image.open(_facts(roots[sample["source"]], entry)) as image:
                    entry.update(width=image.width, height=image.height)
            if sample["caption"]:
                _facts(roots[sample["source"]], sample["caption"])
        for source in data["sources"]:
            for entry in source["files"]:
                _facts(made.root / source["origin"], entry)
        if data["dataset_file"]:
            _facts((made.root / data["root"]).parent, data["dataset_file"])

    made.edit(made.evidence("02-dataset"), change)
    made.rescan()


def _facts(root: Path, entry: dict[str, Any]) -> Path:
    path = root / str(entry["path"])
    entry.update(size=path.stat().st_size, sha256=file_digest(path))
    return path


def _data(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    def edit(document: dict[str, Any]) -> None:
        change(document["data"])

    def spoil(made: Any) -> None:
        made.edit(made.evidence("02-dataset"), edit)
        made.rescan()

    return spoil


def _sample(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(sample for sample in data["samples"] if sample["id"] == name)


def _replace(path: str, old: str, new: str, *, recorded: bool = True) -> Callable[[Any], None]:
    """Another text in a file; `recorded`: as if it had been so at the scan."""

    def spoil(made: Any) -> None:
        text = (made.root / path).read_text(encoding="utf-8")
        assert old in text
        (made.root / path).write_text(text.replace(old, new, 1), encoding="utf-8", newline="\n")
        if recorded:
            record(made)

    return spoil


def _append(path: str, text: str) -> Callable[[Any], None]:
    def spoil(made: Any) -> None:
        with (made.root / path).open("a", encoding="utf-8", newline="\n") as file:
            file.write(text)
        record(made)

    return spoil


def _copy(old: str, new: str) -> Callable[[Any], None]:
    return lambda made: shutil.copy(made.root / old, made.root / new)


# ---- healthy datasets


def directory(made: Set, *, controls: bool = True) -> None:
    given = 'control_directory = "ctl"\n' if controls else ""
    made.text("in/sets.toml", f'[[datasets]]\nimage_directory = "pics"\ncaption_extension = ".cap"\n{given}')
    made.source("pics", "directory", "in" if controls else "in/pics")
    way = "pics/" if controls else ""
    for index in range(COUNT):
        made.picture(f"in/pics/s{index}.png", 10 * index)
        made.text(f"in/pics/s{index}.cap", f"paint {index}\n")
        shown = [f"ctl/s{index}.png", f"ctl/s{index}_2.png"] if controls else []
        for number, path in enumerate(shown):
            made.picture(f"in/{path}", 101 + 20 * number + index)
        made.sample(
            f"pics/s{index}", f"{way}s{index}.png", *shown,
            prompt=f"paint {index}", caption=f"{way}s{index}.cap",
        )  # fmt: skip
    made.write("toml", "in/sets.toml", file=True)


def target_only(made: Set) -> None:
    directory(made, controls=False)


def jsonl(made: Set) -> None:
    lines = []
    made.source("dataset", "jsonl", "in", ("list.jsonl",))
    for index in range(COUNT):
        made.picture(f"in/t/{index}.png", 10 * index)
        made.picture(f"in/c/{index}.png", 101 + index)
        row = {"image_path": f"t/{index}.png", "caption": f"paint {index}"}
        shown = [f"c/{index}.png"] if index != 3 else []  # a row without control is meant so
        row |= {f"control_path_{number}": path for number, path in enumerate(shown)}
        lines.append(json.dumps(row) + "\n")
        made.sample(f"t/{index}", f"t/{index}.png", *shown, prompt=f"paint {index}")
    lines.append(json.dumps({"image_path": "t/5.png", "control_path": "c/4.png", "caption": "other"}) + "\n")
    made.sample("t/5#2", "t/5.png", "c/4.png", prompt="other")
    made.text("in/list.jsonl", "".join(lines))
    made.write("jsonl", "in/list.jsonl")


def table(made: Set) -> None:
    lines = ["image_path,caption,control_path,mask_path\n"]
    made.source("dataset", "csv", "in", ("list.csv",))
    for index in range(COUNT):
        made.picture(f"in/{index}.png", 10 * index)
        made.picture(f"in/c{index}.png", 101 + index)
        made.picture(f"in/m{index}.png", 200 + index)
        lines.append(f'{index}.png,"paint, {index}",c{index}.png,m{index}.png\n')
        made.sample(
            str(index), f"{index}.png", f"c{index}.png", prompt=f"paint, {index}", mask=f"m{index}.png"
        )
    made.text("in/list.csv", "".join(lines))
    made.write("csv", "in/list.csv")


def archive(made: Set) -> None:
    """A folder of two parquet files, unpacked; one row has no control, which its table says."""
    for name in ("a.parquet", "b.parquet"):
        made.text(f"in/data/{name}", name)
    files = ("a.parquet", "b.parquet")
    made.source("dataset", "parquet", "imported/dataset", files, origin="in/data")
    for index in range(COUNT):
        target, control = f"training_images/r{index}.png", f"control_images/r{index}.png"
        made.picture(f"imported/dataset/{target}", 10 * index)
        made.text(f"imported/dataset/training_images/r{index}.txt", f"paint {index}")
        if index:
            made.picture(f"imported/dataset/{control}", 101 + index)
        made.sample(
            f"r{index}", target, *([control] if index else []),
            prompt=f"paint {index}", caption=f"training_images/r{index}.txt",
        )  # fmt: skip
    archives = [
        {
            "name": f"data/{name}",
            "mtime_ns": 1,
            **made.tools.file_size_and_digest(made.root / "in/data" / name),
        }
        for name in files
    ]
    made.text("imported/dataset/import.json", json.dumps({"archives": archives, "beside": []}))
    made.write("parquet", "in")


TOML = """\
[general]
resolution = [96, 64]
num_repeats = 2
trigger_word = "zxc"

[[datasets]]
name = "edits"
folder = "edits"
enable_bucket = true
weight = 2

[[datasets]]
name = "keep"
image_directory = "keep"
regularisation = true
caption_lines = true
repeats = 0
trigger_word = ""
weight = 1.0

[[datasets]]
name = "rows"
csv_file = "rows/list.csv"
max_samples = 1
control_resolution = 512
no_resize_control = true
weight = 1
"""


def several(made: Set) -> None:
    """Pairs with a trigger word, a regularisation set whose captions are lines, and a capped listing."""
    made.text("in/sets.toml", TOML)
    made.source(
        "edits", "folders", "in/edits",
        resolution=[64, 96], views=2, trigger_word="zxc", enable_bucket=True, weight=2.0,
    )  # fmt: skip
    for index in range(COUNT):
        made.picture(f"in/edits/training_images/{index}.png", 10 * index)
        made.picture(f"in/edits/control_images/{index}.png", 101 + index)
        made.text(f"in/edits/training_images/{index}.txt", f"make [trigger] {index}" if index % 2 else "blue")
        made.sample(
            f"edits/{index}", f"training_images/{index}.png", f"control_images/{index}.png",
            prompt=f"make zxc {index}" if index % 2 else "zxc, blue", caption=f"training_images/{index}.txt",
        )  # fmt: skip
    made.source(
        "keep",
        "directory",
        "in/keep",
        resolution=[64, 96],
        regularisation=True,
        caption_lines=True,
        weight=1.0,
    )
    made.picture("in/keep/k.png", 250)
    made.text("in/keep/k.txt", "a house\n\n a home \n")
    made.sample("keep/k", "k.png", prompt="a house", caption="k.txt", alternatives=["a home"])
    made.source(
        "rows", "csv", "in/rows", ("list.csv",), resolution=[64, 96], views=2, trigger_word="zxc",
        max_samples=1, control_resolution=[512, 512], no_resize_control=True, weight=1.0,
    )  # fmt: skip
    made.text("in/rows/list.csv", "image_path,caption\nx.png,a ZXC\ny.png,b\n")
    for name, shade in (("x", 230), ("y", 240)):
        made.picture(f"in/rows/{name}.png", shade)
    made.sample("rows/x", "x.png", prompt="a ZXC")
    made.dropped.append({"path": "rows/y.png", "reason": "beyond max_samples, 1 of 2 are taken"})
    made.sources[-1]["dropped"] = 1
    made.write("toml", "in/sets.toml", file=True)


KINDS: dict[str, Callable[[Set], None]] = {
    "directory": directory, "target-only": target_only, "jsonl": jsonl, "csv": table, "archive": archive,
    "several": several,
}  # fmt: skip


@pytest.fixture
def build(made: Any, workspaces: Any) -> Callable[[str], Any]:
    def one(kind: str) -> Any:
        KINDS[kind](Set(made, workspaces))
        return made

    return one


@pytest.mark.parametrize("kind", KINDS)
def test_healthy(kind: str, build: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(build(kind), "02")
    if kind == "jsonl":  # one target under two captions, which the advisory check tells
        assert verdict.passes
        assert_turned(verdict, fail={"no-duplicates"})
    else:
        assert_turned(verdict)


def test_holdout_txt_does_not_reach_a_regularisation_set(build: Any, judge: Any, assert_turned: Any) -> None:
    made = build("several")
    (made.root / "in/holdout.txt").write_text("edits/0\nkeep/k\nedits/1\n", encoding="utf-8")
    assert_turned(judge(made, "02"))
    (made.root / "in/holdout.txt").write_text("edits/0\nkeep/k\nrows/x\n", encoding="utf-8")
    assert_turned(judge(made, "02"), fail=FILES)


# ---- faults


def _drop(made: Any) -> None:
    """A row of an archive that never became a file."""
    note = {"path": "a.parquet/17", "reason": "no caption"}
    _data(lambda d: (d["dropped"].append(note), d["sources"][0].update(dropped=1)))(made)


def _swap(data: dict[str, Any]) -> None:
    _sample(data, "pics/s3")["controls"].reverse()


def _hold_regularisation(data: dict[str, Any]) -> None:
    _sample(data, "keep/k")["split"] = "holdout"


def _regularise_all(made: Any) -> None:
    _replace("in/sets.toml", "enable_bucket = true", "enable_bucket = true\nregularisation = true")(made)

    def change(data: dict[str, Any]) -> None:
        data["sources"][0]["settings"]["regularisation"] = True
        for sample in data["samples"]:
            sample["split"] = "train"

    _data(change)(made)


LAYOUT, FILES, PAIRS = {"layout-recognised"}, {"manifest-matches-files"}, {"pairs-complete"}
CAPTIONS, HOLDOUT = {"captions-usable"}, {"holdout-reserved"}
FAULTS: dict[tuple[str, str], tuple[Callable[[Any], Any], set[str]]] = {
    ("directory", "another folder of controls"): (
        lambda m: ((m.root / "in/other").mkdir(),
                   _replace("in/sets.toml", '"ctl"', '"../data/control_images"')(m)),
        LAYOUT,
    ),
    ("directory", "no folder of controls"): (_replace("in/sets.toml", '"ctl"', '"pics/none"'), LAYOUT),
    ("directory", "the dataset file states a setting"): (
        _replace("in/sets.toml", "control_directory", "num_repeats = 2\ncontrol_directory"), LAYOUT,
    ),
    ("directory", "the dataset file changed"): (
        _replace("in/sets.toml", "\n", "\n# a comment\n", recorded=False), FILES,
    ),
    ("directory", "the dataset file is no TOML"): (_replace("in/sets.toml", "[[", "[", recorded=False), LAYOUT),
    ("directory", "one dataset more"): (_append("in/sets.toml", '\n[[datasets]]\nfolder = "x"\n'), LAYOUT),
    ("directory", "a target appeared"): (
        lambda m: [
            _copy(f"in/{folder}/s3.{suffix}", f"in/{folder}/s33.{suffix}")(m)
            for folder, suffix in (("pics", "png"), ("pics", "cap"), ("ctl", "png"))
        ],
        FILES,
    ),
    ("directory", "a control without target"): (_copy("in/ctl/s3.png", "in/ctl/s33.png"), PAIRS),
    ("directory", "a further control"): (_copy("in/ctl/s3.png", "in/ctl/s3_0.png"), FILES),
    ("directory", "controls in another order"): (_data(_swap), FILES),
    ("directory", "a mask"): (_copy("in/ctl/s3.png", "in/ctl/s3_mask.png"), FILES),
    ("directory", "s3 has no control"): (
        lambda m: [(m.root / "in/ctl" / f"s3{tail}.png").unlink() for tail in ("", "_2")], PAIRS | FILES,
    ),
    ("directory", "a caption of another extension"): (
        lambda m: (m.root / "in/pics/s3.cap").rename(m.root / "in/pics/s3.txt"), FILES,
    ),
    ("directory", "holdout.txt beside the dataset file"): (
        lambda m: (m.root / "in/holdout.txt").write_text("pics/s0\n", encoding="utf-8"), FILES,
    ),
    ("target-only", "a caption is gone"): (
        lambda m: (m.root / "in/pics/s3.cap").unlink(), FILES,
    ),
    ("target-only", "a prompt of its own"): (_data(lambda d: _sample(d, "pics/s3").update(prompt="x")), CAPTIONS),
    ("target-only", "a control that no folder holds"): (
        _data(lambda d: _sample(d, "pics/s3").update(controls=[_sample(d, "pics/s4")["target"]])), FILES,
    ),
    ("jsonl", "the listing changed"): (_replace("in/list.jsonl", "}\n", "} \n", recorded=False), FILES),
    ("jsonl", "a row more"): (_append("in/list.jsonl", '{"image_path": "t/5.png", "caption": "x"}\n'), FILES),
    ("jsonl", "a row less"): (
        _replace("in/list.jsonl", '{"image_path": "t/6.png", "caption": "paint 6", "control_path_0": "c/6.png"}\n', ""),
        FILES,
    ),
    ("jsonl", "a row that is none"): (_append("in/list.jsonl", "{\n"), PAIRS),
    ("jsonl", "a row without caption"): (_append("in/list.jsonl", '{"image_path": "t/5.png"}\n'), PAIRS),
    ("jsonl", "a row that leads out"): (
        _append("in/list.jsonl", '{"image_path": "../data/training_images/s05.png", "caption": "x"}\n'), PAIRS,
    ),
    ("jsonl", "a row whose control is missing"): (
        _append("in/list.jsonl", '{"image_path": "t/5.png", "control_path": "no.png", "caption": "x"}\n'), PAIRS,
    ),
    ("jsonl", "another caption in the listing"): (_replace("in/list.jsonl", "paint 6", "paint 66"), CAPTIONS),
    ("jsonl", "another control in the listing"): (_replace("in/list.jsonl", "c/6.png", "c/7.png"), FILES),
    ("jsonl", "the first row's target held out, its second row trained on"): (
        _data(lambda d: _sample(d, "t/5").update(split="holdout")), HOLDOUT,
    ),
    ("jsonl", "no file recorded"): (_data(lambda d: d["sources"][0].update(files=[])), LAYOUT),
    ("csv", "the listing is gone"): (lambda m: (m.root / "in/list.csv").unlink(), LAYOUT),
    ("csv", "another mask in the listing"): (_replace("in/list.csv", "m6.png", "m7.png"), FILES),
    ("csv", "a cell too many"): (_append("in/list.csv", "1.png,x,c1.png,m1.png,x\n"), PAIRS),
    ("csv", "a target cut short"): (
        lambda m: ((m.root / "in/6.png").write_bytes((m.root / "in/6.png").read_bytes()[:60]), record(m)),
        {"images-decode"},
    ),
    ("csv", "a ribbon"): (
        lambda m: (Image.fromarray(np.full((40, 400, 3), 66, np.uint8)).save(m.root / "in/m6.png"), record(m)),
        {"sizes-usable"},
    ),
    ("archive", "an archive changed"): (_replace("in/data/a.parquet", "a", "b", recorded=False), FILES),
    ("archive", "unpacked of other archives"): (_replace("in/data/a.parquet", "a", "b"), FILES),
    ("archive", "import.json is gone"): (
        lambda m: (m.root / "imported/dataset/import.json").unlink(), LAYOUT,
    ),
    ("archive", "an unpacked picture is gone"): (
        lambda m: (m.root / "imported/dataset/training_images/r3.png").unlink(), PAIRS | FILES,
    ),
    ("archive", "unpacked outside of the workspace"): (
        lambda m: (
            m.edit(".gates/local.json", lambda d: d) if (m.root / ".gates/local.json").exists() else
            (m.root / ".gates/local.json").write_text(
                json.dumps({"external": {"away": m.root.parent.as_posix()}}), encoding="utf-8"
            ),
            shutil.copytree(m.root / "imported/dataset", m.root.parent / "away"),
            _data(lambda d: d["sources"][0].update(root="external:away/away"))(m),
        ),
        LAYOUT,
    ),
    ("archive", "of another folder"): (_data(lambda d: d["sources"][0].update(origin="data")), LAYOUT),
    ("archive", "a row was left out"): (_drop, PAIRS),
    ("archive", "of another kind"): (_data(lambda d: d["sources"][0].update(kind="webdataset")), LAYOUT),
    ("several", "width and height changed places"): (
        _data(lambda d: d["sources"][0]["settings"].update(resolution=[96, 64])), LAYOUT,
    ),
    ("several", "repeats 0 read as 2"): (_data(lambda d: d["sources"][1]["settings"].update(views=2)), LAYOUT),
    ("several", "the general trigger word where a dataset has its own"): (
        _data(lambda d: d["sources"][1]["settings"].update(trigger_word="zxc")), LAYOUT,
    ),
    ("several", "another weight"): (_data(lambda d: d["sources"][0]["settings"].update(weight=1.0)), LAYOUT),
    ("several", "sources in another order"): (_data(lambda d: d["sources"].reverse()), LAYOUT),
    ("several", "the trigger word is forgotten"): (
        _data(lambda d: _sample(d, "edits/2").update(prompt="blue")), CAPTIONS,
    ),
    ("several", "the placeholder is left"): (
        _data(lambda d: _sample(d, "edits/3").update(prompt="make [trigger] 3")), CAPTIONS,
    ),
    ("several", "the trigger word twice"): (
        _data(lambda d: _sample(d, "rows/x").update(prompt="zxc, a ZXC")), CAPTIONS,
    ),
    ("several", "a caption's second line is lost"): (
        _data(lambda d: _sample(d, "keep/k").update(alternatives=[])), CAPTIONS,
    ),
    ("several", "regularisation held out"): (_data(_hold_regularisation), HOLDOUT),
    ("several", "only regularisation to train on"): (_regularise_all, {"samples-enough", "holdout-reserved"}),
    ("several", "one more than max_samples"): (
        _data(lambda d: (
            d["samples"].append({**_sample(d, "rows/x"), "id": "rows/y", "prompt": "zxc, b"}),
            d["dropped"].clear(), d["sources"][2].update(dropped=0),
        )),
        FILES | {"no-duplicates"},
    ),
    ("several", "an unlisted sample"): (
        _data(lambda d: (d["dropped"].clear(), d["sources"][2].update(dropped=0))), FILES,
    ),
    ("several", "a target without control in a folder"): (
        lambda m: (m.root / "in/edits/control_images/5.png").unlink(), PAIRS | FILES,
    ),
    ("several", "a sample's source is swapped"): (
        _data(lambda d: _sample(d, "rows/x").update(source="keep")), FILES,
    ),
    ("several", "two sources of one name"): (_data(lambda d: d["sources"][1].update(name="edits")), LAYOUT),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_fault_turns_its_check(kind: str, fault: str, build: Any, judge: Any, assert_turned: Any) -> None:
    made = build(kind)
    spoil, expected = FAULTS[kind, fault]
    spoil(made)
    told = {"no-duplicates"} if kind == "jsonl" and expected != LAYOUT else set()
    verdict = judge(made, "02")
    errors = {check.id for check in verdict.checks if check.status == "error"}
    assert errors <= LAYOUT and not verdict.passes
    assert_turned(verdict, fail=(expected - errors) | told, error=errors)
