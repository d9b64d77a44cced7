"""One row of the fault matrix: what is planted, in which healthy workspace, and which checks it must turn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Spoil = Callable[[Any], object]
"""Plants the fault in a `gates.selftest.editing.Made`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    what: str
    """one line, in the words of whoever meets it"""
    fails: frozenset[str]
    """the checks that must fail, and no other; in gate 07 as phase/check"""
    errors: frozenset[str]
    """the checks that must end in an error, and no other"""
    shape: str
    """of the healthy workspace that is spoilt, a name of `gates.selftest.shapes.SHAPES`"""
    spoil: Spoil

    @property
    def turns(self) -> frozenset[str]:
        return self.fails | self.errors


def fault(
    what: str, fails: set[str], spoil: Spoil, *, errors: set[str] | None = None, shape: str = "cpu"
) -> Fault:
    return Fault(what=what, fails=frozenset(fails), errors=frozenset(errors or ()), shape=shape, spoil=spoil)


def each(*spoils: Spoil) -> Spoil:
    """One after the other."""

    def spoil(made: Any) -> None:
        for one in spoils:
            one(made)

    return spoil
