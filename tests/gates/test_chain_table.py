"""What a change between two steps makes stale, and nothing more: the truth table of the chain.

A row changes one thing in a workspace that passes; each gate is then judged by itself, so that what is stale
shows, and all together, so that what is blocked shows.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.numpy import load_file, save_file

from gates import chain, registry
from gates.selftest.editing import Made, recorded, write_json, write_yaml
from gates.selftest.faults import dataset
from gates.selftest.faults.run_edits import ADAPTER
from gates.selftest.matrix import judged, name_of
from gates.selftest.shapes import SHAPES
from gates.selftest.snapshot import Snapshot
from gates.workspace import Workspace

Change = Callable[[Made], object]
CAPTION, PICTURE = "training_images/s05.txt", "training_images/s05.png"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Made, Snapshot]]:
    there: dict[str, tuple[Made, Snapshot]] = {}

    def get(shape: str) -> tuple[Made, Snapshot]:
        if shape not in there:
            made = SHAPES[shape].make(tmp_path_factory.mktemp("table") / shape)
            there[shape] = (made, Snapshot(made.root))
        return there[shape]

    return get


# ---- changes


def _set(section: str, **values: Any) -> Change:
    """Keys of config.yaml, planned anew."""
    return lambda made: made.edit_config(lambda config: config.setdefault(section, {}).update(values))


def _resume(made: Made) -> None:
    made.edit_config(lambda config: config.update(resume="latest"))


def _processor(**values: Any) -> Change:
    return lambda made: made.edit_config(lambda config: config["data"]["processor"].update(values))


def _not_planned(made: Made) -> None:
    path = made.root / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["train"]["seed"] = 7
    write_yaml(path, config)


def _comment(made: Made) -> None:
    path = made.root / "config.yaml"
    path.write_text("# a note\n" + path.read_text(encoding="utf-8"), encoding="utf-8", newline="\n")


def _data(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(document: dict[str, Any]) -> None:
        change(document["data"])

    return lambda made: made.edit(made.evidence(name), edit)


def _target(**values: Any) -> Change:
    return lambda made: made.edit(".gates/target.json", lambda document: document.update(values))


def _blank(path: str) -> Change:
    """One more blank at the end of a text file."""

    def change(made: Made) -> None:
        place = made.root / path
        place.write_bytes(place.read_bytes() + b" ")

    return change


def _recaption(made: Made) -> None:
    """Another caption, scanned and planned anew."""
    (made.dataset / CAPTION).write_text("another\n", encoding="utf-8", newline="\n")
    dataset._again(made)
    dataset._data(lambda data: dataset._sample(data).update(prompt="another"))(made)


def _repaint(made: Made) -> None:
    """Another picture, scanned and planned anew."""
    Image.fromarray(np.full((48, 64, 3), 99, np.uint8)).save(made.dataset / PICTURE)
    dataset._again(made)


def _rescanned_not_planned(made: Made) -> None:
    plan = made.evidence("04-plan").read_bytes()
    _recaption(made)
    made.evidence("04-plan").write_bytes(plan)


def _add_a_sample(made: Made) -> None:
    for path in (CAPTION, PICTURE, PICTURE.replace("training", "control")):
        shutil.copy(made.dataset / path, made.dataset / path.replace("s05", "new"))


def _encode_again(split: str) -> Change:
    """One entry of `split` with other latents, whole in itself: as another build of torch would make it."""

    def change(made: Made) -> None:
        manifest = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
        entry = next(item for item in manifest["entries"] if item["split"] == split)
        folder: Path = made.root / "cache" / entry["folder"]
        path = folder / "tensors.safetensors"
        tensors = load_file(path)
        save_file({**tensors, "target": tensors["target"] * 1.01}, path)
        entry["files"] = {path.name: recorded(folder)[path.name]}
        made.edit(folder / "entry.json", lambda document: document.update(files=entry["files"]))
        write_json(made.root / "cache/manifest.json", manifest)

    return change


def _tear_an_entry(made: Made) -> None:
    next(made.root.glob("cache/*/tensors.safetensors")).write_bytes(b"x")


def _trained_again(kind: str) -> Change:
    def change(made: Made) -> None:
        shutil.copytree(made.run(kind), made.project / "v2")
        made.edit(made.project / "v2" / "run.json", lambda document: document.update(run_id="run-v2"))

    return change


def _tear_a_checkpoint(made: Made) -> None:
    (made.run("full") / "checkpoint-5-60" / ADAPTER).write_bytes(b"x")


def _driver(devices: dict[str, Any]) -> None:
    devices["torch"]["xpu"]["devices"][0].update(driver="9.9.9")


# ---- what they make stale

SMOKE, FULL, CACHE = "smoke/run-matches-inputs", "full/run-matches-inputs", "cache/cache-matches-config"
RUNS = {"07": {SMOKE, FULL}}
CACHE_AND_RUNS = {"07": {CACHE, SMOKE, FULL}}
VALIDATED = {"08": {"adapter-from-judged-run"}}
PROBED = {"05": {"probes-complete"}}
SCANNED = {"02": {"manifest-matches-files"}}
ADAPTED = {**PROBED, **RUNS}

# what changes: how, and which checks of which gates no longer pass
ROWS: dict[str, tuple[Change, dict[str, set[str]]]] = {
    # config
    "a comment in config.yaml": (_comment, {}),
    "a default written out": (_set("train", seed=42), {}),
    "config: resume": (_resume, {}),
    "config: a tracker": (_set("logging", report_to=[]), {}),
    "config: loader processes": (_set("data", num_workers=0), {}),
    "config: how many are encoded at once": (_set("cache", batch_size=2), {}),
    "config: seed, and no plan since": (_not_planned, {"04": {"memory-plan-fits"}, **RUNS}),
    "config: learning rate": (_set("optimizer", init_args={"lr": 0.5}), RUNS),
    "config: rank": (lambda m: m.edit_config(lambda c: c["model"]["lora"].update(r=4)), RUNS),
    "config: micro-batches a step": (_set("train", gradient_accumulation_steps=2), RUNS),
    "config: steps": (_set("train", max_train_steps=80), {"07": {FULL}}),
    "config: interval of checkpoints": (_set("train", checkpointing_steps=30), {"07": {FULL}}),
    "config: size": (_processor(target_size=[64, 64]), CACHE_AND_RUNS),
    "config: caption dropout": (_set("data", caption_dropout_rate=0.1), CACHE_AND_RUNS),
    "config: precision of the VAE": (_set("cache", dtypes={"vae": "bf16"}), {"07": {CACHE}}),
    "config: how the VAE runs": (_set("cache", vae="folded"), {"07": {CACHE}}),
    "config: another cache folder": (
        _set("cache", cache_dir="other"),
        {
            "07": {"cache/cache-complete", SMOKE, FULL},
            "08": {"adapter-from-judged-run", "all-samples-rendered"},
        },
    ),
    "config: compute precision": (_set("train", mixed_precision="bf16"), ADAPTED),
    "config: gradient checkpointing": (_set("train", gradient_checkpointing=False), ADAPTED),
    "config: optimizer": (_set("optimizer", class_path="torch.optim.SGD"), ADAPTED),
    "config: device": (_set("hardware", device="xpu"), {"04": {"device-matches-host"}, **ADAPTED}),
    "config: no NF4 of the denoiser": (_set("model", quantize="none"), RUNS),
    "config: no NF4 at all": (
        _set("model", quantize="none", quantize_text_encoder="none"), {"06": {"components-present"}, **RUNS}
    ),
    "config: another project": (_set("logging", tracker_project_name="b"), {**RUNS, **VALIDATED}),
    "config: sampler steps": (_set("validation", num_inference_steps=5), VALIDATED),
    "config: seed of the sampler": (_set("validation", seed=5), VALIDATED),
    "config: guidance": (_set("validation", guidance_scale=4.0), {"07": {CACHE}, **VALIDATED}),
    "config: a prompt to paint": (
        _set("validation", samples=[{"prompt": "x", "images": ["data/control_images/s05.png"]}]),
        {"07": {CACHE}},
    ),
    # dataset
    "dataset: a caption": (_blank(f"data/{CAPTION}"), SCANNED),
    "dataset: a picture": (lambda m: shutil.copy(m.dataset / "training_images/s06.png", m.dataset / PICTURE),
                           SCANNED),
    "dataset: a sample more": (_add_a_sample, SCANNED),
    "dataset: a caption, scanned": (_recaption, CACHE_AND_RUNS),
    "dataset: a picture, scanned": (_repaint, CACHE_AND_RUNS),
    "dataset: a caption, scanned and not planned": (
        _rescanned_not_planned, {"04": {"dataset-unchanged"}, **CACHE_AND_RUNS}
    ),
    # cache
    "cache: an entry is torn": (_tear_an_entry, {"07": {"cache/cache-complete"}}),
    "cache: begun anew": (lambda m: m.edit("cache/manifest.json", lambda d: d.update(complete=False)),
                          {"07": {"cache/cache-complete"}}),
    "cache: a training sample encoded anew": (
        _encode_again("train"), {"07": {"cache/cache-roundtrip", SMOKE, FULL}, **VALIDATED}
    ),
    "cache: a held-out sample encoded anew": (
        _encode_again("holdout"), {"07": {"cache/cache-roundtrip"}, **VALIDATED}
    ),
    # weights
    "weights: the base's denoiser": (_blank("models/base/transformer/config.json"),
                                     {"06": {"source-untouched"}, **RUNS}),
    "weights: the base's text encoder, of which NF4 was made": (
        _blank("models/base/text_encoder/config.json"), {"06": {"source-untouched"}}
    ),
    "weights: the base is not on this machine": (lambda m: shutil.rmtree(m.root / "models/base/transformer"), {}),
    "weights: NF4 of the denoiser": (_blank("models/nf4/transformer/config.json"),
                                     {"06": {"quantization-recorded"}}),
    "weights: NF4 of the text encoder, which made the cache": (
        _blank("models/nf4/text_encoder/config.json"), {"06": {"quantization-recorded"}, "07": {CACHE}}
    ),
    "weights: a checkpoint is torn": (_tear_a_checkpoint, {"07": {"full/checkpoints-on-schedule"}}),
    "weights: a smoke fit more": (_trained_again("smoke"), {}),
    "weights: a fit more, not validated": (_trained_again("full"), VALIDATED),
    # environment
    "environment: another torch": (
        _data("03-environment", lambda d: d["packages"][0].update(version="2.14.0+cpu")), PROBED
    ),
    "environment: a torch too old": (
        _data("03-environment", lambda d: d["packages"][0].update(version="2.8.0")),
        {"03": {"packages-present"}, **PROBED},
    ),
    "environment: another Python": (
        _target(python="3.12"),
        {
            "03": {"python-version"},
            "07": {"smoke/environment-as-judged", "full/environment-as-judged",
                   "full/smoke-passed-as-configured"},
        },
    ),
    "host: less disk, and enough": (_data("01-host", lambda d: d["disk"][0].update(free_gib=9.0)), {}),
    "host: less RAM": (_data("01-host", lambda d: d.update(ram_gib=0.001)), {"01": {"ram-tier"}}),
    # target
    "target: another base": (_target(model="models/other"), {"01": {"ram-tier", "disk-free"}}),
    "target: another dataset": (_target(dataset="other"), {"02": {"layout-recognised"}}),
    "target: another device": (
        _target(device="xpu"),
        {
            "01": {"accelerator-present"},
            "03": {"torch-build-matches-device"},
            "04": {"device-matches-host"},
            "07": {
                "smoke/environment-as-judged", "smoke/xpu-alloc", "full/environment-as-judged",
                "full/smoke-passed-as-configured", "full/xpu-alloc",
            },
        },
    ),
}  # fmt: skip


def _unsound(made: Made) -> dict[str, set[str]]:
    """Required checks that don't pass, gate by gate, each judged by itself."""
    found = {}
    for gate in registry.numbers():
        checks = judged(made, gate).checks
        turned = {name_of(c) for c in checks if c.required and c.status in ("fail", "error")}
        if turned:
            found[gate] = turned
    return found


