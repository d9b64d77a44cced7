"""Faults of gate 08: the held-out comparison."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from gates.evidence import file_digest
from gates.selftest.faults.row import Fault, Spoil, each, fault

DATA = "08-validation"


def _data(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(made: Any) -> None:
        made.edit(made.evidence(DATA), lambda document: change(document["data"]) and None)

    return spoil


def _sample(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return _data(lambda data: change(data["samples"][0]))


def _draws(base: float, adapter: float, swing: float = 0.0) -> Spoil:
    """The same losses for all draws, but for a swing of the adapter's that averages out."""

    def change(data: dict[str, Any]) -> None:
        for sample in data["samples"]:
            for index, line in enumerate(sample["draws"]):
                line.update(base=base, adapter=adapter + (swing if index % 2 else -swing))
        data["heldout_mean"] = {"base": base, "adapter": adapter}

    return _data(change)


def _paint(kind: str, paint: Callable[[Image.Image], Image.Image]) -> Spoil:
    """Every picture of `kind` painted anew and recorded as it is now."""

    def spoil(made: Any) -> None:
        def change(document: dict[str, Any]) -> None:
            for sample in document["data"]["samples"]:
                picture = sample["pictures"][kind]
                path = made.root / picture["path"]
                with Image.open(path) as image:
                    painted = paint(image.copy())
                painted.save(path)
                picture.update(size=path.stat().st_size, sha256=file_digest(path))

        made.edit(made.evidence(DATA), change)

    return spoil


def _as(kind: str, copied: str = "adapter") -> Spoil:
    """The pictures of `copied` are copies of another kind's."""

    def spoil(made: Any) -> None:
        def change(document: dict[str, Any]) -> None:
            for sample in document["data"]["samples"]:
                source, copy = sample["pictures"][kind], sample["pictures"][copied]
                (made.root / copy["path"]).write_bytes((made.root / source["path"]).read_bytes())
                copy.update(size=source["size"], sha256=source["sha256"])

        made.edit(made.evidence(DATA), change)

    return spoil


def _first_picture(made: Any, kind: str) -> Path:
    data = json.loads(made.evidence(DATA).read_text(encoding="utf-8"))["data"]
    return made.root / data["samples"][0]["pictures"][kind]["path"]  # type: ignore[no-any-return]


def _noise(digit: str) -> dict[str, str]:
    return dict.fromkeys(("base", "adapter", "zero"), digit * 64)


def _grey(image: Image.Image) -> Image.Image:
    return Image.new("RGB", image.size, (128, 128, 128))


def _same_for_all(image: Image.Image) -> Image.Image:
    stripes = Image.linear_gradient("L").resize(image.size)
    return stripes.convert("RGB")


def _brighter(image: Image.Image) -> Image.Image:
    return image.point(lambda value: min(255, value + 40))


def _hardly_brighter(image: Image.Image) -> Image.Image:
    """Every tenth value by one."""
    return image.point(lambda value: value + (value % 10 == 0))


def _darker(image: Image.Image) -> Image.Image:
    return image.point(lambda value: max(0, value - 12))


def _copy_of_a_held_out_one(document: dict[str, Any]) -> None:
    samples = document["data"]["samples"]
    held = next(sample for sample in samples if sample["split"] == "holdout")
    train = next(sample for sample in samples if sample["split"] == "train")
    train["target"]["sha256"] = held["target"]["sha256"]


def _as_prompt(sample: dict[str, Any]) -> None:
    """A held-out sample on which the adapter is worse is told to be a prompt."""
    sample.update(split="prompt", draws=[])


def _one_draw_again_and_again(sample: dict[str, Any]) -> None:
    sample["draws"] = [dict(sample["draws"][0]) for _ in sample["draws"]]


def _trained_on_holdout(made: Any) -> None:
    data = json.loads(made.evidence(DATA).read_text(encoding="utf-8"))["data"]
    name = data["samples"][0]["id"]
    made.edit_lines(made.run("full") / "metrics.jsonl", lambda lines: lines[5].update(samples=[name]))


