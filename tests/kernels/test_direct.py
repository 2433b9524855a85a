"""Calls to the native library without ctypes, by each extension: the same bits, and only for what is simple."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import khot
from khot import _torch, ops
from khot._math import cdfs
from khot.kernels import _native
from khot.ops import _topk

pytestmark = pytest.mark.skipif(not _native.EXTENSIONS, reason=_native.REASON)
RELAXATIONS = {"sigmoid": khot.sigmoid_topk, "laplace": khot.laplace_topk, "euclidean": khot.euclidean_topk}


@pytest.fixture(params=list(_native.EXTENSIONS), autouse=True)
def extension(request, monkeypatch):
    """The extension that calls go through."""
    chosen = _native.EXTENSIONS[request.param]
    monkeypatch.setattr(ops, "direct_topk", chosen.topk)
    monkeypatch.setattr(_topk, "_direct_pull", chosen.pull)
    monkeypatch.setattr(_topk, "_method_of", chosen.method_of)
    _torch.call_from_nodes(_topk._TopK, chosen.method_of)
    yield chosen
    _torch.call_from_nodes(_topk._TopK, next(iter(_native.EXTENSIONS.values())).method_of)


def direct(x, k=1, temperature=1.0, dim=-1, cdf=cdfs.SIGMOID, mask=None):
    return ops.direct_topk(x, k, temperature, dim, cdf, mask)


def decline(*arguments):
    return None


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (16, 64), (3, 2, 300), (1, 70_000)], ids=str)
def test_the_same_bits_as_by_ctypes(name, dtype, shape, monkeypatch):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    ys, dxs = [], []
    upstream = [torch.randn(shape, dtype=dtype), torch.ones((), dtype=dtype).expand(shape)]
    for _ in range(2):
        for k, temperature in ((shape[-1] // 2, 1.0), (0.3, 0.01), (shape[-1], 1e-60), (0, 1e60)):
            ys.append(RELAXATIONS[name](x, k, temperature=temperature))
            assert (direct(x, k, temperature, cdf=cdfs.cdf_by_name(name)) is None) == (ops.direct_topk is decline)
            dxs += [torch.autograd.grad(ys[-1], x, g, retain_graph=True)[0] for g in upstream]
        monkeypatch.setattr(ops, "direct_topk", decline)
        monkeypatch.setattr(_topk, "_direct_pull", decline)
        monkeypatch.setattr(_topk._TopK._backward_cls, "apply", _topk._TopK.backward)
    for results in (ys, dxs):
        half = len(results) // 2
        for mine, other in zip(results[:half], results[half:], strict=True):
            assert torch.equal(mine, other)
            assert mine.stride() == other.stride()


MASKS = {
    "all": torch.ones(16, 64, dtype=torch.bool),
    "some": torch.arange(16 * 64).view(16, 64) % 3 > 0,
    "one for all rows": torch.arange(64) % 5 > 0,
    "too few in some rows": torch.arange(16)[:, None] > torch.arange(64),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("temperature", [0.3, torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64)], ids=str)
def test_masks_and_temperatures_of_layers_take_the_same_way(name, temperature, monkeypatch):
    x, g, results = torch.randn(16, 64, requires_grad=True), torch.randn(16, 64), []
    assert direct(x, 4, temperature, mask=MASKS[name]) is not None
    for _ in range(2):
        y = khot.sigmoid_topk(x, 4, temperature=temperature, mask=MASKS[name])
        results.append((y, torch.autograd.grad(y, x, g)[0]))
        monkeypatch.setattr(ops, "direct_topk", decline)
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine.nan_to_num(7), other.nan_to_num(7))
    assert bool(results[0][0].isnan().any()) == (name == "too few in some rows")


class Sub(Tensor):
    pass


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


X = torch.randn(4, 9)
NOT_SIMPLE = {
    "half precision": lambda: direct(X.bfloat16()),
    "integers": lambda: direct(X.int()),
    "complex": lambda: direct(torch.randn(4, 9, dtype=torch.complex64)),
    "not contiguous": lambda: direct(X[:, ::2]),
    "transposed": lambda: direct(X.mT),
    "expanded": lambda: direct(X[:1].expand(4, 9)),
    "empty": lambda: direct(X[:0]),
    "rows of none": lambda: direct(X[:, :0], 0),
    "no dimension": lambda: direct(X[0, 0]),
    "another dim": lambda: direct(X, dim=0),
    "a bool for dim": lambda: direct(X, dim=True),
    "a missing dim": lambda: direct(X, dim=2),
    "a tensor k": lambda: direct(X, torch.tensor(2)),
    "a bool k": lambda: direct(X, True),
    "a numpy k": lambda: direct(X, np.float64(2)),
    "too large a k": lambda: direct(X, 10),
    "a huge k": lambda: direct(X, 10**400),
    "a negative k": lambda: direct(X, -1),
    "no number for k": lambda: direct(X, float("nan")),
    "no temperature": lambda: direct(X, temperature=0.0),
    "a temperature that learns": lambda: direct(X, temperature=torch.tensor(1.0, requires_grad=True)),
    "a temperature by row": lambda: direct(X, temperature=torch.ones(1)),
    "a whole number in a tensor": lambda: direct(X, temperature=torch.tensor(1)),
    "no temperature in a tensor": lambda: direct(X, temperature=torch.tensor(-1.0)),
    "a mask by row": lambda: direct(X, mask=torch.ones(len(X), 1, dtype=torch.bool)),
    "a mask of other strides": lambda: direct(X, mask=torch.ones(X.shape[::-1], dtype=torch.bool).mT),
    "a mask of another length": lambda: direct(X, mask=torch.ones(X.shape[-1] - 1, dtype=torch.bool)),
    "a mask of numbers": lambda: direct(X, mask=torch.ones(X.shape, dtype=torch.uint8)),
    "no mask": lambda: direct(X, mask=True),
    "no number for the temperature": lambda: direct(X, temperature=float("nan")),
    "another cdf": lambda: direct(X, cdf=cdfs.NORMAL),
    "no tensor": lambda: direct([1.0, 2.0]),
    "a subclass": lambda: direct(X.as_subclass(Sub)),
    "a sign to be changed": lambda: direct(torch.randn(9, 1, dtype=torch.complex64).conj().imag),
    "such a sign in a contiguous tensor": lambda: direct(torch._neg_view(X)),
    "zeros without memory": lambda: direct(torch._efficientzerotensor(4, 9)),
    "a functional tensor": lambda: direct(torch._to_functional_tensor(X)),
    "sparse": lambda: direct(X.to_sparse()),
    "another device": lambda: direct(X.to("meta")),
    "too few arguments": lambda: ops.direct_topk(X, 1),
}


@pytest.mark.parametrize("name", NOT_SIMPLE)
def test_it_declines_what_is_not_simple(name):
    assert direct(X) is not None
    assert NOT_SIMPLE[name]() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_declines_while_something_watches():
    seen = []
    torch.func.vmap(lambda row: seen.append(direct(X)) or row)(X)
    torch.func.grad(lambda t: seen.append(direct(X)) or t.sum())(X)
    torch.jit.trace(lambda t: seen.append(direct(X)) or t, X, check_trace=False)
    with TorchFunctionMode():
        seen.append(direct(X))
    with Dispatch():
        seen.append(direct(X))
    with FlopCounterMode(display=False):
        seen.append(direct(X))
    with forward_ad.dual_level():
        seen.append(direct(X))
    assert seen == [None] * 7
    kept = []
    torch.func.vmap(lambda row: kept.append(row) or row)(X)
    assert direct(kept[0]) is None, "it escaped from a transform"


def test_pull_declines_too():
    y = khot.sigmoid_topk(X, 2)
    pull = _topk._direct_pull
    assert pull(X, y, 1.0, cdfs.SIGMOID) is not None
    assert pull(X.double(), y, 1.0, cdfs.SIGMOID) is None
    assert pull(X[:2], y, 1.0, cdfs.SIGMOID) is None
    assert pull(X.view(9, 4), y, 1.0, cdfs.SIGMOID) is None
    assert pull(X, y, torch.ones(1), cdfs.SIGMOID) is None
    assert pull(None, y, 1.0, cdfs.SIGMOID) is None
    assert pull(torch._neg_view(X), y, 1.0, cdfs.SIGMOID) is None
    with Dispatch():
        assert pull(X, y, 1.0, cdfs.SIGMOID) is None


def test_a_gradient_is_needed_only_while_it_is_enabled():
    x = X.clone().requires_grad_()
    assert direct(x).requires_grad
    assert direct(torch.nn.Parameter(X)).requires_grad
    with torch.no_grad():
        assert not direct(x).requires_grad
    with torch.inference_mode():
        assert direct(X).is_inference()


def test_saved_tensors_may_be_packed_elsewhere():
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(khot.sigmoid_topk(x, 2), x, X)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
        y = khot.sigmoid_topk(x, 2)
    assert torch.equal(torch.autograd.grad(y, x, X)[0], expected)


def test_it_keeps_no_references():
    x, g = X.clone().requires_grad_(), X.clone()
    counts = []
    for _ in range(3):
        for _ in range(100):
            torch.autograd.grad(khot.sigmoid_topk(x, 2), x, g)
            direct(x, 10), direct(X.to_sparse()), direct(None)
        counts.append([sys.getrefcount(each) for each in (x, g, cdfs.SIGMOID, torch.empty_like)])
    assert counts[1] == counts[2]


def test_other_threads_run_during_a_large_call():
    x = torch.randn(8, 200_000)
    expected = khot.sigmoid_topk(x, 100)
    results = [None] * 4

    def work(i):
        results[i] = khot.sigmoid_topk(x, 100)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results)


def test_bind_wants_every_name(extension):
    with pytest.raises(TypeError, match="lacks `topk`"):
        extension.bind()
    with pytest.raises(TypeError, match="lacks `tensor`"):
        extension.bind(topk=1, topk_pull=2, path=0, exchange=Tensor.__dlpack_c_exchange_api__)
    assert direct(X) is not None, "the names are those of before"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lack", "why"),
    [
        ("sys.modules['khot.kernels._direct'] = None", "no extension for small calls"),
        ("del torch.Tensor.__dlpack_c_exchange_api__", "has no `torch.Tensor.__dlpack_c_exchange_api__`"),
    ],
)
@pytest.mark.long
def test_without_it_calls_go_through_ctypes(lack, why):
    code = f"import sys, torch; sys.modules['khot.kernels._direct_torch'] = None; {lack}; import khot; "
    code += "x = torch.zeros(4, requires_grad=True); y = khot.sigmoid_topk(x, 2); "
    code += "y[0].backward(); print(y.tolist(), x.grad.tolist(), khot.kernels.status())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[0.5, 0.5, 0.5, 0.5] [0.1875, -0.0625, -0.0625, -0.0625]" in done.stdout
    assert why in done.stdout


def test_an_extension_for_another_torch_is_not_loaded(tmp_path, monkeypatch):
    (tmp_path / "build.txt").write_text("built by c++, with the headers of torch 1.0\n")
    monkeypatch.setattr(_native, "HERE", tmp_path)
    found, why = _native._load_extensions()
    assert list(found) == ["_direct"]
    assert why == f"; its node in C++ does not serve torch {torch.__version__}: reinstall khot"
    (tmp_path / "build.txt").unlink()
    assert list(_native._load_extensions()[0]) == ["_direct"], "without a note"


def gradients(x, g):
    """What autograd makes of a call, in the ways that it has."""
    y = khot.sigmoid_topk(x, 3, temperature=0.7)
    yield torch.autograd.grad(y, x, g, retain_graph=True)[0]
    yield torch.autograd.grad(y, x, g.expand(2, *g.shape), is_grads_batched=True, retain_graph=True)[0]
    yield torch.autograd.grad(y, x, g.mT.contiguous().mT, retain_graph=True)[0]
    yield torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    yield dx.detach()
    yield torch.autograd.grad(dx.square().sum(), x, retain_graph=True)[0]
    with Dispatch():
        yield torch.autograd.grad(y, x, g, retain_graph=True)[0]
    with torch.autograd.detect_anomaly(check_nan=False):
        yield torch.autograd.grad(khot.sigmoid_topk(x, 3), x, g)[0]
    yield torch.autograd.grad(checkpoint(khot.sigmoid_topk, x, 3, use_reentrant=False), x, g)[0]
    with torch.autograd.set_multithreading_enabled(False):
        yield torch.autograd.grad(y, x, g)[0]
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, g)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", RELAXATIONS)
def test_autograd_gets_what_python_gives_it(name, monkeypatch):
    x, g = torch.randn(2, 16, 64, dtype=torch.float64)
    x.requires_grad_()
    monkeypatch.setattr(khot, "sigmoid_topk", RELAXATIONS[name])
    mine = list(gradients(x, g))
    monkeypatch.setattr(ops, "direct_topk", decline)
    monkeypatch.setattr(_topk, "_direct_pull", decline)
    _torch.call_from_nodes(_topk._TopK)
    others = list(gradients(x, g))
    assert len(mine) == len(others) == 10
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


def test_a_changed_result_has_no_gradient():
    x = X.clone().requires_grad_()
    y = khot.sigmoid_topk(x, 2)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_error_in_backward_is_that_of_python(monkeypatch):
    x = X.clone().requires_grad_()
    y = khot.sigmoid_topk(x, 2)

    def fail(*_):
        raise KeyError("no derivative")

    monkeypatch.setattr(_topk.implicit, "pull_value", fail)
    with pytest.raises(KeyError, match="no derivative"):
        torch.autograd.grad(y, x, X, create_graph=True)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_autograd_runs_the_node():
    x = torch.randn(16, 64, requires_grad=True)
    expected = torch.autograd.grad(khot.sigmoid_topk(x, 4).square().sum(), x)[0]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        khot.sigmoid_topk(x, 4).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_nodes_of_python_call_the_extension_with_the_bits_of_python():
    x, g = torch.randn(2, 16, 64)
    x.requires_grad_()
    y = _topk._TopK.apply(x, 4.0, 1.0, None, cdfs.SIGMOID, ())
    found = []
    try:
        for method_of in (_topk._method_of, None):
            _torch.call_from_nodes(_topk._TopK, method_of)
            found.append(torch.autograd.grad(y, x, g, retain_graph=True)[0])
            (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
            found.append(dx.detach())
            found.append(torch.autograd.grad(dx.square().sum(), x, retain_graph=True)[0])
    finally:
        _torch.call_from_nodes(_topk._TopK, _topk._method_of)
    assert "method" in type(_topk._TopK._backward_cls.apply).__name__
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))
    torch.autograd.grad(y, x, g)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, g)
    with pytest.raises(TypeError, match="takes a type"):
        _topk._method_of(3)
