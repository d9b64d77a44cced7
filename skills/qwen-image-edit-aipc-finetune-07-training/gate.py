"""gate check 07: cache, smoke fit and full fit, judged by what they left on disk."""

from gates import judging, runs
from gates.cache_checks import CACHE
from gates.checks import Checks, Finding, Gate, failed, listing, shared, skipped, verdict_of
from gates.judging import finite
from gates.statistics import T_LIMIT, WINDOWS, paired
from gates.training import FIT, RESUME, RunEvidence, Training, collect
from gates.verdict import Check, EvidenceRef

SMOKE_STEPS_MAX = 10  # the seed's 5 to 10; more is a run of its own
PROBE_PAIRS_MIN = 8  # below that a t statistic says little
LEFT_OUT_MAX = 0.01  # of the steps: a rare overflow is harmless where its update is left out
LOSS_DROP_MIN = 0.02  # of the probe's mean; a run that learned nothing stays within a thousandth
LOSS_T_MIN = T_LIMIT  # one-sided, over items and over samples: by chance alone less than once in 100 runs
ADAPTER_SHARE_MAX = 0.25  # of the base in bf16; rank 16 takes 0.2 % of the 20B model, a merged base 100 %
LEARNED_NORM_MIN = 1e-6  # of the largest lora_A; one update at a rate of 1e-4 makes some thousandths
LEARNED_SHARE_MIN = 0.90  # of lora_B tensors moved: they start at zero, and a cut graph leaves most there
STABLE_STEPS_MIN = 50  # fewer steps show warm-up, not a trend
ALLOC_GROWTH_MAX = 0.1 / 1024  # GiB a step; the allocator's counter is exact, and 1,000 steps make 100 MiB
RSS_GROWTH_MAX = 0.45 / 1024  # GiB a step; below half of the 1 MiB of a leak, for the estimate scatters
RESIDENT_SHARE_MIN = 0.5  # of the planned resident bytes; less means that the model is somewhere else

SMOKE_KEYS = ("train.max_train_steps", "train.num_epochs", "train.checkpointing_steps")
LOWER_RATE = "set a lower optimizer.init_args.lr in config.yaml, then finetune plan"
OTHER_TARGETS = (
    "set model.lora.target_modules to linears that the prediction passes through, such as to_q, to_k, to_v and "
    "to_out.0, in config.yaml, then finetune plan"
)
# What a run met that met it again if it were only run again, for its draws are fixed.
CHANGE_FIRST = {"NonFiniteError": LOWER_RATE, "NoGradientError": OTHER_TARGETS}
TRAIN_MORE = (
    "set more train.max_train_steps or a higher optimizer.init_args.lr in config.yaml, then finetune plan"
)
PACKAGES = ("python", "torch", "diffusers", "transformers", "peft", "safetensors")


# ---- phases smoke and full

SMOKE: Checks[RunEvidence] = Checks("smoke")
FULL: Checks[RunEvidence] = Checks("full")
NEEDS_RUN = ("run-matches-inputs",)
BOTH = {SMOKE: FIT["smoke"], FULL: FIT["full"]}  # and what makes the run of each


@shared(
    BOTH,
    "run-matches-inputs",
    title="The run used this config, dataset, cache and base",
    section="7.4",
    why="a judgement of another run than the one configured says nothing",
)
def run_matches_inputs(e: RunEvidence) -> Finding:
    """config.yaml (validation and resume left out) and the digests in run.json against those of now."""
    faults = judging.input_faults(e, SMOKE_KEYS if e.phase == "smoke" else ())
    return verdict_of(
        not faults,
        listing(faults) or e.run.get().path,
        expected=0,
        observed=len(faults),
        unit="differences",
        evidence=(e.line("run.json"),),
    )


@shared(
    BOTH,
    "environment-as-judged",
    title="The run had the target's device, Python and packages",
    section="7.4",
    needs=NEEDS_RUN,
    why="a smoke test in another environment than the full run proves nothing about it",
)
def environment_as_judged(e: RunEvidence) -> Finding:
    """Device and interpreter of run.json against target.json, and the packages that training needs."""
    wanted = e.target["device"] if e.target["device"] != "auto" else e.plan.get()["device"]
    packages, device = e.record["packages"], e.record["device"]["type"]
    faults = judging.environment_faults(e, wanted, PACKAGES)
    return verdict_of(
        not faults,
        listing(faults) or f"{device}, Python {packages['python']}, torch {packages['torch']}",
        expected={"device": wanted, "python": e.target["python"]},
        observed={"device": device, "python": packages.get("python")},
        evidence=(e.line("run.json"),),
        # Another run by the same interpreter changes nothing: the target has to name this one.
        remedy="finetune init" if any(fault.startswith("Python ") for fault in faults) else None,
    )


