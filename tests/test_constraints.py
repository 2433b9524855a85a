import torch
from torch.distributions import transform_to

import khot
from khot.constraints import capped_simplex, k_hot


def test_capped_simplex_accepts_soft_and_hard():
    x = torch.randn(100, 1000)
    for k in (1, 2.5, 500, 999):
        assert bool(capped_simplex(k).check(khot.sigmoid_topk(x, k)).all())
    assert bool(capped_simplex(3).check(khot.hard_topk(x, 3)).all())


def test_capped_simplex_refuses():
    bad = torch.tensor([[1.5, 0.5, 0.0], [1.0, 1.0, 1.0], [1.0, 1.1, -0.1], [1.0, 1.0, float("nan")], [1.0, 0.9, 0.0]])
    assert not bool(capped_simplex(2).check(bad).any())


def test_k_hot():
    y = torch.tensor([[1.0, 0, 1], [1, 1, 1], [0.5, 0.5, 1], [float("nan"), 1, 1]])
    assert k_hot(2).check(y).tolist() == [True, False, False, False]
    assert k_hot(torch.tensor([2, 3])).check(y[:2]).tolist() == [True, True]
    assert k_hot(2).is_discrete
    assert (k_hot(2).event_dim, capped_simplex(2).event_dim) == (1, 1)


def test_transform_to_is_sigmoid_topk():
    x = torch.randn(4, 7)
    transform = transform_to(capped_simplex(2.5))
    y = transform(x)
    torch.testing.assert_close(y, khot.sigmoid_topk(x, 2.5))
    torch.testing.assert_close(transform(transform.inv(y)), y)
    assert bool(transform.codomain.check(y).all())
    assert transform == transform_to(capped_simplex(2.5))
    assert transform != transform_to(capped_simplex(3))
    assert transform != transform_to(capped_simplex(torch.tensor([2.5, 2.5])))
    assert bool(capped_simplex(2.5).check(khot.sigmoid_topk(x.bfloat16(), 2.5)).all())
    assert "2.5" in repr(capped_simplex(2.5))
    assert "2" in repr(k_hot(2))
