"""The native sums of conditional Poisson and Sampford sampling against eager torch, at every width of vectors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khot import ops, sigmoid_topk
from khot._math import high_entropy, natural, noise, subsets
from khot.designs import ConditionalPoisson, Sampford
from khot.kernels import _native, _samplers

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
PATHS = [_native.AVX512, _native.AVX2, _native.PORTABLE]
SIZES = st.sampled_from([(1, 1), (1, 2), (4, 3), (9, 17), (3, 64), (3, 65), (20, 129), (2, 1000), (1, 5000)])
SCALES = st.sampled_from([0.0, 0.01, 1.0, 4.0, 20.0, 700.0])


@pytest.fixture
def threads():
    """Set the number of threads, and set it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def posed(seed, shape, scale, has_certain, share):
    """Logits with items that are certain, and a size for each row: 0, n and what is between."""
    source = torch.Generator().manual_seed(seed)
    x = (scale * torch.randn(shape, generator=source, dtype=torch.float64)).clamp(-700, 700)
    if has_certain:
        kind = torch.rand(shape, generator=source)
        x = torch.where(kind < 0.1, torch.inf, torch.where(kind > 0.9, -torch.inf, x))
    forced, allowed = (x == torch.inf).sum(-1), (x > -torch.inf).sum(-1)
    k = (forced + (share * (allowed - forced)).round()).to(torch.float64)
    return x, k, natural.tilt(x, k, ops.sigmoid_margins)[0]


def everywhere(kernel, threads):
    """The results of all paths, each with the same bits at one thread and at two."""
    results = []
    for path in PATHS:
        threads(1)
        results.append(kernel(path))
        threads(2)
        assert torch.equal(kernel(path).nan_to_num(7), results[-1].nan_to_num(7))
        _native.LIBRARY.khot_hold(path)
        held = kernel(_native.WIDE)
        _native.LIBRARY.khot_hold(_native.WIDE)
        assert torch.equal(held.nan_to_num(7), results[-1].nan_to_num(7))
    return results


CASES = {
    "seed": st.integers(0, 10**6),
    "shape": SIZES,
    "scale": SCALES,
    "has_certain": st.booleans(),
    "share": st.sampled_from([0.0, 0.03, 0.3, 0.5, 0.9, 1.0]),
}


@settings(max_examples=25, deadline=None)
@given(**CASES)
def test_samples_along_the_tree_are_the_same(seed, shape, scale, has_certain, share):
    """A coin that rounding decides is a matter of 1e-13."""
    _, k, z = posed(seed, shape, scale, has_certain, share)
    p, key = z.sigmoid(), torch.tensor(seed)
    expected = natural.along_tree(p, k, key, 8, 5, 2, noise.uniform)
    for sample in everywhere(lambda path: _samplers.along_tree(p, k, key, 8, 5, 2, path=path), torch.set_num_threads):
        torch.testing.assert_close(sample, expected, rtol=0, atol=0)
        assert (sample.sum(-1) == k).all()


@settings(max_examples=12, deadline=None)
@given(**CASES)
def test_constants_of_paretos_law_agree(seed, shape, scale, has_certain, share):
    """One row at a time, because eager torch takes as many nodes for all rows as one of them needs."""
    _, k, theta = posed(seed, shape, scale, has_certain, share)
    p = theta.sigmoid()
    theta = torch.logit(p)
    rest = k - (p == 1).sum(-1)
    has_law = (rest >= 1) & (rest <= theta.isfinite().sum(-1) - 1)  # there is nothing to integrate otherwise
    theta, k = theta[has_law], k[has_law]
    for c in everywhere(lambda path: _samplers.pareto_constants(theta, k, path=path), torch.set_num_threads):
        for row, own, size in zip(c, theta, k, strict=True):
            expected = high_entropy.pareto_constants(own, size)
            torch.testing.assert_close(row, expected, rtol=1e-12, atol=0)


