"""Sparse autoencoders with tokens or latents divided over processes, against one process."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from khot.nn import SparseAutoencoder, SparseAutoencoderConfig, SparseAutoencoderMetrics, selectors

warnings.filterwarnings("ignore", message=".*tokens alone")  # of the references, which are one process each
D, N, TOKENS, STEPS = 6, 22, 40, 3
KINDS = {
    "topk": {"k": 3},
    "batch": {"k": 2.3, "kind": "batch"},
    "feature": {"k": 3, "kind": "feature"},
    "zipf": {"k": 3, "kind": "feature", "zipf": 0.7},
    "norm": {"k": 3, "layer_norm": True, "multi_topk": 1 / 8},
    "multi": {"k": 2, "kind": "batch", "multi_topk": 1 / 8},
    "idle": {"k": 3, "kind": "batch", "underused": 0.9, "aux_k": 2},
    "learned": {"k": 2, "learn_k": True, "k_cost": 0.01},
    "learned batch": {"k": 2, "kind": "batch", "learn_k": True, "k_cost": 0.01},
    "learned feature": {"k": 3, "kind": "feature", "learn_k": True, "k_cost": 0.01},
}


def data(seed):
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x + 0.3 * x.roll(1, 1).square()


def own_tokens(index, count):
    """The slice of this process's tokens: uneven, and empty for the last of three or more."""
    cuts = [0, TOKENS // 4, TOKENS, *[TOKENS] * count][: count + 1] if count < 4 else [0, 10, 17, TOKENS, TOKENS]
    return slice(cuts[index], cuts[index + 1])


def model(options, selector=selectors.straight_through, **groups):
    config = SparseAutoencoderConfig(d_in=D, latents=N, dead_after=30, temperature=0.5, **options)
    sae = SparseAutoencoder(config, selector=selector, generator=torch.Generator().manual_seed(0), **groups)
    sae.double().start(data(9))
    with torch.no_grad():  # some latents are dead
        sae.b_enc.sub_(torch.tensor([9.0, 0, 0, 0, 0]).repeat(N)[:N].double()[sae.ranks.part(N)])
    return sae


def trained(sae, wrap=lambda sae: sae, own=slice(None), seed=0):
    """Some steps of SGD; the losses, the gradients of the last step, and the model."""
    wrapped, losses = wrap(sae), []
    optimizer = torch.optim.SGD(sae.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = wrapped(data(seed + step)[own])
        out.loss.backward()
        sae.remove_parallel_gradient()
        optimizer.step()
        sae.normalize_decoder()
        losses.append(torch.stack([part.detach() for part in (out.loss, out.fvu, out.aux_loss, out.multi_fvu)]))
    return torch.stack(losses), sae


def close(got, wanted, atol=1e-12):
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


def agree(found, whole, part=lambda name, t: t, atol=1e-12):
    (losses, sae), (expected, one) = found, whole
    close(losses, expected, atol)
    for (name, p), (_, q) in zip(sae.named_parameters(), one.named_parameters(), strict=True):
        close(p.detach(), part(name, q.detach()), atol)
        close(p.grad, part(name, q.grad), atol)
    for (_, p), (_, q) in zip(sae.activity.named_buffers(), one.activity.named_buffers(), strict=True):
        close(p, q, atol)
    assert losses[:, 2].any(), "the auxiliary loss took part"


def autoencoders_under_ddp():
    own = own_tokens(dist.get_rank(), dist.get_world_size())
    for options in KINDS.values():
        agree(trained(model(options, group=dist.group.WORLD), DistributedDataParallel, own), trained(model(options)))
    for selector in (selectors.hard, selectors.soft):
        for name in ("topk", "batch", "feature"):
            make = partial(model, KINDS[name], selector)
            agree(trained(make(group=dist.group.WORLD), DistributedDataParallel, own), trained(make()))
    x = data(5).float()
    sae, one = (model(KINDS["batch"], group=group).float() for group in (dist.group.WORLD, None))
    wrapped = DistributedDataParallel(sae)
    losses = wrapped(x[own]).loss, one(x).loss
    for loss in losses:
        loss.backward()
    close(*(loss.detach() for loss in losses), atol=1e-6)
    for p, q in zip(sae.parameters(), one.parameters(), strict=True):
        close(p.grad, q.grad, atol=1e-6)


def without_the_group_gradients_differ():
    own = own_tokens(dist.get_rank(), dist.get_world_size())
    for name in ("topk", "batch", "feature"):
        alone, whole = trained(model(KINDS[name]), DistributedDataParallel, own), trained(model(KINDS[name]))
        with pytest.raises(AssertionError):
            agree(alone, whole, atol=1e-4)


def part_of(name, t, rank, count):
    """This process's part of a parameter."""
    dim = {"W_enc": 1, "b_enc": 0, "W_dec": 0}.get(name)
    first, last = N * rank // count, N * (rank + 1) // count
    return t if dim is None else t.narrow(dim, first, last - first)


def latents_divided():
    rank, count = dist.get_rank(), dist.get_world_size()
    part = partial(part_of, rank=rank, count=count)
    for options in KINDS.values():
        found, whole = trained(model(options, latent_group=dist.group.WORLD)), trained(model(options))
        agree(found, whole, part)
        sae, one, x = found[1].eval(), whole[1].eval(), data(3).requires_grad_()
        close(sae(x).reconstruction, one(x).reconstruction)
        code = sae.encode(x)
        close(code.dense(), part("b_enc", one.encode(x).dense().t()).t())
        close(sae.decode(code), one.decode(one.encode(x)))
        grads = [torch.autograd.grad(each.train()(x).loss, x)[0] for each in (sae, one)]
        close(*grads)
    for selector in (selectors.hard, selectors.soft):
        for name in ("topk", "batch", "feature"):
            make = partial(model, KINDS[name], selector)
            agree(trained(make(latent_group=dist.group.WORLD)), trained(make()), part)
    sae = model(KINDS["topk"], latent_group=dist.group.WORLD)
    sae.ranks.total = lambda t, groups: t  # a negative control: the decoder's sums of one process alone
    wrong = trained(sae)
    with pytest.raises(AssertionError):
        agree(wrong, trained(model(KINDS["topk"])), part)


def tokens_and_latents_divided():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "latents"))
    tokens, latents = mesh.get_group("tokens"), mesh.get_group("latents")
    own, part = own_tokens(dist.get_rank(tokens), 2), partial(part_of, rank=dist.get_rank(latents), count=2)
    for options in KINDS.values():
        sae = model(options, group=tokens, latent_group=latents)
        wrap = partial(DistributedDataParallel, process_group=tokens)
        agree(trained(sae, wrap, own), trained(model(options)), part)


