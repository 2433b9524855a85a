"""What is the same at every width of vectors, and what differs by how much (docs/background/kernel.md)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khot import sigmoid_topk
from khot._math import pivotal
from khot.designs import Pivotal, Systematic
from khot.kernels import _logs, _native, _samplers

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
PATHS = [_native.AVX512, _native.AVX2, _native.PORTABLE]
SHAPES = st.sampled_from([(1, 7), (40, 64), (3, 1000), (17, 300), (1, 70_000)])
KINDS = {
    "normal": lambda x: x,
    "ties": lambda x: (2 * x).round(),
    "heavy": lambda x: x / x.flip(-1),
    "offset": lambda x: x + 1000,
}


@pytest.fixture
def hold():
    """Hold all calls of a test to a path, and let them go."""
    yield _native.LIBRARY.khot_hold
    _native.LIBRARY.khot_hold(_native.WIDE)


def posed(seed, shape, kind):
    return KINDS[kind](torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=SHAPES,
    kind=st.sampled_from(sorted(KINDS)),
    share=st.floats(0.01, 0.99),
    temperature=st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
    cdf=st.sampled_from([*_native.CDFS, "power:1.5"]),
)
def test_entries_agree_within_the_promise(seed, shape, kind, share, temperature, cdf):
    """Sums are added in another order, so τ and p differ, by less than each may differ from the exact answer."""
    x, k = posed(seed, shape, kind), share * shape[1]
    for dtype, near in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
        if _native.has_kernel(cdf, dtype):
            first, *others = (_native.native_topk(x.to(dtype), k, temperature, None, cdf, path) for path in PATHS)
            for other in others:
                assert (first - other).abs().max() <= 2 * near
    first, second = (_logs.log_sigmoid(x.float(), k, temperature, None, path=path) for path in PATHS[:2])
    both = ~(first[2] | second[2])
    tau, other = (roots[0] + temperature * roots[1] for _, roots, _ in (first, second))
    assert ((tau - other).abs()[both] <= 4e-7 * torch.clamp(1e-6 * tau.abs(), min=temperature)[both]).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shape=SHAPES, kind=st.sampled_from(sorted(KINDS)), share=st.floats(0, 1))
def test_hard_choices_have_the_same_bits(seed, shape, kind, share):
    x, k = posed(seed, shape, kind), float(int(share * shape[1]))
    for dtype in (torch.float32, torch.float64):
        first, *others = (_native.hard_topk(x.to(dtype), k, None, path) for path in PATHS)
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("design", [Pivotal, Systematic])
def test_samples_from_probabilities_have_the_same_bits(design, hold):
    p = sigmoid_topk(torch.randn(3, 2000, generator=torch.Generator().manual_seed(0)), 600)
    drawn = []
    for path in PATHS:
        hold(path)
        drawn.append(design(p).sample((4,), generator=torch.Generator().manual_seed(1)))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
@pytest.mark.parametrize(("n", "k"), [(64, 8), (1000, 100), (100_000, 1000)])
def test_samples_from_scores_seldom_differ(n, k, kind):
    """640 samples for each width: about Σ|p − p′| of them differ, some 1e-4. Up to 73 % did when a sum that
    rounds to the other side of 1 turned the coin."""
    x = torch.randn(16, n, generator=torch.Generator().manual_seed(0))
    x = torch.zeros_like(x) if kind == "equal" else KINDS[kind](x)
    whole = torch.ones(16, dtype=torch.bool)
    drawn = []
    for path in PATHS:
        p = _native.native_topk(x, float(k), 1.0, None, path=path)
        drawn.append(_samplers.pivotal(p, whole, torch.tensor(5), None, True, 40, False))
    for other in drawn[1:]:
        assert (drawn[0] != other).any(-1).float().mean() <= 0.01


def test_a_sum_that_rounds_to_either_side_of_one_gives_the_same_sample():
    """All duels of these eight sum to a whole number, or to the float64 beside it."""
    p, whole = torch.full((1, 8), 0.5, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    drawn = [
        draw(p * (1 + change), whole, torch.tensor(3), None, False, 200, False)
        for change in (0, 1e-15, -1e-15)
        for draw in (_samplers.pivotal, pivotal.draw)
    ]
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    assert 0.4 < drawn[0].mean() < 0.6
    assert len(drawn[0].unique(dim=0)) == 16  # pairs: one of each two, by its own coin


def test_paths_are_not_all_one():
    """If the paths gave the same bits everywhere, the page could promise more."""
    if _native.LIBRARY.khot_path() == _native.PORTABLE:
        pytest.skip("this machine has one path")
    x = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    first, *others = (_native.native_topk(x, 1e4, 1.0, None, "sigmoid", path) for path in PATHS)
    assert not all(torch.equal(first, other) for other in others)
