"""Peak and time of the VAE on one picture: diffusers' own, ours exact, folded and tiled; and how they differ.

    python benchmarks/vae.py [--sides 1024 2048] [--dtype bf16] [--repeats 5] [--device auto] [--tiny]

JSON lines. First the published shape with random weights: seconds (median), peak_gib over what is resident,
reserved_gib, whether the result is diffusers' bit for bit, and `difference`, its norm over the norm. Then the
embedded base's trained VAE on the photos of tests/photos, enlarged to a side: the same differences, the PSNR in dB of
each against the photo, and for tiles `seams`, the mean difference near their joints over that elsewhere.
--tiny: few channels and pixels on whatever device there is, to see that the script works.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measuring
import torch
from measuring import Line, Report
from PIL import Image
from torch import Tensor

from runtime import device as devices
from runtime.cache import encode
from runtime.demo.series import BASE
from runtime.device import Device
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.memory import vae as single_images

PHOTOS = Path(__file__).resolve().parents[1] / "tests" / "photos"
WAYS = ("stock", "exact", "folded", "tiled")
SHAPE: dict[str, Any] = {}
TINY: dict[str, Any] = {"base_dim": 8, "num_res_blocks": 1}
NEAR = 8  # pixels on each side of a joint
Run = Callable[[Any, Tensor], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", type=int, nargs="*", default=[1024, 2048], help="none: the photos alone")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--photo-side", type=int, default=768)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    wish = parser.parse_args()
    if wish.tiny:
        wish.sides, wish.repeats = [64], 1
    report, where, dtype = Report(), devices.pick(wish.device), devices.dtype_of(wish.dtype)
    report.tell(kind="machine", **measuring.describe(where), dtype=wish.dtype)
    for side in wish.sides:
        for way in WAYS:
            with report.trying(kind="random weights", way=way, side=side):
                vae = _random(TINY if wish.tiny else SHAPE, where, dtype)
                for line in compared(vae, way, side, where, wish.repeats):
                    report.tell(kind="random weights", way=way, side=side, **line)
    photos = sorted(path for path in PHOTOS.iterdir() if path.suffix in (".jpg", ".png"))
    for photo in photos[:1] if wish.tiny else photos:
        with report.trying(kind="photo", photo=photo.name):
            size = (
                (96, 272) if wish.tiny else (wish.photo_side, wish.photo_side)
            )  # tiny: two tiles side by side
            for line in on_photo(photo, size, where, dtype):
                report.tell(kind="photo", photo=photo.name, side=size[1], **line)
    return int(report.failed)


def _random(shape: dict[str, Any], where: Device, dtype: torch.dtype) -> Any:
    """The same weights each time, as torch makes them, drawn where they are used."""
    from diffusers import AutoencoderKLQwenImage

    torch.manual_seed(0)
    with torch.device(where.type):
        vae = AutoencoderKLQwenImage(**shape)
    # Past diffusers' own `to`, which warns of layers to be kept in fp32, of which this model has none.
    return torch.nn.Module.to(vae, dtype).requires_grad_(False).eval()


def stock_encode(vae: Any, pixels: Tensor) -> Tensor:
    return vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]  # type: ignore[no-any-return]


def stock_decode(vae: Any, latents: Tensor) -> Tensor:
    return vae.decode(latents[:, :, None], return_dict=False)[0][:, :, 0]  # type: ignore[no-any-return]


def arranged(vae: Any, way: str) -> tuple[Run, Run]:
    """`vae` changed to that way, and how it encodes and decodes."""
    if way == "stock":
        return stock_encode, stock_decode
    single_images.arrange(vae, way)  # type: ignore[arg-type]
    return single_images.encode, single_images.decode


@torch.no_grad()
def compared(vae: Any, way: str, side: int, where: Device, repeats: int) -> Iterator[Line]:
    """Both directions beside diffusers' own, which is run first, on the same weights."""
    draw = torch.Generator().manual_seed(side)
    pixels = (torch.rand(1, 3, side, side, generator=draw) * 2 - 1).to(where.type, vae.dtype)
    latents = torch.randn(1, 16, side // 8, side // 8, generator=draw).to(where.type, vae.dtype)
    wished = [stock_encode(vae, pixels).cpu(), stock_decode(vae, latents).cpu()]
    runs = arranged(vae, way)
    for what, run, given, own in zip(("encode", "decode"), runs, (pixels, latents), wished, strict=True):
        line = taken(run, vae, given, where, repeats)
        made = run(vae, given).cpu()
        yield {"what": what, **line, "bit_equal": torch.equal(made, own), "difference": apart(made, own)}


def taken(run: Run, vae: Any, given: Tensor, where: Device, repeats: int) -> Line:
    devices.free_cached(where)
    resident = devices.memory(where).alloc_gib
    devices.reset_peak(where)
    run(vae, given)  # the peak is that of the first, whose kernels may still be chosen
    peak = devices.memory(where).peak_gib - resident
    times = [measuring.timed(where, lambda: run(vae, given)) for _ in range(repeats)]
    reserved = measuring.reserved_peak_gib(where)
    return {"seconds": statistics.median(times), "peak_gib": peak, "reserved_gib": reserved}


def apart(made: Tensor, wished: Tensor) -> float:
    return float((made.float() - wished.float()).norm() / wished.float().norm())


@torch.no_grad()
def on_photo(photo: Path, size: tuple[int, int], where: Device, dtype: torch.dtype) -> Iterator[Line]:
    """Encoded and decoded by the trained VAE in each way, beside diffusers' own; both differences and the seams."""
    with Image.open(photo) as opened:
        picture = opened.convert("RGB").resize(size[::-1], Image.Resampling.LANCZOS)
    wished = encode.pixels(picture)[None]
    reference: tuple[Tensor, Tensor] | None = None
    for way in WAYS:
        vae = QwenImageEdit().load_vae(BASE, device=where.type, dtype=dtype)
        encodes, decodes = arranged(vae, way)
        latents = encodes(vae, wished.to(where.type, dtype))
        first = latents if reference is None else reference[0]
        decoded = decodes(vae, first).float().cpu()  # of the same latents each time
        reference = reference or (latents, decoded)
        same = torch.equal(latents, first)
        through = decoded if same else decodes(vae, latents).float().cpu()
        yield {
            "way": way,
            "encode_difference": apart(latents.cpu(), reference[0].cpu()),
            "decode_difference": apart(decoded, reference[1]),
            "psnr_db": psnr(through, wished),
            **({"seams": seams(decoded - reference[1], vae)} if way == "tiled" else {}),
        }


def psnr(made: Tensor, wished: Tensor) -> float:
    return float(10 * torch.log10(4 / (made - wished).square().mean().clamp_min(1e-12)))


def seams(difference: Tensor, vae: Any) -> float | None:
    """Mean size of [1, 3, H, W] near the joints over that elsewhere; None where all is one tile."""
    near = torch.zeros(difference.shape[2:], dtype=torch.bool)
    for axis, stride in ((0, vae.tile_sample_stride_height), (1, vae.tile_sample_stride_width)):
        for joint in range(int(stride), near.shape[axis], int(stride)):
            near.narrow(axis, joint - NEAR, min(2 * NEAR, near.shape[axis] - joint + NEAR)).fill_(True)
    size = difference.abs().mean(dim=(0, 1))
    with contextlib.suppress(ZeroDivisionError):
        return float(size[near].mean()) / float(size[~near].mean()) if bool(near.any()) else None
    return None


if __name__ == "__main__":
    raise SystemExit(main())
