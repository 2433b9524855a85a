"""Compiled, exported, traced and saved: the same numbers and gradients, or an error."""

import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import khot

X = torch.tensor([2.0, 1.0, 0.0, -1.0])


def student_cdf(z):
    return 0.5 + 0.5 * z / (2 + z.square()).sqrt()


STUDENT = khot.relaxation(student_cdf, symmetric=True, name="student")
FUNCTIONS = {
    "sigmoid": khot.sigmoid_topk,
    "normal": khot.normal_topk,
    "laplace": khot.laplace_topk,
    "log": khot.log_sigmoid_topk,
    "own": STUDENT,
}
KINDS = {
    "grad": lambda f: torch.func.grad(lambda t: f(t).square().sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](x.cos())[0],
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": lambda f: torch.func.hessian(lambda t: f(t).square().sum()),
    "vmap of grad": lambda f: lambda x: torch.func.vmap(torch.func.grad(lambda t: f(t).square().sum()))(x.expand(3, 4)),
}


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile_around_torch_func_is_not_zero(name, kind):
    def fn(x):
        return KINDS[kind](lambda t: FUNCTIONS[name](t, 2))(x)

    torch._dynamo.reset()
    got, expected = torch.compile(fn, backend="eager")(X), fn(X)
    torch.testing.assert_close(got, expected)
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.compile
def test_compile_around_torch_func_with_aot():
    def fn(x):
        return torch.func.hessian(lambda t: khot.sigmoid_topk(t, 2).square().sum())(x)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="aot_eager")(X), fn(X))


class Gate(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.linear, self.fn = nn.Linear(4, 4), fn

    def forward(self, x):
        hidden = self.linear(x)
        return self.fn(hidden) * hidden


EXPORTED = {
    **{name: lambda t, fn=fn: fn(t, 2) for name, fn in FUNCTIONS.items()},
    "cauchy": lambda t: khot.cauchy_topk(t, 2),
    "power": lambda t: khot.power_topk(t, 2),
    "costs": lambda t: khot.sigmoid_topk(t, 2, costs=torch.tensor([1.0, 2.0, 1.0, 0.5])),
    "k and T as tensors": lambda t: khot.sigmoid_topk(t, torch.tensor(2.0), temperature=torch.tensor(0.5)),
    "hard": lambda t: khot.straight_through(khot.hard_topk(t, 2), khot.sigmoid_topk(t, 2)),
}


@pytest.mark.compile
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_module_runs_and_trains_as_the_module(name, strict):
    torch.manual_seed(0)
    module, x = Gate(EXPORTED[name]), torch.randn(3, 4)
    exported = torch.export.export(module, (x,), strict=strict).module()
    results = []
    for call in (module, exported):
        module.zero_grad()
        y = call(x)
        y.square().sum().backward()
        parameters = dict(call.named_parameters())
        results.append((y, parameters["linear.weight"].grad.clone(), parameters["linear.bias"].grad.clone()))
    torch.testing.assert_close(*results)


BESIDE = {
    "mask": lambda t: khot.sigmoid_topk(t, 2, mask=torch.tensor([True, True, False, True])),
    "costs": lambda t: khot.sigmoid_topk(t, 2, costs=torch.tensor([1.0, 2.0, 1.0, 0.5])),
    "slots": lambda t: khot.ordered_topk(t, 2),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", BESIDE)
def test_a_dynamic_batch_may_have_the_size_of_another_dim(name):
    """A mask (n,) was compared with x (batch, n) place by place, so that batch ≠ n was demanded of every input."""

    class Layer(nn.Module):
        def forward(self, x):
            return BESIDE[name](x)

    shapes = {"x": {0: torch.export.Dim("batch")}}
    exported = torch.export.export(Layer(), (torch.randn(3, 4),), dynamic_shapes=shapes).module()
    torch._dynamo.reset()
    compiled = torch.compile(BESIDE[name], fullgraph=True, dynamic=True, backend="eager")
    for batch in (3, 4, 2):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(exported(x), BESIDE[name](x))
        torch.testing.assert_close(compiled(x), BESIDE[name](x))


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_op(name):
    example, other = torch.randn(3, 4), torch.randn(3, 4)
    traced = torch.jit.trace(EXPORTED[name], example, check_trace=False)
    torch.testing.assert_close(traced(other), EXPORTED[name](other))
    leaf = other.clone().requires_grad_()
    upstream = torch.randn(3, 4)
    got, expected = (torch.autograd.grad(fn(leaf), leaf, upstream)[0] for fn in (traced, EXPORTED[name]))
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_module_depends_on_its_input():
    """The legacy ONNX exporter works on this graph: before, it held no input and wrote a constant."""
    traced = torch.jit.trace(Gate(lambda t: khot.sigmoid_topk(t, 3)).eval(), torch.randn(3, 4), check_trace=False)
    assert "khot::topk" in str(traced.inlined_graph)


SAVED = """
import sys, torch, khot

def student_cdf(z):
    return 0.5 + 0.5 * z / (2 + z.square()).sqrt()

def gumbel(z):
    return torch.exp(-torch.exp(-z))

if "other" in sys.argv:
    other = khot.relaxation(gumbel, name="student")
if "same" in sys.argv:
    same = khot.relaxation(student_cdf, symmetric=True, name="student")
program = torch.export.load(sys.argv[1]).module()
print(program(torch.tensor([[2.0, 1.0, 0.0, -1.0]])).tolist())
"""


@pytest.mark.compile
@pytest.mark.long
def test_an_exported_relaxation_in_another_process(tmp_path):
    class Layer(nn.Module):
        def forward(self, x):
            return STUDENT(x, 2)

    path = tmp_path / "student.pt2"
    torch.export.save(torch.export.export(Layer(), (X[None],)), path)
    runs = {
        made: subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SAVED), str(path), made],
            capture_output=True,
            text=True,
        )
        for made in ("same", "other", "none")
    }
    assert runs["same"].returncode == 0, runs["same"].stderr
    torch.testing.assert_close(torch.tensor(eval(runs["same"].stdout))[0], STUDENT(X, 2))
    for made in ("other", "none"):
        assert "The relaxation 'student#" in runs[made].stderr
        assert "does not exist in this process" in runs[made].stderr


def test_a_relaxation_can_be_pickled_and_called_by_keyword():
    again = pickle.loads(pickle.dumps(STUDENT))
    torch.testing.assert_close(again(x=X, k=2), STUDENT(X, 2))
    assert again.__name__ == STUDENT.__name__
    assert "student#" in repr(again)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(khot.relaxation(lambda z: torch.sigmoid(z), symmetric=True))


def test_a_relaxation_is_not_kept_for_good():
    import gc

    from khot._math import cdfs

    def cdf(z):
        return torch.sigmoid(1.7 * z)

    made = khot.relaxation(cdf, symmetric=True, name="passing")
    name = made.__name__
    assert name in cdfs._NAMED
    y = made(X.clone().requires_grad_(), 2)
    del made
    y.sum().backward()  # what is on the way keeps it
    del y
    gc.collect()
    assert name not in cdfs._NAMED


def test_a_relaxation_made_on_the_meta_device():
    with torch.device("meta"):
        made = khot.relaxation(student_cdf, symmetric=True)
    torch.testing.assert_close(made(X, 2), STUDENT(X, 2))
