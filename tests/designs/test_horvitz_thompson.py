"""Totals from samples."""

import pytest
import torch
from design_cases import A6K3, GIVEN, generator, scores

import khot
from khot.designs import Brewer, ConditionalPoisson, Sampford, Systematic


def test_horvitz_thompson_has_no_bias_and_the_variance_it_says():
    y = scores(6).square() + 1
    for design in (GIVEN(A6K3), Systematic(A6K3), ConditionalPoisson(A6K3), Sampford(A6K3), Brewer(A6K3)):
        x = design.enumerate_support()
        p = design.log_prob(x).exp()
        estimate = khot.horvitz_thompson(y, x, design.mean)
        torch.testing.assert_close((p * estimate).sum(), y.sum())
        variance = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs())
        torch.testing.assert_close(variance, (p * (estimate - y.sum()).square()).sum())
        torch.testing.assert_close(variance, design.variance_of_sum(y / design.mean))
    design = Sampford(A6K3)
    x = design.enumerate_support()
    each = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs(), sample=x)
    variance = khot.horvitz_thompson_variance(y, design.mean, design.joint_probs())
    torch.testing.assert_close((design.log_prob(x).exp() * each).sum(), variance)


def test_horvitz_thompson_does_not_read_what_was_not_drawn():
    x, p = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 0.0, 0.5])
    assert khot.horvitz_thompson(torch.tensor([1.0, torch.nan, 2.0]), x, p) == 6.0
    with pytest.raises(ValueError, match="must broadcast"):
        khot.horvitz_thompson(torch.ones(2), x, p)
    with pytest.raises(TypeError, match="`sample` must be a real"):
        khot.horvitz_thompson(torch.ones(3), [1, 0, 1], p)  # type: ignore[arg-type]


@pytest.mark.parametrize("design", [GIVEN, Systematic])
def test_the_variance_of_totals_was_too_small_where_the_size_is_random(design):
    """16.2 instead of 147.1 for `Systematic`: the formula was that of fixed sizes."""
    p = torch.tensor([0.2, 0.35, 0.45, 0.1, 0.6, 0.55], dtype=torch.float64)
    d, y = design(p, k=2.25), torch.arange(1.0, 7.0, dtype=torch.float64)
    x = d.enumerate_support()
    expected = (d.log_prob(x).exp() * (khot.horvitz_thompson(y, x, p) - y.sum()).square()).sum()
    torch.testing.assert_close(khot.horvitz_thompson_variance(y, p, d.joint_probs()), expected)
    torch.testing.assert_close(
        khot.horvitz_thompson_variance(y.float(), p.float(), d.joint_probs().float()), expected.float()
    )


def test_the_estimated_variance_has_no_bias_where_the_size_is_random():
    """Independent draws, whose joint probabilities are products; samples of 0 to 6 items."""
    p, y = A6K3, scores(6) + 3
    x = (torch.arange(64)[:, None] >> torch.arange(6) & 1).double()
    chance = torch.where(x == 1, p, 1 - p).prod(-1)
    joint = torch.where(torch.eye(6, dtype=torch.bool), p, p[:, None] * p)
    exact = khot.horvitz_thompson_variance(y, p, joint)
    torch.testing.assert_close(exact, (y.square() * (1 - p) / p).sum())
    unknown = torch.where(x == 1, y, torch.nan)
    each = khot.horvitz_thompson_variance(unknown, p, joint, sample=x)
    torch.testing.assert_close((chance * each).sum(), exact)


def test_the_variance_from_samples_took_memory_for_all_pairs():
    """40 samples of 50 of 1000 items made 40 matrices of 1000 × 1000 in every step."""
    design = Sampford(logits=scores(300), k=12)
    y, joint, x = scores(300), design.joint_probs(), design.sample((5,), generator=generator())
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
            result = fn(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.untyped_storage().nbytes())
            return result

    with Sizes():
        got = khot.horvitz_thompson_variance(y, design.mean, joint, sample=x)
    assert max(sizes) == 8 * 300 * 300  # the joint probabilities themselves
    inside = x[:, :, None] * x[:, None, :]
    ratio = y / design.mean
    less = inside * (design.mean[:, None] * design.mean / joint - 1)
    torch.testing.assert_close(got, (less * (ratio[:, None] - ratio).square()).sum((-1, -2)) / 2)


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.5, torch.nan])
def test_totals_of_probabilities_that_are_none(wrong):
    """π = 0 of an item that was drawn gave inf, −0.1 and 1.5 a number."""
    y, x, p = torch.ones(4), torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([wrong, 0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="`probs` must be inclusion probabilities, 0 < π ≤ 1 for every item"):
        khot.horvitz_thompson(y, x, p)
    if wrong == 0:
        assert khot.horvitz_thompson(y, 1 - x, p) == 4
        return
    with pytest.raises(ValueError, match="`probs` must be inclusion probabilities, 0 ≤ π ≤ 1"):
        khot.horvitz_thompson_variance(y, p, torch.full((4, 4), 0.25))


def test_totals_of_other_items():
    """One number, or one probability, was taken as that of all items."""
    y, p = torch.ones(4), torch.full((4,), 0.5)
    for given in ((y[:1], y, p), (y, y, p[:1]), (y, y, p[0]), (y, y[:1], p)):
        with pytest.raises(ValueError, match="with the same n items"):
            khot.horvitz_thompson(*given)
    with pytest.raises(ValueError, match="with the same n items"):
        khot.horvitz_thompson_variance(y, p[:1], torch.full((4, 4), 0.25))
    assert khot.horvitz_thompson(y, torch.ones(3, 4), p).tolist() == [8.0] * 3
    rounded = torch.full((4,), 1 + torch.finfo(torch.float32).eps)
    assert khot.horvitz_thompson(y, y, rounded) == pytest.approx(4)
