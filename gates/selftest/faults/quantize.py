"""Faults of gate 06: the NF4 weights, or the reason for going without."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gates.selftest import nf4
from gates.selftest.faults.row import Fault, Spoil, fault
from gates.selftest.faults.skipped import SKIPPED
from gates.tensors import read_header

EVIDENCE = "06-quantize"
WEIGHT = "transformer_blocks.0.attn.to_q.weight"
PRINTS = ("source_fingerprint", "source_fingerprint_after")
FILES = {"transformer": "diffusion_pytorch_model.safetensors", "text_encoder": "model.safetensors"}


def _weights(made: Any, component: str = "transformer") -> Path:
    return made.root / "models/nf4" / component / FILES[component]  # type: ignore[no-any-return]


def _component(change: Callable[[dict[str, Any]], Any], component: str = "transformer") -> Spoil:
    def spoil(document: dict[str, Any]) -> None:
        change(next(item for item in document["data"]["components"] if item["name"] == component))

    return lambda made: made.edit(made.evidence(EVIDENCE), spoil)


def _tensors(change: Callable[[dict[str, Any]], Any], component: str = "transformer") -> Spoil:
    """Weights changed, and recorded as if step 06 had made them so."""

    def spoil(made: Any) -> None:
        path = _weights(made, component)
        tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)
        _record(made, component)

    return spoil


def _config(change: Callable[[dict[str, Any]], Any], component: str = "transformer") -> Spoil:
    def spoil(made: Any) -> None:
        made.edit(f"models/nf4/{component}/config.json", change)
        _record(made, component)

    return spoil


def _record(made: Any, component: str) -> None:
    """The evidence's digests and sizes are those of the folder as it lies there."""
    folder = made.root / "models/nf4" / component
    now = nf4.record(made.root, component)
    size = sum(entry.size for entry in read_header(folder / FILES[component], "x").values())

    def change(record: dict[str, Any]) -> None:
        record.update(files=now["files"], made_fingerprint=now["made_fingerprint"], made_gib=size / 2**30)

    _component(change, component)(made)


def _garble(tensors: dict[str, Any], name: str = WEIGHT) -> None:
    tensors[f"{name}.absmax"] = tensors[f"{name}.absmax"][::-1] // 2


def _bytes(made: Any) -> None:
    path = _weights(made)
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)


def _pop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(name)


def _state(**values: Any) -> Callable[[dict[str, Any]], Any]:
    def change(tensors: dict[str, Any]) -> None:
        name = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
        state = {**json.loads(tensors[name].tobytes()), **values}
        tensors[name] = np.frombuffer(json.dumps(state).encode(), np.uint8)

    return change


def _plain(tensors: dict[str, Any], weight: str = WEIGHT) -> None:
    """One linear as the base has it."""
    for name in [name for name in tensors if name.startswith(weight)]:
        del tensors[name]
    tensors[weight] = nf4.weights("transformer")[weight]


def _kept(made: Any) -> None:
    """Two of four linears, as `--keep` would leave them."""
    names = [f"transformer_blocks.{block}.attn.to_q" for block in (0, 1)]
    for name in names:
        _tensors(partial(_plain, weight=f"{name}.weight"))(made)
    _component(lambda record: record.update(kept=names, linears=2))(made)
    _config(lambda d: d["quantization_config"]["llm_int8_skip_modules"].extend(names))(made)


def _source(made: Any) -> None:
    path = made.root / "models/base/transformer/config.json"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")


def _data(**values: Any) -> Spoil:
    return lambda made: made.edit(made.evidence(EVIDENCE), lambda d: d["data"].update(values))


def _fetched(**values: Any) -> Spoil:
    return _component(lambda record: record["fetched"].update(values))


