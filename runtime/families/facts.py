"""What is known of each model family without loading it. No torch, no diffusers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    name: str
    template_version: str
    """Raised when the prompt template changes, so that caches become stale."""
    latent_channels: int
    size_multiple: int
    """Pixels: both sides of every target and control are multiples of it."""
    vl_pixels: int
    """Area in pixels at which the published pipeline shows the text encoder a control."""
    dropped_tokens: int
    """Length of the template's beginning, whose embeddings are left out."""
    min_controls: int
    """0: the text encoder takes a prompt alone, in the template without pictures."""
    max_controls: int
    blocks: str
    """The denoiser's list of blocks, by attribute name."""
    time_embed: str
    """The module that embeds sigma."""
    modulations: tuple[tuple[str, str], ...]
    """An activation and the linear after it, functions of the embedded sigma alone; `*` is a block's number."""
    pixel_channels: int = 3

    def is_modulation(self, name: str) -> bool:
        """Whether a parameter or a module of that name is one of the modulations' linears."""
        return any(
            fnmatchcase(name, linear) or fnmatchcase(name, f"{linear}.*") for _, linear in self.modulations
        )

    def move_modulation(self, modules: Iterable[str]) -> list[str]:
        """Of the modules that are trained, those that would change what the modulations say at a sigma."""
        return [
            name for name in modules if self.is_modulation(name) or name.startswith(f"{self.time_embed}.")
        ]


QWEN_IMAGE_EDIT = Facts(
    name="qwen-image-edit",
    template_version="edit-2",
    latent_channels=16,
    size_multiple=16,
    vl_pixels=1024 * 1024,
    dropped_tokens=64,
    min_controls=0,
    max_controls=1,
    blocks="transformer_blocks",
    time_embed="time_text_embed",
    modulations=(
        ("transformer_blocks.*.img_mod.0", "transformer_blocks.*.img_mod.1"),
        ("transformer_blocks.*.txt_mod.0", "transformer_blocks.*.txt_mod.1"),
        ("norm_out.silu", "norm_out.linear"),
    ),
)

QWEN_IMAGE_EDIT_PLUS = replace(
    QWEN_IMAGE_EDIT,
    name="qwen-image-edit-plus",
    template_version="edit-plus-2",
    vl_pixels=384 * 384,
    max_controls=8,
)
