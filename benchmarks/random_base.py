"""Write a base whose denoiser has the published shape (20.4 billion parameters) and random weights.

    python benchmarks/random_base.py OUT [--layers N] [--encoders small|published] [--device cuda]

Random weights cost the memory and the time of trained ones, so a fit on them is a true measurement of both, and of
nothing else. `small`: the VAE is the embedded base's, the text encoder has the published width and two layers.
`published`: both have the published shape, 8.3 billion and 127 million parameters; `--text-encoder-layers` for fewer.
The VAE's weights are not random: in either shape it computes what the embedded base's trained one does, for a gate
looks at what it makes of pictures. The denoiser's last bias is wide: there has to be something that ten steps of a LoRA
can unlearn at every sigma, for other gates look at that.
OUT takes 39 GiB with 60 layers, and 15.7 more with published encoders; nothing is downloaded. Numbers are drawn on
the device, and files are written by threads meanwhile.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from padded_vae import padded
from safetensors.torch import save_file
from torch import Tensor

from runtime.demo.series import BASE

SHARD_BYTES = 4.7e9
WRITERS = 3  # shards in host memory at once, beside the one that is drawn
WIDTH, HEADS, KEY_HEADS = 3584, 28, 4  # Qwen2.5-VL-7B
SMALL: dict[str, Any] = {"intermediate_size": 4096, "num_hidden_layers": 2}
PUBLISHED: dict[str, Any] = {
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
PUBLISHED_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
LAST_BIAS = "proj_out.bias"
DENOISER_FILE, TEXT_FILE = "diffusion_pytorch_model", "model"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--encoders", choices=("small", "published"), default="small")
    parser.add_argument("--text-encoder-layers", type=int, default=28, help="of a published one")
    parser.add_argument("--device", default="cpu", help="where the numbers are drawn")
    wish = parser.parse_args()
    published = wish.encoders == "published"
    count = write(wish.out, wish.layers, wish.device, wish.text_encoder_layers if published else None)
    print(f"{wish.out}: denoiser of {count:,} parameters, {wish.encoders} encoders")


def write(out: Path, layers: int, device: str, text_encoder_layers: int | None = None) -> int:
    """A whole base; published encoders where the text encoder's layers are given. Returns the denoiser's parameters."""
    shutil.copytree(BASE, out, ignore=shutil.ignore_patterns("*.safetensors"))
    count = write_denoiser(out / "transformer", layers, device)
    if text_encoder_layers is None:
        shutil.copy(BASE / "vae" / f"{DENOISER_FILE}.safetensors", out / "vae")
        write_text_encoder(out / "text_encoder", text_config(SMALL), {"out_hidden_size": WIDTH}, device)
        return count
    write_vae(out / "vae")
    text = text_config({**PUBLISHED, "num_hidden_layers": text_encoder_layers})
    write_text_encoder(out / "text_encoder", text, {**PUBLISHED_VISION, "out_hidden_size": WIDTH}, device)
    return count


def write_denoiser(folder: Path, layers: int, device: str) -> int:
    """Shards in bf16 with their index; returns the number of parameters."""
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel

    with init_empty_weights():
        model = QwenImageTransformer2DModel(num_layers=layers)
    model.save_config(folder)
    return write_weights(folder, DENOISER_FILE, model.state_dict(), device)


def write_vae(folder: Path, **shape: int) -> None:
    """The embedded base's, bf16, padded to the published shape, but for what `shape` says."""
    padded(BASE / "vae", **shape).bfloat16().save_pretrained(folder)


def text_config(changes: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    width = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    return {**width, "rope_parameters": rope, **changes}


def write_text_encoder(folder: Path, text: dict[str, Any], vision: dict[str, Any], device: str) -> int:
    """With the embedded base's tokens; `text` and `vision` are what differs from its config."""
    from accelerate import init_empty_weights
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    document: dict[str, Any] = json.loads((BASE / "text_encoder" / "config.json").read_text(encoding="utf-8"))
    for name in ("head_dim", "layer_types", "rope_scaling"):
        document["text_config"].pop(name, None)
    document["text_config"].update(text)
    document["vision_config"].update(vision)
    tied = text.get("tie_word_embeddings", document["tie_word_embeddings"])
    left_out = ("model_type", "transformers_version")
    kept = {key: value for key, value in document.items() if key not in left_out}
    config = Qwen2_5_VLConfig(**{**kept, "tie_word_embeddings": tied})
    with init_empty_weights():
        model = Qwen2_5_VLForConditionalGeneration(config)
    config.save_pretrained(folder)
    tensors = {_published_name(name): tensor for name, tensor in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    return write_weights(folder, TEXT_FILE, tensors, device)


def _published_name(name: str) -> str:
    """As the published files have it; transformers 5 calls its modules otherwise."""
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def write_weights(folder: Path, stem: str, like: dict[str, Tensor], device: str) -> int:
    """bf16 weights of the shapes of `like`, in shards with an index where one file is not enough."""
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    shards = list(_shards(like))
    names = [f"{stem}-{number:05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    with _writing() as put:
        for file, shard in zip(names, shards, strict=True):
            put({name: _drawn(name, like[name], generator).cpu() for name in shard}, folder / file)
            index.update(dict.fromkeys(shard, file))
    count = sum(tensor.numel() for tensor in like.values())
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": 2 * count}, "weight_map": index})
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8", newline="\n")
    return count


def _shards(like: dict[str, Tensor]) -> Iterator[list[str]]:
    """Names, as many as one file holds."""
    shard: list[str] = []
    size = 0
    for name, tensor in like.items():
        shard.append(name)
        size += 2 * tensor.numel()
        if size > SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


class _writing:  # noqa: N801  # used as a statement
    """Files written by threads; what one of them raises is raised here."""

    def __enter__(self) -> Callable[[dict[str, Tensor], Path], None]:
        self.pool = ThreadPoolExecutor(WRITERS)
        self.running: list[Future[None]] = []
        return self.put

    def put(self, tensors: dict[str, Tensor], path: Path) -> None:
        if len(self.running) == WRITERS:
            self.running.pop(0).result()
        self.running.append(self.pool.submit(save_file, tensors, path, {"format": "pt"}))

    def __exit__(self, *failure: object) -> None:
        self.pool.shutdown()
        for future in self.running:
            future.result()


def _drawn(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """N(0, 0.02), of convolutions so that they keep the scale; scales of norms around 1: all must come through."""
    inputs = like.numel() // like.shape[0]
    spread = 2.0 if name == LAST_BIAS else 0.02
    if like.dim() > 3 and inputs > 1:
        spread = inputs**-0.5
    made = (
        torch.randn(like.shape, generator=generator, device=generator.device, dtype=torch.bfloat16) * spread
    )
    norm = ("norm" in name or "ln_q" in name) and like.dim() == 1 and name.endswith("weight")
    return made + 1 if norm else made


if __name__ == "__main__":
    main()
