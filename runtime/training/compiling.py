"""The bounds of the compiler during a fit, and what it made.

torch compiles anew for shapes that its last attempt can't serve, and past a limit falls back to eager for good, without
a word. A run with several buckets and many lengths of text needs more room than the default, but an end all the same.
"""

import contextlib
from collections.abc import Iterator

MOST = 32  # compilations of one function; a bucket takes one or two, lengths of text none of their own


@contextlib.contextmanager
def bounded(wanted: bool) -> Iterator[None]:
    """MOST for as long as the block runs; the limits are afterwards as they were."""
    if not wanted:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=MOST, accumulated_recompile_limit=8 * MOST):
        yield


def made() -> int:
    """Compilations of this process so far; 0 where the compiler was never loaded."""
    import sys

    if "torch._dynamo.utils" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
