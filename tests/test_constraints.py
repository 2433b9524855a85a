import pytest
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


@pytest.mark.parametrize("k", [0.3, 1, 2.5, 4])
def test_the_bijection_with_the_capped_simplex(k):
    transform = torch.distributions.biject_to(capped_simplex(k))
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(2)
    y = transform(x)
    assert capped_simplex(k).check(y).all()
    assert y.shape == transform.forward_shape(x.shape) == (7, 5)
    assert transform.inverse_shape(y.shape) == x.shape
    torch.testing.assert_close(transform.inv(y), x)
    jacobian = torch.stack([torch.autograd.functional.jacobian(lambda t: transform(t)[:-1], row) for row in x])
    torch.testing.assert_close(transform.log_abs_det_jacobian(x, y), torch.linalg.slogdet(jacobian).logabsdet)
    other = torch.stack([torch.autograd.functional.jacobian(lambda t: transform(t)[1:], row) for row in x])
    torch.testing.assert_close(torch.linalg.slogdet(other).logabsdet, torch.linalg.slogdet(jacobian).logabsdet)
    without = (y * (1 - y)).log().sum(-1)  # a volume that forgets that Σy is k
    with pytest.raises(AssertionError):
        torch.testing.assert_close(without, torch.linalg.slogdet(jacobian).logabsdet)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(transform.inv(y.roll(1, -1)), x)
    assert transform == torch.distributions.biject_to(capped_simplex(k)) != transform.with_cache().inv
    assert torch.autograd.gradcheck(lambda t: transform.log_abs_det_jacobian(t, transform(t)), (x.requires_grad_(),))


def test_a_density_on_the_capped_simplex_integrates_to_one_through_the_bijection():
    """RelaxedKHot's density in the real numbers of the bijection: Σ over a grid, n = 3."""
    law = khot.designs.RelaxedKHot(1.0, logits=torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64), k=1.4)
    transform = torch.distributions.biject_to(law.support)
    axis = torch.linspace(-25, 25, 301, dtype=torch.float64)
    x = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).flatten(0, 1)
    scores = torch.nn.functional.pad(x, (0, 1))
    z = scores - khot.threshold(scores, 1.4)[:, None]
    density = (law.log_prob_of_logits(z) + transform.log_abs_det_jacobian(x, transform(x))).exp()
    assert abs(float(density.sum()) * (axis[1] - axis[0]) ** 2 - 1) < 1e-6
    without = law.log_prob_of_logits(z) + (transform(x) * (1 - transform(x))).log().sum(-1)
    assert abs(float(without.exp().nansum()) * (axis[1] - axis[0]) ** 2 - 1) > 0.1, "another volume is found"
