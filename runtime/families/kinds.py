"""What a weights file is, told from the names of its tensors; nothing but headers is read."""

import re
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import UserError

# An adapter is named after the modules that it adapts, so it comes first.
PATTERNS = {
    "adapter": r"\.lora_(A|B|down|up)\b|\.lora(_linear_layer)?\.(down|up)\b|\.(lokr_w|hada_w)\d",
    "denoiser": r"\btransformer_blocks\.\d+\.(img_mod|txt_mod|img_mlp|txt_mlp|attn\.add_[qkv]_proj)\.",
    "text encoder": r"\b(layers\.\d+\.(self_attn\.q_proj|mlp\.gate_proj)|embed_tokens|visual\.blocks\.\d+)\.",
    "vae": r"^(vae\.|first_stage_model\.)?(encoder|decoder)\."
    r"(conv_in|conv_out|conv1|mid_block|middle|down_blocks|up_blocks|downsamples|upsamples)\.",
}
CALLED = {
    "denoiser": "a Qwen-Image DiT",
    "text encoder": "a text encoder",
    "vae": "a VAE",
    "adapter": "a LoRA adapter",
    "unknown": "no weights of a kind known here",
}


def of_names(names: Iterable[str]) -> str:
    """denoiser, text encoder, vae, adapter or unknown."""
    given = list(names)
    for kind, pattern in PATTERNS.items():
        if any(re.search(pattern, name) for name in given):
            return kind
    return "unknown"


def kind_of(path: Path) -> str:
    """Of a file, a folder, an index or a shard: as `of_names`. Raises UserError for files that are cut off."""
    from runtime import shards
    from runtime.families import weights

    return of_names(name for file in weights.files_of(path) for name in shards.read_header(file))


def refusal(path: Path, kind: str, wanted: str) -> str:
    return f"{path} is {CALLED[kind]}, expected {CALLED[wanted]}"


def expect(path: Path, wanted: str) -> None:
    """Raises UserError where `path` is recognisably something else than `wanted`; one line, no wall of keys."""
    kind = kind_of(path)
    if kind not in (wanted, "unknown"):
        raise UserError(refusal(path, kind, wanted), remedy="put each component's weights in its own folder")
