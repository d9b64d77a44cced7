"""Prompts first, then pictures: one encoder in memory at a time, samples read ahead, and what it took."""

import gc
import re
import shutil
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from runtime import device
from runtime.cache import build, encode, passes, roundtrip
from runtime.cache.encode import Encoded
from runtime.errors import DataError
from runtime.progress import Progress


class Watched:
    """The encoders that were loaded, without keeping them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.parts: list[tuple[str, Any]] = []
        self.alive_at_load: list[list[str]] = []
        self.alive_when_freed: list[list[str]] = []
        loads, frees = encode.load, device.free_cached

        def load(*given: Any, **named: Any) -> Any:
            self.alive_at_load.append(self.alive())
            encoders = loads(*given, **named)
            for name in encode.loaded(encoders):
                self.seen.append(name)
                modules = getattr(encoders.pipeline, name).modules()
                self.parts.extend((name, weakref.ref(module)) for module in modules)
            return encoders

        def free_cached(*given: Any) -> None:
            frees(*given)
            self.alive_when_freed.append(self.alive())

        monkeypatch.setattr(encode, "load", load)
        monkeypatch.setattr(device, "free_cached", free_cached)

    def alive(self) -> list[str]:
        gc.collect()
        return sorted({name for name, module in self.parts if module() is not None})


def test_one_encoder_is_in_memory_at_a_time_and_none_afterwards(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(lab.root / "cache")
    watched = Watched(monkeypatch)
    lab.cache()
    assert watched.seen == ["text_encoder", "vae"]
    assert watched.alive_at_load == [[], []]
    assert watched.alive_when_freed == [[], []], "what is freed too early stays in the allocator's hands"
    assert watched.alive() == []


def test_evidence_alone_loads_them_in_turn_too(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.workspace.begin_evidence(roundtrip.NAME, "test")
    watched = Watched(monkeypatch)
    summary = lab.cache()
    assert (summary.built, summary.prompts, summary.seconds) == (0, 0, {})
    assert watched.alive_at_load == watched.alive_when_freed == [[], []]
    assert lab.workspace.evidence(roundtrip.NAME) is not None


def test_what_it_did_and_took_is_said(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"data.processor.target_size": [32, 32], "data.caption_dropout_rate": 0.1}
    started = time.monotonic()
    summary = build.build(lab.job(changes), Progress())
    took = time.monotonic() - started
    assert (summary.prompts, summary.pictures) == (11 + 8, 22)
    stages = [
        "load text_encoder",
        "read",
        "encode prompts",
        "write",
        "evidence",
        "load vae",
        "encode pictures",
    ]
    assert list(summary.seconds) == stages
    assert all(seconds > 0 for seconds in summary.seconds.values())
    assert sum(summary.seconds.values()) <= took
    assert summary.peak_gib == {}  # a CPU's allocator does not tell
    said = capsys.readouterr().err
    rate = 22 / summary.seconds["encode pictures"]
    assert f"encoded 19 prompts and 22 pictures ({rate:.1f} pictures/s): load text_encoder " in said
    assert re.search(r"evidence \d+\.\d s, load vae \d+\.\d s, encode pictures \d+\.\d s\n", said)


def test_samples_are_read_by_threads_ahead_of_the_encoder(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, and no more of them than the chunks that may lie ready."""
    job, begun, names = lab.job(), [], set()
    original = encode.read

    def read(config: Any, want: Any, *parts: Any) -> Any:
        begun.append(want.id)
        names.add(threading.current_thread().name.partition("_")[0])
        return original(config, want, *parts)

    monkeypatch.setattr(encode, "read", read)
    wished = [original(job.config, want, ("vae",)) for want in job.wants]
    ahead = passes._read_ahead(job, job.wants, ("vae",), 2)
    for done, at in enumerate(range(0, len(job.wants), 2), 1):
        reads = next(ahead)
        assert len(begun) <= 2 * (done + passes.CHUNKS_AHEAD)
        for made, want in zip(reads, wished[at : at + 2], strict=True):
            assert made.pixels.keys() == want.pixels.keys() and made.asks == {}
            assert all(torch.equal(made.pixels[name], want.pixels[name]) for name in want.pixels)
    assert next(ahead, None) is None
    assert names == {"cache-read"} and sorted(begun) == sorted(want.id for want in job.wants)


@pytest.mark.parametrize("ends", [False, True])
def test_a_picture_that_is_damaged_ends_the_phase_and_its_threads(lab: Any, ends: bool) -> None:
    """The samples before it are kept, as parts or as entries."""
    job = lab.job({"data.processor.target_size": [32, 32]})
    path = lab.root / "dataset" / ("training_images" if ends else "control_images") / "p3.png"
    path.write_bytes(path.read_bytes()[:40])
    before = threading.active_count()
    with pytest.raises(DataError, match=r"p3\.png can't be read"):
        build.build(job, Progress(quiet=True))
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
    at = sorted(job.wants, key=lambda want: str(want.document["sizes"])).index(_of(job, "p3"))
    kept = [job.store.has_part(want) or not job.store.fault(want) for want in job.wants]
    assert sum(kept) == (len(job.wants) if ends else at)


def _of(job: build.Job, name: str) -> Any:
    return next(want for want in job.wants if want.id == name)


def test_parts_are_used_by_what_they_are_of_and_gone_in_the_end(lab: Any) -> None:
    """One whose key is another's, one that is torn, one that nothing asks for, and a file of somebody else."""
    changes = {"data.processor.target_size": [32, 32]}
    job = lab.job(changes)
    odd = torch.full_like(lab.job().store.read(lab.job().wants[0].folder)["prompt_embeds"], 7.0)
    good, torn, strange = job.wants[:3]
    for want in (good, torn, strange):
        job.store.write_part(want, Encoded(tensors={"prompt_embeds": odd}, notes=["prompt_embeds: so"]))
    parts = job.store.root / ".parts"
    path = parts / f"{torn.folder}.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    shutil.copyfile(parts / f"{good.folder}.safetensors", parts / f"{strange.folder}.safetensors")
    (parts / f"{'0' * 16}.safetensors").write_bytes(b"of settings that were left")
    (parts / "notes.txt").write_text("mine", encoding="utf-8")
    assert [job.store.has_part(want) for want in (good, torn, strange)] == [True, False, False]
    summary = build.build(job, Progress(quiet=True))
    assert (summary.built, summary.prompts) == (11, 10)
    found = job.store.read(good.folder)
    assert torch.equal(found["prompt_embeds"], odd) and found["target"].shape == (16, 4, 4)
    assert summary.notes == [f"{good.id}: prompt_embeds: so"]
    assert not torch.equal(job.store.read(strange.folder)["prompt_embeds"], odd)
    assert [path.name for path in parts.iterdir()] == ["notes.txt"]


def test_a_wrong_part_is_told_by_the_evidence(lab: Any) -> None:
    """Embeddings that are made again for it come of the encoder, not of the parts."""
    job = lab.job({"data.processor.target_size": [32, 32]})
    first = roundtrip.chosen(job)[0]
    shape = lab.job().store.read(lab.job().wants[0].folder)["prompt_embeds"].shape
    job.store.write_part(first, Encoded(tensors={"prompt_embeds": torch.zeros(shape)}))
    build.build(job, Progress(quiet=True))
    samples = lab.workspace.evidence(roundtrip.NAME)["samples"]
    worst = {sample["id"]: sample["embeds_error"] for sample in samples}
    assert worst.pop(first.id) > roundtrip.TOLERANCE and max(worst.values()) < 1e-5
