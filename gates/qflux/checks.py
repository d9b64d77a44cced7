"""What can be judged of a run of qflux, by its core, and what can't: each of that is a skip that says so.

The core, which every PASS rests on: stopped-at-max-steps, checkpoint-written, loss-finite, loss-fell by the curve,
adapter-only, adapter-learned; of a smoke fit stopped-at-max-steps, checkpoint-written, loss-finite, adapter-only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gates.checks import Checks, Finding, failed, listing, shared, skipped, verdict_of
from gates.judging import finite
from gates.qflux.run import RESUMABLE, Checkpoint, QfluxRun
from gates.runs import ADAPTER, STATE, base_tensors
from gates.statistics import CURVE_STEPS_MIN, CURVE_T_MIN, ENDS_T_MIN, trend
from gates.tensors import TensorEntry
from gates.verdict import Check, EvidenceRef

SMOKE_STEPS_MAX = 10  # as for our own runs: what is longer is a full fit
LEARNED_SHARE_MIN = 0.90  # of lora_B tensors that moved by more than noise would
LEARNED_NORM_MIN = 1e-6  # of lora_B against lora_A; one update at a rate of 1e-4 makes 1e-4 or more

AGAIN = "mend the fault in the qflux config or its trainer, and run it again"
GUARD = "give the trainer its step guard (finetune adapt --scan CHECKOUT names the place), and run it again"
MORE_STEPS = (
    "set more train.max_train_steps in the qflux config, and run it again; or compare base and adapter by eye"
)
LOWER_RATE = "set a lower optimizer.init_args.lr in the qflux config, and run it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qflux:
    run: QfluxRun
    require_device: str | None = None

    @property
    def is_smoke(self) -> bool:
        settings = self.run.settings.value
        return settings is not None and settings.max_train_steps <= SMOKE_STEPS_MAX

    def ref(self, name: str) -> tuple[EvidenceRef, ...]:
        return (EvidenceRef(path=f"{self.run.name}/{name}"),)


CACHE: Checks[Qflux] = Checks("cache")
SMOKE: Checks[Qflux] = Checks("smoke")
FULL: Checks[Qflux] = Checks("full")
BOTH = {SMOKE: AGAIN, FULL: AGAIN}


@shared(
    BOTH,
    "stopped-at-max-steps",
    title="It stopped at train.max_train_steps, no earlier and no later",
    section="7.4",
    remedy=GUARD,
    why="qflux as published ignores max_train_steps within an epoch, and counts its epochs from it",
)
def stopped_at_max_steps(e: Qflux) -> Finding:
    """The steps of the loss curve, each once, in order, and the highest step of a checkpoint, against the config."""
    settings = e.run.settings.get()
    steps = [step for step, _ in e.run.curve.value or []]
    saved = max((item.step for item in e.run.checkpoints), default=0)
    done = settings.resumed_at + len(steps) if steps else saved
    faults = [f"{done} steps were done"] if done != settings.max_train_steps else []
    faults += [f"the last checkpoint is of step {saved}"] if saved != settings.max_train_steps else []
    # qflux counts from 0; a fork that counts from 1 is as good.
    first = settings.resumed_at + (1 if steps and steps[0] == settings.resumed_at + 1 else 0)
    if steps and steps != list(range(first, first + len(steps))):
        faults.append("a step of the curve is missing, recorded twice, or out of order")
    return verdict_of(
        not faults,
        listing([*faults, *e.run.torn]),
        expected=settings.max_train_steps,
        observed=done,
        unit="steps",
        evidence=e.ref("train_config.yaml"),
        remedy=AGAIN if done < settings.max_train_steps else None,
    )


@shared(
    BOTH,
    "checkpoint-written",
    title="The adapter of the last step was saved, and every checkpoint is whole",
    section="7.4",
    why="without a readable adapter nothing else matters",
)
def checkpoint_written(e: Qflux) -> Finding:
    """Checkpoints of the configured last step; of each its adapter's header, and the step in its state.json."""
    wanted = e.run.settings.get().max_train_steps
    faults = [fault for item in e.run.checkpoints for fault in _damage(item)]
    there = [item.name for item in e.run.checkpoints if item.step == wanted]
    if not there:
        faults.insert(0, f"no checkpoint of step {wanted}")
    return verdict_of(
        bool(there) and not faults,
        listing(faults) or f"{len(e.run.checkpoints)} checkpoints, the last is {there[-1]}",
        expected=wanted,
        observed=max((item.step for item in e.run.checkpoints), default="none"),
        unit="step",
        evidence=e.ref(there[-1]) if there else (),
    )


