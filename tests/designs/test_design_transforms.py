"""Samples under torch.compile(fullgraph=True) and torch.vmap."""

import functools

import pytest
import torch
from design_cases import ALL, EVERY, GIVEN, scores

import khot
from khot import ops
from khot.designs import ConditionalPoisson, Pivotal, PlackettLuce, RelaxedKHot
from khot.estimators import relaxed, straight_through_sample

pytestmark = pytest.mark.slow

RELAXED = functools.partial(khot.sample_relaxed_khot, hard=True)
SAMPLERS = {name: functools.partial(khot.sample_khot, design=design) for name, design in ALL.items()}
SAMPLERS |= {"shared order": functools.partial(khot.sample_khot, design=functools.partial(Pivotal, order="shared"))}
SAMPLERS |= {"relaxed": khot.sample_relaxed_khot, "relaxed, hard": RELAXED}
EVERY_SAMPLER = pytest.mark.parametrize("sample", SAMPLERS.values(), ids=SAMPLERS.keys())


def compiled(fn, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend)


@pytest.mark.compile
@EVERY_SAMPLER
def test_samplers_were_not_compiled_as_one_graph(sample):
    """A value was read on the host. With torch's own generator the compiled draw has the bits of the eager one."""
    x, k = scores(5, 9), torch.tensor([1, 2, 3, 4, 0])
    for size in (3, k):
        fn = compiled(lambda t, size=size: sample(t, size))
        torch.manual_seed(1)
        y = fn(x)
        torch.manual_seed(1)
        torch.testing.assert_close(y, sample(x, size))
        torch.testing.assert_close(y.sum(-1), torch.as_tensor(size).double().expand(5))


@pytest.mark.compile
@EVERY_SAMPLER
def test_rows_that_cannot_be_drawn_from_are_nan_in_a_compiled_call(sample):
    x, k = scores(4, 6), torch.tensor([2, 3, 7, 6])
    x[1, 0] = torch.nan
    y = compiled(sample)(x, k)
    assert y[1].isnan().all()
    assert y[2].isnan().all()
    torch.testing.assert_close(y[[0, 3]].sum(-1), torch.tensor([2.0, 6.0], dtype=torch.float64))


@pytest.mark.compile
@pytest.mark.slow
def test_inductor_draws_new_samples_with_the_right_gradient():
    x = scores(40, 12).float().requires_grad_()
    weights = scores(12, seed=1).float()

    def pair(t):
        return khot.sample_khot(t, 3), khot.sample_khot(t, 3)

    first, second = compiled(pair, "inductor")(x)
    assert (first.sum(-1) == 3).all()
    assert (first != second).any()
    (got,) = torch.autograd.grad((first * weights).sum(), x)
    (expected,) = torch.autograd.grad((khot.sigmoid_topk(x, 3) * weights).sum(), x)
    torch.testing.assert_close(got, expected)


@pytest.mark.compile
def test_a_gate_in_a_compiled_call():
    """Probabilities of a learned vector, a tensor of a size, and one sample for each row."""
    theta = scores(9).requires_grad_()

    def mask(x):
        probs = khot.sigmoid_topk(theta, torch.tensor(3), temperature=torch.tensor(0.5))
        return straight_through_sample(Pivotal(probs, torch.tensor(3), validate_args=False), x.shape[:-1])

    y = compiled(mask)(torch.zeros(20, 9))
    assert (y.sum(-1) == 3).all()
    assert len(y.unique(dim=0)) > 1
    assert torch.autograd.grad(y[:, 0].sum(), theta)[0].abs().sum() > 0


@pytest.mark.compile
def test_sums_that_are_off_are_balanced_in_a_compiled_call():
    p = torch.full((1000,), 0.1, dtype=torch.bfloat16)  # sums to 100.1
    y = compiled(lambda p: Pivotal(p, 100, validate_args=False).sample())(p)
    assert y.double().sum() == 100


@EVERY_SAMPLER
def test_vmap_of_samplers_was_refused(sample):
    """Each entry has its own draw, or all have the same one, or torch's own error is raised."""
    x = scores(9).expand(6, 9)
    different, same = (torch.vmap(lambda t: sample(t, 3), randomness=r)(x) for r in ("different", "same"))
    for y in (different, same):
        torch.testing.assert_close(y.sum(-1), torch.full((6,), 3.0, dtype=torch.float64))
    assert len(different.unique(dim=0)) > 1
    assert len(same.unique(dim=0)) == 1
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda t: sample(t, 3))(x)


