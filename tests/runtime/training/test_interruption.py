"""Signals become a wish."""

import signal
import threading

import pytest

from runtime.training.interruption import Wish, graceful


def test_first_signal_is_a_wish_and_the_second_interrupts() -> None:
    with graceful() as wish:
        assert not wish
        signal.raise_signal(signal.SIGTERM)
        assert wish and wish.signal_name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_come_back_even_on_an_exception() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="inside"), graceful():
        assert signal.getsignal(signal.SIGINT) is not before
        raise RuntimeError("inside")
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    seen: list[Wish] = []

    def work() -> None:
        with graceful() as wish:
            seen.append(wish)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [Wish()]
