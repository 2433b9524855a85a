import pytest
import torch

from khot._math import drawn_sets, order_sampling


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "k", "spread"), [(2, 1, 1), (8, 4, 1), (12, 8, 5), (40, 6, 1), (9, 3, 300)])
def test_the_chance_of_few_items_is_that_of_the_integral(n, k, spread):
    """10⁵ rows of 8 took 18 s by an integral for each; the sets on the way to k items are few."""
    scores = spread * normal(20, n)
    subset = torch.zeros_like(scores).scatter_(1, normal(20, n, seed=1).topk(k).indices, 1.0).bool()
    subset[0] = False
    subset[0, :1] = True  # k of its own
    expected = order_sampling._log_integral(order_sampling.GUMBEL, scores, subset, ~subset)
    found = order_sampling._log_few(k, scores, subset, ~subset)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-12)
    # The chance that one of them comes first is another number.
    if k > 1:
        rest = torch.where(subset, -torch.inf, scores).logsumexp(-1)
        one = drawn_sets.log_prob(scores[1, subset[1]][:1, None], torch.ones(1, 1).bool(), rest[1:2])
        assert (one - found[1]).abs() > 1e-3


def test_many_rows_of_few_items_are_taken_by_parts(monkeypatch):
    scores, k = normal(50, 6).requires_grad_(), torch.full((50,), 3)
    subset = torch.zeros(50, 6).scatter_(1, normal(50, 6, seed=1).topk(3).indices, 1.0)
    whole = order_sampling.log_prob(order_sampling.GUMBEL, scores, k, subset)
    (slope,) = torch.autograd.grad(whole.sum(), scores)
    monkeypatch.setattr(order_sampling, "CHUNK", 64)
    parts = order_sampling.log_prob(order_sampling.GUMBEL, scores, k, subset)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-15)
    torch.testing.assert_close(torch.autograd.grad(parts.sum(), scores)[0], slope, rtol=0, atol=1e-15)
