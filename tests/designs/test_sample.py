"""Samples in a call, and the distributions with an rsample."""

import functools

import pytest
import torch
from design_cases import EVERY_EXACT, generator, scores
from torch import Tensor

import khot
from khot.designs import KHotStraightThrough, Pivotal, PlackettLuce, RelaxedKHot

pytestmark = pytest.mark.slow


@EVERY_EXACT
def test_sample_khot_has_the_mean_and_the_gradient_of_sigmoid_topk(design):
    x = scores(6).requires_grad_()
    soft = khot.sigmoid_topk(x, 2)
    rows = x.expand(20_000, 6)
    y = khot.sample_khot(rows, 2, design=design, generator=generator())
    assert (y.sum(-1) == 2).all()
    assert ((y.mean(0) - soft).abs() / (soft * (1 - soft) / 20_000).sqrt()).max() < 4.5
    weights = scores(6, seed=1)
    one = khot.sample_khot(x, 2, design=design, generator=generator())
    torch.testing.assert_close(
        torch.autograd.grad((weights * one).sum(), x)[0], torch.autograd.grad((weights * soft).sum(), x)[0]
    )


def test_sample_khot_takes_dims_masks_sizes_and_dtypes():
    x = torch.randn(3, 5, 4, generator=generator())
    k = torch.tensor([1, 2, 3])[:, None]
    mask = torch.ones(5, 1, dtype=torch.bool)
    mask[1] = False
    for fn in (khot.sample_khot, functools.partial(khot.sample_relaxed_khot, hard=True)):
        y = fn(x, k, dim=1, mask=mask, temperature=0.5, generator=generator())
        assert y.shape == x.shape
        assert (y.sum(1) == k).all()
        assert (y[:, 1] == 0).all()
        assert torch.equal(y, fn(x, k, dim=1, mask=mask, temperature=0.5, generator=generator()))
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            y = fn(x.to(dtype), 2, generator=generator())
            assert y.dtype == dtype
            assert (y.float().sum(-1) == 2).all()
        with pytest.raises(
            ValueError, match=r"got 12 rows of 12 that cannot be drawn from, the first at index \(0, 0\)"
        ):
            fn(x, 5, dim=1, mask=mask)
        with pytest.raises(ValueError, match="cannot be drawn from"):
            fn(torch.tensor([1.0, torch.nan, 0.0]), 1)
    soft = khot.sample_relaxed_khot(x, 2.5, mask=torch.tensor([True, True, True, False]), generator=generator())
    torch.testing.assert_close(soft.sum(-1), torch.full((3, 5), 2.5))
    assert (soft[..., 3] == 0).all()
    fractional = khot.sample_khot(x, 1.5, generator=generator())
    assert set(fractional.sum(-1).flatten().tolist()) == {1.0, 2.0}


def test_zero_and_one_probabilities_are_kept():
    x = torch.tensor([torch.inf, -torch.inf, 0.0, 0.0])
    y = khot.sample_khot(x.expand(500, 4), 2, generator=generator())
    assert (y[:, 0] == 1).all()
    assert (y[:, 1] == 0).all()


def test_relaxed_samples_are_differentiable_and_sharpen_to_gumbel_top_k():
    x = scores(6).requires_grad_()

    def sample(t: Tensor) -> Tensor:
        return khot.sample_relaxed_khot(t, 2, temperature=0.7, generator=generator())

    assert torch.autograd.gradcheck(sample, (x,))
    sharp = khot.sample_relaxed_khot(x.detach(), 2, temperature=1e-6, generator=generator())
    hard = khot.sample_relaxed_khot(x.detach(), 2, hard=True, generator=generator())
    torch.testing.assert_close(sharp, hard)
    many = khot.sample_relaxed_khot(x.detach().expand(100_000, 6), 2, hard=True, generator=generator())
    torch.testing.assert_close(many.mean(0), PlackettLuce(logits=x.detach(), k=2).mean, atol=0.007, rtol=0)


def test_relaxed_khot_density_integrates_to_one():
    """On a grid of y_1, y_2 with y_3 = k − y_1 − y_2, and by the mean of another density's ratio for n = 5."""
    for k, temperature in ((1.0, 0.8), (1.5, 1.3)):
        design = RelaxedKHot(temperature, logits=torch.tensor([0.5, 0.0, -0.7], dtype=torch.float64), k=k)
        m = 1500
        side = (torch.arange(m, dtype=torch.float64) + 0.5) / m
        y = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).flatten(0, 1)
        y = torch.cat((y, k - y.sum(-1, keepdim=True)), -1)
        y = y[(y[:, 2] > 0) & (y[:, 2] < 1)]
        assert abs(design.log_prob(y).exp().sum() / m**2 - 1) < 0.01
    p, q = (RelaxedKHot(t, logits=scores(5, seed=s), k=2) for t, s in ((0.9, 0), (0.8, 1)))
    y = q.sample((400_000,), generator=generator())
    assert abs((p.log_prob(y) - q.log_prob(y)).exp().mean() - 1) < 0.02


