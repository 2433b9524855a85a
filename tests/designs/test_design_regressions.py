"""Defects of designs, each by its own name."""

import contextlib
import math

import numpy as np
import pytest
import torch
from design_cases import A6K3, EVERY, GIVEN, generator, scores
from torch import Tensor

import khot
from khot.designs import Brewer, ConditionalPoisson, Pivotal, PlackettLuce, RelaxedKHot, Systematic
from khot.testing import check_design


def test_sums_that_are_off_by_half_an_item_do_not_change_the_size():
    for p, k in ((torch.full((10_000,), 0.1, dtype=torch.bfloat16), 1000), (torch.full((10**6,), 0.1) + 8e-7, 10**5)):
        for design in (Pivotal, GIVEN, Systematic):
            assert design(p, k).sample(generator=generator()).double().sum() == k
    p = torch.full((1000,), 0.1, dtype=torch.bfloat16)
    assert abs(GIVEN(p, 100).variance_of_sum(torch.ones(1000))) < 1e-3


@EVERY
def test_one_item_too_few_is_not_within_the_tolerance(design):
    p = torch.zeros(200_000)
    p[:99_999] = 1
    with pytest.raises(ValueError, match="`probs` must exceed 0 for at least k items; got a row with 99999"):
        design(p, 100_000)


@EVERY
def test_gradients_of_variances_are_right(design):
    if design is Pivotal:
        return
    theta = torch.tensor([0.7, -0.3, 0.2, 1.1], dtype=torch.float64, requires_grad=True)
    weights = torch.linspace(-1, 1, 4, dtype=torch.float64)

    def variance(t: Tensor) -> Tensor:
        return design(logits=t, k=2).variance_of_sum(weights)

    assert torch.autograd.gradcheck(variance, (theta,))
    if design in (Systematic, ConditionalPoisson):
        assert torch.autograd.gradcheck(lambda t: design(logits=t, k=2).joint_probs(), (theta,))


