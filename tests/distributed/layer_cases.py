"""Layers under DDP: with `group=`, the gradient of one large batch; without it, a warning."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import khot
from khot.nn import routing, sparsity
from khot.nn.sparsity import Sparsifier

TOKENS, DIM, EXPERTS, K = 24, 6, 5, 2


def tokens(seed=0):
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    cuts = [0, TOKENS // 4, TOKENS] if dist.get_world_size() == 2 else [TOKENS * r // 4 for r in range(5)]
    return x, slice(cuts[dist.get_rank()], cuts[dist.get_rank() + 1])


def router(route, **options):
    torch.manual_seed(0)
    return khot.nn.Router(DIM, EXPERTS, K, route=route, **options).double()


def gradient(route, loss, *, is_split):
    """The gradient of a router's weights, by DDP's mean over parts, or of the whole batch."""
    x, own = tokens()
    layer = router(route)
    model = DistributedDataParallel(layer) if is_split else layer
    loss(model(x[own] if is_split else x), x[own] if is_split else x).backward()
    return layer.weight.grad


def mean_per_token(found, x):
    """A loss whose sum over all tokens is divided by the number of tokens of the whole batch."""
    share = dist.get_world_size() if len(x) < TOKENS else 1
    return share * (found.weights * x[:, :1]).sum() / TOKENS


def warnings_come_once():
    logits = torch.randn(4, 3)
    config = khot.nn.SparseAutoencoderConfig(d_in=4, latents=8, k=2, kind="batch")
    sae = khot.nn.SparseAutoencoder(config)
    calls = {
        "balanced_sigma_topk": lambda: routing.balanced_sigma_topk(logits, 1),
        "expert_choice": lambda: routing.expert_choice(logits, 1),
        "update_bias": lambda: routing.update_bias(torch.zeros(3), routing.sigma_topk(logits, 1)),
        "BatchTopK": lambda: sae(torch.randn(6, 4)),
    }
    for name, call in calls.items():
        with pytest.warns(UserWarning, match=f"{name}.*tokens alone"):
            call()
        call()  # warnings are errors here, so a second one would be seen
    sae.eval()(torch.randn(6, 4))


def balanced_routes():
    x, own = tokens()
    whole = gradient(routing.balanced_sigma_topk, mean_per_token, is_split=False)
    grouped = partial(routing.balanced_sigma_topk, group=dist.group.WORLD)
    got = gradient(grouped, mean_per_token, is_split=True)
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-9)
    logits = router(routing.sigma_topk)(x).logits.detach()
    probs = routing.balanced_sigma_topk(logits[own], K, group=dist.group.WORLD).probs
    torch.testing.assert_close(probs, routing.balanced_sigma_topk(logits, K).probs[own], rtol=0, atol=1e-9)
    wrong = gradient(routing.balanced_sigma_topk, mean_per_token, is_split=True)
    assert (wrong - whole).abs().max() > 1e-4 * whole.abs().max(), "without a group the gradient is another"


def expert_choice_among_all_tokens():
    x, own = tokens(1)
    logits = router(routing.sigma_topk)(x).logits.detach()
    whole, got = routing.expert_choice(logits, K), routing.expert_choice(logits[own], K, group=dist.group.WORLD)

    def taken(found):
        slots = torch.zeros(*found.indices.shape[:-1], EXPERTS + 1, dtype=torch.float64)
        return slots.scatter(-1, found.indices, found.weights)[..., :EXPERTS]

    torch.testing.assert_close(taken(got), taken(whole)[own], rtol=0, atol=1e-12)
    assert torch.equal(routing.load(got, group=dist.group.WORLD), routing.load(whole))


def loads_and_losses_under_ddp():
    world = dist.group.WORLD
    for loss in (routing.load_balance_loss, routing.importance_loss):
        whole = gradient(routing.softmax_topk, lambda found, x, loss=loss: loss(found), is_split=False)
        got = gradient(routing.softmax_topk, lambda found, x, loss=loss: loss(found, group=world), is_split=True)
        torch.testing.assert_close(got, whole, rtol=0, atol=1e-12)
        wrong = gradient(routing.softmax_topk, lambda found, x, loss=loss: loss(found), is_split=True)
        assert (wrong - whole).abs().max() > 1e-4 * whole.abs().max()
    x, own = tokens()
    found = router(routing.sigma_topk)(x)
    part = routing.Routing(*(t[own] for t in found))
    biases = [torch.zeros(EXPERTS), torch.zeros(EXPERTS)]
    routing.update_bias(biases[0], found, group=None)
    routing.update_bias(biases[1], part, group=world)
    assert torch.equal(*biases)


def gates_under_ddp():
    """Layers that look at one row at a time need no group."""
    for route in (routing.sigma_topk, routing.softmax_topk):
        whole, got = (gradient(route, mean_per_token, is_split=is_split) for is_split in (False, True))
        torch.testing.assert_close(got, whole, rtol=0, atol=1e-12)
    x, own = tokens()
    results = []
    for is_split in (False, True):
        layer = khot.nn.SigmoidTopK(2, temperature=torch.nn.Parameter(torch.tensor(0.7))).double()
        model = DistributedDataParallel(layer) if is_split else layer
        y = model(x[own] if is_split else x)
        (y.square().sum() * (dist.get_world_size() if is_split else 1)).backward()
        results.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)


def gates_of_divided_features():
    """Relaxed, sampled and hard masks of features in parts, with a group and as DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x, world, rank = tokens()[0], dist.get_world_size(), dist.get_rank()
    scores = torch.tensor([0.3, -0.7, 1.1, 0.2, -0.4, 0.9], dtype=torch.float64)
    cuts = [0, 1, DIM] if world == 2 else [DIM * r // world for r in range(world + 1)]
    part = slice(cuts[rank], cuts[rank + 1])
    design = partial(khot.designs.Pivotal, order="given")
    mesh = init_device_mesh("cpu", (world,))

    def gate(count, own, design, group=None):
        layer = khot.nn.KHotGate(count, K, design=design, temperature=0.5, group=group).double()
        layer.scores = torch.nn.Parameter(own)
        return layer

    for kind in (None, design):
        whole = gate(DIM, scores.clone(), kind)
        divided = gate(cuts[rank + 1] - cuts[rank], scores[part].clone(), kind, dist.group.WORLD)
        spread = gate(DIM, distribute_tensor(scores, mesh, [Shard(0)]), kind)
        layers = [(whole, x), (divided, x[:, part]), (spread, distribute_tensor(x, mesh, [Shard(1)]))]
        expected, *found = [layer(own, generator=torch.Generator().manual_seed(3)) for layer, own in layers]
        expected.square().sum().backward()
        found[0].square().sum().backward()
        if kind is None:
            torch.testing.assert_close(found[0], expected[:, part], rtol=0, atol=1e-12)
            torch.testing.assert_close(divided.scores.grad, whole.scores.grad[part], rtol=0, atol=1e-11)
        else:  # probabilities in parts may differ in the last bit, and then samples do: each row has K entries of x
            taken = found[0] != 0
            counts = taken.sum(-1)
            dist.all_reduce(counts)
            assert (counts == K).all()
            assert torch.equal(found[0].detach(), x[:, part] * taken)
        found[1].square().sum().backward()
        full = found[1].full_tensor()
        if kind is None:  # rows that are expanded draw with other numbers
            torch.testing.assert_close(full, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(spread.scores.grad.full_tensor(), whole.scores.grad, rtol=0, atol=1e-11)
        assert torch.equal((full != 0).sum(-1), torch.full((TOKENS,), DIM if kind is None else K))
        last, *hard = [layer.eval()(own) for layer, own in layers]
        torch.testing.assert_close(hard[0], last[:, part], rtol=0, atol=0)
        torch.testing.assert_close(hard[1].full_tensor(), last, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="random order"):
        gate(2, scores[:2].clone(), khot.designs.Pivotal, dist.group.WORLD)(x[:, :2])
    with pytest.raises(NotImplementedError, match="sigmoid_topk"):
        khot.nn.KHotGate(2, K, relaxation=khot.laplace_topk, design=design, group=dist.group.WORLD).double()(x[:, :2])


def sparsifiers_under_ddp():
    """Each process computes the same masks from the same weights, and the model is that of one process."""
    x, own = tokens()
    results = []
    for is_split in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(DIM, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
        sparsifier = Sparsifier(model, 0.3, steps=12, mask=sparsity.soft)
        trained = DistributedDataParallel(model) if is_split else model
        optimizer = torch.optim.SGD(trained.parameters(), 0.5)
        share = dist.get_world_size() if is_split else 1
        for _ in range(12):
            optimizer.zero_grad()
            (share * (trained(x[own] if is_split else x) - 1).square().sum() / TOKENS).backward()
            optimizer.step()
            sparsifier.step()
        results.append(torch.cat([p.detach().flatten() for p in sparsifier.finalize().parameters()]))
    assert int((results[0] == 0).sum()) == 45  # of 64 weights 19 stay
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    first = results[1].clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, results[1]), "all processes have the same weights"


def sparse_run(way, mesh):
    """Train a network with a Sparsifier, under FSDP2 if there is a mesh; weights by shape, densities and report."""
    from torch.distributed.fsdp import fully_shard

    x, own = tokens()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(DIM, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
    sparsifier = Sparsifier(model, 0.3, steps=5, **way)
    share = 1
    if mesh is not None:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        sparsifier.refresh()
        x, share = x[own], dist.get_world_size()
    optimizer, densities = torch.optim.Adam(model.parameters(), 0.05), []
    for _ in range(5):
        for _ in range(2):  # gradients are added up
            (share * (model(x) - 1).square().sum() / TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
        sparsifier.step()
        densities.append(sparsifier.density())
    report, out = str(sparsifier.report()), model.eval()(x)
    found = [p.detach() if mesh is None else p.full_tensor().detach() for p in sparsifier.finalize().parameters()]
    torch.testing.assert_close(model(x), out, rtol=0, atol=1e-12)
    return sorted(found, key=lambda p: p.shape), torch.tensor(densities), report


def sparsifiers_under_fsdp():
    """One exact budget over the shards of all weights, at every step, with the weights of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from khot.nn.sparsity._shards import Shards

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways = [
        {"mask": sparsity.soft},
        {"gradient": sparsity.dense_gradient, "freeze": 1.0},
        {"mask": sparsity.hard, "every": 3},
        {"share": sparsity.uniformly, "gradient": sparsity.soft_gradient},
    ]
    for way in ways:
        (wanted, *others), (got, *same) = sparse_run(way, None), sparse_run(way, mesh)
        assert sum(int((p == 0).sum()) for p in got) == 56 - int(0.3 * 56)
        for p, q in zip(got, wanted, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-9)
        torch.testing.assert_close(same[0], others[0], rtol=0, atol=1e-12)
        assert same[1] == others[1]
    pull_back, Shards.pull_back = Shards.pull_back, lambda self, optimizer: None
    try:
        wrong = sparse_run(ways[0], mesh)[0]
    finally:
        Shards.pull_back = pull_back
    assert max(float((p - q).abs().max()) for p, q in zip(wrong, sparse_run(ways[0], None)[0], strict=True)) > 1e-4
    model = torch.nn.Linear(DIM, 7).double()
    sparsifier = Sparsifier(model, 0.3, steps=10)
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="refresh"):
        model(tokens()[0])
    for options in ({"units": sparsity.rows}, {"score": sparsity.learned}, {"mask": sparsity.sampled}):
        model = torch.nn.Linear(DIM, 7).double()
        sparsifier = Sparsifier(model, 0.5, steps=10, **options)
        fully_shard(model, mesh=mesh)
        with pytest.raises(NotImplementedError, match="FSDP2"):
            sparsifier.refresh()


def budgets_over_fsdp_parameters():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 5)).double()
    plain = [p.detach().abs().clone() for p in model.parameters()]
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for temperature, atol in ((None, 0.0), (0.05, 1e-12)):
        expected = khot.nn.global_budget(plain, 30, temperature=temperature)
        masks = khot.nn.global_budget([p.abs() for p in model.parameters()], 30, temperature=temperature)
        for mask, whole, p in zip(masks, expected, model.parameters(), strict=True):
            assert mask.placements == p.placements
            torch.testing.assert_close(mask.full_tensor(), whole, rtol=0, atol=atol)
    sum((mask * p).sum() for mask, p in zip(masks, model.parameters(), strict=True)).backward()
    leaves = [p.clone().requires_grad_() for p in (torch.nn.Parameter(q.full_tensor()) for q in model.parameters())]
    found = khot.nn.global_budget([p.abs() for p in leaves], 30, temperature=0.05)
    wanted = torch.autograd.grad(sum((m * p).sum() for m, p in zip(found, leaves, strict=True)), leaves)
    for p, g in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), g, rtol=0, atol=1e-11)


def _gradient(p):
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


def experts_divided_over_processes():
    world, rank = dist.get_world_size(), dist.get_rank()
    x, own = tokens(2)
    for n in (world, 3 * world):
        torch.manual_seed(1)
        layer = khot.nn.Router(DIM, n, 1).double()
        experts = [torch.nn.Linear(DIM, 4).double() for _ in range(n)]
        whole = khot.nn.MoE(layer, experts)
        inputs = x.clone().requires_grad_()
        expected = whole(inputs).output
        expected.square().sum().backward()
        wanted = [_gradient(p) for e in experts for p in e.parameters()], layer.weight.grad.clone()
        for p in whole.parameters():
            p.grad = None
        mine = experts[rank * n // world : (rank + 1) * n // world]
        divided = khot.nn.MoE(layer, mine, group=dist.group.WORLD)
        part = x[own].clone().requires_grad_()
        y = divided(part).output
        torch.testing.assert_close(y, expected[own], rtol=0, atol=1e-12)
        y.square().sum().backward()
        torch.testing.assert_close(part.grad, inputs.grad[own], rtol=0, atol=1e-11)
        dist.all_reduce(layer.weight.grad)
        torch.testing.assert_close(layer.weight.grad, wanted[1], rtol=0, atol=1e-11)
        theirs = wanted[0][2 * rank * n // world : 2 * (rank + 1) * n // world]
        for p, g in zip((p for e in mine for p in e.parameters()), theirs, strict=True):
            torch.testing.assert_close(_gradient(p), g, rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="divided by the"):
        khot.nn.MoE(layer, experts, group=dist.group.WORLD)
