"""The short cut around the dispatcher: the same results, and only where it may be taken."""

import subprocess
import sys
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import khot
from khot._math import cdfs, threshold
from khot.ops import _topk as ops

DOUBLE = torch.float64
needs_native = pytest.mark.skipif(not ops.HAS_NATIVE, reason="the native library is not built")


@contextmanager
def no_short_cut():
    """Send every call through the dispatcher."""
    with no_direct_calls(), patch.object(ops, "is_plain", lambda *values: False):
        yield


@contextmanager
def no_direct_calls():
    """Send every call through the checks, and to the library through ctypes."""
    with patch.object(khot.ops, "direct_topk", decline), patch.object(ops, "_direct_pull", decline):
        yield


def decline(*arguments):
    return None


def gradient(fn, x, upstream):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(fn(x), x, upstream)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(9,), (16, 64), (2, 3, 300), (1, 70_000), (0, 9), (4, 0)], ids=str)
@pytest.mark.parametrize("fn", [khot.sigmoid_topk, khot.laplace_topk, khot.euclidean_topk])
def test_the_short_cut_gives_the_same_bits(fn, shape, dtype):
    x, upstream = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    k, mask = shape[-1] / 3, torch.rand(shape) > 0.3
    for temperature in (1, 0.03, 1e-60, torch.tensor(0.5), torch.tensor(1e-60).double()):
        for given in (None, mask):
            results = []
            for way in (no_short_cut(), patch.object(ops, "HAS_NATIVE", ops.HAS_NATIVE)):
                with way:
                    call = lambda t: fn(t, k, temperature=temperature, mask=given)  # noqa: B023, E731
                    results.append((call(x), gradient(call, x, upstream)))
            torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@needs_native
def test_what_is_plain():
    x = torch.randn(4, 9)
    assert ops.is_plain(x, torch.nn.Parameter(x), x[:, ::2])
    with torch.inference_mode():
        assert ops.is_plain(x, torch.randn(3))
    negative = torch.randn(9, 1, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert not ops.is_plain(negative)
    assert not ops.is_plain(x, x.to("meta"))
    assert not ops.is_plain(x.to_sparse())
    with FakeTensorMode() as mode:
        assert not ops.is_plain(mode.from_tensor(x))
    with torch.autograd.forward_ad.dual_level():
        assert not ops.is_plain(x)
    with TorchFunctionMode():
        assert not ops.is_plain(x)
    assert ops.is_plain(2.0, None, x)
    seen = []
    vmap(lambda row: seen.append(ops.is_plain(x)) or row)(x)
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


MASK = torch.arange(9) % 3 > 0
CALLS = {
    "numbers": lambda x: khot.sigmoid_topk(x, 2),
    "a mask": lambda x: khot.sigmoid_topk(x, 2, mask=MASK),
    "k and T as tensors": lambda x: khot.sigmoid_topk(x, torch.tensor(2), temperature=torch.tensor(0.5)),
    "k and T by row": lambda x: khot.sigmoid_topk(x, torch.arange(4), temperature=torch.ones(4)),
    "a sibling": lambda x: khot.laplace_topk(x, 2),
    "half precision": lambda x: khot.euclidean_topk(x.bfloat16(), 2),
    "a layer": khot.nn.SigmoidTopK(2, temperature=0.5),
    "a hard layer": khot.nn.SigmoidTopK(2, hard=True),
}


@needs_native
@pytest.mark.parametrize("call", CALLS)
def test_every_ordinary_call_takes_the_short_cut(call):
    x = torch.randn(4, 9, requires_grad=True)
    refuse = {"side_effect": AssertionError("through the dispatcher")}
    with patch.object(ops, "_topk", **refuse), patch.object(ops, "_topk_pull", **refuse):
        with patch.object(ops, "_hard_topk", **refuse):
            CALLS[call](x).sum().backward()
        with no_short_cut(), pytest.raises(AssertionError, match="through the dispatcher"):
            CALLS[call](x)
    assert x.grad is not None


HOT = torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 0, 0]).expand(3, 9)
CHECKPOINTED = {
    "plain": lambda t: khot.sigmoid_topk(t, 2),
    "tensor T": lambda t: khot.sigmoid_topk(t, 2, temperature=torch.tensor(0.5)),
    "half": lambda t: khot.sigmoid_topk(t.bfloat16(), 2).float(),
    "logarithm": lambda t: khot.log_sigmoid_topk(t, 2, mask=HOT.bool() | (HOT == 0)),
    "threshold": lambda t: khot.threshold(t, 2),
    "loss": lambda t: khot.khot_cross_entropy(t, HOT),
    "costs": lambda t: khot.sigmoid_topk(t, 2, costs=HOT + 0.5),
    "costs, another cdf": lambda t: khot.normal_topk(t, torch.tensor([2.0, 1, 3]), costs=HOT[0] + 0.5),
}


