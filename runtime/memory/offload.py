"""Frozen blocks that live in host memory and are copied to the device ahead of use.

Each streamed block has one buffer in host memory, pinned where the device can read such memory by itself, and its
frozen tensors are views of it under their usual names. Before the block runs, the buffer is copied beside the
compute, and the block gets new parameters over the copy; after it has run they go, and the one before the copy
needs it again is whatever autograd has saved. So nothing that the backward pass reads is ever overwritten: with
activation checkpointing a copy ends with the block's forward and, made again, with its backward; without, each
copy lives until the backward pass, which is right and saves nothing.

On the device at once, beside the resident blocks: the copy in use and the one that will be asked for next
(`held`). What comes next is learned from the order of calls, by whether gradients are kept and whether a backward
pass runs: forward, backward, groups that are recomputed forward again, and sampling each have their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from runtime.device import Device, trim_heap
from runtime.memory import hosting, spans
from runtime.memory.feed import Copy, Feed, host_memory
from runtime.memory.hosting import Item
from runtime.memory.spans import picked as picked
from runtime.memory.spans import runs as runs
from runtime.memory.spans import together as together

PLAIN, KEEPING, BACKWARD = range(3)


# ---- which blocks, and what that costs: pure


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the streamed blocks take, in bytes; `device` at the peak of a step, `idle` between steps."""

    device: int
    idle: int
    host: int


def held(block_bytes: int, count: int, at_once: int = 1) -> Held:
    """Of `count` streamed blocks of `block_bytes`, where so many of them are recomputed at once (`together`).

    One copy more than are in use at once, for the next; a single block is its own next.
    """
    ahead = 1 if count > 1 else 0
    host = spans.host_bytes([block_bytes] * count)
    return Held(
        device=(min(count, at_once) + ahead) * block_bytes, idle=min(count, 1) * block_bytes, host=host
    )


# ---- the blocks together


@dataclass(slots=True, kw_only=True)
class Block:
    module: nn.Module
    buffer: Tensor
    """uint8, in host memory."""
    items: list[Item]

    def put(self, buffer: Tensor) -> None:
        for item in self.items:
            item.put(buffer)

    def rest(self) -> None:
        for item in self.items:
            item.rest()


Call = tuple[int, int | None, int]
"""What runs (PLAIN, KEEPING or BACKWARD), the streamed block before, the streamed block."""


class Streamed:
    """Streamed blocks in the order of their depth; the hooks of the blocks keep it alive."""

    def __init__(self, blocks: Sequence[Block], feed: Feed, note: str) -> None:
        self.blocks = blocks
        self.feed = feed
        self.note = note
        """Where host memory is not pinned: why, copies then wait for the compute. Else empty."""
        self.copied_bytes = 0
        """To the device, so far."""
        self._ahead: dict[int, Copy] = {}
        self._open: int | None = None
        self._call: Call | None = None
        self._next: dict[Call, int] = {}
        self._hooks = [hook for index in range(len(blocks)) for hook in self._install(index)]

    @property
    def host_bytes(self) -> int:
        return sum(block.buffer.numel() for block in self.blocks)

    def idle(self) -> None:
        """Let go of what was copied ahead; the block that is asked for next will wait for its copy."""
        for copied in self._ahead.values():
            self.feed.finish(copied)  # or its memory could become something else's while it is still written
        self._ahead.clear()

    def close(self) -> None:
        """Make the blocks resident again; nothing is streamed any more."""
        self._shut()
        self.idle()
        for hook in self._hooks:
            hook.remove()
        for block in self.blocks:
            block.put(block.buffer.to(self.feed.device.type, copy=True))
            for item in block.items:
                item.uninstall()

    def _install(self, index: int) -> list[Any]:
        block = self.blocks[index]
        for item in block.items:
            item.install()
        return [
            block.module.register_forward_pre_hook(lambda *given: self._enter(index)),
            # always: recomputing ends by an exception once all that was saved is there again
            block.module.register_forward_hook(lambda *given: self._shut(), always_call=True),
        ]

    def _enter(self, index: int) -> None:
        # Selective checkpointing counts every operation between its forward and its recomputing; these are not the
        # block's, and another number of them each time.
        kind = _kind()
        with torch.no_grad(), _disable_current_modes():
            self._bring(kind, index)

    def _bring(self, kind: int, index: int) -> None:
        self._shut()  # what an interrupt left open
        if self._call is not None:
            self._next[self._call] = index
        self._call = (kind, None if self._call is None else self._call[2], index)
        copied = self._ahead.pop(index, None)
        self.idle()  # a wrong guess
        buffer = self.feed.finish(copied or self._copy(self.blocks[index]))
        self.blocks[index].put(buffer)
        self._open = index
        upcoming = self._next.get(self._call, self._guess(kind, index))
        ahead = Copy(tensor=buffer) if upcoming == index else self._copy(self.blocks[upcoming])
        self._ahead[upcoming] = ahead

    def _shut(self) -> None:
        if self._open is not None:
            self.blocks[self._open].rest()
            self._open = None

    def _copy(self, block: Block) -> Copy:
        self.copied_bytes += block.buffer.numel()
        return self.feed.start(block.buffer)

    def _guess(self, kind: int, index: int) -> int:
        """Of what comes next, as long as it was not seen yet: on, and back again where gradients are kept."""
        last = len(self.blocks) - 1
        if kind == BACKWARD:
            return max(index - 1, 0)
        if index < last:
            return index + 1
        return last if kind == KEEPING else 0


def _kind() -> int:
    # The one way to know that a block runs inside of a backward pass, to be recomputed; torch's own
    # checkpointing asks it too.
    if torch._C._current_graph_task_id() != -1:
        return BACKWARD
    return KEEPING if torch.is_grad_enabled() else PLAIN


@torch.no_grad()
def stream(blocks: Sequence[nn.Module], count: int, where: Device) -> Streamed:
    """Keep the frozen tensors of `count` of `blocks` in host memory from now on; they may lie anywhere.

    Call it when the adapter is in and before its optimizer is made: what is trained, and buffers, come to the
    device. Names of parameters stay; those of a block that is not in use are on the cpu. Host memory holds those of
    one allocation twice while they move (`spans.runs`), at most `spans.LARGEST` bytes.
    """
    chosen = [blocks[index] for index in picked(len(blocks), count)]
    sizes = [hosting.frozen_bytes(block) for block in chosen]
    moved: list[Block] = []
    notes: list[str] = []
    for run in runs(sizes):
        first = len(moved)
        memory, note = host_memory(sum(sizes[first : first + run]), where)
        notes.append(note)
        for module, buffer in zip(
            chosen[first : first + run], torch.split(memory, sizes[first : first + run]), strict=True
        ):
            _bring_the_rest(module, where)
            moved.append(Block(module=module, buffer=buffer, items=hosting.move(module, buffer)))
        trim_heap()  # of where they came from
    return Streamed(moved, Feed(where), next(filter(None, notes), ""))


def _bring_the_rest(block: nn.Module, where: Device) -> None:
    """What is trained, and buffers: an adapter on a block in host memory begins its life there."""
    for module in block.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.data = parameter.data.to(where.type)
        for leaf, buffer in module.named_buffers(recurse=False):
            module._buffers[leaf] = buffer.to(where.type)