def test_relaxed_khot_is_a_distribution():
    x = scores(3, 5).requires_grad_()
    d = RelaxedKHot(torch.tensor([0.5, 1.0, 2.0]), logits=x, k=2)
    assert d.has_rsample
    y = d.rsample((4,), generator=generator())
    assert y.shape == (4, 3, 5)
    assert bool(d.support.check(y).all())
    assert torch.autograd.grad(y.square().sum(), x)[0].abs().sum() > 0
    assert not d.sample().requires_grad
    assert d.log_prob(y).shape == (4, 3)
    assert d.expand((2, 3)).sample().shape == (2, 3, 5)
    assert "RelaxedKHot(temperature=" in repr(d)
    with pytest.raises(ValueError, match="`temperature` must be > 0"):
        RelaxedKHot(0.0, logits=x, k=2)
    masked = RelaxedKHot(0.5, logits=torch.tensor([0.0, -torch.inf, 1.0, 2.0]), k=2)
    value = masked.sample((10,), generator=generator())
    assert (value[:, 1] == 0).all()
    without = RelaxedKHot(0.5, logits=torch.tensor([0.0, 1.0, 2.0]), k=2)
    torch.testing.assert_close(masked.log_prob(value), without.log_prob(value[:, [0, 2, 3]]), rtol=1e-4, atol=1e-4)


def test_khot_straight_through():
    x = scores(3, 5).requires_grad_()
    d = KHotStraightThrough(logits=x, k=2)
    y = d.rsample((4,), generator=generator())
    assert (y.sum(-1) == 2).all()
    assert torch.equal(y.detach(), Pivotal(logits=x, k=2).sample((4,), generator=generator()))
    weights = scores(5, seed=1)
    expected = torch.autograd.grad((weights * khot.sigmoid_topk(x, 2)).sum() * 4, x)[0]
    torch.testing.assert_close(torch.autograd.grad((weights * y).sum(), x)[0], expected)
    assert d.has_rsample


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.2, 0.1])
def test_relaxed_densities_lost_digits_in_float32(temperature):
    """At T = 0.1 half of the samples were off by more than 11 nats: 1 − y is 0 where y rounds to 1."""
    theta = scores(20).float()
    log = []
    for dtype in (torch.float32, torch.float64):
        design = RelaxedKHot(temperature, logits=theta.to(dtype), k=5)
        y = design.rsample_logits((2000,), generator=generator())
        torch.testing.assert_close(y.sigmoid(), design.rsample((2000,), generator=generator()), atol=1e-5, rtol=1e-5)
        log.append(design.log_prob_of_logits(y).double())
    assert (log[0] - log[1]).abs().max() < 1e-3
    sharp = RelaxedKHot(temperature, logits=theta.double(), k=5)
    if temperature == 0.1:
        with pytest.warns(UserWarning, match=r"in torch\.float64 is not right: \d+ entries of 40000 round to 1"):
            sharp.log_prob(y.sigmoid())
    soft = y[(y.abs() < 20).all(-1)]
    torch.testing.assert_close(sharp.log_prob_of_logits(soft), sharp.log_prob(soft.sigmoid()), atol=1e-5, rtol=0)


def test_relaxed_logits_have_a_gradient_and_take_certain_items():
    theta = torch.tensor([0.4, torch.inf, -0.3, -torch.inf, 1.0], dtype=torch.float64, requires_grad=True)
    for k in (1, 2, 3, 4):
        design = RelaxedKHot(0.3, logits=theta, k=k)
        y = design.rsample_logits((4,), generator=generator())
        torch.testing.assert_close(y.sigmoid().sum(-1), torch.full((4,), float(k), dtype=torch.float64))
        if k in (2, 3):
            (gradient,) = torch.autograd.grad(design.log_prob_of_logits(y).sum(), theta)
            assert gradient.isfinite().all()
            assert gradient.abs().sum() > 0
    plain = scores(4).requires_grad_()
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def log_prob(t, heat):
        y = RelaxedKHot(heat, logits=t, k=2).rsample_logits(generator=generator())
        return RelaxedKHot(1.0, logits=torch.zeros(4, dtype=torch.float64), k=2).log_prob_of_logits(y)

    assert torch.autograd.gradcheck(log_prob, (plain, temperature))


def test_relaxed_values_of_another_size_had_a_density_if_unvalidated():
    design = RelaxedKHot(1.0, logits=torch.zeros(3, 4), k=torch.tensor([1.0, 2.0, 3.0]), validate_args=False)
    log = design.log_prob(torch.tensor([0.6, 0.5, 0.5, 0.4]))
    assert log.isneginf().tolist() == [True, False, True]
