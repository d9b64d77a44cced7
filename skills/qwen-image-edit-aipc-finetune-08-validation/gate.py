"""gate check 08: does the adapter of the judged run do better than the base, on samples it never saw?"""

from collections.abc import Iterator
from math import fsum, isclose
from typing import Any

from gates.checks import Checks, Finding, Gate, failed, listing, passed, verdict_of
from gates.evidence import differences
from gates.judging import finite
from gates.statistics import paired
from gates.validation import REMEDY, VARIANTS, WHERE, Validation, collect, saved_digest
from gates.verdict import Check, EvidenceRef

DRAWS_MIN = 32  # of (sigma, noise) a sample: loss swings with sigma, so fewer say little
LOSS_T_MIN = 3.0  # one-sided: by chance alone once in some 700 validations
CHANGE_MIN = 1.0  # of 255, mean over a picture; rounding to 8 bits alone stays below a half
SPREAD_MIN = 2.0  # of 255; a blank sheet has 0, noise-free skies still have 3
UNEDITED_MAX = 24.0  # of 255; a VAE's own error on a photograph is about 5
MEAN_TOLERANCE = 1e-6  # relative; sums of a few thousand floats agree to 1e-12
VARIANTS_MEASURED = ("base", "adapter")

FIT = "finetune fit"
LOWER_RATE = "set a lower optimizer.init_args.lr in config.yaml, then finetune plan"
TRAIN_MORE = (
    "set more train.max_train_steps or a higher optimizer.init_args.lr in config.yaml, then finetune plan"
)
FULL_PRECISION = "set train.mixed_precision: 'no' in config.yaml, then finetune plan"
LEARN_LESS_BY_HEART = (
    "set fewer train.max_train_steps in config.yaml, then finetune plan; or add pairs, then finetune dataset"
)

CHECKS: Checks[Validation] = Checks()


@CHECKS.check(
    "adapter-from-judged-run",
    title="The adapter is one that the newest full run saved",
    section="8.1",
    remedy=REMEDY,
    why="pictures of last week's adapter say nothing about this run",
)
def adapter_from_judged_run(e: Validation) -> Finding:
    """Run, checkpoint and digest of the record, against the run's own list of saves and the cache of now."""
    data, run = e.data.get(), e.judged.get()
    saved = saved_digest(run, data["run"], data["checkpoint"])
    faults = []
    if saved is None:
        faults.append(f"{data['run']}/{data['checkpoint']} is no checkpoint of {run.path}")
    elif saved != data["adapter_sha256"]:
        faults.append(f"{data['checkpoint']} has other weights than were validated")
    if data["cache_digest"] != e.cache_digest.get():
        faults.append("the cache has changed since")
    asked = e.settings.get()["validation"]
    faults += [
        f"{key}: {data[key]} used, {asked[key]} configured"
        for key in ("num_inference_steps", "guidance_scale", "seed")
        if data[key] != asked[key]
    ]
    return verdict_of(
        not faults,
        listing(faults) or f"{data['run']}/{data['checkpoint']}",
        expected=run.path,
        observed=data["run"],
        evidence=(EvidenceRef(path=WHERE, locator="/data"),),
    )


@CHECKS.check(
    "holdout-unseen",
    title="No held-out sample was trained on",
    section="8.2",
    remedy="remove the copy named from the dataset, then finetune dataset",
    needs=("adapter-from-judged-run",),
    why="on samples that it trained on, an adapter that only memorised looks best of all",
)
def holdout_unseen(e: Validation) -> Finding:
    """Held-out ids in the steps' sample lists, and held-out pictures that are also training targets."""
    seen = {name for line in e.judged.get().metrics.get() for name in line["samples"]}
    listed = e.dataset.get()["samples"]
    trained = {s["target"]["sha256"]: s["id"] for s in listed if s["split"] == "train"}
    held = [s for s in listed if s["split"] == "holdout"]
    trained_on = [f"{s['id']} was trained on" for s in held if s["id"] in seen]
    copies = [
        f"{s['id']} is the same picture as {trained[s['target']['sha256']]}"
        for s in held
        if s["target"]["sha256"] in trained
    ]
    strangers = [
        f"{s['id']} is not of the holdout" for s in e.heldout if s["id"] not in {h["id"] for h in held}
    ]
    faults = [*copies, *trained_on, *strangers]
    return verdict_of(
        bool(held) and not faults,
        listing(faults) or f"{len(held)} held-out samples, {len(seen)} trained on",
        expected=0,
        observed=len(faults),
        unit="samples",
        remedy=None if copies else _restoring(trained_on, strangers),
    )


def _restoring(trained_on: list[str], strangers: list[str]) -> str:
    if trained_on:
        return FIT
    return REMEDY if strangers else "finetune dataset --holdout 3"


