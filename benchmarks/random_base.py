"""Write a base whose denoiser has the published shape (20.4 billion parameters) and random weights.

    python benchmarks/random_base.py OUT [--layers N] [--device cuda]

Random weights cost the memory and the time of trained ones, so a fit on them is a true measurement of both, and of
nothing else. The VAE is the embedded base's; the text encoder has the published width and two layers. With 60 layers
OUT takes 39 GiB; nothing is downloaded.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.demo.series import BASE

SHARD_BYTES = 4.7e9
WIDTH, HEADS, KEY_HEADS = 3584, 28, 4  # Qwen2.5-VL-7B


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--device", default="cpu", help="where the numbers are drawn")
    wish = parser.parse_args()
    shutil.copytree(BASE, wish.out, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(BASE / "vae" / "diffusion_pytorch_model.safetensors", wish.out / "vae")
    count = write_denoiser(wish.out / "transformer", wish.layers, wish.device)
    write_text_encoder(wish.out / "text_encoder")
    print(f"{wish.out}: denoiser of {count:,} parameters")


def write_denoiser(folder: Path, layers: int, device: str) -> int:
    """Shards in bf16 with their index; returns the number of parameters."""
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel

    with init_empty_weights():
        model = QwenImageTransformer2DModel(num_layers=layers)
    model.save_config(folder)
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    count = size = 0
    for name, empty in model.state_dict().items():
        shard[name] = _drawn(name, empty, generator).cpu()
        count, size = count + empty.numel(), size + 2 * empty.numel()
        if size > SHARD_BYTES:
            _write(folder, shard, index)
            shard, size = {}, 0
    _write(folder, shard, index)
    document = {"metadata": {"total_size": 2 * count}, "weight_map": index}
    text = json.dumps(document)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(
        text, encoding="utf-8", newline="\n"
    )
    return count


def _drawn(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """N(0, 0.02); scales of norms around 1, or nothing would come through 60 layers."""
    made = torch.randn(like.shape, generator=generator, device=generator.device, dtype=torch.bfloat16) * 0.02
    return made + 1 if "norm" in name and like.dim() == 1 and name.endswith("weight") else made


def _write(folder: Path, shard: dict[str, Tensor], index: dict[str, str]) -> None:
    if shard:
        name = f"diffusion_pytorch_model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))


def write_text_encoder(folder: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    document: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = document["text_config"]
    for name in ("head_dim", "layer_types", "rope_scaling"):
        text.pop(name, None)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text.update(hidden_size=WIDTH, intermediate_size=4096, num_hidden_layers=2, rope_parameters=rope)
    text.update(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
    document["vision_config"]["out_hidden_size"] = WIDTH
    kept = {k: v for k, v in document.items() if k not in ("architectures", "model_type", "dtype")}
    kept.pop("transformers_version", None)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**kept))
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