def _damage(item: Checkpoint) -> Iterator[str]:
    if item.adapter.error is not None:
        yield str(item.adapter.error)
    elif not item.adapter.get():
        yield f"{item.name}/{ADAPTER} holds no tensor"
    yield from item.faults


@shared(
    BOTH,
    "loss-finite",
    title="The loss stayed finite",
    section="7.4",
    remedy=LOWER_RATE,
    why="one NaN spreads into every weight of the adapter",
)
def loss_finite(e: Qflux) -> Finding:
    """The scalar `loss` of every step in the event files; qflux records no gradient norm."""
    bad = [f"step {step}: {loss}" for step, loss in e.run.curve.get() if not finite(loss)]
    return verdict_of(
        not bad,
        listing(bad) or f"{len(e.run.curve.get())} steps",
        expected=0,
        observed=len(bad),
        unit="values",
        evidence=e.ref("events.out.tfevents"),
    )


@FULL.check(
    "loss-fell",
    title="The loss curve fell, beyond its noise",
    section="7.4",
    remedy=MORE_STEPS,
    needs=("stopped-at-max-steps", "loss-finite"),
    why="qflux has no fixed probe, and a step's loss swings with its sigma; its smooth_loss starts at 0 and rises "
    "whatever happens, so the raw losses are judged",
)
def loss_fell(e: Qflux) -> Finding:
    """t of a fall that settles, fitted to block means of the logarithm of the raw losses, and t of the last eighth
    against the first. A flat curve passes less than once in 100; `detectable` is the smallest fall that this run's
    noise lets pass 99 times in 100, and a smaller one may fail unseen."""
    losses = [loss for _, loss in e.run.curve.get()]
    if len(losses) < CURVE_STEPS_MIN or min(losses) <= 0:
        return failed(
            "too few steps to tell a fall from noise" if min(losses) > 0 else "a loss is not positive",
            expected=f"at least {CURVE_STEPS_MIN} steps",
            observed=len(losses),
        )
    found = trend(losses)
    unseen = (
        ""
        if found.fell
        else f"; {len(losses)} steps of this noise show a fall of {found.detectable:.0%} or more"
    )
    return verdict_of(
        found.fell,
        f"the fit goes from 1 to {1 - found.drop:.3f}{unseen}",
        expected={"t": f"> {CURVE_T_MIN:g}", "ends_t": f"> {ENDS_T_MIN:g}"},
        observed={
            "t": round(found.t, 2),
            "ends_t": round(found.ends_t, 2),
            "drop": round(found.drop, 3),
            "detectable": round(found.detectable, 3),
        },
        evidence=e.ref("events.out.tfevents"),
    )


@shared(
    BOTH,
    "adapter-only",
    title="Checkpoints hold the adapter and nothing of the base",
    section="7.4",
    needs=("checkpoint-written",),
    why="a merged base fills the disk and can't be applied to the base again in step 08",
)
def adapter_only(e: Qflux) -> Finding:
    """Tensor names and ranks of every adapter and model.safetensors, and weight files that qflux doesn't write."""
    rank = e.run.settings.get().rank
    faults = [fault for item in e.run.checkpoints for fault in _foreign(item, rank)]
    sizes = {sum(entry.elements for entry in item.adapter.get().values()) for item in e.run.checkpoints}
    faults += [f"the adapters have {len(sizes)} different sizes"] if len(sizes) > 1 else []
    return verdict_of(
        not faults,
        listing(faults) or f"{len(e.run.checkpoints)} checkpoints of rank {rank}",
        expected=0,
        observed=len(faults),
        unit="faults",
    )


