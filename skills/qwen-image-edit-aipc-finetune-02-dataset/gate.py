"""gate check 02: are the pairs complete, decodable, captioned, and is something held out?"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gates.checks import Checks, Evidence, Finding, Gate, failed, listing, passed, verdict_of
from gates.datasets.looking import Located, Picture, Seen, image_records, look, prefix_of
from gates.datasets.manifests import differences, left_out, missing_partners
from gates.datasets.wording import same
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


CONTROL_NEEDED = (
    "put controls into control_images/; for text-to-image, name the folder of pictures as image_directory in a "
    "dataset file (dataset.toml); then finetune dataset"
)


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

    @property
    def pairs(self) -> list[Located]:
        """Of the sources, without those that max_samples leaves out."""
        return [located for located in self.seen.get().pairs if not located.beyond]

    @property
    def regularisation(self) -> set[str]:
        """Names of the sources that hold the base's behaviour."""
        return {
            source["name"] for source in self.data.get()["sources"] if source["settings"]["regularisation"]
        }

    def split(self, name: str) -> list[dict[str, Any]]:
        return [sample for sample in self.samples if sample["split"] == name]

    def recorded_sizes(self) -> dict[str, Picture]:
        """By path as shown, of all images."""
        data = self.data.get()
        prefixes = {source["name"]: prefix_of(data, source["name"]) for source in data["sources"]}
        return {
            prefixes.get(sample["source"], "") + image["path"]: _recorded_size(image)
            for sample in self.samples
            for image in image_records(sample)
        }


def collect(workspace: Workspace) -> Dataset:
    data = attempt(lambda: workspace.evidence("02-dataset"))
    seen = attempt(lambda: look(workspace, data.get()))
    target_root = workspace.target["dataset"]
    return Dataset(target_root=target_root, data=data, seen=seen, inputs=tuple(workspace.inputs.values()))


CHECKS: Checks[Dataset] = Checks()


@CHECKS.check(
    "layout-recognised",
    title="The dataset is of a known layout, and the one that was scanned",
    section="2.1",
    remedy="finetune dataset",
    why="every later check reads the manifest that `finetune dataset` writes, and the files behind it",
)
def layout_recognised(e: Dataset) -> Finding:
    """What target.json names was scanned: each source's folder, kind and settings are those that it has now."""
    data, seen = e.data.get(), e.seen.get()
    if data["root"] != e.target_root:
        return failed(
            "another dataset was scanned than the target names", expected=e.target_root, observed=data["root"]
        )
    nameless = [line for line in seen.layout if "training_images" in line]
    return verdict_of(
        not seen.layout,
        listing(seen.layout) or seen.found,
        expected=0,
        observed=len(seen.layout),
        unit="differences",
        remedy="name the folders training_images/ and control_images/, then finetune dataset"
        if nameless
        else None,
    )


@CHECKS.check(
    "manifest-matches-files",
    title="The manifest is what lies in the dataset now",
    section="2.2",
    remedy="finetune dataset",
    needs=("layout-recognised",),
    why="a file changed after the scan would be trained on unseen, or be missing in the middle of a run",
)
def manifest_matches_files(e: Dataset) -> Finding:
    """Files, dataset file and archives as recorded, nothing unlisted, holdout.txt and dataset digest agree."""
    data, seen = e.data.get(), e.seen.get()
    sizes = e.recorded_sizes()
    faults = differences(data, seen)
    faults += [
        f"{path} is {sizes[path].width}x{sizes[path].height} in the manifest and not in the file"
        for path, picture in seen.pictures.items()
        if sizes.get(path, picture) != picture
    ]
    if data["dataset_digest"] != dataset_digest(data):
        faults.append("the recorded dataset digest is not that of the listed samples")
    return verdict_of(
        not faults,
        listing(faults) or f"{len(data['samples'])} samples, each file as recorded",
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
    """The number of samples that are trained on, without held-out and regularisation samples."""
    unlearned = e.regularisation
    seen = sum(sample["source"] not in unlearned for sample in e.split("train"))
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
    """Each target, or row of a listing, has a caption and what controls its kind asks for; nothing is left over."""
    data, seen = e.data.get(), e.seen.get()
    paired = any(sample["controls"] for sample in e.samples)
    faults = [*missing_partners(e.pairs), *seen.strays, *left_out(data, seen, _usable)]
    bare = any("control" in located.pair.missing() for located in e.pairs)
    return verdict_of(
        not faults,
        listing(faults)
        or f"{len(e.pairs)} {'pairs' if paired else 'pictures without controls'}, all complete",
        expected=0,
        observed=len(faults),
        unit="partners missing",
        remedy=CONTROL_NEEDED if bare and not paired else None,
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
    """Images decoded in full: all up to 32, else an even sample of 32, and all that the manifest left out."""
    seen = e.seen.get()
    faults = [f"{path} {reason}" for path, reason in seen.undecodable.items() if reason != "is missing"]
    total = len(e.recorded_sizes())
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
    """Captions are text, not empty, nothing lost in decoding, and with their settings the manifest's prompts."""
    faults = [f"{located.caption} {located.unreadable}" for located in e.pairs if located.unreadable]
    faults += [f"{located.caption} is empty" for located in e.pairs if _wordless(located)]
    texts = {id(located.sample): located for located in e.pairs}
    for sample in e.samples:
        located, told = texts.get(id(sample)), [sample["prompt"], *sample["alternatives"]]
        if not sample["prompt"].strip() and not (located and _wordless(located)):
            faults.append(f"{sample['id']} has an empty prompt")
        elif any("\ufffd" in text for text in told):
            faults.append(f"{sample['id']} has characters that were lost in decoding")
        elif located and located.prompts and not _same(told, located.prompts):
            faults.append(f"{sample['id']} has another prompt than its caption")
    return verdict_of(
        not faults,
        listing(faults) or f"{len(e.samples)} captions",
        expected=0,
        observed=len(faults),
        unit="captions",
    )


def _wordless(located: Located) -> bool:
    return bool(located.caption) and not located.prompts and not located.unreadable


def _same(told: Sequence[str], expected: Sequence[str]) -> bool:
    return len(told) == len(expected) and all(map(same, told, expected))


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
    sizes = e.recorded_sizes() | e.seen.get().pictures
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
    """The number of held-out samples, whether one's target is trained on, or is of a regularisation set."""
    train, holdout, always = e.split("train"), e.split("holdout"), e.regularisation
    trained = {sample["target"]["sha256"]: sample["id"] for sample in train}
    shared = [
        f"{sample['id']} is the same picture as {trained[sample['target']['sha256']]}"
        for sample in holdout
        if sample["target"]["sha256"] in trained
    ]
    misplaced = [f"{s['id']} is of a regularisation set" for s in holdout if s["source"] in always]
    advice = ""
    if len(holdout) < HOLDOUT_ADVISED and len(e.samples) >= HOLDOUT_ADVISED_FROM:
        advice = f" ({HOLDOUT_ADVISED} are advised)"
    return verdict_of(
        len(holdout) >= HOLDOUT_MIN and not shared and not misplaced,
        listing(shared + misplaced) or f"{len(holdout)} held out{advice}",
        expected=f"at least {HOLDOUT_MIN}, none of them trained on or of a regularisation set",
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