@EVERY
def test_entries_of_vmap_have_the_law(design):
    """Five z-scores of 1000 draws: one is beyond 4.5 with probability 4e-5."""
    d = design(logits=scores(5), k=2)
    x = torch.vmap(lambda t: design(logits=t, k=2).sample(), randomness="different")(scores(5).expand(1000, 5))
    z = (x.mean(0) - d.mean) / (d.variance / 1000).sqrt()
    assert z.abs().max() < 4.5


def test_vmap_over_scores_masks_sizes_and_twice():
    x, mask = scores(4, 6), torch.ones(4, 6, dtype=torch.bool).triu()
    y = torch.vmap(lambda t, m, k: khot.sample_khot(t, k, mask=m), randomness="different")(x, mask, torch.arange(4))
    assert torch.equal(y.sum(-1), torch.arange(4).double())
    assert (y[~mask] == 0).all()
    twice = torch.vmap(torch.vmap(lambda t: khot.sample_khot(t, 2), randomness="same"), randomness="different")
    z = twice(x[0].expand(5, 3, 6))
    assert (z == z[:, :1]).all()
    assert len(z[:, 0].unique(dim=0)) > 1


def test_other_samples_in_vmap():
    x = scores(6).expand(5, 6)
    for draw in (
        lambda t: straight_through_sample(ConditionalPoisson(logits=t, k=2), (3,)),
        lambda t: relaxed(PlackettLuce(logits=t, k=2), (3,), hard=True),
        lambda t: RelaxedKHot(1e-3, logits=t, k=2).rsample((3,)).round(),
        lambda t: Pivotal(t.sigmoid() * 0 + 1 / 3, 2, validate_args=False).sample((3,)),
    ):
        y = torch.vmap(draw, randomness="different")(x)
        assert (y.sum(-1) == 2).all()
        assert len(y.unique(dim=0)) > 1


def test_gradients_through_vmapped_samples():
    x, weights = scores(5, 6), scores(6, seed=1)

    def loss(t):
        return (khot.sample_khot(t, 2) * weights).sum()

    got = torch.vmap(torch.func.grad(loss), randomness="different")(x)
    expected = torch.vmap(torch.func.grad(lambda t: (khot.sigmoid_topk(t, 2) * weights).sum()))(x)
    torch.testing.assert_close(got, expected)


def test_a_row_that_cannot_be_drawn_from_is_nan_in_vmap_and_an_error_outside():
    x = scores(3, 4)
    x[1, 2] = torch.nan
    y = torch.vmap(lambda t: khot.sample_khot(t, 2), randomness="different")(x)
    assert y[1].isnan().all()
    assert (y[[0, 2]].sum(-1) == 2).all()
    with pytest.raises(ValueError, match="cannot be drawn from"):
        khot.sample_khot(x, 2)


def test_the_ops_of_samplers_are_sound():
    p = khot.sigmoid_topk(scores(3, 7), 3)
    k, seed, whole = torch.full((3,), 3.0, dtype=torch.float64), torch.tensor(5), torch.ones(3, dtype=torch.bool)
    order, turns = ops.order(torch.arange(3), 7), torch.rand(3, 4, dtype=torch.float64)
    for op, arguments in {
        ops.order: (torch.arange(3), 7),
        ops.uniform: (seed, 2, 9),
        ops.pivotal: (p, whole, seed, order, False, 2, False),
        ops.systematic: (p.float(), k, seed, 2, True),
        ops.rejective: (p.logit(), k, seed, 2),
        ops.sampford: (p, k, seed, 2),
        ops.brewer: (p, k, seed, 2),
        ops.natural_parameters: (p, k),
        torch.ops.khot.along_tree.default: (p, k, seed, 8, 5, 2),
        torch.ops.khot.pareto_constants.default: (p.logit(), k),
        torch.ops.khot.count_products.default: (p, torch.polar(turns * 0 + 1, turns) - 1, turns),
        torch.ops.khot.count_rests.default: (p, torch.polar(turns * 0 + 1, turns) - 1, torch.polar(turns, turns)),
    }.items():
        result = torch.library.opcheck(op, arguments)
        assert set(result.values()) == {"SUCCESS"}, op


def test_antithetic_pairs_and_fixed_orders_in_vmap():
    x = scores(4, 6)
    y = torch.vmap(lambda t: GIVEN(logits=t, k=2).sample((2,), antithetic=True), randomness="different")(x)
    assert (y.sum(-1) == 2).all()
    fixed = torch.vmap(lambda t: Pivotal(logits=t, k=2).fix_order().sample((4,)), randomness="different")(x)
    assert (fixed.sum(-1) == 2).all()
