"""What a known fault is: a row that says what shows it, what causes it and what mends it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gates.faults.logs import Line, Log

Detect: TypeAlias = Callable[[Log], Line | None]
KILLED = (-9, 137)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    id: str
    title: str
    cause: str
    mend: tuple[str, ...]
    """what to do, most likely first; commands where there are any"""
    sources: tuple[str, ...]
    """where it is known from"""
    patterns: tuple[str, ...] = ()
    """regular expressions, case ignored: a line that any of them finds shows the fault"""
    also: tuple[str, ...] = ()
    """each of them must be found somewhere in the log too"""
    unless: tuple[str, ...] = ()
    """none of them may be found"""
    stages: tuple[str, ...] = ()
    """where the log must stop, see logs.STAGES; (): anywhere"""
    exit_codes: tuple[int, ...] = ()
    """one of these shows it too, where the log has no word of an end"""
    silent: bool = False
    """the process died without a word at one of `stages`, and that is what shows it"""
    needs_exit: bool = True
    """of a silent one: the log alone doesn't show it, for the process may still be at work there"""
    detect: Detect | None = None
    """for what one line can't show"""
    covers: tuple[str, ...] = ()
    """ids of less exact faults that this one explains too"""
