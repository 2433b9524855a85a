import pytest
import torch

import khot
from khot.metrics import chamfer_cosine

DOUBLE = torch.float64


def test_chamfer_cosine_by_hand():
    selected, target = torch.randn(3, 6, 4, dtype=DOUBLE), torch.randn(3, 2, 4, dtype=DOUBLE)
    expected = [
        sum(max(torch.cosine_similarity(s, t, dim=0) for s in selected[b]) for t in target[b]) / 2 for b in range(3)
    ]
    torch.testing.assert_close(chamfer_cosine(selected, target), torch.stack(expected))


def test_chamfer_cosine_is_one_for_the_same_set_and_ignores_scale_and_order():
    target = torch.randn(5, 8, dtype=DOUBLE)
    assert float(chamfer_cosine(3 * target.flip(0), target)) == pytest.approx(1)
    assert float(chamfer_cosine(torch.zeros(2, 8, dtype=DOUBLE), target)) == 0
    # Not symmetric: more than was wanted does no harm.
    assert float(chamfer_cosine(target, target[:1])) == pytest.approx(1)
    assert float(chamfer_cosine(target[:1], target)) < 1


@pytest.mark.parametrize(
    ("selected", "target", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), "same length; got 3 and 4"),
        (torch.ones(3), torch.ones(2, 3), "`selected` must have the shape"),
        (torch.ones(0, 3), torch.ones(2, 3), "`selected` must have the shape"),
    ],
)
def test_bad_vectors(selected, target, message):
    with pytest.raises(ValueError, match=message):
        chamfer_cosine(selected, target)


def test_losses_tend_to_the_counts():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 30, dtype=DOUBLE, generator=generator)
    target = (torch.rand(7, 30, generator=generator) < 0.3).long()
    chosen = khot.hard_topk(x, 5)
    precision = (chosen * target).sum(-1) / 5
    recall = (chosen * target).sum(-1) / target.sum(-1)
    cold = {"temperature": 1e-6, "reduction": "none"}
    torch.testing.assert_close(khot.precision_at_k_loss(x, target, 5, **cold), 1 - precision)
    torch.testing.assert_close(khot.recall_at_k_loss(x, target, 5, **cold), 1 - recall)
    none = khot.recall_at_k_loss(x, target, 5, temperature=0.5, reduction="none")
    assert none.shape == (7,)
    torch.testing.assert_close(khot.recall_at_k_loss(x, target, 5, temperature=0.5), none.mean())
    torch.testing.assert_close(khot.recall_at_k_loss(x, target, 5, temperature=0.5, reduction="sum"), none.sum())


@pytest.mark.parametrize("loss", [khot.precision_at_k_loss, khot.recall_at_k_loss])
def test_losses_teach_every_score(loss):
    x = torch.randn(4, 9, dtype=DOUBLE, requires_grad=True)
    target = torch.zeros(4, 9)
    target[:, :3] = 1
    assert torch.autograd.gradcheck(lambda t: loss(t, target, 3), (x,))
    (gradient,) = torch.autograd.grad(loss(x, target, 3), x)
    assert bool((gradient[:, :3] < 0).all())
    assert bool((gradient[:, 3:] > 0).all())
    moved = loss(x.T, target.T, 3, dim=0)
    torch.testing.assert_close(moved, loss(x, target, 3))


def test_nothing_relevant_is_no_loss_of_recall():
    x = torch.randn(2, 5, requires_grad=True)
    loss = khot.recall_at_k_loss(x, torch.zeros(2, 5), 2)
    loss.backward()
    assert loss.item() == 0
    assert bool((x.grad == 0).all())


def test_masked_targets_do_not_count():
    x, target = torch.randn(6), torch.tensor([1, 1, 0, 0, 1, 0])
    mask = torch.tensor([True, False, True, True, True, True])
    got = khot.recall_at_k_loss(x, target, 2, mask=mask)
    torch.testing.assert_close(got, khot.recall_at_k_loss(x[mask], target[mask], 2))


def test_bad_target():
    with pytest.raises(ValueError, match="`target` must have the shape"):
        khot.precision_at_k_loss(torch.randn(3, 4), torch.ones(4), 2)


def test_chamfer_cosine_at_any_scale():
    pair = torch.eye(2), torch.ones(2, 2)
    for scale in (1e-30, 1e-15, 1e30):
        assert float(chamfer_cosine(*(scale * t for t in pair))) == pytest.approx(0.5**0.5)
    assert float(chamfer_cosine(torch.zeros(1, 2).half(), torch.ones(1, 2).half())) == 0
    with pytest.raises(TypeError, match="one dtype"):
        chamfer_cosine(torch.ones(1, 2), torch.ones(1, 2).double())


def test_no_precision_of_nothing():
    with pytest.raises(ValueError, match="`k` must be > 0"):
        khot.precision_at_k_loss(torch.randn(4), torch.ones(4), 0)
