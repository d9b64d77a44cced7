"""Bytes of the tensors that a computation holds at once, counted as they come and go. For the CPU."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what operations give back; what one of them takes and returns inside of itself stays unseen.

    `known`: tensors that are there before and are not counted.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or key in self.known:
            return

        def gone(_: Any) -> None:
            if self._seen.pop(key, None) is not None:
                self.now -= size

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
