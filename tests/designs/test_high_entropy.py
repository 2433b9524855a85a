"""Conditional Poisson sampling and Sampford's design against other answers."""

import functools
import math

import numpy as np
import pytest
import torch
from design_cases import A6K3, EVERY, GIVEN, generator, scores
from torch import Tensor
from torch.distributions import kl_divergence

import khot
from benchmarks.sampling import marginals_by_programme
from khot import ops
from khot._math import natural, subsets
from khot.designs import Brewer, ConditionalPoisson, Pareto, Pivotal, Sampford, Systematic

pytestmark = pytest.mark.slow


def log_elementary(theta: Tensor, k: int) -> Tensor:
    """log e_k by the dynamic programme over items, in logarithms: O(nk), the reference."""
    row = torch.full((*theta.shape[:-1], k + 1), -torch.inf, dtype=theta.dtype)
    row[..., 0] = 0
    for item in theta.unbind(-1):
        row = torch.cat((row[..., :1], torch.logaddexp(row[..., 1:], row[..., :-1] + item[..., None])), -1)
    return row[..., k]


@pytest.mark.parametrize("n", [300, 2000])
@pytest.mark.parametrize("scale", [0.1, 1, 10])
def test_normaliser_equals_the_dynamic_programme(n, scale):
    for k in (1, 10, n // 2, n - 1):
        theta = scale * scores(n, seed=k)
        expected = log_elementary(theta, k)
        got = natural.log_normaliser(theta, torch.tensor(float(k), dtype=torch.float64), ops.sigmoid_margins)[0]
        assert abs(got - expected) <= 1e-10 * abs(expected), (k, got, expected)


def test_spot_values_of_r():
    """R's `sampling`: UPMEpiktildefrompik, UPMEpik2frompikw, UPMEpikfromq, UPsampfordpi2, UPtillepi2."""
    design = ConditionalPoisson(A6K3)
    tilde = [0.10207808952, 0.22381707472, 0.44172796439, 0.57962671404, 0.77935236597, 0.87339779135]
    np.testing.assert_allclose(design.logits.sigmoid().numpy(), tilde, atol=1e-10, rtol=0)
    assert abs(design.joint_probs()[0, 1] - 0.00491709331799) < 1e-12
    assert abs(Sampford(A6K3).joint_probs()[0, 1] - 0.00401349580870) < 1e-12
    marginals = [0.04359213425, 0.11560391406, 0.35488162126, 0.66188266085, 0.88211790856, 0.94192176103]
    np.testing.assert_allclose(ConditionalPoisson(logits=A6K3.logit(), k=3).mean.numpy(), marginals, atol=1e-10, rtol=0)


def test_entropies_are_ordered_as_published():
    """Nats on the six-item vector; conditional Poisson has the greatest."""
    published = {ConditionalPoisson: 1.8897, Sampford: 1.8891, Brewer: 1.8892, Systematic: 1.362, GIVEN: 1.615}
    for design, value in published.items():
        assert abs(design(A6K3).entropy() - value) < 6e-4


@pytest.mark.parametrize(("n", "k", "scale"), [(6, 3, 1), (40, 39, 3), (500, 5, 2), (5000, 2000, 1), (5000, 10, 3)])
def test_natural_parameters_are_solved_for(n, k, scale):
    p = khot.sigmoid_topk(scale * scores(n), k)
    theta = ConditionalPoisson(p).logits
    assert (
        natural.marginals(theta, torch.tensor(float(k), dtype=torch.float64), ops.sigmoid_margins) - p
    ).abs().max() < 1e-12


def test_solving_in_a_batch_of_unlike_rows():
    p = torch.stack([khot.sigmoid_topk(s * scores(30, seed=i), 7) for i, s in enumerate((0.01, 1, 5, 30))])
    p[0, :3] = torch.tensor([1.0, 0.0, 0.0])
    p[0, 3:] = 6 / 27
    design = ConditionalPoisson(p, 7)
    got = natural.marginals(design.logits, design._sizes, ops.sigmoid_margins)
    assert (got - p).abs().max() < 1e-12


def test_covariance_is_the_hessian():
    theta, k = scores(7), torch.tensor(3.0, dtype=torch.float64)
    design = ConditionalPoisson(logits=theta, k=3)
    hessian = torch.func.hessian(lambda t: natural.log_normaliser(t, k, ops.sigmoid_margins)[0])(theta)
    torch.testing.assert_close(design.covariance_matrix, hessian, atol=1e-14, rtol=0)
    mean = functools.partial(_mean, k=3)
    torch.testing.assert_close(torch.func.jacrev(mean)(theta), hessian, atol=1e-14, rtol=0)
    torch.testing.assert_close(torch.func.jacfwd(mean)(theta), hessian, atol=1e-14, rtol=0)
    batch = scores(4, 7)
    torch.testing.assert_close(torch.vmap(mean)(batch), mean(batch))


def _mean(theta: Tensor, k: int) -> Tensor:
    return ConditionalPoisson(logits=theta, k=k, validate_args=False).mean


def test_gradients_of_conditional_poisson():
    theta = scores(2, 6).requires_grad_()
    x = ConditionalPoisson(logits=theta, k=3).sample((4,), generator=generator())
    for of in (
        lambda t: ConditionalPoisson(logits=t, k=3).log_prob(x),
        lambda t: ConditionalPoisson(logits=t, k=3).mean,
        lambda t: ConditionalPoisson(logits=t, k=3).entropy(),
    ):
        assert torch.autograd.gradcheck(of, (theta,))
        assert torch.autograd.gradgradcheck(of, (theta,))
    assert torch.autograd.gradcheck(lambda t: ConditionalPoisson(khot.sigmoid_topk(t, 3)).log_prob(x), (theta,))
    # ∇_π log p = C⁺(x − π)
    probs = A6K3.clone().requires_grad_()
    design = ConditionalPoisson(probs)
    subset = torch.tensor([0, 0, 1, 0, 1, 1], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(design.log_prob(subset), probs)
    expected = torch.linalg.pinv(design.covariance_matrix.detach()) @ (subset - A6K3)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)


@EVERY
def test_gradients_survive_a_sample_and_a_backward(design):
    """A parameter cached while sampling, without gradients, once cut log_prob off from it."""
    if design is Pivotal:
        return
    for dtype in (torch.float32, torch.float64):
        for name in ("logits", "probs"):
            value = (scores(6) if name == "logits" else A6K3).to(dtype, copy=True).requires_grad_()
            d = design(**{name: value}, k=3)
            x = d.sample(generator=generator())
            first, second = (torch.autograd.grad(d.log_prob(x), value)[0] for _ in range(2))
            assert torch.equal(first, second)
            assert first.abs().sum() > 0


def test_conjugate_gradients_do_not_run_away_along_the_null_space():
    """They once went on past convergence, where the rounding errors have a direction that Cov does not see."""
    for trial in range(60):
        n = 2 + trial % 10
        k = torch.full((2,), 1.0 + trial % (n - 1), dtype=torch.float64)
        counts = natural.counts((0.5 + trial % 5) * scores(2, n, seed=trial), k, ops.sigmoid_margins)
        mean = subsets.marginals(counts)
        covariance = subsets.joint(counts) - mean[..., :, None] * mean[..., None, :]
        r = scores(2, n, seed=trial + 1)
        r = (r - r.mean(-1, keepdim=True)) * torch.tensor([[1.0], [0.0]])
        v = natural.covariance_solve(counts, r)
        assert ((covariance @ v[..., None])[..., 0] - r).abs().max() <= 1e-12 * v.abs().max().clamp(
            min=1
        )  # backward error


def test_natural_parameters_of_all_kinds_of_rows():
    for trial in range(100):
        n = 2 + trial % 30
        k = 1 + trial % (n - 1)
        p = khot.sigmoid_topk(10.0 ** (trial % 5 - 2) * scores(n, seed=trial), k)
        design = ConditionalPoisson(p, k)
        assert (natural.marginals(design._theta, design._sizes, ops.sigmoid_margins) - p).abs().max() < 1e-10, (
            trial,
            n,
            k,
        )


def test_divergence():
    p, q = ConditionalPoisson(logits=scores(3, 6), k=2), ConditionalPoisson(logits=scores(3, 6, seed=1), k=2)
    x = p.enumerate_support()
    expected = (p.log_prob(x).exp() * (p.log_prob(x) - q.log_prob(x))).sum(0)
    torch.testing.assert_close(kl_divergence(p, q), expected)
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(3, dtype=torch.float64), atol=1e-13, rtol=0)
    narrow = ConditionalPoisson(logits=torch.tensor([-torch.inf, 0, 0, 0, 0, 0], dtype=torch.float64), k=2)
    assert (kl_divergence(p, narrow) == torch.inf).all()
    assert (kl_divergence(narrow, p).isfinite()).all()


