"""Copies beside the compute: what is asked of a device's streams and pools, and what where it has none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.device import GIB, Device
from runtime.memory.feed import Feed, host_memory

CPU = Device(type="cpu", name="x", total_gib=1.0, reason="")
XPU = Device(type="xpu", name="Arc", total_gib=16.0, reason="")


def test_a_feed_on_the_cpu_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what stands on copies is tested as copies, and no accelerator is asked: nothing of torch's answers."""
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace())
    feed, host = Feed(CPU), torch.arange(6)
    begun = feed.start(host)
    copied = feed.finish(begun)
    assert torch.equal(copied, host) and copied.data_ptr() != host.data_ptr() and begun.ready is None


class Order:
    """Streams and events that write down what is asked of them."""

    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name

    def __enter__(self) -> None:
        self.said.append(f"into {self.name}")

    def __exit__(self, *given: object) -> None:
        self.said.append(f"out of {self.name}")

    def wait_stream(self, other: "Order") -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.said.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"what {self.name} was asked"


def test_a_feed_copies_beside_the_compute_and_after_it_has_let_the_memory_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    compute = Order(said, "compute")
    monkeypatch.setattr(torch, "Stream", lambda kind: Order(said, f"{kind}'s side"))
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(current_stream=lambda: compute))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: pooled(said))
    monkeypatch.setattr(torch, "empty", lambda *given, **named: said.append("trial"))
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda host, device: (said.append("taken"), empty_like(host))[1])
    feed = Feed(XPU)
    assert said == ["into pool", "trial", "out of pool"]
    said.clear()
    begun = feed.start(torch.arange(3))
    assert feed.finish(begun).tolist() == [0, 1, 2]
    assert said == [
        "into pool",
        "taken",
        "out of pool",
        "xpu's side waits for compute",
        "into xpu's side",
        "out of xpu's side",
        "compute waits for what xpu's side was asked",
    ]


def pooled(said: list[str]) -> SimpleNamespace:
    return SimpleNamespace(MemPool=object, use_mem_pool=lambda pool: Order(said, "pool"))


def test_a_feed_without_streams_and_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> Any:
        raise NotImplementedError("not on this backend")

    monkeypatch.setattr(torch, "Stream", refuse)
    for backend in (SimpleNamespace(), SimpleNamespace(MemPool=refuse)):
        monkeypatch.setattr(torch, "get_device_module", lambda kind, found=backend: found)
        feed = Feed(XPU)
        monkeypatch.setattr(feed, "device", CPU)
        assert feed.finish(feed.start(torch.arange(3))).tolist() == [0, 1, 2]


def test_host_memory_is_pinned_for_a_device_and_plain_where_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, asked = torch.empty, []

    def pin(size: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory and size > 4:
            raise RuntimeError("out of pinned memory\nand a trace")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pin)
    told = [host_memory(size, on) for size, on in ((4, CPU), (4, XPU), (GIB // 2**10, XPU))]
    assert asked == [False, True, True, False]
    assert [(len(memory), memory.dtype) for memory, _ in told] == [
        (4, torch.uint8),
        (4, torch.uint8),
        (GIB // 2**10, torch.uint8),
    ]
    reason = "0.00 GiB of host memory could not be pinned, copies are slower: out of pinned memory"
    assert [note for _, note in told] == ["", "", reason]
