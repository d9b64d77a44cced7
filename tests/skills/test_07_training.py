"""Gate 07: healthy runs pass, and each planted fault turns its check and no other."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from gates.selftest.faults.cache import follow, rebuild
from gates.selftest.faults.run_edits import SMOKE_TOO, double_last, metrics, packages, record
from gates.selftest.shapes import resume


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
    follow(made, manifest)


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
    rebuild(lambda dataset, settings: dataset["samples"].pop())(made)
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
    follow(made, manifest)
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


def test_require_device_makes_the_skip_a_fail(made: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(made, "07", require_device="xpu")
    assert_turned(verdict, fail={"smoke/xpu-alloc", "full/xpu-alloc", *SMOKE_TOO})


def test_a_cpu_run_for_an_auto_target_does_not_skip(made: Any, judge: Any, assert_turned: Any) -> None:
    made.edit(".gates/target.json", lambda d: d.update(device="auto"))
    assert_turned(judge(made, "07"), fail={"smoke/xpu-alloc", "full/xpu-alloc", *SMOKE_TOO})


def test_a_one_time_jump_of_memory_is_no_leak(made: Any, judge: Any) -> None:
    metrics("full", lambda lines: [x.update(rss_gib=x["rss_gib"] + 1) for x in lines[44:]] and None)(made)
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
    record(kind, state="running", ended_at=None, done_steps=4)(made)
    metrics(kind, lambda lines: lines[:4])(made)
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
    record(kind, state="failed", outcome="NonFiniteError", reason="step 5: loss nan", done_steps=4)(made)
    metrics(kind, lambda lines: [*lines[:4], {**lines[4], "loss": None, "grad_norm": None}])(made)
    verdict = judge(made, "07")
    assert verdict.first_failure == "stopped-at-max-steps"
    assert verdict.next_command == "set a lower optimizer.init_args.lr in config.yaml, then finetune plan"
    if kind == "full":
        assert _remedy(verdict, "loss-finite") == verdict.next_command


@pytest.mark.parametrize("kind", ["smoke", "full"])
def test_a_run_without_gradient_is_not_only_run_again(kind: str, made: Any, judge: Any) -> None:
    """Base and adapter are as they were: the same run would end the same way."""
    record(kind, state="failed", outcome="NoGradientError", reason="no gradient", done_steps=0)(made)
    metrics(kind, lambda lines: [])(made)
    verdict = judge(made, "07")
    assert verdict.next_command.startswith("set model.lora.target_modules")
    assert verdict.next_command.endswith("then finetune plan")


def test_after_an_upgrade_the_run_of_before_is_run_again(made: Any, judge: Any) -> None:
    """The smoke run is v0: it was launched before the upgrade, the full run after it."""
    packages("full", torch="2.14.0")(made)
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
    packages("smoke", python="3.12.1")(made)
    assert judge(made, "07").next_command == "finetune init"


# ---- lineage


def test_a_resumed_run_that_died_before_its_first_save_is_resumed(
    made: Any, workspaces: Any, judge: Any
) -> None:
    """`--resume latest` takes the -last- of the run that it continued."""
    resume(made)
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


def test_a_resumed_run_is_judged_by_its_lineage(made: Any, workspaces: Any, judge: Any) -> None:
    resume(made)
    verdict = judge(made, "07")
    assert verdict.passes, [c for c in verdict.checks if c.status == "fail"]
    assert verdict.run == "outputs/edit-lora/v2"
    assert "outputs/edit-lora/v1/metrics.jsonl" in {item.path for item in verdict.inputs}


def test_run_option_picks_another_run(made: Any, judge: Any) -> None:
    worse = made.project / "v2"
    shutil.copytree(made.run("full"), worse)
    made.edit(worse / "run.json", lambda d: d.update(state="failed", reason="died", run_id="run-v2"))
    assert not judge(made, "07").passes
    assert judge(made, "07", chosen_run=made.run("full").resolve()).passes


def test_one_last_says_that_the_adapter_is_unharmed(made: Any, judge: Any) -> None:
    double_last(made, "full")
    check = next(c for c in judge(made, "07").checks if c.status == "fail")
    assert "the adapter is unharmed" in check.message and check.remedy == "finetune clean"


@pytest.mark.parametrize("kept", ["checkpoint-last-5-60-last", "checkpoint-last-9-60-last"])
def test_any_of_two_equal_lasts_may_be_cleaned_away(kept: str, made: Any, judge: Any) -> None:
    double_last(made, "full")
    run = made.run("full")
    (gone,) = [path for path in run.glob("checkpoint-last-*-last") if path.name != kept]
    made.edit_lines(
        run / "saves.jsonl",
        lambda lines: lines.append({**lines[-2], "event": "prune", "step": 60, "path": gone.name}),
    )
    shutil.rmtree(gone)
    assert judge(made, "07").passes


def test_the_remedy_is_that_of_the_phase_that_failed(made: Any, judge: Any) -> None:
    double_last(made, "full")
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
