"""Qwen2.5-VL as the edit families use it: the states of its base model, and no logits.

It comes onto its device tensor by tensor, plain or NF4: on a PC whose accelerator shares the host's memory, a copy
read first and moved then would be there twice. The output head (1 GiB in bf16) is never read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.families import kinds
from runtime.memory import loading
from runtime.memory.loading import Folder, Piece, Placement, Wanted

HEAD, UNREAD = "lm_head", "lm_head.weight"
# transformers 5 has a level more than the published files, and reads files of either kind
LEVELS = (("model.", "model.language_model."), ("visual.", "model.visual."))


@dataclass(frozen=True, slots=True)
class Published:
    """A folder whose tensors are called as the modules of the class are."""

    folder: Folder

    def pieces(self, wanted: Wanted) -> Iterator[Piece]:
        for piece in self.folder.pieces(lambda name: wanted(module_name(name))):
            yield replace(piece, name=module_name(piece.name))


def module_name(name: str) -> str:
    """By which the class knows a tensor of a file."""
    if not name.startswith(tuple(longer for _, longer in LEVELS)):
        for shorter, longer in LEVELS:
            if name.startswith(shorter):
                return longer + name.removeprefix(shorter)
    return name


def load(folder: Path, *, device: str, dtype: torch.dtype) -> nn.Module:
    """A frozen Qwen2_5_VLForConditionalGeneration without head; NF4 where the folder is, computing in `dtype`.

    Raises UserError for weights of another kind, and for a tensor that is absent or of another model.
    """
    kinds.expect(folder, "text encoder")
    placement = Placement(device=device, dtype=dtype)
    source = Published(Folder(folder))
    model = loading.fill(_empty(folder), folder, source, placement, left_out=lambda name: name == UNREAD)
    return model.to(device).eval()  # buffers, which are in no file


def _empty(folder: Path) -> nn.Module:
    from accelerate import init_empty_weights
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config: Any = Qwen2_5_VLConfig.from_pretrained(folder, local_files_only=True)
    with init_empty_weights():
        model: nn.Module = Qwen2_5_VLForConditionalGeneration(config)
    loading.replace(model, HEAD, nn.Identity())
    return model
