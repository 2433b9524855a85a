"""The number of threads in training loops."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PAYS = 2**30
"""Multiplications in a matrix product from which a second thread pays beside other busy processes, measured."""


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
