"""Prompts of the config and of its file as cached, and as the judge, by its own code, says they must be."""

from typing import Any

import pytest

from gates import caches
from gates.workspace import Workspace as Judged
from runtime.errors import CacheError, DataError

LISTED = {"prompt": "make it green", "images": ["dataset/control_images/p0.png"]}
LINES = (
    "paint it blue --ci control_images/p1.png --w 48 --h 32 --d 7 --n grey\n"
    "paint it blue --ci control_images/p1.png --s 3\n"
)
CHANGES = {"validation.samples": [LISTED], "validation.prompt_file": "dataset/p.txt"}


@pytest.fixture
def written(lab: Any) -> Any:
    (lab.root / "dataset" / "p.txt").write_text(LINES, encoding="utf-8")
    return lab


def faults(lab: Any) -> list[str]:
    judged = Judged.open(lab.root)
    dataset = judged.evidence("02-dataset")
    found = caches.config_faults(caches.read(judged), dataset, judged.settings, caches.prompts(judged))
    return [fault for fault in found if "prompt-" in fault]


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_entries_are_what_the_judge_expects(written: Any, guidance: float) -> None:
    changes = {**CHANGES, "validation.guidance_scale": guidance}
    written.cache(changes)
    wants = {want.id: want for want in written.job(changes).wants if want.split == "prompt"}
    assert [(w.document["prompt"], w.document["sizes"]["target"]) for w in wants.values()] == [
        ("make it green", [64, 64]),
        ("paint it blue", [32, 48]),
        ("paint it blue", [64, 64]),
    ]
    assert wants["prompt-1"].document["sizes"]["controls"] == [[32, 48]], "as beside a target of that size"
    negatives = [want.document["negative_prompt"] for want in wants.values()]
    assert negatives == ([" ", "grey", " "] if guidance > 1 else [None] * 3)
    assert faults(written) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("paint it blue", "paint it black", "prompt-1: another prompt"),
        ("p1.png", "p2.png", "prompt-1: another controls"),
        ("--w 48", "--w 64", "prompt-1: 32x48+32x48 in the cache, 32x64+32x64 configured"),
        ("grey", "dull", "prompt-1: another negative_prompt"),
        ("--n grey", "", "prompt-1: another negative_prompt"),
        ("paint it blue --ci control_images/p1.png --s 3\n", "", "an entry for prompt-2"),
    ],
)
def test_a_line_that_changed_makes_the_entry_stale_for_both(
    written: Any, old: str, new: str, fault: str
) -> None:
    changes = {**CHANGES, "validation.guidance_scale": 2.0}
    written.cache(changes)
    (written.root / "dataset" / "p.txt").write_text(LINES.replace(old, new), encoding="utf-8")
    assert any(line.startswith(fault) for line in faults(written)), faults(written)
    if new or old.startswith("--n"):
        with pytest.raises(CacheError, match="prompt-1"):
            written.launch(changes)


def test_seed_and_steps_leave_the_entry_as_it_is(written: Any) -> None:
    before = [want.key for want in written.job(CHANGES).wants]
    (written.root / "dataset" / "p.txt").write_text(
        LINES.replace("--d 7", "--d 8").replace("--s 3", "--s 4"), encoding="utf-8"
    )
    assert [want.key for want in written.job(CHANGES).wants] == before


@pytest.mark.parametrize("step", ["cache", "plan"])
def test_a_size_that_is_no_multiple_is_refused(written: Any, step: str) -> None:
    from runtime.planning.plan import make_plan

    (written.root / "dataset" / "p.txt").write_text(LINES.replace("--w 48", "--w 50"), encoding="utf-8")
    loaded = written.configure(CHANGES)
    with pytest.raises(DataError, match=r"dataset/p\.txt line 1: size 32 x 50 .* multiples of 16"):
        written.job(CHANGES) if step == "cache" else make_plan(written.workspace, loaded)


def test_the_plan_counts_what_the_file_asks_for(written: Any) -> None:
    from runtime.planning.plan import make_plan

    wide = LINES.replace("--w 48 --h 32", "--w 1024 --h 1024")
    (written.root / "dataset" / "p.txt").write_text(wide, encoding="utf-8")
    silent, painting, none = (
        make_plan(written.workspace, written.configure(changes))
        for changes in (CHANGES, {**CHANGES, "validation.sample_steps": 2}, {})
    )
    fits = [plan.phases["fit"].components_gib["activations"] for plan in (silent, painting, none)]
    assert fits[0] == fits[2] < fits[1]
    assert silent.phases["validate"].peak_gib > none.phases["validate"].peak_gib
    assert silent.disk_needed_gib > none.disk_needed_gib
