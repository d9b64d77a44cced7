"""One process at a time, for commands that write to the same place."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from runtime.progress import Progress


@contextlib.contextmanager
def alone(path: Path, progress: Progress, what: str) -> Iterator[None]:
    """Hold the lock file `path`; a second process waits, and says that another one does `what`.

    The system takes the lock from a process that ends, however it ends: a file left behind stops nobody.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.say(f"another process {what}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
