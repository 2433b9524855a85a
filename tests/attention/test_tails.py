"""Tail masses: the identities, the bounds on the output, the smallest k, and the rule for Gaussian scores."""

import math

import pytest
import torch

import khot
from khot.attention import (
    diameter_bound,
    gaussian_share,
    norm_bound,
    output_error,
    smallest_k,
    tail_mass,
    truncation_kl,
    variance_bound,
)

NAMES = {
    *("Ball", "Box", "CellBound", "Certificate", "KeyCells", "block_mask", "blockwise", "certified_attention"),
    *("certified_mask", "diameter_bound", "gaussian_share", "known_head", "multi_gap", "norm_bound", "output_error"),
    *("single_gap", "smallest_k", "tail_mass", "truncation_kl", "variance_bound"),
}


def test_the_public_names():
    assert set(khot.attention.__all__) == NAMES
    assert all(getattr(khot.attention, name).__doc__ for name in NAMES)


def rows(many=200, n=40, seed=0):
    """Rows that are random, tied, far apart, nearly constant, and with one score far above."""
    x = torch.randn(many, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x[1::5] = x[1::5].round()
    x[2::5] *= 100
    x[3::5] *= 1e-9
    x[4::5, 0] += 700
    return x


def truncated(x, k):
    """P and P̂ from their definitions, with the k largest by sorting."""
    p = x.softmax(-1)
    head = torch.zeros_like(p).scatter(-1, x.argsort(dim=-1, descending=True, stable=True)[..., :k], 1.0)
    kept = p * head
    return p, kept / kept.sum(-1, keepdim=True), head.bool()


@pytest.mark.parametrize("k", [1, 3, 39, 40])
def test_the_identities(k):
    x = rows()
    p, q, head = truncated(x, k)
    tail, kl = tail_mass(x, k), truncation_kl(x, k)
    assert tail.dtype == torch.float64
    torch.testing.assert_close(tail, (p - q).abs().sum(-1) / 2, rtol=0, atol=1e-12)  # total variation
    torch.testing.assert_close(tail, (p * ~head).sum(-1), rtol=1e-10, atol=1e-300)
    torch.testing.assert_close(tail, -torch.expm1(-kl), rtol=0, atol=1e-12)
    direct = torch.where(q > 0, q * (q.log() - p.log()), 0.0).sum(-1)
    torch.testing.assert_close(kl, direct, rtol=0, atol=1e-12)
    values = torch.randn(200, 40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    error = output_error(x, values, k)
    direct = ((p - q).unsqueeze(-2) @ values).squeeze(-2).norm(dim=-1)
    torch.testing.assert_close(error, direct, rtol=0, atol=1e-12)
    if k < 40:
        mean = [((w / w.sum(-1, keepdim=True)).unsqueeze(-2) @ values).squeeze(-2) for w in (p * head, p * ~head)]
        some = tail > 1e-300
        torch.testing.assert_close(error[some], (tail * (mean[0] - mean[1]).norm(dim=-1))[some], rtol=0, atol=1e-12)
    for bound in (norm_bound(tail, values), diameter_bound(tail, values, head), variance_bound(tail, values, p)):
        assert (error <= bound + 1e-14).all()
    assert (diameter_bound(tail, values, head) <= norm_bound(tail, values) + 1e-14).all()


def test_a_smaller_tail_breaks_the_bounds():
    """The negative control: the bounds on the output are not loose by orders of magnitude."""
    x = torch.zeros(2, dtype=torch.float64)
    values = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    tail, p, head = tail_mass(x, 1), x.softmax(-1), torch.tensor([True, False])
    error = output_error(x, values, 1)
    for bound in (norm_bound, lambda t, v: diameter_bound(t, v, head), lambda t, v: variance_bound(t, v, p)):
        torch.testing.assert_close(bound(tail, values), error, rtol=1e-15, atol=0)  # all three are equalities here
        assert bound(tail * 0.999, values) < error


def test_masks_and_dims_and_all_k():
    x = rows()
    mask = torch.rand(200, 40, generator=torch.Generator().manual_seed(2)) < 0.5
    some = x.masked_fill(~mask, -torch.inf)
    for k in (1, 5):
        expected = truncated(some, k)
        torch.testing.assert_close(tail_mass(x, k, mask=mask), (expected[0] * ~expected[2]).sum(-1), rtol=1e-9, atol=0)
    every = tail_mass(x.T, None, dim=0, mask=mask.T)
    assert every.shape == (40, 200)
    for k in (1, 17, 40):
        torch.testing.assert_close(every[k - 1], tail_mass(x, k, mask=mask), rtol=0, atol=0)
    counts = torch.randint(0, 41, (200,), generator=torch.Generator().manual_seed(3))
    each = torch.stack([tail_mass(row, int(k)) for row, k in zip(x, counts, strict=True)])
    assert torch.equal(tail_mass(x, counts), each)
    assert torch.equal(tail_mass(x, 0), torch.ones(200, dtype=torch.float64))
    assert truncation_kl(x[0], 0) == math.inf
    assert tail_mass(x[0], 30, mask=torch.arange(40) < 20) == 0  # fewer keys than k
    x.masked_fill_(~mask, torch.nan)
    assert tail_mass(x, 3, mask=mask).isfinite().all()


def test_the_smallest_k_is_the_smallest():
    x = rows()
    for epsilon in (0.5, 0.1, 0.01, 1e-6):
        k = smallest_k(x, epsilon)
        assert (k >= 1).all()
        assert (tail_mass(x, k) <= epsilon).all()
        assert (tail_mass(x, k - 1) > epsilon).all()
    each = torch.linspace(0.01, 0.9, 200)
    assert torch.equal(
        smallest_k(x, each), torch.stack([smallest_k(r, float(e)) for r, e in zip(x, each, strict=True)])
    )
    assert smallest_k(torch.zeros(4), 0.25) == 3  # ε is allowed itself
    assert torch.equal(smallest_k(x.T, 0.1, dim=0), smallest_k(x, 0.1))
    assert smallest_k(torch.randn(3, 5).half(), 0.1).dtype == torch.int64


@pytest.mark.parametrize(("spread", "epsilon"), [(1.0, 0.01), (1.0, 0.1), (2.0, 0.01), (2.0, 0.1)])
def test_the_rule_for_gaussian_scores(spread, epsilon):
    """k/n within .005 at n = 16384, σ ≤ 2; and not so for σ = 4, where the rule is known to be too small."""
    x = torch.randn(40, 16384, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share = smallest_k(spread * x, epsilon).double().mean() / 16384
    assert abs(share - gaussian_share(spread, epsilon)) < 0.005
    if (spread, epsilon) == (2.0, 0.01):
        assert smallest_k(4 * x, epsilon).double().mean() / 16384 - gaussian_share(4.0, epsilon) > 0.005


def test_rows_without_a_softmax_are_nan():
    x = torch.zeros(5, 4)
    x[0, 1], x[1, 1], x[2] = torch.nan, torch.inf, -torch.inf
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[3] = False
    for fn in (tail_mass, truncation_kl, khot.attention.known_head, khot.attention.single_gap):
        assert fn(x, 2, mask=mask).isnan().tolist() == [True] * 4 + [False]
    assert smallest_k(x, 0.1, mask=mask).tolist() == [-1, -1, 0, 0, 4]
    assert tail_mass(torch.zeros(4, 3), torch.tensor([-1.0, 1.5, 4.0, 3.0])).isnan().tolist() == [True] * 3 + [False]


def test_bad_input():
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"`k` must satisfy 0 ≤ k ≤ 4 \(size of dim -1\); got 5"):
        tail_mass(x, 5)
    with pytest.raises(ValueError, match="`k` must be an integer"):
        tail_mass(x, 1.5)
    for epsilon in (0, 1, 1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match="`epsilon` must satisfy 0 < epsilon < 1"):
            smallest_k(x, epsilon)
    with pytest.raises(ValueError, match="`epsilon` must broadcast to the rows"):
        smallest_k(x, torch.tensor([0.1, 0.1, 0.1]))
    with pytest.raises(TypeError, match="`mask` must be boolean"):
        tail_mass(x, 1, mask=x)
    with pytest.raises(TypeError, match="`scores` must be float"):
        tail_mass(x.long(), 1)
    with pytest.raises(ValueError, match="`scores` must have at least one key"):
        tail_mass(torch.zeros(2, 0), 0)
    with pytest.raises(ValueError, match=r"`values` must have the shape \(…, 4, e\)"):
        output_error(x, torch.zeros(2, 3, 5), 1)
