"""Negative controls: with wrong sums, the checks of the other cases fail."""

import torch
import torch.distributed as dist
from solver_cases import part, random

import khot
from khot._math.across import Over
from khot.distributed import _ops


def everybody(fails):
    """Return how many processes saw a failure."""
    count = torch.tensor(float(fails))
    dist.all_reduce(count)
    return int(count.item())


def differs(got, whole):
    return not torch.allclose(got, whole, rtol=0, atol=1e-9)


def a_sum_that_leaves_one_process_out():
    x, reduce = random(2, 60), Over.reduce

    def partial(self, *asked):
        keep = float(dist.get_rank() != 1)
        return reduce(self, *((t if t.dtype == torch.int64 else t * keep, op) for t, op in asked))

    Over.reduce = partial
    try:
        got = khot.sigmoid_topk(part(x), 5, group=dist.group.WORLD)
    finally:
        Over.reduce = reduce
    assert everybody(differs(got.nan_to_num(-1.0), part(khot.sigmoid_topk(x, 5)))) == dist.get_world_size()
    right = khot.sigmoid_topk(part(x), 5, group=dist.group.WORLD)
    assert everybody(differs(right, part(khot.sigmoid_topk(x, 5)))) == 0


def second_in_temperature(is_part):
    cut, options = (part, {"group": dist.group.WORLD}) if is_part else ((lambda t: t), {})
    x, heat = cut(random(2, 40)).clone(), torch.tensor(0.7).double().requires_grad_()
    x.requires_grad_()
    y = khot.sigmoid_topk(x, 4, temperature=heat, **options)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    loss = (slope * cut(random(2, 40, seed=5))).sum()
    loss = khot.distributed.total(loss, dist.group.WORLD) if is_part else loss
    return torch.autograd.grad(loss, heat)[0]


def a_spread_that_is_only_an_identity():
    whole = second_in_temperature(False)
    assert everybody(differs(second_in_temperature(True), whole)) == 0
    spread = _ops.spread
    _ops.spread = lambda t, groups: t
    try:
        wrong = second_in_temperature(True)
    finally:
        _ops.spread = spread
    assert everybody(differs(wrong, whole)) > 0
