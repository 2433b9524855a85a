"""The native search of cells against its eager twin, and against a search of one query at a time in float64."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from khot._math import tails
from khot.attention import Ball, KeyCells, certified_attention, certified_mask
from khot.kernels import _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)


class EagerBall(Ball):
    """A bound that the kernel does not know, so that its cells are searched by torch."""


problems = {
    "seed": st.integers(0, 10_000),
    "n": st.integers(1, 90),
    "d": st.sampled_from([1, 2, 7, 16, 40]),
    "size": st.integers(1, 9),
    "limit": st.sampled_from([0.3, 0.5, 1.0]),
    "epsilon": st.sampled_from([0.3, 0.05, 1e-4]),
    "sharp": st.sampled_from([0.1, 1.0, 4.0, 30.0]),
    "share": st.sampled_from([None, 0.9, 0.5, 0.0]),
}


def problem(seed, n, d, sharp, share, dtype):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(2, 1 + n // 6, d, generator=g, dtype=dtype)
    k = centres[:, torch.randint(1 + n // 6, (n,), generator=g)] + 0.1 * torch.randn(2, n, d, generator=g, dtype=dtype)
    q, v = (torch.randn(2, many, d, generator=g, dtype=dtype) for many in (5, n))
    mask = None if share is None else torch.rand(2, 5, n, generator=g) < share
    return sharp * q, k, v, mask


def grown(k, **options):
    """The cells of some keys, to which the others are appended."""
    first = max(1, k.shape[1] * 2 // 3)
    cells = KeyCells(k[:, :first], **options)
    if first < k.shape[1]:
        cells.append(k[:, first:])
    return cells


def one_by_one(q, cells, epsilon, mask):
    """k, bound, scored and refusal of each query (5 in each head), of a search that opens a cell at a time."""
    delta = (q.shape[-1] + 8 + cells.size) * 2.0**-52 * q.norm(dim=-1) * cells._largest[:, None]
    plan = cells._plan(q, torch.full(q.shape[:2], epsilon, dtype=torch.float64), mask, delta)
    limit, rows = int(cells.limit * cells.used), []
    for b in range(2):
        for i in range(5):
            index = cells._index[b]
            allowed = index >= 0 if mask is None else (index >= 0) & mask[b, i][index.clamp(min=0)]
            total, read = int(allowed[: cells.used].sum()), []
            shift, off = plan.shift[b, i], delta[b, i]
            for t in range(limit + 1):
                left, scores = plan.rest[b, i, t], torch.tensor(read, dtype=torch.float64)
                mass = (scores - shift - off).exp().sum()
                if t and len(read) and left <= epsilon * (1 - 2.0**-30) * (left + mass):
                    bounds = tails.read_bounds(scores.sort(descending=True).values[None], left.log()[None] + shift, off)
                    k = int((bounds[0] > epsilon).sum()) + 1
                    rows.append((k, float(bounds[0, k - 1]), len(read), False))
                    break
                if t < limit:
                    cell = int(plan.order[b, i, t])
                    read += (cells._keys[b, cell] @ q[b, i])[allowed[cell]].tolist()
            else:
                rows.append((total, 0.0, total, total > 1))
    return zip(*rows, strict=True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(**problems, path=st.sampled_from([_native.WIDE, _native.PORTABLE]))
def test_it_opens_the_cells_that_it_must_and_no_more(seed, n, d, size, limit, epsilon, sharp, share, path):
    q, k, v, mask = problem(seed, n, d, sharp, share, torch.float64)
    cells = grown(k, size=size, limit=limit)
    cells._catch_up()  # the last cell has a bound, too
    with patch.object(_native.attend, "__kwdefaults__", {"head": None, "path": path}):
        output, found = certified_attention(q, cells, v, epsilon=epsilon, mask=mask, scale=1.0)
        head, again = certified_mask(q, cells, epsilon=epsilon, mask=mask, scale=1.0)
    k_, bound, scored, refused = one_by_one(q, cells, epsilon, mask)
    assert found.k.flatten().tolist() == list(k_)
    torch.testing.assert_close(found.bound.flatten(), torch.tensor(bound, dtype=torch.float64), rtol=1e-6, atol=1e-300)
    assert found.scored.flatten().tolist() == list(scored)
    assert found.refused.flatten().tolist() == list(refused)
    assert all(torch.equal(a, b) for a, b in zip(found[:4], again[:4], strict=True))
    assert torch.equal(head.sum(-1), found.k)
    weights = (q @ k.mT).masked_fill(~head, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(output, weights @ v)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(**problems)
def test_it_is_as_sound_as_its_twin(seed, n, d, size, limit, epsilon, sharp, share):
    """In float32: the truth in float64 is within the bounds of both; the twin may read more, and then keep less."""
    q, k, v, mask = problem(seed, n, d, sharp, share, torch.float32)
    scores = q.double() @ k.double().mT
    p = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1).nan_to_num(0.0)
    found = []
    for bound in (Ball, EagerBall):
        cells = grown(k, size=size, limit=limit, bound=bound)
        head, certificate = certified_mask(q, cells, epsilon=epsilon, mask=mask, scale=1.0)
        tail = (p * ~head).sum(-1)
        assert ((tail <= certificate.bound) | (p.sum(-1) == 0)).all()
        assert (certificate.bound <= epsilon).all()
        found.append(certificate)
        output, _ = certified_attention(q, cells, v, epsilon=epsilon, mask=mask, scale=1.0)
        kept = p * head
        exact = kept / kept.sum(-1, keepdim=True).clamp(min=1e-300) @ v.double()
        torch.testing.assert_close(output.double(), exact, rtol=1e-3, atol=1e-3)
    ours, twin = found
    assert (ours.refused & ~twin.refused).double().mean() <= 0.1  # a mass that rounding decides is rare
    assert (ours.scored <= twin.scored + size)[~ours.refused & ~twin.refused].all()  # and the cell without a bound


def test_subclasses_and_gradients_are_left_to_torch():
    q, k, v, _ = problem(0, 60, 8, 3.0, None, torch.float32)
    with patch.object(_native, "attend", side_effect=AssertionError("the kernel was called")):
        certified_attention(q, KeyCells(k, size=4, bound=EagerBall), v, epsilon=0.1)
        output, _ = certified_attention(q, KeyCells(k, size=4), v.requires_grad_(), epsilon=0.1)
        with pytest.raises(AssertionError, match="the kernel was called"):
            certified_attention(q, KeyCells(k, size=4), v.detach(), epsilon=0.1)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    torch.testing.assert_close(gradient.sum(), torch.tensor(10.0 * 8))  # weights of ten queries, eight features


def test_strides_threads_and_no_rows():
    q, k, v, _ = problem(1, 80, 8, 3.0, None, torch.float32)
    cells = KeyCells(k, size=8)
    expected, found = certified_attention(q, cells, v, epsilon=0.1)
    wide = torch.randn(2, 100, 16)
    wide[:, :80, ::2] = v
    cache = torch.randn(2, 100, 8)
    cache[:, :80] = v
    for values in (wide[:, :80, ::2], cache[:, :80]):
        assert not values.is_contiguous()
        assert torch.equal(certified_attention(q, cells, values, epsilon=0.1)[0], expected)
    assert torch.equal(certified_attention(q.mT.contiguous().mT, cells, v, epsilon=0.1)[0], expected)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        several, again = certified_attention(q.repeat(1, 300, 1), cells, v, epsilon=0.1)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(several, expected.repeat(1, 300, 1))
    assert torch.equal(again.bound, found.bound.repeat(1, 300))
    output, none = certified_attention(q[:0], KeyCells(k[:0], size=8), v[:0], epsilon=0.1)
    assert output.shape == (0, 5, 8)
    assert none.k.shape == (0, 5)


def test_no_memory_is_an_error():
    q, k, v, _ = problem(1, 20, 8, 3.0, None, torch.float32)
    cells = KeyCells(k, size=8)
    with patch.object(_native, "LIBRARY") as library:
        library.khot_attend.return_value = 1
        with pytest.raises(MemoryError, match="use fewer threads"):
            certified_attention(q, cells, v, epsilon=0.1)