def _foreign(item: Checkpoint, rank: int) -> Iterator[str]:
    weights = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
    known = {ADAPTER, STATE, "optimizer.bin", "scheduler.bin"}
    yield from (
        f"{item.name}/{n} is no file of qflux" for n in item.files if n.endswith(weights) and n not in known
    )
    held = {ADAPTER: item.adapter.get()} | ({STATE: item.state.get()} if item.state else {})
    for name, tensors in held.items():
        base = base_tensors(tensors)
        if base:
            yield f"{item.name}/{name} holds {len(base)} tensors of the base, first {base[0]}"
        elif other := [key for key, entry in tensors.items() if not _has_rank(key, entry, rank)]:
            yield f"{item.name}/{name}: {other[0]} has shape {tensors[other[0]].shape}, the rank is {rank}"


def _has_rank(name: str, entry: TensorEntry, rank: int) -> bool:
    if ".lora_A" in name:
        return len(entry.shape) >= 2 and entry.shape[0] == rank
    if ".lora_B" in name:
        return len(entry.shape) >= 2 and entry.shape[1] == rank
    return True  # DoRA's magnitudes are vectors


@FULL.check(
    "adapter-learned",
    title="The adapter's weights moved",
    section="7.4",
    remedy=MORE_STEPS,
    needs=("checkpoint-written",),
    why="a cut graph leaves lora_B at zero while the loss looks like any other",
)
def adapter_learned(e: Qflux) -> Finding:
    """lora_B of the last checkpoint: all finite, nine in ten beyond a millionth of lora_A; and the first differs."""
    last = e.run.checkpoints[-1]
    assert last.facts is not None
    facts = last.facts.get()
    up = {name: fact for name, fact in facts.items() if ".lora_B" in name}
    scale = max((fact.norm for name, fact in facts.items() if ".lora_A" in name), default=0.0)
    infinite = sorted(name for name, fact in facts.items() if not fact.finite)
    moved = sum(fact.norm > LEARNED_NORM_MIN * scale for fact in up.values())
    share = moved / len(up) if up else 0.0
    first = next((i for i in e.run.checkpoints if i.step < last.step and i.facts is not None), None)
    faults = [f"{name} is not finite" for name in infinite]
    faults += [f"{len(up) - moved} of {len(up)} lora_B have not moved"] if share < LEARNED_SHARE_MIN else []
    faults += (
        [f"{last.name} equals {first.name}"] if first and first.facts and first.facts.get() == facts else []
    )
    return verdict_of(
        not faults,
        listing(faults) or f"{moved} of {len(up)} lora_B tensors moved",
        expected=f">= {LEARNED_SHARE_MIN}",
        observed=round(share, 3),
        remedy=LOWER_RATE if infinite else None,
        evidence=e.ref(f"{last.name}/{ADAPTER}"),
    )


# ---- advisory


@FULL.check(
    "checkpoints-on-schedule",
    title="There is a checkpoint of every train.checkpointing_steps",
    section="7.4",
    remedy="nothing, if you deleted them",
    required=False,
    why="step 08 may take any of them; qflux never prunes, but its docs let a user delete them",
)
def checkpoints_on_schedule(e: Qflux) -> Finding:
    """Plain checkpoints against the multiples of the interval since the run's start."""
    settings = e.run.settings.get()
    every = settings.checkpointing_steps
    planned = {n for n in range(every, settings.max_train_steps + 1, every) if n > settings.resumed_at}
    saved = {item.step for item in e.run.checkpoints if not item.is_last}
    absent = sorted(planned - saved)
    return verdict_of(
        not absent, listing([f"none of step {n}" for n in absent]), expected=len(planned), observed=len(saved)
    )