@FULL.check(
    "smoke-passed-as-configured",
    title="A smoke run of the same config and packages passes now",
    section="7.4",
    remedy=FIT["smoke"],
    needs=NEEDS_RUN,
    why="five steps find in a minute what a full run finds after hours",
)
def smoke_passed_as_configured(e: RunEvidence) -> Finding:
    """The newest smoke run judged anew; its config, the overridden keys left out, and its packages."""
    assert e.smoke is not None
    record = e.smoke.record
    if record["state"] == "running":
        return failed("the smoke run is still running", expected="completed", observed="running")
    faults = [
        f"smoke {check.id}: {check.message}"
        for check in SMOKE.run(e.smoke)
        if check.required and check.status != "pass" and not check.excused
    ]
    faults += judging.config_differences(record["config"], e.record["config"], SMOKE_KEYS)
    changed = judging.package_faults(record, e.record)
    # Whichever was launched first has to be run again with what is installed now.
    full_is_older = not faults and bool(changed) and judging.is_older(e.run.get(), e.smoke.run.get())
    faults += changed
    return verdict_of(
        not faults,
        listing(faults) or e.smoke.run.get().path,
        expected=0,
        observed=len(faults),
        unit="faults",
        remedy=FIT["full"] if full_is_older else None,
    )


@shared(
    BOTH,
    "stopped-at-max-steps",
    title="It stopped at the planned step, no earlier and no later",
    section="7.4",
    needs=NEEDS_RUN,
    why="a trainer that ignores max_train_steps runs for epochs; one that died has no result",
)
def stopped_at_max_steps(e: RunEvidence) -> Finding:
    """Planned steps as configured, and metrics of the lineage with each step from 1 to it, once, in order."""
    record = e.record
    configured = record["resolved"]["train"]["max_train_steps"] or e.plan.get()["steps"]["planned"]
    steps = [line["step"] for line in e.run.get().metrics.get()]
    faults = judging.step_faults(record, steps, configured)
    if e.phase == "smoke" and record["planned_steps"] > SMOKE_STEPS_MAX:
        faults.append(f"{record['planned_steps']} steps are no smoke run; {SMOKE_STEPS_MAX} are the most")
    return verdict_of(
        not faults,
        listing(faults),
        expected=record["planned_steps"],
        observed=max(steps, default=0),
        unit="steps",
        evidence=(e.line("metrics.jsonl"),),
        remedy=_going_on(e),
    )


def _going_on(e: RunEvidence) -> str | None:
    """What leads on from a run that did not end: other numbers, its own continuation, or a new run."""
    if e.record["outcome"] in CHANGE_FIRST:
        return CHANGE_FIRST[e.record["outcome"]]
    stopped = e.phase == "full" and e.record["state"] in ("interrupted", "failed")
    return RESUME if stopped and e.run.get().resumable else None


@SMOKE.check(
    "first-step-completed",
    title="Step 1 completed",
    section="7.4",
    remedy=FIT["smoke"],
    needs=NEEDS_RUN,
    why="dtype, device and driver faults kill the first step, often without a traceback",
)
def first_step_completed(e: RunEvidence) -> Finding:
    """The first record of metrics.jsonl: its step, and a finite loss."""
    lines = e.run.get().metrics.get()
    first = lines[0] if lines else {"step": None, "loss": None}
    met = CHANGE_FIRST.get(e.record["outcome"])
    if met is None and lines and not finite(first["loss"]):
        met = LOWER_RATE
    return verdict_of(
        first["step"] == 1 and finite(first["loss"]),
        f"loss {first['loss']}" if lines else f"no step was recorded; the run says: {e.record['reason']}",
        expected="step 1 with a finite loss",
        observed={"step": first["step"], "loss": first["loss"]},
        evidence=(e.line("metrics.jsonl"),),
        remedy=met,
    )


