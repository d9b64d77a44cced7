"""The bounds of the compiler during a fit, and what it made.

torch compiles anew for shapes that its last attempt can't serve, and past a limit falls back to eager for good, with a
line in its own log alone. A run with several buckets needs more room than the default, but an end all the same.
"""

import contextlib
from collections.abc import Callable, Iterator

MOST = 32  # compilations of one function; a bucket takes one or two, lengths of text none of their own

Made = Callable[[], int]
"""Compilations of the fit so far."""


@contextlib.contextmanager
def bounded(wanted: bool) -> Iterator[Made]:
    """MOST for as long as the block runs; the limits are afterwards as they were.

    What an earlier fit of this process compiled is forgotten: it would count towards the limit.
    """
    if not wanted:
        yield lambda: 0
        return
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    before = int(counters["stats"]["unique_graphs"])
    with torch._dynamo.config.patch(recompile_limit=MOST, accumulated_recompile_limit=8 * MOST):
        yield lambda: int(counters["stats"]["unique_graphs"]) - before


def fault(made: int) -> str:
    """What to tell of a number of compilations; empty where it is as it should be."""
    return f"{made} compilations, the most there may be: further shapes run eagerly" if made >= MOST else ""
