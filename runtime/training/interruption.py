"""Ctrl-C and SIGTERM become a wish that the loop grants after the step at hand."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Wish:
    signal_name: str = ""

    def __bool__(self) -> bool:
        return bool(self.signal_name)


@contextlib.contextmanager
def graceful() -> Iterator[Wish]:
    """Yields a Wish that turns true on the first signal; a second one interrupts at once."""
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish  # only the main thread may set handlers
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if wish:
            raise KeyboardInterrupt
        wish.signal_name = signal.Signals(number).name

    names = (
        "SIGINT",
        "SIGTERM",
        "SIGBREAK",
    )  # the last on Windows only: Ctrl-Break, and a console that closes
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