@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpoint_with_one_pass_under_a_dispatch_mode(name, is_forward):
    """With the mode and without it, the same tensors must be saved."""
    fn, x = CHECKPOINTED[name], torch.randn(3, 9, requires_grad=True)
    with FlopCounterMode(display=False) if is_forward else nullcontext():
        y = checkpoint(fn, x, use_reentrant=False)
    with nullcontext() if is_forward else FlopCounterMode(display=False):
        (got,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(fn(x).sum(), x)[0])


CHANGED = {
    "mask": (torch.ones(3, 9, dtype=torch.bool), lambda x, t: khot.log_sigmoid_topk(x, 2, mask=t)),
    "mask of a threshold": (torch.ones(3, 9, dtype=torch.bool), lambda x, t: khot.threshold(x, 2, mask=t)),
    "mask of a loss": (torch.ones(3, 9, dtype=torch.bool), lambda x, t: khot.khot_cross_entropy(x, HOT, mask=t)),
    "k": (torch.full((3,), 2.0, dtype=torch.float64), lambda x, t: khot.log_sigmoid_topk(x, t)),
    "soft target": (HOT * 0.9 + 0.02, khot.khot_cross_entropy),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("create_graph", [False, True])
def test_what_backward_needs_may_not_be_changed_before_it(name, create_graph):
    given, fn = CHANGED[name]
    given, x = given.clone(), torch.randn(3, 9, requires_grad=True)
    y = fn(x, given).sum()
    torch.autograd.grad(y, x, retain_graph=True, create_graph=create_graph)  # a control: before the change it works
    given[..., :2] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, create_graph=create_graph)


@pytest.mark.parametrize("n", [5, 512, 700, 1024])
@pytest.mark.parametrize("fn", [khot.sigmoid_topk, khot.normal_topk, khot.log_sigmoid_topk])
def test_batched_gradients_in_float32(fn, n):
    x = torch.randn(n, requires_grad=True)
    upstream = torch.randn(3, n)
    (batched,) = torch.autograd.grad(fn(x, 2), x, upstream, is_grads_batched=True)
    torch.testing.assert_close(batched, torch.stack([gradient(lambda t: fn(t, 2), x, g) for g in upstream]))
    if n == 5:
        by_vmap = torch.autograd.functional.jacobian(lambda t: fn(t, 2), x, vectorize=True)
        torch.testing.assert_close(by_vmap, torch.func.jacrev(lambda t: fn(t, 2))(x.detach()))


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
        fixed = threshold.topk(x, k, one, None, cdfs.SIGMOID, early_stop=False)
        threshold.margin(x, k, one, torch.ones(3, 40, dtype=torch.bool), None, cdfs.SIGMOID, early_stop=False)
        with pytest.raises(AssertionError, match="reads on the host"):
            threshold.topk(x, k, one, None, cdfs.SIGMOID, early_stop=True)
    torch.testing.assert_close(fixed, khot.sigmoid_topk(x, 5), rtol=0, atol=1e-6)


@pytest.mark.slow
@needs_native
def test_plain_means_on_the_cpu_whatever_the_default_device_is():
    code = (
        "import torch; torch.set_default_device('meta'); import khot; x = torch.randn(3, 4); "
        "assert not khot.ops.is_plain(x); assert khot.sigmoid_topk(x, 2).is_meta"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("k", [4, torch.tensor(4.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["x", "g"])
def test_a_gradient_has_the_tangent_of_what_it_depends_on(name, k, is_direct):
    """It had none unless `create_graph` was set: the quick gradient was taken, which forgets tangents."""
    x, g = torch.randn(2, 3, 9, dtype=torch.float64)
    x.requires_grad_()
    tangents = []
    with forward_ad.dual_level(), nullcontext() if is_direct else no_direct_calls():
        given = forward_ad.make_dual(x, x.detach().sin()) if name == "x" else x
        upstream = forward_ad.make_dual(g, g.cos()) if name == "g" else g
        y = khot.sigmoid_topk(given, k)
        for create_graph in (False, True):
            (dx,) = torch.autograd.grad(y, given, upstream, retain_graph=True, create_graph=create_graph)
            tangents.append(forward_ad.unpack_dual(dx).tangent)
    torch.testing.assert_close(*tangents, rtol=0, atol=0)
    assert tangents[0].abs().max() > 0
