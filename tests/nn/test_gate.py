"""`KHotGate` and `Schedule`."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import khot
from khot import estimators
from khot.designs import ConditionalPoisson, Pivotal, Sampford, Systematic
from khot.nn import KHotGate, Schedule, geometric, linear


def seeded():
    return torch.Generator().manual_seed(0)


def test_a_sample_for_each_row_in_training_and_the_best_after_it():
    gate = KHotGate(6, 2)
    with torch.no_grad():
        gate.scores.copy_(torch.tensor([0.0, 3.0, 1.0, -1.0, 2.0, 0.0]))
    x = torch.randn(500, 4, 6)
    m = gate.mask(x, generator=seeded())
    assert m.shape == x.shape
    assert set(m.unique().tolist()) == {0.0, 1.0}
    assert (m.sum(-1) == 2).all()
    assert len({tuple(row) for row in m.flatten(0, 1).tolist()}) > 5
    torch.testing.assert_close(m.mean((0, 1)), khot.sigmoid_topk(gate.scores, 2), rtol=0, atol=0.05)
    torch.testing.assert_close(gate(x, generator=seeded()), x * m)
    gate.eval()
    assert gate.mask(x)[0, 0].tolist() == [0, 1, 0, 0, 1, 0]
    assert torch.equal(gate(x), x * gate.mask(x))


def test_the_gradient_is_that_of_the_probabilities():
    gate, x, g = KHotGate(5, 2, temperature=0.7), torch.randn(8, 5), torch.randn(8, 5)
    (got,) = torch.autograd.grad(gate.mask(x, generator=seeded()), gate.scores, g)
    soft = khot.sigmoid_topk(gate.scores, 2, temperature=0.7).expand(8, 5)
    torch.testing.assert_close(got, torch.autograd.grad(soft, gate.scores, g)[0])


def test_relaxed_without_a_design():
    gate, x = KHotGate(5, 2, design=None, relaxation=khot.euclidean_topk, temperature=0.5), torch.randn(3, 5)
    expected = khot.euclidean_topk(gate.scores, 2, temperature=0.5)
    torch.testing.assert_close(gate(x), x * expected)
    with pytest.raises(ValueError, match="has no samples"):
        gate.law(x)


def test_instance_wise_scores_come_from_a_network():
    gate = KHotGate(torch.nn.Linear(6, 6), 2)
    x = torch.randn(7, 6)
    m = gate.mask(x, generator=seeded())
    assert m.shape == (7, 6)
    assert (m.sum(-1) == 2).all()
    gate.eval()
    assert torch.equal(gate.mask(x), khot.hard_topk(gate.scores(x), 2))
    gate.train()
    gate(x).square().sum().backward()
    assert gate.scores.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("design", "estimator"),
    [
        (Systematic, estimators.straight_through_sample),
        (Sampford, estimators.straight_through_sample),
        (partial(Pivotal, order="given"), estimators.straight_through_sample),
        (ConditionalPoisson, estimators.simple),
        (ConditionalPoisson, partial(estimators.imle, step=1.0)),
        (Pivotal, partial(estimators.relaxed, temperature=0.5)),
        (Pivotal, partial(estimators.xie_ermon, temperature=0.5)),
        (Pivotal, estimators.stochastic_times_smooth),
    ],
)
def test_designs_and_estimators_are_interchangeable(design, estimator):
    gate, x = KHotGate(8, 3, design=design, estimator=estimator), torch.randn(16, 8)
    with torch.no_grad():
        gate.scores.copy_(torch.randn(8, generator=seeded()))
    loss = gate(x, generator=seeded()).square().sum()
    (gradient,) = torch.autograd.grad(loss, gate.scores)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_estimators_that_want_the_objective_get_the_law():
    gate, x = KHotGate(6, 2, design=ConditionalPoisson, estimator=estimators.rloo), torch.randn(4, 6)
    with pytest.raises(TypeError, match=r"gate\.law\(x\)"):
        gate(x)
    loss = gate.estimator(gate.law(x), lambda m: m[..., 0], num_samples=4, generator=seeded())
    assert torch.autograd.grad(loss, gate.scores)[0].abs().sum() > 0


def test_half_precision_keeps_the_count():
    """301 is not a bfloat16."""
    gate = KHotGate(1000, 301).bfloat16()
    assert (gate(torch.ones(3, 1000, dtype=torch.bfloat16)).count_nonzero(-1) == 301).all()


def test_a_relaxed_sample_of_a_full_budget_has_a_finite_gradient():
    gate = KHotGate(6, 6, estimator=partial(estimators.relaxed, temperature=0.5))
    (gradient,) = torch.autograd.grad(gate(torch.randn(4, 6), generator=seeded()).sum(), gate.scores)
    assert gradient.isfinite().all()


def test_a_budget_above_n_is_all():
    gate = KHotGate(4, 2)
    gate.budget.fill_(9)
    assert (gate(torch.ones(3, 4)) == 1).all()


def test_networks_must_give_a_score_for_each_feature():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="0 ≤ k ≤ 4"):
        KHotGate(nn.Linear(4, 4), 7)(x)
    for wrong in (nn.Linear(4, 5), nn.Unflatten(-1, (2, 2))):
        with pytest.raises(ValueError, match=r"`scores\(x\)` must have the shape"):
            KHotGate(wrong, 2)(x)
    with pytest.raises(TypeError, match=r"`x` must be a torch\.Tensor; got list"):
        KHotGate(4, 2)([[1.0] * 4])
    assert KHotGate(4, np.int64(2)).k == 2


def test_half_precision_and_other_dtypes():
    gate = KHotGate(6, 2)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        y = gate(torch.ones(5, 6, dtype=dtype), generator=seeded())
        assert y.dtype == dtype
        assert (y.sum(-1) == 2).all()
    half = KHotGate(6, 2).to(torch.bfloat16)
    assert (half(torch.ones(5, 6, dtype=torch.bfloat16)).sum(-1) == 2).all()


def test_the_state_has_scores_temperature_and_budget():
    gate = KHotGate(4, 1, temperature=0.5)
    assert set(gate.state_dict()) == {"scores", "temperature", "budget"}
    other = KHotGate(4, 1)
    other.load_state_dict(gate.state_dict())
    assert float(other.temperature) == 0.5
    assert "k=1, relaxation=sigmoid_topk, design=Pivotal" in repr(copy.deepcopy(gate))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((4, 5), ValueError, "0 ≤ k ≤ 4"),
        ((4, 1.5), TypeError, "`k` must be an int"),
        ((0, 0), ValueError, "`scores` must be"),
    ],
)
def test_bad_gates(arguments, error, says):
    with pytest.raises(error, match=says):
        KHotGate(*arguments)


def test_bad_input_to_a_gate():
    with pytest.raises(ValueError, match="4 features in its last dimension"):
        KHotGate(4, 2)(torch.ones(3, 5))


def test_a_schedule_moves_a_buffer_and_resumes():
    gate = KHotGate(100, 4)
    schedule = Schedule(gate, "budget", 100, 4, steps=10)
    assert float(gate.budget) == 100
    seen = []
    for _ in range(12):
        schedule.step()
        seen.append(float(gate.budget))
    assert seen[:10] == (100 * 0.04 ** (torch.arange(1, 11) / 10)).round().tolist()
    assert seen[9:] == [4.0] * 3
    again = KHotGate(100, 4)
    resumed = Schedule(again, "budget", 100, 4, steps=10)
    resumed.load_state_dict({"done": 5})
    assert float(again.budget) == pytest.approx(seen[4])
    assert schedule.state_dict() == {"done": 12}


def test_schedules_follow_a_module_that_moved():
    gate = KHotGate(4, 2)
    schedule = Schedule(gate, "temperature", 1.0, 0.1, steps=2, shape=linear)
    gate.double()
    schedule.step()
    assert gate.temperature.dtype == torch.float64
    assert float(gate.temperature) == pytest.approx(0.55)
    assert schedule.value == pytest.approx(0.55)


def test_shapes_of_schedules():
    assert linear(1.0, 3.0, 0.25) == 1.5
    assert geometric(1.0, 16.0, 0.25) == 2.0
    assert Schedule(KHotGate(4, 2), "temperature", 1.0, 0.1, steps=0).value == 0.1


@pytest.mark.parametrize(
    ("arguments", "steps", "says"),
    [
        (("nosuch", 1.0, 0.1), 3, "buffer of KHotGate \\('temperature', 'budget'\\); got 'nosuch'"),
        (("temperature", 0.0, 0.1), 3, "`start` must be > 0"),
        (("temperature", 1.0, 0.1), -1, "`steps` must be ≥ 0|`steps` must be at least 0"),
    ],
)
def test_bad_schedules(arguments, steps, says):
    with pytest.raises(ValueError, match=says):
        Schedule(KHotGate(4, 2), *arguments, steps=steps)
