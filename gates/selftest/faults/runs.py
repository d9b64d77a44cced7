"""Faults of gate 07: what its runs rest on, and the smoke run."""

import shutil

from gates.selftest.faults.row import Fault, each, fault
from gates.selftest.faults.run_edits import (
    ADAPTER,
    INPUTS,
    SMOKE_TOO,
    config,
    double_last,
    metrics,
    override,
    packages,
    record,
    truncate,
)

FAULTS: tuple[Fault, ...] = (
    fault("no runs", INPUTS, lambda m: shutil.rmtree(m.project)),
    fault("no full run", {"full/run-matches-inputs"}, lambda m: shutil.rmtree(m.run("full"))),
    fault("no smoke run", {"smoke/run-matches-inputs", *SMOKE_TOO}, lambda m: shutil.rmtree(m.run("smoke"))),
    fault(
        "another learning rate than the runs'",
        INPUTS,
        config(lambda c: c.update(optimizer={"init_args": {"lr": 0.5}})),
    ),
    fault(
        "more steps than the full run's",
        {"full/run-matches-inputs"},
        config(lambda c: c["train"].update(max_train_steps=80)),
    ),
    fault(
        "another dataset than the full run's",
        {"full/run-matches-inputs"},
        record("full", dataset_digest="0" * 64),
    ),
    fault(
        "another cache than the smoke run's",
        {"smoke/run-matches-inputs", *SMOKE_TOO},
        record("smoke", cache_digest="0" * 64),
    ),
    fault(
        "the base changed",
        INPUTS,
        lambda m: (m.root / "models/base/transformer/config.json").write_text("{}", encoding="utf-8"),
    ),
    fault(
        "a config digest of something else",
        {"full/run-matches-inputs"},
        record("full", config_digest="0" * 64),
    ),
    fault(
        "an override in the full run",
        {"full/run-matches-inputs"},
        override("full", "optimizer.init_args.lr", 0.0001),
    ),
    fault(
        "an override of something else in the smoke run",
        {"smoke/run-matches-inputs", *SMOKE_TOO},
        override("smoke", "train.seed", 42),
    ),
    fault(
        "resolved to another rank",
        {"full/run-matches-inputs"},
        lambda m: m.edit(m.run("full") / "run.json", lambda d: d["resolved"]["model"]["lora"].update(r=8)),
    ),
    fault(
        "smoke run on another Python",
        {"smoke/environment-as-judged", *SMOKE_TOO},
        packages("smoke", python="3.12.1"),
    ),
    fault("full run with another torch", SMOKE_TOO, packages("full", torch="2.12.0")),
    fault(
        "no peft",
        {"smoke/environment-as-judged", "full/environment-as-judged", *SMOKE_TOO},
        lambda m: (packages("smoke", peft="absent")(m), packages("full", peft="absent")(m)),
    ),
    fault(
        "run on another device",
        {"full/environment-as-judged", "full/xpu-alloc"},
        record("full", device={"type": "cuda", "name": "x", "total_gib": 1.0}),
    ),
    fault(
        "the smoke run did not stop",
        {"smoke/stopped-at-max-steps", *SMOKE_TOO},
        metrics("smoke", lambda lines: lines.append({**lines[-1], "step": 6})),
    ),
    fault(
        "a smoke run of 60 steps",
        {"smoke/stopped-at-max-steps", *SMOKE_TOO},
        each(
            lambda m: shutil.rmtree(m.run("smoke")),
            lambda m: shutil.copytree(m.run("full"), m.run("smoke")),
            record("smoke", kind="smoke", run_id="run-v0"),
        ),
    ),
    fault(
        "one step too many",
        {"full/stopped-at-max-steps"},
        metrics("full", lambda lines: lines.append({**lines[-1], "step": 61})),
    ),
    fault(
        "a step twice",
        {"full/stopped-at-max-steps"},
        metrics("full", lambda lines: lines.insert(30, lines[30])),
    ),
    fault(
        "a step missing",
        {"full/stopped-at-max-steps"},
        metrics("full", lambda lines: lines.pop(30) and None),
    ),
    fault(
        "interrupted",
        {"full/stopped-at-max-steps"},
        record("full", state="interrupted", done_steps=60, reason="SIGINT"),
    ),
    fault("failed", {"full/stopped-at-max-steps"}, record("full", state="failed", reason="OutOfMemoryError")),
    fault(
        "planned for other steps than configured",
        {"full/stopped-at-max-steps", "full/resumable-last"},
        record("full", planned_steps=59, done_steps=59),
    ),
    fault(
        "no metrics",
        {"full/stopped-at-max-steps", "full/loss-finite", "full/memory-stable"},
        lambda m: (m.run("full") / "metrics.jsonl").unlink(),
    ),
    fault(
        "the first step died",
        {"smoke/stopped-at-max-steps", "smoke/first-step-completed", *SMOKE_TOO},
        lambda m: (metrics("smoke", lambda lines: [])(m), record("smoke", state="failed", done_steps=0)(m)),
    ),
    fault(
        "the first loss is null",
        {"smoke/first-step-completed", *SMOKE_TOO},
        metrics("smoke", lambda lines: lines[0].update(loss=None)),
    ),
    fault(
        "no smoke checkpoint",
        {"smoke/checkpoint-written", *SMOKE_TOO},
        lambda m: m.edit_lines(
            m.run("smoke") / "saves.jsonl", lambda lines: [x for x in lines if x["kind"] == "last"]
        ),
    ),
    fault(
        "a smoke checkpoint cut short",
        {"smoke/checkpoint-written", *SMOKE_TOO},
        truncate(lambda m: m.run("smoke") / "checkpoint-0-5" / ADAPTER),
    ),
    fault(
        "two -last- in the smoke run",
        {"smoke/one-last-checkpoint", *SMOKE_TOO},
        lambda m: double_last(m, "smoke"),
    ),
    fault(
        "run.json with a key twice",
        set(),
        lambda m: (m.run("full") / "run.json").write_text('{"state": 1, "state": 2}', encoding="utf-8"),
        errors=INPUTS,
    ),
    fault(
        "a torn line in the middle",
        set(),
        lambda m: (m.run("full") / "probe.jsonl").write_text('{"step": 0\n{}\n', encoding="utf-8"),
        errors={"full/loss-fell"},
    ),
    fault(
        "a resumed run whose ancestor is another",
        set(),
        record(
            "full",
            resumed_from={
                "run_id": "x",
                "run": "v0",
                "step": 3,
                "checkpoint": "c",
                "digest": "0" * 64,
            },
        ),
        errors={
            "full/stopped-at-max-steps",
            "full/loss-finite",
            "full/adapter-only",
            "full/memory-stable",
            "full/resumable-last",
        },
    ),
    fault(
        "smoke run on another device",
        {"smoke/environment-as-judged", "smoke/xpu-alloc", *SMOKE_TOO},
        record("smoke", device={"type": "cuda", "name": "x", "total_gib": 1.0}),
    ),
    fault(
        "the smoke run's record begins with step 2",
        {"smoke/stopped-at-max-steps", "smoke/first-step-completed", *SMOKE_TOO},
        metrics("smoke", lambda lines: lines[1:]),
    ),
    fault(
        "the smoke checkpoint was removed",
        {"smoke/checkpoint-written", *SMOKE_TOO},
        lambda m: shutil.rmtree(m.run("smoke") / "checkpoint-0-5"),
    ),
    fault(
        "three -last- in the smoke run",
        {"smoke/one-last-checkpoint", *SMOKE_TOO},
        each(lambda m: double_last(m, "smoke"), lambda m: double_last(m, "smoke", epoch=10)),
    ),
    fault(
        "no -last- in the smoke run",
        {"smoke/one-last-checkpoint", *SMOKE_TOO},
        lambda m: shutil.rmtree(next(m.run("smoke").glob("checkpoint-last-*"))),
    ),
    fault(
        "the smoke run allocated next to nothing",
        {"smoke/xpu-alloc", *SMOKE_TOO},
        metrics("smoke", lambda lines: [{**line, "alloc_gib": 0.01} for line in lines]),
        shape="xpu",
    ),
    fault(
        "a smoke step on the CPU",
        {"smoke/xpu-alloc", *SMOKE_TOO},
        metrics("smoke", lambda lines: lines[2].update(device="cpu")),
        shape="cuda",
    ),
    fault(
        "auto resolved to the CPU",
        {"smoke/xpu-alloc", "full/xpu-alloc", *SMOKE_TOO},
        lambda m: m.edit(".gates/target.json", lambda d: d.update(device="auto")),
    ),
)
