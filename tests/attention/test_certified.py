"""Certified attention is within ε of attention to all keys: rules, cells, masks, grouped queries, dtypes."""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from khot.attention import (
    Ball,
    Box,
    KeyCells,
    block_mask,
    certified_attention,
    certified_mask,
    known_head,
    multi_gap,
    single_gap,
    smallest_k,
    tail_mass,
)


class EagerBall(Ball):
    """A bound that the kernel does not know, so that its cells are searched by torch."""


WAYS = {
    "tail mass": {"certificate": tail_mass},
    "known head": {"certificate": known_head},
    "multi gap": {"certificate": partial(multi_gap, further=8)},
    "single gap": {"certificate": single_gap},
    "balls": {"cells": partial(KeyCells, size=4, limit=1.0)},
    "balls, half": {"cells": partial(KeyCells, size=4)},
    "balls, by torch": {"cells": partial(KeyCells, size=4, bound=EagerBall)},
    "boxes": {"cells": partial(KeyCells, size=4, bound=Box)},
}
ways = pytest.mark.parametrize("way", WAYS)


def problem(seed=0, q_heads=4, kv_heads=4, queries=12, n=60, d=8, dtype=torch.float32, sharp=4.0):
    g = torch.Generator().manual_seed(seed)
    q = sharp * torch.randn(2, q_heads, queries, d, generator=g, dtype=dtype)
    k = torch.randn(2, kv_heads, n, d, generator=g, dtype=dtype)
    return q, k, torch.randn(2, kv_heads, n, 5, generator=g, dtype=dtype)


