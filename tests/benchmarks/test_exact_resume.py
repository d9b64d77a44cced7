"""benchmarks/exact_resume.py in short: stopped and resumed it is the same run, and a difference would be told."""

import argparse
import json
from typing import Any

import exact_resume
import pytest
import torch

from runtime.training import optimizers, session

STEPS, STOP = 3, 2
CASE = "dropout, accumulation"


@pytest.mark.slow
def test_a_resumed_run_is_the_run_left_alone(
    call: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[session.Session] = []
    launch = session.launch

    def spy(*given: Any, **named: Any) -> session.Session:
        opened.append(launch(*given, **named))
        return opened[-1]

    monkeypatch.setattr(session, "launch", spy)
    words = ("--steps", str(STEPS), "--stop", str(STOP), "--only", CASE)
    call(exact_resume.main, "--device", "cpu", *words)
    painted, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert painted == {"case": "pictures painted in the fit", "equal": True}
    assert lines[:2] == [
        {"case": CASE, "deterministic": deterministic, "equal": True, "difference": 0.0}
        for deterministic in (True, False)
    ]
    assert [line["optimizer"] for line in lines[2:]] == [proven.path for proven in optimizers.PROVEN]
    equal = {line["optimizer"] for line in lines[2:] if line.get("equal")}
    assert equal >= {path for path in (p.path for p in optimizers.PROVEN) if path.startswith("torch.")}
    assert all(line["refused"] for line in lines[2:] if "equal" not in line)
    # Or equality would say nothing: pictures were painted, and the resumed run went on from where it was stopped.
    assert [made.samples is not None for made in opened[:2]] == [False, True]
    origins = [made.run.document["resumed_from"] for made in opened[2:]]
    assert [origin and origin["step"] for origin in origins] == [None, None, STOP] * 2
    assert [made.config.train.deterministic for made in opened[2:]] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("resumed", "found"),
    [
        ([1.0, -4.0], {"equal": True, "difference": 0.0}),
        ([1.5, -4.0], {"equal": False, "difference": 0.125}),
        ([1.0, 4.0], {"equal": False, "difference": 2.0}),
    ],
)
def test_a_difference_is_told(
    resumed: list[float], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the largest weight."""
    asked: list[tuple[int | None, str | None]] = []

    def fit(workspace: Any, loaded: Any, stop: int | None, resume: str | None) -> dict[str, torch.Tensor]:
        asked.append((stop, resume))
        return {"a": torch.tensor(resumed if resume else [1.0, -4.0]), "b": torch.zeros(3)}

    monkeypatch.setattr(exact_resume, "fit", fit)
    monkeypatch.setattr(exact_resume, "prepare", lambda *given: None)
    workspace: Any = None
    assert exact_resume.compare(workspace, argparse.Namespace(stop=STOP), {}) == found
    assert asked == [(None, None), (STOP, None), (None, "latest")]


def test_an_optimizer_that_forgets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = optimizers.PROVEN[0]
    assert exact_resume.restored(plain, "cpu") == {"device": "cpu", "equal": True}
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    assert exact_resume.restored(plain, "cpu") == {"device": "cpu", "equal": False}