@FULL.check(
    "loss-finite",
    title="Loss and gradient stayed finite",
    section="7.4",
    remedy=LOWER_RATE,
    needs=NEEDS_RUN,
    why="one NaN spreads into every weight of the adapter",
)
def loss_finite(e: RunEvidence) -> Finding:
    """loss and grad_norm of every step; NaN, infinity and null are not finite. Steps left out: at most 1 in 100."""
    lines = e.run.get().metrics.get()
    left_out = [line for line in lines if line.get("skipped")]
    few = len(left_out) <= len(lines) * LEFT_OUT_MAX and not (lines and lines[-1].get("skipped"))
    bad = [
        f"step {line['step']}: {name} {line[name]}"
        for line in lines
        for name in ("loss", "grad_norm")
        if not finite(line[name]) and not (few and line.get("skipped"))
    ]
    return verdict_of(
        bool(lines) and not bad,
        listing(bad) or f"{len(lines)} steps, {len(left_out)} left out as not finite",
        expected=0,
        observed=len(bad) if lines else "no steps",
        unit="values",
        evidence=(e.line("metrics.jsonl"),),
    )


@FULL.check(
    "loss-fell",
    title="The loss on the fixed probe fell",
    section="7.4",
    remedy=TRAIN_MORE,
    needs=(*NEEDS_RUN, "stopped-at-max-steps", "loss-finite"),
    why="a step's loss swings with its sigma; on equal sample, sigma and noise the fall is the learning",
)
def loss_fell(e: RunEvidence) -> Finding:
    """Step 0 against the last probe, item by item of the training samples: relative drop, and the paired t over
    items or over samples, whichever is smaller, for the draws of one sample move together."""
    probes = e.run.get().probes.get()
    by_step = {line["step"]: line for line in probes}
    planned = e.record["planned_steps"]
    if 0 not in by_step or planned not in by_step:
        return failed(
            "the probe lacks its first or last measurement",
            expected=[0, planned],
            observed=sorted(by_step),
            remedy=FIT["full"],
        )
    first, last = (judging.losses(by_step[step], "train") for step in (0, planned))
    if first.keys() != last.keys():
        return failed(
            "the probe is not of the same items",
            expected=len(first),
            observed=len(first.keys() & last.keys()),
            remedy=FIT["full"],
        )
    if not all(map(finite, [*first.values(), *last.values()])):
        return failed("the probe is not finite", expected="finite pairs", observed=None, remedy=LOWER_RATE)
    if len(first) < PROBE_PAIRS_MIN:
        return failed(
            "too few probe items",
            expected=f"at least {PROBE_PAIRS_MIN}",
            observed=len(first),
            remedy="set more train.probe_samples or train.probe_draws in config.yaml, then finetune plan",
        )
    samples = [sample for sample, _, _ in first]
    result = paired(list(first.values()), [last[item] for item in first], samples)
    limit = max(LOSS_T_MIN, result.limit)
    held = [by_step[step]["holdout_mean"] for step in (0, planned)]
    told = f"; held out {held[0]:.4f} -> {held[1]:.4f}" if all(map(finite, held)) else "; nothing held out"
    return verdict_of(
        result.relative_drop >= LOSS_DROP_MIN and result.t > limit,
        f"{result.before:.4f} -> {result.after:.4f} over {result.count} items{told}",
        expected={"relative_drop": f">= {LOSS_DROP_MIN}", "t": f"> {limit:g}"},
        observed={"relative_drop": round(result.relative_drop, 4), "t": round(result.t, 2)},
        evidence=(e.line("probe.jsonl"),),
    )


@SMOKE.check(
    "checkpoint-written",
    title="A checkpoint was written at the last step",
    section="7.4",
    remedy=FIT["smoke"],
    needs=(*NEEDS_RUN, "stopped-at-max-steps"),
    why="a run whose checkpoint can't be written is found now, not at its end",
)
def checkpoint_written(e: RunEvidence) -> Finding:
    """The checkpoint of the planned step: its files as recorded at the save, its tensors readable."""
    found = {item.step: item for item in e.run.get().checkpoints.get()}
    planned = e.record["planned_steps"]
    if planned not in found:
        return failed(
            f"no checkpoint of step {planned}", expected=planned, observed=sorted(found), unit="step"
        )
    faults = found[planned].faults
    return verdict_of(
        not faults and bool(found[planned].tensors.get()),
        listing(faults) or found[planned].path,
        expected=planned,
        observed=planned if not faults else "damaged",
        unit="step",
        evidence=(EvidenceRef(path=found[planned].path),),
    )