def test_extreme_natural_parameters():
    theta = torch.tensor([1e4, 5e3, 0.0, -1.0, -5e3, -1e6], dtype=torch.float64)
    design = ConditionalPoisson(logits=theta, k=3)
    torch.testing.assert_close(design.mean, torch.tensor([1, 1, 0.7310585786, 0.2689414214, 0, 0], dtype=torch.float64))
    x = design.sample((2000,), generator=generator())
    assert (x[:, :2] == 1).all()
    assert abs(x[:, 2].mean() - 0.731) < 0.04
    assert design.log_prob(torch.tensor([1, 1, 1, 0, 0, 0], dtype=torch.float64)) == pytest.approx(
        math.log(0.7310585786)
    )


def test_both_samplers_of_conditional_poisson_agree_with_the_law():
    """n = 40, k = 2 is drawn one by one; n = 9, k = 4 along the tree of counts; steep weights fall back to it."""
    for theta, k in ((0.5 * scores(40), 2), (4 * scores(40), 2), (0.5 * scores(9), 4)):
        design = ConditionalPoisson(logits=theta, k=k)
        x = design.sample((200_000,), generator=generator())
        z = (x.mean(0) - design.mean) / (design.variance / 200_000).sqrt().clamp(min=1e-5)
        assert z.abs().max() < 5, z.abs().max()
        upper = torch.triu_indices(len(theta), len(theta), 1).unbind()
        joint = design.joint_probs()[upper]
        z = ((x.mT @ x / 200_000)[upper] - joint) / (joint * (1 - joint) / 200_000).sqrt().clamp(min=1e-5)
        assert z.abs().max() < 5.5, z.abs().max()


