import math

import numpy as np
import pytest
import torch
from cases import PROMISED, RELAXATIONS, scores
from hypothesis import given, settings
from hypothesis import strategies as st

import khot
from benchmarks.grid import TEMPERATURES, counts, reference
from khot._math import cdfs, threshold
from khot.testing import SCORE_KINDS as DISTRIBUTIONS
from khot.testing import score_vector

INF, NAN = math.inf, math.nan


@pytest.mark.slow
@pytest.mark.parametrize("name", RELAXATIONS)
def test_battery(name):
    khot.testing.check_relaxation(RELAXATIONS[name].fn, **RELAXATIONS[name].promises)


@pytest.mark.parametrize(
    ("x", "k", "expected", "tolerance"),
    [
        ([-4.5951, -2.1972, -3.1781, 0, -1.1527], 3, [0.1462, 0.6531, 0.4139, 0.9443, 0.8426], 1e-4),
        ([-4.0695, 10.8666, 13.0867, -7.1431, -14.7220], 2, [5.8745e-4, 0.99945, 0.99994, 2.7187e-5, 1.3897e-8], 1e-4),
    ],
)
def test_golden_values(x, k, expected, tolerance):
    got = khot.sigmoid_topk(torch.tensor(x), k)
    np.testing.assert_allclose(got, expected, atol=tolerance)


def test_golden_shift():
    x = torch.tensor([-4.5951, -2.1972, -3.1781, 0, -1.1527])
    assert -khot.threshold(x, 3).item() == pytest.approx(2.8301, abs=1e-4)


def assert_solved(p, x, k, temperature):
    """The limits of the robustness grid."""
    assert bool(((p >= 0) & (p <= 1)).all())
    error = abs(math.fsum(p.double().tolist()) - k) / max(k, 1)
    if p.dtype == torch.float32:
        assert error <= 1e-6
        assert np.abs(p.numpy() - reference(x.double().numpy(), k, temperature)[0]).max() <= 1e-6
    else:
        assert error <= (1e-12 if float(x.abs().max()) / temperature <= 100 else 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [64, 1024, 16384])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_grid(name, n, dtype):
    x = scores(name, n, dtype)
    for temperature in TEMPERATURES:
        for k in counts(n):
            assert_solved(khot.sigmoid_topk(x, k, temperature=temperature), x, k, temperature)


@pytest.mark.parametrize(
    ("name", "temperature", "k"),
    [
        ("normal", 1.0, 1e5),
        ("normal", 1e-3, 5e5),
        ("uniform", 10.0, 0.5),
        ("cauchy", 1e-3, 10),
        ("cauchy", 1e-3, 1e6 - 0.5),
        ("constant", 1e-3, 1),
        ("ties", 1e-3, 5e5),
        ("bimodal", 1e-3, 5e5),
        ("offset", 1e-3, 1e6 - 1),
        ("sorted", 0.01, 10),
        ("exponential", 0.1, 1),
        ("outlier", 1e-3, 0.5),
    ],
)
@pytest.mark.slow
def test_a_million_scores(name, temperature, k):
    x = scores(name, 10**6, torch.float32)
    assert_solved(khot.sigmoid_topk(x, k, temperature=temperature), x, k, temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_fixed_steps_solve_the_grid_too(name, dtype):
    """What an accelerator runs: no early stopping, nothing read on the host."""
    n = 1024
    x = scores(name, n, dtype)
    k, temperature = (
        t.double().flatten() for t in torch.meshgrid(torch.tensor(counts(n)), torch.tensor(TEMPERATURES), indexing="ij")
    )
    p = threshold.topk(x.expand(len(k), n), k, temperature, None, cdfs.SIGMOID, early_stop=False)
    stopped = threshold.topk(x.expand(len(k), n), k, temperature, None, cdfs.SIGMOID, early_stop=True)
    torch.testing.assert_close(p, stopped, rtol=0, atol=PROMISED[dtype])


def test_fixed_steps_handle_bad_and_infinite_rows_alike():
    x = torch.tensor([[1.0, 2, 3], [NAN, 2, 3], [INF, 2, 3], [-INF, -INF, 3], [INF, INF, 3], [1, 2, 3], [1, 2, 3]])
    k = torch.tensor([1.5, 1, 1.5, 2, 1, 0, 3], dtype=torch.float64)
    temperature = torch.ones_like(k)
    results = [threshold.topk(x, k, temperature, None, cdfs.SIGMOID, early_stop=stop) for stop in (True, False)]
    torch.testing.assert_close(*results, equal_nan=True)


def test_fixed_bracket_of_ten_summed_to_104():
    """2.3 million zeros and k = 1: public code with a bracket of ±10 gives a mask that sums to 104.4."""
    assert khot.sigmoid_topk(torch.zeros(2_300_000), 1).double().sum().item() == pytest.approx(1, abs=1e-6)
    assert khot.sigmoid_topk(torch.zeros(2_300_000), 50).double().sum().item() == pytest.approx(50, abs=5e-5)


def test_short_step_was_taken_for_a_root():
    """Near-hard rows have long flat stretches; stopping there returned sums up to 79 % off."""
    for seed in range(3):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        for temperature in (1e-2, 1e-3, 1e-4):
            total = khot.sigmoid_topk(x, 6.5, temperature=temperature).double().sum(-1)
            assert (total - 6.5).abs().max() < 6.5e-6


@pytest.mark.parametrize("temperature", [1e-10, 1e-20, 1e-30, 1e-37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ties_are_shared_at_any_temperature(dtype, temperature):
    x = torch.tensor([1.0, 2, 2, 3, 4, 4, 7], dtype=dtype)
    for k, expected in [(2.5, [0, 0, 0, 0, 0.75, 0.75, 1]), (5, [0, 0.5, 0.5, 1, 1, 1, 1]), (1, [0, 0, 0, 0, 0, 0, 1])]:
        got = khot.sigmoid_topk(x, k, temperature=temperature)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=dtype), rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-300, 1e-50, 1e50, INF])
