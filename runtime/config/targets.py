"""What `model.lora.target_modules` means: names, patterns or a preset -> linears of a denoiser. No torch.

The trainer and the memory plan both ask here, so what is counted is what is trained.
"""

import difflib
import fnmatch
from collections.abc import Collection, Iterable

from runtime.errors import ConfigError

PRESETS = {
    "attention": ("transformer_blocks.*.attn.*",),
    "attention+mlp": ("transformer_blocks.*.attn.*", "transformer_blocks.*_mlp.*"),
    "all-linear": ("transformer_blocks.*",),
}
"""As patterns over blocks: attention of both streams, their MLPs too, and the modulations too."""

Targets = str | Collection[str]
"""The name of a preset; or module names, as such or the end of one, and shell patterns of whole names."""


def is_pattern(target: str) -> bool:
    return any(mark in target for mark in "*?[")


def matching(names: Collection[str], targets: Targets) -> list[str]:
    """Those of `names`, dotted names of all linears, that `targets` means, in their order.

    Raises ConfigError for a target that means none of them.
    """
    wanted = PRESETS[targets] if isinstance(targets, str) else targets
    chosen: set[str] = set()
    for target in wanted:
        found = {name for name in names if _means(target, name)}
        if not found:
            raise _unknown(target, names)
        chosen |= found
    return [name for name in names if name in chosen]


def _means(target: str, name: str) -> bool:
    if is_pattern(target):
        return fnmatch.fnmatchcase(name, target)
    return name == target or name.endswith("." + target)


def _unknown(target: str, names: Iterable[str]) -> ConfigError:
    """The nearest names first; those of one block stand for all blocks."""
    known = sorted({name.rpartition("transformer_blocks.0.")[2] for name in names if "blocks.0." in name})
    leaves = {leaf: name for name in known for leaf in (name.removeprefix("attn."), name)}
    wished = target.rpartition("*.")[2] or target
    close = dict.fromkeys(leaves[leaf] for leaf in difflib.get_close_matches(wished, leaves, n=3))
    nearest = f"the nearest are {', '.join(close)}; " if close else ""
    kind = "matches" if is_pattern(target) else "is called"
    return ConfigError(
        f"model.lora.target_modules: no linear of the denoiser {kind} {target}; {nearest}"
        f"a block has {', '.join(known)}; presets are {', '.join(PRESETS)}",
        remedy="correct model.lora.target_modules in config.yaml",
    )
