"""What makes a training step fast gives the numbers of the plain way."""

import pytest
import torch
from sae_cases import data, make

from khot import _torch
from khot._sparse import weighted_rows
from khot.nn import selectors
from khot.nn.sae._axes import _top
from khot.nn.sae._code import decoded


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
    results = []
    for of in (decoded, weighted_rows):
        out = of(rows, columns, values, weight, 6)
        results.append((out, *torch.autograd.grad((out * up).sum(), (values, weight))))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    assert (results[0][1][values == 0] != 0).all()  # what is not chosen learns too


@pytest.mark.parametrize("selector", [selectors.hard, selectors.straight_through])
def test_the_origins_gradient_is_that_of_the_inputs_summed(selector):
    sae, x = make(selector).double(), data().double().requires_grad_()
    code = sae.encode(x)
    code.values.square().sum().backward()
    torch.testing.assert_close(sae.b_dec.grad, -(x.grad * sae.scale).sum(0))
