"""The VAE of single images: as it is, with its convolutions folded to 2D, or in tiles.

AutoencoderKLQwenImage is one of video: a causal convolution pads two frames of zeros before the first, and
`encode` and `decode` keep a copy of each convolution's input for the frames that follow. A single image has
none: encoder and decoder are called here without those copies, bit for bit the same and half the peak (2048 px
decoded in bf16 on one H200: 8.5 GiB, with the copies 16.8). For such an image the earlier taps of a kernel
only ever meet zeros, so the last one as a 2D convolution is the same function: equal to rounding, a third of the
peak (5.4 GiB) and 1.6 times as fast. Tiles take 0.6 GiB and are five times slower; no tile sees the whole picture, and
with the embedded base's VAE photos of 768 px differ by 1.5 to 3.3 %, at joints no more than elsewhere.
"""

from typing import Any

import torch
from torch import Tensor, nn

from runtime.config.model import VaeMode


class FrameConv(nn.Conv2d):
    """The last tap in time of a causal 3D convolution, for [B, C, 1, H, W]."""

    def __init__(self, source: nn.Conv3d) -> None:
        _, kernel, width = source.kernel_size
        _, down, right = source.stride
        padding: Any = source._padding  # of diffusers' own class, in F.pad's order: width, height, frames
        left, _, top, _, _, _ = padding
        super().__init__(
            source.in_channels,
            source.out_channels,
            (kernel, width),
            stride=(down, right),
            padding=(top, left),
            bias=source.bias is not None,
            device="meta",
        )
        # A copy, or the view would keep the taps that nothing uses.
        self.weight = nn.Parameter(source.weight.detach()[:, :, -1].clone(), requires_grad=False)
        self.bias = source.bias

    def forward(self, frame: Tensor) -> Tensor:
        """Raises ValueError for more than one frame."""
        if frame.shape[2] != 1:
            raise ValueError(f"{frame.shape[2]} frames, expected one: this VAE is folded for single images")
        return super().forward(frame[:, :, 0])[:, :, None]


def arrange(vae: Any, mode: VaeMode) -> Any:
    """`vae`, changed in place to encode and decode as `mode` says."""
    if mode == "folded":
        fold(vae)
    elif mode == "tiled":
        vae.enable_tiling()
    return vae


def fold(vae: nn.Module) -> None:
    """Each causal convolution of `vae` becomes that of one frame; those between frames go."""
    for parent in list(vae.modules()):
        for name, child in list(parent.named_children()):
            if name == "time_conv":
                delattr(parent, name)  # never reached by the first frame
            elif isinstance(child, nn.Conv3d):
                setattr(parent, name, FrameConv(child))


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Mean of the latents [B, C, H/8, W/8], not normalised, of pixels [B, 3, H, W]; dtype and device of the VAE.

    Batches give what diffusers' own encode gives for the same batch, bit for bit.
    """
    frames, tiled = pixels[:, :, None], _tiled(vae, pixels.shape[2:], 1)
    moments = vae.tiled_encode(frames) if tiled else vae.quant_conv(vae.encoder(frames))
    return moments.chunk(2, dim=1)[0][:, :, 0]  # type: ignore[no-any-return]


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Pixels [B, 3, 8h, 8w] in -1..1 of latents [B, C, h, w] that are not normalised."""
    frames = latents[:, :, None]
    if _tiled(vae, latents.shape[2:], vae.spatial_compression_ratio):
        made = vae.tiled_decode(frames, return_dict=False)[0]
    else:
        made = vae.decoder(vae.post_quant_conv(frames))
    return torch.clamp(made, min=-1.0, max=1.0)[:, :, 0]


def _tiled(vae: Any, size: torch.Size, scale: int) -> bool:
    """Whether the picture is larger than a tile, by diffusers' own rule."""
    height, width = (side * scale for side in size)
    larger = height > vae.tile_sample_min_height or width > vae.tile_sample_min_width
    return bool(vae.use_tiling and larger)
