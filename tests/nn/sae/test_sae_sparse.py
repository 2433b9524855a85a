"""What makes a training step fast gives the numbers of the plain way."""

import pytest
import torch
from sae_cases import TOKENS, K, data, make

from khot import _torch
from khot._sparse import weighted_rows
from khot.nn import selectors
from khot.nn.sae._axes import _top
from khot.nn.sae._code import Places, decoded


@pytest.mark.parametrize("shape", [(5, 4096), (3, 16383), (0, 4096), (4, 64), (6, 4099)])
@pytest.mark.parametrize("count", [1, 7, 33])
def test_the_largest_by_groups_are_those_of_topk(shape, count):
    a = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).round().div(3)  # ties
    values, places = _top(a, count)
    assert torch.equal(values.sort(descending=True).values, a.topk(count).values)
    assert torch.equal(a.gather(1, places), values)
    assert not len(a) or all(len(set(row)) == count for row in places.tolist())


def test_nan_is_among_the_largest():
    a = torch.randn(2, 4096)
    a[0, 17] = torch.nan
    assert _top(a, 3)[0].isnan().sum(1).tolist() == [1, 0]


def test_products_of_entries_without_the_private_name(monkeypatch):
    a, b = torch.randn(7, 5), torch.randn(9, 5)
    rows, columns = torch.randint(7, (20,)), torch.randint(9, (20,))
    expected = (a @ b.t())[rows, columns]
    torch.testing.assert_close(_torch.entry_products(a, b, rows, columns), expected)
    monkeypatch.setattr(_torch, "_products", None)
    torch.testing.assert_close(_torch.entry_products(a, b, rows, columns), expected)


def test_decoding_that_skips_zeros_has_the_same_value_and_gradients():
    rows = torch.arange(6).repeat_interleave(4)
    columns, weight = torch.randint(10, (24,)), torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    values = (torch.randn(24, dtype=torch.float64) * (torch.arange(24) % 3 > 0)).requires_grad_()
    up = torch.randn(6, 3, dtype=torch.float64)
    outs = decoded(Places(rows, columns, 10), values, weight, 6), weighted_rows(rows, columns, values, weight, 6)
    results = [(out, *torch.autograd.grad((out * up).sum(), (values, weight))) for out in outs]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    assert (results[0][1][values == 0] != 0).all()  # what is not chosen learns too


@pytest.mark.parametrize("selector", [selectors.hard, selectors.straight_through])
def test_the_origins_gradient_is_that_of_the_inputs_summed(selector):
    sae, x = make(selector).double(), data().double().requires_grad_()
    code = sae.encode(x)
    code.values.square().sum().backward()
    torch.testing.assert_close(sae.b_dec.grad, -(x.grad * sae.scale).sum(0))


def test_a_selector_says_how_many_candidates_it_needs_unless_the_config_does():
    def entries(selector, **changes):
        return len(make(selector, **changes).encode(data()).values)

    assert entries(selectors.straight_through) == 2 * K * TOKENS
    assert entries(selectors.soft) == 4 * K * TOKENS
    for selector in (selectors.straight_through, selectors.soft):
        assert entries(selector, candidates=3) == 3 * K * TOKENS
    assert entries(selectors.hard, candidates=3) == K * TOKENS
    with pytest.raises(TypeError, match="`candidates` must be a number or None; got str"):
        make(candidates="4")


def test_autocast_rounds_the_encoders_product_and_nothing_else():
    sae, x = make(selectors.hard), data()
    with torch.autocast("cpu", torch.bfloat16):
        half = sae.encode(x)
        assert torch.equal(sae.double().encode(x.double()).values, sae.encode(x.double()).values)
        assert sae.encode(x.double()).values.dtype == torch.float64
    exact = sae.float().encode(x)
    assert half.values.dtype == torch.float32
    assert torch.equal(half.values, half.values.bfloat16().float())  # the scale is a power of two
    assert not torch.equal(exact.values, exact.values.bfloat16().float())  # a negative control
