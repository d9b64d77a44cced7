"""benchmarks/loader.py at tiny size: a cache that the product reads, and a line for each source."""

import json
from pathlib import Path
from typing import Any

import loader
import pytest
import torch

from runtime.training.batches import Batches


def test_it_tells_each_source(call: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call(loader.main, "--tiny", "--out", str(tmp_path))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["busy_s"], line["source"]) for line in lines] == [
        (busy, source) for busy in (0.01, 0.0) for source in ("disk", "pages", "memory")
    ]
    for line in lines:
        assert line["step_s"] > line["waited_s"] > 0 and line["step_s"] > line["busy_s"]
        assert (line["over_memory"] == 0) == (line["source"] == "memory")
        assert (line["samples"], line["steps"], line["workers"], line["dtype"]) == (12, 8, 1, "bf16")


def test_every_entry_has_numbers_of_its_own_and_is_kept_for_the_next_call(tmp_path: Path) -> None:
    store = loader.make(tmp_path, 3, torch.bfloat16, tiny=True)
    entries = store.manifest()["entries"]
    held = [store.read(entry["folder"]) for entry in entries]
    assert len({tuple(entry["target"].flatten().tolist()) for entry in held}) == 3
    assert {tensor.dtype for entry in held for tensor in entry.values()} == {torch.bfloat16}
    before = store.manifest_path.stat().st_mtime_ns
    loader.make(tmp_path, 3, torch.bfloat16, tiny=True)
    assert store.manifest_path.stat().st_mtime_ns == before


def test_from_memory_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = loader.make(tmp_path, 6, torch.bfloat16, tiny=True)
    read: list[str] = []
    taken = loader.take

    def spy(batches: Batches, *given: Any) -> Any:
        monkeypatch.setattr(type(store), "read", lambda self, folder: read.append(folder))
        return taken(batches, *given)

    monkeypatch.setattr(loader, "take", spy)
    monkeypatch.setattr(loader, "SOURCES", ("memory",))
    assert [line["steps"] for line in loader.compare(store, 1, 0.0, 5, 1)] == [5] and read == []


def test_where_the_time_goes() -> None:
    """A loop that is late waits; one that is not, does not."""

    class Slow(Batches):
        def __init__(self) -> None:
            pass

        def windows(self, first_step: int, steps: int, accumulation: int) -> Any:
            for _ in range(steps):
                loader.time.sleep(0.02)
                yield [micro]

    micro: Any = loader.argparse.Namespace(
        conditioning=loader.argparse.Namespace(embeds=torch.zeros(1, 4, 64))
    )
    found = loader.take(Slow(), 3, 0.03)
    assert min(found.waits) >= 0.02 and min(found.steps) >= 0.05
    assert all(step > wait + 0.029 for step, wait in zip(found.steps, found.waits, strict=True))
