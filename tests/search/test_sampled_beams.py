"""Sampled beams, by enumeration of all that can be drawn: inclusion probabilities, estimates and their variances."""

from functools import partial

import pytest
import torch
from search_models import Prefixes, listed

import khot
from khot.designs import ConditionalPoisson, Pivotal, Sampford
from khot.search import beam_search, expectation, proportional, sampled

START = torch.tensor([0])


class Prescribed:
    """Let a design draw the subset of a given number, and note how likely it was: one row for each history."""

    def __init__(self, design, counts):
        self.design, self.digits, self.step = design, [], 0
        rows = 1
        for count in counts:
            rows *= count
        number = torch.arange(rows)
        for count in reversed(counts):
            self.digits.insert(0, number % count)
            number = number // count
        self.log_probs = torch.zeros(rows, dtype=torch.float64)
        self.worst = 0.0  # the largest error of an inclusion probability

    def __call__(self, probs, k, /, *, validate_args):
        law = self.design(probs, k, validate_args=validate_args)
        subsets = self.design(probs[:1], k[:1], validate_args=False).enumerate_support()[:, 0]
        log_p = law.log_prob(subsets[:, None].expand(-1, len(probs), -1))  # (subsets, rows)
        marginals = torch.einsum("sr,sn->rn", log_p.exp(), subsets)
        self.worst = max(self.worst, float((marginals - law.mean).abs().max()))
        drawn = self.digits[self.step]
        self.log_probs = self.log_probs + log_p[drawn, torch.arange(len(drawn))]
        self.step += 1
        law.sample_indices = lambda generator=None: subsets.bool()[drawn].nonzero()[:, 1].view(len(drawn), -1)
        return law


def enumerated(design, length, *, relaxation=khot.sigmoid_topk, k=2, size=4, seed=0):
    """All histories of a search: the model, the beams (histories, k), and the probability of each history."""
    model = Prefixes(size, length, seed=seed)
    first = torch.combinations(torch.arange(size), k).shape[0]
    later = torch.combinations(torch.arange(k * size), k).shape[0]
    law = Prescribed(design, [first] + [later] * (length - 1))
    rows = len(law.log_probs)
    select = partial(sampled, design=law, relaxation=relaxation)
    beams = beam_search(model.step, None, k, start=START.expand(rows), length=length, select=select)
    return model, beams, law


DESIGNS = {"pivotal": partial(Pivotal, order="given"), "conditional Poisson": ConditionalPoisson}
FOUR = pytest.param(4, marks=[pytest.mark.slow, pytest.mark.long])


def code(tokens, size=4):
    """The number of each sequence."""
    places = size ** torch.arange(tokens.shape[-1])
    return (tokens * places).sum(-1)


@pytest.mark.parametrize("length", [3, FOUR])
@pytest.mark.parametrize("design", DESIGNS)
def test_inclusion_probabilities_are_exact(design, length):
    """1/Q is right on average for every sequence: Σ over histories with y of P(history)/Q(y) = 1."""
    relaxation = proportional if design == "pivotal" else khot.sigmoid_topk
    model, beams, law = enumerated(DESIGNS[design], length, relaxation=relaxation)
    p = law.log_probs.exp()
    assert law.worst < 1e-10  # of each step, given the beams before
    assert abs(p.sum() - 1) < 1e-10
    number = code(beams.tokens)
    assert (number[:, 0] != number[:, 1]).all()  # distinct, in every history
    total = torch.zeros(4**length, dtype=torch.float64)
    total.index_add_(0, number.flatten(), (p[:, None] / beams.inclusion_probs).flatten())
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-10)
    wrong = torch.zeros_like(total).index_add_(0, number.flatten(), (p[:, None] / beams.inclusion_probs**0.9).flatten())
    assert (wrong - 1).abs().max() > 0.01  # a negative control
    every = model.sequences()
    want = torch.stack([every[tuple(y)] for y in beams.tokens[::997, 0].tolist()])
    torch.testing.assert_close(beams.log_probs[::997, 0], want)


