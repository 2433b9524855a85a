"""Cells of keys: their bounds hold, they grow with a cache, and the search opens no more than it must."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khot.attention import Ball, Box, KeyCells, certified_attention, certified_mask

BOUNDS = [Ball, Box]
bounds = pytest.mark.parametrize("bound", BOUNDS)


def cells_of(keys, size=8):
    """Keys (n, d) as cells (1, n/size, size, d), their means, and that all are keys."""
    part = keys.view(1, -1, size, keys.shape[-1])
    return part, torch.ones(part.shape[:-1], dtype=torch.bool), part.mean(-2)


def violations(bound, keys, q, shrink=1.0):
    """How many cells have a score, or a mean of e^score, above its bound, which was made for a smaller cell."""
    part, valid, centre = cells_of(keys)
    stats = bound.fit(centre.unsqueeze(-2) + shrink * (part - centre.unsqueeze(-2)), valid, centre)
    most, mean = stats.spread(q.unsqueeze(0), (q @ centre[0].T).unsqueeze(0))
    x = q @ (part - centre.unsqueeze(-2)).mT.squeeze(0)  # (cells, rows, size)
    x = x.transpose(0, 1)
    slack = 1e-9 * (1 + x.abs().amax(-1))
    log_mean = x.logsumexp(-1) - torch.tensor(float(x.shape[-1])).log()
    return int(((x.amax(-1) > most[0] + slack) | (log_mean > mean[0] + slack)).sum())


def vectors(many, d, seed, kind="normal"):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(many, d, dtype=torch.float64, generator=g)
    if kind == "line":  # all of the variance in one direction: the worst case of a ball
        return x[:, :1] * torch.randn(d, dtype=torch.float64, generator=g)
    if kind == "outlier":
        x[::8] *= 50
    return x


@bounds
@pytest.mark.parametrize("kind", ["normal", "line", "outlier"])
@pytest.mark.parametrize("d", [1, 3, 32])
def test_no_key_is_above_the_bound_of_its_cell(bound, kind, d):
    keys = vectors(800, d, 0, kind)
    for scale in (0.01, 1.0, 10.0):
        assert violations(bound, keys, scale * vectors(50, d, 1)) == 0
        along = keys.view(-1, 8, d)
        along = scale * (along[:, 0] - along.mean(1))  # queries that point to a key from its mean
        assert violations(bound, keys, along) == 0


@bounds
def test_a_cell_that_is_too_small_is_caught(bound):
    """The negative control: numbers that were made for cells of .9 times the size."""
    keys = vectors(800, 3, 0)
    q = keys.view(-1, 8, 3)
    q = q[:, 0] - q.mean(1)
    assert violations(bound, keys, q, shrink=0.9) > 10


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=2), min_size=1, max_size=24),
    st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=2),
    st.integers(1, 6),
    st.sampled_from(BOUNDS),
)
def test_the_search_is_sound_by_hypothesis(keys, query, size, bound):
    k, q = torch.tensor(keys), torch.tensor([query])
    for limit in (0.5, 1.0):
        head, found = certified_mask(q, KeyCells(k, size=size, bound=bound, limit=limit), epsilon=0.2, scale=1.0)
        p = (q.double() @ k.double().T).softmax(-1)
        tail = float((p * ~head).sum())
        assert tail <= float(found.bound) <= 0.2
        assert int(head.sum()) == int(found.k) <= int(found.scored) <= len(keys)


@bounds
def test_appended_keys_are_searched(bound):
    keys = vectors(300, 6, 0).float().view(2, 150, 6)
    grown = KeyCells(keys[:, :100], size=7, bound=bound, limit=1.0)
    for start, stop in ((100, 101), (101, 103), (103, 140), (140, 150)):
        grown.append(keys[:, start:stop])
    assert len(grown) == 150
    whole = KeyCells(keys, size=7, bound=bound, limit=1.0)
    q = 3 * vectors(40, 6, 1).float().view(2, 20, 6)
    p = (q.double() @ keys.double().mT * 6**-0.5).softmax(-1)
    for cells in (grown, whole):
        head, found = certified_mask(q, cells, epsilon=0.05)
        assert ((p * ~head).sum(-1) <= found.bound).all()
        assert (found.bound <= 0.05).all()
        assert (head.sum(-1) == found.k).all()
    held = [set(row[row >= 0].tolist()) for row in grown._index[:, : grown.used].flatten(1)]
    assert held == [set(range(150))] * 2


def test_the_cells_of_one_append_are_those_of_many():
    keys = vectors(64, 4, 0).float()
    one, many = KeyCells(keys[:10], size=5), KeyCells(keys[:10], size=5)
    one.append(keys[10:])
    for key in keys[10:]:
        many.append(key[None])
    assert (one.used, one._open) == (many.used, many._open)
    for a, b in zip((one._keys, *one._stats), (many._keys, *many._stats), strict=True):
        torch.testing.assert_close(a[:, : one.used], b[:, : many.used])


def test_near_keys_are_in_one_cell_and_few_cells_are_opened():
    """64 tight clusters, and queries that want one of them: 1/64 of the keys is read, and a sixteenth is allowed."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(64, 16, generator=g)
    keys = centres.repeat_interleave(32, 0) + 0.01 * torch.randn(2048, 16, generator=g)
    keys = keys[torch.randperm(2048, generator=g)]
    q = 3 * centres[:20]
    _, found = certified_mask(q, KeyCells(keys, size=32), epsilon=0.01, scale=1.0)
    assert not found.refused.any()
    assert found.scored.double().mean() < 2048 / 16
    shuffled = KeyCells(keys[:1], size=32)  # cells in the order of arrival: the same keys, and no cell is small
    shuffled.append(keys[1:])
    assert certified_mask(q, shuffled, epsilon=0.01, scale=1.0)[1].refused.double().mean() > 0.9


