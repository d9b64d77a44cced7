"""All sources of a dataset read afresh, and each pair held beside the sample that the manifest makes of it."""

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.datasets import directories, folders, listings
from gates.datasets.counts import Count, Pair, normal
from gates.datasets.stated import ARCHIVES, LISTINGS, Stated, stated
from gates.datasets.stated import faults as layout_faults
from gates.datasets.wording import decode, prompts
from gates.evidence import EvidenceError, differences, inside, read_bytes, read_json
from gates.pictures import picture_sizes
from gates.workspace import Workspace

HOLDOUT_FILE = "holdout.txt"
IMPORT_FILE = "import.json"
BEYOND = "beyond max_samples"  # the one reason for which a sound sample may be left out
DECODED_AT_MOST = 32  # images; a photograph takes 0.1 s, and a gate should answer in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A pair of a source. Names are shown as the manifest's notes show them."""

    pair: Pair
    source: str
    prefix: str
    sample: dict[str, Any] | None
    """what the manifest makes of it; None where it is left out"""
    note: str | None
    """why it is left out, if the manifest says so"""
    prompts: tuple[str, ...]
    """as the caption and its source's settings have them"""
    unreadable: str
    """why its caption is no text"""

    @property
    def shown(self) -> str:
        return self.prefix + self.pair.target

    @property
    def caption(self) -> str:
        """Where its caption stands; empty where it has none."""
        place = self.pair.caption or self.pair.where
        return self.prefix + place if place else ""

    @property
    def beyond(self) -> bool:
        return self.sample is None and (self.note or "").startswith(BEYOND)

    def images(self) -> list[str]:
        return [self.prefix + path for path in self.pair.images()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The files behind a manifest, as they are now. All paths as its notes show them."""

    layout: tuple[str, ...]
    """why this is not the dataset that was scanned"""
    found: str
    pairs: tuple[Located, ...]
    strays: tuple[str, ...]
    """files of no target and rows that are none"""
    homeless: tuple[str, ...]
    """ids of samples that are in no source"""
    changed: tuple[str, ...]
    """a line for each listed file that is absent or has other bytes"""
    pictures: dict[str, Picture]
    undecodable: dict[str, str]
    """path to why"""
    wished_holdout: frozenset[str] | None
    """the lines of holdout.txt; None where there is no such file"""


def look(workspace: Workspace, data: dict[str, Any]) -> Seen:
    """Read what the checks of gate 02 need, of the manifest `data` and of what it leaves out."""
    place = workspace.resolve(data["root"])
    said = stated(place, data["layout"])
    layout, changed, counts = list(layout_faults(said, data["sources"], workspace)), [], {}
    changed += _changed_file(place, data)
    for one, source in zip(said, data["sources"], strict=False):
        counts[source["name"]] = count = _count(one, source, workspace) if not layout else Count()
        layout += [f"{source['name']}: {count.unrecognised}"] * bool(count.unrecognised)
        changed += _changed(source, data, workspace)
    pairs = list(_located(data, counts, workspace))
    pictures, undecodable = _decode(data, workspace, pairs)
    there = {id(located.sample) for located in pairs}
    return Seen(
        layout=tuple(layout),
        found="; ".join(count.found for count in counts.values()),
        pairs=tuple(pairs),
        strays=tuple(
            prefix_of(data, name) + fault for name, count in counts.items() for fault in count.faults
        ),
        homeless=tuple(sample["id"] for sample in data["samples"] if id(sample) not in there),
        changed=tuple(changed),
        pictures=pictures,
        undecodable=undecodable,
        wished_holdout=_wished_holdout(place if place.is_dir() else place.parent),
    )


def prefix_of(data: dict[str, Any], source: str) -> str:
    """What notes put before a path: nothing where the dataset is its only source."""
    return "" if data["dataset_file"] is None and len(data["sources"]) == 1 else f"{source}/"


def _count(said: Stated, source: dict[str, Any], workspace: Workspace) -> Count:
    if said.kind == "directory":
        controls = said.controls.resolve() if said.controls else None
        return directories.count(said.place.resolve(), controls, said.extension)
    if said.kind in LISTINGS:
        return listings.count(said.place.parent.resolve() / said.place.name, said.kind)
    return folders.count(
        workspace.resolve(source["root"]).resolve(), controls_needed=said.kind not in ARCHIVES
    )


# ---- listed files


def _changed_file(place: Path, data: dict[str, Any]) -> list[str]:
    record = data["dataset_file"]
    return differences(place.parent, {record["path"]: record}) if record else []


def _changed(source: dict[str, Any], data: dict[str, Any], workspace: Workspace) -> list[str]:
    prefix = prefix_of(data, source["name"])
    root, origin = workspace.resolve(source["root"]), workspace.resolve(source["origin"])
    own = [sample for sample in data["samples"] if sample["source"] == source["name"]]
    listed = {record["path"]: record for sample in own for record in _records(sample)}
    found = differences(root, listed) + differences(origin, {file["path"]: file for file in source["files"]})
    if source["kind"] in ARCHIVES:
        found += _import_faults(root, source)
    return [prefix + line for line in found]


def _import_faults(root: Path, source: dict[str, Any]) -> list[str]:
    """Whether what lies unpacked was unpacked of the archives that the manifest lists."""
    record = read_json(root / IMPORT_FILE, f"{source['root']}/{IMPORT_FILE}")
    unpacked = [*record.get("archives", ()), *record.get("beside", ())] if isinstance(record, dict) else []
    told = Counter((Path(file["name"]).name, file["size"], file["sha256"]) for file in unpacked)
    listed = Counter((Path(file["path"]).name, file["size"], file["sha256"]) for file in source["files"])
    return [] if told == listed else [f"{IMPORT_FILE} tells of other archives than the manifest"]


def _records(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from image_records(sample)
    if sample["caption"]:
        yield sample["caption"]


def image_records(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield sample["target"]
    yield from sample["controls"]
    if sample["mask"]:
        yield sample["mask"]


# ---- pairs and samples


def _located(data: dict[str, Any], counts: dict[str, Count], workspace: Workspace) -> Iterator[Located]:
    notes = {item["path"]: item["reason"] for item in data["dropped"]}
    samples = defaultdict(list)
    for sample in data["samples"]:
        samples[sample["source"]].append(sample)
    for source in data["sources"]:
        count, prefix = counts.get(source["name"]), prefix_of(data, source["name"])
        root = workspace.resolve(source["root"])
        if count is None:
            continue
        read = [(pair, *_read_caption(root, prefix, pair, source["settings"])) for pair in count.pairs]
        partners = _assign([(pair, texts) for pair, texts, _ in read], samples[source["name"]])
        for (pair, texts, unreadable), sample in zip(read, partners, strict=True):
            note = notes.get(prefix + pair.target, notes.get(prefix + pair.where))
            yield Located(
                pair=pair,
                source=source["name"],
                prefix=prefix,
                sample=sample,
                note=note if sample is None else None,
                prompts=texts,
                unreadable=unreadable,
            )


def _read_caption(
    root: Path, prefix: str, pair: Pair, settings: dict[str, Any]
) -> tuple[tuple[str, ...], str]:
    if pair.text is not None:
        return tuple(prompts(pair.text, settings)), ""
    if pair.caption is None:
        return (), ""
    try:
        data = read_bytes(inside(root, pair.caption), prefix + pair.caption)
        return tuple(prompts(decode(data, prefix + pair.caption), settings)), ""
    except EvidenceError as error:
        return (), error.message


def _assign(
    pairs: list[tuple[Pair, tuple[str, ...]]], samples: list[dict[str, Any]]
) -> list[dict[str, Any] | None]:
    """The sample of each pair: of several rows for one target first those that are alike in all."""
    found: list[dict[str, Any] | None] = [None] * len(pairs)
    rest = samples
    for of_pair, of_sample in ((_whole, _whole_sample), (_target, _target_sample)):
        waiting: dict[Any, deque[dict[str, Any]]] = defaultdict(deque)
        for sample in rest:
            waiting[of_sample(sample)].append(sample)
        for index, (pair, texts) in enumerate(pairs):
            if found[index] is None and waiting[key := of_pair(pair, texts)]:
                found[index] = waiting[key].popleft()
        rest = [sample for queue in waiting.values() for sample in queue]
    return found


def _whole(pair: Pair, texts: Iterable[str]) -> Any:
    return pair.target, pair.controls, pair.mask, tuple(tuple(text.split()) for text in texts)


def _whole_sample(sample: dict[str, Any]) -> Any:
    texts = (sample["prompt"], *sample["alternatives"])
    return (*partners(sample), tuple(tuple(text.split()) for text in texts))


def partners(sample: dict[str, Any]) -> tuple[str, tuple[str, ...], str | None]:
    """Paths of target, controls and mask."""
    mask = sample["mask"]["path"] if sample["mask"] else None
    return sample["target"]["path"], tuple(control["path"] for control in sample["controls"]), mask


def _target(pair: Pair, texts: Iterable[str]) -> Any:
    return pair.target


def _target_sample(sample: dict[str, Any]) -> Any:
    return sample["target"]["path"]


# ---- pictures


def _decode(
    data: dict[str, Any], workspace: Workspace, pairs: Iterable[Located]
) -> tuple[dict[str, Picture], dict[str, str]]:
    """Of the sampled images at most 64; and all that were left out for a reason that must show."""
    roots = {source["name"]: workspace.resolve(source["root"]) for source in data["sources"]}
    places = {
        prefix_of(data, sample["source"]) + image["path"]: (sample["source"], image["path"])
        for sample in data["samples"]
        for image in image_records(sample)
        if sample["source"] in roots
    }
    chosen = {shown: places[shown] for shown in _chosen(places)}
    for located in pairs:
        if located.sample is None and not located.beyond:
            chosen |= {located.prefix + path: (located.source, path) for path in located.pair.images()}
    return _measured({shown: (roots[source], path) for shown, (source, path) in chosen.items()})


def _measured(chosen: dict[str, tuple[Path, str]]) -> tuple[dict[str, Picture], dict[str, str]]:
    places, pictures, broken = [], {}, {}
    for shown, (root, path) in chosen.items():
        try:
            places.append((inside(root, path, shown), shown))
        except EvidenceError as error:
            broken[shown] = error.message
    for (_, shown), size in zip(places, picture_sizes(places), strict=True):
        if size.error:
            broken[shown] = size.error.message
        else:
            width, height = size.get()
            pictures[shown] = Picture(width=width, height=height)
    return pictures, broken


def _chosen(paths: Iterable[str]) -> list[str]:
    """All, or 32 that look arbitrary and are the same at every judging."""
    return sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest())[:DECODED_AT_MOST]


# ---- holdout


def _wished_holdout(folder: Path) -> frozenset[str] | None:
    path = folder / HOLDOUT_FILE
    if not path.is_file():
        return None
    lines = decode(read_bytes(path, HOLDOUT_FILE), HOLDOUT_FILE).split("\n")
    return frozenset(normal(line.strip()) for line in lines if line.strip())
