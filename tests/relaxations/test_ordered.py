import pytest
import torch

import khot

DOUBLE = torch.float64


def spread(*shape):
    """Scores at least 0.1 apart, shuffled."""
    n = shape[-1]
    x = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(6)]).double()
    return (x / 10)[: shape[0]].reshape(shape)


@pytest.mark.parametrize(
    "relaxation", [khot.sigmoid_topk, khot.laplace_topk, khot.normal_topk, khot.cauchy_topk, khot.euclidean_topk]
)
def test_the_ladder(relaxation):
    x = torch.randn(3, 4, 9, dtype=DOUBLE)
    p = khot.ordered_topk(x, 5, relaxation=relaxation, temperature=0.3)
    assert p.shape == (3, 4, 5, 9)
    assert bool((p >= 0).all())
    torch.testing.assert_close(p.sum(-1), torch.ones(3, 4, 5, dtype=DOUBLE), rtol=0, atol=1e-10)
    torch.testing.assert_close(p.sum(-2), relaxation(x, 5, temperature=0.3), rtol=0, atol=1e-10)


def test_cold_slots_are_one_hot_in_order():
    x = spread(6, 9)
    p = khot.ordered_topk(x, 4, temperature=1e-3)
    expected = torch.nn.functional.one_hot(x.topk(4).indices, 9).double()
    torch.testing.assert_close(p, expected, rtol=0, atol=1e-10)


def test_dim_mask_temperature_and_none():
    x = torch.randn(3, 9, 2, dtype=DOUBLE)
    mask = torch.arange(9) != 4
    temperature = torch.tensor([0.3, 0.6], dtype=DOUBLE)
    p = khot.ordered_topk(x, 3, dim=1, temperature=temperature, mask=mask[:, None])
    assert p.shape == (3, 2, 3, 9)
    assert bool((p[..., 4] == 0).all())
    alone = khot.ordered_topk(x[1, :, 1], 3, temperature=0.6, mask=mask)
    torch.testing.assert_close(p[1, 1], alone)
    assert khot.ordered_topk(x, 0, dim=1).shape == (3, 2, 0, 9)


def test_gradients():
    x = torch.randn(2, 5, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: khot.ordered_topk(t, 3), (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda t: khot.ordered_topk(t, 3), (x,))


def test_soft_topk_tends_to_topk():
    x = spread(6, 9).float()
    got = khot.soft_topk(x, 4, temperature=1e-3)
    hard = x.topk(4)
    torch.testing.assert_close(got.values, hard.values, rtol=0, atol=1e-5)
    assert torch.equal(got.indices, hard.indices)
    assert got.weights.shape == (6, 4, 9)
    assert got.values.dtype == torch.float32


def test_soft_topk_along_another_dim_and_masked():
    x = torch.randn(3, 9, 2)
    got = khot.soft_topk(x, 4, dim=1, temperature=0.01)
    assert got.values.shape == got.indices.shape == (3, 4, 2)
    assert got.weights.shape == (3, 2, 4, 9)
    torch.testing.assert_close(got.values[0, :, 1], khot.soft_topk(x[0, :, 1], 4, temperature=0.01).values)
    mask = x > -0.5
    masked = khot.soft_topk(x, 1, dim=1, mask=mask, temperature=0.01)
    infinite = khot.soft_topk(x.masked_fill(~mask, -torch.inf), 1, dim=1, temperature=0.01)
    torch.testing.assert_close(masked.values, infinite.values)
    assert bool(masked.values.isfinite().all())


def test_ties_go_to_the_lowest_index():
    assert khot.soft_topk(torch.tensor([1.0, 2.0, 2.0, 1.0]), 3).indices.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (2.0, TypeError, "`k` must be an int; got float"),
        (True, TypeError, "`k` must be an int; got bool"),
        (torch.tensor(2), TypeError, "`k` must be an int; got Tensor"),
        (10, ValueError, "`k` must satisfy 0 ≤ k ≤ 9"),
        (-1, ValueError, "`k` must satisfy 0 ≤ k ≤ 9"),
    ],
)
def test_bad_k(k, error, message):
    with pytest.raises(error, match=message):
        khot.ordered_topk(torch.randn(2, 9), k)


def test_an_infinite_score_leaves_the_other_slots_alone():
    values = khot.soft_topk(torch.tensor([torch.inf, 1.0, 0.0]), 2).values
    torch.testing.assert_close(values, torch.tensor([torch.inf, 0.6225]), rtol=0, atol=1e-4)
