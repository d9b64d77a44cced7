import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gates import chain, cli
from gates.reports import html, story
from gates.workspace import Workspace

EVIL = "<script>alert(1)</script>\"'&<img src=http://evil.invalid/x onerror=alert(1)>"
VOID = {"meta", "img", "br", "rect", "line", "circle", "polyline"}


class Page(HTMLParser):
    """Elements in order, with the check that each is closed where it belongs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _render(root: Path) -> str:
    workspace = Workspace.open(root)
    verdicts = [judged.whole for judged in chain.judge_up_to(workspace, "08")]
    return html.render(story.collect(workspace.again(), verdicts))


def _self_contained(text: str) -> None:
    page = Page(text)
    assert not {name for name, _ in page.elements} & {"script", "link", "iframe", "object", "embed", "base"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/"))
    assert "url(" not in text and "@import" not in text


def test_a_finished_workspace(made: Any) -> None:
    text = _render(made.root)
    _self_contained(text)
    page = Page(text)
    assert "PASS 8 of 8 gates pass" in " ".join(page.text.split())
    assert len(page.all("svg")) == 3 and len(page.all("img")) == 3 * 4
    assert all(image["alt"] and image["width"] for image in page.all("img"))
    checks = [
        check.id for item in chain.judge_up_to(Workspace.open(made.root), "08") for check in item.whole.checks
    ]
    assert [word for word in page.words if word in set(checks)] == checks
    record = json.loads((made.run("full") / "run.json").read_text(encoding="utf-8"))
    for told in (record["dataset_digest"], record["config_digest"], "bitsandbytes", "0.50.2", "finetune fit"):
        assert told in page.text
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {(item["href"] or "")[1:] for item in page.all("a")} <= set(ids)
    assert all(item.get("scope") in ("col", "row") for item in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))


def test_warm_up_and_checkpoints_are_marked(made: Any) -> None:
    schedule = {"scheduler_type": "cosine", "warmup_steps": 12}
    made.edit(made.run("full") / "run.json", lambda d: d["resolved"].update(lr_scheduler=schedule))
    page = Page(_render(made.root))
    assert page.text.count("warm-up, 12 steps") == 3
    assert len([line for line in page.all("line") if line["class"] == "mark"]) == 3 * 3


def test_the_page_is_a_function_of_the_workspace(made: Any) -> None:
    assert _render(made.root) == _render(made.root)


@pytest.mark.parametrize("absolute", ["data", "model"])
def test_no_path_of_this_machine(made: Any, absolute: str) -> None:
    outside = made.root.parent / "a place of mine"
    source = made.dataset if absolute == "data" else made.root / "models/base"
    shutil.copytree(source, outside)
    local = {"external": {"data": str(outside)}}
    (made.root / ".gates/local.json").write_text(json.dumps(local), encoding="utf-8")
    if absolute == "data":
        made.edit(".gates/target.json", lambda document: document.update(dataset=str(outside)))
    else:
        made.edit_config(lambda c: c["model"].update(pretrained_model_name_or_path=str(outside)))
        made.edit(made.run("full") / "run.json", lambda d: d["model"].update(name=str(outside)))
        made.edit(made.evidence("01-host"), lambda d: d.update(command=f"finetune probe {outside}"))
    text = _render(made.root)
    for secret in (str(made.root), str(outside), str(Path.home()) + "/", made.root.as_posix()):
        assert secret not in text


def test_markup_is_shown_as_text(made: Any) -> None:
    def spoil(document: Any) -> None:
        sample = document["data"]["samples"][0]
        sample.update(id=EVIL, prompt=EVIL)
        document["command"] = EVIL

    made.edit(made.evidence("08-validation"), spoil)
    made.edit(made.run("full") / "run.json", lambda d: d["device"].update(name=EVIL))
    made.edit(made.run("full") / "run.json", lambda d: d["packages"].update({EVIL: EVIL}))
    made.edit(made.run("full") / "run.json", lambda d: d.update(reason=EVIL))
    made.edit(made.evidence("01-host"), lambda d: d["data"]["system"].update(release=EVIL))
    text = _render(made.root)
    _self_contained(text)
    page = Page(text)
    assert page.text.count(EVIL) >= 7
    assert f"{EVIL}, with the adapter" in {image["alt"] for image in page.all("img")}


def test_hostile_names_in_checks_are_text_too(made: Any) -> None:
    name = "<b>bold & 'quoted'"
    shutil.copy(made.dataset / "training_images/s05.png", made.dataset / f"training_images/{name}.png")
    text = _render(made.root)
    assert name in Page(text).text and "<b>bold" not in text


def _absent_adapter(made: Any) -> None:
    sorted((made.run("full") / "validation/adapter").iterdir())[0].unlink()


SPOILED = {
    "no evidence": (lambda made: shutil.rmtree(made.root / ".gates/evidence"), "not scanned yet"),
    "no runs": (lambda made: shutil.rmtree(made.project), "No run yet"),
    "smoke only": (lambda made: shutil.rmtree(made.run("full")), "v0 (smoke)"),
    "no validation": (lambda made: made.evidence("08-validation").unlink(), "No validation yet"),
    "a picture is absent": (_absent_adapter, "no picture: it is missing"),
    "NaN": (
        lambda made: made.edit_lines(
            made.run("full") / "metrics.jsonl", lambda ls: ls[9].update(loss=float("nan"))
        ),
        "not finite",
    ),
    "null loss": (
        lambda made: made.edit_lines(made.run("full") / "metrics.jsonl", lambda ls: ls[9].update(loss=None)),
        "not finite",
    ),
    "no metrics": (lambda made: (made.run("full") / "metrics.jsonl").unlink(), "Not read"),
    "broken run.json": (lambda made: (made.run("full") / "run.json").write_text("{"), "is not JSON"),
    "no config": (lambda made: (made.root / "config.yaml").unlink(), "FAIL"),
    "broken picture": (
        lambda made: next((made.run("full") / "validation/base").iterdir()).write_bytes(b"x"),
        "does not decode",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_an_unfinished_or_failing_workspace_has_a_page(made: Any, name: str) -> None:
    spoil, told = SPOILED[name]
    spoil(made)
    text = _render(made.root)
    _self_contained(text)
    page = Page(text)
    assert told in page.text and "FAIL" in page.text
    assert all(f"gate-{number:02}" in {a.get("id") for a in page.all("h3")} for number in range(1, 9))


def test_a_resumed_run_shows_its_whole_lineage(made: Any) -> None:
    full, after = made.run("full"), made.project / "v2"
    shutil.copytree(full, after)
    for folder, keep in ((full, lambda step: step <= 20), (after, lambda step: step > 20)):
        for file in ("metrics.jsonl", "probe.jsonl", "saves.jsonl"):
            made.edit_lines(folder / file, lambda lines, keep=keep: [x for x in lines if keep(x["step"])])
    origin = {
        "run": full.relative_to(made.root).as_posix(), "run_id": "run-v1", "step": 20, "digest": "0" * 64,
        "checkpoint": "checkpoint-last-1-20-last",
    }  # fmt: skip
    made.edit(after / "run.json", lambda d: d.update(run_id="run-v2", resumed_from=origin))
    page = Page(text := _render(made.root))
    assert "Not read" not in page.text
    table = text[text.index("The probe in numbers") :].partition("</table>")[0]
    assert re.findall(r'<th scope="row">(\d+)</th>', table) == ["0", "20", "40", "60"]
    assert "finetune fit --resume latest" in page.text and "v1, step 20" in page.text


def test_pictures_are_small_and_bare(made: Any) -> None:
    path = sorted((made.run("full") / "validation/target").iterdir())[0]
    exif = Image.Exif()
    exif[0x010E] = "secret place"
    Image.effect_noise((2000, 1000), 80).convert("RGB").save(path, exif=exif)
    text = _render(made.root)
    widths = {(image["width"], image["height"]) for image in Page(text).all("img")}
    assert ("384", "192") in widths and ("48", "32") in widths
    assert "data:image/jpeg" in text and "secret place" not in text and len(text) < 400_000


def test_many_samples_are_cut_and_counted(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "SAMPLES_MAX", 2)
    page = Page(_render(made.root))
    assert len(page.all("img")) == 8 and "And 1 samples more" in page.text


@pytest.mark.parametrize("output", [None, "sub/page.html"])
def test_the_command(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, output: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    extra = ["--output", output] if output else []
    assert cli.main(["report", "--workspace", str(made.root), *extra]) == 0
    page = Path(output) if output else made.root / "report.html"
    size = page.stat().st_size
    assert capsys.readouterr().out == f"{output or 'report.html'}: {size} bytes, PASS\n"
    assert b"\r" not in page.read_bytes() and size < 2**20
    assert cli.main(["verify", "--workspace", str(made.root)]) == 0
