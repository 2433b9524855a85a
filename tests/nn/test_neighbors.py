"""`SoftNeighbors` and `neighbors_loss` against a direct computation with all distances."""

import copy

import pytest
import torch
from torch import nn

import khot
from khot.designs import ConditionalPoisson, Pivotal
from khot.nn import SoftNeighbors, neighbors, neighbors_loss

CASES = {
    "plain": {},
    "laplace": {"relaxation": khot.laplace_topk},
    "euclidean top-k": {"relaxation": khot.euclidean_topk},
    "distance, not squared": {"metric": neighbors.euclidean},
    "cosine": {"metric": neighbors.cosine, "temperature": 0.1},
    "fractional": {"k": 2.5},
}


def data(q=5, m=9, d=3, batch=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    how = {"generator": generator, "dtype": torch.float64}
    return torch.randn(*batch, q, d, **how), torch.randn(*batch, m, d, **how), torch.randn(*batch, m, 2, **how)


def direct(q, x, k, T, relaxation, metric, mask=None):
    """Loops over pairs; the relaxation is tested elsewhere."""
    pair = {
        neighbors.squared_euclidean: lambda a, b: (a - b).square().sum(),
        neighbors.euclidean: lambda a, b: (a - b).square().sum().sqrt(),
        neighbors.cosine: lambda a, b: 1 - a @ b / a.norm() / b.norm(),
    }[metric]
    scores = torch.stack([torch.stack([-pair(a, b) for b in x]) for a in q])
    return relaxation(scores, k, temperature=T, mask=mask)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("candidates", [None, 9])
def test_values_and_gradients_are_those_of_a_direct_computation(name, candidates):
    how = {"k": 3, "relaxation": khot.sigmoid_topk, "temperature": 0.8, "metric": neighbors.squared_euclidean}
    how |= CASES[name]
    q, x, v = data()
    leaves = [t.clone().requires_grad_() for t in (q, x, v)]
    k, T = (nn.Parameter(torch.tensor(float(how[name]), dtype=torch.float64)) for name in ("k", "temperature"))
    layer = SoftNeighbors(
        k, **{key: how[key] for key in ("relaxation", "metric")}, temperature=T, candidates=candidates
    )
    found = layer(*leaves)
    expected = direct(leaves[0], leaves[1], k, T, how["relaxation"], how["metric"])
    weights = found.weights
    if candidates:
        weights = torch.zeros_like(expected).scatter(-1, found.indices, weights)
        assert (found.dropped == 0).all()
        assert (found.weights.diff() <= 1e-12).all(), "nearest first"
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(weights.sum(-1), k.expand(5))
    torch.testing.assert_close(found.values, expected @ leaves[2] / k)
    g, h = torch.randn(5, 9, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    got = torch.autograd.grad((weights * g).sum() + (found.values * h).sum(), [*leaves, k, T])
    want = torch.autograd.grad((expected * g).sum() + (expected @ leaves[2] / k * h).sum(), [*leaves, k, T])
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("candidates", [None, 5])
def test_gradcheck(candidates):
    q, x, v = (t.requires_grad_() for t in data(3, 6, 2))
    k, T = torch.tensor(2.5, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)

    def values(q, x, v, k, T):
        layer = SoftNeighbors(1, candidates=candidates)
        layer.k = k
        return layer(q, x, v, temperature=T).values

    assert torch.autograd.gradcheck(values, (q, x, v, k.requires_grad_(), T.requires_grad_()))


@pytest.mark.parametrize("candidates", [None, 6])
def test_a_low_temperature_is_hard_k_nn(candidates):
    q, x, v = data(40, 30, 4)
    nearest = torch.cdist(q, x).topk(3, largest=False).indices
    found = SoftNeighbors(3, temperature=1e-9, candidates=candidates)(q, x, v)
    weights = found.weights
    if candidates is not None:
        weights = torch.zeros(40, 30).double().scatter(-1, found.indices, weights)
    assert torch.equal(weights, torch.zeros(40, 30).double().scatter(-1, nearest, 1.0))
    torch.testing.assert_close(found.values, v[nearest].mean(-2))
    slots = SoftNeighbors(3, temperature=1e-9, ordered=True, candidates=candidates)(q, x, v)
    torch.testing.assert_close(slots.values, v[nearest])
    assert slots.weights.shape == (40, 3, candidates or 30)
    torch.testing.assert_close(slots.weights.sum(-1), torch.ones(40, 3).double())


@pytest.mark.parametrize("relaxation", [khot.sigmoid_topk, khot.laplace_topk, khot.cauchy_topk])
@pytest.mark.parametrize(("temperature", "candidates"), [(0.1, 6), (0.3, 8), (1.0, 10), (3.0, 20)])
def test_what_candidates_drop_is_bounded(relaxation, temperature, candidates):
    """Keys are unit vectors and the metric a product, so that the gradient in the queries is that in the distances."""
    k, m, generator = 4, 60, torch.Generator().manual_seed(0)
    distances = torch.rand(50, m, generator=generator, dtype=torch.float64).mul(20).requires_grad_()
    g = torch.rand(50, m, generator=generator, dtype=torch.float64)
    how = {"relaxation": relaxation, "temperature": temperature, "metric": lambda a, b: a @ b.mT}
    keys, values = torch.eye(m, dtype=torch.float64), torch.rand(m, 3, generator=generator, dtype=torch.float64)
    full = SoftNeighbors(k, **how)(distances, keys, values)
    part = SoftNeighbors(k, **how, candidates=candidates)(distances, keys, values)
    delta, weights = part.dropped, torch.zeros_like(full.weights).scatter(-1, part.indices, part.weights)
    kept = torch.zeros(50, m, dtype=torch.bool).scatter(-1, part.indices, True)
    torch.testing.assert_close(delta, full.weights.masked_fill(kept, 0.0).sum(-1))
    torch.testing.assert_close((weights - full.weights).abs().sum(-1), 2 * delta)
    assert ((part.values - full.values).abs().amax(-1) <= delta / k * 1.0 + 1e-12).all()
    assert delta.max() > 1e-6, "something is dropped, so that the bounds say something"
    whole, ours = (torch.autograd.grad((w * g).sum(), distances)[0] for w in (full.weights, weights))
    apart = (whole - ours).abs().sum(-1)
    assert (apart <= 4 * delta / temperature * (g.amax(-1) - g.amin(-1)) + 1e-12).all()
    assert (apart > 0).any()


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunks_do_not_matter(monkeypatch, chunk):
    q, x, v = data(11, 8, 3, batch=(2,))
    mask = torch.rand(2, 11, 8, generator=torch.Generator().manual_seed(0)) > 0.2
    own = torch.arange(11) % 9 - 1
    T = torch.linspace(0.5, 1.5, 11, dtype=torch.float64)
    layer = SoftNeighbors(2, candidates=5)
    expected = layer(q, x, v, mask=mask, leave_one_out=own, temperature=T)
    monkeypatch.setattr(neighbors, "CHUNK", chunk)
    for ours, theirs in zip(layer(q, x, v, mask=mask, leave_one_out=own, temperature=T), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("candidates", [None, 4])
def test_leave_one_out_never_sees_itself(candidates):
    x = 3 * torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    x[5] = x[4]  # an equal one is a neighbour, itself is not
    found = SoftNeighbors(2, candidates=candidates)(x, x, leave_one_out=True)
    indices = torch.arange(12).expand(12, 12) if candidates is None else found.indices
    is_self = indices == torch.arange(12).unsqueeze(-1)
    assert (found.weights[is_self] == 0).all()
    assert (found.weights[4][indices[4] == 5] > 0.5).all()
    mask = ~torch.eye(12, dtype=torch.bool)
    torch.testing.assert_close(found.weights, SoftNeighbors(2, candidates=candidates)(x, x, mask=mask).weights)
    some = SoftNeighbors(2)(x[[3, 7]], x, leave_one_out=torch.tensor([3, -1]))
    assert some.weights[0, 3] == 0
    assert some.weights[1, 7] > 0.5
    all_keys = SoftNeighbors(12)(x[[3, 7]], x, leave_one_out=torch.tensor([3, -1])).weights
    assert all_keys[0].isnan().all(), "there are eleven others"
    assert (all_keys[1] == 1).all()


@pytest.mark.parametrize("candidates", [None, 7])
@pytest.mark.parametrize("design", [Pivotal, ConditionalPoisson])
def test_sampled_neighbours_have_the_weights_as_inclusion_probabilities(design, candidates):
    q, x, v = data(1, 10, 2)
    q, generator = q.expand(20_000, -1), torch.Generator().manual_seed(0)
    layer = SoftNeighbors(3, temperature=2.0, design=design, candidates=candidates)
    found = layer(q, x, v, generator=generator)
    assert set(found.weights.unique().tolist()) == {0.0, 1.0}
    assert (found.weights.sum(-1) == 3).all()
    torch.testing.assert_close(found.probs.sum(-1), torch.full((20_000,), 3.0).double())
    # 10 entries, z = 5: a false alarm has a probability below 1e-5
    torch.testing.assert_close(found.weights.mean(0), found.probs[0], rtol=0, atol=5 * 0.5 / 20_000**0.5)
    few = q[:4].clone().requires_grad_()
    drawn, soft = layer(few, x).weights, SoftNeighbors(3, temperature=2.0, candidates=candidates)(few, x).weights
    g = torch.randn(4, candidates or 10).double()
    torch.testing.assert_close(torch.autograd.grad(drawn, few, g), torch.autograd.grad(soft, few, g))
    with pytest.raises(ValueError, match="k keys to draw from"):
        layer(few, x, mask=torch.zeros(10, dtype=torch.bool))


@pytest.mark.parametrize("candidates", [None, 4])
def test_batches_broadcast_and_masked_keys_do_not_matter(candidates):
    q, x, v = data(5, 9, 3, batch=(2, 4))
    layer = SoftNeighbors(2, candidates=candidates)
    found = layer(q, x, v)
    one = layer(q[1, 2], x[1, 2], v[1, 2])
    torch.testing.assert_close(found.values[1, 2], one.values)
    shared = layer(q, x[1, 2], v[1, 2])
    torch.testing.assert_close(shared.values[1, 2], one.values)
    assert shared.weights.shape[:-1] == (2, 4, 5)
    mask = torch.tensor([True] * 6 + [False] * 3)
    torch.testing.assert_close(layer(q, x, v, mask=mask).values, layer(q, x[..., :6, :], v[..., :6, :]).values)


@pytest.mark.parametrize("candidates", [None, 4])
def test_rows_that_cannot_be_satisfied_are_nan_and_no_other(candidates):
    q, x, _ = data()
    q[1] = torch.nan
    mask = torch.ones(5, 9, dtype=torch.bool)
    mask[3, 1:] = False
    found = SoftNeighbors(2, candidates=candidates)(q, x, mask=mask)
    assert found.weights.isnan().all(-1).tolist() == [False, True, False, True, False]
    assert found.weights.isnan().any(-1).tolist() == [False, True, False, True, False]
    x[2] = torch.nan
    assert SoftNeighbors(2, candidates=candidates)(q, x).weights.isnan().all()
    k = torch.tensor([1.0, 2.0, 10.0, 3.0, 9.0], dtype=torch.float64)
    layer = SoftNeighbors(k, candidates=candidates)
    bad = [False, False, True, False, candidates is not None]
    assert layer(*data()[:2]).weights.isnan().all(-1).tolist() == bad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    q, x, v = (t.to(dtype) for t in data())
    found = SoftNeighbors(2)(q, x, v)
    expected = SoftNeighbors(2)(q.float(), x.float(), v.float())
    torch.testing.assert_close(found.weights, expected.weights.to(dtype))
    torch.testing.assert_close(found.values, expected.values.to(dtype))
    assert neighbors_loss(q, torch.tensor([0, 1, 0, 1, 0]), 2).dtype == dtype


def test_no_queries_give_no_rows():
    for candidates in (None, 4):
        found = SoftNeighbors(2, candidates=candidates)(torch.zeros(0, 3), torch.randn(9, 3), torch.randn(9, 2))
        assert found.weights.shape == (0, candidates or 9)
        assert found.values.shape == (0, 2)


def test_distances_of_far_points_do_not_round():
    q, x, _ = data(4, 6, 3)
    got = neighbors.squared_euclidean((q + 1000).float(), (x + 1000).float())
    torch.testing.assert_close(got.double(), torch.cdist(q, x).square(), rtol=0, atol=2e-3)


def test_state_and_repr():
    layer = SoftNeighbors(nn.Parameter(torch.tensor(3.0)), temperature=0.5, candidates=8)
    assert set(layer.state_dict()) == {"k", "temperature"}
    assert [name for name, _ in layer.named_parameters()] == ["k"]
    says = "k=3.0, relaxation=sigmoid_topk, temperature=0.5, metric=squared_euclidean, ordered=False, design=None"
    assert says in repr(copy.deepcopy(layer))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda q, x: SoftNeighbors(0), "`k` must be > 0"),
        (lambda q, x: SoftNeighbors(2, temperature=0.0), "`temperature` must be > 0"),
        (lambda q, x: SoftNeighbors(2.5, candidates=2), "`candidates` must be ≥ 3; got 2"),
        (lambda q, x: SoftNeighbors(2, ordered=True, design=Pivotal), "Choose one of the two"),
        (lambda q, x: SoftNeighbors(2)(q, x[:0]), r"`keys` must have the shape .* m, d ≥ 1"),
        (lambda q, x: SoftNeighbors(10)(q, x), "0 < k ≤ 9 .*; got 10"),
        (lambda q, x: SoftNeighbors(9)(x, x, leave_one_out=True), "0 < k ≤ 8 .*; got 9"),
        (lambda q, x: SoftNeighbors(2)(q, x, leave_one_out=True), "as many queries as keys, 9, .*; got 5"),
        (lambda q, x: SoftNeighbors(2)(q, x[:, :2]), "must have 2 features"),
        (lambda q, x: SoftNeighbors(2)(q[0], x), r"`queries` must have the shape \(…, q, d\)"),
        (lambda q, x: SoftNeighbors(2)(q, x, x[:4]), r"a row for each key; got \(4, 3\)"),
        (lambda q, x: SoftNeighbors(2)(q.expand(2, 5, 3), x.expand(3, 9, 3)), "batch shapes that broadcast"),
        (lambda q, x: SoftNeighbors(2)(q, x, mask=torch.ones(4, 9).bool()), "`mask` must broadcast"),
        (lambda q, x: neighbors_loss(q, torch.arange(5), 5), "0 < k ≤ 4 .*; got 5"),
        (lambda q, x: neighbors_loss(q, torch.arange(4), 2), r"`labels` must be integers or booleans .* \(5,\)"),
        (lambda q, x: neighbors_loss(q, torch.zeros(5), 2), "`labels` must be integers"),
        (lambda q, x: neighbors_loss(q, torch.arange(5), 2, reduction="no"), "`reduction` must be one of"),
    ],
)
def test_bad_input(make, says):
    q, x, _ = data()
    with pytest.raises(ValueError, match=says):
        make(q, x)


