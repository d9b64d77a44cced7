"""NF4 that step 06 made, through each loader that should read it: ours, diffusers', transformers'.

    python benchmarks/nf4_loaders.py [--device auto]

The embedded base's denoiser and text encoder are quantized; each loader's model gets one input, and its answer is
held against that of the plain model and of the first loader. One JSON object a line:

    error      relative to the plain model: what NF4 costs
    apart      relative to the first loader of that component; 0 is bit-equal
    packed     linears that the loader made NF4 layers of, and whether their bytes are those of the file
    skipped    why a loader was not run

diffusers' loader needs a GPU. Exits with 1 where a loader's bytes or answers are off.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime import device as devices
from runtime import shards
from runtime.demo.series import BASE
from runtime.device import Device
from runtime.families import text_encoder
from runtime.families.registry import load_family
from runtime.progress import Progress
from runtime.quantize import nf4, output_error, streaming

ERROR_MAX, APART_MAX = 0.5, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    where = devices.pick(parser.parse_args().device)
    dtype = devices.compute_dtype(where, "auto")
    with tempfile.TemporaryDirectory() as place:
        made = {name: quantized(name, Path(place) / name, where) for name in nf4.COMPONENTS}
        lines = [
            *denoisers(made["transformer"], where, dtype),
            *text_encoders(made["text_encoder"], where, dtype),
        ]
    for line in lines:
        print(json.dumps({"device": where.name, "dtype": str(dtype), **line}), flush=True)
    sys.exit(any(bad(line) for line in lines))


def bad(line: dict[str, Any]) -> bool:
    """Written so that NaN is bad too."""
    if "skipped" in line:
        return False
    return not (line["error"] < ERROR_MAX and line["apart"] < APART_MAX and line["bytes_equal"])


def quantized(component: str, target: Path, where: Device) -> Path:
    rule = nf4.rule_for(component, load_family(BASE).facts.blocks)
    job = streaming.Job(
        component=component,
        source=BASE / component,
        target=target,
        rule=rule,
        device=devices.quantizing(where.type),
    )
    streaming.quantize(job, Progress(quiet=True))
    return target


# ---- the denoiser


def denoisers(made: Path, where: Device, dtype: torch.dtype) -> list[dict[str, Any]]:
    family = load_family(BASE)

    def ours(quantize: str) -> Any:
        return family.load_denoiser(BASE, device=where.type, dtype=dtype, quantize=quantize, made=made)

    def theirs() -> Any:
        from diffusers import QwenImageTransformer2DModel

        return QwenImageTransformer2DModel.from_pretrained(
            made, torch_dtype=dtype, device_map={"": where.type}, use_safetensors=True
        )

    def ask(model: Any) -> Tensor:
        return output_error._ask(family, model.eval(), where.type, dtype)

    plain = ask(ours("none"))
    reason = None if where.is_accelerator else "diffusers' bitsandbytes loader refuses a machine without GPU"
    return compared(
        "transformer", made, plain, ask, {"ours": (lambda: ours("nf4"), None), "diffusers": (theirs, reason)}
    )


# ---- the text encoder


def text_encoders(made: Path, where: Device, dtype: torch.dtype) -> list[dict[str, Any]]:
    from transformers import Qwen2_5_VLForConditionalGeneration as Encoder

    def ours() -> Any:
        return text_encoder.load(made, device=where.type, dtype=dtype)

    def at_once() -> Any:
        return Encoder.from_pretrained(made, dtype=dtype, device_map={"": where.type})

    def ask(model: Any) -> Tensor:
        ids = torch.arange(12, device=where.type)[None]
        with torch.no_grad():
            return model.eval().model(input_ids=ids, use_cache=False).last_hidden_state.float().cpu()  # type: ignore[no-any-return]

    plain = ask(Encoder.from_pretrained(BASE / "text_encoder", dtype=dtype).to(where.type))
    loaders = {"ours": (ours, None), "transformers": (at_once, None)}
    return compared("text_encoder", made, plain, ask, loaders)


# ---- comparing


def compared(
    component: str,
    made: Path,
    plain: Tensor,
    ask: Callable[[Any], Tensor],
    loaders: Mapping[str, tuple[Callable[[], Any], str | None]],
) -> list[dict[str, Any]]:
    first: Tensor | None = None
    lines: list[dict[str, Any]] = []
    for name, (load, reason) in loaders.items():
        line: dict[str, Any] = {"component": component, "loader": name}
        if reason is not None:
            lines.append({**line, "skipped": reason})
            continue
        model = load()
        line |= packed_layers(
            model, made
        )  # before it is asked: on some processors bitsandbytes repacks them then
        answer = ask(model)
        first = answer if first is None else first
        lines.append({**line, "error": apart(answer, plain), "apart": apart(answer, first)})
    return lines


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def packed_layers(model: Any, made: Path) -> dict[str, Any]:
    """NF4 layers of `model` by the bytes of their weights, against those in the files."""
    stored = {
        bytes(tensor.flatten().tolist()) for name, tensor in shards.tensors(made) if is_packed(name, tensor)
    }
    layers = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    loaded = {bytes(module.weight.data.cpu().view(torch.uint8).flatten().tolist()) for module in layers}
    return {"packed": len(layers), "bytes_equal": loaded == stored}


def is_packed(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and tensor.dtype == torch.uint8


if __name__ == "__main__":
    main()
