"""SIGINT and SIGTERM, noted so that work can stop at a good place.

Knows: signals.
Does not know: what is stopped.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def caught_signals(caught: list[int] | None = None) -> Iterator[list[int]]:
    """Inside the `with` block, the first SIGINT or SIGTERM is only noted in the list; a second SIGINT interrupts.

    Outside the main thread, where Python has no handlers, nothing changes.
    """
    caught = [] if caught is None else caught
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def remember(number: int, frame: Any) -> None:
        if caught and number == signal.SIGINT:  # somebody presses Ctrl-C again
            raise KeyboardInterrupt
        caught.append(number)

    old = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