def spread_keys():
    """Keys in cells of two; the bound of the second is 1000 above its scores, which are 20 below the largest."""
    keys = torch.tensor([[-100.0, 0], [-100, 0], [0, 500], [0, -500], [10, 0], [10, 0], [1, 0], [1, 0]])
    cells = KeyCells(keys[:2], size=2, limit=1.0)
    cells.append(keys[2:])
    return keys, cells


def test_a_cell_whose_bound_is_far_too_high_does_not_hide_the_others():
    """The masses of all other cells underflowed, and two keys without any mass were certified."""
    keys, cells = spread_keys()
    q = torch.tensor([[2.0, 0.0]])
    head, found = certified_mask(q, cells, epsilon=0.1, scale=1.0)
    tail = (((q @ keys.T).double()).softmax(-1) * ~head).sum()
    assert tail <= found.bound <= 0.1


def test_a_flat_row_is_refused():
    keys = torch.zeros(64, 4)
    _, found = certified_mask(torch.ones(1, 4), KeyCells(keys, size=4), epsilon=0.1)
    assert (found.refused, found.k, found.scored, found.bound) == (True, 64, 64, 0.0)


def test_bad_input():
    cells = KeyCells(torch.randn(2, 10, 4), size=4)
    with pytest.raises(ValueError, match=r"`keys` must have the shape \(2, 3, 4\); got \(3, 4\)"):
        cells.append(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"`keys` must have the shape \(…, m, d\) with m, d ≥ 1"):
        KeyCells(torch.randn(0, 4))
    with pytest.raises(ValueError, match="`size` must be ≥ 1"):
        KeyCells(torch.randn(3, 4), size=0)
    with pytest.raises(ValueError, match="`limit` must satisfy 0 ≤ limit ≤ 1"):
        KeyCells(torch.randn(3, 4), limit=2)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_a_trace_would_open_the_cells_of_its_example_for_every_query():
    keys, q = torch.randn(1, 40, 8), torch.randn(1, 3, 8)
    cells = KeyCells(keys, size=8)
    for call in (certified_mask, lambda q, k, epsilon: certified_attention(q, k, keys, epsilon=epsilon)):
        with pytest.raises(NotImplementedError, match="Which cells are opened depends on the values"):
            torch.jit.trace(lambda t, call=call: call(t, cells, epsilon=0.1)[0], q, check_trace=False)
