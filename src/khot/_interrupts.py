"""Handle Ctrl-C between two steps of a long job."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(on_first: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed.

    The first Ctrl-C calls `on_first` and sets that flag; the second acts as usual. Outside the main thread, which alone
    receives signals, nothing changes and the flag stays False.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
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