@pytest.mark.parametrize("relaxation", [khot.sigmoid_topk, proportional, khot.normal_topk])
@pytest.mark.parametrize("design", DESIGNS)
def test_estimates_and_their_gradients_have_no_bias(design, relaxation):
    model, beams, law = enumerated(DESIGNS[design], 3, relaxation=relaxation, seed=1)
    p = law.log_probs.exp()
    every = model.sequences()
    f = torch.randn(64, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact = sum(every[y].exp() * f[code(torch.tensor(y))] for y in every)
    values = f[code(beams.tokens)]  # (histories, k, 2)
    estimate = expectation(beams, values)
    mean = (p[:, None] * estimate.mean).sum(0)
    torch.testing.assert_close(mean, exact, rtol=0, atol=1e-10)
    total = expectation(beams, torch.ones_like(values[..., 0])).mean
    if relaxation is proportional:  # all weights sum to 1 on every draw
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-10)
    else:
        assert total.std() > 0.01
    # with its own p the weights are self-normalised
    ratio = expectation(beams, values, normalize=True).mean
    torch.testing.assert_close(ratio, estimate.mean / total[:, None])
    # the gradient in the tables of the model
    model.table.requires_grad_()
    log_probs = torch.stack([model.log_prob(y) for y in every])
    number = torch.stack([code(torch.tensor(y)) for y in every])
    place = torch.empty(64, dtype=torch.int64)
    place[number] = torch.arange(64)
    (want,) = torch.autograd.grad((log_probs.exp() * f[number, 0]).sum(), model.table, retain_graph=True)
    again = beams._replace(log_probs=log_probs[place[code(beams.tokens)]])
    (got,) = torch.autograd.grad((p * expectation(again, values[..., 0]).mean).sum(), model.table)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_the_variance_has_no_bias():
    _, beams, law = enumerated(ConditionalPoisson, 3, seed=1)
    p = law.log_probs.exp()
    f = torch.randn(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    estimate = expectation(beams, f[code(beams.tokens)])
    mean = (p * estimate.mean).sum()
    exact = (p * (estimate.mean - mean).square()).sum()
    assert exact > 0.01
    torch.testing.assert_close((p * estimate.variance).sum(), exact, rtol=0, atol=1e-10)
    pair = beams.log_joint_probs.exp()
    torch.testing.assert_close(pair.diagonal(dim1=1, dim2=2), beams.inclusion_probs)
    number = code(beams.tokens)
    first, second = number.min(1).values, number.max(1).values
    total = torch.zeros(64, 64, dtype=torch.float64)
    total.index_put_((first, second), p / pair[:, 0, 1], accumulate=True)
    upper = torch.ones(64, 64, dtype=torch.bool).triu(1)
    torch.testing.assert_close(total[upper], torch.ones(64 * 63 // 2, dtype=torch.float64), rtol=0, atol=1e-9)
    assert expectation(beams._replace(log_joint_probs=None), f[code(beams.tokens)]).variance is None


def pairs_of(beams, p):
    """Two independent searches, with all pairs of histories as rows, and the probability of each pair."""
    n = len(p)
    rows = torch.stack((torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)), 1).flatten()
    picked = {name: getattr(beams, name)[rows] for name in ("tokens", "log_probs", "log_inclusion_probs")}
    return beams._replace(**picked), (p[:, None] * p).flatten()


@pytest.mark.parametrize("relaxation", [proportional, khot.sigmoid_topk])
def test_the_variance_from_several_searches_has_no_bias_for_any_design(relaxation):
    """The default design draws some pairs never, so that no single search tells its variance; two searches do."""
    _, beams, law = enumerated(DESIGNS["pivotal"], 2, relaxation=relaxation, seed=1)
    p = law.log_probs.exp()
    f = torch.randn(16, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one = expectation(beams, f[code(beams.tokens)]).mean
    middle = (p[:, None] * one).sum(0)
    exact = (p[:, None] * (one - middle).square()).sum(0)
    assert exact.min() > 0.01
    both, weight = pairs_of(beams, p)
    two = expectation(both, f[code(both.tokens)], searches=2)
    assert two.mean.shape == two.variance.shape == (len(p) ** 2, 2)
    torch.testing.assert_close((weight[:, None] * two.mean).sum(0), middle, rtol=0, atol=1e-10)
    torch.testing.assert_close((weight[:, None] * two.variance).sum(0), exact / 2, rtol=0, atol=1e-10)
    assert (two.variance >= 0).all()
    alone = expectation(both, f[code(both.tokens)]).mean.view(-1, 2, 2)
    torch.testing.assert_close(two.mean, alone.mean(1))
    torch.testing.assert_close(two.variance, (alone[:, 0] - alone[:, 1]).square() / 4)
    # several numbers and a ratio: of the totals of all searches
    ratio = expectation(both, f[code(both.tokens)], searches=2, normalize=True)
    total = expectation(both, torch.ones(len(weight) * 2, 2), searches=2).mean
    torch.testing.assert_close(ratio.mean, two.mean / total[:, None])
    if relaxation is proportional:  # the total is 1, so that both are the same
        torch.testing.assert_close(ratio.variance, two.variance)


def test_the_variance_of_a_ratio_is_near_that_of_many_draws():
    model, draws, groups = Prefixes(4, 3, seed=2), 16, 1600
    select = partial(sampled, relaxation=khot.sigmoid_topk)
    draw = torch.Generator().manual_seed(0)
    start = START.expand(draws * groups)
    beams = beam_search(model.step, None, 4, start=start, length=3, select=select, generator=draw)
    f = (beams.tokens == 1).sum(-1).double()
    for normalize in (False, True):
        found = expectation(beams, f, normalize=normalize, searches=draws)
        assert found.mean.shape == (groups,)
        assert 0.85 < found.variance.mean() / found.mean.var() < 1.15


EACH = [(design, k) for design in (Pivotal, ConditionalPoisson) for k in (1, 2, 7)] + [(Sampford, 2)]


@pytest.mark.parametrize(("design", "k"), EACH)
@pytest.mark.parametrize("end", [None, 1])
def test_beams_that_are_drawn(design, k, end):
    """The samplers themselves: k distinct sequences in each of 4000 draws, and means within five standard errors."""
    model = Prefixes(3, 3, seed=3)
    every = model.sequences(end)
    relaxation = khot.sigmoid_topk if design is ConditionalPoisson else proportional
    draws = 4000
    beams = beam_search(
        model.step,
        None,
        k,
        start=START.expand(draws),
        length=3,
        end=end,
        select=partial(sampled, design=design, relaxation=relaxation),
        generator=torch.Generator().manual_seed(4),
    )
    found = [listed(row) for row in beams.tokens]
    counts = {len(set(row)) for row in found}
    assert counts == {k}
    assert {y for row in found for y in row} <= set(every)
    want = torch.stack([every[y] for y in found[0]])
    torch.testing.assert_close(beams.log_probs[0], want)
    assert (beams.log_probs[:, :-1] >= beams.log_probs[:, 1:]).all()
    assert beams.lengths[0].tolist() == [len(y) for y in found[0]]
    f = beams.lengths.double().square() + (beams.tokens[..., 0] == 2)
    exact = sum(float(every[y].exp()) * (len(y) ** 2 + (y[0] == 2)) for y in every)
    estimate = expectation(beams, f)
    error = estimate.mean.std() / draws**0.5
    assert abs(estimate.mean.mean() - exact) < 5 * error
    if design is ConditionalPoisson and k > 1:
        spread = estimate.variance.std() / draws**0.5
        assert abs(estimate.variance.mean() - estimate.mean.var()) < 5 * spread + 5 * estimate.mean.var() * draws**-0.5
    elif design is ConditionalPoisson:
        assert estimate.variance.isnan().all()  # no pairs, no variance
    else:
        assert estimate.variance is None


@pytest.mark.parametrize("design", [Pivotal, ConditionalPoisson])
def test_if_k_holds_everything_nothing_is_random(design):
    model = Prefixes(3, 3)
    every = model.sequences(end=0)
    select = partial(sampled, design=design)
    beams = beam_search(model.step, None, 40, start=START, length=3, end=0, select=select)
    assert set(listed(beams.tokens[0])) == {*every, ()}
    assert (beams.inclusion_probs == 1).all()
    f = torch.randn(1, 40, dtype=torch.float64)
    estimate = expectation(beams, f.masked_fill(beams.log_probs == -torch.inf, torch.nan))
    exact = sum(every[y].exp() * f[0, i] for i, y in enumerate(listed(beams.tokens[0])) if y)
    torch.testing.assert_close(estimate.mean[0], exact)
    if design is ConditionalPoisson:
        torch.testing.assert_close(estimate.variance, torch.zeros(1, dtype=torch.float64), atol=1e-10, rtol=0)


def test_lengths_of_rows_and_numbers_of_beams_of_steps():
    model = Prefixes(4, 4)
    draws = 3000
    lengths = torch.tensor([0, 2, 3, 4]).repeat(draws)
    draw = torch.Generator().manual_seed(0)
    beams = beam_search(
        model.step, None, [2, 5, 3, 4], start=START.expand(4 * draws), length=4, lengths=lengths, select=sampled,
        generator=draw,
    )  # fmt: skip
    assert set(listed(beams.tokens[0])) == {()}
    assert beams.scores[0].tolist() == [0, -torch.inf, -torch.inf, -torch.inf]
    assert set(beams.lengths[1].tolist()) == {0, 2}  # k = 3 at the third step leaves one of four slots empty
    mean = expectation(beams, (beams.tokens == 1).sum(-1).double()).mean.view(draws, 4)
    for column, length in enumerate((0, 2, 3, 4)):
        cut = Prefixes(4, 4)
        cut.length = length
        every = cut.sequences()
        exact = sum(float(torch.as_tensor(every[y]).exp()) * y.count(1) for y in every)
        error = mean[:, column].std() / draws**0.5
        assert abs(mean[:, column].mean() - exact) <= 5 * error


def test_the_same_generator_gives_the_same_beams():
    model = Prefixes(5, 4)
    draw = [
        beam_search(
            model.step, None, 4, start=START, length=4, select=sampled, generator=torch.Generator().manual_seed(seed)
        ).tokens
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])


def test_what_expectations_refuse():
    model = Prefixes(3, 2)
    hard = beam_search(model.step, None, 2, start=START, length=2)
    with pytest.raises(ValueError, match="must have inclusion probabilities; search with"):
        expectation(hard, torch.zeros(1, 2))
    beams = beam_search(model.step, None, 2, start=START, length=2, select=sampled)
    with pytest.raises(ValueError, match=r"`values` must have the shape \(batch, k, …\) = \(1, 2, '…'\); got \(1, 3\)"):
        expectation(beams, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="`searches` must divide the rows of the batch, 1; got 2"):
        expectation(beams, torch.zeros(1, 2), searches=2)
    with pytest.raises(ValueError, match="`searches` must be ≥ 1; got 0"):
        expectation(beams, torch.zeros(1, 2), searches=0)
    with pytest.raises(TypeError, match="`beams` must be a Beams; got list"):
        expectation([1], torch.zeros(1, 2))


def by_raising(u, k):
    """min(1, u/c) with the sum k: fix at 1 what exceeds it, until nothing does."""
    p, certain = torch.zeros_like(u), torch.zeros_like(u, dtype=torch.bool)
    while True:
        p = torch.where(certain, 1.0, u * (k - certain.sum()) / u[~certain].sum())
        if not (p > 1).any():
            return p
        certain |= p > 1


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0, 300.0])
def test_proportional_probabilities(spread):
    draw = torch.Generator().manual_seed(0)
    for n, k in ((5, 2), (9, 4), (30, 29), (6, 1)):
        x = spread * torch.randn(20, n, generator=draw, dtype=torch.float64)
        p = proportional(x, k)
        torch.testing.assert_close(p.sum(-1), torch.full((20,), float(k), dtype=torch.float64))
        if spread < 300:
            torch.testing.assert_close(p, torch.stack([by_raising(row.exp(), k) for row in x]))
        assert torch.equal(proportional(x, torch.tensor(k)), p)
    x = torch.tensor([0.0, -torch.inf, 1.0, -800.0])
    assert proportional(x, 3).tolist() == [1, 0, 1, 1]
    assert proportional(x, 0).tolist() == [0, 0, 0, 0]
    assert proportional(x, 4).isnan().all()
    torch.testing.assert_close(proportional(x, 1, temperature=0.5), proportional(2 * x, 1))
