"""Samples in parts: the same bits as on one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import khot
from khot import ops
from khot._math import across, natural
from khot._math.across import Over
from khot._math.cdfs import SIGMOID
from khot.designs import ConditionalPoisson, Pivotal, Sampford, Systematic, sample_parts

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


def natural_parameters_of_rows_in_parts():
    """Rows with a large and a small spread, of which the second needs Newton's method; certain items; empty parts."""
    g = torch.Generator().manual_seed(4)
    for n, k in ((300, 40), (60, 3), (9, 4), (2, 1)):
        probs = khot.sigmoid_topk(3 * torch.randn(2, n, generator=g, dtype=torch.float64), k)
        probs = torch.cat((probs, torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()), -1)
        own, where = cut(probs, g)
        over = Over([dist.group.WORLD.group_name])
        sizes = torch.full((2,), k + 1.0).double()
        padded = torch.nn.functional.pad(own, (0, int(own.shape[-1] == 0)))

        def tilted(theta, k, over=over):
            return across.margin(theta, k, torch.ones_like(k), None, None, SIGMOID, over)

        theta = natural.solve_parts(padded, sizes, tilted, n + 2, across.Joined(over))[:, : own.shape[-1]]
        whole = ops.natural_parameters(probs, sizes)[:, where]
        torch.testing.assert_close(theta, whole, rtol=1e-9, atol=1e-9)


def conditional_poisson_has_its_law():
    """All subsets of 7 items in parts: their frequencies in 20,000 draws, by χ² with 34 degrees of freedom."""
    g = torch.Generator().manual_seed(5)
    probs = khot.sigmoid_topk(torch.randn(7, generator=g, dtype=torch.float64), 3)
    for layout in range(2):
        own, _ = cut(probs, g) if layout else (probs[: 7 * (dist.get_rank() == 1)], None)  # all on one process
        got = sample_parts(ConditionalPoisson, own, 3, sample_shape=(20_000,), generator=g, group=dist.group.WORLD)
        samples = [None] * dist.get_world_size()
        dist.all_gather_object(samples, got)
        samples = torch.cat(samples, -1)
        assert (samples.sum(-1) == 3).all()
        design = ConditionalPoisson(probs, 3)
        every = design.enumerate_support()
        code = 2.0 ** torch.arange(7).double()
        counts = (samples @ code).unsqueeze(-1).eq(every @ code).sum(0)
        expected = 20_000 * design.log_prob(every).exp()
        chi = ((counts - expected).square() / expected).sum()
        assert 10 < chi < 71, chi  # one in 10,000 is beyond; a wrong law is far beyond
        wrong = 20_000 * Systematic(probs, 3).mean.new_full((len(every),), 1 / len(every))
        assert ((counts - wrong).square() / wrong).sum() > 500, "the control: another law"
    y = khot.sample_khot(torch.randn(5, 8), 2, design=ConditionalPoisson, generator=g, group=dist.group.WORLD)
    sizes = y.sum(-1)
    dist.all_reduce(sizes)
    assert (sizes == 2).all()


def other_designs_are_refused():
    probs, world = torch.full((4,), 0.5, dtype=torch.float64), dist.group.WORLD
    with pytest.raises(NotImplementedError, match="random order"):
        sample_parts(Pivotal, probs, 2 * dist.get_world_size(), group=world)
    with pytest.raises(NotImplementedError, match="Sampford"):
        sample_parts(Sampford, probs, 2 * dist.get_world_size(), group=world)
    with pytest.raises(ValueError, match="takes integers"):
        sample_parts(ConditionalPoisson, 0.9 * probs, 1.8 * dist.get_world_size(), group=world)
    with pytest.raises(ValueError, match="must sum to k"):
        sample_parts(Systematic, probs, 1, group=world)
