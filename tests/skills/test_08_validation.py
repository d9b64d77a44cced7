"""Gate 08: a healthy validation passes, and each planted fault turns its check and no other."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gates.selftest.faults import validation
from gates.selftest.faults.validation import DATA, _brighter, _draws, _paint, _sample

FAULTS = {fault.what: fault for fault in validation.FAULTS}

Spoil = Callable[[Any], Any]


def test_a_healthy_validation_passes(made: Any, judge: Any) -> None:
    verdict = judge(made, "08")
    assert verdict.passes, [(c.id, c.message) for c in verdict.checks if c.status != "pass"]
    check = next(c for c in verdict.checks if c.id == "heldout-loss-improves")
    assert "It speaks of these" in check.message


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
    FAULTS[fault].spoil(made)
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