def _listing(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """The base's list of what was fetched changed, and the evidence's fingerprint with it."""
    path = "models/base/transformer/fetched.json"

    def spoil(made: Any) -> None:
        made.edit(path, change)
        now = {name: it for name, it in nf4.record(made.root, "transformer").items() if name in PRINTS}
        _component(lambda record: record.update(now))(made)
        for kind in ("smoke", "full"):
            made.edit(
                made.run(kind) / "run.json",
                lambda d: d["model"]["fingerprints"].update(transformer=now["source_fingerprint"]),
            )

    return spoil


def _dropped_faults() -> tuple[Fault, ...]:
    shard = FILES["transformer"]
    return tuple(
        fault(what, turned, spoil, shape="nf4-dropped")
        for what, turned, spoil in (
            ("fetched from another repository", {"source-untouched"}, _fetched(repo="some/other")),
            ("fetched at another commit", {"source-untouched"}, _fetched(revision="0" * 40)),
            ("dropped and never listed", {"source-untouched"}, _fetched(dropped=[shard, "more.safetensors"])),
            (
                "a dropped shard of another digest than the hub named",
                {"source-untouched"},
                _fetched(shards={shard: {"size": 1, "sha256": "0" * 64}}),
            ),
            (
                "a tensor of a dropped shard is missing",
                {"quantization-recorded"},
                _tensors(_pop("proj_out.weight")),
            ),
            (
                "a list that names a tensor more",
                {"quantization-recorded"},
                _listing(
                    lambda d: d["shards"][shard]["tensors"].update(
                        more={"dtype": "F16", "shape": [1], "start": 0, "size": 0}
                    )
                ),
            ),
            (
                "a dropped shard that is back as another",
                {"source-untouched"},
                lambda m: (m.root / "models/base/transformer" / shard).write_bytes(b"x"),
            ),
        )
    )


def _taken_faults() -> tuple[Fault, ...]:
    return (
        fault(
            "ready-made weights in other bytes than the base's",
            {"quantization-recorded"},
            _bytes,
            shape="nf4-taken",
        ),
        fault(
            "a ready-made tensor is missing",
            {"quantization-recorded"},
            _tensors(_pop("proj_out.weight")),
            shape="nf4-taken",
        ),
        fault(
            "ready-made weights without their scales",
            {"quantization-recorded"},
            _tensors(_pop(f"{WEIGHT}.absmax")),
            errors={"error-bounded"},
            shape="nf4-taken",
        ),
        fault(
            "a NaN among ready-made scales",
            {"error-bounded"},
            _tensors(lambda t: t[f"{WEIGHT}.absmax"].__setitem__(0, np.nan)),
            shape="nf4-taken",
        ),
        fault(
            "ready-made weights that are fp4",
            {"quantization-recorded"},
            _config(lambda d: d["quantization_config"].update(bnb_4bit_quant_type="fp4")),
            shape="nf4-taken",
        ),
        fault(
            "ready-made weights said to be made here",
            {"quantization-recorded", "error-bounded"},
            _component(lambda record: record.pop("taken") and None),
            shape="nf4-taken",
        ),
        fault(
            "the ready-made base changed since",
            {"source-untouched"},
            _source,
            shape="nf4-taken",
        ),
    )


FAULTS: tuple[Fault, ...] = (
    fault("nothing was made", {"components-present"}, lambda m: m.evidence(EVIDENCE).unlink()),
    fault(
        "begun and not finished",
        {"components-present"},
        lambda m: m.edit(m.evidence(EVIDENCE), lambda d: d.update(complete=False, data={})),
    ),
    fault(
        "evidence that is none",
        set(),
        lambda m: m.edit(m.evidence(EVIDENCE), lambda d: d["data"].pop("components") and None),
        errors={"components-present"},
    ),
    fault(
        "one of two was made",
        {"components-present"},
        lambda m: m.edit(m.evidence(EVIDENCE), lambda d: d["data"]["components"].pop() and None),
    ),
    fault(
        "a folder is gone",
        {"components-present"},
        lambda m: shutil.rmtree(m.root / "models/nf4/text_encoder"),
    ),
    fault("a shard is gone", {"components-present"}, lambda m: _weights(m).unlink()),
    fault(
        "both are none in the config",
        {"components-present"},
        lambda m: m.edit_config(lambda c: c["model"].update(quantize="none", quantize_text_encoder="none")),
    ),
    fault("one byte edited", {"quantization-recorded"}, _bytes),
    fault(
        "a file more",
        {"quantization-recorded"},
        lambda m: (_weights(m).parent / "extra.bin").write_bytes(b"x"),
    ),
    fault(
        "a file cut short",
        set(),
        lambda m: _weights(m).write_bytes(_weights(m).read_bytes()[:-9]),
        errors={"quantization-recorded", "error-bounded"},
    ),
    fault(
        "an edited fingerprint",
        {"quantization-recorded"},
        _component(lambda record: record.update(made_fingerprint="0" * 64)),
    ),
    fault(
        "no quantization_config",
        {"quantization-recorded"},
        _config(lambda d: d.pop("quantization_config") and None),
    ),
    fault(
        "fp4 in the config",
        {"quantization-recorded"},
        _config(lambda d: d["quantization_config"].update(bnb_4bit_quant_type="fp4")),
    ),
    fault(
        "single quantization in the config",
        {"quantization-recorded"},
        _config(lambda d: d["quantization_config"].update(bnb_4bit_use_double_quant=False)),
    ),
    fault(
        "a kept linear that the loader would replace",
        {"quantization-recorded"},
        _config(lambda d: d["quantization_config"].update(llm_int8_skip_modules=["lm_head"]), "text_encoder"),
    ),
    fault(
        "a weight without its scales",
        {"quantization-recorded"},
        _tensors(_pop(f"{WEIGHT}.absmax")),
        errors={"error-bounded"},
    ),
    fault(
        "scales that were not quantized again",
        {"quantization-recorded"},
        _tensors(lambda t: t.update({f"{WEIGHT}.absmax": np.ones(64, np.float32)})),
        errors={"error-bounded"},
    ),
    fault("a weight of another type", {"quantization-recorded"}, _tensors(_state(quant_type="fp4"))),
    fault(
        "a weight of another shape",
        {"quantization-recorded"},
        _tensors(_state(shape=[32, 128])),
        errors={"error-bounded"},
    ),
    fault(
        "a state without a shape",
        set(),
        _tensors(_state(shape="x")),
        errors={"quantization-recorded", "error-bounded"},
    ),
    fault("a linear left plain", {"quantization-recorded"}, _tensors(_plain)),
    fault("a tensor of the base is missing", {"quantization-recorded"}, _tensors(_pop("proj_out.weight"))),
    fault(
        "a tensor of nobody",
        {"quantization-recorded"},
        _tensors(lambda t: t.update(stranger=np.ones(3, np.float32))),
    ),
    fault(
        "another number of linears",
        {"quantization-recorded"},
        _component(lambda record: record.update(linears=5)),
    ),
    fault("a size that is not true", {"size-ratio"}, _component(lambda record: record.update(made_gib=0.1))),
    fault(
        "a size of the text encoder that is not true",
        {"size-ratio"},
        _component(lambda record: record.update(source_gib=0.5), "text_encoder"),
    ),
    fault("half of it kept", {"size-ratio"}, _kept),
    fault("a bad mean", {"error-bounded"}, _component(lambda record: record.update(mean_error=0.13))),
    fault(
        "a bad layer, as recorded",
        {"error-bounded"},
        _component(lambda record: record["worst"].insert(0, {"name": "x", "error": 0.25}), "text_encoder"),
    ),
    fault("garbled scales", {"error-bounded"}, _tensors(_garble)),
    fault(
        "a NaN among the scales",
        {"error-bounded"},
        _tensors(lambda t: t[f"{WEIGHT}.nested_absmax"].__setitem__(0, np.nan)),
    ),
    fault(
        "a better error than is true",
        {"error-bounded"},
        _component(lambda record: [item.update(error=0.05) for item in record["worst"]]),
    ),
    fault("an output far off", {"error-bounded"}, _data(output_error={"value": 0.7, "reason": "x"})),
    fault(
        "an output that was not measured, with the base at hand",
        {"error-bounded"},
        _data(output_error={"value": None, "reason": "not measured: no time"}),
    ),
    fault("the base changed since", {"source-untouched"}, _source),
    fault(
        "the base changed meanwhile",
        {"source-untouched"},
        _component(lambda record: record.update(source_fingerprint_after="0" * 64)),
    ),
    fault("made of another model", {"source-untouched"}, _data(model="models/other")),
    fault(
        "an error that was not measured",
        {"error-bounded"},
        _component(lambda record: record.update(mean_error=None, worst=[])),
    ),
    fault(
        "ready-made weights that were not measured against the base beside them",
        {"error-bounded"},
        _component(lambda record: record.update(mean_error=None, worst=[], taken="external:nf4")),
    ),
    *_dropped_faults(),
    *_taken_faults(),
    *SKIPPED,
)