@EVERY
def test_gradients_are_finite_where_items_are_certain(design):
    if design is Pivotal:
        return
    theta = torch.tensor([3.0, 0.5, 0.5, 40.0, -60.0], requires_grad=True)
    x = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])
    d = design(logits=theta, k=3)
    if d.log_prob(x) > -torch.inf:
        assert torch.autograd.grad(d.log_prob(x), theta)[0].isfinite().all()
    assert torch.autograd.grad(d.entropy(), theta)[0].isfinite().all()
    probs = torch.tensor([0.0, 1.0, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    d = design(probs, 2)
    for value in (d.log_prob(torch.tensor([0.0, 1.0, 1.0, 0.0])), d.entropy(), d.joint_probs().sum()):
        if value.requires_grad:
            assert torch.autograd.grad(value, probs, retain_graph=True)[0].isfinite().all()


def test_second_derivatives_of_conditional_poisson_from_probabilities():
    theta = scores(5).requires_grad_()
    x = torch.tensor([1.0, 0, 1, 0, 1], dtype=torch.float64)

    def log_prob(t: Tensor) -> Tensor:
        return ConditionalPoisson(khot.sigmoid_topk(t, 3), 3, validate_args=False).log_prob(x)

    assert torch.autograd.gradgradcheck(log_prob, (theta,))
    (expected,) = torch.autograd.grad(log_prob(theta), theta)
    torch.testing.assert_close(torch.func.grad(log_prob)(theta.detach()), expected)


def test_the_check_takes_a_fixed_order_and_half_precision():
    check_design(Pivotal(A6K3).fix_order(generator(3)), draws=20_000)
    check_design(Pivotal(torch.tensor([0.25, 0.5, 0.5, 0.75], dtype=torch.float16)), draws=20_000)


@EVERY
def test_nothing_left_to_chance(design):
    for k, x in ((0, torch.zeros(4)), (4, torch.ones(4))):
        d = design(logits=torch.zeros(4), k=k)
        assert torch.equal(d.sample(), x)
        if design is not Pivotal:
            assert d.enumerate_support().shape == (1, 4)
            assert abs(d.log_prob(x)) < 1e-6
            assert abs(d.entropy()) < 1e-6
            torch.testing.assert_close(d.joint_probs(), x[:, None] * x)
    assert Pivotal(torch.tensor([0.2, 0.3]), k=0.5).enumerate_support().shape == (3, 2)


def test_brewer_counts_only_what_is_left_to_chance():
    p = torch.tensor([1.0] * 12 + [0.5, 0.5])
    assert Brewer(p).log_prob(torch.tensor([1.0] * 13 + [0.0])) == pytest.approx(math.log(0.5))


def test_conditional_poisson_after_inference_mode():
    p = A6K3.clone().requires_grad_()
    design = ConditionalPoisson(p)
    with torch.inference_mode():
        x = design.sample(generator=generator())
    assert torch.autograd.grad(design.log_prob(x.clone()), p)[0].abs().sum() > 0


@pytest.mark.parametrize("offset", [0.0, 1e8, 1e15])
def test_probabilities_do_not_see_a_common_offset(offset):
    design = ConditionalPoisson(logits=torch.tensor([1.0, 3.0, 0.0, 5.0], dtype=torch.float64) * 0.5 + offset, k=2)
    assert abs(design.log_prob(design.enumerate_support()).exp().sum() - 1) < 1e-12
    wide = ConditionalPoisson(logits=torch.tensor([1e30, 0.0, -1e30, 5.0], dtype=torch.float64), k=2)
    assert abs(wide.log_prob(wide.enumerate_support()).exp().sum() - 1) < 1e-12


@pytest.mark.parametrize("design", [PlackettLuce, ConditionalPoisson])
def test_masks_written_as_the_least_number(design):
    least = torch.finfo(torch.float32).min
    masked = design(logits=torch.tensor([1.0, 0.0, least, 5.0, 2.0, least]), k=2)
    without = design(logits=torch.tensor([1.0, 0.0, 5.0, 2.0]), k=2)
    got = masked.log_prob(torch.tensor([1.0, 0, 0, 1, 0, 0]))
    torch.testing.assert_close(got, without.log_prob(torch.tensor([1.0, 0, 1, 0])))
    huge = design(logits=torch.tensor([1.0, 0.0, -1e308, 5.0, 2.0], dtype=torch.float64), k=2)
    torch.testing.assert_close(huge.log_prob(torch.tensor([1.0, 0, 0, 1, 0])).float(), got)


def test_items_that_are_certain_have_no_gradient():
    inf = torch.inf
    theta = torch.tensor([-inf, 3.0, 0.5, 0.5, inf], dtype=torch.float64, requires_grad=True)
    design = ConditionalPoisson(logits=theta, k=3)
    (gradient,) = torch.autograd.grad(design.log_prob(torch.tensor([0.0, 1, 0, 1, 1], dtype=torch.float64)), theta)
    assert gradient[0] == gradient[4] == 0


def test_relaxed_hard_samples_of_bad_or_half_precision_rows():
    with pytest.raises(ValueError, match="cannot be drawn from"):
        khot.sample_relaxed_khot(torch.zeros(4), torch.tensor(1.5), hard=True)
    x = khot.sample_relaxed_khot(torch.zeros(500, 4096, dtype=torch.bfloat16), 256, hard=True, generator=generator())
    first = x[:, :2048].double().sum() / (500 * 256)  # ties in bfloat16 noise went to the lowest index
    assert abs(first - 0.5) < 5 * 0.5 / (500 * 256) ** 0.5
    with pytest.raises(ValueError, match="`temperature` must be > 0; got -1"):
        RelaxedKHot(torch.tensor(-1.0), logits=torch.zeros(4), k=2)
    certain = RelaxedKHot(0.5, logits=torch.tensor([torch.inf, 0.0, 1.0, 2.0]), k=2)
    y = certain.sample((5,), generator=generator())
    expected = RelaxedKHot(0.5, logits=torch.tensor([0.0, 1.0, 2.0]), k=1).log_prob(y[:, 1:])
    torch.testing.assert_close(certain.log_prob(y), expected)


@EVERY
def test_weights_of_any_dtype_and_batch(design):
    if design is Pivotal:
        return
    d = design(logits=scores(5), k=2)
    weights = torch.arange(15).view(3, 5)
    got = d.variance_of_sum(weights)
    assert got.shape == (3,)
    torch.testing.assert_close(got[1], d.variance_of_sum(weights[1].double()))


def test_joint_probabilities_must_be_of_pairs():
    with pytest.raises(ValueError, match=r"`joint_probs` must have the shape \(…, 6, 6\); got \(6,\)"):
        khot.horvitz_thompson_variance(A6K3, A6K3, A6K3)


@EVERY
def test_indices_of_an_empty_sample_had_no_columns(design):
    d = design(logits=scores(3, 6), k=2)
    assert d.sample_indices((0,)).shape == (0, 3, 2)
    assert d.sample_indices((4, 0)).shape == (4, 0, 3, 2)
    assert d.sample_indices((0,)).dtype == d.sample_indices((1,)).dtype
    assert design(logits=torch.zeros(0, 6), k=2).sample_indices((3,)).shape == (3, 0, 2)
    assert design(logits=scores(2, 6), k=torch.tensor([1, 4])).sample_indices((0,)).shape == (0, 2, 4)
    assert design(logits=torch.zeros(0, 6), k=torch.zeros(0)).sample_indices().shape == (0, 0)


@EVERY
@pytest.mark.parametrize("probs", [[0.0] * 4, [1.0] * 4, [0.0], [1.0], [1.0, 1.0, 0.0, 0.0]], ids=str)
def test_probabilities_with_nothing_to_draw_were_an_error(design, probs):
    """`ConditionalPoisson`: "cannot reshape tensor of 0 elements"; `Pareto`, of no rows, divided by zero."""
    x = torch.tensor(probs, dtype=torch.float64)
    for d in (design(x), design(x.expand(3, -1)), design(x.expand(0, -1))):
        rows = x.expand(*d.batch_shape, -1)
        assert torch.equal(d.sample((2,)), rows.expand(2, *rows.shape))
        assert torch.equal(d.mean, rows)
        # ConditionalPoisson knows all three; of the others, each is asked for each.
        unknown = () if design is ConditionalPoisson else (NotImplementedError,)
        with contextlib.suppress(*unknown):
            assert torch.equal(d.joint_probs(), rows.unsqueeze(-1) * rows.unsqueeze(-2))
        with contextlib.suppress(*unknown):
            assert d.log_prob(rows).abs().sum() < 1e-9
        with contextlib.suppress(*unknown):
            assert d.entropy().abs().sum() < 1e-9


@EVERY
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.float64])
def test_numpy_numbers_as_sizes(design, kind):
    d, expected = (design(logits=scores(2, 5), k=k) for k in (kind(2), 2))
    assert torch.equal(d.sample((3,), generator=generator()), expected.sample((3,), generator=generator()))
    assert torch.equal(d.mean, expected.mean)
    assert d.enumerate_support().shape == (10, 2, 5)
    assert bool(d.support.check(d.sample()).all())
    assert repr(d) == repr(expected)
    assert (design(khot.sigmoid_topk(scores(5), 2), kind(2)).expand((3,)).sample((np.int64(2),)).sum(-1) == 2).all()
    assert (khot.sample_khot(scores(5), kind(2), design=design).sum(-1) == 2).all()
    with pytest.raises(TypeError, match=r"`k` must be a number or a torch\.Tensor; got bool"):
        design(logits=scores(5), k=np.bool_(True))


def test_relaxed_samples_take_numpy_numbers():
    k = np.int64(2)
    for y in (khot.sample_relaxed_khot(scores(5), k), RelaxedKHot(0.5, logits=scores(5), k=k).sample()):
        assert abs(y.sum() - 2) < 1e-12
