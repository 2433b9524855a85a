"""Cases on DTensors: every placement, on 1-D and 2-D meshes, against the whole tensor on one process."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import khot
from khot.distributed import messages


def meshes():
    world = dist.get_world_size()
    yield init_device_mesh("cpu", (world,))
    if world == 4:
        yield init_device_mesh("cpu", (2, 2))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def placements_of_all_kinds():
    x, weights = random(5, 13, 3), random(5, 13, 3, seed=1)
    for mesh in meshes():
        for kinds in itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=mesh.ndim):
            for dim in (1, -1):
                t = distribute_tensor(x, mesh, kinds).requires_grad_()
                y = khot.sigmoid_topk(t, 2, dim=dim, temperature=0.5)
                assert y.placements == t.placements
                assert y.shape == x.shape
                whole = x.clone().requires_grad_()
                expected = khot.sigmoid_topk(whole, 2, dim=dim, temperature=0.5)
                torch.testing.assert_close(y.full_tensor(), expected, rtol=0, atol=1e-12)
                (y * distribute_tensor(weights, mesh, kinds)).sum().backward()
                (expected * weights).sum().backward()
                assert t.grad.placements == t.placements
                torch.testing.assert_close(t.grad.full_tensor(), whole.grad, rtol=0, atol=1e-12)


def partial_sums_are_made_whole():
    for mesh in meshes():
        part = random(2, 9, seed=dist.get_rank())
        whole = part.clone()
        dist.all_reduce(whole)
        t = DTensor.from_local(part, mesh, [Partial()] * mesh.ndim)
        y = khot.sigmoid_topk(t, 3)
        torch.testing.assert_close(y.full_tensor(), khot.sigmoid_topk(whole, 3), rtol=0, atol=1e-12)


def arguments_with_layouts_of_their_own():
    x = random(6, 16)
    mask = torch.rand(6, 16, generator=torch.Generator().manual_seed(3)) < 0.8
    counts = torch.tensor([1.0, 2.0, 2.5, 3.0, 4.0, 5.0]).double()
    for mesh in meshes():
        for kinds in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=mesh.ndim):
            for as_dtensor in (False, True):
                k, heat = counts.clone().requires_grad_(), torch.tensor(0.7).double().requires_grad_()
                whole = x.clone().requires_grad_()
                expected = khot.sigmoid_topk(whole, k, temperature=heat, mask=mask)
                wanted = torch.autograd.grad(expected.square().sum(), (whole, k, heat))
                t, size = distribute_tensor(x, mesh, kinds).requires_grad_(), counts.clone()
                allowed = mask
                if as_dtensor:
                    size = distribute_tensor(counts, mesh, [Shard(0)] * mesh.ndim)
                    allowed = distribute_tensor(mask, mesh, kinds)
                size = size.requires_grad_()
                y = khot.sigmoid_topk(t, size, temperature=heat, mask=allowed)
                torch.testing.assert_close(y.full_tensor(), expected, rtol=0, atol=1e-11)
                got = torch.autograd.grad(y.square().sum(), (t, size, heat))
                for a, b in zip(got, wanted, strict=True):
                    a = a.full_tensor() if isinstance(a, DTensor) else a
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def other_functions():
    x, target = random(4, 12), (random(4, 12, seed=2) > 0.5).double()
    for mesh in meshes():
        for kinds in itertools.product((Shard(0), Shard(1)), repeat=mesh.ndim):
            t = distribute_tensor(x, mesh, kinds)
            for fn in (khot.log_sigmoid_topk, khot.threshold, khot.laplace_topk, khot.power_topk, khot.hard_topk):
                torch.testing.assert_close(fn(t, 3).full_tensor(), fn(x, 3), rtol=0, atol=1e-11)
            t = t.detach().requires_grad_()
            whole = x.clone().requires_grad_()
            loss = khot.khot_cross_entropy(t, distribute_tensor(target, mesh, kinds))
            expected = khot.khot_cross_entropy(whole, target)
            torch.testing.assert_close(loss.full_tensor(), expected, rtol=0, atol=1e-12)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(t.grad.full_tensor(), whole.grad, rtol=0, atol=1e-12)


def whole_rows_need_no_message():
    mesh = next(meshes())
    t = distribute_tensor(random(8, 5), mesh, [Shard(0)])
    with messages() as sent:
        khot.sigmoid_topk(t, 2)
    assert not sent


def compiled_dtensor():
    mesh = next(meshes())
    results = []
    fn = lambda t: 3 * khot.sigmoid_topk(t, 5)  # noqa: E731
    for call in (fn, *(torch.compile(fn, fullgraph=True, backend=backend) for backend in ("aot_eager", "inductor"))):
        t = distribute_tensor(random(4, 32), mesh, [Shard(1)]).requires_grad_()
        y = call(t)
        results.append([y.full_tensor(), torch.autograd.grad(y.square().sum(), t)[0].full_tensor()])
    for a, *others in zip(*results, strict=True):
        for b in others:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def errors():
    mesh = next(meshes())
    t = distribute_tensor(random(8, 5), mesh, [Shard(1)])
    for wrong, kind in ((lambda: khot.sigmoid_topk(t, 2, group=dist.group.WORLD), TypeError),
                        (lambda: khot.sigmoid_topk(random(3), 1, group="none such"), (RuntimeError, LookupError)),
                        (lambda: khot.sigmoid_topk(random(3), 1, group=3), TypeError),
                        (lambda: khot.sigmoid_topk(random(3), -1, group=dist.group.WORLD), ValueError)):  # fmt: skip
        try:
            wrong()
        except kind:
            continue
        raise AssertionError("no error")
