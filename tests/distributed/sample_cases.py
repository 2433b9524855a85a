"""Samples in parts: the same bits as on one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import khot
from khot.designs import ConditionalPoisson, Pivotal, Systematic, sample_parts

GIVEN = partial(Pivotal, order="given")


def cut(t, g):
    """This process's part of a random layout that all processes draw alike; parts may be empty."""
    world = dist.get_world_size()
    at = [0, *sorted(torch.randint(0, t.shape[-1] + 1, (world - 1,), generator=g).tolist()), t.shape[-1]]
    return t[..., at[dist.get_rank()] : at[dist.get_rank() + 1]], slice(at[dist.get_rank()], at[dist.get_rank() + 1])


def the_same_bits_in_every_layout():
    g = torch.Generator().manual_seed(0)
    for trial in range(40):
        n = [1, 2, 3, 5, 8, 17, 64, 100, 257, 4097][trial % 10]
        dtype = (torch.float64, torch.float32)[trial % 2]
        k = min(n, 1 + trial % 7) - (0.4 if trial % 3 == 0 else 0.0)
        probs = khot.sigmoid_topk(2 * torch.randn(3, n, generator=g, dtype=torch.float64), k).to(dtype)
        own, where = cut(probs, g)
        for design in (GIVEN, Systematic):
            for paired in (False, True):
                seed = torch.Generator().manual_seed(trial)
                got = sample_parts(
                    design, own, k, sample_shape=(4,), antithetic=paired, generator=seed, group=dist.group.WORLD
                )
                whole = design(probs, k, validate_args=False).sample(
                    (4,), generator=torch.Generator().manual_seed(trial), antithetic=paired
                )
                assert torch.equal(got, whole[..., where]), (n, k, design, paired)


def the_first_process_gives_the_seed():
    probs = torch.full((40,), 0.25, dtype=torch.float64)
    own = (
        probs[: 20 if dist.get_rank() == 0 else 0] if dist.get_rank() < 1 else probs[20:][: 20 * (dist.get_rank() == 1)]
    )
    g = torch.Generator().manual_seed(dist.get_rank())
    got = sample_parts(Systematic, own, generator=g, group=dist.group.WORLD)
    whole = Systematic(probs).sample(generator=torch.Generator().manual_seed(0))
    at = 0 if dist.get_rank() == 0 else 20
    assert torch.equal(got, whole[at : at + len(own)])


def sample_khot_in_parts_and_of_a_dtensor():
    """From scores, π may differ from one process's in its last bit; given π, the sample is the same."""
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = x.clone().requires_grad_()
    weights = torch.arange(50).double()
    (khot.sigmoid_topk(whole, 7) * weights).sum().backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    t = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    pi = khot.sigmoid_topk(t, 7).full_tensor().detach()
    expected = GIVEN(pi, 7, validate_args=False).sample(generator=torch.Generator().manual_seed(2))
    y = khot.sample_khot(t, 7, design=GIVEN, generator=torch.Generator().manual_seed(2))
    assert torch.equal(y.full_tensor(), expected)
    own = t.to_local().detach().clone().requires_grad_()
    part = khot.sample_khot(own, 7, design=GIVEN, generator=torch.Generator().manual_seed(2), group=mesh.get_group())
    assert torch.equal(part, y.to_local())
    start = 17 * dist.get_rank() if dist.get_world_size() == 3 else 25 * dist.get_rank()
    where = slice(start, start + own.shape[-1])
    (part * weights[where]).sum().backward()
    torch.testing.assert_close(own.grad, whole.grad[:, where], rtol=0, atol=1e-11)


def other_designs_are_refused():
    probs, world = torch.full((4,), 0.5, dtype=torch.float64), dist.group.WORLD
    with pytest.raises(NotImplementedError, match="random order"):
        sample_parts(Pivotal, probs, 2 * dist.get_world_size(), group=world)
    with pytest.raises(NotImplementedError, match="ConditionalPoisson"):
        sample_parts(ConditionalPoisson, probs, 2 * dist.get_world_size(), group=world)
    with pytest.raises(ValueError, match="must sum to k"):
        sample_parts(Systematic, probs, 1, group=world)
