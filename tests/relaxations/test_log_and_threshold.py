import math

import mpmath
import pytest
import torch

import khot

INF = math.inf


def exact_margins(x, k, temperature, digits=60):
    """(x − τ)/T to sixty digits, by bisection on Σ σ − k with mpmath."""
    with mpmath.workdps(digits):
        x = [mpmath.mpf(v) for v in x.double().tolist()]
        k, temperature = mpmath.mpf(k), mpmath.mpf(temperature)
        logit = mpmath.log(k / (len(x) - k))
        low, high = min(x) - temperature * logit, max(x) - temperature * logit
        for _ in range(250):
            middle = (low + high) / 2
            above = mpmath.fsum(1 / (1 + mpmath.exp((middle - v) / temperature)) for v in x) > k
            low, high = (middle, high) if above else (low, middle)
        return [(v - low) / temperature for v in x], low


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("scale", "k", "temperature"),
    [(1, 3, 1), (30, 3, 1), (30, 2.5, 1), (100, 11, 1), (1, 3, 0.01), (10, 1, 0.1), (1, 11.75, 0.02)],
)
def test_log_is_relatively_accurate(scale, k, temperature, dtype):
    x = (torch.randn(12) * scale).to(dtype)
    margins, tau = exact_margins(x, k, temperature, digits=400)
    with mpmath.workdps(400):
        expected = [float(-mpmath.log1p(mpmath.exp(-z))) for z in margins]
    limit = 1e-6 if dtype == torch.float32 else 1e-10
    got = khot.log_sigmoid_topk(x, k, temperature=temperature).tolist()
    smallest = torch.finfo(dtype).tiny  # below that a float has no digits to be right in
    assert all(abs(a - b) <= limit * abs(b) + smallest for a, b in zip(got, expected, strict=True))
    assert khot.threshold(x, k, temperature=temperature).item() == pytest.approx(float(tau), rel=limit, abs=1e-7)


def test_log_where_the_probability_underflows():
    x = torch.tensor([1000.0, 990, 0, -3, -1000])
    log_p = khot.log_sigmoid_topk(x, 2)
    assert khot.sigmoid_topk(x, 2)[2] == 0
    margins, _ = exact_margins(x, 2, 1, digits=1200)
    assert log_p[2].item() == pytest.approx(float(margins[2]), rel=1e-6)


def test_log_matches_the_logarithm():
    x = torch.randn(5, 20, dtype=torch.float64)
    torch.testing.assert_close(khot.log_sigmoid_topk(x, 4.5), khot.sigmoid_topk(x, 4.5).log())


def test_log_of_impossible_entries():
    x = torch.tensor([1.0, -INF, 0.5, INF])
    mask = torch.tensor([True, True, False, True])
    log_p = khot.log_sigmoid_topk(x, 1.5, mask=mask)
    torch.testing.assert_close(log_p, torch.tensor([math.log(0.5), -INF, -INF, 0]))


@pytest.mark.parametrize("fn", [khot.log_sigmoid_topk, khot.threshold])
def test_derivatives(fn):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([1.5, 2.0, 3.2], dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 1] = False

    def call(x, k, temperature):
        y = fn(x, k, temperature=temperature, mask=mask)
        return torch.where(y.isinf(), 0, y)

    assert torch.autograd.gradcheck(call, (x, k, temperature), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x, k, temperature), check_fwd_over_rev=True)


def test_log_gradient_is_exact_where_every_probability_is_saturated():
    x = torch.tensor([1000.0, 0.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(khot.log_sigmoid_topk(x, 1)[1], x)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 0.5]))


def test_log_gradient_of_impossible_entries_is_zero():
    x = torch.tensor([1.0, -INF, 0.5, 2.0], requires_grad=True)
    log_p = khot.log_sigmoid_topk(x, 1.5, mask=torch.tensor([True, True, False, True]))
    (gradient,) = torch.autograd.grad(log_p[[0, 3]].sum(), x)
    assert gradient[1] == 0
    assert gradient[2] == 0
    assert bool(gradient.isfinite().all())


def test_threshold_formulas():
    """∂τ/∂x = v/Σv, ∂τ/∂k = −T/Σv, ∂τ/∂T = −Σ(v z)/Σv with v = σ'(z)."""
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    k, temperature = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (2.5, 0.7))
    tau = khot.threshold(x, k, temperature=temperature)
    z = ((x - tau) / temperature).detach()
    v = z.sigmoid() * (1 - z.sigmoid())
    expected = v / v.sum(), -temperature.detach() / v.sum(), -(v * z).sum() / v.sum()
    torch.testing.assert_close(torch.autograd.grad(tau, (x, k, temperature)), expected)


def test_threshold_limits():
    x = torch.tensor([3.0, 1.0, 2.0])
    assert khot.threshold(x, 0) == INF
    assert khot.threshold(x, 3) == -INF
    assert khot.threshold(x, 2, mask=torch.tensor([True, False, True])) == -INF
    assert khot.threshold(torch.tensor([INF, 1.0, 2.0]), 1) == INF
    assert khot.threshold(torch.tensor([INF, 1.0, 2.0]), 3) == -INF
    assert khot.threshold(torch.tensor([INF, INF, 2.0]), 1) == INF
    assert khot.threshold(torch.tensor([INF, 1.0, 2.0]), 2).item() == pytest.approx(1.5)
    assert khot.threshold(x, torch.tensor(4.0)).isnan()
    assert khot.threshold(torch.zeros(2, 0), 0).tolist() == [INF, INF]
    k = torch.tensor([0.0, 3.0], requires_grad=True)
    tau = khot.threshold(x.expand(2, 3), k)
    gradients = torch.autograd.grad(tau.nan_to_num(posinf=0, neginf=0).sum(), k)
    assert gradients[0].tolist() == [0, 0]


def test_threshold_shape_follows_dim():
    x = torch.randn(2, 5, 3)
    tau = khot.threshold(x, 2, dim=1)
    assert tau.shape == (2, 3)
    torch.testing.assert_close((x - tau.unsqueeze(1)).sigmoid(), khot.sigmoid_topk(x, 2, dim=1))
