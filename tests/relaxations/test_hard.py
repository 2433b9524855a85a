import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import khot

INF, NAN = math.inf, math.nan


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=30), share=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_exactly_k_ones_and_ties_by_lowest_index(values, share):
    k = round(share * len(values))
    chosen = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    got = khot.hard_topk(torch.tensor(values, dtype=torch.float32), k)
    assert got.nonzero().flatten().tolist() == sorted(chosen)
    assert got.sum() == k


def test_per_row_counts_masks_and_dim():
    x = torch.tensor([[3.0, 1, 2], [1, 2, 3], [5, 5, 5]])
    k = torch.tensor([1, 2, 0])
    expected = torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 0]])
    assert torch.equal(khot.hard_topk(x, k), expected)
    assert torch.equal(khot.hard_topk(x.T, k, dim=0), expected.T)
    mask = torch.tensor([False, True, True])
    assert torch.equal(khot.hard_topk(x, 1, mask=mask), torch.tensor([[0.0, 0, 1], [0, 0, 1], [0, 1, 0]]))
    assert torch.equal(khot.hard_topk(x, torch.tensor([1.0, 2.0, 0.0])), expected)


def test_impossible_rows_are_nan_alone():
    x = torch.tensor([[3.0, 1, 2], [NAN, 2, 3], [-INF, -INF, 1], [1, 2, 3], [1, 2, 3]])
    got = khot.hard_topk(x, torch.tensor([1, 1, 2, 1.5, 4]))
    assert got[0].tolist() == [1, 0, 0]
    assert bool(got[1:].isnan().all())


def test_infinite_scores():
    assert khot.hard_topk(torch.tensor([1.0, INF, INF, -INF]), 1).tolist() == [0, 1, 0, 0]
    assert khot.hard_topk(torch.tensor([1.0, INF, INF, -INF]), 3).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_is_kept(dtype):
    assert khot.hard_topk(torch.randn(2, 5).to(dtype), 2).dtype == dtype


def test_no_gradient_and_transforms():
    x = torch.randn(4, 6, requires_grad=True)
    assert not khot.hard_topk(x, 2).requires_grad
    x = x.detach()
    expected = khot.hard_topk(x, 2)
    assert torch.equal(torch.func.vmap(lambda row: khot.hard_topk(row, 2))(x), expected)
    assert torch.equal(torch.compile(khot.hard_topk, fullgraph=True, backend="aot_eager")(x, 2), expected)


def test_soft_at_low_temperature_is_hard():
    x = torch.randn(8, 20)
    assert torch.equal(khot.sigmoid_topk(x, 5, temperature=1e-9), khot.hard_topk(x, 5))


def test_straight_through():
    x = torch.randn(4, 6, requires_grad=True)
    hard, soft = khot.hard_topk(x, 2), khot.sigmoid_topk(x, 2)
    y = khot.straight_through(hard, soft)
    assert torch.equal(y, hard)
    g = torch.randn(4, 6)
    (got,) = torch.autograd.grad(y, x, g, retain_graph=True)
    (expected,) = torch.autograd.grad(soft, x, g)
    assert torch.equal(got, expected)


def test_straight_through_drops_the_gradient_of_hard():
    hard, soft = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    khot.straight_through(hard, soft).sum().backward()
    assert hard.grad is None
    assert soft.grad.tolist() == [1, 1, 1]
