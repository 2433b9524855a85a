"""A sample of a stream."""

import pytest
import torch
from design_cases import generator, scores

import khot
from khot.data import Reservoir

SIZES = scores(12).mul(1.5).exp()


class Forgetful(Reservoir):
    """A broken reservoir: what it holds stands for itself alone, and not for those that left."""

    def update(self, items, sizes):
        self.threshold = 0.0
        super().update(items, sizes)


def passed(parts, seed, k=4, kind=Reservoir):
    reservoir = kind(k, generator=generator(seed))
    start = 0
    for width in parts:
        reservoir.update(range(start, start + width), SIZES[start : start + width])
        start += width
    return reservoir


@pytest.mark.parametrize("parts", [[12], [1] * 12, [5, 0, 3, 4], [2, 10]])
def test_weights_are_those_of_the_whole_stream(parts):
    """Whatever was drawn, 1/π of each item kept is that of all sizes together, which are not kept."""
    expected = 1 / khot.inclusion_probs(SIZES, 4)
    for seed in range(20):
        reservoir = passed(parts, seed)
        assert len(reservoir) == len(set(reservoir.items)) == 4
        assert reservoir.items == reservoir.indices.tolist()
        torch.testing.assert_close(reservoir.weights, expected[reservoir.indices], rtol=1e-12, atol=0)
        assert reservoir.seen == 12
    if len(parts) > 2:
        broken = [passed(parts, seed, kind=Forgetful) for seed in range(20)]
        assert any(((r.weights / expected[r.indices] - 1).abs() > 1e-3).any() for r in broken)


@pytest.mark.long
def test_frequencies_are_the_inclusion_probabilities():
    rounds, p = 2000, khot.inclusion_probs(SIZES, 4)
    for parts, kind in (([1] * 12, Reservoir), ([7, 5], Reservoir), ([1] * 12, Forgetful)):
        counts, random = torch.zeros(12, dtype=torch.float64), generator(1)
        for _ in range(rounds if len(parts) == 2 else 500):
            reservoir = kind(4, generator=random)
            start = 0
            for width in parts:
                reservoir.update(range(start, start + width), SIZES[start : start + width])
                start += width
            counts[reservoir.indices] += 1
        total = counts.sum() / 4
        is_right = ((counts / total - p).abs() <= 4.5 * (p * (1 - p) / total).sqrt() + 1e-12).all()
        assert is_right == (kind is Reservoir), "a reservoir that forgets is found"
    q = khot.designs.PlackettLuce(logits=SIZES.log(), k=4).mean
    assert ((q - p).abs() > 4.5 * (p * (1 - p) / rounds).sqrt()).any(), "the keys of others have other probabilities"


def test_a_reservoir_that_is_not_full_keeps_all():
    reservoir = Reservoir(5)
    reservoir.update(["a", "b", "zero"], [1.0, 2.0, 0.0])
    assert reservoir.items == ["a", "b"]
    assert reservoir.weights.tolist() == [1.0, 1.0]
    assert reservoir.indices.tolist() == [0, 1]
    reservoir.update([], [])
    reservoir.update("cde", [3.0, 4.0, 1e9])
    assert len(reservoir) == 5
    assert reservoir.weights.tolist() == [1.0] * 5
    reservoir.update("f", [1e9])
    assert len(reservoir) == 5
    assert {"e", "f"} <= set(reservoir.items)


def test_totals_of_a_long_stream():
    """10⁴ items in parts of 100: the total of sizes is exact, as every small item stands for τ."""
    size = scores(10_000, seed=5).exp()
    reservoir = Reservoir(200, generator=generator())
    for start in range(0, 10_000, 100):
        reservoir.update(range(start, start + 100), size[start : start + 100])
    torch.testing.assert_close((reservoir.weights * size[reservoir.indices]).sum(), size.sum(), rtol=1e-10, atol=0)
    y = size * (1 + 0.2 * scores(10_000, seed=6))
    estimate = khot.survey.total(y[reservoir.indices], reservoir.weights)
    assert abs(estimate.value - y.sum()) < 4 * estimate.error


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("`k` must be ≥ 1", lambda: Reservoir(0)),
        ("one number for each of 2", lambda: Reservoir(1).update("ab", [1.0])),
        ("finite and ≥ 0", lambda: Reservoir(1).update("a", [-1.0])),
    ],
)
def test_errors_of_reservoirs(match, call):
    with pytest.raises(ValueError, match=match):
        call()


def test_items_and_generators_of_other_kinds():
    with pytest.raises(TypeError, match="`items` must be a Sized; got generator"):
        Reservoir(2).update((i for i in range(3)), [1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="`generator` must be a Generator"):
        Reservoir(2, generator=7)
