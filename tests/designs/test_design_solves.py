"""What a design solves for is solved once, kept as numbers, and never stale."""

import pytest
import torch
from design_cases import A6K3, EVERY, EVERY_EXACT, generator, scores

import khot
from khot import ops
from khot._math import natural, subsets
from khot.designs import ConditionalPoisson, Pareto, Pivotal, Sampford, _high_entropy, _parameters

X = torch.tensor([0.0, 0, 1, 0, 1, 1], dtype=torch.float64)


class Calls:
    """Count calls of functions that keep working."""

    def __init__(self, patch: pytest.MonkeyPatch, *places: tuple[object, str]) -> None:
        self.counts = dict.fromkeys((name for _, name in places), 0)
        for owner, name in places:
            patch.setattr(owner, name, self._counting(getattr(owner, name), name))

    def _counting(self, fn, name):
        def counting(*arguments, **options):
            self.counts[name] += 1
            return fn(*arguments, **options)

        return counting


def test_log_prob_of_conditional_poisson_once_solved_twice(monkeypatch):
    """It tilted θ and inverted the characteristic function for the value, and again for the gradient."""
    design = ConditionalPoisson(logits=scores(6).requires_grad_(), k=3)
    calls = Calls(monkeypatch, (natural, "tilt"), (subsets, "counts"))
    value = design.log_prob(X)
    assert calls.counts == {"tilt": 1, "counts": 1}
    value.backward()  # the marginals, which are the gradient
    assert calls.counts == {"tilt": 2, "counts": 2}
    design.entropy()  # the marginals, and the log-probability
    assert calls.counts == {"tilt": 4, "counts": 4}


def test_conditional_poisson_from_probabilities_once_solved_at_each_access(monkeypatch):
    design = ConditionalPoisson(A6K3.clone().requires_grad_())
    calls = Calls(monkeypatch, (ops, "natural_parameters"), (_high_entropy, "log_normaliser"), (natural, "tilt"))
    design.log_prob(X)
    solving = calls.counts["tilt"]
    assert calls.counts["natural_parameters"] == calls.counts["log_normaliser"] == 1
    design.log_prob(X).backward()
    assert calls.counts["tilt"] == solving + 3  # one for the value, one each for the gradients in θ and in π
    for use in (design.sample, design.entropy, design.joint_probs, lambda: design.logits, lambda: design.mode):
        use()
    assert calls.counts["natural_parameters"] == 1
    wide = design.expand((2, 6))
    wide.sample()
    design.expand((3,)).log_prob(X)
    assert calls.counts["natural_parameters"] == 1


def test_probabilities_are_balanced_once(monkeypatch):
    for design in (Sampford(A6K3), Pareto(A6K3), Pivotal(A6K3, order="given")):
        calls = Calls(monkeypatch, (khot.designs._design, "sigmoid_topk"))
        for _ in range(2):
            design.log_prob(X)
            design.joint_probs()
        assert calls.counts == {"sigmoid_topk": 1}
        monkeypatch.undo()


def test_inclusion_probabilities_of_logits_are_solved_for_once_if_nothing_is_differentiated(monkeypatch):
    design = Pivotal(logits=scores(6), k=3)
    calls = Calls(monkeypatch, (_parameters, "sigmoid_topk"))
    for _ in range(3):
        design.sample()
        assert not design.mean.requires_grad
    assert calls.counts == {"sigmoid_topk": 1}


@EVERY
def test_a_step_of_a_fused_optimizer_is_seen(design):
    """It changes the parameter in place without counting, so that no version of a tensor tells."""
    theta = torch.nn.Parameter(scores(6))
    d = design(logits=theta, k=3)
    with torch.no_grad():
        before = d.mean.clone()
        d.sample()
    theta.grad = scores(6, seed=1)
    torch.optim.AdamW([theta], 1.0, fused=True).step()
    other = design(logits=theta.detach().clone(), k=3)
    with torch.no_grad():
        assert torch.equal(d.mean, other.mean)
        assert torch.equal(d.sample((9,), generator=generator()), other.sample((9,), generator=generator()))
        assert not torch.equal(d.mean, before)


@EVERY
@pytest.mark.parametrize("name", ["logits", "probs"])
def test_a_change_of_the_parameter_in_place_is_seen(design, name):
    values = (scores(6), scores(6, seed=1)) if name == "logits" else (A6K3, A6K3.flip(-1))
    parameter = values[0].clone()
    d, other = design(**{name: parameter}, k=3), design(**{name: values[1]}, k=3)
    for change in (lambda: None, lambda: parameter.copy_(values[1])):
        change()
        d.mean, d.sample(generator=generator())
    assert torch.equal(d.mean, other.mean)
    assert torch.equal(d.sample((9,), generator=generator()), other.sample((9,), generator=generator()))
    wide = d.expand((2,))
    parameter.copy_(values[0])
    # two rows may be summed in another order than one: how depends on the processor
    torch.testing.assert_close(wide.mean[0], design(**{name: values[0]}, k=3).mean, rtol=0, atol=1e-12)
    assert not torch.allclose(wide.mean[0], other.mean, rtol=0, atol=1e-3)


@EVERY_EXACT
def test_what_is_kept_cannot_be_changed_from_outside(design):
    d = design(logits=scores(6), k=3)
    before = d.mean.clone()
    d.mean.zero_()
    assert torch.equal(d.mean, before)


@EVERY
def test_nothing_of_a_transform_is_kept(design):
    """A tensor that torch.func or forward mode wraps must not stay in a design that lives longer."""
    d, x = design(logits=scores(6), k=3), scores(6)

    def total(w):
        return (d.mean * w).sum() + (d._pi * w).sum()

    for transform in (torch.func.grad(total), torch.func.jacfwd(total)):
        torch.testing.assert_close(transform(x), d.mean + d._pi)
        assert not d._kept or "Tracking" not in repr(d._kept)
        d = design(logits=scores(6), k=3)


@EVERY_EXACT
def test_means_are_differentiable_in_every_mode(design):
    d, theta, weights = design(logits=scores(6), k=3), scores(6), scores(6, seed=1)

    def total(t):
        return (d.with_parameter(t).mean * weights).sum()

    (expected,) = torch.autograd.grad(total(leaf := theta.clone().requires_grad_()), leaf)
    torch.testing.assert_close(torch.func.grad(total)(theta), expected)
    torch.testing.assert_close(torch.func.jacfwd(total)(theta), expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(theta, torch.ones_like(theta))
        tangent = torch.autograd.forward_ad.unpack_dual(total(dual)).tangent
    torch.testing.assert_close(tangent, expected.sum())


def test_a_copy_with_a_parameter_of_its_own():
    design = Pivotal(A6K3, order="given").fix_order(generator())
    leaf = A6K3.clone().requires_grad_()
    copy = design.with_parameter(leaf)
    assert copy.parameter is leaf
    assert torch.equal(copy._permutation, design._permutation)
    assert torch.equal(copy.log_prob(copy.enumerate_support()), design.log_prob(design.enumerate_support()))
    with pytest.raises(ValueError, match=r"`value` must have the shape of `parameter`, \(6,\); got \(5,\)"):
        design.with_parameter(A6K3[:5])
