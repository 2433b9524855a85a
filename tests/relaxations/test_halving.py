import numpy as np
import pytest
import torch

import khot
from khot.boosts import double_exp, linear

DOUBLE = torch.float64


def problem(*batch, n, d=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.rand(*batch, n, d, dtype=DOUBLE, generator=generator) * 2 - 1
    return embeddings, torch.rand(*batch, n, dtype=DOUBLE, generator=generator)


def by_hand(embeddings, scores, k, base=20.0):
    """The text of the paper with the released boost, one row at a time, for n = k·2^r."""
    while len(scores) > k:
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        half = len(order) // 2
        pairs = [(order[i], order[len(order) - 1 - i]) for i in range(half)]
        weights = [1 / (1 + torch.exp(base ** scores[j] - base ** scores[i])) for i, j in pairs]
        embeddings = [w * embeddings[i] + (1 - w) * embeddings[j] for w, (i, j) in zip(weights, pairs, strict=True)]
        scores = [w * scores[i] + (1 - w) * scores[j] for w, (i, j) in zip(weights, pairs, strict=True)]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return torch.stack([embeddings[i] for i in order]), torch.stack([scores[i] for i in order])


@pytest.mark.parametrize(("n", "k"), [(16, 2), (16, 8), (32, 4), (6, 3)])
def test_against_the_text(n, k):
    embeddings, scores = problem(n=n)
    values, left = by_hand(list(embeddings), list(scores), k)
    got = khot.successive_halving_topk(embeddings, scores, k)
    torch.testing.assert_close(got.values, values)
    torch.testing.assert_close(got.scores, left)


@pytest.mark.parametrize(("n", "k"), [(16, 2), (13, 3), (9, 8), (7, 1), (8, 8), (5, 4), (100, 7)])
@pytest.mark.parametrize("boost", [double_exp(20), linear(50)], ids=["double_exp", "linear"])
def test_weights_tell_the_whole_story(n, k, boost):
    embeddings, scores = problem(3, 2, n=n)
    got = khot.successive_halving_topk(embeddings, scores, k, boost=boost)
    assert got.values.shape == (3, 2, k, 5)
    assert got.weights.shape == (3, 2, k, n)
    assert bool((got.weights >= 0).all())
    torch.testing.assert_close(got.weights.sum(-1), torch.ones(3, 2, k, dtype=DOUBLE))
    torch.testing.assert_close(got.weights @ embeddings, got.values)
    torch.testing.assert_close((got.weights @ scores.unsqueeze(-1)).squeeze(-1), got.scores)
    assert bool(((got.weights > 0).sum(-2) <= 1).all())  # each entry goes to one slot
    bare = khot.successive_halving_topk(embeddings, scores, k, boost=boost, with_weights=False)
    assert bare.weights is None
    assert torch.equal(bare.values, got.values)


def test_negative_scores_and_padding_do_not_leak():
    embeddings, scores = problem(n=11)
    got = khot.successive_halving_topk(embeddings, scores - 5, 3, boost=linear(50))
    same = khot.successive_halving_topk(embeddings, scores, 3, boost=linear(50))
    torch.testing.assert_close(got.values, same.values)
    torch.testing.assert_close(got.scores, same.scores - 5)


@pytest.mark.parametrize("select", [khot.successive_halving_topk, khot.iterative_topk])
def test_all_of_them_and_permutations(select):
    embeddings, scores = problem(n=8)
    order = scores.argsort(descending=True)
    sharp = {"boost": linear(1e6)} if select is khot.successive_halving_topk else {"alpha": 1e12}
    got = select(embeddings, scores, 8, **sharp)
    torch.testing.assert_close(got.values, embeddings[order])
    shuffle = torch.randperm(8)
    torch.testing.assert_close(
        select(embeddings[shuffle], scores[shuffle], 3).values, select(embeddings, scores, 3).values
    )


@pytest.mark.parametrize("select", [khot.successive_halving_topk, khot.iterative_topk])
def test_sharp_is_hard(select):
    embeddings, scores = problem(4, n=24)
    sharp = {"boost": linear(1e6)} if select is khot.successive_halving_topk else {"alpha": 1e10}
    hard = scores.topk(6)
    got = select(embeddings, scores, 6, **sharp)
    torch.testing.assert_close(got.scores, hard.values, rtol=0, atol=1e-6)
    expected = embeddings.gather(-2, hard.indices.unsqueeze(-1).expand(-1, -1, 5))
    torch.testing.assert_close(got.values, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", [2, 3])
def test_gradients(k):
    embeddings, scores = (t.requires_grad_() for t in problem(2, n=7, d=3))
    for call in (
        lambda e, s: khot.successive_halving_topk(e, s, k),
        lambda e, s: khot.successive_halving_topk(e, s, k, boost=linear(5)),
        lambda e, s: khot.iterative_topk(e, s, k, alpha=3.0),
    ):
        assert torch.autograd.gradcheck(lambda e, s, call=call: tuple(call(e, s)), (embeddings, scores))


def test_large_scores_stay_finite():
    embeddings, scores = problem(n=8)
    scores = (100 * scores).float().requires_grad_()
    got = khot.successive_halving_topk(embeddings.float(), scores, 2)
    got.values.sum().backward()
    assert bool(got.values.isfinite().all())
    assert bool(scores.grad.isfinite().all())


def test_the_iterative_slots():
    scores = torch.tensor([0.9, 0.1, 0.4, 0.8], dtype=DOUBLE)
    weights = khot.iterative_topk(torch.eye(4, dtype=DOUBLE), scores, 2, alpha=torch.tensor(2.0)).weights
    expected = torch.stack([(-2 * (scores - 0.9) ** 2).softmax(-1), (-2 * (scores - 0.8) ** 2).exp()])
    expected[1, 0] = 0
    expected[1] /= expected[1].sum()
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("select", [khot.successive_halving_topk, khot.iterative_topk])
@pytest.mark.parametrize(
    ("embeddings", "scores", "k", "error", "message"),
    [
        (torch.ones(4), torch.ones(4), 2, ValueError, r"`embeddings` must have the shape \(…, m, d\)"),
        (torch.ones(4, 3), torch.ones(5), 2, ValueError, "`scores` must have the shape of `embeddings`"),
        (torch.ones(4, 3), torch.ones(4).double(), 2, TypeError, "`scores` must have the dtype of `embeddings`"),
        (torch.ones(4, 3), torch.ones(4), 5, ValueError, "`k` must satisfy 0 ≤ k ≤ 4"),
        (torch.ones(4, 3), torch.ones(4), 0, ValueError, "`k` must be ≥ 1; got 0"),
        (torch.ones(4, 3), torch.ones(4), 1.5, TypeError, "`k` must be an int"),
        ([1.0], torch.ones(4), 1, TypeError, "`embeddings` must be a floating torch.Tensor"),
    ],
)
def test_bad_calls(select, embeddings, scores, k, error, message):
    with pytest.raises(error, match=message):
        select(embeddings, scores, k)


@pytest.mark.parametrize(("make", "value"), [(double_exp, 1), (double_exp, 0), (linear, 0), (linear, -1)])
def test_bad_boosts(make, value):
    with pytest.raises(ValueError, match="must be >"):
        make(value)


def test_scores_far_apart():
    """The best was lost when the worst was below −27."""
    got = khot.successive_halving_topk(torch.eye(4), torch.tensor([10.0, -30.0, 0.0, 1.0]), 1)
    assert got.weights.tolist() == [[1, 0, 0, 0]]
    got = khot.successive_halving_topk(torch.eye(4), torch.tensor([1e5, -1e5, 50.0, 60.0]), 2)
    assert got.weights.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("boost", [double_exp(20), linear(50)], ids=["double_exp", "linear"])
def test_scores_of_minus_infinity_weigh_nothing(boost):
    embeddings, scores = problem(n=8)
    scores[[1, 2, 4, 6, 7]] = -torch.inf
    scores.requires_grad_()
    got = khot.successive_halving_topk(embeddings, scores, 2, boost=boost)
    assert bool(got.scores.isfinite().all())
    assert bool((got.weights[:, [1, 2, 4, 6, 7]] == 0).all())
    (gradient,) = torch.autograd.grad(got.values.sum() + got.scores.sum(), scores)
    assert bool(gradient.isfinite().all())
    assert bool(khot.iterative_topk(embeddings, scores, 2).scores.isfinite().all())


def test_half_precision_is_computed_in_float32():
    scores = torch.tensor([4.0, 1.0, 5.0, 6.0]).half().requires_grad_()
    got = khot.successive_halving_topk(torch.eye(4).half(), scores, 2)
    assert got.values.dtype == got.weights.dtype == torch.float16
    (gradient,) = torch.autograd.grad(got.values.sum(), scores)
    assert bool(gradient.isfinite().all())


def test_bad_sharpness():
    embeddings, scores = problem(3, n=4)
    with pytest.raises(ValueError, match=r"`alpha` must be > 0; got 0\.$"):
        khot.iterative_topk(embeddings, scores, 2, alpha=0)
    with pytest.raises(ValueError, match="`alpha` must broadcast"):
        khot.iterative_topk(embeddings, scores, 2, alpha=torch.ones(2))


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("select", [khot.successive_halving_topk, khot.iterative_topk])
def test_k_may_be_an_integer_of_numpy(select, integer):
    """Successive Halving failed: numpy's integers have no `bit_length`."""
    embeddings, scores = torch.randn(2, 6, 4), torch.randn(2, 6)
    assert all(map(torch.equal, select(embeddings, scores, integer(2)), select(embeddings, scores, 2)))