@FULL.check(
    "checkpoints-on-schedule",
    title="Every planned checkpoint was written and is whole",
    section="7.4",
    remedy=FIT["full"],
    needs=(*NEEDS_RUN, "stopped-at-max-steps"),
    why="step 08 may take any of them, and a later one may have overfitted",
)
def checkpoints_on_schedule(e: RunEvidence) -> Finding:
    """Saves of the lineage against the planned steps; those not pruned lie on disk with their digests."""
    run = e.run.get()
    faults, saved = judging.schedule_faults(run), judging.saved_steps(run)
    kept, planned = len(run.checkpoints.get()), sorted(run.planned_checkpoints.get())
    return verdict_of(
        bool(kept) and not faults,
        listing(faults) or f"{len(saved)} written, {len(saved) - kept} pruned",
        expected=planned,
        observed=sorted(saved),
        unit="step",
        evidence=(e.line("saves.jsonl"),),
    )


@FULL.check(
    "adapter-only",
    title="Checkpoints hold the adapter and nothing of the base",
    section="7.4",
    remedy=FIT["full"],
    needs=NEEDS_RUN,
    why="a merged base fills the disk and can't be applied to the base again in step 08",
)
def adapter_only(e: RunEvidence) -> Finding:
    """Tensor names, numbers of parameters and sizes of all adapter files, and files that no save recorded."""
    faults = judging.adapter_faults(e.run.get(), ADAPTER_SHARE_MAX)
    files = judging.adapter_files(e.run.get())
    return verdict_of(
        bool(files) and not faults,
        listing(faults) or f"{len(files)} files",
        expected=0,
        observed=len(faults),
        unit="faults",
    )


@FULL.check(
    "adapter-learned",
    title="The adapter's weights moved",
    section="7.4",
    remedy=TRAIN_MORE,
    needs=(*NEEDS_RUN, "checkpoints-on-schedule"),
    why="a cut graph leaves lora_B at zero while the loss looks like any other",
)
def adapter_learned(e: RunEvidence) -> Finding:
    """lora_B of the last checkpoint: all finite, nine in ten beyond a millionth of lora_A; and the first differs."""
    checkpoints = e.run.get().checkpoints.get()
    if not checkpoints or checkpoints[-1].facts is None:
        return failed(
            "no checkpoint is left to look at", expected="at least 1", observed=0, remedy=FIT["full"]
        )
    facts = checkpoints[-1].facts.get()
    up = {name: fact for name, fact in facts.items() if ".lora_B" in name}
    infinite = sorted(name for name, fact in facts.items() if not fact.finite)
    scale = max((fact.norm for name, fact in facts.items() if ".lora_A" in name), default=0.0)
    moved = sum(fact.norm > LEARNED_NORM_MIN * scale for fact in up.values())
    same = len(checkpoints) > 1 and checkpoints[0].facts is not None and checkpoints[0].facts.get() == facts
    share = moved / len(up) if up else 0.0
    faults = [f"{name} is not finite" for name in infinite]
    faults += [f"{len(up) - moved} of {len(up)} lora_B have not moved"] if share < LEARNED_SHARE_MIN else []
    faults += ["the last checkpoint equals the first"] if same else []
    return verdict_of(
        not faults,
        listing(faults) or f"{moved} of {len(up)} lora_B tensors moved",
        expected=f">= {LEARNED_SHARE_MIN}",
        observed=round(share, 3),
        remedy=LOWER_RATE if infinite else None,
        evidence=(EvidenceRef(path=f"{checkpoints[-1].path}/{runs.ADAPTER}", locator="lora_B"),),
    )


@FULL.check(
    "memory-stable",
    title="Memory does not grow from step to step",
    section="7.5",
    remedy="close what shares the memory, then finetune fit",
    needs=NEEDS_RUN,
    may_skip=f"the run has fewer than {STABLE_STEPS_MIN} steps, or too few of one shape in its second half",
    why="a leak of one MiB a step ends a run of a day in its last hour",
)
def memory_stable(e: RunEvidence) -> Finding:
    """The rise of allocated (on CPU: resident) memory a step, over the second half, shape by shape; one jump is
    forgiven, and what noise may have made; finite."""
    lines, planned = e.run.get().metrics.get(), e.record["planned_steps"]
    cpu = e.record["device"]["type"] == "cpu"
    name, limit = ("rss_gib", RSS_GROWTH_MAX) if cpu else ("alloc_gib", ALLOC_GROWTH_MAX)
    if planned < STABLE_STEPS_MIN:
        return skipped(f"{planned} steps show no trend", expected=f">= {STABLE_STEPS_MIN}", observed=planned)
    rise = judging.memory_growth(lines, name, after=planned / 2)
    if rise is None:
        return skipped(f"no shape has {2 * WINDOWS} steps in the second half")
    return verdict_of(
        rise <= limit,
        f"{name} rises by {rise * 1024:.3f} MiB a step" if finite(rise) else f"{name} is not finite",
        expected=f"at most {limit * 1024:g}",
        observed=round(rise * 1024, 4),
        unit="MiB/step",
        evidence=(e.line("metrics.jsonl"),),
    )


