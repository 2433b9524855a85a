"""The start at the k-th score: rigorous brackets, few evaluations, few launches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from khot._math import cdfs, implicit, kth, threshold

FAMILY = (cdfs.SIGMOID, cdfs.LAPLACE, cdfs.NORMAL, cdfs.CAUCHY, cdfs.EUCLIDEAN, cdfs.power(4 / 3))


class Launches(TorchDispatchMode):
    """Count the operations that start a kernel on an accelerator: views and allocations do not."""

    FREE = ("view", "expand", "squeeze", "slice", "select", "detach", "empty", "alias", "unbind", "split", "as_strided")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not any(word in func.name() for word in self.FREE)
        return func(*args, **(kwargs or {}))


def hostile(name, n=1000, rows=4):
    """Rows on which a start from moments needs up to 78 evaluations."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, n, generator=g, dtype=torch.float64)
    u = torch.rand(rows, n, generator=g, dtype=torch.float64)
    return {
        "normal": x,
        "cauchy cubed": torch.tan(torch.pi * (u - 0.5)) ** 3,
        "log-normal": (5 * x).exp(),
        "ties": x.round(),
        "one outlier": torch.cat((x[:, 1:], torch.full((rows, 1), 1e8, dtype=torch.float64)), -1),
        "some far": torch.where(u < 0.01, 1e6 * x, x),
    }[name]


HOSTILE = ("normal", "cauchy cubed", "log-normal", "ties", "one outlier", "some far")


@pytest.fixture
def evaluations(monkeypatch):
    """Count the evaluations of the equation."""
    counted, evaluate = [0], implicit.evaluate

    def counting(*args):
        counted[0] += 1
        return evaluate(*args)

    monkeypatch.setattr(implicit, "evaluate", counting)
    return counted


@pytest.mark.parametrize("n", [40, 1000, 40_000])
def test_a_call_on_an_accelerator_launches_few_kernels(n):
    x, k, one = torch.randn(3, n), torch.full((3,), 5.0).double(), torch.ones(3).double()
    with Launches() as launches:
        y = threshold.topk(x, k, one, None, cdfs.SIGMOID, early_stop=False)
    assert launches.count < 2_800, "12,554 before the start at the k-th score, and twice that for long rows"
    assert launches.count > 100, "the mode counts"
    torch.testing.assert_close(y.sum(-1), torch.full((3,), 5.0), rtol=0, atol=5e-6)


@pytest.mark.parametrize("temperature", [1e-4, 0.01, 1.0, 10.0])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows_take_at_most_ten_evaluations(name, temperature, evaluations):
    x = hostile(name)
    for k in (0.5, 50.0, 500.0, 900.0):
        for row in x:
            evaluations[0] = 0
            sizes, heat = torch.tensor([k]).double(), torch.tensor([temperature]).double()
            z = threshold.margin(row[None], sizes, heat, None, None, cdfs.SIGMOID, early_stop=True)
            assert evaluations[0] <= 10
            assert abs(float(cdfs.value(cdfs.SIGMOID, z).sum()) - k) <= 1e-9 * max(k, 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_fixed_steps_solve_hostile_rows_of_the_whole_family(name):
    x = hostile(name)
    for cdf in FAMILY:
        for temperature in (1e-4, 1.0):
            k, heat = torch.tensor([0.5, 50.0, 500.0, 900.0]).double(), torch.full((4,), temperature).double()
            fixed, stopped = (threshold.topk(x, k, heat, None, cdf, early_stop=stop) for stop in (False, True))
            torch.testing.assert_close(fixed, stopped, rtol=0, atol=1e-9)
            torch.testing.assert_close(fixed.sum(-1), k, rtol=0, atol=1e-9 * 900)


def test_long_hostile_rows_begin_again_at_their_kth_score(evaluations):
    x = hostile("some far", 40_000, 1)
    z = threshold.margin(
        x, torch.tensor([2000.0]).double(), torch.ones(1).double(), None, None, cdfs.SIGMOID, early_stop=True
    )
    assert evaluations[0] <= 25, "the sample's evaluations count too"
    assert abs(float(torch.sigmoid(z).sum()) - 2000) <= 1e-6


@pytest.mark.parametrize("with_costs", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_the_bracket_holds_the_root(name, with_costs):
    x = hostile(name)
    g = torch.Generator().manual_seed(1)
    costs = 0.2 + torch.rand(x.shape, generator=g, dtype=torch.float64) if with_costs else None
    weights = torch.ones_like(x) if costs is None else costs
    for cdf in FAMILY:
        for temperature in (1e-3, 1.0, 100.0):
            k, heat = torch.tensor([[0.5], [1.0], [77.25], [400.0]]).double(), torch.full((4, 1), temperature).double()
            near = kth.bracket(cdf, kth.sorted_edges(x, costs, k), k, weights.sum(-1, keepdim=True), heat)
            for anchor, shift, sign in ((near.low, near.low_shift, 1), (near.high, near.high_shift, -1)):
                total = (weights * cdfs.value(cdf, (x - anchor) / heat - shift)).sum(-1, keepdim=True)
                assert bool((sign * (total - k) >= -1e-9 * k).all())


def test_a_wrong_bracket_would_be_seen():
    x, k, heat = hostile("normal"), torch.full((4, 1), 50.0).double(), torch.full((4, 1), 1e-3).double()
    edges = kth.sorted_edges(x, None, k + 20)
    near = kth.bracket(cdfs.SIGMOID, edges, k + 20, torch.full((4, 1), 1000.0).double(), heat)
    total = torch.sigmoid((x - near.high) / heat - near.high_shift).sum(-1, keepdim=True)
    assert not bool((total <= k).all())