def softmax(q, k, mask=None, scale=None):
    """The weights in float64; (…, queries, n)."""
    k = k.double().repeat_interleave(q.shape[-3] // k.shape[-3], -3) if q.ndim > 2 else k.double()
    s = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (s if mask is None else s.masked_fill(~mask, -torch.inf)).softmax(-1).nan_to_num(0.0)


def check(q, k, v, way, epsilon, mask=None, scale=None):
    """Attend in a way; assert that all is as it says, and return the certificate."""
    options = dict(WAYS[way])
    keys = options.pop("cells")(k) if "cells" in options else k
    options |= {"epsilon": epsilon, "mask": mask, "scale": scale}
    output, found = certified_attention(q, keys, v, **options)
    head, again = certified_mask(q, keys, **options)
    p = softmax(q, k, mask, scale)
    tail = (p * ~head).sum(-1)
    assert (tail <= found.bound).all()
    assert (found.bound <= epsilon).all()
    kept = p * head
    kept = kept / kept.sum(-1, keepdim=True).clamp(min=1e-300)
    assert ((p - kept).abs().sum(-1) / 2 <= epsilon + 1e-12).all() or (p.sum(-1) == 0).any()
    values = v.double().repeat_interleave(q.shape[-3] // v.shape[-3], -3) if q.ndim > 2 else v.double()
    torch.testing.assert_close(output, (kept @ values).to(q.dtype), rtol=1e-4, atol=1e-4)
    assert torch.equal(head.sum(-1), found.k)
    allowed = torch.full(p.shape[:-1], p.shape[-1]) if mask is None else mask.expand(p.shape).sum(-1)
    assert torch.equal(found.k[found.refused], allowed[found.refused])
    assert (found.bound[found.refused] == 0).all()
    assert (found.k <= found.scored).all()
    assert (found.scored <= allowed).all()
    assert torch.equal(found.k, again.k)
    return found


@ways
@pytest.mark.parametrize("epsilon", [0.3, 0.01])
def test_within_epsilon(way, epsilon):
    q, k, v = problem()
    found = check(q, k, v, way, epsilon)
    if way == "tail mass":
        assert torch.equal(found.k, smallest_k(softmax(q, k).log(), epsilon))
    check(*problem(dtype=torch.float64), way, epsilon)
    check(*problem(sharp=100.0), way, epsilon)  # scores in the hundreds


@ways
def test_masks(way):
    q, k, v = problem(queries=60)
    causal = torch.ones(60, 60, dtype=torch.bool).tril()
    padding = torch.ones(2, 1, 1, 60, dtype=torch.bool)
    padding[0, ..., :25] = False  # on the left: the first queries see nothing
    for mask in (causal, padding, causal & padding):
        found = check(q, k, v, way, 0.05, mask)
    assert found.k[0, :, 0].eq(0).all()
    options = dict(WAYS[way])
    keys = options.pop("cells")(k) if "cells" in options else k
    output, _ = certified_attention(q, keys, v, epsilon=0.05, mask=causal & padding, **options)
    assert (output[0, :, :25] == 0).all()  # as from torch
    torch.testing.assert_close(sdpa(q, k, v, attn_mask=causal & padding)[0, :, :25], output[0, :, :25])


@ways
def test_grouped_queries(way):
    q, k, v = problem(q_heads=6, kv_heads=2)
    check(q, k, v, way, 0.05)
    mask = torch.rand(2, 6, 12, 60, generator=torch.Generator().manual_seed(1)) < 0.8
    check(q, k, v, way, 0.05, mask)
    check(q[0, 0], k[0, 0], v[0, 0], way, 0.05, scale=1.0)  # without a batch


def test_half_precision_and_a_tensor_of_epsilons():
    q, k, v = problem()
    for dtype in (torch.bfloat16, torch.float16):
        output, found = certified_attention(q.to(dtype), k.to(dtype), v.to(dtype), epsilon=0.05)
        assert output.dtype == dtype
        head, _ = certified_mask(q.to(dtype), k.to(dtype), epsilon=0.05)
        assert ((softmax(q.to(dtype), k.to(dtype)) * ~head).sum(-1) <= found.bound).all()
    each = torch.tensor([0.5, 0.1, 0.01, 0.001])[:, None]  # for each head
    head, found = certified_mask(q, k, epsilon=each)
    assert (found.bound <= each).all()
    assert (found.k.double().mean((0, 2)).diff() > 0).all()


@ways
def test_the_output_is_within_its_budget(way):
    q, k, v = problem(seed=3)
    exact = softmax(q, k) @ v.double()
    options = dict(WAYS[way])
    keys = options.pop("cells")(k) if "cells" in options else k
    sizes = []
    for budget in (1.0, 0.1, 1e-3):
        output, found = certified_attention(q, keys, v, output_epsilon=budget, **options)
        error = (output - exact).norm(dim=-1)
        assert (error <= found.output_bound + 1e-5).all()
        assert (found.output_bound <= budget).all()
        sizes.append(found.k.double().mean())
    assert sizes[0] <= sizes[1] <= sizes[2]


def test_rounding_of_the_scores_is_on_the_safe_side():
    """In float32 and with scores in the thousands, the computed tail mass is off; the bound is not below the truth."""
    g = torch.Generator().manual_seed(0)
    q, k = 300 * torch.randn(400, 64, generator=g), 30 + torch.randn(50, 64, generator=g)
    head, found = certified_mask(q, k, epsilon=0.4)
    exact = (softmax(q, k) * ~head).sum(-1)
    assert (exact <= found.bound).all()
    naive = (((q * 64**-0.5) @ k.T).softmax(-1) * ~head).sum(-1)
    assert (naive.double() < exact).any()  # the negative control


def test_as_masks_of_torch():
    q, k, v = problem()
    head, _ = certified_mask(q, k, epsilon=0.05)
    expected, _ = certified_attention(q, k, v, epsilon=0.05)
    torch.testing.assert_close(sdpa(q, k, v, attn_mask=head), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # FlexAttention warns that it is not compiled
def test_as_a_block_mask_of_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = problem(queries=256, n=256, sharp=20.0)
    head, _ = certified_mask(q, k, epsilon=0.05, mask=torch.ones(256, 256, dtype=torch.bool).tril())
    blocks = block_mask(head)
    assert blocks.sparsity() == 25.0  # of four blocks, the one above the diagonal
    by_flex = flex_attention(q, k, v, block_mask=blocks)
    torch.testing.assert_close(by_flex, sdpa(q, k, v, attn_mask=head), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="`head` must be boolean"):
        block_mask(head.float())


def test_gradients_are_those_of_the_head():
    q, k, v = (t.double().requires_grad_() for t in problem(queries=3, n=20))
    head, _ = certified_mask(q, k, epsilon=0.1)
    mine = torch.autograd.grad(certified_attention(q, k, v, epsilon=0.1)[0].square().sum(), (q, k, v))
    theirs = torch.autograd.grad(sdpa(q, k, v, attn_mask=head).square().sum(), (q, k, v))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@ways
def test_nan_stays_in_its_query(way):
    q, k, v = problem()
    q[0, 0, 0, 0] = torch.nan
    q[1, 2, 3] = torch.inf  # scores of +inf have no softmax
    k[1, 2, 0] = 1.0
    options = dict(WAYS[way])
    keys = options.pop("cells")(k) if "cells" in options else k
    output, found = certified_attention(q, keys, v, epsilon=0.1, **options)
    is_nan = torch.zeros(2, 4, 12, dtype=torch.bool)
    is_nan[0, 0, 0] = is_nan[1, 2, 3] = True
    assert torch.equal(output.isnan().any(-1), is_nan)
    assert torch.equal(found.bound.isnan(), is_nan)


def test_many_rows_are_computed_in_parts(monkeypatch):
    q, k, v = problem()
    output, found = certified_attention(q, k, v, epsilon=0.05)
    monkeypatch.setattr("khot.attention._attend.CHUNK", 1000)
    again, parts = certified_attention(q, k, v, epsilon=0.05)
    torch.testing.assert_close(again, output)
    assert torch.equal(parts.k, found.k)
    check(q, k, v, "balls", 0.05)


def test_a_certificate_of_ones_own():
    q, k, v = problem()

    def half_of_the_keys(scores, k=None, *, mask=None):
        """The last half of the sorted scores has at most half of the mass."""
        places = torch.arange(1, scores.shape[-1] + 1)
        return (1.0 - places / scores.shape[-1]).double().expand(scores.shape)

    _, found = certified_attention(q, k, v, epsilon=0.5, certificate=half_of_the_keys)
    assert (found.k >= 30).all()
    assert (found.k <= 31).all()


def test_bad_input():
    q, k, v = problem()
    for epsilon in (0.0, 1.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="`epsilon` must satisfy 0 < epsilon < 1"):
            certified_attention(q, k, v, epsilon=epsilon)
    for options in ({}, {"epsilon": 0.1, "output_epsilon": 0.1}):
        with pytest.raises(ValueError, match="Give one of `epsilon`"):
            certified_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="`output_epsilon` must be > 0"):
        certified_attention(q, k, v, output_epsilon=-1.0)
    with pytest.raises(TypeError, match="`mask` must be boolean"):
        certified_attention(q, k, v, epsilon=0.1, mask=torch.zeros(12, 60))
    with pytest.raises(ValueError, match="`q` must have 8 features"):
        certified_attention(q[..., :7], k, v, epsilon=0.1)
    with pytest.raises(ValueError, match=r"`v` must have the shape \(…, 60, e\)"):
        certified_attention(q, k, v[..., :59, :], epsilon=0.1)
    with pytest.raises(ValueError, match="`q` and `k` must have equal batch shapes"):
        certified_attention(q[:, :3], k, v, epsilon=0.1)
    with pytest.raises(ValueError, match="`certificate` must be left out"):
        certified_attention(q, KeyCells(k), v, epsilon=0.1, certificate=known_head)
    with pytest.raises(ValueError, match="`k` must have the batch shape of `q`"):
        certified_attention(q[:, :3], KeyCells(k), v, epsilon=0.1)
    with pytest.raises(ValueError, match="`epsilon` must broadcast to the queries"):
        certified_attention(q, k, v, epsilon=torch.tensor([0.1, 0.1, 0.1]))