def test_temperatures_beyond_the_dtype(temperature):
    x = torch.tensor([3.0, 1, 2, 0])
    expected = torch.tensor([1.0, 0, 1, 0]) if temperature < 1 else torch.full((4,), 0.5)
    torch.testing.assert_close(khot.sigmoid_topk(x, 2, temperature=temperature), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_at_the_end_of_the_range(dtype):
    big = torch.finfo(dtype).max
    x = torch.tensor([big, -big, 0, 1], dtype=dtype)
    for k in (0.5, 1, 1.5, 2.5, 3):
        p = khot.sigmoid_topk(x, k)
        assert bool(p.isfinite().all())
        assert p.double().sum().item() == pytest.approx(k, abs=1e-6)


@pytest.mark.slow
def test_fixed_steps_at_a_million_scores_of_two_kinds():
    """A division that was always the line's zero, never the middle, needed a hundred steps here."""
    x = scores("bimodal", 10**6, torch.float32)
    p = threshold.topk(x, torch.tensor(5e5).double(), torch.tensor(1e-3).double(), None, cdfs.SIGMOID, early_stop=False)
    assert p.double().sum().item() == pytest.approx(5e5, rel=1e-6)


def test_rounding_that_all_entries_share_does_not_add_up():
    """Far from the threshold all margins round alike; the sum was off by 1.2e-6."""
    x = score_vector("offset", 16384, seed=24).float()
    assert khot.sigmoid_topk(x, 1).double().sum().item() == pytest.approx(1, abs=3e-7)


@pytest.mark.parametrize("early_stop", [True, False])
def test_none_and_all_of_scores_that_overflow(early_stop):
    x, temperature = torch.tensor([[1e30, -1e30, 0.0]] * 2), torch.full((2,), 1e-12).double()
    p = threshold.topk(x, torch.tensor([0.0, 3.0]).double(), temperature, None, cdfs.SIGMOID, early_stop=early_stop)
    assert p.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_tiny_counts():
    x = torch.randn(50, dtype=torch.float64)
    assert khot.sigmoid_topk(torch.zeros(3), 5e-324).sum() <= 1e-37
    for k in (1e-3, 1e-12, 1e-100, 1e-300):
        p = khot.sigmoid_topk(x, k)
        torch.testing.assert_close(p / k, x.softmax(0), rtol=1e-3 if k > 1e-6 else 1e-9, atol=0)


@given(
    n=st.integers(1, 300),
    rows=st.integers(0, 5),
    share=st.floats(0, 1),
    log_temperature=st.floats(-6, 6),
    spread=st.floats(-5, 5),
    double=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_any_row_sums_to_k(n, rows, share, log_temperature, spread, double, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=generator, dtype=torch.float64) * 10**spread
    x = x if double else x.float()
    k = share * n
    p = khot.sigmoid_topk(x, k, temperature=10**log_temperature)
    assert bool(((p >= 0) & (p <= 1)).all())
    limit = (1e-9 if double else 1e-6) * max(k, 1)
    assert bool(((p.double().sum(-1) - k).abs() <= limit).all())


def test_result_does_not_depend_on_the_batch():
    x = torch.randn(7, 33)
    together = khot.sigmoid_topk(x, 4, temperature=0.01)
    alone = torch.stack([khot.sigmoid_topk(row, 4, temperature=0.01) for row in x])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_gradient_of_a_float32_row_is_that_of_float64():
    x = torch.randn(4, 1000)
    g = torch.randn(4, 1000)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        arguments = [t.to(dtype).requires_grad_() for t in (x, torch.full((4,), 100.0), torch.full((4,), 0.5))]
        y = khot.sigmoid_topk(arguments[0], arguments[1], temperature=arguments[2])
        gradients.append(torch.autograd.grad(y, arguments, g.to(dtype)))
    for single, double in zip(*gradients, strict=True):
        assert (single - double).norm() <= 1e-6 * double.norm()


def test_saturated_gradient_is_zero():
    x = (torch.arange(36.0).reshape(4, 9) * 1000).requires_grad_()
    (gradient,) = torch.autograd.grad(khot.sigmoid_topk(x, 2), x, torch.randn(4, 9))
    assert bool((gradient == 0).all())


@pytest.mark.compile
@pytest.mark.long
def test_compiled_by_inductor():
    x, k = torch.randn(8, 50), torch.full((8,), 3.5)

    def loss(x, k):
        return (khot.sigmoid_topk(x, k, temperature=0.5) ** 2).sum()

    compiled = torch.compile(loss, fullgraph=True)
    results = []
    for fn in (loss, compiled):
        arguments = x.clone().requires_grad_(), k.clone().requires_grad_()
        value = fn(*arguments)
        results.append((value, *torch.autograd.grad(value, arguments)))
    torch.testing.assert_close(*results)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["topk", "topk_pull", "margin", "hard_topk"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(name, masked, transposed):
    x = torch.rand(7, 3).T if transposed else torch.rand(3, 7)
    mask = torch.rand(3, 7) > 0.2 if masked else None
    k, temperature = torch.full((3,), 2.0, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    arguments = {
        "topk": (x.requires_grad_(), k, temperature, mask, "sigmoid"),
        "margin": (x.requires_grad_(), k, temperature, mask, x.detach() + 1, "laplace"),
        "hard_topk": (x, k, mask),
        "topk_pull": (x.detach(), x.detach(), temperature, "sigmoid"),
    }
    torch.library.opcheck(getattr(torch.ops.khot, name).default, arguments[name])


@pytest.mark.parametrize("early_stop", [True, False])
def test_eager_kernels_give_contiguous_results(early_stop):
    """The fake kernels say so, and inductor trusts them."""
    x, k, temperature = torch.randn(7, 3).T, torch.full((3,), 2.0).double(), torch.ones(3).double()
    assert threshold.topk(x, k, temperature, None, cdfs.SIGMOID, early_stop=early_stop).is_contiguous()
    assert threshold.margin(x, k, temperature, None, None, cdfs.SIGMOID, early_stop=early_stop).is_contiguous()


@pytest.mark.compile
@pytest.mark.parametrize("fn", [khot.sigmoid_topk, khot.log_sigmoid_topk, khot.threshold, khot.hard_topk])
def test_inductor_along_the_first_dim(fn):
    x = torch.randn(9, 4)
    compiled = torch.compile(lambda x: fn(x, 2, dim=0), fullgraph=True)
    torch.testing.assert_close(compiled(x), fn(x, 2, dim=0))


def test_row_sum_is_exact_to_a_rounding():
    from khot._math.cdfs import row_sum

    t = torch.rand(3, 5000)
    exact_sum = torch.tensor([math.fsum(row) for row in t.double().tolist()], dtype=torch.float64)
    assert bool(((row_sum(t).squeeze(-1) - exact_sum).abs() <= 1e-7 * exact_sum).all())
