"""Gate 07: healthy runs pass, and each planted fault turns its check and no other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Spoil = Callable[[Any], Any]
ADAPTER = "pytorch_lora_weights.safetensors"
LAST = "checkpoint-last-5-60-last"


def _first_entry(made: Any) -> Path:
    document = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
    return made.root / "cache" / document["entries"][0]["folder"]  # type: ignore[no-any-return]


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit("cache/manifest.json", change)


def _roundtrip(**values: Any) -> Spoil:
    def change(document: dict[str, Any]) -> None:
        document["data"]["samples"][1].update(values)

    return lambda made: made.edit(made.evidence("07-cache-roundtrip"), change)


def _rebuild(made: Any, workspaces: Any, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """The cache made anew from changed samples and settings, whole in itself; runs and roundtrip follow."""
    dataset = json.loads(made.evidence("02-dataset").read_text(encoding="utf-8"))["data"]
    manifest = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
    change(dataset, manifest["settings"])
    shutil.rmtree(made.root / "cache")
    manifest["entries"] = [
        workspaces.cache_entry(made.root / "cache", sample, manifest["settings"])
        for sample in dataset["samples"]
    ]
    workspaces.write_json(made.root / "cache/manifest.json", manifest)
    _follow(made, manifest, workspaces)


def _follow(made: Any, manifest: dict[str, Any], workspaces: Any) -> None:
    digest = workspaces.document_digest(manifest["entries"])
    made.edit(made.evidence("07-cache-roundtrip"), lambda d: d["data"].update(manifest_digest=digest))
    trained = workspaces.trained_digest(manifest)
    for kind in ("smoke", "full"):
        made.edit(made.run(kind) / "run.json", lambda document: document.update(cache_digest=trained))


def _share(name: str, workspaces: Any) -> Spoil:
    """Two entries with one tensor, recorded as if the cache phase had written it so."""

    def spoil(made: Any) -> None:
        manifest = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
        folders = [made.root / "cache" / entry["folder"] for entry in manifest["entries"][:2]]
        tensors = load_file(folders[1] / "tensors.safetensors")
        tensors[name] = load_file(folders[0] / "tensors.safetensors")[name]
        save_file(tensors, folders[1] / "tensors.safetensors")
        path = folders[1] / "tensors.safetensors"
        files = {path.name: workspaces.recorded(folders[1])[path.name]}
        made.edit(folders[1] / "entry.json", lambda d: d.update(files=files))
        manifest["entries"][1]["files"] = files
        workspaces.write_json(made.root / "cache/manifest.json", manifest)
        _follow(made, manifest, workspaces)

    return spoil


def _truncate(path: Callable[[Any], Path]) -> Spoil:
    def spoil(made: Any) -> None:
        place = path(made)
        place.write_bytes(place.read_bytes()[:-7])

    return spoil


CACHE_FAULTS: dict[str, tuple[Spoil, set[str]]] = {
    "no cache": (lambda m: (m.root / "cache/manifest.json").unlink(), {"cache/cache-complete"}),
    "an entry's tensors deleted": (
        lambda m: (_first_entry(m) / "tensors.safetensors").unlink(),
        {"cache/cache-complete"},
    ),
    "an entry cut short": (
        _truncate(lambda m: _first_entry(m) / "tensors.safetensors"),
        {"cache/cache-complete"},
    ),
    "an entry.json cut short": (
        _truncate(lambda m: _first_entry(m) / "entry.json"),
        {"cache/cache-complete"},
    ),
    "an entry's folder deleted": (lambda m: shutil.rmtree(_first_entry(m)), {"cache/cache-complete"}),
    "the key is not the document's": (
        lambda m: m.edit(_first_entry(m) / "entry.json", lambda d: d["document"].update(prompt="x")),
        {"cache/cache-complete"},
    ),
    "tensors of another shape than told": (
        lambda m: m.edit(
            _first_entry(m) / "entry.json", lambda d: d["tensors"]["target"].update(shape=[4, 8, 8])
        ),
        {"cache/cache-complete"},
    ),
    "the cache phase did not finish": (
        _manifest(lambda d: d.update(complete=False)),
        {"cache/cache-complete"},
    ),
    "counts that are not true": (_manifest(lambda d: d["counts"].update(train=12)), {"cache/cache-complete"}),
    "another resolution": (
        lambda m: m.edit_config(lambda c: c["data"]["processor"].update(controls_size=[64, 64])),
        {"cache/cache-matches-config", "smoke/run-matches-inputs", "full/run-matches-inputs"},
    ),
    "caption dropout without empty embeddings": (
        lambda m: m.edit_config(lambda c: c["data"].update(caption_dropout_rate=0.1)),
        {"cache/cache-matches-config", "smoke/run-matches-inputs", "full/run-matches-inputs"},
    ),
    "guidance without negative embeddings": (
        lambda m: m.edit_config(lambda c: c.update(validation={"guidance_scale": 4.0})),
        {"cache/cache-matches-config"},
    ),
    "made for another dataset": (
        _manifest(lambda d: d.update(dataset_digest="0" * 64)),
        {"cache/cache-matches-config"},
    ),
    "no roundtrip": (lambda m: m.evidence("07-cache-roundtrip").unlink(), {"cache/cache-roundtrip"}),
    "roundtrip of another cache": (
        lambda m: m.edit(
            m.evidence("07-cache-roundtrip"), lambda d: d["data"].update(manifest_digest="0" * 64)
        ),
        {"cache/cache-roundtrip"},
    ),
    "embeddings that differ": (_roundtrip(embeds_error=0.03), {"cache/cache-roundtrip"}),
    "latents that differ": (_roundtrip(latents_error=0.5), {"cache/cache-roundtrip"}),
    "pictures of noise": (_roundtrip(decoded_psnr_db=7.0), {"cache/cache-roundtrip"}),
    "nothing encoded again": (
        lambda m: m.edit(m.evidence("07-cache-roundtrip"), lambda d: d["data"].update(samples=[])),
        {"cache/cache-roundtrip"},
    ),
}


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_cache_fault(fault: str, made: Any, judge: Any, assert_turned: Any) -> None:
    spoil, expected = CACHE_FAULTS[fault]
    spoil(made)
    if fault == "no cache":  # without a manifest a run's cache can't be told either
        expected = expected | {"smoke/run-matches-inputs", "full/run-matches-inputs"}
    assert_turned(judge(made, "07"), fail=expected)


@pytest.mark.parametrize("name", ["prompt_embeds", "control_0", "target"])
def test_shared_tensors(name: str, made: Any, workspaces: Any, judge: Any, assert_turned: Any) -> None:
    _share(name, workspaces)(made)
    assert_turned(judge(made, "07"), fail={"cache/cache-distinct"})


def _with_texts(made: Any, workspaces: Any, **spoilt: Any) -> None:
    """The cache with empty embeddings for training, negative ones for the others; `spoilt` for all."""
    made.edit_config(
        lambda c: (
            c["data"].update(caption_dropout_rate=0.1), c.update(validation={"guidance_scale": 4.0})
        )
    )  # fmt: skip
    dataset = json.loads(made.evidence("02-dataset").read_text(encoding="utf-8"))["data"]
    manifest = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
    shutil.rmtree(made.root / "cache")
    manifest["entries"] = []
    for sample in dataset["samples"]:
        train = sample["split"] == "train"
        name, key = ("empty_embeds", "empty_prompt") if train else ("negative_embeds", "negative_prompt")
        tensor = spoilt.get(name, workspaces.drawn(name + sample["id"], 5, 8))
        manifest["entries"].append(
            workspaces.cache_entry(
                made.root / "cache", sample, manifest["settings"],
                document={key: True if train else " "}, tensors={name: tensor},
            )
        )  # fmt: skip
    workspaces.write_json(made.root / "cache/manifest.json", manifest)
    _follow(made, manifest, workspaces)


@pytest.mark.parametrize("name", ["empty_embeds", "negative_embeds"])
@pytest.mark.parametrize("shared", [False, True])
def test_shared_embeddings_of_other_texts(
    name: str, shared: bool, made: Any, workspaces: Any, judge: Any
) -> None:
    _with_texts(made, workspaces, **({name: workspaces.drawn("the last one's", 5, 8)} if shared else {}))
    checks = {check.id: check.status for check in judge(made, "07").checks if check.phase == "cache"}
    assert checks.pop("cache-distinct") == ("fail" if shared else "pass")
    assert set(checks.values()) == {"pass"}


def test_a_sample_without_entry(made: Any, workspaces: Any, judge: Any, assert_turned: Any) -> None:
    _rebuild(made, workspaces, lambda dataset, settings: dataset["samples"].pop())
    made.edit("cache/manifest.json", lambda d: d["counts"].update(train=10))
    assert_turned(judge(made, "07"), fail={"cache/cache-complete"})


def _asked(made: Any, workspaces: Any, cached: list[dict[str, Any]], asked: list[dict[str, Any]]) -> None:
    """Prompts in the cache, and prompts that the config asks for."""
    manifest = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
    for index, sample in enumerate(cached):
        controls = [{"sha256": workspaces.file_digest(made.root / image)} for image in sample["images"]]
        entry = workspaces.cache_entry(
            made.root / "cache",
            {"id": f"prompt-{index}", "split": "prompt", "prompt": sample["prompt"],
             "target": {"sha256": "0" * 64}, "controls": controls},
            manifest["settings"],
        )  # fmt: skip
        manifest["entries"].append(entry)
    manifest["counts"]["prompt"] = len(cached)
    workspaces.write_json(made.root / "cache/manifest.json", manifest)
    _follow(made, manifest, workspaces)
    made.edit_config(lambda c: c.update(validation={"samples": asked}))


GREEN = {"prompt": "paint it green", "images": ["data/control_images/s05.png"]}
RED = {"prompt": "paint it red", "images": ["data/control_images/s05.png"]}
OTHER = {"prompt": "paint it green", "images": ["data/control_images/s06.png"]}


@pytest.mark.parametrize(
    ("cached", "asked", "fault"),
    [
        ([GREEN], [GREEN], ""),
        ([], [GREEN], "no entry for prompt-0"),
        ([GREEN], [RED], "prompt-0: another prompt"),
        ([GREEN], [OTHER], "prompt-0: another controls"),
        ([GREEN], [], "an entry for prompt-0"),
    ],
)
def test_the_prompts_that_the_config_asks_for_are_cached(
    cached: list[dict[str, Any]],
    asked: list[dict[str, Any]],
    fault: str,
    made: Any,
    workspaces: Any,
    judge: Any,
) -> None:
    """A fit, which reads none of them, is refused without."""
    _asked(made, workspaces, cached, asked)
    check = next(c for c in judge(made, "07").checks if c.id == "cache-matches-config")
    assert check.status == ("fail" if fault else "pass") and fault in check.message
    assert check.remedy == ("finetune cache" if fault else "")


def test_an_entry_of_another_prompt(made: Any, workspaces: Any, judge: Any, assert_turned: Any) -> None:
    _rebuild(made, workspaces, lambda dataset, settings: dataset["samples"][5].update(prompt="another"))
    assert_turned(judge(made, "07"), fail={"cache/cache-matches-config"})


SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another background": lambda c: c["data"]["processor"].update(background=[0, 0, 0]),
    "another limit of tokens": lambda c: c["data"].update(max_prompt_tokens=64),
    "another precision of the text encoder": lambda c: c.update(
        cache={"use_cache": True, "dtypes": {"text_encoder": "bf16"}}
    ),
    "a larger view of the control": lambda c: c["data"]["processor"].update(vl_pixels=4096),
}
SIZES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another size": lambda c: c["data"]["processor"].update(target_size=[64, 64]),
    "another size of controls": lambda c: c["data"]["processor"].update(controls_size=[64, 64]),
    "buckets": lambda c: c["data"]["processor"].update(target_size=[96, 96], enable_bucket=True),
    "controls by area": lambda c: c["data"]["processor"].update(
        controls_size=[96, 96], controls_resize="area"
    ),
}


@pytest.mark.parametrize("name", [*SETTINGS, *SIZES])
def test_a_cache_of_another_config(name: str, made: Any, judge: Any) -> None:
    made.edit_config({**SETTINGS, **SIZES}[name])
    check = next(c for c in judge(made, "07").checks if c.id == "cache-matches-config")
    assert check.status == "fail" and check.remedy == "finetune cache"
    assert "configured" in check.message
    if name in SIZES:
        assert "32x48+32x48 in the cache" in check.message


@pytest.mark.parametrize("stated", [{"resolution": [64, 64]}, {"control_resolution": [96, 96]}])
def test_what_the_dataset_file_says_counts_before_the_config(
    stated: dict[str, Any], made: Any, judge: Any
) -> None:
    made.edit(made.evidence("02-dataset"), lambda d: d["data"]["sources"][0]["settings"].update(stated))
    check = next(c for c in judge(made, "07").checks if c.id == "cache-matches-config")
    assert check.status != "pass"


# ---- runs


def _run(kind: str, **values: Any) -> Spoil:
    return lambda made: made.edit(made.run(kind) / "run.json", lambda document: document.update(values))


def _metrics(kind: str, change: Callable[[list[Any]], Any]) -> Spoil:
    return lambda made: made.edit_lines(made.run(kind) / "metrics.jsonl", change)


def _probes(change: Callable[[list[Any]], Any]) -> Spoil:
    return lambda made: made.edit_lines(made.run("full") / "probe.jsonl", change)


def _no_fall(lines: list[Any]) -> None:
    """One item fell a lot and the rest rose: the mean fell, the test of pairs sees nothing."""
    for first, last in zip(lines[0]["items"], lines[-1]["items"], strict=True):
        last["loss"] = first["loss"] * 1.001
    lines[-1]["items"][-1]["loss"] = 0.0


def _small_fall(lines: list[Any]) -> None:
    for first, last in zip(lines[0]["items"], lines[-1]["items"], strict=True):
        last["loss"] = first["loss"] * 0.985


def _grow(name: str, mib: float) -> Spoil:
    def change(lines: list[Any]) -> None:
        for line in lines:
            line[name] += mib / 1024 * line["step"]

    return _metrics("full", change)


def _merge(made: Any) -> None:
    """Base weights in a checkpoint, recorded as if it had been saved so."""
    path = made.run("full") / "checkpoint-3-40"
    tensors = load_file(path / ADAPTER)
    tensors["transformer.blocks.0.attn.to_q.weight"] = np.ones((64, 64), np.float32)
    save_file(tensors, path / ADAPTER)
    made.resave("full", path)


def _merge_state(made: Any) -> None:
    path = made.run("full") / LAST
    tensors = load_file(path / "model.safetensors")
    tensors["blocks.0.attn.to_q.base_layer.weight"] = np.ones((64, 64), np.float32)
    save_file(tensors, path / "model.safetensors")
    made.resave("full", path)


def _adapter(change: Callable[[str, Any], Any], steps: tuple[int, ...] = (60,)) -> Spoil:
    """Change the tensors of checkpoints, recorded as if they had been saved so."""

    def spoil(made: Any) -> None:
        for path in made.run("full").glob("checkpoint-[0-9]*"):
            if int(path.name.split("-")[2]) in steps:
                tensors = {name: change(name, t) for name, t in load_file(path / ADAPTER).items()}
                save_file(tensors, path / ADAPTER)
                made.resave("full", path)

    return spoil


def _zero_up(name: str, tensor: Any) -> Any:
    return tensor * 0 if "lora_B" in name and "blocks.0" not in name else tensor


def _one_nan(name: str, tensor: Any) -> Any:
    if "blocks.0.attn.to_q.lora_A" in name:
        tensor = tensor.copy()
        tensor[0, 0] = np.nan
    return tensor


def _double_last(made: Any, kind: str) -> None:
    run = made.run(kind)
    path = next(run.glob("checkpoint-last-*-last"))
    parts = path.name.split("-")
    shutil.copytree(path, run / f"checkpoint-last-9-{parts[3]}-last")


def _state_of(step: int) -> Spoil:
    def spoil(made: Any) -> None:
        path = made.run("full") / LAST
        made.edit(path / "trainer_state.json", lambda document: document.update(step=step))
        made.resave("full", path)

    return spoil


def _packages(kind: str, **values: str) -> Spoil:
    return lambda made: made.edit(made.run(kind) / "run.json", lambda d: d["packages"].update(values))


def _drop_save(lines: list[Any]) -> list[Any]:
    return [line for line in lines if (line["kind"], line["step"]) != ("checkpoint", 40)]


def _override(kind: str, key: str, value: Any) -> Spoil:
    return lambda made: made.edit(made.run(kind) / "run.json", lambda d: d["overrides"].update({key: value}))


def _config(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit_config(change)


def _nan_line(made: Any) -> None:
    path = made.run("full") / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[30] = lines[30].replace('"loss": 0.6', '"loss": NaN').replace('"loss": 0.5', '"loss": NaN')
    assert "NaN" in lines[30]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _nan_memory(made: Any) -> None:
    """Of one step in the second half: medians alone would not show it."""
    path = made.run("full") / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[50] = json.dumps({**json.loads(lines[50]), "rss_gib": float("nan")})
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


SMOKE_TOO = {"full/smoke-passed-as-configured"}
INPUTS = {"smoke/run-matches-inputs", "full/run-matches-inputs"}

RUN_FAULTS: dict[str, tuple[Spoil, set[str]]] = {
    "no runs": (lambda m: shutil.rmtree(m.project), INPUTS),
    "no full run": (lambda m: shutil.rmtree(m.run("full")), {"full/run-matches-inputs"}),
    "no smoke run": (
        lambda m: shutil.rmtree(m.run("smoke")),
        {"smoke/run-matches-inputs", *SMOKE_TOO},
    ),
    "another learning rate than the runs'": (
        _config(lambda c: c.update(optimizer={"init_args": {"lr": 0.5}})),
        INPUTS,
    ),
    "more steps than the full run's": (
        _config(lambda c: c["train"].update(max_train_steps=80)),
        {"full/run-matches-inputs"},
    ),
    "another dataset than the full run's": (
        _run("full", dataset_digest="0" * 64),
        {"full/run-matches-inputs"},
    ),
    "another cache than the smoke run's": (
        _run("smoke", cache_digest="0" * 64),
        {"smoke/run-matches-inputs", *SMOKE_TOO},
    ),
    "the base changed": (
        lambda m: (m.root / "models/base/transformer/config.json").write_text("{}", encoding="utf-8"),
        INPUTS,
    ),
    "a config digest of something else": (_run("full", config_digest="0" * 64), {"full/run-matches-inputs"}),
    "an override in the full run": (
        _override("full", "optimizer.init_args.lr", 0.0001),
        {"full/run-matches-inputs"},
    ),
    "an override of something else in the smoke run": (
        _override("smoke", "train.seed", 42),
        {"smoke/run-matches-inputs", *SMOKE_TOO},
    ),
    "resolved to another rank": (
        lambda m: m.edit(m.run("full") / "run.json", lambda d: d["resolved"]["model"]["lora"].update(r=8)),
        {"full/run-matches-inputs"},
    ),
    "smoke run on another Python": (
        _packages("smoke", python="3.12.1"),
        {"smoke/environment-as-judged", *SMOKE_TOO},
    ),
    "full run with another torch": (_packages("full", torch="2.12.0"), SMOKE_TOO),
    "no peft": (
        lambda m: (_packages("smoke", peft="absent")(m), _packages("full", peft="absent")(m)),
        {"smoke/environment-as-judged", "full/environment-as-judged", *SMOKE_TOO},
    ),
    "run on another device": (
        _run("full", device={"type": "cuda", "name": "x", "total_gib": 1.0}),
        {"full/environment-as-judged", "full/xpu-alloc"},
    ),
    "the smoke run did not stop": (
        _metrics("smoke", lambda lines: lines.append({**lines[-1], "step": 6})),
        {"smoke/stopped-at-max-steps", *SMOKE_TOO},
    ),
    "a smoke run of 60 steps": (
        lambda m: (
            shutil.rmtree(m.run("smoke")),
            shutil.copytree(m.run("full"), m.run("smoke")),
            m.edit(m.run("smoke") / "run.json", lambda d: d.update(kind="smoke", run_id="run-v0")),
        ),
        {"smoke/stopped-at-max-steps", *SMOKE_TOO},
    ),
    "one step too many": (
        _metrics("full", lambda lines: lines.append({**lines[-1], "step": 61})),
        {"full/stopped-at-max-steps"},
    ),
    "a step twice": (
        _metrics("full", lambda lines: lines.insert(30, lines[30])),
        {"full/stopped-at-max-steps"},
    ),
    "a step missing": (_metrics("full", lambda lines: lines.pop(30) and None), {"full/stopped-at-max-steps"}),
    "interrupted": (
        _run("full", state="interrupted", done_steps=60, reason="SIGINT"),
        {"full/stopped-at-max-steps"},
    ),
    "failed": (_run("full", state="failed", reason="OutOfMemoryError"), {"full/stopped-at-max-steps"}),
    "planned for other steps than configured": (
        _run("full", planned_steps=59, done_steps=59),
        {"full/stopped-at-max-steps", "full/resumable-last"},
    ),
    "no metrics": (
        lambda m: (m.run("full") / "metrics.jsonl").unlink(),
        {"full/stopped-at-max-steps", "full/loss-finite", "full/memory-stable"},
    ),
    "the first step died": (
        lambda m: (_metrics("smoke", lambda lines: [])(m), _run("smoke", state="failed", done_steps=0)(m)),
        {"smoke/stopped-at-max-steps", "smoke/first-step-completed", *SMOKE_TOO},
    ),
    "the first loss is null": (
        _metrics("smoke", lambda lines: lines[0].update(loss=None)),
        {"smoke/first-step-completed", *SMOKE_TOO},
    ),
    "no smoke checkpoint": (
        lambda m: m.edit_lines(
            m.run("smoke") / "saves.jsonl", lambda lines: [x for x in lines if x["kind"] == "last"]
        ),
        {"smoke/checkpoint-written", *SMOKE_TOO},
    ),
    "a smoke checkpoint cut short": (
        _truncate(lambda m: m.run("smoke") / "checkpoint-0-5" / ADAPTER),
        {"smoke/checkpoint-written", *SMOKE_TOO},
    ),
    "two -last- in the smoke run": (
        lambda m: _double_last(m, "smoke"),
        {"smoke/one-last-checkpoint", *SMOKE_TOO},
    ),
    "the loss is NaN": (_nan_line, {"full/loss-finite"}),
    "the loss is null": (_metrics("full", lambda lines: lines[5].update(loss=None)), {"full/loss-finite"}),
    "the gradient is null": (
        _metrics("full", lambda lines: lines[5].update(grad_norm=None)),
        {"full/loss-finite"},
    ),
    "one probe item fell alone": (_probes(_no_fall), {"full/loss-fell"}),
    "the fall is too small": (_probes(_small_fall), {"full/loss-fell"}),
    "no last probe": (_probes(lambda lines: lines[:-1]), {"full/loss-fell"}),
    "no first probe": (_probes(lambda lines: lines[1:]), {"full/loss-fell"}),
    "probes of other items": (
        _probes(lambda lines: [item.update(noise=99) for item in lines[-1]["items"]] and None),
        {"full/loss-fell"},
    ),
    "a probe loss is null": (
        _probes(lambda lines: lines[-1]["items"][-1].update(loss=None)),
        {"full/loss-fell"},
    ),
    "no probe at all": (lambda m: (m.run("full") / "probe.jsonl").unlink(), {"full/loss-fell"}),
    "a checkpoint not saved": (
        lambda m: m.edit_lines(m.run("full") / "saves.jsonl", _drop_save),
        {"full/checkpoints-on-schedule"},
    ),
    "a checkpoint removed by hand": (
        lambda m: shutil.rmtree(m.run("full") / "checkpoint-3-40"),
        {"full/checkpoints-on-schedule"},
    ),
    "a checkpoint cut short": (
        _truncate(lambda m: m.run("full") / "checkpoint-5-60" / ADAPTER),
        {"full/checkpoints-on-schedule"},
    ),
    "base weights in a checkpoint": (_merge, {"full/adapter-only"}),
    "base weights in the state": (_merge_state, {"full/adapter-only"}),
    "a merged model beside the adapter": (
        lambda m: save_file(
            {"w": np.ones(9, np.float32)}, m.run("full") / "checkpoint-3-40" / "model.safetensors"
        ),
        {"full/adapter-only"},
    ),
    "fewer parameters than trained": (
        lambda m: m.edit(m.run("full") / "run.json", lambda d: d["trainable"].update(parameters=1)),
        {"full/adapter-only"},
    ),
    "an adapter as large as the base": (
        lambda m: m.edit(m.run("full") / "run.json", lambda d: d["trainable"].update(base_parameters=2500)),
        {"full/adapter-only"},
    ),
    "most of lora_B is zero": (_adapter(_zero_up), {"full/adapter-learned"}),
    "a weight is NaN": (_adapter(_one_nan), {"full/adapter-learned"}),
    "nothing moved after the first checkpoint": (
        _adapter(lambda name, tensor: tensor * 0 + np.float32(1.0), (20, 60)),
        {"full/adapter-learned"},
    ),
    "resident memory grows": (_grow("rss_gib", 2.0), {"full/memory-stable"}),
    "a resident memory is NaN": (_nan_memory, {"full/memory-stable"}),
    "-last- without optimizer": (
        lambda m: (m.run("full") / LAST / "optimizer.bin").unlink(),
        {"full/resumable-last"},
    ),
    "-last- with another model": (
        lambda m: (m.run("full") / LAST / "random_states_0.pkl").write_bytes(b"x" * 19),
        {"full/resumable-last"},
    ),
    "-last- of another step": (_state_of(40), {"full/resumable-last"}),
    "two -last- in the full run": (lambda m: _double_last(m, "full"), {"full/one-last-checkpoint"}),
}


@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_run_fault(fault: str, made: Any, judge: Any, assert_turned: Any) -> None:
    spoil, expected = RUN_FAULTS[fault]
    spoil(made)
    assert_turned(judge(made, "07"), fail=expected)


ERRORS: dict[str, tuple[Spoil, set[str], set[str]]] = {
    "run.json with a key twice": (
        lambda m: (m.run("full") / "run.json").write_text('{"state": 1, "state": 2}', encoding="utf-8"),
        set(),
        INPUTS,
    ),
    "a torn line in the middle": (
        lambda m: (m.run("full") / "probe.jsonl").write_text('{"step": 0\n{}\n', encoding="utf-8"),
        set(),
        {"full/loss-fell"},
    ),
    "a resumed run whose ancestor is another": (
        _run(
            "full",
            resumed_from={
                "run_id": "x", "run": "v0", "step": 3, "checkpoint": "c", "digest": "0" * 64,
            },
        ),
        set(),
        {
            "full/stopped-at-max-steps", "full/loss-finite", "full/adapter-only", "full/memory-stable",
            "full/resumable-last",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", ERRORS)
def test_what_cannot_be_read_is_an_error(fault: str, made: Any, judge: Any, assert_turned: Any) -> None:
    spoil, failed, errored = ERRORS[fault]
    spoil(made)
    verdict = judge(made, "07")
    assert_turned(verdict, fail=failed, error=errored)
    assert verdict.exit_code == (1 if failed else 3)


@pytest.mark.parametrize(
    "name", ["cache/manifest.json", "outputs/edit-lora/v0/run.json", "outputs/edit-lora/v1/run.json"]
)
def test_no_key_of_a_record_may_be_missing(name: str, made: Any, judge: Any) -> None:
    path = made.root / name
    original = path.read_bytes()
    for key in json.loads(original):
        document = json.loads(original)
        del document[key]
        path.write_text(json.dumps(document), encoding="utf-8")
        verdict = judge(made, "07")
        assert not verdict.passes and verdict.outcome in ("failed", "error"), key
        assert not [c for c in verdict.checks if "Error:" in c.message], key


@pytest.mark.parametrize(("device", "passed", "skipped"), [("cpu", 22, 2), ("xpu", 24, 0), ("cuda", 24, 0)])
def test_healthy(device: str, passed: int, skipped: int, make: Any, judge: Any) -> None:
    verdict = judge(make(device), "07")
    assert verdict.passes and verdict.device == device
    assert (verdict.counts["pass"], verdict.counts["skip"]) == (passed, skipped)
    title = next(check.title for check in verdict.checks if check.id == "xpu-alloc")
    assert device.upper() in title.upper()


XPU_FAULTS: dict[str, tuple[Spoil, set[str]]] = {
    "near zero": (
        _metrics("full", lambda lines: [x.update(alloc_gib=0.01) for x in lines] and None),
        {"full/xpu-alloc"},
    ),
    "steps on the cpu": (
        _metrics("full", lambda lines: lines[7].update(device="cpu")),
        {"full/xpu-alloc"},
    ),
    "allocated memory grows": (_grow("alloc_gib", 0.5), {"full/memory-stable"}),
}


@pytest.mark.parametrize("fault", XPU_FAULTS)
def test_xpu_fault(fault: str, make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    spoil, expected = XPU_FAULTS[fault]
    spoil(made)
    assert_turned(judge(made, "07"), fail=expected)


def test_require_device_makes_the_skip_a_fail(made: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(made, "07", require_device="xpu")
    assert_turned(verdict, fail={"smoke/xpu-alloc", "full/xpu-alloc", *SMOKE_TOO})


def test_a_cpu_run_for_an_auto_target_does_not_skip(made: Any, judge: Any, assert_turned: Any) -> None:
    made.edit(".gates/target.json", lambda d: d.update(device="auto"))
    assert_turned(judge(made, "07"), fail={"smoke/xpu-alloc", "full/xpu-alloc", *SMOKE_TOO})


def test_a_one_time_jump_of_memory_is_no_leak(made: Any, judge: Any) -> None:
    _metrics("full", lambda lines: [x.update(rss_gib=x["rss_gib"] + 1) for x in lines[44:]] and None)(made)
    assert judge(made, "07").passes


def test_short_runs_skip_memory_and_say_so(made: Any, judge: Any, workspaces: Any) -> None:
    made.edit_config(lambda c: c["train"].update(max_train_steps=40))
    facts = _facts(made)
    shutil.rmtree(made.run("full"))
    workspaces.write_run(made.run("full"), "full", 40, 20, {}, facts)
    verdict = judge(made, "07")
    check = next(c for c in verdict.checks if c.id == "memory-stable")
    assert verdict.passes and (check.status, check.excused) == ("skip", True)


def _facts(made: Any) -> dict[str, Any]:
    import yaml

    record = json.loads((made.run("full") / "run.json").read_text(encoding="utf-8"))
    return {
        "config": yaml.safe_load((made.root / "config.yaml").read_text(encoding="utf-8")), "device": "cpu",
        "dataset_digest": record["dataset_digest"], "cache_digest": record["cache_digest"],
        "base": record["model"]["fingerprints"]["transformer"],
    }  # fmt: skip


def test_later_prompts_do_not_make_a_run_stale(made: Any, judge: Any) -> None:
    made.edit_config(lambda c: c.update(validation={"num_inference_steps": 5}, resume="latest"))
    assert judge(made, "07").passes


def test_defaults_written_out_are_no_difference(made: Any, judge: Any) -> None:
    made.edit_config(lambda c: c["train"].update(seed=42, probe_draws=4))
    assert judge(made, "07").passes


@pytest.mark.parametrize(("kind", "gone"), [("smoke", "finetune fit --smoke"), ("full", "--resume latest")])
def test_a_running_run_blocks_and_names_both_ways_out(kind: str, gone: str, made: Any, judge: Any) -> None:
    _run(kind, state="running", ended_at=None, done_steps=4)(made)
    _metrics(kind, lambda lines: lines[:4])(made)
    verdict = judge(made, "07")
    if kind == "smoke":  # the full run needs a smoke run that passes now
        assert verdict.first_failure == "smoke-passed-as-configured"
        return
    assert (verdict.verdict, verdict.outcome, verdict.exit_code) == ("FAIL", "blocked", 1)
    assert verdict.next_command == "finetune monitor --wait"
    for part in ("2026-11-30T12:00:00.000Z", "finetune monitor --wait", gone, "step 4 of 60"):
        assert part in verdict.summary
    assert all(check.status == "skip" for check in verdict.checks if check.phase == kind)


# ---- remedies lead on


def _remedy(verdict: Any, id: str, phase: str = "full") -> str:
    return next(c.remedy for c in verdict.checks if (c.phase, c.id) == (phase, id))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["smoke", "full"])
def test_a_run_that_met_nan_is_not_resumed_but_changed(kind: str, made: Any, judge: Any) -> None:
    """Draws are fixed: a resume would meet the same NaN."""
    _run(kind, state="failed", outcome="NonFiniteError", reason="step 5: loss nan", done_steps=4)(made)
    _metrics(kind, lambda lines: [*lines[:4], {**lines[4], "loss": None, "grad_norm": None}])(made)
    verdict = judge(made, "07")
    assert verdict.first_failure == "stopped-at-max-steps"
    assert verdict.next_command == "set a lower optimizer.init_args.lr in config.yaml, then finetune plan"
    if kind == "full":
        assert _remedy(verdict, "loss-finite") == verdict.next_command


@pytest.mark.parametrize("kind", ["smoke", "full"])
def test_a_run_without_gradient_is_not_only_run_again(kind: str, made: Any, judge: Any) -> None:
    """Base and adapter are as they were: the same run would end the same way."""
    _run(kind, state="failed", outcome="NoGradientError", reason="no gradient", done_steps=0)(made)
    _metrics(kind, lambda lines: [])(made)
    verdict = judge(made, "07")
    assert verdict.next_command.startswith("set model.lora.target_modules")
    assert verdict.next_command.endswith("then finetune plan")


def test_after_an_upgrade_the_run_of_before_is_run_again(made: Any, judge: Any) -> None:
    """The smoke run is v0: it was launched before the upgrade, the full run after it."""
    _packages("full", torch="2.14.0")(made)
    verdict = judge(made, "07")
    assert (verdict.first_failure, verdict.next_command) == (
        "smoke-passed-as-configured", "finetune fit --smoke",
    )  # fmt: skip
    again = made.project / "v2"
    shutil.copytree(made.run("smoke"), again)
    made.edit(
        again / "run.json",
        lambda d: d.update(run_id="run-v2", packages={**d["packages"], "torch": "2.14.0"}),
    )
    assert judge(made, "07").passes
    made.edit(again / "run.json", lambda d: d["packages"].update(torch="2.15.0"))
    assert judge(made, "07").next_command == "finetune fit"


def test_another_python_leads_to_a_target_of_this_one(made: Any, judge: Any) -> None:
    _packages("smoke", python="3.12.1")(made)
    assert judge(made, "07").next_command == "finetune init"


# ---- lineage


def test_a_resumed_run_that_died_before_its_first_save_is_resumed(
    made: Any, workspaces: Any, judge: Any
) -> None:
    """`--resume latest` takes the -last- of the run that it continued."""
    _resume(made, workspaces)
    second, full = made.project / "v2", made.run("full")
    last = next(path for path in second.glob("checkpoint-last-*"))
    shutil.rmtree(next(full.glob("checkpoint-last-*")))
    last.rename(full / "checkpoint-last-1-20-last")
    made.edit(second / "run.json", lambda d: d.update(state="interrupted", done_steps=20, reason="SIGTERM"))
    verdict = judge(made, "07")
    assert _remedy(verdict, "stopped-at-max-steps") == "finetune fit --resume latest"
    (full / "checkpoint-last-1-20-last" / "optimizer.bin").unlink()
    assert _remedy(judge(made, "07"), "stopped-at-max-steps") == "finetune fit"
    shutil.rmtree(full / "checkpoint-last-1-20-last")
    assert _remedy(judge(made, "07"), "stopped-at-max-steps") == "finetune fit"


def _resume(made: Any, workspaces: Any, at: int = 20) -> None:
    """v1 is killed after step 33 with its -last- at step 20; v2 goes on from there to the end."""
    full, second = made.run("full"), made.project / "v2"
    shutil.copytree(full, second)
    origin = {
        "run_id": "run-v1", "run": "v1", "step": at, "checkpoint": f"checkpoint-last-1-{at}-last",
        "digest": "0" * 64,
    }  # fmt: skip
    made.edit(second / "run.json", lambda d: d.update(run_id="run-v2", resumed_from=origin))
    for name in ("metrics.jsonl", "saves.jsonl", "probe.jsonl"):
        made.edit_lines(second / name, lambda lines: [x for x in lines if x["step"] > at])
        made.edit_lines(full / name, lambda lines: [x for x in lines if x["step"] <= 33])
    with (full / "metrics.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"step": 34, "lo')
    shutil.rmtree(second / "checkpoint-1-20")
    _run("full", state="running", done_steps=20)(made)


def test_a_resumed_run_is_judged_by_its_lineage(made: Any, workspaces: Any, judge: Any) -> None:
    _resume(made, workspaces)
    verdict = judge(made, "07")
    assert verdict.passes, [c for c in verdict.checks if c.status == "fail"]
    assert verdict.run == "outputs/edit-lora/v2"
    assert "outputs/edit-lora/v1/metrics.jsonl" in {item.path for item in verdict.inputs}


def test_a_gap_in_the_lineage_fails(made: Any, workspaces: Any, judge: Any, assert_turned: Any) -> None:
    _resume(made, workspaces)
    made.edit_lines(made.project / "v2" / "metrics.jsonl", lambda lines: lines[1:])
    assert_turned(judge(made, "07"), fail={"full/stopped-at-max-steps"})


def test_a_checkpoint_of_an_ancestor_counts(
    made: Any, workspaces: Any, judge: Any, assert_turned: Any
) -> None:
    _resume(made, workspaces)
    (made.run("full") / "checkpoint-1-20" / ADAPTER).write_bytes(b"")
    assert_turned(judge(made, "07"), fail={"full/checkpoints-on-schedule"})


def test_pruned_checkpoints_are_on_schedule(made: Any, judge: Any) -> None:
    run = made.run("full")

    def change(lines: list[Any]) -> None:
        line = next(x for x in lines if (x["kind"], x["step"]) == ("checkpoint", 20))
        lines.append({**line, "event": "prune"})

    made.edit_lines(run / "saves.jsonl", change)
    shutil.rmtree(run / "checkpoint-1-20")
    assert judge(made, "07").passes


def test_run_option_picks_another_run(made: Any, judge: Any) -> None:
    worse = made.project / "v2"
    shutil.copytree(made.run("full"), worse)
    made.edit(worse / "run.json", lambda d: d.update(state="failed", reason="died", run_id="run-v2"))
    assert not judge(made, "07").passes
    assert judge(made, "07", chosen_run=made.run("full").resolve()).passes


def test_one_last_says_that_the_adapter_is_unharmed(made: Any, judge: Any) -> None:
    _double_last(made, "full")
    check = next(c for c in judge(made, "07").checks if c.status == "fail")
    assert "the adapter is unharmed" in check.message and check.remedy == "finetune clean"


@pytest.mark.parametrize("kept", ["checkpoint-last-5-60-last", "checkpoint-last-9-60-last"])
def test_any_of_two_equal_lasts_may_be_cleaned_away(kept: str, made: Any, judge: Any) -> None:
    _double_last(made, "full")
    run = made.run("full")
    (gone,) = [path for path in run.glob("checkpoint-last-*-last") if path.name != kept]
    made.edit_lines(
        run / "saves.jsonl",
        lambda lines: lines.append({**lines[-2], "event": "prune", "step": 60, "path": gone.name}),
    )
    shutil.rmtree(gone)
    assert judge(made, "07").passes


def test_the_remedy_is_that_of_the_phase_that_failed(made: Any, judge: Any) -> None:
    _double_last(made, "full")
    verdict = judge(made, "07")
    assert verdict.next_command == "finetune clean" and verdict.first_check.phase == "full"


def test_no_check_of_the_design_is_missing() -> None:
    from gates import registry

    listed = {
        "cache": "cache-complete cache-matches-config cache-distinct cache-roundtrip",
        "smoke": "run-matches-inputs environment-as-judged stopped-at-max-steps first-step-completed "
        "xpu-alloc checkpoint-written one-last-checkpoint",
        "full": "run-matches-inputs environment-as-judged smoke-passed-as-configured stopped-at-max-steps "
        "loss-finite loss-fell checkpoints-on-schedule adapter-only adapter-learned memory-stable "
        "resumable-last one-last-checkpoint xpu-alloc",
    }
    specs = registry.load("07").specs
    for phase, names in listed.items():
        assert sorted(spec.id for spec in specs if spec.phase == phase) == sorted(names.split())
