"""Samples of many shapes in one run: each is trained as often as asked, with its own pictures and words.

From files to micro-batches, nothing in between replaced; faults that other trainers had are beside their cases.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from runtime import files
from runtime.cache import encode
from runtime.cache.key import Wanted
from runtime.commands.init import write_target
from runtime.data import reading
from runtime.training.batches import MicroBatch

Size = tuple[int, int]
"""Width, height in pixels."""
SQUARE = (64, 64)
EPOCHS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    target: Size = SQUARE
    controls: tuple[Size, ...] = (SQUARE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """`sets`: the samples of each folder by their stems; `lines`: what the dataset file says of a folder."""

    sets: Mapping[str, Mapping[str, Picture]]
    lines: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    several: bool = False
    """A base of the family that takes several controls."""
    buckets: frozenset[str] = frozenset({"64x64+64x64"})
    """Of its steps, height first: target and controls."""


def alike(stems: str, picture: Picture) -> dict[str, Picture]:
    return dict.fromkeys(stems.split(), picture)


PLAIN, ALONE = Picture(), Picture(controls=())
ODD = {
    "a": Picture(target=(47, 33), controls=((47, 33),)),
    "b": Picture(target=(48, 32), controls=((48, 32),)),
    "c": Picture(target=(49, 31), controls=((49, 31),)),
    "d": Picture(target=(33, 47), controls=((33, 47),)),
}
BUCKETS = {"data.processor.enable_bucket": True, "data.processor.target_size": [32, 48]}

MIXES = {
    "B3: one, two and three controls": Mix(
        sets={
            "one": {
                "a": PLAIN,
                "b": Picture(controls=(SQUARE,) * 2),
                "c": Picture(controls=(SQUARE,) * 3),
                "d": Picture(controls=(SQUARE,) * 3),
            }
        },
        several=True,
        buckets=frozenset({"64x64" + "+64x64" * count for count in (1, 2, 3)}),
    ),
    "B5: one control where several are allowed, alone in its batch": Mix(
        sets={"one": {"a": PLAIN}}, changes={"data.batch_size": 1}, several=True
    ),
    "B7: equal targets, controls lying and standing": Mix(
        sets={
            "one": {
                **alike("a b c", Picture(controls=((64, 32),))),
                **alike("d e f", Picture(controls=((32, 64),))),
            }
        },
        changes={"data.processor.controls_resize": "keep"},
        buckets=frozenset({"64x64+32x64", "64x64+64x32"}),
    ),
    "B9: no controls at all": Mix(sets={"one": alike("a b c", ALONE)}, buckets=frozenset({"64x64"})),
    "B9: some without": Mix(
        sets={"pairs": alike("a b c", PLAIN), "alone": alike("a b", ALONE)},
        buckets=frozenset({"64x64+64x64", "64x64"}),
    ),
    "C5: equal names in two folders": Mix(sets={"x": alike("a b", PLAIN), "y": alike("a b", PLAIN)}),
    "C7: at the edges of buckets": Mix(
        sets={"one": ODD}, changes=BUCKETS, buckets=frozenset({"32x48+32x48", "48x32+48x32"})
    ),
    "C7: the same, never enlarged": Mix(
        sets={"one": ODD},
        changes={**BUCKETS, "data.processor.target_size": [64, 64], "data.processor.bucket_no_upscale": True},
        buckets=frozenset({"32x32+32x32", "32x48+32x48", "16x48+16x48"}),
    ),
    "C7: the same, controls kept": Mix(
        sets={"one": ODD},
        changes={**BUCKETS, "data.processor.controls_resize": "keep"},
        buckets=frozenset({"32x48+32x32", "32x48+32x48", "32x48+16x48", "48x32+32x32"}),
    ),
    "C9: one of another aspect": Mix(
        sets={"one": {**alike("a b c d", PLAIN), "e": Picture(target=(96, 32), controls=((96, 32),))}},
        changes={"data.processor.enable_bucket": True, "data.batch_size": 3},
        buckets=frozenset({"64x64+64x64", "32x128+32x128"}),
    ),
    "A8: class images beside": Mix(
        sets={"own": alike("a b c", PLAIN), "class": alike("a b c", PLAIN)},
        lines={"class": "regularisation = true\nnum_repeats = 2\n"},
    ),
}


def draw(root: Path, sets: Mapping[str, Mapping[str, Picture]]) -> None:
    """Each picture of a colour of its own, each caption of words and length of its own."""
    shade = 0
    for name, pictures in sets.items():
        (root / name).mkdir()
        (root / f"{name}-controls").mkdir()
        for stem, picture in pictures.items():
            (root / name / f"{stem}.txt").write_text("blue " * (1 + shade % 3) + f"{shade}", encoding="utf-8")
            places = [root / f"{name}-controls" / f"{stem}_{n}.png" for n in range(len(picture.controls))]
            for size, path in zip(
                (picture.target, *picture.controls), (root / name / f"{stem}.png", *places), strict=True
            ):
                shade += 1
                Image.new("RGB", size, (shade * 37 % 256, shade * 11 % 256, shade * 71 % 256)).save(path)


def prepare(lab: Any, nano: Path, mix: Mix) -> None:
    """The mix scanned and cached, nothing held out."""
    draw(lab.root, mix.sets)
    listed = "".join(
        f'[[datasets]]\nimage_directory = "{name}"\n'
        + (
            f'control_directory = "{name}-controls"\n'
            if any((lab.root / f"{name}-controls").iterdir())
            else ""
        )
        + mix.lines.get(name, "")
        for name in mix.sets
    )
    (lab.root / "sets.toml").write_text(listed, encoding="utf-8")
    write_target(lab.workspace, model=None, dataset=str(lab.root / "sets.toml"), device=None)
    if mix.several:
        model = lab.root / "several"
        shutil.copytree(nano, model)
        index = files.read_json(model / "model_index.json") | {"_class_name": "QwenImageEditPlusPipeline"}
        (model / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        files.write_json(lab.workspace.local_path, {"external": {"model": str(model)}})
    found = reading.build(lab.workspace, "sets.toml", 0)
    assert found.dropped == ()
    lab.workspace.begin_evidence("02-dataset", "test").write(inputs={}, data=found.to_json())


@pytest.mark.parametrize("name", MIXES)
def test_each_sample_is_trained_as_often_as_asked_with_what_is_its_own(
    lab: Any, nano: Path, name: str
) -> None:
    mix = MIXES[name]
    prepare(lab, nano, mix)
    changes = {**mix.changes, "train.max_train_steps": None, "train.num_epochs": EPOCHS}
    lab.cache(changes)
    job = lab.job(changes)
    expected = own_tensors(lab, job, mix)
    assert len({want.folder for want in job.wants}) == len(expected)
    session = lab.launch(changes)
    windows = session.batches.windows(1, session.planned_steps, 1)
    micros = [micro for window in windows for micro in window]
    for micro in micros:
        compare(micro, expected)
        assert len(micro.ids) <= job.config.data.batch_size
    assert {micro.bucket for micro in micros} == mix.buckets
    planned = {item.id: item.bucket for item in session.batches.order.items}
    for micro in micros:
        sides = [
            tuple(8 * side for side in t.shape[-2:]) for t in (micro.target, *micro.conditioning.controls)
        ]
        assert {planned[own] for own in micro.ids} == {tuple(sides)}
    seen = Counter((micro.epoch, own) for micro in micros for own in micro.ids)
    views = {own: 2 if own.startswith("class/") else 1 for own in expected}
    assert seen == {(epoch, own): views[own] for epoch in range(EPOCHS) for own in expected}
    run = lab.fit(changes)
    trained = [line["samples"] for line in files.read_json_lines(run.path / "metrics.jsonl")]
    assert trained == [list(micro.ids) for micro in micros]


def own_tensors(lab: Any, job: Any, mix: Mix) -> dict[str, dict[str, torch.Tensor]]:
    """By id, what each sample alone is encoded to, from the files of that name."""
    encoders = encode.load(job.family, job.model, job.config)
    found = {}
    for want in job.wants:
        own = replace(want, target=replace(want.target, path=place(lab, mix, want)))
        shown = [path.path.name for path in want.controls]
        stem = own.target.path.stem
        assert shown == [f"{stem}_{number}.png" for number in range(len(shown))]
        found[want.id] = encode.encode(job.family, encoders, job.config, [own])[0].tensors
    return found


def place(lab: Any, mix: Mix, want: Wanted) -> Path:
    folder, _, stem = want.id.rpartition("/")
    return Path(lab.root / (folder or next(iter(mix.sets))) / f"{stem}.png")


def compare(micro: MicroBatch, expected: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Row i of a batch is of the i-th id: target, each control, and the words without their padding."""
    told = micro.conditioning
    for row, own in enumerate(micro.ids):
        length = expected[own]["prompt_embeds"].shape[0]
        rows = {"target": micro.target[row], "prompt_embeds": told.embeds[row, :length]}
        rows |= {f"control_{n}": control[row] for n, control in enumerate(told.controls)}
        assert rows.keys() == expected[own].keys()
        for name, tensor in rows.items():
            assert float((tensor - expected[own][name]).norm() / tensor.norm()) < 1e-5, (own, name)
        if told.mask is not None:
            assert told.mask[row].tolist() == [place < length for place in range(told.embeds.shape[1])]
