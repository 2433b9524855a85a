"""Ctrl-C, noticed between two steps of a long job."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(on_first: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; the first time calls `on_first`, the second does what it always does."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are the main thread's
        return
    asked = False

    def note(*_: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)
        on_first()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
