"""Certificates are never below the tail mass: random rows, adversarial rows, and rows that hypothesis finds."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khot.attention import blockwise, known_head, multi_gap, single_gap, tail_mass

RULES = {
    "single gap": single_gap,
    "known head": known_head,
    "multi gap": partial(multi_gap, further=3),
    "multi gap, none": partial(multi_gap, further=0),
    "multi gap, all": partial(multi_gap, further=1000),
}
rules = pytest.mark.parametrize("name", RULES)


def unsound(rule, x, mask=None):
    """How many heads have a bound below their tail mass."""
    return int((rule(x, None, mask=mask) < tail_mass(x, None, mask=mask)).sum())


def draws(many, n, seed):
    """Random rows at many scales, some of them tied."""
    g = torch.Generator().manual_seed(seed)
    scale = 10 ** torch.empty(many, 1, dtype=torch.float64).uniform_(-3, 2.5, generator=g)
    x = torch.randn(many, n, dtype=torch.float64, generator=g) * scale
    x[::4] = x[::4].round()
    return x


@rules
def test_soundness_on_random_rows(name):
    for n in (1, 2, 5, 30):
        x = draws(5000, n, n)
        assert unsound(RULES[name], x) == 0
        assert unsound(RULES[name], x.float()) == 0
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.7
        mask[:, 0] = True
        assert unsound(RULES[name], x, mask) == 0


@rules
def test_soundness_on_adversarial_rows(name):
    """Equality cases: constant tails, all equal, two levels; and scores that underflow or overflow exp."""
    for n, k, gap in itertools.product((2, 3, 64), (1, 2, 63), (0.0, 1e-15, 1.0, 40.0, 800.0, 1e6)):
        x = torch.zeros(n, dtype=torch.float64)
        x[:k] += gap
        for shift in (0.0, 1e5, -1e5):
            assert unsound(RULES[name], x + shift) == 0
    ramp = -torch.arange(50, dtype=torch.float64)
    for step in (1e-3, 1.0, 30.0):
        assert unsound(RULES[name], step * ramp) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=12), st.data())
def test_soundness_by_hypothesis(scores, data):
    x = torch.tensor(scores, dtype=torch.float64)
    n, k = len(scores), data.draw(st.integers(1, len(scores)))
    exact = tail_mass(x, k)
    for rule in RULES.values():
        assert rule(x, k) >= exact
    top = x.sort(descending=True).values
    known = data.draw(st.integers(k, n))
    for rule in RULES.values():  # the largest scores alone
        assert rule(top[:known], k, n=n) >= exact
    cut = data.draw(st.integers(known, n))
    blocks = [b for b in (top[known:cut], top[cut:]) if len(b)]
    upper = torch.tensor([float(b.max()) for b in blocks] or [-torch.inf], dtype=torch.float64)
    counts = torch.tensor([len(b) for b in blocks] or [0])
    assert blockwise(top[:k], upper, counts=counts, known=top[k:known]) >= exact


def test_a_wrong_certificate_is_caught():
    """Negative controls: a sign, a count or a head that is wrong gives bounds below the tail mass."""
    x = draws(2000, 12, 0)

    def wrong_sign(x, k, mask):
        return 1 - single_gap(x, k, mask=mask)

    def forgets_a_key(x, k, mask):
        return known_head(x, k, mask=mask) * (11 - torch.arange(12)).clamp(min=0) / 12

    def bounds_by_the_second_next(x, k, mask):
        lower = x.sort(-1, descending=True).values.roll(-1, -1)
        lower[:, -1] = -torch.inf
        return known_head(lower, k, mask=mask)

    for wrong in (wrong_sign, forgets_a_key, bounds_by_the_second_next):
        assert unsound(wrong, x) > 100
    flat = torch.zeros(2)
    counts = torch.tensor([3, 3])
    exact = tail_mass(torch.zeros(8), 2)
    assert blockwise(flat, flat, counts=counts) >= exact
    assert blockwise(flat, flat, counts=torch.ones(2)) < exact  # without the number of keys of a block


def test_more_knowledge_gives_a_smaller_bound():
    x = draws(500, 30, 3)
    bounds = [single_gap(x), known_head(x), *(multi_gap(x, further=r) for r in (1, 2, 8, 29)), tail_mass(x)]
    for larger, smaller in itertools.pairwise(bounds):
        assert (larger >= smaller * (1 - 1e-11)).all()
    torch.testing.assert_close(bounds[1], bounds[2], rtol=0, atol=0)
    torch.testing.assert_close(bounds[-2], bounds[-1], rtol=1e-11, atol=1e-300)


def test_the_formulas():
    """Against the sums of the definitions, in plain Python."""
    from math import exp

    s, n = [3.0, 2.5, 1.0, 0.5], 9
    x = torch.tensor(s, dtype=torch.float64)
    head = exp(3) + exp(2.5)
    expected = {
        single_gap: (n - 2) / (n - 2 + 2 * exp(1.5)),
        known_head: 7 * exp(1) / (head + 7 * exp(1)),
        multi_gap: (exp(1) + exp(0.5) + 5 * exp(0.5)) / (head + exp(1) + 6 * exp(0.5)),
    }
    for rule, value in expected.items():
        assert float(rule(x, 2, n=n)) == pytest.approx(value, rel=1e-11)
    streaming = 7 * exp(2.5) / (head + 7 * exp(2.5))
    assert float(known_head(x[:2], 2, n=n)) == pytest.approx(streaming, rel=1e-11)


def test_bad_input():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="`n` must be ≥ 4; got 3"):
        known_head(x, 1, n=3)
    with pytest.raises(ValueError, match="`further` must be ≥ 0; got -1"):
        multi_gap(x, 1, further=-1)
    with pytest.raises(ValueError, match="`k` must satisfy"):
        single_gap(x, 5)
    with pytest.raises(ValueError, match="`counts` must broadcast"):
        blockwise(x, x, counts=torch.ones(3))
