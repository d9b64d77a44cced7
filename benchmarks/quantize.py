"""What `finetune quantize` takes for layers of the published shape: throughput, and memory over what it starts with.

    python benchmarks/quantize.py [--blocks 1] [--workers 1 2] [--device cpu] [--text-encoder] [--tiny]

Writes blocks of the denoiser with random weights to a temporary folder (0.63 GiB each; --text-encoder: one layer of
the language model between its embedding and its head, 2.5 GiB), and makes NF4 of them once for each number of
workers, in a process each. One JSON object a line:

    source_gib, seconds, gib_per_s
    peak_gib       the most that the process had resident, over what it had after its imports
    largest_gib    the largest tensor of the source
    sha256         of the made shard: the same for any number of workers

--tiny: small shapes, whose figures say only that the script works.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK = {
    **{f"attn.{name}": (3072, 3072) for name in ("to_q", "to_k", "to_v", "to_out.0")},
    **{f"attn.add_{name}_proj": (3072, 3072) for name in "qkv"},
    "attn.to_add_out": (3072, 3072),
    "img_mod.1": (18432, 3072),
    "txt_mod.1": (18432, 3072),
    "img_mlp.net.0.proj": (12288, 3072),
    "img_mlp.net.2": (3072, 12288),
    "txt_mlp.net.0.proj": (12288, 3072),
    "txt_mlp.net.2": (3072, 12288),
}
LANGUAGE = {
    "model.embed_tokens": (152064, 3584),
    "model.layers.0.self_attn.q_proj": (3584, 3584),
    "model.layers.0.self_attn.k_proj": (512, 3584),
    "model.layers.0.self_attn.v_proj": (512, 3584),
    "model.layers.0.self_attn.o_proj": (3584, 3584),
    "model.layers.0.mlp.gate_proj": (18944, 3584),
    "model.layers.0.mlp.up_proj": (18944, 3584),
    "model.layers.0.mlp.down_proj": (3584, 18944),
    "lm_head": (152064, 3584),
}
SHRUNK = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--text-encoder", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("SOURCE", "TARGET"), help=argparse.SUPPRESS)
    wish = parser.parse_args()
    if wish.child:
        source, target = map(Path, wish.child)
        print(json.dumps(measured(source, target, wish.workers[0], wish.device)), flush=True)
        return
    with tempfile.TemporaryDirectory() as place:
        name = "text_encoder" if wish.text_encoder else "transformer"
        source = Path(place) / name
        write(source, shapes(wish.text_encoder, wish.blocks, wish.tiny))
        for number, count in enumerate(wish.workers):
            child = [str(source), str(Path(place) / f"made-{number}" / name)]
            line = [sys.executable, __file__, "--workers", str(count), "--device", wish.device, "--child"]
            subprocess.run([*line, *child], check=True)


def shapes(text_encoder: bool, blocks: int, tiny: bool) -> dict[str, tuple[int, int]]:
    found = LANGUAGE
    if not text_encoder:
        numbers = range(blocks)
        found = {f"transformer_blocks.{n}.{name}": shape for n in numbers for name, shape in BLOCK.items()}
    shrunk = SHRUNK if tiny else 1
    return {f"{name}.weight": (rows // shrunk, columns // shrunk) for name, (rows, columns) in found.items()}


def write(folder: Path, wanted: dict[str, tuple[int, int]]) -> None:
    """One shard of N(0, 0.02) in bf16, a tensor at a time."""
    import torch

    from runtime.shards import Writer

    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    writer = Writer(folder / "model.safetensors", {name: ("BF16", it) for name, it in wanted.items()}, [])
    for name, shape in wanted.items():
        writer.put(name, (torch.randn(shape, generator=generator) * 0.02).bfloat16())
    writer.close()


def measured(source: Path, target: Path, workers: int, device: str) -> dict[str, Any]:
    import torch

    from runtime import device as devices
    from runtime import shards
    from runtime.files import GIB
    from runtime.progress import Progress
    from runtime.quantize import nf4, streaming

    name = source.name
    nf4.quantize(torch.zeros(64, 64), device)  # the libraries are loaded
    before = devices.rss_gib()
    rule = nf4.rule_for(name, "transformer_blocks")
    job = streaming.Job(
        component=name, source=source, target=target, rule=rule, device=device, workers=workers
    )
    started = time.perf_counter()
    record = streaming.quantize(job, Progress(quiet=True))
    seconds = time.perf_counter() - started
    sizes = [entry.size for path in shards.find(source) for entry in shards.read_header(path).values()]
    return {
        "component": name,
        "device": device,
        "workers": workers,
        "source_gib": round(sum(sizes) / GIB, 3),
        "seconds": round(seconds, 2),
        "gib_per_s": round(sum(sizes) / GIB / seconds, 4),
        "peak_gib": round(most_resident_gib() - before, 3),
        "largest_gib": round(max(sizes) / GIB, 3),
        "mean_error": round(record["mean_error"], 4),
        "sha256": record["files"]["model.safetensors"]["sha256"],
    }


def most_resident_gib() -> float:
    """Of this process, ever. getrusage would count what its parent had, too."""
    from runtime.files import GIB

    if sys.platform == "win32":
        import psutil

        return float(psutil.Process().memory_info().peak_wset / GIB)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 / GIB for line in status.splitlines() if "VmHWM" in line)


if __name__ == "__main__":
    main()
