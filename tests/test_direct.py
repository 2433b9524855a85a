"""The call without the dispatcher, for a plain tensor and two numbers: the same results, and only where it may be."""

import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import khot
from khot import kernels
from khot._math import threshold
from khot.kernels import _native
from khot.relaxations import _threshold

DOUBLE = torch.float64
needs_native = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)


def through_the_op(x, k, temperature):
    """The same call with tensors, which always asks the dispatcher."""
    return khot.sigmoid_topk(x, torch.tensor(k, dtype=DOUBLE), temperature=torch.tensor(temperature, dtype=DOUBLE))


def gradient(fn, x, upstream):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(fn(x), x, upstream)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(9,), (16, 64), (2, 3, 300), (1, 70_000), (0, 9), (4, 0)], ids=str)
def test_same_bits_as_through_the_op(shape, dtype):
    x, upstream = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    k = shape[-1] / 3
    for temperature in (1, 0.03, 1e-60):
        assert torch.equal(khot.sigmoid_topk(x, k, temperature=temperature), through_the_op(x, k, temperature))
    got, expected = (
        gradient(fn, x, upstream) for fn in (lambda t: khot.sigmoid_topk(t, k), lambda t: through_the_op(t, k, 1.0))
    )
    assert torch.equal(got, expected)


@needs_native
def test_what_is_plain():
    x = torch.randn(4, 9)
    assert kernels.is_plain(x, torch.nn.Parameter(x), x[:, ::2])
    with torch.inference_mode():
        assert kernels.is_plain(x, torch.randn(3))
    negative = torch.randn(9, 1, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert not kernels.is_plain(negative)
    assert not kernels.is_plain(x, x.to("meta"))
    assert not kernels.is_plain(x.to_sparse())
    with FakeTensorMode() as mode:
        assert not kernels.is_plain(mode.from_tensor(x))
    with torch.autograd.forward_ad.dual_level():
        assert not kernels.is_plain(x)
    seen = []
    vmap(lambda row: seen.append(kernels.is_plain(x)) or row)(x)
    assert seen == [False]


class Ops(TorchDispatchMode):
    """Notes the ops that pass."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_modes_and_transforms_see_the_op():
    x = torch.randn(4, 9)
    expected = khot.sigmoid_topk(x, 2)
    with Ops() as ops:
        assert torch.equal(khot.sigmoid_topk(x, 2), expected)
    assert "khot::topk" in ops.names
    with FakeTensorMode() as mode:
        assert khot.sigmoid_topk(mode.from_tensor(x), 2).shape == (4, 9)
    assert torch.equal(vmap(lambda row: khot.sigmoid_topk(row, 2))(x), expected)
    torch.testing.assert_close(grad(lambda t: khot.sigmoid_topk(t, 2)[:, 0].sum())(x).sum(-1), torch.zeros(4))
    negative = torch.randn(9, 1, dtype=torch.complex64).conj().imag
    assert torch.equal(khot.sigmoid_topk(negative, 0.5), torch.full((9, 1), 0.5))
    assert torch.equal(torch.compile(lambda t: khot.sigmoid_topk(t, 2), backend="eager", fullgraph=True)(x), expected)


@needs_native
def test_numbers_take_the_short_way():
    x = torch.randn(4, 9, requires_grad=True)
    with patch.object(_threshold, "relax", side_effect=AssertionError("the long way")):
        khot.sigmoid_topk(x, 2).sum().backward()
        with pytest.raises(AssertionError, match="the long way"):
            khot.sigmoid_topk(x, 2, mask=torch.ones(9, dtype=torch.bool))


def test_batched_and_double_backward():
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    y = khot.sigmoid_topk(x, 2)
    upstream = torch.randn(5, 3, 7, dtype=torch.float64)
    (batched,) = torch.autograd.grad(y, x, upstream, is_grads_batched=True, retain_graph=True)
    one_by_one = torch.stack([torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in upstream])
    torch.testing.assert_close(batched, one_by_one)
    assert torch.autograd.gradgradcheck(lambda t: khot.sigmoid_topk(t, 2, temperature=0.5), (x,))


def test_the_solver_of_other_devices_reads_nothing_on_the_host():
    class NoReads(Ops):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name()
            if name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"):
                raise AssertionError(f"{name} reads on the host")
            return super().__torch_dispatch__(func, types, args, kwargs)

    x, k, one = torch.randn(3, 40), torch.full((3,), 5.0).double(), torch.ones(3).double()
    with NoReads():
        fixed = threshold.topk(x, k, one, None, 0, 0.0, early_stop=False)
        threshold.margin(x, k, one, torch.ones(3, 40, dtype=torch.bool), None, 0, 0.0, early_stop=False)
        with pytest.raises(AssertionError, match="reads on the host"):
            threshold.topk(x, k, one, None, 0, 0.0, early_stop=True)
    torch.testing.assert_close(fixed, khot.sigmoid_topk(x, 5), rtol=0, atol=1e-6)


@needs_native
def test_plain_means_on_the_cpu_whatever_the_default_device_is():
    code = (
        "import torch; torch.set_default_device('meta'); import khot; x = torch.randn(3, 4); "
        "assert not khot.kernels.is_plain(x); assert khot.sigmoid_topk(x, 2).is_meta"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