@pytest.mark.parametrize("name", ROWS)
def test_what_a_change_makes_stale_and_nothing_more(name: str, healthy: Any) -> None:
    change, stale = ROWS[name]
    made, snapshot = healthy("cpu")
    try:
        change(made)
        assert _unsound(made) == stale
        whole = chain.judge_up_to(Workspace.open(made.root), "08")
    finally:
        snapshot.restore()
    first = min(stale, default="09")
    seen = {
        item.whole.gate: (item.whole.verdict, item.whole.outcome, item.whole.blocked_by) for item in whole
    }
    wanted: dict[str, tuple[str, str, str | None]] = {
        gate: ("PASS", "passed", None) if gate < first else ("FAIL", "blocked", first) for gate in seen
    }
    if first in wanted:
        wanted[first] = ("FAIL", "failed", None)
    assert seen == wanted
    phases = {phase for check in stale.get("07", set()) for phase, _, _ in [check.partition("/")]}
    for phase, verdict in next(item for item in whole if item.whole.gate == "07").phases.items():
        assert verdict.passes == (first > "07" or (first == "07" and phase not in phases)), phase


def test_a_driver_that_was_updated_asks_for_new_probes_and_nothing_more(healthy: Any) -> None:
    made, snapshot = healthy("xpu")
    try:
        _data("03-environment", _driver)(made)
        assert _unsound(made) == PROBED
    finally:
        snapshot.restore()


@pytest.mark.parametrize(
    ("free_gib", "verdict"), [(8.0, "PASS"), (1.0, "FAIL")], ids=["the plan fits", "it does not"]
)
def test_a_skip_of_06_is_stale_when_the_plan_no_longer_fits(
    free_gib: float, verdict: str, healthy: Any
) -> None:
    made, snapshot = healthy("nf4-skipped")
    try:
        _data("04-plan", lambda d: d.update(budget_gib=free_gib, margin_gib=free_gib - 1.75))(made)
        assert judged(made, "06").verdict == verdict
    finally:
        snapshot.restore()


def test_every_way_is_there() -> None:
    """config, dataset, cache, weights, environment, and the target and host that they are judged against."""
    subjects = {name.partition(":")[0] for name in ROWS}
    assert {"config", "dataset", "cache", "weights", "environment", "host", "target"} <= subjects
    gates = {gate for _, stale in ROWS.values() for gate in stale}
    assert gates == set(registry.numbers())
