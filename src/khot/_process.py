"""What long work needs of its process: atomic writes, Ctrl-C between two steps, and as many threads as pay."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PAYS = 2**30
"""Multiplications in a matrix product from which a second thread pays beside other busy processes, measured."""


def write(path: Path, content: str | bytes) -> None:
    """Replace a file in one step, so that an interruption leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
    os.replace(partial, path)


def check_writable(path: Path) -> None:
    """Raise ValueError unless `write` can write a file there. Nothing is created."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{path.parent} cannot be made: {folder} is not a directory")
    if path.is_dir():
        raise ValueError(f"{path} must be a file; got a directory")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"{path} cannot be written: no permission")


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


@contextmanager
def threads_for(multiplications: float) -> Iterator[None]:
    """Use one thread for steps whose largest matrix product is smaller than `PAYS`, and restore the number afterwards.

    Threads wait for one another by spinning. If other processes keep the cores busy, a waiting thread takes the time
    that the thread it waits for needs, and small steps become many times slower. OMP_WAIT_POLICY=passive avoids that
    for large steps too. It must be set before torch is imported, as the command `khot` does.
    """
    before = torch.get_num_threads()
    if multiplications < PAYS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
