"""A small Qwen2Tokenizer, pruned from the real Qwen byte-pair encoding.

    python -m runtime.demo.tokenizer --tiktoken dashscope-2.0.2-py3-none-any.whl --out tokenizer

The ranks come from `dashscope/resources/qwen.tiktoken` of the PyPI wheel dashscope 2.0.2 (Apache-2.0).
Diffusers drops a fixed number of tokens of the prompt template, 64 for edits and 34 for text to image, so a
tokenizer that was trained afresh can't stand in. Pruning keeps every token that the templates and the demo's
prompts split into, and the first `keep_ranks` ranks with all their bytes: any text still round-trips.
"""

from __future__ import annotations

import argparse
import base64
import zipfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from runtime.demo.shapes import BACKGROUND_PROMPTS, COLOURS, KINDS, SHAPE_PROMPTS

RESOURCE = "dashscope/resources/qwen.tiktoken"
KEEP_RANKS = 1000

# In the official order: their ids follow the vocabulary, <|endoftext|> first (151643 in the full tokenizer).
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)

EDIT_PREFIX = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a "
    "new image that meets the user's requirements while maintaining consistency with the original input "
    "where appropriate.<|im_end|>\n<|im_start|>user\n"
)
T2I_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
PLUS = "Picture 1: Picture 2: Picture 3: Picture 4: "


def byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte: its own if it has one, else the next from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def spell(token: bytes) -> str:
    return "".join(LETTERS[b] for b in token)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank, from a .tiktoken file or from the wheel that holds one."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            data = wheel.read(RESOURCE)
    else:
        data = path.read_bytes()
    return {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in data.splitlines() if line)
    }


def halves(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """The two parts whose merge makes `token`: what BPE leaves of it with only the ranks below its own."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(pairs)
        if rank >= ranks[token]:
            raise ValueError(f"{token!r} is not a merge of two tokens of lower rank: not a BPE rank file")
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def closure(ranks: dict[bytes, int], wanted: Iterable[bytes]) -> list[bytes]:
    """`wanted`, all single bytes, and whatever they are merged from, in the order of their ranks."""
    kept = {bytes([b]) for b in range(256)}
    stack = list(wanted)
    while stack:
        token = stack.pop()
        if token not in kept:
            kept.add(token)
            stack.extend(halves(ranks, token))
    return sorted(kept, key=ranks.__getitem__)


def assemble(ranks: dict[bytes, int], tokens: list[bytes]) -> Any:
    """transformers.Qwen2Tokenizer over `tokens`, with Qwen's special tokens after them."""
    from transformers import AddedToken, Qwen2Tokenizer

    vocab = {spell(token): i for i, token in enumerate(tokens)}
    merges = [(spell(a), spell(b)) for a, b in (halves(ranks, t) for t in tokens if len(t) > 1)]
    vocab |= {name: len(vocab) + i for i, name in enumerate((*SPECIAL, *ADDED))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        model_max_length=32768,
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
    )
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in ADDED])
    return tokenizer


def phrases() -> list[str]:
    """Every text whose tokens must survive pruning."""
    colours = [f"a {colour} shape, {colour}" for colour in (*COLOURS, "grey", "pink", "brown")]
    kinds = [f"the {kind} of the {kind}'s" for kind in KINDS]
    edits = ["add a thick outline around it, please", "give it a border, a drop shadow, an edge, a frame"]
    return [
        EDIT_PREFIX,
        T2I_PREFIX,
        SUFFIX,
        PLUS,
        *SHAPE_PROMPTS,
        *BACKGROUND_PROMPTS,
        *colours,
        *kinds,
        *edits,
    ]


def prune(ranks: dict[bytes, int], keep_ranks: int = KEEP_RANKS) -> Any:
    """The small tokenizer: splits the templates and the demo's words exactly as the full one does."""
    full = assemble(ranks, sorted(ranks, key=ranks.__getitem__))
    words = {piece for text in phrases() for piece in full.tokenize(text) if piece not in SPECIAL}
    wanted = [bytes(BYTES[letter] for letter in piece) for piece in words]
    return assemble(ranks, closure(ranks, [*wanted, *(t for t, rank in ranks.items() if rank < keep_ranks)]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiktoken", type=Path, required=True, help="qwen.tiktoken, or the wheel that holds it"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = prune(read_ranks(args.tiktoken))
    tokenizer.save_pretrained(args.out)
    counts = [len(tokenizer(text).input_ids) for text in (EDIT_PREFIX, T2I_PREFIX)]
    print(
        f"{len(tokenizer)} tokens; prefixes {counts[0]} (edit, 64 expected), {counts[1]} (t2i, 34 expected)"
    )


if __name__ == "__main__":
    main()
