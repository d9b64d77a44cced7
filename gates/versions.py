"""Versions and their bounds, as far as ours go: releases, pre-releases, a local part after +."""

import re
from collections.abc import Callable

_VERSION = re.compile(r"v?(?P<release>\d+(?:\.\d+)*)(?P<rest>[^+]*)(?:\+(?P<local>.*))?")
_CLAUSE = re.compile(r"\s*(?P<operator>>=|<=|==|!=|<|>)\s*(?P<version>[^\s,]+)\s*")
_PRE = re.compile(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", re.IGNORECASE)

PARTS = 6  # no release has more

Key = tuple[tuple[int, ...], bool]

_OPERATORS: dict[str, Callable[[Key, Key], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def local_part(version: str) -> str:
    """xpu of 2.13.0+xpu, "" where there is none."""
    return version.partition("+")[2]


def minor(version: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+xpu. Raises ValueError for what is no version."""
    return _key(version)[0][:2]


def within(version: str, bounds: str) -> bool:
    """Whether `version` satisfies each clause of ">=2.9,<3". Raises ValueError for what is none.

    The local part does not count. A pre-release counts as before its release, and is, as pip has
    it, not below a bound that its release is not below either.
    """
    key = _key(version)
    for clause in bounds.split(","):
        if not clause.strip():
            continue
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            raise ValueError(f"{clause!r} is no bound")
        bound = _key(match["version"])
        if match["operator"] == "<":
            if not (key < bound and key[0] != bound[0]):
                return False
        elif not _OPERATORS[match["operator"]](key, bound):
            return False
    return True


def _key(version: str) -> Key:
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise ValueError(f"{version!r} is no version")
    release = [int(part) for part in match["release"].split(".")]
    padded = (*release, *[0] * (PARTS - len(release)))  # 2.9 is 2.9.0
    return padded, _PRE.match(match["rest"]) is None