@CHECKS.check(
    "all-samples-rendered",
    title="Every held-out sample and prompt was painted, three times",
    section="8.2",
    remedy=REMEDY,
    why="a failed sample that is left out makes the rest look better than it is",
)
def all_samples_rendered(e: Validation) -> Finding:
    """The cache's entries beyond the training ones, against the record; every picture whole, of the set size."""
    wanted = {entry.key: entry.id for entry in e.cached.get()}
    done = {sample["key"] for sample in e.samples}
    faults = [f"{name} is missing" for key, name in wanted.items() if key not in done]
    for sample in e.samples:
        absent = [kind for kind in VARIANTS if kind not in sample["pictures"]]
        faults += [f"{sample['id']}: no picture of {kind}" for kind in absent]
        recorded = {picture["path"]: picture for picture in sample["pictures"].values()}
        faults += differences(e.root, recorded)
    if faults:
        return failed(listing(faults), expected=len(wanted), observed=len(done), unit="samples")
    asked = {entry.id: tuple(entry.document["sizes"]["target"]) for entry in e.cached.get() if entry.document}
    wrong = [
        f"{name}: {kind} is {s[0]}x{s[1]}, the cache was made for {asked[name][0]}x{asked[name][1]}"
        for name, f in e.facts.items()
        for kind, s in f.sizes.items()
        if name in asked and s != asked[name] and kind in VARIANTS
    ]
    sizes = sorted({f"{height}x{width}" for height, width in asked.values()})
    return verdict_of(
        bool(wanted) and not wrong,
        listing(wrong) or f"{len(done)} samples of {', '.join(sizes)}",
        expected=len(wanted),
        observed=len(done),
        unit="samples",
    )


@CHECKS.check(
    "same-noise",
    title="Base, adapter and zeroed adapter started from the same noise",
    section="8.2",
    remedy=REMEDY,
    why="with another noise the picture differs whatever the adapter does",
)
def same_noise(e: Validation) -> Finding:
    """Digests of the starting noise: equal over the variants of a sample, different between samples."""
    faults = [s["id"] for s in e.samples if len({s["noise_sha256"][v] for v in VARIANTS}) != 1]
    starts = [s["noise_sha256"]["base"] for s in e.samples]
    if len(set(starts)) != len(starts):
        faults.append("two samples share one noise")
    return verdict_of(
        bool(starts) and not faults, listing(faults), expected=0, observed=len(faults), unit="samples"
    )


@CHECKS.check(
    "images-not-degenerate",
    title="No picture is blank, and they are not all the same",
    section="8.3",
    remedy=LOWER_RATE,
    needs=("all-samples-rendered",),
    why="a collapsed adapter paints one grey sheet for every prompt",
)
def images_not_degenerate(e: Validation) -> Finding:
    """Spread of the pixels of each painted picture; digests of the adapter's pictures across samples."""
    blank = [
        f"{name}: {kind} has a spread of {facts.spreads[kind]:.2f}"
        for name, facts in e.facts.items()
        for kind in VARIANTS
        if not facts.spreads[kind] >= SPREAD_MIN
    ]
    digests = {sample["pictures"]["adapter"]["sha256"] for sample in e.samples}
    if len(e.samples) > 1 and len(digests) == 1:
        blank.append("all adapter pictures are the same")
    lowest = min((f.spreads[kind] for f in e.facts.values() for kind in VARIANTS), default=float("nan"))
    return verdict_of(
        not blank, listing(blank), expected=f">= {SPREAD_MIN:g}", observed=lowest, unit="of 255"
    )


@CHECKS.check(
    "adapter-changes-output",
    title="The adapter changes what is painted",
    section="8.3",
    remedy=TRAIN_MORE,
    needs=("all-samples-rendered", "same-noise"),
    why="an adapter that was not loaded, or learned nothing, gives the base's picture bit for bit",
)
def adapter_changes_output(e: Validation) -> Finding:
    """Mean absolute pixel difference between the pictures of adapter and base, over all samples."""
    return _changed([facts.adapter_to_base for facts in e.facts.values()])


def _changed(distances: list[float]) -> Finding:
    mean = sum(distances) / len(distances) if distances else float("nan")
    return verdict_of(
        mean >= CHANGE_MIN,
        f"mean over {len(distances)} samples",
        expected=f">= {CHANGE_MIN:g}",
        observed=mean,
        unit="of 255",
    )