@FULL.check(
    "resumable-last",
    title="The run can be resumed from its end",
    section="7.6",
    remedy="keep the run's end: it can't be continued from here",
    required=False,
    why="only a whole -last- carries optimizer and schedule; with FSDP qflux writes none",
)
def resumable_last(e: Qflux) -> Finding:
    """Files of the newest -last-."""
    files = e.run.lasts[-1].files if e.run.lasts else ()
    absent = [name for name in RESUMABLE if name not in files]
    return verdict_of(
        not absent, listing([f"{name} is missing" for name in absent]), expected=0, observed=len(absent)
    )


@shared(
    BOTH,
    "one-last-checkpoint",
    title="The run left one checkpoint-last-*-last",
    section="7.4",
    remedy="delete all but the newest; the adapter is unharmed, nothing is to be trained again",
    required=False,
    why="several are the tell of an epoch loop that does not end; they cost disk and time",
)
def one_last_checkpoint(e: Qflux) -> Finding:
    """The number of checkpoint-last-*-last folders in the run."""
    names = [item.name for item in e.run.lasts]
    return verdict_of(len(names) == 1, listing(names) or "none was written", expected=1, observed=len(names))


# ---- what qflux leaves no evidence of


def _unknown(
    lists: tuple[Checks[Qflux], ...], id: str, title: str, records: str, why: str, section: str = "7.4"
) -> None:
    def measure(e: Qflux) -> Finding:
        return skipped(f"qflux records no {records}")

    measure.__doc__ = f"Nothing: qflux records no {records}."
    shared(
        dict.fromkeys(lists, "train with finetune fit, which records it"), id,
        title=title, section=section, why=why, required=False, may_skip="the run is another trainer's",
    )(measure)  # fmt: skip


_CACHE = "which pictures, prompt and settings a cached file was made of"
_unknown(
    (CACHE,),
    "cache-complete",
    "Every sample is in the cache, whole",
    "list of its cached samples",
    _CACHE,
    "7.2",
)
_unknown(
    (CACHE,),
    "cache-matches-config",
    "The cache is of this config",
    "settings beside its cache",
    _CACHE,
    "7.2",
)
_unknown(
    (CACHE,), "cache-distinct", "No two samples share an embedding", "control image in its prompt keys",
    "its embeddings are filed under the prompt alone, so that samples with one prompt share the last one's", "7.2",
)  # fmt: skip
_unknown(
    (CACHE,), "cache-roundtrip", "The cache decodes", "check of its cache by encoding again", _CACHE, "7.2"
)
_unknown(
    (SMOKE, FULL), "run-matches-inputs", "The run used this config, dataset, cache and base",
    "digests of dataset, cache and base", "a judgement of another run than the one meant says nothing",
)  # fmt: skip
_unknown(
    (SMOKE, FULL), "environment-as-judged", "The run had the target's device, Python and packages",
    "device, Python or package versions", "a smoke test in another environment proves nothing",
)  # fmt: skip
_unknown(
    (FULL,), "smoke-passed-as-configured", "A smoke run of the same config passes",
    "kind of a run that ties a smoke fit to a full one", "five steps find in a minute what a full run finds late",
)  # fmt: skip
_unknown(
    (FULL,), "memory-stable", "Memory does not grow from step to step", "memory in its run directory",
    "a leak of one MiB a step ends a run of a day in its last hour", "7.5",
)  # fmt: skip


@shared(
    BOTH,
    "xpu-alloc",
    title="The model was on the accelerator",
    section="7.4",
    remedy="train with finetune fit, which records it",
    required=False,
    may_skip="the run is another trainer's, and no device is required",
    why="a fall-back to the CPU passes every other check, and takes days",
)
def xpu_alloc(e: Qflux) -> Finding:
    """Nothing: qflux records no device and no memory allocated inside its process; with --require-device a fail."""
    told = "qflux records no device and no memory allocated inside its process"
    return failed(told, expected=e.require_device, observed="unknown") if e.require_device else skipped(told)


def judge(evidence: Qflux) -> list[Check]:
    return [*CACHE.run(evidence), *(SMOKE if evidence.is_smoke else FULL).run(evidence)]
