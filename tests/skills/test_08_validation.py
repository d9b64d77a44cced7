"""Gate 08: a healthy validation passes, and each planted fault turns its check and no other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Spoil = Callable[[Any], Any]
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
                picture.update(size=path.stat().st_size, sha256=_digest(path))

        made.edit(made.evidence(DATA), change)

    return spoil


def _digest(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def _as(kind: str) -> Spoil:
    """The adapter's pictures are copies of another kind's."""

    def spoil(made: Any) -> None:
        def change(document: dict[str, Any]) -> None:
            for sample in document["data"]["samples"]:
                source, copy = sample["pictures"][kind], sample["pictures"]["adapter"]
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


def _as_prompt(sample: dict[str, Any]) -> None:
    """A held-out sample on which the adapter is worse is told to be a prompt."""
    sample.update(split="prompt", draws=[])


def _one_draw_again_and_again(sample: dict[str, Any]) -> None:
    sample["draws"] = [dict(sample["draws"][0]) for _ in sample["draws"]]


def _trained_on_holdout(made: Any) -> None:
    data = json.loads(made.evidence(DATA).read_text(encoding="utf-8"))["data"]
    name = data["samples"][0]["id"]
    made.edit_lines(made.run("full") / "metrics.jsonl", lambda lines: lines[5].update(samples=[name]))


FAULTS: dict[str, tuple[Spoil, set[str]]] = {
    "never validated": (
        lambda m: m.evidence(DATA).unlink(),
        {"adapter-from-judged-run", "all-samples-rendered", "same-noise"},
    ),
    "validation was begun and not finished": (
        lambda m: m.edit(m.evidence(DATA), lambda d: d.update(complete=False)),
        {"adapter-from-judged-run", "all-samples-rendered", "same-noise"},
    ),
    "adapter of another run": (
        _data(lambda d: d.update(run="outputs/edit-lora/v0")),
        {"adapter-from-judged-run"},
    ),
    "a checkpoint that was never saved": (
        _data(lambda d: d.update(checkpoint="checkpoint-9-999")),
        {"adapter-from-judged-run"},
    ),
    "other weights": (_data(lambda d: d.update(adapter_sha256="0" * 64)), {"adapter-from-judged-run"}),
    "the cache changed since": (
        _data(lambda d: d.update(cache_digest="0" * 64)),
        {"adapter-from-judged-run"},
    ),
    "other sampler steps than configured": (
        _data(lambda d: d.update(num_inference_steps=2)),
        {"adapter-from-judged-run"},
    ),
    "a held-out sample was trained on": (_trained_on_holdout, {"holdout-unseen"}),
    "a training sample is called held out": (_sample(lambda s: s.update(id="s03")), {"holdout-unseen"}),
    "a sample left out": (
        _data(lambda d: d["samples"].pop()),
        {"all-samples-rendered", "heldout-loss-improves"},
    ),
    "a picture deleted": (lambda m: _first_picture(m, "adapter").unlink(), {"all-samples-rendered"}),
    "a picture replaced": (
        lambda m: _first_picture(m, "base").write_bytes(_first_picture(m, "target").read_bytes()),
        {"all-samples-rendered"},
    ),
    "no zeroed adapter": (_sample(lambda s: s["pictures"].pop("zero")), {"all-samples-rendered"}),
    "pictures of another size": (
        _paint("adapter", lambda image: image.resize((16, 16))),
        {"all-samples-rendered"},
    ),
    "other noise for the adapter": (
        _sample(lambda s: s["noise_sha256"].update(adapter="0" * 64)),
        {"same-noise"},
    ),
    "one noise for all samples": (
        _data(lambda d: [s["noise_sha256"].update(_noise("1")) for s in d["samples"]]),
        {"same-noise"},
    ),
    "grey sheets": (_paint("adapter", _grey), {"images-not-degenerate"}),
    "one picture for every prompt": (_paint("adapter", _same_for_all), {"images-not-degenerate"}),
    "the adapter paints as the base": (_as("base"), {"adapter-changes-output"}),
    "no better than the base": (_draws(1.0, 1.0, 0.2), {"heldout-loss-improves"}),
    "worse than the base": (_draws(1.0, 1.1), {"heldout-loss-improves"}),
    "better by chance alone": (_draws(1.0, 0.99, 0.3), {"heldout-loss-improves"}),
    "too few draws": (_sample(lambda s: s.update(draws=s["draws"][:8])), {"heldout-loss-improves"}),
    "not measured at all": (
        _data(lambda d: [s.update(draws=[]) for s in d["samples"]]),
        {"heldout-loss-improves"},
    ),
    "a held-out sample told to be a prompt": (_sample(_as_prompt), {"heldout-loss-improves"}),
    "a held-out sample measured twice": (
        _data(lambda d: d["samples"].append(d["samples"][0])),
        {"same-noise", "heldout-loss-improves"},
    ),
    "one draw 32 times": (_sample(_one_draw_again_and_again), {"heldout-loss-improves"}),
    "another mean than that of the draws": (
        _data(lambda d: d["heldout_mean"].update(adapter=0.7)),
        {"heldout-loss-improves"},
    ),
    "no mean": (_data(lambda d: d["heldout_mean"].update(base=None)), {"heldout-loss-improves"}),
    "a loss of the adapter was not finite": (
        _sample(lambda s: s["draws"][3].update(adapter=None)),
        {"heldout-loss-improves"},
    ),
    "a loss of the base was not finite": (
        _sample(lambda s: s["draws"][3].update(base=None)),
        {"heldout-loss-improves"},
    ),
    "the zeroed adapter changes the picture": (_paint("zero", _brighter), {"zero-adapter-rejected"}),
}


def test_a_healthy_validation_passes(made: Any, judge: Any) -> None:
    verdict = judge(made, "08")
    assert verdict.passes, [(c.id, c.message) for c in verdict.checks if c.status != "pass"]
    check = next(c for c in verdict.checks if c.id == "heldout-loss-improves")
    assert "It speaks of these" in check.message


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_turns_its_check(made: Any, judge: Any, assert_turned: Any, name: str) -> None:
    spoil, wanted = FAULTS[name]
    spoil(made)
    verdict = judge(made, "08")
    assert not verdict.passes
    failed = {c.id for c in verdict.checks if c.status in ("fail", "error") and c.required}
    assert failed == wanted
    for check in verdict.checks:
        if check.status == "fail":
            assert check.remedy and check.message is not None


def _remedy(verdict: Any, id: str) -> str:
    return next(c.remedy for c in verdict.checks if c.id == id)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("variant", "remedy"), [("adapter", "lower optimizer.init_args.lr"), ("base", "train.mixed_precision")]
)
def test_a_loss_that_is_not_finite_is_told_and_leads_on(
    variant: str, remedy: str, made: Any, judge: Any
) -> None:
    _sample(lambda s: s["draws"][3].update({variant: None}))(made)
    verdict = judge(made, "08")
    check = next(c for c in verdict.checks if c.id == "heldout-loss-improves")
    assert f"of the {variant} is not finite" in check.message and check.observed == 1
    assert remedy in check.remedy and "then finetune plan" in check.remedy


def _best_is(step: int | None) -> Spoil:
    def spoil(made: Any) -> None:
        saves = (made.run("full") / "saves.jsonl").read_text(encoding="utf-8").splitlines()
        names = {
            line["step"]: line["path"] for line in map(json.loads, saves) if line["kind"] == "checkpoint"
        }
        best = {"step": step, "checkpoint": names[step], "holdout_loss": 0.5} if step is not None else None
        made.edit(made.run("full") / "run.json", lambda document: document.update(best=best))

    return spoil


@pytest.mark.parametrize(
    ("best", "remedy"), [(40, "finetune validate --checkpoint best"), (60, "set fewer"), (None, "set fewer")]
)
def test_the_best_checkpoint_is_offered_only_where_another_one_was_validated(
    best: int | None, remedy: str, made: Any, judge: Any
) -> None:
    """The record is of the checkpoint of step 60, the last."""
    _best_is(best)(made)
    _draws(1.0, 1.1)(made)
    assert _remedy(judge(made, "08"), "heldout-loss-improves").startswith(remedy)


def test_a_best_checkpoint_that_is_gone_is_not_offered(made: Any, judge: Any) -> None:
    _best_is(40)(made)
    (made.run("full") / "checkpoint-3-40" / "pytorch_lora_weights.safetensors").unlink()
    _draws(1.0, 1.1)(made)
    assert _remedy(judge(made, "08"), "heldout-loss-improves").startswith("set fewer")


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [("a held-out sample was trained on", "finetune fit"),
     ("a training sample is called held out", "finetune validate")],
)  # fmt: skip
def test_an_unseen_holdout_is_restored_by_what_spoilt_it(
    fault: str, remedy: str, made: Any, judge: Any
) -> None:
    FAULTS[fault][0](made)
    assert _remedy(judge(made, "08"), "holdout-unseen") == remedy


def test_a_repainted_background_is_told_and_not_failed(made: Any, judge: Any) -> None:
    _paint("adapter", _brighter)(made)
    verdict = judge(made, "08")
    check = next(c for c in verdict.checks if c.id == "unedited-kept")
    assert verdict.passes and check.status == "fail" and not check.required


def test_nan_never_passes(made: Any, judge: Any) -> None:
    """A record with NaN is refused on reading, whatever else it says."""
    path = made.evidence(DATA)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"adapter": 0.8', '"adapter": NaN', 1), encoding="utf-8", newline="\n")
    assert not judge(made, "08").passes
