"""The speed scripts at tiny size: they run, their fits are the product's, and what they compute is right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import costs
import measuring
import modes
import peer_steps
import peers
import profile_step
import pytest
import rehearse
import torch
import true_size
from true_size import Shape

from runtime import device as devices
from runtime import files
from runtime.cache import build
from runtime.config.load import load_config
from runtime.config.resolve import resolve
from runtime.demo.series import BASE

CPU = ("--set", "hardware.device=cpu")


def told(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        (Shape(size=(64, 96), tokens=(24,)), {((64, 96), 1, 24)}),
        (Shape(size=(64, 64), controls=2, tokens=(9,)), {((64, 64), 2, 9)}),
        (
            Shape(size=(64, 96), tokens=(18, 33), buckets=2),
            {((64, 96), 1, 18), ((64, 96), 1, 33), ((96, 64), 1, 18), ((96, 64), 1, 33)},
        ),
    ],
)
def test_a_fit_finds_the_cache_that_was_asked_for(tmp_path: Path, shape: Shape, found: set[Any]) -> None:
    """`open_for_fit` refuses an entry of other settings, and a damaged one."""
    workspace = true_size.make(tmp_path / "work", BASE, shape, {"hardware.device": "cpu"})
    job = build.plan(workspace, resolve(workspace, load_config(workspace.config_path).config).config)
    build.open_for_fit(job)
    entries = [job.store.read(want.folder) for want in job.wants]
    assert {
        (
            tuple(8 * side for side in held["target"].shape[1:]),
            sum(name.startswith("control_") for name in held),
            held["prompt_embeds"].shape[0],
        )
        for held in entries
    } == found
    assert len({held["target"].sum().item() for held in entries}) == len(entries) == shape.samples


def test_changes_are_read_as_yaml() -> None:
    given = ["train.compile=true", "train.gradient_checkpointing=selective", "optimizer.init_args.lr=1.0e-3"]
    read = {"train.compile": True, "train.gradient_checkpointing": "selective"}
    assert true_size.read_changes(given) == {**read, "optimizer.init_args.lr": 1e-3}
    with pytest.raises(SystemExit, match="KEY=VALUE"):
        true_size.read_changes(["train.compile"])


def test_peers_beside_ours(call: Any, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv(peer_steps.MUSUBI, raising=False)
    chosen = ("--contenders", "ours-lean", "diffusers-nf4", "musubi-fp8", "--only", "times")
    call(peers.main, "--tiny", "--rows", "nf4-1024", *chosen, "--work", str(tmp_path), *CPU)
    printed = capsys.readouterr().out
    (skipped,) = (line for line in told(printed) if "skipped" in line)
    assert skipped["contender"] == "musubi-fp8" and "MUSUBI_SRC" in skipped["skipped"]
    ours, theirs = (line for line in told(printed) if line.get("kind") == "time")
    assert (ours["contender"], theirs["contender"]) == ("ours-lean", "diffusers-nf4")
    assert ours["steps"] == theirs["steps"] == 2 and ours["ours_to_it"] == 1.0
    assert theirs["ours_to_it"] == pytest.approx(ours["median_s"] / theirs["median_s"], rel=1e-4)
    assert "| nf4-1024 | diffusers-nf4 | ours-lean |" in printed
    run = files.read_json(tmp_path / "64x96" / "outputs" / "edit-lora" / "v0" / "run.json")
    assert run["state"] == "completed" and run["planned_checkpoints"] == [2, 3]
    assert run["resolved"]["model"]["quantize"] == "nf4"


def test_a_failing_contender_is_told_and_the_others_go_on(call: Any, capsys: Any, monkeypatch: Any) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(peer_steps, "diffusers", broken)
    with pytest.raises(AssertionError):
        call(
            peers.main,
            "--tiny",
            "--rows",
            "nf4-384",
            "--contenders",
            "ours-low",
            "diffusers-nf4",
            *CPU,
            "--only",
            "times",
        )
    lines = told(capsys.readouterr().out)
    assert [line["error"] for line in lines if "error" in line] == ["RuntimeError: out of memory"]
    assert [line["contender"] for line in lines if line.get("kind") == "time"] == ["ours-low"]


def test_a_peer_adapts_the_same_layers_and_learns() -> None:
    torch.manual_seed(0)
    config = true_size.read_denoiser(BASE)
    where = devices.pick("cpu")
    (made,) = peer_steps.build(["diffusers"], config, true_size.TINY, where)
    losses = [float(made.step()) for _ in range(2)]
    assert made.adapted == 4 * config["num_layers"] and losses[0] != losses[1]


def test_costs(call: Any, capsys: Any) -> None:
    call(costs.main, "--tiny", *CPU, "--set", "train.cached_modulation=true")
    lines = {line["what"]: line for line in told(capsys.readouterr().out) if "what" in line}
    assert {*costs.PARTS, *costs.ONCE} < set(lines)
    for what, line in lines.items():
        assert line.get("step_s", line.get("each_s")) > 0 or what.startswith("run.json"), what


def test_profile(call: Any, capsys: Any) -> None:
    call(profile_step.main, "--tiny", *CPU)
    printed = capsys.readouterr().out
    (line,) = told(printed)
    assert line["seconds"]["matmul"] > 0 and line["seconds"]["attention"] > 0
    assert line["counts"]["optimizer, clipping"] > 0
    assert sum(line["counts"].values()) == line["kernels"]
    assert "| matmul |" in printed


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNN", "matmul"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(...)", "NF4 dequantize"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdam...>",
            "optimizer, clipping",
        ),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>", "copies"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_add_mm_7", profile_step.OTHER),
        ("triton_tem_fused_addmm_3", "matmul"),
        ("void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>", profile_step.OTHER),
        ("void at::native::elementwise_kernel<..., MulFunctor<float>>", profile_step.OTHER),
    ],
)
def test_kind_of_a_kernel(name: str, kind: str) -> None:
    assert profile_step.kind_of(name) == kind


def test_time_in_which_a_kernel_runs() -> None:
    assert profile_step.covered([(0, 2), (0.5, 0.7), (1, 3), (5, 6)]) == 4.0
    assert profile_step.covered([]) == 0.0


def test_modes(call: Any, capsys: Any) -> None:
    call(modes.main, "--tiny", "--modes", "eager again", "selective", *CPU)
    lines = told(capsys.readouterr().out)
    exact = {line["mode"]: line for line in lines if line.get("kind") == "exact"}
    assert set(exact) == {"eager", "eager again", "selective"}
    for line in exact.values():
        assert line["update"] < 1e-3 and line["same_start"]
    assert exact["eager again"]["update"] == 0.0
    (eager,) = (line for line in lines if line.get("kind") == "shapes")
    assert eager["shapes"] == 4


@pytest.mark.slow
def test_a_rehearsal(call: Any, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Some of its commands, of which each is a process: the rest is the same."""
    monkeypatch.setattr(rehearse, "BEFORE", (["probe", "--host"],))
    monkeypatch.setattr(rehearse, "STAGES", rehearse.STAGES[:1])
    monkeypatch.setattr(rehearse, "GATES", ("01", "02"))
    plain = ("--set", "model.quantize=none", "--set", "model.quantize_text_encoder=none")
    words = (str(BASE), str(tmp_path / "work"), "--tiny", "--machines", "card24", *plain, *CPU)
    call(rehearse.main, *words)
    printed = capsys.readouterr().out
    lines = {line["command"]: line for line in told(printed) if "command" in line}
    assert list(lines) == ["cache"]
    for line in lines.values():
        assert 0.1 < line["rss_gib"] == line["together_gib"] and line["planned_gib"] > 0 < line["seconds"]
    assert told(printed)[-1]["gates"] == {"01": "PASS", "02": "PASS"}
    assert told(printed)[-1]["chosen"]["train.gradient_checkpointing"] is False
    assert load_config(tmp_path / "work" / "config.yaml").config.hardware.memory_limit_gib == 22.8
    assert "| card24 | 22.8 | cache |" in printed


