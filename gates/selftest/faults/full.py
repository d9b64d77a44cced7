"""Faults of gate 07: what the full run learned, wrote and left."""

import shutil

import numpy as np
from safetensors.numpy import save_file

from gates.selftest.faults.row import Fault, each, fault
from gates.selftest.faults.run_edits import (
    ADAPTER,
    LAST,
    adapter,
    double_last,
    drop_save,
    grow,
    merge,
    merge_state,
    metrics,
    nan_line,
    nan_memory,
    no_fall,
    one_nan,
    packages,
    probes,
    small_fall,
    state_of,
    truncate,
    zero_up,
)

FAULTS: tuple[Fault, ...] = (
    fault("the loss is NaN", {"full/loss-finite"}, nan_line),
    fault(
        "the loss is null", {"full/loss-finite"}, metrics("full", lambda lines: lines[5].update(loss=None))
    ),
    fault(
        "the gradient is null",
        {"full/loss-finite"},
        metrics("full", lambda lines: lines[5].update(grad_norm=None)),
    ),
    fault("one probe item fell alone", {"full/loss-fell"}, probes(no_fall)),
    fault("the fall is too small", {"full/loss-fell"}, probes(small_fall)),
    fault("no last probe", {"full/loss-fell"}, probes(lambda lines: lines[:-1])),
    fault("no first probe", {"full/loss-fell"}, probes(lambda lines: lines[1:])),
    fault(
        "probes of other items",
        {"full/loss-fell"},
        probes(lambda lines: [item.update(noise=99) for item in lines[-1]["items"]] and None),
    ),
    fault(
        "a probe loss is null",
        {"full/loss-fell"},
        probes(lambda lines: lines[-1]["items"][-1].update(loss=None)),
    ),
    fault("no probe at all", {"full/loss-fell"}, lambda m: (m.run("full") / "probe.jsonl").unlink()),
    fault(
        "a checkpoint not saved",
        {"full/checkpoints-on-schedule"},
        lambda m: m.edit_lines(m.run("full") / "saves.jsonl", drop_save),
    ),
    fault(
        "a checkpoint removed by hand",
        {"full/checkpoints-on-schedule"},
        lambda m: shutil.rmtree(m.run("full") / "checkpoint-3-40"),
    ),
    fault(
        "a checkpoint cut short",
        {"full/checkpoints-on-schedule"},
        truncate(lambda m: m.run("full") / "checkpoint-5-60" / ADAPTER),
    ),
    fault("base weights in a checkpoint", {"full/adapter-only"}, merge),
    fault("base weights in the state", {"full/adapter-only"}, merge_state),
    fault(
        "a merged model beside the adapter",
        {"full/adapter-only"},
        lambda m: save_file(
            {"w": np.ones(9, np.float32)}, m.run("full") / "checkpoint-3-40" / "model.safetensors"
        ),
    ),
    fault(
        "fewer parameters than trained",
        {"full/adapter-only"},
        lambda m: m.edit(m.run("full") / "run.json", lambda d: d["trainable"].update(parameters=1)),
    ),
    fault(
        "an adapter as large as the base",
        {"full/adapter-only"},
        lambda m: m.edit(m.run("full") / "run.json", lambda d: d["trainable"].update(base_parameters=2500)),
    ),
    fault("most of lora_B is zero", {"full/adapter-learned"}, adapter(zero_up)),
    fault("a weight is NaN", {"full/adapter-learned"}, adapter(one_nan)),
    fault(
        "nothing moved after the first checkpoint",
        {"full/adapter-learned"},
        adapter(lambda name, tensor: tensor * 0 + np.float32(1.0), (20, 60)),
    ),
    fault("resident memory grows", {"full/memory-stable"}, grow("rss_gib", 2.0)),
    fault("a resident memory is NaN", {"full/memory-stable"}, nan_memory),
    fault(
        "-last- without optimizer",
        {"full/resumable-last"},
        lambda m: (m.run("full") / LAST / "optimizer.bin").unlink(),
    ),
    fault(
        "-last- with another model",
        {"full/resumable-last"},
        lambda m: (m.run("full") / LAST / "random_states_0.pkl").write_bytes(b"x" * 19),
    ),
    fault("-last- of another step", {"full/resumable-last"}, state_of(40)),
    fault("two -last- in the full run", {"full/one-last-checkpoint"}, lambda m: double_last(m, "full")),
    fault(
        "near zero",
        {"full/xpu-alloc"},
        metrics("full", lambda lines: [x.update(alloc_gib=0.01) for x in lines] and None),
        shape="xpu",
    ),
    fault(
        "steps on the cpu",
        {"full/xpu-alloc"},
        metrics("full", lambda lines: lines[7].update(device="cpu")),
        shape="xpu",
    ),
    fault("allocated memory grows", {"full/memory-stable"}, grow("alloc_gib", 0.5), shape="xpu"),
    fault(
        "three -last- in the full run",
        {"full/one-last-checkpoint"},
        each(lambda m: double_last(m, "full"), lambda m: double_last(m, "full", epoch=10)),
    ),
    fault(
        "no -last- in the full run",
        {"full/one-last-checkpoint", "full/resumable-last"},
        lambda m: shutil.rmtree(next(m.run("full").glob("checkpoint-last-*"))),
    ),
    fault(
        "full run on another Python",
        {"full/environment-as-judged", "full/smoke-passed-as-configured"},
        packages("full", python="3.12.1"),
    ),
    fault(
        "the CUDA run allocated next to nothing",
        {"full/xpu-alloc"},
        metrics("full", lambda lines: [{**line, "alloc_gib": 0.01} for line in lines]),
        shape="cuda",
    ),
)
