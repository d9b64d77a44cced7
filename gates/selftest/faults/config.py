"""Faults of gate 04: config.yaml and its plan."""

from collections.abc import Callable
from typing import Any

from gates.selftest.faults.row import Fault, Spoil, fault

PLAN = "04-plan"


def _config(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit_config(change)


def _prompt_file(line: str) -> Spoil:
    def write(made: Any) -> None:
        (made.root / "p.txt").write_text(line, encoding="utf-8")
        made.edit_config(lambda c: c.update(validation={"prompt_file": "p.txt"}))

    return write


def _text(old: str, new: str) -> Spoil:
    """A change of the text of config.yaml; the plan is not made anew."""

    def spoil(made: Any) -> None:
        path = made.root / "config.yaml"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8", newline="\n")

    return spoil


def _plan(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit(made.evidence(PLAN), lambda document: change(document["data"]))


def _fit(**values: Any) -> Spoil:
    return _plan(lambda data: data["phases"]["fit"].update(values))


def _reserved(reserve_gib: float, margin_gib: float) -> Spoil:
    """Of every phase."""

    def change(data: dict[str, Any]) -> None:
        data["margin_gib"] = margin_gib
        for phase in data["phases"].values():
            phase["reserve_gib"] = reserve_gib

    return _plan(change)


def _target(**values: Any) -> Spoil:
    return lambda made: made.edit(".gates/target.json", lambda document: document.update(values))


FAULTS: tuple[Fault, ...] = (
    fault(
        "no config",
        {"schema-valid", "no-placeholders", "cache-mandatory"},
        lambda m: (m.root / "config.yaml").unlink(),
    ),
    fault("unknown key", {"schema-valid"}, _config(lambda c: c["train"].update(warmup=3))),
    fault("unknown section", {"schema-valid"}, _config(lambda c: c.update(trainer="QwenImageEdit"))),
    fault(
        "text for a number",
        {"schema-valid"},
        _config(lambda c: c.update(optimizer={"init_args": {"lr": "1e-4"}})),
    ),
    fault(
        "1e-4 as YAML reads it",
        {"schema-valid"},
        _text("checkpointing_steps: 20", "checkpointing_steps: 1e1"),
    ),
    fault("a leading zero", {"schema-valid"}, _text("checkpointing_steps: 20", "checkpointing_steps: 020")),
    fault(
        "on for true",
        {"schema-valid"},
        _text("checkpointing_steps: 20", "checkpointing_steps: 20\n  gradient_checkpointing: on"),
    ),
    fault("a date", {"schema-valid"}, _text("target_size:", "vl_pixels: 2026-11-30\n    target_size:")),
    fault("no model", {"schema-valid"}, _config(lambda c: c.pop("model"))),
    fault(
        "TODO",
        {"no-placeholders"},
        _config(lambda c: c["model"].update(pretrained_model_name_or_path="TODO")),
    ),
    fault(
        "angle brackets", {"no-placeholders"}, _config(lambda c: c.update(logging={"output_dir": "<out>"}))
    ),
    fault("path/to", {"no-placeholders"}, _config(lambda c: c.update(cache={"cache_dir": "path/to/cache"}))),
    fault(
        "a text for the cache's switch",
        {"cache-mandatory"},
        _config(lambda c: c.update(cache={"use_cache": "yes"})),
    ),
    fault("a number for it", {"cache-mandatory"}, _config(lambda c: c.update(cache={"use_cache": 1}))),
    fault("cache off", {"cache-mandatory"}, _config(lambda c: c.update(cache={"use_cache": False}))),
    fault(
        "no such model",
        {"paths-exist"},
        _config(lambda c: c["model"].update(pretrained_model_name_or_path="models/other")),
    ),
    fault(
        "a model folder without index",
        {"paths-exist"},
        lambda m: (m.root / "models/base/model_index.json").unlink(),
    ),
    fault(
        "another hub id than the target's",
        {"paths-exist"},
        _config(lambda c: c["model"].update(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit")),
    ),
    fault(
        "a sample image that isn't there",
        {"paths-exist"},
        _config(lambda c: c.update(validation={"samples": [{"prompt": "x", "images": ["no.png"]}]})),
    ),
    fault(
        "a sample of another multiple",
        {"size-multiple"},
        _config(
            lambda c: c.update(
                validation={"samples": [{"prompt": "x", "images": ["config.yaml"], "size": [64, 50]}]}
            )
        ),
    ),
    fault("a prompt file with an image that isn't there", {"paths-exist"}, _prompt_file("x --ci no.png")),
    fault(
        "a prompt file with a size of another multiple",
        {"size-multiple"},
        _prompt_file("x --ci config.yaml --w 64 --h 50"),
    ),
    fault(
        "no dataset evidence",
        {"paths-exist", "dataset-unchanged"},
        lambda m: m.evidence("02-dataset").unlink(),
    ),
    fault(
        "no plan",
        {"dataset-unchanged", "size-multiple", "device-matches-host"},
        lambda m: m.evidence(PLAN).unlink(),
    ),
    fault(
        "planned for another dataset",
        {"dataset-unchanged"},
        _plan(lambda d: d.update(dataset_digest="0" * 64)),
    ),
    fault(
        "a prompt edited in the evidence",
        {"dataset-unchanged"},
        lambda m: m.edit(m.evidence("02-dataset"), lambda d: d["data"]["samples"][0].update(prompt="x")),
    ),
    fault("both lengths", {"checkpoint-within-steps"}, _config(lambda c: c["train"].update(num_epochs=3))),
    fault("no length", {"checkpoint-within-steps"}, _config(lambda c: c["train"].pop("max_train_steps"))),
    fault(
        "interval beyond the end",
        {"checkpoint-within-steps"},
        _config(lambda c: c["train"].update(checkpointing_steps=61)),
    ),
    fault(
        "interval beyond the epochs' end",
        {"checkpoint-within-steps"},
        _config(lambda c: c.update(train={"num_epochs": 2, "checkpointing_steps": 61})),
    ),
    fault(
        "odd size", {"size-multiple"}, _config(lambda c: c["data"]["processor"].update(target_size=[40, 48]))
    ),
    fault(
        "odd controls",
        {"size-multiple"},
        _config(lambda c: c["data"]["processor"].update(controls_size=[32, 50])),
    ),
    fault("a plan with another multiple", {"size-multiple"}, _plan(lambda d: d.update(size_multiple=8))),
    fault("an unknown family", {"size-multiple"}, _plan(lambda d: d.update(family="flux"))),
    fault(
        "config for another device",
        {"device-matches-host"},
        _config(lambda c: c.update(hardware={"device": "xpu"})),
    ),
    fault("plan for another device", {"device-matches-host"}, _plan(lambda d: d.update(device="cuda"))),
    fault("target of another device", {"device-matches-host"}, _target(device="xpu")),
    fault("planned for another config", {"memory-plan-fits"}, _text("r: 2", "r: 4")),
    fault(
        "peak beyond the budget",
        {"memory-plan-fits"},
        lambda m: (
            _fit(components_gib={"denoiser": 8.5}, peak_gib=8.5, resident_gib=7.0)(m),
            _plan(lambda d: d.update(margin_gib=-0.75))(m),
        ),
    ),
    fault(
        "a peak that fits, but not with its reserve",
        {"memory-plan-fits"},
        lambda m: (
            _fit(components_gib={"denoiser": 7.9}, peak_gib=7.9, resident_gib=7.0)(m),
            _plan(lambda d: d.update(margin_gib=-0.15))(m),
        ),
    ),
    fault("no reserve on an accelerator", {"memory-plan-fits"}, _reserved(0.0, 6.5), shape="xpu"),
    fault(
        "the host's RAM overfilled",
        {"memory-plan-fits"},
        lambda m: (
            _fit(host_gib={"streamed_blocks": 8.2}, host_peak_gib=8.2)(m),
            _plan(lambda d: d.update(margin_gib=-0.2))(m),
        ),
    ),
    fault(
        "device and host too much for the memory that they share",
        {"memory-plan-fits"},
        lambda m: (
            _fit(host_gib={"streamed_blocks": 6.4}, host_peak_gib=6.4)(m),
            _plan(lambda d: d.update(unified_memory=True, margin_gib=-0.15))(m),
        ),
    ),
    fault(
        "a margin that leaves the shared memory out",
        {"memory-plan-fits"},
        _plan(lambda d: d.update(unified_memory=True)),
    ),
    fault("host memory that doesn't add up", {"memory-plan-fits"}, _fit(host_peak_gib=0.5)),
    fault("components that don't add up", {"memory-plan-fits"}, _fit(components_gib={"denoiser": 7.4})),
    fault("a margin that isn't there", {"memory-plan-fits"}, _plan(lambda d: d.update(margin_gib=7.5))),
    fault("resident above peak", {"memory-plan-fits"}, _fit(resident_gib=1.9)),
    fault("disk full", {"memory-plan-fits"}, _plan(lambda d: d["disk"].update(free_gib=0.5))),
    fault(
        "a disk without a GiB to spare", {"memory-plan-fits"}, _plan(lambda d: d["disk"].update(free_gib=1.9))
    ),
)
