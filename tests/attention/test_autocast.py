"""Certificates are computed in full precision under autocast: a bound from bfloat16 products would not hold."""

import pytest
import torch

from khot import attention as at

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
VALUES = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
TAIL = torch.tensor([0.1])
HEAD = torch.arange(64) < 9


def clustered(d=8, n=600):
    """Keys in narrow clusters far from the origin, where bfloat16 loses what tells them apart, and queries."""
    g = torch.Generator().manual_seed(5)
    centres = torch.randn(12, d, generator=g) * 3 + 10
    keys = centres[torch.randint(12, (n,), generator=g)] + 0.05 * torch.randn(n, d, generator=g)
    return torch.randn(6, d, generator=g) * 2, keys


def attend(cells, **options):
    q, keys = clustered()
    values = torch.randn(len(keys), 3, generator=torch.Generator().manual_seed(2))
    output, found = at.certified_attention(q, at.KeyCells(keys) if cells else keys, values, **options)
    return output, *found[:4]


def masked(cells):
    q, keys = clustered()
    head, found = at.certified_mask(q, at.KeyCells(keys) if cells else keys, epsilon=0.05)
    return head, *found[:4]


def bound_of(kind):
    q, keys = clustered()
    part = keys.view(1, -1, 8, 8)
    stats = kind.fit(part, torch.ones(part.shape[:-1], dtype=torch.bool), part.mean(-2))
    scores = (q[:, None] * part.mean(-2)).sum(-1)  # not a product that autocast rounds
    return *stats, *stats.spread(q[None], scores[None])


def cells(bound=at.Ball):
    q, keys = clustered()
    made = at.KeyCells(keys, bound=bound)
    made.append(keys[:70])
    search = made.search(q[None], torch.full((1, 6), 0.05).double(), None, torch.full((1, 6), 1e-4).double())
    return made._keys, made._centre, *made._stats, *made.dense(q, 0), *(() if search is None else search)


CALLS = {
    "Ball": lambda: bound_of(at.Ball),
    "Box": lambda: bound_of(at.Box),
    "Certificate": lambda: attend(False, output_epsilon=0.05),
    "KeyCells": lambda: (*cells(), *cells(at.Box)),
    "block_mask": lambda: (at.block_mask(torch.eye(256, dtype=torch.bool)[None, None]).to_dense(),),
    "blockwise": lambda: (at.blockwise(X[:, :8], X[:, 8:], counts=torch.full((56,), 9)),),
    "certified_attention": lambda: (*attend(False, epsilon=0.05), *attend(True, epsilon=0.05)),
    "certified_mask": lambda: (*masked(False), *masked(True)),
    "diameter_bound": lambda: (at.diameter_bound(TAIL, VALUES, HEAD),),
    "gaussian_share": lambda: (torch.tensor(at.gaussian_share(2.0, 0.01)),),
    "known_head": lambda: (at.known_head(X, 8),),
    "multi_gap": lambda: (at.multi_gap(X, 8),),
    "norm_bound": lambda: (at.norm_bound(TAIL, VALUES),),
    "output_error": lambda: (at.output_error(X, VALUES, 8),),
    "single_gap": lambda: (at.single_gap(X, 8),),
    "smallest_k": lambda: (at.smallest_k(X, 0.1),),
    "tail_mass": lambda: (at.tail_mass(X, 8),),
    "truncation_kl": lambda: (at.truncation_kl(X, 8),),
    "variance_bound": lambda: (at.variance_bound(TAIL, VALUES, X.softmax(-1)),),
}


@pytest.mark.parametrize("name", sorted(set(at.__all__) - {"CellBound"}))  # a protocol
def test_a_public_function_gives_the_same_with_autocast_and_without(name):
    plain = CALLS[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.eye(2) @ torch.eye(2)).dtype == torch.bfloat16, "autocast is on"
        cast = CALLS[name]()
    assert len(plain) == len(cast)
    for a, b in zip(plain, cast, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bound", [at.Ball, at.Box])
def test_cells_built_under_autocast_give_no_false_certificate(bound):
    """They did: a bound of 0.05 where 0.998 of the mass was dropped."""
    q, keys = clustered()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = at.KeyCells(keys, bound=bound)
    head, found = at.certified_mask(q, made, epsilon=0.05)
    exact = torch.softmax(q.double() @ keys.double().T / 8**0.5, -1)
    assert bool(((exact * ~head).sum(-1) <= found.bound + 1e-9).all())
