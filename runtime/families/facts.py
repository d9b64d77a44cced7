"""What is known of each model family without loading it. No torch, no diffusers."""

from dataclasses import dataclass, replace


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
    pixel_channels: int = 3


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
)

QWEN_IMAGE_EDIT_PLUS = replace(
    QWEN_IMAGE_EDIT,
    name="qwen-image-edit-plus",
    template_version="edit-plus-2",
    vl_pixels=384 * 384,
    max_controls=8,
)