def test_a_plan_beyond_the_graphics_ceiling_is_an_error() -> None:
    """Of 16 GiB with the ceiling raised it is 11.1, though host and device may fill 12.5 together."""
    fits = {"phases": {"fit": {"peak_gib": 8.0, "reserve_gib": 3.0}}}
    rehearse.within_ceiling("pc16-raised", fits)
    with pytest.raises(RuntimeError, match=r"fit: 11\.20 GiB planned, the graphics may fill 11\.11"):
        rehearse.within_ceiling("pc16-raised", {"phases": {"fit": {"peak_gib": 8.2, "reserve_gib": 3.0}}})


def test_peaks_between_two_looks_are_seen(monkeypatch: Any) -> None:
    """The product sets the device's peak back at each step; what it was then counts."""
    peak = [7.0]
    monkeypatch.setattr(measuring, "LOOK_S", 60.0)
    seen = devices.Memory(alloc_gib=0.0, reserved_gib=2.0, peak_gib=0.0, rss_gib=3.0)
    monkeypatch.setattr(devices, "memory", lambda device: replace(seen, peak_gib=peak[0]))
    monkeypatch.setattr(devices, "reset_peak", lambda device: peak.__setitem__(0, 1.0))
    plain = devices.reset_peak
    with measuring.watching(devices.pick("cpu")) as watched:
        devices.reset_peak(devices.pick("cpu"))
        assert peak == [1.0]
    assert watched.memory.peak_gib == 7.0 and watched.together_gib == 5.0
    assert devices.reset_peak is plain


def test_distance_of_weights_and_of_the_update() -> None:
    before = torch.tensor([3.0, 4.0])
    eager = modes.Weights(before=before, after=torch.tensor([3.0, 6.0]))
    other = modes.Weights(before=before, after=torch.tensor([4.0, 6.0]))
    found = modes.compared(other, eager)
    assert found == {"weights": pytest.approx(1 / 45**0.5), "update": 0.5, "same_start": True}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"update": 0.04}, "update 0.04"),
        ({"same_start": False}, "update"),
        ({"grown_gib": 0.001}, "0.001 GiB more"),
    ],
)
def test_a_mode_that_trains_otherwise_or_grows_is_an_error(wrong: dict[str, Any], told: str) -> None:
    line = {"same_start": True, "update": 0.02, "grown_gib": 0.0}
    modes.judge(line)
    with pytest.raises(RuntimeError, match=told):
        modes.judge({**line, **wrong})


def test_compilations_are_counted() -> None:
    measuring.fresh_compiler()
    twice = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for size in (2, 3, 3, 4):
        twice(torch.ones(size))
    assert measuring.compilations() == {"compiled_graphs": 3, "recompiles": 2, "graph_breaks": 0}
    measuring.fresh_compiler()
    assert measuring.compilations() == {"compiled_graphs": 0, "recompiles": 0, "graph_breaks": 0}


def test_a_step_is_timed_without_the_turn_of_others(monkeypatch: Any) -> None:
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    watch = measuring.Watch(devices.pick("cpu"), lambda step: pass_time(100.0))
    pass_time(7.0)
    watch.start("fit", 2)
    for step, seconds in ((1, 2.0), (2, 3.0)):
        pass_time(seconds)
        watch.update(step)
    assert watch.times == [2.0, 3.0]
