"""Pivotal samples along an order of your own, and within strata."""

import functools

import pytest
import torch
from design_cases import A6K3, generator, scores

import khot
from khot.designs import KHotStraightThrough, Pivotal
from khot.testing import check_design

STRATA = torch.tensor([7, -1, -1, 7, 7, 2, 2, -1, 7])
PROBS = khot.sigmoid_topk(scores(9), 4)
ORDER = torch.tensor([3, 0, 8, 5, 1, 7, 2, 6, 4])


def within(x, probs, strata):
    """Whether each stratum has its expected number of items, rounded down or up."""
    checks = []
    for label in strata.unique():
        expected, got = (t[..., strata == label].sum(-1) for t in (probs, x))
        checks.append(((got >= (expected - 1e-9).floor()) & (got <= (expected + 1e-9).ceil())).all())
    return bool(torch.stack(checks).all())


@pytest.mark.parametrize("order", ["random", "shared", "given", ORDER], ids=["random", "shared", "given", "own"])
@pytest.mark.parametrize("antithetic", [False, True])
def test_strata_have_their_expected_counts(order, antithetic):
    p = torch.stack((PROBS, khot.sigmoid_topk(scores(9, seed=1), 2.5)))
    design = Pivotal(p, torch.tensor([4.0, 2.5]), order=order, strata=STRATA)
    x = design.sample((3000,), generator=generator(), antithetic=antithetic)
    assert within(x, p, STRATA)
    assert (x.sum(-1)[:, 0] == 4).all()
    assert set(x.sum(-1)[:, 1].tolist()) == {2.0, 3.0}
    if not isinstance(order, str) or order != "shared":
        assert ((x.mean(0) - p).abs() < 5 * (p * (1 - p) / 3000).sqrt()).all()
    control = Pivotal(p, torch.tensor([4.0, 2.5])).sample((3000,), generator=generator())
    assert not within(control, p, STRATA), "without strata the counts vary more"


def make(probs, **options):
    n = probs.shape[-1]
    return Pivotal(probs, strata=torch.arange(n) * 3 // n, **options)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "given"])
def test_a_design_with_strata_is_a_right_design(order):
    check_design(functools.partial(make, order=order), draws=60_000)


def test_an_order_of_your_own_is_that_of_the_items_in_it():
    design, sorted_ = Pivotal(PROBS, order=ORDER), Pivotal(PROBS[ORDER], order="given")
    x = design.enumerate_support()
    torch.testing.assert_close(design.log_prob(x), sorted_.log_prob(x[:, ORDER]))
    torch.testing.assert_close(design.joint_probs()[ORDER][:, ORDER], sorted_.joint_probs())
    assert torch.equal(
        design.sample((50,), generator=generator())[:, ORDER], sorted_.sample((50,), generator=generator())
    )
    check_design(lambda p: Pivotal(p, order=torch.arange(p.shape[-1]).flip(0)), draws=100_000)


def test_probabilities_with_strata_by_enumeration():
    for order in ("given", ORDER):
        design = Pivotal(PROBS, order=order, strata=STRATA)
        x = design.enumerate_support()
        p = design.log_prob(x).exp()
        torch.testing.assert_close(p.sum(), torch.ones((), dtype=torch.float64))
        torch.testing.assert_close(p @ x, PROBS)
        torch.testing.assert_close(torch.einsum("s,si,sj->ij", p, x, x), design.joint_probs())
        c = scores(9, seed=2)
        torch.testing.assert_close(design.variance_of_sum(c), p @ (x @ c).square() - (p @ (x @ c)).square())
        assert within(x[p > 0], PROBS, STRATA)
    batch = Pivotal(PROBS.expand(3, 9), strata=STRATA).fix_order(generator())
    assert batch.joint_probs().shape == (3, 9, 9)
    assert not torch.allclose(batch.joint_probs()[0], batch.joint_probs()[1])
    assert torch.autograd.gradcheck(
        lambda t: Pivotal(logits=t, k=2, order="given", strata=STRATA[:5]).log_prob(torch.tensor([1.0, 0, 1, 0, 0])),
        (scores(5).requires_grad_(),),
    )


def test_strata_with_whole_numbers_are_independent():
    """Six items at ½ in strata of 2 and 4: the counts are 1 and 2, and pairs across strata are products."""
    joint = Pivotal(torch.full((6,), 0.5), 3, order="given", strata=torch.tensor([0, 0, 1, 1, 1, 1])).joint_probs()
    assert torch.equal(joint[:2, 2:], torch.full((2, 4), 0.25))
    assert joint[0, 1] == 0


def test_strata_survive_expansion_and_subclasses():
    design = KHotStraightThrough(A6K3, strata=torch.tensor([0, 0, 0, 1, 1, 1])).expand((4,))
    assert within(design.rsample((100,), generator=generator()), A6K3, torch.tensor([0, 0, 0, 1, 1, 1]))
    y = khot.sample_khot(scores(2, 9), 4, design=functools.partial(Pivotal, strata=STRATA), generator=generator())
    assert (y.sum(-1) == 4).all()


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("one of 'random', 'shared', 'given'", {"order": "sorted"}),
        ("each of 0, …, 5 once", {"order": torch.tensor([0, 1, 2, 3, 4, 4])}),
        ("integers of shape .* got torch.complex64", {"order": torch.arange(6).cfloat()}),
        (r"integers of shape \(…, 6\)", {"order": torch.rand(6)}),
        (r"integers of shape \(…, 6\)", {"order": torch.arange(5)}),
        ("6 integers, one for each item", {"strata": torch.arange(5)}),
        ("6 integers, one for each item", {"strata": torch.rand(6)}),
    ],
)
def test_errors_of_orders_and_strata(match, options):
    with pytest.raises(ValueError, match=match):
        Pivotal(A6K3, **options)
