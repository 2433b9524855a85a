"""What the others see when one process fails: an error within the group's timeout, never a wait without end."""

import os
import signal
import time

import torch
import torch.distributed as dist

import khot
from khot._math.across import Over

TIMEOUT = 6.0  # of the groups of these cases


def part(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 40, generator=generator, dtype=torch.float64)[:, 20 * dist.get_rank() :][:, :20]


def is_victim():
    return dist.get_rank() == 1


def survivor(call):
    """Run a call that must end with an error, in time."""
    started = time.monotonic()
    try:
        call()
    except RuntimeError:
        assert time.monotonic() - started < TIMEOUT + 3
        return
    raise AssertionError("no error")


def killed_before():
    if is_victim():
        time.sleep(1)  # until the other one is past the meeting too
        os.kill(os.getpid(), signal.SIGKILL)
    survivor(lambda: khot.sigmoid_topk(part(), 3, group=dist.group.WORLD))


def killed_between_rounds():
    if is_victim():
        whole, calls = Over.sums_at, []

        def second_time(self, *arguments):
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(self, *arguments)

        Over.sums_at = second_time
        khot.sigmoid_topk(part(), 3, group=dist.group.WORLD)
    survivor(lambda: khot.sigmoid_topk(part(), 3, group=dist.group.WORLD))


def killed_between_forward_and_backward():
    y = khot.sigmoid_topk(part().requires_grad_(), 3, group=dist.group.WORLD)
    if is_victim():
        os.kill(os.getpid(), signal.SIGKILL)
    survivor(lambda: y.square().sum().backward())


def raises_and_ends():
    if is_victim():
        time.sleep(1)
        raise ValueError("something else went wrong")
    survivor(lambda: khot.sigmoid_topk(part(), 3, group=dist.group.WORLD))


def sleeps():
    if is_victim():
        time.sleep(TIMEOUT + 6)
        return
    survivor(lambda: khot.sigmoid_topk(part(), 3, group=dist.group.WORLD))


def vote_that_is_not_sent():
    """A negative control: one process sees rows done later, and each stops by its own opinion."""
    whole = Over.sums_at

    def by_myself(self, *arguments):
        result = whole(self, *arguments)
        self.votes = torch.zeros_like(self.votes) if self.vote is None else self.vote
        return result

    Over.sums_at = by_myself
    out_of_step_by_one_turn()


def out_of_step_by_one_turn():
    """One process finds that rows are done a turn later than the others do; the vote keeps all together."""
    from khot._math import implicit

    look, turns = implicit.look, []

    def late(*arguments):
        state, done = look(*arguments)
        turns.append(1)
        return state, done & (len(turns) > 3) if is_victim() else done

    implicit.look = late
    try:
        x = torch.randn(2, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        own = slice(20 * dist.get_rank(), 20 * dist.get_rank() + 20)
        got = khot.sigmoid_topk(x[:, own], 3, group=dist.group.WORLD)
        implicit.look = look
        torch.testing.assert_close(got, khot.sigmoid_topk(x, 3)[:, own], rtol=0, atol=1e-12)
    finally:
        implicit.look = look
    flag = torch.ones(1)
    dist.all_reduce(flag)  # a message that meets another one is an error
    assert flag.item() == dist.get_world_size()
