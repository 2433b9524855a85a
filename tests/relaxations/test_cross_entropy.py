import math

import pytest
import torch
from torch.func import hessian

import khot

INF = math.inf


def rows(seed=0, n=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, n, dtype=torch.float64, generator=generator)
    return x, khot.sigmoid_topk(
        torch.randn(4, n, dtype=torch.float64, generator=generator), torch.tensor([1, 2, 2.5, 4])
    )


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_gradient_is_prediction_minus_target(temperature):
    x, y = rows()
    x.requires_grad_()
    loss = khot.khot_cross_entropy(x, y, temperature=temperature, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x)
    expected = khot.sigmoid_topk(x.detach(), y.sum(-1), temperature=temperature) - y
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-13)


def test_is_the_fenchel_young_loss():
    """Ω*(x) + Ω(y) − ⟨x, y⟩ with Ω* = max_π ⟨x, π⟩ + T·H(π), written from its definition."""
    x, y = rows()
    temperature = 0.7
    p = khot.sigmoid_topk(x, y.sum(-1), temperature=temperature)

    def entropy(p):
        return (torch.special.entr(p) + torch.special.entr(1 - p)).sum(-1)

    conjugate = (x * p).sum(-1) + temperature * entropy(p)
    expected = conjugate - temperature * entropy(y) - (x * y).sum(-1)
    torch.testing.assert_close(khot.khot_cross_entropy(x, y, temperature=temperature, reduction="none"), expected)


def test_hessian_is_the_jacobian_of_sigmoid_topk():
    x, y = rows()
    k = y[0].sum().item()
    of_loss = hessian(lambda x: khot.khot_cross_entropy(x, y[0], reduction="sum"))(x[0])
    torch.testing.assert_close(of_loss, torch.func.jacrev(lambda x: khot.sigmoid_topk(x, k))(x[0]))


def test_derivatives_in_every_argument():
    x, y = rows(n=4)
    y = khot.sigmoid_topk(y, 1.5)
    temperature = torch.full((4,), 0.7, dtype=torch.float64)
    arguments = [t.requires_grad_() for t in (x, y, temperature)]

    def loss(x, y, temperature):
        return khot.khot_cross_entropy(x, y, temperature=temperature, reduction="none")

    assert torch.autograd.gradcheck(loss, arguments, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(loss, arguments, check_fwd_over_rev=True)


def test_zero_only_at_the_target():
    x, y = rows()
    assert bool((khot.khot_cross_entropy(x, y, reduction="none") > 0.01).all())
    at_target = khot.khot_cross_entropy(torch.logit(y) + 3, y, reduction="none")
    assert bool(((at_target >= 0) & (at_target < 1e-15)).all())


def test_never_negative():
    for seed in range(50):
        x, _ = rows(seed)
        for dtype in (torch.float32, torch.float64):
            y = khot.sigmoid_topk(x.to(dtype), 2)
            assert bool((khot.khot_cross_entropy(x.to(dtype), y, reduction="none") >= 0).all())


def test_infinite_scores():
    x = torch.tensor([1.0, -INF, INF, 0.0])
    y = torch.tensor([1, 0, 1, 0])
    expected = khot.khot_cross_entropy(torch.tensor([1.0, 0.0]), torch.tensor([1, 0]))
    torch.testing.assert_close(khot.khot_cross_entropy(x, y), expected)
    assert khot.khot_cross_entropy(x, torch.tensor([0, 1, 1, 0])) == INF
    assert khot.khot_cross_entropy(x, torch.tensor([1, 0, 0, 1])) == INF
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(khot.khot_cross_entropy(x, y), x)
    assert bool(gradient.isfinite().all())
    assert gradient[1] == gradient[2] == 0


def test_mask_and_saturation():
    x, y = torch.randn(3, 5), torch.tensor([1, 0, 1, 0, 0]).expand(3, 5)
    mask = torch.tensor([True, True, True, True, False])
    torch.testing.assert_close(khot.khot_cross_entropy(x, y, mask=mask), khot.khot_cross_entropy(x[:, :4], y[:, :4]))
    assert khot.khot_cross_entropy(x, y, mask=~mask).isnan()
    far = (1e4 * torch.tensor([0.0, 1, 0, 1, 0])).requires_grad_()
    loss = khot.khot_cross_entropy(far, y[0])
    assert loss.item() == pytest.approx(2e4, rel=1e-3)
    torch.testing.assert_close(torch.autograd.grad(loss, far)[0], torch.tensor([-1.0, 1, -1, 1, 0]))


def test_reductions_and_dtypes_of_targets():
    x, y = torch.randn(2, 3, 6), khot.hard_topk(torch.randn(2, 3, 6), 2)
    each = khot.khot_cross_entropy(x, y, reduction="none")
    assert each.shape == (2, 3)
    torch.testing.assert_close(khot.khot_cross_entropy(x, y), each.mean())
    torch.testing.assert_close(khot.khot_cross_entropy(x, y, reduction="sum"), each.sum())
    for kind in (torch.bool, torch.long, torch.float64):
        torch.testing.assert_close(khot.khot_cross_entropy(x, y.to(kind)), each.mean())
    torch.testing.assert_close(khot.khot_cross_entropy(x.movedim(-1, 0), y.movedim(-1, 0), dim=0), each.mean())
    assert khot.khot_cross_entropy(x.bfloat16(), y).dtype == torch.bfloat16


@pytest.mark.compile
def test_compiles():
    x, y = rows()
    compiled = torch.compile(khot.khot_cross_entropy, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), khot.khot_cross_entropy(x, y))


def test_targets_outside_the_unit_interval_are_nan_alone():
    x = torch.randn(2, 4)
    y = torch.tensor([[1.5, 0.5, 0, 0], [1, 1, 0, 0]])
    loss = khot.khot_cross_entropy(x, y, reduction="none")
    assert loss.isnan().tolist() == [True, False]