def test_bad_types():
    q, x, _ = data()
    with pytest.raises(TypeError, match="`k` must be an int"):
        SoftNeighbors(2.5, ordered=True)
    with pytest.raises(TypeError, match="`leave_one_out` must be a bool or integers"):
        SoftNeighbors(2)(q, x, leave_one_out=torch.zeros(5))


@pytest.mark.parametrize("relaxation", [khot.sigmoid_topk, khot.euclidean_topk])
def test_the_loss_is_the_share_of_other_labels(relaxation):
    z, y = data(20)[0].requires_grad_(), torch.arange(20) % 3
    expected = []
    for i in range(20):
        others = [j for j in range(20) if j != i]
        scores = -(z[others] - z[i]).square().sum(-1)
        expected.append((relaxation(scores, 4, temperature=0.5) * (y[others] != y[i])).sum() / 4)
    expected = torch.stack(expected)
    got = neighbors_loss(z, y, 4, relaxation=relaxation, temperature=0.5, reduction="none")
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), z), torch.autograd.grad(expected.sum(), z))
    loss = neighbors_loss(z, y, 4, relaxation=relaxation, temperature=0.5)
    torch.testing.assert_close(loss, got.mean())
    nearest = (torch.cdist(z, z) + torch.eye(20) * 1e9).topk(4, largest=False).indices
    hard = neighbors_loss(z, y, 4, relaxation=relaxation, temperature=1e-9, reduction="sum")
    torch.testing.assert_close(hard, (y[nearest] != y.unsqueeze(-1)).double().mean(-1).sum())


def test_the_loss_teaches_a_map_to_ignore_noise():
    """Two classes differ in one coordinate, and 19 others are larger noise: raw neighbours guess."""
    torch.manual_seed(0)
    y = torch.arange(200) % 2
    x = torch.randn(200, 20) * 3
    x[:, 0] = y * 2.0 - 1 + 0.3 * torch.randn(200)
    net = nn.Linear(20, 1, bias=False)
    before = neighbors_loss(x, y, 5, temperature=1e-6)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(200):
        loss = neighbors_loss(net(x), y, 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before > 0.3
    assert neighbors_loss(net(x), y, 5, temperature=1e-6) < 0.05
