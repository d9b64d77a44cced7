"""Make the embedded tiny base: build the real classes, train the VAE, then the denoiser, write bf16, judge.

    python -m runtime.demo.make_base --tiktoken dashscope-2.0.2-py3-none-any.whl --out runtime/demo/base \\
        --device cuda --vae-steps 4686 --pairs 60000 --dit-steps 17689

The weights of the text encoder and the VAE are rounded to bf16 before the denoiser sees their outputs, so
that nothing shifts when the folder is read back. `--vae DIR` takes a trained VAE instead of training one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.demo import bars, dit, shapes, vae
from runtime.demo.components import build, encode, load, pixels
from runtime.demo.tokenizer import prune, read_ranks

CHUNK = 250  # pictures drawn by one call of a worker
DROPPED = 0.05  # share of the captions replaced by " ", so that guidance against " " means something
MAX_BYTES = 12 * 2**20

_reader: Any = None  # a worker's pipeline, without its VAE and denoiser


def start_worker(base: Path) -> None:
    import torch

    global _reader  # noqa: PLW0603 - a process pool's only way to hand its initializer's work to its tasks
    torch.set_num_threads(1)
    _reader = load(base, vae=None, transformer=None)


def draw_pictures(seed: int) -> NDArray[np.uint8]:
    """Pictures for the VAE: three sketches of any kind for every two scenes of the demo's own."""
    rng = np.random.default_rng(seed)
    return pixels(
        [shapes.draw(shapes.scene(rng)) if rng.random() < 0.4 else shapes.sketch(rng) for _ in range(CHUNK)]
    )


def draw_pairs(seed: int) -> dit.Pairs:
    rng = np.random.default_rng(seed)
    edits = [shapes.edit(rng) for _ in range(CHUNK)]
    controls = [shapes.draw(edit.control) for edit in edits]
    text, mask = encode(_reader, [" " if rng.random() < DROPPED else edit.prompt for edit in edits], controls)
    return dit.Pairs(
        controls=pixels(controls),
        targets=pixels([shapes.draw(edit.target) for edit in edits]),
        text=text.half().numpy(),
        mask=mask.numpy(),
    )


def round_to_bf16(module: Any) -> None:
    import torch

    module.to("cpu", torch.bfloat16).float()


def write(pipe: Any, out: Path) -> None:
    """Save every component with bf16 weights, and give the pipeline back in fp32.

    `load` leaves the video processor out; diffusers by itself, with torchvision, asks for its settings.
    """
    import torch

    for part in (pipe.vae, pipe.transformer, pipe.text_encoder):
        part.to("cpu", torch.bfloat16)
    pipe.save_pretrained(out)
    video = {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (out / "processor" / "video_preprocessor_config.json").write_text(
        json.dumps(video, indent=2) + "\n", encoding="utf-8", newline="\n"
    )
    for part in (pipe.vae, pipe.transformer, pipe.text_encoder):
        part.float()


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def readme(lines: list[str], args: argparse.Namespace, hardware: str, seconds: float, size: int) -> str:
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers", "numpy")
    )
    told = {
        name: value
        for name, value in vars(args).items()
        if name not in ("tiktoken", "sheet", "workers", "eager")
    }
    shown = [f"--{name.replace('_', '-')} {value}" for name, value in told.items() if value is not None]
    command = " ".join(["python -m runtime.demo.make_base --tiktoken WHEEL", *shown])
    return "\n".join(
        [
            "# Tiny Qwen-Image-Edit base",
            "",
            "The real classes (QwenImageTransformer2DModel, AutoencoderKLQwenImage, Qwen2Tokenizer,",
            "Qwen2_5_VLForConditionalGeneration, Qwen2VLProcessor) at a size for CPUs, pre-trained to",
            "recolour one shape or the background of a 64x64 picture. The text encoder is random and frozen.",
            "The tokenizer is pruned from Qwen's, out of the PyPI wheel dashscope 2.0.2 (Apache-2.0).",
            "Everything else was drawn and trained from scratch.",
            "",
            "Made by `runtime/demo/make_base.py`; `python -m runtime.demo.bars runtime/demo/base` judges it.",
            "",
            f"- command: `{command}`",
            f"- hardware: {hardware}; {seconds:.0f} s from start to end",
            f"- versions: Python {platform.python_version()}, {packages}",
            f"- size: {size} bytes of weights, tokenizer and configuration",
            *(f"- {line}" for line in lines),
            "",
        ]
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiktoken", type=Path, required=True, help="qwen.tiktoken, or the wheel that holds it"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="where training runs: cpu, cuda, xpu")
    parser.add_argument("--vae", type=Path, help="a base whose trained VAE is taken")
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--vae-steps", type=int, default=6000)
    parser.add_argument("--vae-batch", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=80_000)
    parser.add_argument("--dit-steps", type=int, default=10_000)
    parser.add_argument("--dit-batch", type=int, default=512)
    parser.add_argument(
        "--eager", action="store_true", help="on CUDA: don't record the training step as a graph"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of held-out edits here")
    return parser.parse_args(argv)


def hardware_name(device: str) -> str:
    import torch

    module = getattr(torch, device, None)
    return (
        str(module.get_device_name()) if module and hasattr(module, "get_device_name") else platform.machine()
    )


def main() -> int:
    import torch

    args = parse()
    torch.set_float32_matmul_precision("high")  # TF32 where there is any; the weights end as bf16
    torch.backends.cudnn.benchmark = True  # every batch has the same shape
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # a tokenizer that was read back is saved the same way each time
        prune(read_ranks(args.tiktoken)).save_pretrained(folder)
        from transformers import Qwen2Tokenizer

        pipe = build(Qwen2Tokenizer.from_pretrained(folder), seed=args.seed)
    write(pipe, args.out)

    common: dict[str, Any] = {"device": args.device, "seed": args.seed, "record": not args.eager}
    pool = {"max_workers": args.workers, "mp_context": multiprocessing.get_context("spawn")}
    with ProcessPoolExecutor(**pool, initializer=start_worker, initargs=(args.out,)) as workers:
        if args.vae:
            pipe.register_modules(vae=load(args.vae, transformer=None, text_encoder=None).vae)
        else:
            pictures = np.concatenate(list(workers.map(draw_pictures, range(args.pictures // CHUNK))))
            print(f"{len(pictures)} pictures at {time.monotonic() - started:.0f} s", flush=True)
            vae.train(pipe.vae, pictures, steps=args.vae_steps, batch=args.vae_batch, **common)
            round_to_bf16(pipe.vae)
            write(pipe, args.out)
        pairs = dit.Pairs.join(list(workers.map(draw_pairs, range(5000, 5000 + args.pairs // CHUNK))))
    print(
        f"{len(pairs.text)} pairs at {time.monotonic() - started:.0f} s; text {pairs.text.shape}", flush=True
    )
    dit.train(pipe.transformer, pipe.vae, pairs, steps=args.dit_steps, batch=args.dit_batch, **common)
    write(pipe, args.out)

    size = folder_bytes(args.out)
    lines, met = bars.report(load(args.out), sheet=args.sheet)
    print(*lines, f"{size} bytes of {MAX_BYTES}", sep="\n")
    text = readme(lines, args, hardware_name(args.device), time.monotonic() - started, size)
    (args.out / "README.md").write_text(text, encoding="utf-8", newline="\n")
    return 0 if met and size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