@FULL.check(
    "resumable-last",
    title="The run can be resumed from its end",
    section="7.6",
    remedy=FIT["full"],
    needs=NEEDS_RUN,
    why="only a whole -last- carries optimizer, schedule and counters",
)
def resumable_last(e: RunEvidence) -> Finding:
    """The newest -last-: six files with the digests of their save, and the step of the run's end."""
    last, faults = e.run.get().last.get(), judging.last_faults(e.run.get())
    return verdict_of(
        not faults,
        listing(faults) or last.path,
        expected=e.record["done_steps"],
        observed=last.step,
        unit="step",
        evidence=(EvidenceRef(path=last.path),),
    )


@shared(
    BOTH,
    "one-last-checkpoint",
    title="The run left one checkpoint-last-*-last",
    section="7.4",
    remedy="finetune clean",
    needs=NEEDS_RUN,
    why="several are the tell of an epoch loop that does not end; they cost disk and time",
)
def one_last_checkpoint(e: RunEvidence) -> Finding:
    """The number of checkpoint-last-*-last folders in the run."""
    names = e.run.get().last_folders
    many = "the adapter is unharmed, nothing is to be trained again: " + listing(names)
    return verdict_of(
        len(names) == 1,
        many if len(names) > 1 else listing(names) or "none was written",
        expected=1,
        observed=len(names),
        remedy=None if names else FIT[e.phase],
    )


@shared(
    BOTH,
    "xpu-alloc",
    title="The model was on the XPU",
    section="7.4",
    needs=NEEDS_RUN,
    may_skip="the target is the cpu and the run was on the cpu",
    why="a fall-back to the CPU passes every other check, and takes days",
)
def xpu_alloc(e: RunEvidence) -> Finding:
    """The most memory allocated, read inside the training process, against the plan's resident size."""
    device, target = e.record["device"]["type"], e.target["device"]
    title = f"The model was on the {device}" if device != "xpu" else None
    if e.require_device not in (None, device):
        return failed(f"the run was on the {device}", expected=e.require_device, observed=device, title=title)
    if device == "cpu" == target:
        return skipped("the target is the cpu: no accelerator was used", observed="cpu", title=title)
    if device == "cpu" or target not in (device, "auto"):
        remedy = "finetune init --device cpu" if target == "auto" else None
        expected = target if target != "auto" else "an accelerator, or the target cpu"
        return failed(
            f"the run was on the {device}", expected=expected, observed=device, title=title, remedy=remedy
        )
    lines = e.run.get().metrics.get()
    elsewhere = sorted({line["device"] for line in lines} - {device})
    floor = RESIDENT_SHARE_MIN * e.plan.get()["phases"]["fit"]["resident_gib"]
    most = max((line["alloc_gib"] for line in lines if finite(line["alloc_gib"])), default=0.0)
    return verdict_of(
        not elsewhere and most >= floor and most > 0,
        f"steps ran on {', '.join(elsewhere)}" if elsewhere else f"{most:.2f} GiB allocated on the {device}",
        expected=f"at least {floor:.2f}",
        observed=round(most, 3),
        unit="GiB",
        evidence=(e.line("metrics.jsonl"),),
        title=title,
    )


def judge(evidence: Training) -> list[Check]:
    return [
        *CACHE.run(evidence.cache),
        *SMOKE.run(evidence.smoke, waiting=evidence.waiting.get("smoke", "")),
        *FULL.run(evidence.full, waiting=evidence.waiting.get("full", "")),
    ]


GATE = Gate(
    number="07",
    name="training",
    skill="qwen-image-edit-aipc-finetune-07-training",
    purpose="cache, smoke fit, full fit, resume",
    collect=collect,
    judge=judge,
    specs=(*CACHE.specs, *SMOKE.specs, *FULL.specs),
    next_commands={
        "cache": FIT["smoke"],
        "smoke": FIT["full"],
        "full": "finetune validate",
        None: "finetune validate",
    },
    phases=("cache", "smoke", "full"),
)