FAULTS: tuple[Fault, ...] = (
    fault(
        "never validated",
        {"adapter-from-judged-run", "all-samples-rendered", "same-noise"},
        lambda m: m.evidence(DATA).unlink(),
    ),
    fault(
        "validation was begun and not finished",
        {"adapter-from-judged-run", "all-samples-rendered", "same-noise"},
        lambda m: m.edit(m.evidence(DATA), lambda d: d.update(complete=False)),
    ),
    fault(
        "adapter of another run",
        {"adapter-from-judged-run"},
        _data(lambda d: d.update(run="outputs/edit-lora/v0")),
    ),
    fault(
        "a checkpoint that was never saved",
        {"adapter-from-judged-run"},
        _data(lambda d: d.update(checkpoint="checkpoint-9-999")),
    ),
    fault("other weights", {"adapter-from-judged-run"}, _data(lambda d: d.update(adapter_sha256="0" * 64))),
    fault(
        "the cache changed since",
        {"adapter-from-judged-run"},
        _data(lambda d: d.update(cache_digest="0" * 64)),
    ),
    fault(
        "other sampler steps than configured",
        {"adapter-from-judged-run"},
        _data(lambda d: d.update(num_inference_steps=2)),
    ),
    fault("a held-out sample was trained on", {"holdout-unseen"}, _trained_on_holdout),
    fault("a training sample is called held out", {"holdout-unseen"}, _sample(lambda s: s.update(id="s03"))),
    fault(
        "a sample left out",
        {"all-samples-rendered", "heldout-loss-improves"},
        _data(lambda d: d["samples"].pop()),
    ),
    fault("a picture deleted", {"all-samples-rendered"}, lambda m: _first_picture(m, "adapter").unlink()),
    fault(
        "a picture replaced",
        {"all-samples-rendered"},
        lambda m: _first_picture(m, "base").write_bytes(_first_picture(m, "target").read_bytes()),
    ),
    fault("no zeroed adapter", {"all-samples-rendered"}, _sample(lambda s: s["pictures"].pop("zero"))),
    fault(
        "pictures of another size",
        {"all-samples-rendered"},
        _paint("adapter", lambda image: image.resize((16, 16))),
    ),
    fault(
        "other noise for the adapter",
        {"same-noise"},
        _sample(lambda s: s["noise_sha256"].update(adapter="0" * 64)),
    ),
    fault(
        "one noise for all samples",
        {"same-noise"},
        _data(lambda d: [s["noise_sha256"].update(_noise("1")) for s in d["samples"]]),
    ),
    fault("grey sheets", {"images-not-degenerate", "unedited-kept"}, _paint("adapter", _grey)),
    fault(
        "one picture for every prompt",
        {"images-not-degenerate", "unedited-kept"},
        _paint("adapter", _same_for_all),
    ),
    fault("the adapter paints as the base", {"adapter-changes-output"}, _as("base")),
    fault("no better than the base", {"heldout-loss-improves"}, _draws(1.0, 1.0, 0.2)),
    fault("worse than the base", {"heldout-loss-improves"}, _draws(1.0, 1.1)),
    fault("better by chance alone", {"heldout-loss-improves"}, _draws(1.0, 0.99, 0.3)),
    fault("too few draws", {"heldout-loss-improves"}, _sample(lambda s: s.update(draws=s["draws"][:8]))),
    fault(
        "not measured at all",
        {"heldout-loss-improves"},
        _data(lambda d: [s.update(draws=[]) for s in d["samples"]]),
    ),
    fault("a held-out sample told to be a prompt", {"heldout-loss-improves"}, _sample(_as_prompt)),
    fault(
        "a held-out sample measured twice",
        {"same-noise", "heldout-loss-improves"},
        _data(lambda d: d["samples"].append(d["samples"][0])),
    ),
    fault("one draw 32 times", {"heldout-loss-improves"}, _sample(_one_draw_again_and_again)),
    fault(
        "another mean than that of the draws",
        {"heldout-loss-improves"},
        _data(lambda d: d["heldout_mean"].update(adapter=0.7)),
    ),
    fault("no mean", {"heldout-loss-improves"}, _data(lambda d: d["heldout_mean"].update(base=None))),
    fault(
        "a loss of the adapter was not finite",
        {"heldout-loss-improves"},
        _sample(lambda s: s["draws"][3].update(adapter=None)),
    ),
    fault(
        "a loss of the base was not finite",
        {"heldout-loss-improves"},
        _sample(lambda s: s["draws"][3].update(base=None)),
    ),
    fault("the zeroed adapter changes the picture", {"zero-adapter-rejected"}, _paint("zero", _brighter)),
    fault(
        "a held-out picture is in the training set, too",
        {"holdout-unseen"},
        lambda m: m.edit(m.evidence("02-dataset"), _copy_of_a_held_out_one),
    ),
    fault(
        "base and zeroed adapter paint grey",
        {"images-not-degenerate"},
        each(_paint("base", _grey), _paint("zero", _grey)),
    ),
    fault("the adapter paints as the zeroed one", {"adapter-changes-output"}, _as("zero")),
    fault(
        "the adapter hardly changes the base's picture",
        {"adapter-changes-output"},
        each(_as("base"), _paint("adapter", _hardly_brighter)),
    ),
    fault("the zeroed adapter paints as the adapter", {"zero-adapter-rejected"}, _as("adapter", "zero")),
    fault("the zeroed adapter darkens the picture", {"zero-adapter-rejected"}, _paint("zero", _darker)),
)