def test_large_designs_have_the_right_sizes_and_means():
    n, k = 5000, 2000
    theta = 2 * scores(n)
    for design in (ConditionalPoisson(logits=theta, k=k), Sampford(logits=theta, k=k), Pareto(logits=theta, k=k)):
        x = design.sample((40,), generator=generator())
        assert (x.sum(-1) == k).all()
        mean = design.probs if isinstance(design, Pareto) else design.mean
        # Σ weights · (x̄ − π) over all items, against the variance of independent draws, which is greater
        for weights in (scores(n, seed=1), theta, mean):
            spread = (weights.square() * mean * (1 - mean)).sum().div(40).sqrt()
            assert (weights * (x.mean(0) - mean)).sum().abs() < 5 * spread


def test_counts_are_those_of_independent_draws():
    """P(S = k) and P(S − x_i = k) against the product of polynomials."""
    z = scores(9)
    p = z.sigmoid().tolist()
    for k in range(10):
        c = subsets.counts(z, torch.tensor(k))
        assert abs(subsets.log_size(c).exp() - _polynomial(p)[k]) < 1e-15
        less, same = subsets.without(c)
        for i in (0, 4):
            rest = [*_polynomial(p[:i] + p[i + 1 :]), 0.0]
            total = _polynomial(p)[k]
            assert abs(less[i] * total - (rest[k - 1] if k else 0.0)) < 1e-14
            assert abs(same[i] * total - rest[k]) < 1e-14


def _polynomial(p: list[float]) -> list[float]:
    row = np.array([1.0])
    for q in p:
        row = np.convolve(row, [1 - q, q])
    return list(row)


def test_the_programme_of_the_benchmark_is_the_same_law():
    theta = scores(60)
    torch.testing.assert_close(marginals_by_programme(theta, 17), ConditionalPoisson(logits=theta, k=17).mean)


def test_pairs_of_some_items_are_those_of_all():
    p = khot.sigmoid_topk(torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 6)
    p[0] = torch.tensor([1.0] * 6 + [0.0] * 14)
    design = ConditionalPoisson(p)
    some = torch.tensor([[5, 2, 19], [0, 1, 2], [7, 7, 3]])
    rows = design.joint_probs().gather(1, some[..., None].expand(-1, -1, 20))
    want = rows.gather(2, some[:, None].expand(-1, 3, -1))
    got = design.joint_probs_of(some)
    is_other = some[..., None] != some[:, None]  # an item that is given twice is taken for two
    torch.testing.assert_close(got[is_other], want[is_other], rtol=0, atol=1e-12)
    torch.testing.assert_close(got.diagonal(dim1=1, dim2=2), p.gather(1, some), rtol=0, atol=1e-12)
