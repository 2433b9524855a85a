"""Digits that were once lost, one test for each loss."""

import math

import mpmath
import numpy as np
import pytest
import torch

import khot
from khot._math import cdfs, implicit, threshold

DOUBLE = torch.float64
CDFS = {
    khot.sigmoid_topk: lambda z: 1 / (1 + mpmath.exp(-z)),
    khot.laplace_topk: lambda z: mpmath.exp(z) / 2 if z < 0 else 1 - mpmath.exp(-z) / 2,
    khot.normal_topk: mpmath.ncdf,
    khot.cauchy_topk: lambda z: mpmath.mpf(1) / 2 + mpmath.atan(z) / mpmath.pi,
}


def exact(fn, x, k, temperature):
    """y to 60 digits, by bisection."""
    with mpmath.workdps(60):
        scores = [mpmath.mpf(v) for v in x.tolist()]
        low, high = min(scores) - mpmath.mpf(10) ** 12, max(scores) + mpmath.mpf(10) ** 12
        for _ in range(280):
            middle = (low + high) / 2
            total = sum(CDFS[fn]((v - middle) / temperature) for v in scores)
            low, high = (middle, high) if total > k else (low, middle)
        return [float(CDFS[fn]((v - low) / temperature)) for v in scores]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_slots_in_half_precision_are_rounded_once(dtype, temperature):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    got, single = (khot.ordered_topk(t, 100, temperature=temperature) for t in (x, x.float()))
    torch.testing.assert_close(got, single.to(dtype), rtol=0, atol=0)
    values, weights = khot.soft_topk(x, 100, temperature=temperature)[::2]
    expected = khot.soft_topk(x.float(), 100, temperature=temperature)
    torch.testing.assert_close(values, expected.values.to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(weights, expected.weights.to(dtype), rtol=0, atol=0)


def test_the_quick_way_of_the_eager_solver_is_right_to_1e_6():
    for seed in (40, 54, *range(200, 230)):
        x = torch.rand(1000, generator=torch.Generator().manual_seed(seed)) * 10
        k, temperature = torch.tensor(194.0, dtype=DOUBLE), torch.tensor(0.03, dtype=DOUBLE)
        y, reference = (threshold.topk(t, k, temperature, None, cdfs.SIGMOID, early_stop=True) for t in (x, x.double()))
        assert float((y - reference).abs().max()) <= 1e-6


@pytest.mark.parametrize("fn", [khot.sigmoid_topk, khot.laplace_topk, khot.normal_topk])
@pytest.mark.parametrize("temperature", [0.05, 0.03, 0.025, 1e-3, 1e-6])
def test_the_derivative_in_k_has_two_sides(fn, temperature):
    x = torch.tensor([3.0, 2.0, 1.0, 0.0])
    got = torch.func.jacrev(lambda k: fn(x, k, temperature=temperature))(torch.tensor(2.0))
    torch.testing.assert_close(got, torch.tensor([0.0, 0.5, 0.5, 0.0]), rtol=0, atol=1e-5)
    forward = torch.func.jacfwd(lambda k: fn(x, k, temperature=temperature))(torch.tensor(2.0))
    torch.testing.assert_close(forward, got)


def test_the_derivative_in_k_near_n():
    x, k = torch.tensor([1.0, 0.0, -1.0, 0.5]), torch.tensor(4 - 3e-7, dtype=DOUBLE)
    got = torch.func.jacrev(lambda k: khot.sigmoid_topk(x, k))(k)
    odds = (-x.double()).exp()
    torch.testing.assert_close(got.double(), odds / odds.sum(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_hessian_of_cauchy_in_the_temperature_beside_a_mask(dtype):
    x, mask = torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=dtype), torch.tensor([True, True, True, False])

    def hessian(scores, **given):
        def value(temperature):
            return khot.cauchy_topk(scores, 1.5, temperature=temperature, **given)[:3]

        return torch.func.jacfwd(torch.func.jacrev(value))(torch.tensor(0.01, dtype=dtype))

    expected = hessian(x[:3])
    assert bool(expected.isfinite().all())
    torch.testing.assert_close(hessian(x, mask=mask), expected)
    torch.testing.assert_close(hessian(x.masked_fill(~mask, -torch.inf)), expected)


def test_slots_under_autocast_keep_their_digits():
    x, eye, scores = (
        torch.tensor([1000.3, 1000.7, 999.1, 500.2]),
        torch.eye(4) * 1000.3,
        torch.tensor([0.9, 0.1, 0.4, 0.8]),
    )
    calls = (
        lambda: khot.soft_topk(x, 2, temperature=0.01).values,
        lambda: khot.iterative_topk(eye, scores, 2, alpha=1e3).values,
        lambda: khot.successive_halving_topk(eye, scores, 2).values,
    )
    for call in calls:
        expected = call()
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(call(), expected, rtol=0, atol=0)


def test_normal_tails_have_digits_and_order():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).sort().values
    y = khot.normal_topk(x, 1)
    assert bool((y.diff() >= 0).all())
    assert bool((y > 0).all())
    relative = (y / khot.normal_topk(x.double(), 1) - 1).abs()
    assert float(relative.max()) < 1e-4


@pytest.mark.parametrize("fn", CDFS)
def test_relative_accuracy_of_small_entries(fn):
    x = torch.randn(12, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    for k in (1e-9, 0.3, 5):
        np.testing.assert_allclose(fn(x, k, temperature=0.2), exact(fn, x, k, 0.2), rtol=1e-10)


def test_gradients_of_cold_rows_sum_to_one():
    for temperature in (1e-5, 1e-11, 1e-16, 1e-18):
        x = torch.tensor([3.0, 2.0, -5.0, -5.0], dtype=DOUBLE, requires_grad=True)
        heat = torch.tensor(temperature, dtype=DOUBLE, requires_grad=True)
        dx, dt = torch.autograd.grad(khot.threshold(x, 1, temperature=heat), (x, heat))
        torch.testing.assert_close(dx, torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=DOUBLE))
        assert abs(float(dt)) < 1e-9


def test_log_at_a_large_offset():
    x = torch.tensor([1e8 + 0.3, 1e8 + 0.1, 1e8 - 5], dtype=DOUBLE)
    gap = (float(x[0]) - float(x[1])) / 1e-4 / 2
    got = khot.log_sigmoid_topk(x, 1, temperature=1e-4)
    assert abs(float(got[1]) / -gap - 1) < 1e-12


@pytest.mark.parametrize("p", [1.05, 3, 10, 20])
def test_large_norms_have_no_nan(p):
    x = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    y = khot.power_topk(x, 3, p=p)
    torch.testing.assert_close(y.double().sum(-1), torch.full((2000,), 3.0, dtype=DOUBLE), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="`p` must satisfy 1 < p ≤ 20, because y jumps for larger p; got 21"):
        khot.power_topk(x, 3, p=21)


def test_results_along_another_dim_are_contiguous():
    x = torch.randn(3, 4, 5)
    for dim in (0, 1, -2, np.int64(0)):
        y = khot.sigmoid_topk(x, 2, dim=dim)
        assert y.is_contiguous()
        torch.testing.assert_close(y.sum(int(dim)), torch.full_like(y.sum(int(dim)), 2.0))


def test_rows_that_are_done_do_not_wait_for_one_that_is_not():
    """Few rows need many evaluations: the rest must not be evaluated with them."""
    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    work = []
    plain = implicit.evaluate

    def counted(cdf, rows, *others):
        work.append(len(rows.x))
        return plain(cdf, rows, *others)

    implicit.evaluate = counted
    try:
        k, one = torch.full((4000,), 2.0, dtype=DOUBLE), torch.ones(4000, dtype=DOUBLE)
        y = threshold.topk(x, k, one, None, cdfs.power(4 / 3), early_stop=True)
    finally:
        implicit.evaluate = plain
    torch.testing.assert_close(y, khot.power_topk(x.double(), 2).float(), rtol=0, atol=1e-6)
    assert len(work) > 15, "some rows take many steps, or this test shows nothing"
    assert sum(work) < 15 * 4000
    assert math.isclose(float(y.double().sum()), 8000, rel_tol=1e-6)