@CHECKS.check(
    "heldout-loss-improves",
    title="On held-out samples the adapter predicts better than the base",
    section="8.4",
    remedy=LEARN_LESS_BY_HEART,
    needs=("holdout-unseen",),
    why="with 20 pairs memorising is the failure that people meet, and it shows on unseen samples only",
)
def heldout_loss_improves(e: Validation) -> Finding:
    """Flow loss of base and adapter at the same (sigma, noise), paired over all draws of the held-out samples."""
    held = sorted(s["id"] for s in e.dataset.get()["samples"] if s["split"] == "holdout")
    measured = sorted(s["id"] for s in e.heldout)
    if measured != held or not held:
        return failed("the holdout is not what was measured", expected=held, observed=measured, remedy=REMEDY)
    few = [f"{s['id']} has {n} different draws" for s in e.heldout if (n := _different(s)) < DRAWS_MIN]
    if few:
        return failed(listing(few), expected=f">= {DRAWS_MIN} draws each", remedy=REMEDY)
    lines = [line for sample in e.heldout for line in sample["draws"]]
    infinite = [v for v in VARIANTS_MEASURED if any(not finite(line[v]) for line in lines)]
    if infinite:
        return failed(
            f"the held-out loss of the {' and the '.join(infinite)} is not finite",
            expected="finite losses",
            observed=sum(not finite(line[v]) for v in infinite for line in lines),
            unit="losses",
            remedy=FULL_PRECISION if "base" in infinite else LOWER_RATE,
        )
    if wrong := list(_wrong_means(e.data.get()["heldout_mean"], lines)):
        return failed(listing(wrong), expected="the mean of the draws", remedy=REMEDY)
    test = paired([line["base"] for line in lines], [line["adapter"] for line in lines])
    half = abs(test.before - test.after) / test.t * 1.96 if test.t else float("nan")
    drop = test.before - test.after
    return verdict_of(
        test.t > LOSS_T_MIN,
        f"{test.before:.4f} to {test.after:.4f}; the drop is {drop:.4f} +- {abs(half):.4f} (95 %) over "
        f"{test.count} paired draws. It speaks of these {len(e.heldout)} samples, not of others",
        expected=f"t > {LOSS_T_MIN:g}",
        observed=test.t,
        evidence=(EvidenceRef(path=WHERE, locator="/data/samples"),),
        remedy="finetune validate --checkpoint best" if _is_another_than_the_best(e) else None,
    )


def _different(sample: dict[str, Any]) -> int:
    """Draws that are no repetition of another."""
    return len({(line["sigma"], line["noise"]) for line in sample["draws"]})


def _wrong_means(recorded: dict[str, Any], lines: list[dict[str, Any]]) -> Iterator[str]:
    for variant in VARIANTS_MEASURED:
        mean = fsum(line[variant] for line in lines) / len(lines)
        if not (finite(recorded[variant]) and isclose(recorded[variant], mean, rel_tol=MEAN_TOLERANCE)):
            yield f"heldout_mean of the {variant} is {recorded[variant]}, its draws have {mean:.6g}"


def _is_another_than_the_best(e: Validation) -> bool:
    """Whether validating the best checkpoint would look at another one."""
    data, best = e.data.get(), e.judged.get().best
    return best not in (None, f"{data['run']}/{data['checkpoint']}")


@CHECKS.check(
    "zero-adapter-rejected",
    title="The same test rejects an adapter of zeros",
    section="8.5",
    remedy="set train.mixed_precision: 'no' in config.yaml, then finetune plan",
    needs=("all-samples-rendered", "same-noise"),
    why="a test that passes whatever it is shown proves nothing; this is its positive control",
)
def zero_adapter_rejected(e: Validation) -> Finding:
    """adapter-changes-output, put to the pictures of the zeroed adapter: it has to fail there."""
    finding = _changed([facts.zero_to_base for facts in e.facts.values()])
    return verdict_of(
        finding.status == "fail" and finding.observed is not None and finding.observed < CHANGE_MIN,
        finding.message,
        expected=f"< {CHANGE_MIN:g}",
        observed=finding.observed,
        unit="of 255",
    )


@CHECKS.check(
    "unedited-kept",
    title="What the edit leaves alone stays as it was",
    section="8.5",
    remedy=f"look at validation/grid.png; {LEARN_LESS_BY_HEART}",
    needs=("all-samples-rendered",),
    required=False,
    why="an edit that repaints the whole picture is seldom what was taught",
)
def unedited_kept(e: Validation) -> Finding:
    """Where control and target agree: mean absolute difference of the adapter's picture from the target."""
    errors = [facts.unedited_error for facts in e.facts.values() if facts.unedited_error is not None]
    if not errors:
        return passed("no sample has a region that its edit leaves alone")
    mean = sum(errors) / len(errors)
    return verdict_of(
        mean <= UNEDITED_MAX,
        f"mean over {len(errors)} samples",
        expected=f"<= {UNEDITED_MAX:g}",
        observed=mean,
        unit="of 255",
    )


def judge(evidence: Validation) -> list[Check]:
    return CHECKS.run(evidence)


GATE = Gate(
    number="08",
    name="validation",
    skill="qwen-image-edit-aipc-finetune-08-validation",
    purpose="held-out comparison, base against adapter",
    collect=collect,
    judge=judge,
    specs=tuple(CHECKS.specs),
    next_commands={None: "finetune export --format diffusers"},
)
