"""validation.prompt_file as the judge reads it: JSON lines where its name ends in .jsonl, else prompts with flags.

    paint the circle red --ci control.png --w 672 --h 384 --d 42 --s 20 --n blurry

What a line may hold is what the config schema says of an item of validation.samples.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gates.evidence import EvidenceError, MissingEvidenceError, parse_json, read_bytes
from gates.workspace import Workspace, setting_problems

REMEDY = "correct validation.prompt_file or what it says, then finetune plan"
_FLAG = re.compile(r"(?<!\S)--([A-Za-z]\S*)")
_WHOLE = {"w": "width", "h": "height", "d": "seed", "s": "num_inference_steps"}
# The least that a config must have for one of its items to be judged by the schema.
_AROUND = {"model": {"pretrained_model_name_or_path": "x"}, "train": {"max_train_steps": 1}}


def read(workspace: Workspace, reference: str) -> list[dict[str, Any]]:
    """An item of validation.samples for each line, with `paths` of its images. EvidenceError by line."""
    path = Path(os.path.normpath(workspace.resolve(reference)))
    shown = workspace.shown(path)
    found = []
    for number, line in _lines(path, shown):
        where = f"{shown} line {number}"
        item = _of_json(line, where) if path.suffix.lower() == ".jsonl" else _of_flags(line, where)
        problems = setting_problems({**_AROUND, "validation": {"samples": [item]}})
        if problems:
            raise EvidenceError(where, problems[0].removeprefix("validation.samples[0]."), remedy=REMEDY)
        paths = [_image(workspace, path, image, where) for image in item["images"]]
        found.append({**item, "paths": paths})
    workspace.note(path)
    return found


def _lines(path: Path, shown: str) -> Iterator[tuple[int, str]]:
    try:
        text = read_bytes(path, shown).decode("utf-8-sig")
    except MissingEvidenceError as error:
        raise MissingEvidenceError(shown, error.message, remedy=REMEDY) from error
    except UnicodeDecodeError as error:
        raise EvidenceError(shown, f"is no UTF-8 at byte {error.start}", remedy=REMEDY) from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line.strip()


def _of_json(line: str, where: str) -> dict[str, Any]:
    item = parse_json(line.encode("utf-8"), where)
    if not isinstance(item, dict):
        raise EvidenceError(where, "is no JSON object", remedy=REMEDY)
    return item


def _of_flags(line: str, where: str) -> dict[str, Any]:
    marks = list(_FLAG.finditer(line))
    starts = [*(mark.start() for mark in marks), len(line)]
    item: dict[str, Any] = {"prompt": line[: starts[0]].strip(), "images": []}
    sides: dict[str, int] = {}
    for mark, end in zip(marks, starts[1:], strict=True):
        flag, value = mark[1], line[mark.end() : end].strip()
        name = _WHOLE.get(flag, "negative_prompt" if flag == "n" else "")
        if flag == "ci" and value:
            item["images"].append(value)
        elif name in item or name in sides or not name or not value:
            raise EvidenceError(where, f"--{flag}: without value, given twice, or not known", remedy=REMEDY)
        elif flag == "n":
            item[name] = value
        elif not re.fullmatch("[0-9]{1,19}", value):
            raise EvidenceError(where, f"--{flag}: {value[:40]} is no whole number", remedy=REMEDY)
        else:
            (sides if flag in "wh" else item)[name] = int(value)
    if len(sides) == 1:
        raise EvidenceError(where, "--w and --h go together", remedy=REMEDY)
    return {**item, "size": [sides["height"], sides["width"]]} if sides else item


def _image(workspace: Workspace, file: Path, written: str, where: str) -> Path:
    """Named relative to the file; in the workspace where that lies there, else in the file's folder."""
    root = workspace.root if file.is_relative_to(workspace.root) else file.parent
    path = Path(os.path.normpath(file.parent / written.replace("\\", "/")))
    if not path.is_relative_to(root):
        raise EvidenceError(where, f"{written} lies outside of {workspace.shown(root)}", remedy=REMEDY)
    return path
