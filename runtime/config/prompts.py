"""What is painted beside the held-out samples: `validation.samples`, then the lines of `validation.prompt_file`.

A file ending in .jsonl has one object a line, with the keys of `validation.samples`. Any other has the lines that
musubi-tuner and sd-scripts read, with `#` at the start of a comment:

    paint the circle red --ci control.png --w 672 --h 384 --d 42 --s 20 --n blurry

Pictures are named relative to the file. They lie in the workspace where the file does, else in the file's folder.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runtime.config.model import Config, ValidationSample
from runtime.errors import DataError
from runtime.workspace import Workspace

FLAG = re.compile(r"(?:^|\s)--(?=[A-Za-z])")
KEYS = {
    "ci": "images",
    "w": "width",
    "h": "height",
    "d": "seed",
    "s": "num_inference_steps",
    "n": "negative_prompt",
}
UNUSED = {
    "l": "validation.guidance_scale holds for all prompts",
    "g": "validation.guidance_scale holds for all prompts",
    "fs": "the schedule is the family's own",
    "f": "a prompt gives one picture",
    "i": "an edit takes its pictures by --ci",
    "cn": "an edit takes its pictures by --ci",
    "of": "the run names its files",
}

Images = tuple[tuple[str, Path], ...]
"""Name and place of each control; the name, for the index, is as the user wrote it or relative to the workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    name: str
    """The id of its cache entry: prompt-0, prompt-1, ..."""
    where: str
    """Where it was asked for, as messages say it."""
    asked: ValidationSample
    images: Images


class _LineError(Exception):
    """Why a line can't be used."""


def prompts_of(config: Config, workspace: Workspace) -> list[Prompt]:
    """All prompts, in order. Raises DataError that names the item of the list, or the line of the file."""
    found = [*_listed(config, workspace), *_written(config, workspace)]
    for where, _, images in found:
        for _, path in images:
            if not path.is_file():
                raise DataError(
                    f"{where}: no image at {path}",
                    remedy="correct the path in config.yaml or the prompt file",
                )
    return [
        Prompt(name=f"prompt-{number}", where=where, asked=asked, images=images)
        for number, (where, asked, images) in enumerate(found)
    ]


def gathered(config: Config, workspace: Workspace) -> Config:
    """`config` with the file's prompts in `validation.samples`: for what counts them and asks for no picture."""
    samples = tuple(prompt.asked for prompt in prompts_of(config, workspace))
    changed = config.validation.model_copy(update={"samples": samples, "prompt_file": None})
    return config.model_copy(update={"validation": changed})


def refuse_broken_sizes(prompts: list[Prompt], step: int) -> None:
    """Raises DataError for a prompt's own size that is no multiple of `step`, the family's."""
    for prompt in prompts:
        size = prompt.asked.size
        if size is not None and any(side % step for side in size):
            near = [max(1, round(side / step)) * step for side in size]
            raise DataError(
                f"{prompt.where}: size {size[0]} x {size[1]} (height x width); both must be multiples of {step}",
                remedy=f"write height {near[0]}, width {near[1]}",
            )


_Item = tuple[str, ValidationSample, Images]


def _listed(config: Config, workspace: Workspace) -> Iterator[_Item]:
    for number, asked in enumerate(config.validation.samples):
        images = tuple((f"validation/{image}", workspace.resolve(image)) for image in asked.images)
        yield f"validation.samples[{number}]", asked, images


def _written(config: Config, workspace: Workspace) -> Iterator[_Item]:
    if config.validation.prompt_file is None:
        return
    path = workspace.resolve(config.validation.prompt_file)
    root = workspace.resolve(".")
    if not path.is_relative_to(root):
        root = path.parent
    shown = path.relative_to(root).as_posix()
    parse = _json if path.suffix.lower() == ".jsonl" else _flags
    for number, line in _lines(path, shown):
        where = f"{shown} line {number}"
        try:
            asked = _sample(parse(line))
            yield where, asked, tuple(_image(image, path.parent, root, shown) for image in asked.images)
        except _LineError as error:
            raise DataError(f"{where}: {error}", remedy=f"correct {shown}") from None


def _lines(path: Path, shown: str) -> Iterator[tuple[int, str]]:
    """Numbered from 1, without blank ones and comments. Raises DataError for a file that is absent or no UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise DataError(
            f"validation.prompt_file: {shown} can't be read: {error.strerror}",
            remedy="correct validation.prompt_file in config.yaml",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{shown} is no UTF-8 at byte {error.start}", remedy=f"save {shown} as UTF-8"
        ) from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line.strip()


def _json(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise _LineError("is no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _LineError("a key comes twice")
    return found


def _flags(line: str) -> dict[str, Any]:
    """The keys of `validation.samples` from a prompt and its flags."""
    prompt, *parts = FLAG.split(line)
    found: dict[str, Any] = {"prompt": prompt.strip(), "images": []}
    for part in parts:
        flag, *values = part.split(None, 1)
        key, value = _key(flag), "".join(values).strip()
        if not value:
            raise _LineError(f"--{flag} has no value")
        if key == "images":
            found[key].append(value)
        elif key in found:
            raise _LineError(f"--{flag} comes twice")
        else:
            found[key] = value if key == "negative_prompt" else _whole(flag, value)
    sides = [found.pop(side, None) for side in ("height", "width")]
    if sides == [None, None]:
        return found
    if None in sides:
        raise _LineError("--w and --h go together, saw one of them")
    return {**found, "size": sides}


def _key(flag: str) -> str:
    if flag in KEYS:
        return KEYS[flag]
    raise _LineError(f"--{flag} is not used here: {UNUSED.get(flag, 'known are --' + ' --'.join(KEYS))}")


def _whole(flag: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", value):
        raise _LineError(f"--{flag}: saw {value[:40]}, expected a whole number")
    return int(value)


def _sample(found: dict[str, Any]) -> ValidationSample:
    try:
        return ValidationSample.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise _LineError(f"{key}: {first['msg']}") from None


def _image(written: str, folder: Path, root: Path, shown: str) -> tuple[str, Path]:
    """A picture named relative to `folder`; what Windows wrote is read elsewhere too."""
    path = Path(os.path.normpath(folder / written.replace("\\", "/")))
    if not path.is_relative_to(root):
        raise _LineError(f"{written} lies outside of the folder that {shown} may name pictures of")
    return f"validation/{path.relative_to(root).as_posix()}", path
