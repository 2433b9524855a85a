from itertools import combinations

import pytest
import torch

from khot.coding import aicc, bic, ebic, gcv, splice, splice_path


def regression(seed, *, m=60, p=12, k=4, rho=0.5, noise=1.0):
    """A linear model with Toeplitz or equal correlations between columns."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    apart = (torch.arange(p).unsqueeze(-1) - torch.arange(p)).abs().double()
    covariance = rho**apart if seed % 2 else rho + (1 - rho) * torch.eye(p, dtype=torch.float64)
    a = normal(m, p) @ torch.linalg.cholesky(covariance).mT
    coef = torch.zeros(p, dtype=torch.float64)
    size = normal(k)
    coef[torch.randperm(p, generator=generator)[:k]] = size + 0.3 * size.sign()
    return a, a @ coef + noise * normal(m), coef


def brute_force(a, b, k):
    losses = {}
    for support in combinations(range(a.shape[1]), k):
        part = a[:, support]
        coef = torch.linalg.lstsq(part, b.unsqueeze(-1)).solution
        losses[support] = float((b - (part @ coef).squeeze(-1)).square().sum())
    return min(losses.items(), key=lambda item: item[1])


@pytest.mark.parametrize("seed", range(12))
def test_enumeration_is_brute_force(seed):
    a, b, _ = regression(seed, p=9, rho=0.9)
    support, loss = brute_force(a, b, 3)
    found = splice(a, b, 3, exact=True)
    assert tuple(found.support.nonzero().flatten().tolist()) == support
    assert float(found.loss) == pytest.approx(loss)
    assert float(found.loss) == pytest.approx(float((b - a @ found.coef).square().sum()))


@pytest.mark.slow
@pytest.mark.long
def test_the_search_finds_the_optimum_in_99_of_100_problems():
    cases = [
        (p, k, rho, noise) for p in (8, 14, 20) for k in (2, 4, 6) for rho in (0.0, 0.8, 0.95) for noise in (0.1, 3)
    ]
    missed = 0
    for seed in range(500):
        p, k, rho, noise = cases[seed % len(cases)]
        a, b, _ = regression(seed, m=p + 2 + seed % 70, p=p, k=k, rho=rho, noise=noise)
        found, best = splice(a, b, k, exact=False), splice(a, b, k, exact=True)
        assert found.loss >= best.loss * (1 - 1e-9)
        missed += bool(found.loss > best.loss * (1 + 1e-9))
    assert missed <= 5
    missed = sum(
        bool(splice(a, b, 6, exact=False, exchange=0).loss > splice(a, b, 6, exact=True).loss * (1 + 1e-9))
        for a, b, _ in (regression(seed, p=20, k=6, rho=0.9, noise=3) for seed in range(100))
    )
    assert missed > 5, "a control: without exchanges the starts alone are often not the optimum"


def test_costs_are_a_budget():
    costs = torch.tensor([3.0, 1, 2, 1, 4, 1, 2, 1], dtype=torch.float64)
    for seed in range(10):
        a, b, _ = regression(seed, p=8, rho=0.8)
        sets = [s for size in range(9) for s in combinations(range(8), size) if costs[list(s)].sum() <= 5]
        best = min(
            float((b - a[:, s] @ torch.linalg.lstsq(a[:, s], b).solution).square().sum()) for s in map(list, sets)
        )
        for exact in (True, False):
            found = splice(a, b, 5, costs=costs, exact=exact)
            assert costs[found.support].sum() <= 5
            assert float(found.loss) == pytest.approx(best, rel=1e-9 if exact else 0.05)


def test_ridge_and_weights():
    a, b, _ = regression(1)
    weights = torch.rand(len(b), dtype=torch.float64)
    found = splice(a, b, 4, ridge=2.0, weights=weights)
    part = a[:, found.support]
    system = part.mT * weights @ part + 2 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(found.coef[found.support], torch.linalg.solve(system, part.mT @ (weights * b)))
    loss = (weights * (b - a @ found.coef).square()).sum() + 2 * found.coef.square().sum()
    torch.testing.assert_close(found.loss, loss)
    twice = torch.cat([a, a[:10]]), torch.cat([b, b[:10]])
    counts = torch.ones(len(b), dtype=torch.float64)
    counts[:10] = 2
    torch.testing.assert_close(splice(*twice, 4).coef, splice(a, b, 4, weights=counts).coef)


def test_several_targets_are_one_after_another():
    a, b, _ = regression(2)
    targets = torch.stack([b, a[:, 3] - a[:, 5], b.flip(0)], 1)
    found = splice(a, targets, [4, 2, 3], exact=False)
    assert found.support.sum(0).tolist() == [4, 2, 3]
    for i, k in enumerate((4, 2, 3)):
        torch.testing.assert_close(found.coef[:, i], splice(a, targets[:, i], k, exact=False).coef)


def test_columns_of_any_scale_zero_columns_and_copies():
    a, b, _ = regression(3)
    scales = 10.0 ** torch.linspace(-8, 8, 12, dtype=torch.float64)
    torch.testing.assert_close(splice(a * scales, b, 4, exact=False).support, splice(a, b, 4, exact=False).support)
    zero = torch.cat([a, torch.zeros(len(a), 1, dtype=torch.float64), a[:, :3]], 1)
    found = splice(zero, b, 12, exact=False)
    assert found.coef.isfinite().all()
    assert not found.support[12]
    torch.testing.assert_close(found.loss, splice(a, b, 12).loss)
    wide = splice(a[:5], b[:5], 10, exact=False)
    assert wide.loss < 1e-20
    assert wide.support.sum() <= 5


def test_a_path_never_rises_and_has_the_optima():
    for seed in range(4):
        a, b, _ = regression(seed, p=10, rho=0.9)
        path = splice_path(a, b, 10)
        assert (path.loss.diff() <= 1e-12).all()
        best = torch.stack([splice(a, b, k, exact=True).loss for k in range(11)])
        torch.testing.assert_close(path.loss, best)
        torch.testing.assert_close(path.at(3).coef, path.coef[3])


def test_more_columns_than_the_relaxation_solves_for():
    for seed in range(4):
        a, b, coef = regression(seed, m=120, p=600, k=6, rho=0.8, noise=0.05)
        assert torch.equal(splice(a, b, 6).support, coef != 0)
        assert torch.equal(splice_path(a, b, 7, exchange=1).support[6], coef != 0)


def test_criteria_choose_the_number_of_columns():
    right = dict.fromkeys((aicc, bic, ebic, gcv), 0)
    for seed in range(20):
        a, b, coef = regression(seed, m=200, p=15, k=4, noise=0.05)
        path = splice_path(a, b, 8, exchange=1)
        for criterion in right:
            k = path.choose(criterion)
            right[criterion] += bool(torch.equal(path.at(k).support, coef != 0))
    assert right[ebic] >= 18
    assert right[bic] >= 12
    assert right[ebic] >= right[bic] >= right[aicc], "that order is what the penalties say"
    both = torch.stack([b, a[:, 0]], 1)
    path = splice_path(a, both, 5)
    assert path.at(path.choose(ebic)).support.sum(0).tolist() == path.choose(ebic).tolist()
    assert path.choose(ebic)[1] == 1


A, B, _ = regression(0)
BAD = {
    "too many": (lambda: splice(A, B, 13), ValueError, r"0 ≤ k ≤ 12 \(columns of `a`\)"),
    "fraction": (lambda: splice(A, B, 2.5), TypeError, "`k` must be an int"),
    "targets": (lambda: splice(A, B, [1, 2]), ValueError, "or 1, one for each target; got 2"),
    "rows": (lambda: splice(A, B[:5], 2), ValueError, r"\(60,\) or \(60, targets\)"),
    "NaN": (lambda: splice(A * torch.nan, B, 2), ValueError, "`a` must be finite"),
    "matrix": (lambda: splice(A[None], B, 2), ValueError, "must be a matrix"),
    "ridge": (lambda: splice(A, B, 2, ridge=-1.0), ValueError, "`ridge` must be ≥ 0"),
    "weights": (lambda: splice(A, B, 2, weights=-B.abs()), ValueError, "numbers ≥ 0"),
    "costs": (lambda: splice(A, B, 2, costs=B[:12] * 0), ValueError, "numbers > 0"),
    "enumeration": (lambda: splice(A.repeat(1, 5), B, 20, exact=True), ValueError, "at most 30,000,000 supports"),
    "path": (lambda: splice_path(A, B, 13), ValueError, "0 ≤ k ≤ 12"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said(name):
    call, error, words = BAD[name]
    with pytest.raises(error, match=words):
        call()
