"""The gates in their order, loaded only from the installed package or its checkout."""

import importlib.util
import re
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from gates import packaged

if TYPE_CHECKING:
    from gates.checks import Gate

SERIES = "qwen-image-edit-aipc-finetune-"
SKILLS = (
    f"{SERIES}01-host",
    f"{SERIES}02-dataset",
    f"{SERIES}03-environment",
    f"{SERIES}04-config",
    f"{SERIES}05-adaptation",
    f"{SERIES}06-quantize",
    f"{SERIES}07-training",
    f"{SERIES}08-validation",
)
_NUMBER = re.compile(r"0?([1-8])")


class UnknownGateError(ValueError):
    """No gate of that name; the message lists those there are."""


def numbers() -> tuple[str, ...]:
    return tuple(skill.removeprefix(SERIES)[:2] for skill in SKILLS)


def skill_of(number: str) -> str:
    return next(skill for skill in SKILLS if skill.removeprefix(SERIES).startswith(number))


@cache
def load(number: str) -> "Gate":
    gate: Gate = load_module(skill_of(number)).GATE
    return gate


def load_module(skill: str) -> ModuleType:
    """skills/<skill>/gate.py under a name of its own, for eight modules are called gate."""
    path = packaged.data_dir("skills") / skill / "gate.py"
    name = "gates._loaded_" + skill.replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and dataclasses look a class's module up there
    spec.loader.exec_module(module)
    return module


def resolve(text: str) -> list[str]:
    """Gate numbers that `7`, `07`, a skill's name, `all` or `01..05` mean, those registered, in order."""
    if text == "all":
        return list(numbers())
    if ".." in text:
        first, _, last = text.partition("..")
        low, high = _number(first, text), _number(last, text)
        found = [number for number in numbers() if low <= number <= high]
        if not found:
            raise _unknown(text)
        return found
    number = _number(text, text)
    if number not in numbers():
        raise _unknown(text)
    return [number]


def up_to(number: str) -> list[str]:
    return [other for other in numbers() if other <= number]


def _number(text: str, whole: str) -> str:
    match = _NUMBER.fullmatch(text)
    if match:
        return "0" + match[1]
    for skill in SKILLS:
        if text in (skill, skill.removeprefix(SERIES), skill.removeprefix(SERIES)[3:]):
            return skill.removeprefix(SERIES)[:2]
    raise _unknown(whole)


def _unknown(text: str) -> UnknownGateError:
    return UnknownGateError(f"{text}: no such gate; there are {', '.join(numbers())} and all")
