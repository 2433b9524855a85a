"""What khot does not support says so, in one clear error."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import khot


def masked(x):
    with pytest.warns(UserWarning, match="MaskedTensor"):
        return torch.masked.masked_tensor(x, x > 0)


CASES = {
    "sparse": (lambda x: x.to_sparse(), "must be a dense tensor; got the layout torch.sparse_coo. Use `x.to_dense"),
    "csr": (lambda x: x.to_sparse_csr(), "must be a dense tensor; got the layout torch.sparse_csr"),
    "mkldnn": (lambda x: x.to_mkldnn(), "must be a dense tensor"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "must not be nested; pad it to one length"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged),
        "must not be nested; pad it to one length",
    ),
    "masked": (masked, "must not be a MaskedTensor; give its data as `x` and its mask as `mask`"),
}


@pytest.mark.parametrize("fn", [khot.sigmoid_topk, khot.normal_topk, khot.hard_topk, khot.log_sigmoid_topk])
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.filterwarnings("ignore:.*prototype.*", "ignore:Sparse", "ignore:.*beta state")
def test_tensors_of_other_kinds(kind, fn):
    make, message = CASES[kind]
    x = make(torch.randn(3, 4))
    with pytest.raises(TypeError, match=message):
        fn(x, 2)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
def test_dtensors(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.randn(3, 4), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"must not be a DTensor here; use `x.full_tensor\(\)`"):
            khot.ordered_topk(x, 2)
        assert khot.sigmoid_topk(x, 2).full_tensor().shape == (3, 4)
    finally:
        destroy_process_group()


@pytest.mark.distributed
def test_tangents_of_the_gradient_of_a_row_in_parts(tmp_path):
    """They were lost in silence unless `create_graph` was set."""
    from torch.distributed import destroy_process_group, group, init_process_group

    init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        x, g = torch.randn(2, 3, 9, dtype=torch.float64)
        y = khot.sigmoid_topk(x.requires_grad_(), 4, group=group.WORLD)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            torch.autograd.grad(y, x, forward_ad.make_dual(g, g.cos()))
    finally:
        destroy_process_group()


def test_symbolic_tracing():
    with pytest.raises(TypeError, match=r"Use torch\.export\.export instead of torch\.fx\.symbolic_trace"):
        torch.fx.symbolic_trace(khot.nn.SigmoidTopK(2))


@pytest.mark.parametrize("k", [np.int64(2), np.int32(2), np.float32(2), np.uint8(2)])
def test_numpy_numbers_are_taken_as_k(k):
    x, expected = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), None
    for fn in (khot.sigmoid_topk, khot.power_topk, khot.hard_topk, khot.log_sigmoid_topk, khot.threshold):
        expected = fn(x, 2)
        torch.testing.assert_close(fn(x, k), expected)
    if k.dtype.kind in "iu":
        torch.testing.assert_close(khot.ordered_topk(x, k), khot.ordered_topk(x, 2))
        torch.testing.assert_close(khot.soft_topk(x, k).values, khot.soft_topk(x, 2).values)
    torch.testing.assert_close(
        khot.precision_at_k_loss(x, (x > 0).float(), k), khot.precision_at_k_loss(x, (x > 0).float(), 2)
    )
