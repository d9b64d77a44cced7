"""gate check 02: are the pairs complete, decodable, captioned, and is something held out?"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from gates.checks import Checks, Evidence, Finding, Gate, failed, listing, passed, verdict_of
from gates.datasets import Picture, Seen, dropped_pairs, holdout_faults, image_paths, look
from gates.evidence import Reading, attempt, dataset_digest
from gates.verdict import Check, EvidenceRef
from gates.workspace import Workspace

SAMPLES_MIN = 5  # the published validator's floor: below it there is nothing to generalise from
SAMPLES_SMOKE = 10  # the same source: 5 to 9 are enough for a smoke test only
SAMPLES_ADVISED = 20  # its guide starts at 20 to 50
SIDE_MIN = 32  # pixels; two patches of the model, below that nothing can be shown
ASPECT_MAX = 8.0  # long side to short; beyond it the centre crop keeps next to nothing
HOLDOUT_MIN = 1  # without one no later step can tell learning from remembering
HOLDOUT_ADVISED = 3  # a mean of fewer says little
HOLDOUT_ADVISED_FROM = 12  # samples; a smaller set needs them all

EVIDENCE = ".gates/evidence/02-dataset.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(Evidence):
    target_root: str
    """the dataset that target.json names"""
    data: Reading[dict[str, Any]]
    """evidence 02-dataset"""
    seen: Reading[Seen]
    """the files, now"""

    @property
    def samples(self) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = self.data.get()["samples"]
        return samples

    def split(self, name: str) -> list[dict[str, Any]]:
        return [sample for sample in self.samples if sample["split"] == name]


def collect(workspace: Workspace) -> Dataset:
    data = attempt(lambda: workspace.evidence("02-dataset"))
    seen = attempt(lambda: look(workspace.resolve(data.get()["root"]), data.get()))
    target_root = workspace.target["dataset"]
    return Dataset(target_root=target_root, data=data, seen=seen, inputs=tuple(workspace.inputs.values()))


CHECKS: Checks[Dataset] = Checks()


@CHECKS.check(
    "layout-recognised",
    title="The dataset is two folders of images",
    section="2.1",
    remedy="finetune dataset",
    why="every later check reads the manifest that `finetune dataset` writes, and the folders behind it",
)
def layout_recognised(e: Dataset) -> Finding:
    """The folder that target.json names holds a folder of targets and one of controls, and was scanned."""
    data, count = e.data.get(), e.seen.get().count
    if data["root"] != e.target_root:
        return failed(
            "another dataset was scanned than the target names", expected=e.target_root, observed=data["root"]
        )
    return verdict_of(
        count.targets is not None,
        f"targets in {count.targets}, controls in {count.controls or count.targets}",
        expected="a folder training_images and a folder control_images, or their other names",
        observed={"targets": count.targets, "controls": count.controls},
        remedy="name the folders training_images/ and control_images/, then finetune dataset",
    )


@CHECKS.check(
    "manifest-matches-files",
    title="The manifest is what lies in the folder now",
    section="2.2",
    remedy="finetune dataset",
    needs=("layout-recognised",),
    why="a file changed after the scan would be trained on unseen, or be missing in the middle of a run",
)
def manifest_matches_files(e: Dataset) -> Finding:
    """Listed files have their recorded size and digest, none is unlisted, holdout.txt and dataset digest agree."""
    data, seen = e.data.get(), e.seen.get()
    mentioned = {item["path"] for item in data["dropped"]}
    unlisted = [pair.target for pair in dropped_pairs(seen.count, data) if pair.target not in mentioned]
    faults = [*seen.changed, *(f"{path} is in the folder and not in the manifest" for path in unlisted)]
    faults += [
        f"{image['path']} is {image['width']}x{image['height']} in the manifest and not in the file"
        for sample in data["samples"]
        for image in (sample["target"], *sample["controls"])
        if image["path"] in seen.pictures and seen.pictures[image["path"]] != _recorded_size(image)
    ]
    ids = [sample["id"] for sample in data["samples"]]
    faults += [f"sample {name} is listed twice" for name in sorted({n for n in ids if ids.count(n) > 1})]
    faults += holdout_faults(seen.wished_holdout, data)
    if data["dataset_digest"] != dataset_digest(data["samples"]):
        faults.append("the recorded dataset digest is not that of the listed samples")
    return verdict_of(
        not faults,
        listing(faults) or f"{len(ids)} samples, each file as recorded",
        expected=0,
        observed=len(faults),
        unit="differences",
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/samples"),),
    )


@CHECKS.check(
    "samples-enough",
    title="There are samples enough to learn from",
    section="2.3",
    remedy="add pairs to the dataset, then finetune dataset",
    needs=("layout-recognised",),
    why="with fewer than five pairs the adapter can only learn them by heart",
)
def samples_enough(e: Dataset) -> Finding:
    """The number of samples that are trained on, the held-out ones left out."""
    seen = len(e.split("train"))
    advice = ""
    if SAMPLES_MIN <= seen < SAMPLES_ADVISED:
        advice = " (enough for a smoke test only)" if seen < SAMPLES_SMOKE else " (20 to 50 are advised)"
    return verdict_of(
        seen >= SAMPLES_MIN,
        f"{seen} samples to train on{advice}",
        expected=f"at least {SAMPLES_MIN}",
        observed=seen,
        unit="samples",
    )


@CHECKS.check(
    "pairs-complete",
    title="Every target has its control and its caption",
    section="2.4",
    remedy="give each target its control (same name) and caption (.txt), then finetune dataset",
    needs=("layout-recognised",),
    why="a pair without a partner is left out of training without anybody noticing",
)
def pairs_complete(e: Dataset) -> Finding:
    """Each image of the target folder has a control and a caption of its name, and no image is left over."""
    count = e.seen.get().count
    captioned = {sample["target"]["path"] for sample in e.samples if sample["prompt"]}
    faults = [f"{pair.target} has no control" for pair in count.pairs if not pair.controls]
    faults += [
        f"{pair.target} has no caption"
        for pair in count.pairs
        if not pair.captions and pair.target not in captioned
    ]
    faults += [f"{sample['id']} has no control" for sample in e.samples if not sample["controls"]]
    faults += [f"{path} belongs to no target" for path in count.strays]
    faults = list(dict.fromkeys(faults))
    return verdict_of(
        not faults,
        listing(faults) or f"{len(count.pairs)} pairs, all complete",
        expected=0,
        observed=len(faults),
        unit="partners missing",
    )


@CHECKS.check(
    "images-decode",
    title="Every image can be read to its last pixel",
    section="2.5",
    remedy="replace or remove the images named, then finetune dataset",
    needs=("layout-recognised",),
    why="a picture cut short stops the cache phase, or trains on grey",
)
def images_decode(e: Dataset) -> Finding:
    """Images decoded in full: all up to 64, else an even sample of 64, and all that the manifest left out."""
    seen = e.seen.get()
    faults = [f"{path} {reason}" for path, reason in seen.undecodable.items() if reason != "is missing"]
    total = len({path for sample in e.samples for path in image_paths(sample)})
    return verdict_of(
        not faults,
        listing(faults) or f"{len(seen.pictures)} decoded of {total} images",
        expected=0,
        observed=len(faults),
        unit="images",
    )


@CHECKS.check(
    "captions-usable",
    title="Every caption is text",
    section="2.6",
    remedy="write the captions named, as UTF-8, then finetune dataset",
    needs=("layout-recognised",),
    why="the caption is what the edit will be asked by; a garbled one teaches the wrong thing",
)
def captions_usable(e: Dataset) -> Finding:
    """Captions are UTF-8, not empty, without replacement characters, and are the prompts of the manifest."""
    seen = e.seen.get()
    faults = [f"{path} {reason}" for path, reason in seen.unreadable.items()]
    faults += [f"{path} is empty" for path, text in seen.captions.items() if not text.strip()]
    for sample in e.samples:
        caption, prompt = sample["caption"], sample["prompt"]
        text = seen.captions.get(caption["path"]) if caption else None
        if not prompt.strip() and (text is None or text.strip()):
            faults.append(f"{sample['id']} has an empty prompt")
        elif "\ufffd" in prompt:
            faults.append(f"{sample['id']} has characters that were lost in decoding")
        elif text is not None and prompt.split() != text.split():
            faults.append(f"{sample['id']} has another prompt than its caption file")
    return verdict_of(
        not faults,
        listing(faults) or f"{len(e.samples)} captions",
        expected=0,
        observed=len(faults),
        unit="captions",
    )


@CHECKS.check(
    "sizes-usable",
    title="Every image is large enough and no ribbon",
    section="2.7",
    remedy="replace or remove the images named, then finetune dataset",
    needs=("layout-recognised",),
    why="images are resized and centre-cropped to one shape, in which a ribbon loses its subject",
)
def sizes_usable(e: Dataset) -> Finding:
    """The short side and the aspect of each image, as decoded here or else as recorded."""
    sizes = {
        image["path"]: _recorded_size(image)
        for sample in e.samples
        for image in (sample["target"], *sample["controls"])
    }
    sizes |= e.seen.get().pictures
    faults = [
        f"{path} has {picture.width}x{picture.height} pixels"
        for path, picture in sorted(sizes.items())
        if not _usable(picture)
    ]
    return verdict_of(
        not faults,
        listing(faults) or f"{len(sizes)} images",
        expected=f"short side of at least {SIDE_MIN}, long side at most {ASPECT_MAX:g} times as long",
        observed=len(faults),
        unit="images",
    )


def _recorded_size(image: dict[str, Any]) -> Picture:
    return Picture(width=image["width"], height=image["height"])


def _usable(picture: Picture) -> bool:
    short, long = sorted((picture.width, picture.height))
    return short >= SIDE_MIN and long <= ASPECT_MAX * short


@CHECKS.check(
    "holdout-reserved",
    title="Samples are held out, and training never sees them",
    section="2.8",
    remedy="finetune dataset --holdout 3",
    needs=("layout-recognised",),
    why="step 08 compares base and adapter on pictures that the adapter was not trained on",
)
def holdout_reserved(e: Dataset) -> Finding:
    """The number of held-out samples, and whether a held-out target is trained on under another name."""
    train, holdout = e.split("train"), e.split("holdout")
    trained = {sample["target"]["sha256"]: sample["id"] for sample in train}
    shared = [
        f"{sample['id']} is the same picture as {trained[sample['target']['sha256']]}"
        for sample in holdout
        if sample["target"]["sha256"] in trained
    ]
    advice = ""
    if len(holdout) < HOLDOUT_ADVISED and len(e.samples) >= HOLDOUT_ADVISED_FROM:
        advice = f" ({HOLDOUT_ADVISED} are advised)"
    return verdict_of(
        len(holdout) >= HOLDOUT_MIN and not shared,
        listing(shared) or f"{len(holdout)} held out{advice}",
        expected=f"at least {HOLDOUT_MIN}, none of them trained on",
        observed={"held_out": len(holdout), "also_trained_on": len(shared)},
        remedy="remove the copy named from the dataset, then finetune dataset" if shared else None,
    )


@CHECKS.check(
    "no-duplicates",
    title="No target is there twice",
    section="2.9",
    remedy="remove the copies named, then finetune dataset",
    needs=("layout-recognised",),
    required=False,
    why="a copy doubles the weight of one picture",
)
def no_duplicates(e: Dataset) -> Finding:
    """Targets with equal bytes."""
    names = defaultdict(list)
    for sample in e.samples:
        names[sample["target"]["sha256"]].append(sample["id"])
    copies = [" = ".join(group) for group in names.values() if len(group) > 1]
    return verdict_of(not copies, listing(copies) or "none", expected=0, observed=len(copies), unit="groups")


@CHECKS.check(
    "captions-varied",
    title="Captions differ where the edits do",
    section="2.9",
    remedy="write what is edited into each caption, then finetune dataset",
    needs=("layout-recognised",),
    required=False,
    why="one caption for all is right for a single edit; for several it leaves the model guessing which",
)
def captions_varied(e: Dataset) -> Finding:
    """How many different prompts there are."""
    prompts = {" ".join(sample["prompt"].split()).casefold() for sample in e.samples}
    if len(prompts) == 1 and len(e.samples) > 1:
        return Finding(
            status="info", message="one caption for all samples: right only if all show one edit", observed=1
        )
    return passed(f"{len(prompts)} different captions", observed=len(prompts))


def judge(evidence: Dataset) -> list[Check]:
    return CHECKS.run(evidence)


GATE = Gate(
    number="02",
    name="dataset",
    skill="qwen-image-edit-aipc-finetune-02-dataset",
    purpose="the pairs: complete, decodable, captioned, holdout set aside",
    collect=collect,
    judge=judge,
    specs=tuple(CHECKS.specs),
    next_commands={None: "finetune probe --environment"},
)
