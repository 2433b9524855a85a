"""Statistical top-k: its definition in numpy, counts, masks, the smooth form, derivatives, and what cannot be done."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.autograd import gradcheck, gradgradcheck

import khot
from khot._math import statistical
from khot.kernels import _native

X = torch.randn(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_numpy(row, k, delta=0.0):
    """The operator as the paper defines it, of one row."""
    theta = row.mean() + row.std() * stats.norm.ppf(1 - k / len(row))
    u = np.maximum(row - theta, 0)
    return u if not delta else np.where(u < delta, u**2 / (2 * delta), u - delta / 2)


@pytest.mark.parametrize("k", [1, 5, 20, 39, 7.5])
@pytest.mark.parametrize("smooth", [0.0, 0.4])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_it_is_its_definition(k, smooth, needs_grad):
    expected = torch.tensor(np.stack([by_numpy(row, k, smooth) for row in X.numpy()]))
    x = X.clone().requires_grad_(needs_grad)
    torch.testing.assert_close(khot.statistical_topk(x, k, smooth=smooth).detach(), expected)
    torch.testing.assert_close(khot.statistical_topk(x.T, k, dim=0, smooth=smooth).detach(), expected.T)
    per_row = torch.full((6,), k, dtype=torch.float64)
    torch.testing.assert_close(khot.statistical_topk(x, per_row, smooth=smooth).detach(), expected)


@pytest.mark.parametrize(("n", "k", "mean", "spread"), [(2048, 164, 164, 8), (16384, 1311, 1313, 21)])
def test_the_count_of_normal_scores(n, k, mean, spread):
    x = torch.randn(400, n, generator=torch.Generator().manual_seed(1))
    count = (khot.statistical_topk(x, k) > 0).sum(-1).double()
    assert abs(count.mean() - mean) < 4 * spread / 20 + 2  # of the mean of 400 rows, and the reference's own rounding
    assert 0.85 < count.std() / spread < 1.15


@pytest.mark.parametrize(("law", "share"), [(stats.laplace, 0.069), (stats.t(3), 0.048)])
def test_heavy_tails_get_fewer_and_exact_cures_it(law, share):
    x = torch.tensor(law.rvs(size=(100, 4096), random_state=0))
    count = (khot.statistical_topk(x, 328) > 0).sum(-1).double()
    assert count.mean() / 4096 == pytest.approx(share, abs=0.004)
    exact = khot.statistical_topk(x, 328, exact=True)
    assert ((exact > 0).sum(-1) == 328).all()
    assert torch.equal(exact > 0, khot.hard_topk(x, 328) == 1)


@pytest.mark.parametrize("exact", [False, True])
def test_masked_and_minus_inf_are_as_if_deleted(exact):
    mask = torch.rand(6, 40, generator=torch.Generator().manual_seed(2)) < 0.7
    y = khot.statistical_topk(X.masked_fill(~mask, torch.nan), 4, mask=mask, exact=exact)
    as_inf = khot.statistical_topk(X.masked_fill(~mask, -torch.inf), 4, exact=exact)
    for row, keep, got, again in zip(X, mask, y, as_inf, strict=True):
        alone = khot.statistical_topk(row[keep], 4, exact=exact)
        torch.testing.assert_close(got[keep], alone)
        torch.testing.assert_close(again[keep], alone)
        assert (got[~keep] == 0).all()
        assert (again[~keep] == 0).all()


@pytest.mark.parametrize("options", [{}, {"smooth": 0.3}, {"exact": True}, {"mask": X[:2] > -1}])
def test_derivatives(options):
    x = X[:2].clone().requires_grad_()

    def fn(x):
        return khot.statistical_topk(x, 5, **options)

    assert gradcheck(fn, (x,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(fn, (x,))
    torch.testing.assert_close(torch.func.vmap(fn, in_dims=(0,))(x) if "mask" not in options else fn(x), fn(x))


def test_the_derivative_in_k():
    k = torch.tensor([3.0, 7.5], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda k: khot.statistical_topk(X[:2], k), (k,))
    assert (torch.autograd.grad(khot.statistical_topk(X[:2], k).sum(), k)[0] > 0).all()


def test_the_smooth_form_is_c1_and_the_plain_one_is_not():
    def slope(row, smooth):
        row = row.clone().requires_grad_()
        (g,) = torch.autograd.grad(khot.statistical_topk(row, 3, smooth=smooth).sum(), row)
        return g

    row = X[0].clone()
    for _ in range(100):  # until the first score is on the threshold that it moves
        row[0] = khot.statistical_threshold(row, 3)
    step = torch.nn.functional.one_hot(torch.tensor(0), 40).double()
    for smooth, jump in ((0.0, 1.0), (0.2, 0.0)):
        apart = slope(row + 1e-4 * step, smooth) - slope(row - 1e-4 * step, smooth)
        assert float(apart.abs().max()) == pytest.approx(jump, abs=0.1)


def test_equal_scores_and_no_scores():
    x = torch.full((2, 8), 3.0, requires_grad=True)
    y = khot.statistical_topk(x, 2)
    assert (y == 0).all()
    assert (torch.autograd.grad(y.sum(), x)[0].isfinite()).all()
    assert (khot.statistical_topk(X, 0) == 0).all()
    assert (khot.statistical_threshold(X, 0) == torch.inf).all()
    assert khot.statistical_topk(torch.zeros(0, 5), 2).shape == (0, 5)


def test_rows_that_cannot_be_satisfied_are_nan_and_no_other():
    x = torch.randn(6, 10)
    x[1, 3], x[2, 3] = torch.nan, torch.inf
    k = torch.tensor([2.0, 2.0, 2.0, 10.0, -1.0, 2.0])
    for exact in (False, True):
        y = khot.statistical_topk(x, k, exact=exact)
        bad = {1, 3, 4} if exact else {1, 2, 3, 4}  # exactly k exist beside a score of +inf
        assert {i for i in range(6) if y[i].isnan().all()} == bad
        assert not y[[i for i in range(6) if i not in bad]].isnan().any()
        few = torch.arange(10) < 2
        assert khot.statistical_topk(x[0], 2, mask=few, exact=exact).isnan().all()
    assert khot.statistical_topk(x, 2)[[1, 2]].isnan().all()
    assert not khot.statistical_topk(x, 2)[[0, 3, 4, 5]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    x = X.to(dtype)
    y = khot.statistical_topk(x, 5)
    assert y.dtype == dtype
    torch.testing.assert_close(y, khot.statistical_topk(x.float(), 5).to(dtype))


@pytest.mark.parametrize("exact", [False, True])
def test_logits_are_those_that_reach_the_threshold(exact):
    y = khot.statistical_logits(X, 5, exact=exact)
    theta = khot.statistical_threshold(X, 5, exact=exact)[:, None]
    expected = khot.hard_topk(X, 5) == 1 if exact else theta <= X
    assert torch.equal(y > -torch.inf, expected)
    assert torch.equal(y[expected], X[expected])
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(khot.statistical_logits(x, 5, exact=exact).softmax(-1)[:, :7].sum(), x)
    assert (g[~expected] == 0).all()
    assert (g[expected] != 0).any()


def test_logits_never_leave_a_row_empty():
    two_valued = torch.tensor([[1.0, -1.0] * 20])  # no score is 1.4 deviations above the mean
    assert (khot.statistical_topk(two_valued, 3) == 0).all()
    assert torch.equal(khot.statistical_logits(two_valued, 3) == 1, two_valued == 1)
    causal = torch.ones(8, 8).tril().bool()
    y = khot.statistical_logits(torch.randn(8, 8), 3, mask=causal)
    assert y.softmax(-1).isfinite().all()
    assert torch.equal((y > -torch.inf).sum(-1)[:3], torch.tensor([1, 2, 3]))  # no more than k: all are kept
    assert (khot.statistical_logits(torch.randn(4), 3, mask=torch.zeros(4, dtype=torch.bool)) == -torch.inf).all()
    assert khot.statistical_logits(torch.tensor([0.0, torch.nan, 1.0]), 1).isnan().all()
    assert (khot.statistical_logits(torch.randn(4), 9) > -torch.inf).all()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, 40), {}, ValueError, "`k` must satisfy 0 ≤ k < 40 (size of dim -1), because all exceed no threshold"),
        ((X, 41), {}, ValueError, "`k` must satisfy 0 ≤ k ≤ 40"),
        ((X, 2.5), {"exact": True}, ValueError, "`k` must be an integer"),
        ((X, 2), {"smooth": -1.0}, ValueError, "`smooth` must be ≥ 0; got -1.0."),
        ((X, 2), {"mask": torch.ones(40)}, TypeError, "`mask` must be boolean"),
        ((X.long(), 2), {}, TypeError, "`x` must be float16"),
    ],
)
def test_bad_calls(arguments, options, error, message):
    with pytest.raises(error) as caught:
        khot.statistical_topk(*arguments, **options)
    assert message in str(caught.value)


def test_logits_want_a_positive_k():
    with pytest.raises(ValueError, match="`k` must be > 0; got 0"):
        khot.statistical_logits(X, 0)


@pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
@pytest.mark.parametrize("path", _native.PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 1000), (1, 100_003)])
@pytest.mark.parametrize("smooth", [0.0, 0.3])
def test_the_kernel_is_its_twin(shape, dtype, path, smooth):
    x = 1000 + torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    z = statistical.multiplier_of(0.08)
    y = torch.empty_like(x)
    theta = _native.statistical(x, z, y, smooth=smooth, path=path)
    expected = statistical.cutoff(x, 0.08 * shape[1], None)
    close = {"atol": 1e-3, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-10, "rtol": 1e-12}
    torch.testing.assert_close(theta, expected, **close)
    assert torch.equal(theta, _native.statistical(x, z, path=path))
    torch.testing.assert_close(y, statistical.above(x, theta, None, smooth), **close)
    k = min(80, shape[1] - 1)
    theta = _native.statistical(x, float(k), y, smooth=smooth, exact=True, path=path)
    assert torch.equal(theta, x.sort(-1, descending=True).values[..., k : k + 1].double())
    assert torch.equal(theta, _native.statistical(x, float(k), exact=True, path=path))
    torch.testing.assert_close(y, statistical.above(x, theta, None, smooth), **close)


@pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
def test_threads_do_not_change_a_bit():
    x = torch.randn(2, 200_000, generator=torch.Generator().manual_seed(4))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(khot.statistical_topk(x, 5000))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.compile
def test_it_compiles_whole():
    x = X.float().requires_grad_()
    fn = torch.compile(lambda x: khot.statistical_topk(x, 5, smooth=0.1), fullgraph=True)
    torch.testing.assert_close(fn(x), khot.statistical_topk(x, 5, smooth=0.1))
    expected = torch.autograd.grad(khot.statistical_topk(x, 5, smooth=0.1).square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(fn(x).square().sum(), x), expected)


@pytest.mark.compile
@pytest.mark.parametrize("fn", [khot.statistical_topk, khot.statistical_logits, khot.statistical_threshold])
@pytest.mark.parametrize("exact", [False, True])
def test_it_compiles_whole_without_a_gradient(fn, exact):
    """It asked first whether forward mode is on, which torch.compile cannot trace; with a gradient it did not ask."""
    x = X.float()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: fn(x, 5, exact=exact), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), fn(x, 5, exact=exact))
