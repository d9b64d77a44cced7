"""Which samples are set aside: never trained on, so that step 08 can tell learning from remembering."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from runtime.data import captions
from runtime.data.sample import Note, Sample
from runtime.data.sources.names import normal
from runtime.errors import DataError

FILE = "holdout.txt"
FROM, SHARE, LEAST, MOST = 10, 10, 3, 16
DEFAULT_RULE = f"default from {FROM} samples on: one in {SHARE}, at least {LEAST}, at most {MOST}"


def listed(folder: Path) -> list[str] | None:
    """The lines of holdout.txt, or None where there is none."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        text, _ = captions.decode(path.read_bytes())
    except UnicodeError as error:
        raise DataError(f"{path} can't be read as text: {error}", remedy="save it as UTF-8") from error
    return [normal(line.strip()) for line in text.splitlines() if line.strip()]


def split_off(
    samples: Sequence[Sample],
    wished: Sequence[str] | None,
    count: int | None,
    *,
    never: Collection[str] = (),
) -> tuple[list[Sample], str, list[Note]]:
    """Samples with their split, the rule that gave it, and what in the list matched nothing.

    `never`: names of sources that hold the base's behaviour and are trained on always.
    """
    able = [sample for sample in samples if sample.source not in never]
    notes: list[Note] = []
    if wished is not None:
        chosen = {sample.id for sample in able} & set(wished)
        rule = f"{FILE}: {len(chosen)} of {len(able)}"
        unknown = [name for name in dict.fromkeys(wished) if name not in chosen]
        notes = [Note(path=FILE, reason=f"{name}: no usable sample has this name") for name in unknown]
    else:
        wanted, why = _count(len(able), count)
        chosen = _lowest(able, wanted)
        rule = f"lowest sha256 of id: {len(chosen)} of {len(able)} ({why})"
    if able and len(chosen) == len(able):
        raise DataError(
            f"the holdout takes all {len(able)} samples and leaves none to train on",
            remedy="finetune dataset --holdout N, or shorten holdout.txt",
        )
    return [replace(s, split="holdout" if s.id in chosen else "train") for s in samples], rule, notes


def _lowest(samples: Sequence[Sample], count: int) -> set[str]:
    """Ids of lowest hash. One target under several captions is set aside whole, or it would be trained on too."""
    same: dict[str, list[str]] = {}
    for sample in samples:
        same.setdefault(sample.target.sha256, []).append(sample.id)
    chosen: set[str] = set()
    for sample in sorted(samples, key=lambda sample: rank(sample.id)):
        if len(chosen) >= count:
            break
        group = same[sample.target.sha256]
        if len(group) < len(samples):
            chosen.update(group)
    return chosen


def _count(samples: int, asked: int | None) -> tuple[int, str]:
    if asked is not None:
        return min(asked, samples), f"--holdout {asked}"
    if samples < FROM:
        return 0, DEFAULT_RULE
    return min(MOST, max(LEAST, samples // SHARE)), DEFAULT_RULE


def rank(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8")).hexdigest()
