"""Compiled blocks in a fit, without a C++ compiler: what is traced, how often, and that it learns the same."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from PIL import Image
from torch._dynamo.utils import counters

from runtime.progress import Progress
from runtime.training import loop

# torch's tracer asks every tensor that it meets for its gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)

STEPS = 16  # each sample twice
ASKS = {
    "train.max_train_steps": STEPS,
    "train.checkpointing_steps": STEPS,
    "data.batch_size": 1,
    "data.processor.enable_bucket": True,
    "train.graphs": False,
}
MOST = 3  # one for each bucket, one to spare: none for the eight lengths
LIMITS = ("recompile_limit", "accumulated_recompile_limit")


@pytest.fixture
def varied(lab: Any) -> Any:
    """Each sample's prompt has a length of its own, and every other one is wide: two buckets."""
    for index in range(11):
        caption = lab.root / "dataset" / "training_images" / f"p{index}.txt"
        caption.write_text("paint the circle " + "very " * index + "red", encoding="utf-8")
        for folder in ("training_images", "control_images") if index % 2 else ():
            path = lab.root / "dataset" / folder / f"p{index}.png"
            with Image.open(path) as picture:
                wide = picture.resize((128, 32))
            wide.save(path)
    lab.scan()
    lab.cache(ASKS)
    return lab


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are made as for a compiler, then run as they are."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()
    counters.clear()


def limits() -> list[int]:
    return [getattr(torch._dynamo.config, name) for name in LIMITS]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"train.gradient_checkpointing": False},
        pytest.param(
            {
                "train.gradient_checkpointing": "selective",
                "train.cached_modulation": True,
                "model.quantize": "nf4",
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["every block", "no checkpointing", "selective, table, NF4"],
)
def test_a_compiled_fit_learns_the_same_and_is_compiled_a_few_times(
    varied: Any, traced: None, more: dict[str, Any]
) -> None:
    before, asks = limits(), {**ASKS, **more}
    shapes = {
        (tuple(held["target"].shape), len(held["prompt_embeds"]))
        for job in [varied.job(asks)]
        for held in (job.store.read(want.folder) for want in job.wants if want.split == "train")
    }
    assert len({size for size, _ in shapes}) == 2 and len({length for _, length in shapes}) == 8
    eager = varied.fit({**asks, "train.compile": False})
    assert eager.document["speed"]["compiled"] == 0
    compiled = varied.fit({**asks, "train.compile": True})
    assert 1 <= compiled.document["speed"]["compiled"] <= MOST
    assert not counters["graph_break"] and limits() == before
    one, two = varied.adapter(eager.path), varied.adapter(compiled.path)
    assert one.keys() == two.keys()
    for name, wished in one.items():
        assert float((two[name] - wished).norm() / wished.norm()) < (1e-3 if more else 1e-4), name


def test_the_limits_are_as_before_after_a_fault_too(
    lab: Any, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, before, seen = lab.launch({"train.compile": True}), limits(), list[list[int]]()

    def broken(*given: Any) -> Any:
        seen.append(limits())
        raise RuntimeError("stopped")

    monkeypatch.setattr(loop, "_step", broken)
    with pytest.raises(RuntimeError, match="stopped"):
        loop.fit(session, Progress(quiet=True))
    assert seen and seen[0] != before and limits() == before
