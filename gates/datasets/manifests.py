"""Where a manifest and the dataset as it lies there differ, and what of it is not trained on."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gates.datasets.counts import normal
from gates.datasets.looking import HOLDOUT_FILE, Located, Picture, Seen, partners, prefix_of
from gates.datasets.stated import ARCHIVES


def differences(data: dict[str, Any], seen: Seen) -> list[str]:
    """A line each; the digests of listed files are `seen.changed`."""
    return [
        *seen.changed,
        *_unlisted(seen),
        *_identities(data, seen),
        *(fault for located in seen.pairs for fault in _partner_faults(located)),
        *_capped(data, seen),
        *_dropped(data),
        *holdout_faults(seen.wished_holdout, data),
    ]


def _unlisted(seen: Seen) -> Iterator[str]:
    for located in seen.pairs:
        if located.sample is None and located.note is None:
            where = located.prefix + (located.pair.where or located.pair.target)
            yield f"{where} is in the dataset and not in the manifest"


def _identities(data: dict[str, Any], seen: Seen) -> Iterator[str]:
    ids = Counter(sample["id"] for sample in data["samples"])
    yield from (f"sample {name} is listed twice" for name, times in sorted(ids.items()) if times > 1)
    yield from (
        f"sample {name} is in the manifest and not in the dataset" for name in seen.homeless if ids[name] == 1
    )
    names = {source["name"] for source in data["sources"]}
    yield from (
        f"sample {sample['id']} is of a source {sample['source']} that is not listed"
        for sample in data["samples"]
        if sample["source"] not in names
    )


def _partner_faults(located: Located) -> Iterator[str]:
    pair, sample = located.pair, located.sample
    if sample is None:
        return
    _, controls, mask = partners(sample)
    caption = sample["caption"]["path"] if sample["caption"] else None
    told = {"controls": controls, "mask": mask, "caption file": caption}
    there = {"controls": pair.controls, "mask": pair.mask, "caption file": pair.caption}
    yield from (
        f"{sample['id']} has another {name} in the dataset than in the manifest"
        for name in told
        if told[name] != there[name]
    )


def _capped(data: dict[str, Any], seen: Seen) -> Iterator[str]:
    """Samples left out for a `max_samples` that is not set, or leaves room; and more than it allows."""
    used = Counter(sample["source"] for sample in data["samples"])
    beyond = Counter(located.source for located in seen.pairs if located.beyond)
    for source in data["sources"]:
        name, limit = source["name"], source["settings"]["max_samples"]
        if limit is not None and used[name] > limit:
            yield f"{name} has {used[name]} samples, its max_samples is {limit}"
        elif beyond[name] and (limit is None or used[name] < limit):
            yield f"{name} leaves {beyond[name]} samples out, its max_samples is {limit} and {used[name]} are used"


def _dropped(data: dict[str, Any]) -> Iterator[str]:
    counted = sum(source["dropped"] for source in data["sources"])
    if counted != len(data["dropped"]):
        yield f"the sources count {counted} dropped files, the manifest lists {len(data['dropped'])}"


def holdout_faults(wished: frozenset[str] | None, data: dict[str, Any]) -> list[str]:
    """Samples that holdout.txt names now and the manifest trains on, or the other way round."""
    if wished is None:
        removed = str(data["holdout_rule"]).startswith(HOLDOUT_FILE)
        return [f"{HOLDOUT_FILE}, by which the manifest set samples aside, is gone"] if removed else []
    always = {source["name"] for source in data["sources"] if source["settings"]["regularisation"]}
    split = {
        normal(sample["id"]): sample["split"] for sample in data["samples"] if sample["source"] not in always
    }
    return [
        f"{name} is {HOLDOUT_FILE}'s, and not held out in the manifest"
        if name in wished
        else f"{name} is held out in the manifest, and not in {HOLDOUT_FILE}"
        for name, kind in split.items()
        if (name in wished) != (kind == "holdout")
    ]


def missing_partners(pairs: Iterable[Located]) -> Iterator[str]:
    """Targets without the control or caption that their kind of source asks for."""
    for located in pairs:
        prompt = located.sample["prompt"] if located.sample else ""
        # A caption file that is gone since the scan is a changed file, which another check tells.
        parts = [part for part in located.pair.missing() if part != "caption" or not prompt]
        yield from (f"{located.shown} has no {part}" for part in parts)


def left_out(data: dict[str, Any], seen: Seen, usable: Callable[[Picture], bool]) -> Iterator[str]:
    """Samples that the manifest drops with a word, while nothing is found here that is wrong with them."""
    for located in seen.pairs:
        if located.sample is None and located.note is not None and not located.beyond:
            pictures = [seen.pictures.get(path) for path in located.images()]
            sound = all(picture is not None and usable(picture) for picture in pictures)
            if sound and located.prompts and not any(located.pair.missing()):
                yield f"{located.shown} was left out: {located.note}"
    yield from _rows_left_out(data, seen)


def _rows_left_out(data: dict[str, Any], seen: Seen) -> Iterator[str]:
    """Rows of archives that never became files: there is nothing to count again but the note."""
    shown = {located.shown for located in seen.pairs}
    for source in data["sources"]:
        prefix = prefix_of(data, source["name"])
        yield from (
            f"{note['path']} was left out: {note['reason']}"
            for note in data["dropped"]
            if source["kind"] in ARCHIVES and note["path"].startswith(prefix) and note["path"] not in shown
        )