def samples_have_the_right_size():
    x, rank, generator = data(4), dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    own = own_tokens(rank, dist.get_world_size())
    for groups, part in (({"group": dist.group.WORLD}, own), ({"latent_group": dist.group.WORLD}, slice(None))):
        sae = model({"k": 2, "kind": "batch"}, selectors.sampled, **groups)
        with torch.no_grad():
            sae.b_enc.fill_(3.0)  # so that what is drawn is positive
        out = sae(x[part], generator=generator)
        count = (out.code.values > 0).sum()
        dist.all_reduce(count)
        assert int(count) == 2 * TOKENS
        out.loss.backward()
        assert sae.W_enc.grad.isfinite().all()


def autoencoders_under_fsdp():
    own = own_tokens(dist.get_rank(), dist.get_world_size())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("topk", "batch", "feature", "norm"):
        sae = model(KINDS[name], group=dist.group.WORLD)
        found = trained(sae, partial(fully_shard, mesh=mesh), own)
        losses, one = trained(model(KINDS[name]))
        close(found[0], losses)
        for p, q in zip(sae.parameters(), one.parameters(), strict=True):
            close(p.full_tensor(), q.detach())
            close(p.grad.full_tensor(), q.grad)
        for (_, p), (_, q) in zip(sae.activity.named_buffers(), one.activity.named_buffers(), strict=True):
            close(p, q)
        register_fsdp_forward_method(sae, "encode")
        close(sae.eval().encode(data(7)).dense(), one.eval().encode(data(7)).dense())


def files_are_those_of_one_process():
    root, world = Path(), dist.group.WORLD
    _, one = trained(model(KINDS["batch"]))
    divided = trained(model(KINDS["batch"], latent_group=world))[1]
    sharded = trained(model(KINDS["batch"], group=dist.new_group([dist.get_rank()], use_local_synchronization=True)))[1]
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for name, sae in (("divided", divided), ("sharded", sharded)):
        sae.save(root / name)
        loaded = SparseAutoencoder.load(root / name)
        for p, q in zip(loaded.parameters(), one.parameters(), strict=True):
            close(p.detach() * (loaded.scale if p.ndim == 1 else 1), q.detach() * (one.scale if q.ndim == 1 else 1))
        x = data(2)
        close(loaded(x).reconstruction, one.eval()(x).reconstruction)
        again = SparseAutoencoder.load(root / name, latent_group=world)
        close(again(x).reconstruction, loaded(x).reconstruction)
    (root / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):  # the first process's error, on all
        divided.save(root / "file" / "below")


def metrics_of_parts():
    x, world, one = data(6), dist.group.WORLD, model(KINDS["batch"]).eval()
    own = own_tokens(dist.get_rank(), dist.get_world_size())
    wanted = SparseAutoencoderMetrics()
    wanted.update(one, x)
    tokens, latents = (
        SparseAutoencoderMetrics(group=world),
        SparseAutoencoderMetrics(latent_group=world),
    )
    tokens.update(one, x[own])
    latents.update(model(KINDS["batch"], latent_group=world).eval(), x)
    for found in (tokens, latents):
        result = found.result()
        for name, value in wanted.result().items():
            assert result[name] == (pytest.approx(value, abs=1e-12) if isinstance(value, float) else value), name
    with pytest.raises(ValueError, match="latent_group"):
        wanted.update(model(KINDS["batch"], latent_group=world).eval(), x)
