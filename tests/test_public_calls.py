"""What holds for every public function and layer: tensors without values, and numpy's integers as counts."""

import inspect

import numpy as np
import pytest
import torch
from public_calls import CALLS, Tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import khot

calls = pytest.mark.parametrize("name", CALLS)
DEPEND_ON_VALUES = {
    *(f"khot.coding.{name}" for name in ("omp", "thresholding_pursuit", "gradient_update", "least_squares_update")),
    *(f"khot.coding.{name}" for name in ("power_update", "svd_update")),
    *("coding.splice", "coding.splice_path", "attention.KeyCells", "survey.calibrate", "designs.spatial_order"),
    *(f"khot.search.{name}" for name in ("hard", "soft", "sampled")),
    *("Budgeted draws", "Pareto has a mean", "PlackettLuce has a mean"),
    *("khot.nn.routing.expert_choice", "routing.dselect_k", "nn.MoE", "nn.TokenPruner in evaluation"),
    *(f"khot.nn.routing.{name}" for name in ("max_violation", "dead_experts", "routing_entropy")),
    *(f"nn.SparseAutoencoder {kind}" for kind in ("topk", "batch", "feature", "jumprelu")),
}
"""The size of the result, or the steps to it, depend on values; all other calls give the right shapes without any."""


def result(name, kind, k=int):
    torch.manual_seed(0)
    return tree_leaves(CALLS[name](Tensors(kind), k))


def described(leaves):
    return [(t.shape, t.dtype) if isinstance(t, torch.Tensor) else t for t in leaves]


@calls
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_values_give_shapes_or_one_clear_error(name, kind):
    """`Router` on meta: "unsupported scalarType"; samplers: "Tensor.item() cannot be called on meta tensors"."""

    def run():
        if kind == "meta":
            return result(name, lambda t: t.to("meta"))
        with FakeTensorMode() as mode:
            return result(name, mode.from_tensor)

    if name in DEPEND_ON_VALUES:
        with pytest.raises(NotImplementedError, match=r"depends? on the values of tensors.* have a shape alone"):
            run()
        return
    assert described(run()) == described(result(name, lambda t: t))


@pytest.mark.parametrize("name", sorted(DEPEND_ON_VALUES - {"Budgeted draws"}))
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.trace` is deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_a_tracer_is_refused_where_steps_depend_on_values(name):
    """The trace of `certified_attention` with `KeyCells` opened the cells of its example for every query."""
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace would record the steps"):
        torch.jit.trace(lambda t: result(name, lambda t: t)[0], torch.zeros(1), check_trace=False)


@calls
def test_a_numpy_integer_is_a_count_everywhere(name):
    for expected, got in zip(result(name, lambda t: t), result(name, lambda t: t, np.int64), strict=True):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(expected, got)
        else:
            assert expected == got
            assert not isinstance(got, np.generic)


SOLVED = ("sigmoid", "laplace", "normal", "cauchy", "euclidean", "power", "log_sigmoid", "hard", "statistical")


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", [*(f"{name}_topk" for name in SOLVED), "threshold", "statistical_logits", "sample_khot"]
)
def test_a_numpy_integer_is_a_count_in_a_whole_graph(name):
    """torch.compile traces numpy's numbers as arrays: "Unsupported ndarray attribute access"."""
    fn, x = getattr(khot, name), torch.randn(3, 6)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, k: fn(x, k), fullgraph=True, backend="eager")
    for k in (np.int64(2), np.int32(3), np.uint8(2)):
        torch.manual_seed(0)
        expected = fn(x, int(k))
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x, k), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.compile
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_numpy_integer_that_sets_a_shape_is_refused_in_a_graph(fullgraph):
    """The message was "`k` must be an int; got ndarray" for a k that is no ndarray."""
    k = np.int64(2)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: khot.ordered_topk(x, k), fullgraph=fullgraph, backend="eager")
    with pytest.raises(Exception, match=r"must be an int inside torch\.compile"):
        compiled(torch.randn(3, 6))


def test_every_public_function_that_takes_k_is_called():
    """A new function must join the table."""
    rooms = (khot, khot.attention, khot.coding, khot.designs, khot.estimators, khot.nn, khot.nn.routing)
    public = {
        name
        for room in rooms
        for name in getattr(room, "__all__", dir(room))
        if callable(found := getattr(room, name)) and not name.startswith("_") and "k" in parameters(found)
    }
    without_a_call_of_its_own = {
        *("SparseAutoencoderConfig", "Design", "KHotStraightThrough"),  # through their users
        *("sample_rows", "sample_file", "sample_parts"),  # tables, files and process groups
        *("aicc", "bic", "ebic", "gcv", "Certificate"),  # k is a tensor
        *("capped_simplex", "k_hot", "aux_zipf_loss", "horvitz_thompson_variance"),
    }
    called = " ".join(CALLS)
    assert {name for name in public - without_a_call_of_its_own if name not in called} == set()


def parameters(found):
    try:
        return inspect.signature(found).parameters
    except ValueError:
        return {}