@settings(max_examples=25, deadline=None)
@given(**CASES)
def test_characteristic_functions_agree(seed, shape, scale, has_certain, share):
    _, k, z = posed(seed, shape, scale, has_certain, share)
    c = subsets.counts(z, k)
    scale = (c.weight != 0).to(torch.float64)
    expected = subsets.HERE.product(c.p, c.step, scale)
    rests = torch.stack(subsets.HERE.rests(c), -2)
    size = c.weight.abs().sum(-1)[:, None, None].clamp(min=1e-300)
    for product in everywhere(
        lambda path: _samplers.count_products(c.p, c.step, scale, path=path), torch.set_num_threads
    ):
        torch.testing.assert_close(product * scale, expected * scale, rtol=0, atol=1e-12)
    for found in everywhere(
        lambda path: _samplers.count_rests(c.p, c.step, c.weight, path=path), torch.set_num_threads
    ):
        assert ((found - rests).abs() <= 1e-12 * size.clamp(min=1)).all()
    native, eager = (natural.marginals(z, k, ops.sigmoid_margins, whole) for whole in (ops.WHOLE, subsets.HERE))
    torch.testing.assert_close(native, eager, rtol=1e-11, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("k", [32, 12_345])
def test_one_long_row(k, threads):
    x = torch.randn(1, 200_001, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    size = torch.tensor([float(k)], dtype=torch.float64)
    z = natural.tilt(x, size, ops.sigmoid_margins)[0]
    key, p = torch.tensor(k), z.sigmoid()
    expected = natural.along_tree(p, size, key, 8, 2, 1, noise.uniform)
    for sample in everywhere(lambda path: _samplers.along_tree(p, size, key, 8, 2, 1, path=path), threads):
        torch.testing.assert_close(sample, expected, rtol=0, atol=0)
    constants = high_entropy.pareto_constants(z, size)
    for c in everywhere(lambda path: _samplers.pareto_constants(z, size, path=path), threads):
        torch.testing.assert_close(c, constants, rtol=1e-12, atol=0)
    counts = subsets.counts(z, size)
    scale = (counts.weight != 0).to(torch.float64)
    expected = subsets.HERE.product(p, counts.step, scale) * scale
    for product in everywhere(lambda path: _samplers.count_products(p, counts.step, scale, path=path), threads):
        torch.testing.assert_close(product * scale, expected, rtol=0, atol=1e-12)


def test_equal_items_keep_their_digits():
    """Equal factors are rounded alike, so their errors add up; blocks less 1 keep them small."""
    theta = torch.zeros(1, 100_000, dtype=torch.float64) - 9.0
    theta[:, :2] = torch.tensor([0.0, 3.0])
    size = theta.sigmoid().sum(-1)
    c, expected = _samplers.pareto_constants(theta, size), high_entropy.pareto_constants(theta, size)
    torch.testing.assert_close(c / c[:, :1], expected / expected[:, :1], rtol=1e-12, atol=0)


def test_the_native_kernels_serve_the_designs(monkeypatch):
    """And eager torch draws the same samples."""
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    designs = [ConditionalPoisson(logits=x, k=40), Sampford(sigmoid_topk(x.double(), 40))]
    samples = [d.sample((3,), generator=torch.Generator().manual_seed(1)) for d in designs]
    seed = noise.seed(torch.Generator().manual_seed(1), x.device)
    along = lambda *arguments: natural.along_tree(*arguments, uniform=noise.uniform)  # noqa: E731
    z = natural.tilt(x.double(), torch.full((5,), 40.0, dtype=torch.float64), ops.sigmoid_margins)[0]
    eager = natural.draw(z, torch.full((5,), 40.0, dtype=torch.float64), seed, 3, noise.uniform, along)
    torch.testing.assert_close(samples[0], eager.float(), rtol=0, atol=0)
    p = sigmoid_topk(x.double(), 40)
    drawn = high_entropy.draw_sampford(
        p,
        torch.full((5,), 40.0, dtype=torch.float64),
        seed,
        3,
        noise.uniform,
        ops.hard_topk,
        ops.sigmoid_margins,
        high_entropy.pareto_constants,
        ops.rejective,
    )
    torch.testing.assert_close(samples[1], drawn, rtol=0, atol=0)
