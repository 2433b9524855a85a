"""What holds for every public layer: meta, half precision, numpy's numbers, and no reflection in forward."""

import copy
import inspect
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import khot
from khot.nn import (
    Choice,
    KHotGate,
    MoE,
    Router,
    Schedule,
    SigmoidTopK,
    SigmoidTopKAttention,
    SoftNeighbors,
    SparkAttention,
    SparkFFN,
    SparseAutoencoder,
    SparseAutoencoderConfig,
    TokenBudget,
    TokenPruner,
    routing,
)


def autoencoder(k=2, **changes):
    return SparseAutoencoder(SparseAutoencoderConfig(**{"d_in": 8, "latents": 16, "k": k, **changes}))


LAYERS = {
    "SigmoidTopK": partial(SigmoidTopK, 2),
    "SigmoidTopK with a tensor k": lambda: SigmoidTopK(torch.tensor([1.0, 2.0])),
    "SigmoidTopK learned": lambda: SigmoidTopK(
        nn.Parameter(torch.tensor(2.0)), temperature=nn.Parameter(torch.tensor(1.0))
    ),
    "KHotGate": partial(KHotGate, 8, 2),
    "SoftNeighbors": partial(SoftNeighbors, 2),
    "SoftNeighbors learned": lambda: SoftNeighbors(
        nn.Parameter(torch.tensor(2.0)), temperature=nn.Parameter(torch.tensor(1.0))
    ),
    "SigmoidTopKAttention": partial(SigmoidTopKAttention, 8, 2, 3),
    "SigmoidTopKAttention learned": lambda: SigmoidTopKAttention(8, 2, nn.Parameter(torch.tensor([2.0, 3.0]))),
    "SparkFFN": partial(SparkFFN, 8, 16, 2),
    "SparkAttention": partial(SparkAttention, 8, 2, 3),
    "TokenPruner": partial(TokenPruner, 2, score=8),
    "TokenBudget": lambda: TokenBudget(3, 0.5, costs=torch.ones(3)),
    "Choice": lambda: Choice([nn.Identity(), nn.Linear(8, 8)]),
    "Router": partial(Router, 8, 4, 2),
    "Router with a bias": partial(Router, 8, 4, 2, biased=True),
    "Router with a share": partial(Router, 8, 4, 2, share=0.5),
    "MoE": lambda: MoE(Router(8, 4, 2), [nn.Linear(8, 8) for _ in range(4)]),
    **{f"SparseAutoencoder {kind}": partial(autoencoder, kind=kind) for kind in ("topk", "batch", "feature")},
    "SparseAutoencoder learned": partial(autoencoder, learn_k=True, kind="batch"),
}
layers = pytest.mark.parametrize("name", LAYERS)


@layers
def test_print_of_a_layer_on_meta(name):
    """`extra_repr` read the temperature, which meta tensors do not have."""
    with torch.device("meta"):
        made = LAYERS[name]()
    moved = LAYERS[name]().to("meta")
    for layer in (made, moved):
        assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
        assert type(layer).__name__ in repr(layer)
    assert "<meta>" in repr(made) or "SigmoidTopK" not in name


def test_a_schedule_of_a_layer_on_meta():
    with torch.device("meta"):
        gate = KHotGate(8, 2)
    schedule = Schedule(gate, "budget", 8, 2, steps=3)
    schedule.step()
    assert gate.budget.is_meta
    assert "Schedule" in repr(schedule)


@layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_keep_their_precision_and_parameters_are_cast(name, dtype):
    layer = LAYERS[name]()
    before = {key: t.clone() for key, t in layer.named_buffers()}
    layer.to(dtype)
    assert all(p.dtype == dtype for p in layer.parameters())
    for key, t in layer.named_buffers():
        assert t.dtype == before[key].dtype, key
        assert torch.equal(t, before[key]), key
    assert all(t.dtype != torch.float32 for t in layer.double().buffers())
    assert all(t.dtype != torch.float16 for t in copy.deepcopy(layer).half().buffers())


def test_a_buffer_that_is_given_in_half_precision_stays_so_when_it_moves():
    layer = SigmoidTopK(torch.tensor(3.0, dtype=torch.bfloat16))
    assert layer.to("meta").k.dtype == torch.bfloat16
    assert layer.half().k.dtype == torch.float32  # 1e5 is infinite in float16


def test_the_count_of_a_bfloat16_layer_is_not_rounded():
    """1001 is 1000 in bfloat16, and was chosen so."""
    x = torch.randn(3, 3000).bfloat16()
    for hard in (False, True):
        layer = SigmoidTopK(torch.tensor(1001.0), hard=hard).bfloat16()
        y = layer(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, khot.hard_topk(x, 1001) if hard else khot.sigmoid_topk(x, 1001))
    assert (layer(x).sum(-1, dtype=torch.float32) == 1001).all()


def test_a_low_temperature_is_not_zero_in_half_precision():
    """1e-8 is 0 in float16, and all was NaN."""
    x = torch.randn(4, 8)
    layer = SigmoidTopK(2, temperature=1e-8).half()
    assert torch.equal(layer(x.half()), khot.hard_topk(x, 2).half())
    gate = KHotGate(8, 2, temperature=1e-8, design=None).half()
    assert gate(x.half()).isfinite().all()


def test_a_low_temperature_is_not_zero_with_a_half_default_dtype():
    torch.set_default_dtype(torch.float16)
    try:
        layers = SigmoidTopK(2, temperature=1e-8), KHotGate(8, 2, temperature=1e-8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [float(layer.temperature) for layer in layers] == pytest.approx([1e-8, 1e-8])


ROUTES = {
    "softmax_topk": routing.softmax_topk,
    "sigmoid_gates": routing.sigmoid_gates,
    "sigma_topk": routing.sigma_topk,
    "balanced_sigma_topk": routing.balanced_sigma_topk,
    "expert_choice": routing.expert_choice,
    "noisy_topk": partial(routing.noisy_topk, training=False),
    "dselect_k": partial(routing.dselect_k, num_experts=4),
}


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("name", ROUTES)
def test_a_numpy_integer_is_a_count_for_every_route(name, integer):
    """`routing` checked for int, the other functions for any integer."""
    x = torch.randn(10, {"noisy_topk": 8, "dselect_k": 6}.get(name, 4))
    for got, expected in zip(ROUTES[name](x, integer(2)), ROUTES[name](x, 2), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(TypeError, match="`k` must be an int; got bool"):
        ROUTES[name](x, True)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_a_numpy_integer_is_a_count_for_every_layer(integer, tmp_path):
    x, k = torch.randn(40, 8), integer(2)
    assert torch.equal(SigmoidTopK(k)(x), SigmoidTopK(2)(x))
    assert type(SigmoidTopK(k).k) is int
    assert type(SoftNeighbors(k, candidates=integer(5)).k) is int
    gate = KHotGate(integer(8), k).eval()
    assert (gate(torch.ones(3, 8)) == KHotGate(8, 2).eval()(torch.ones(3, 8))).all()
    moe = MoE(Router(integer(8), integer(4), k), [nn.Identity()] * 4, capacity_factor=integer(4))
    assert moe(x).routing.indices.shape == (40, 2)
    for kind in ("topk", "batch", "feature"):
        sae = autoencoder(k, kind=kind, d_in=integer(8), latents=integer(16), dead_after=integer(9), aux_k=integer(2))
        assert sae(x).loss.isfinite()
        sae.save(tmp_path / kind)  # JSON does not take numpy's numbers
        assert SparseAutoencoder.load(tmp_path / kind).config == sae.config
    for select in (khot.nn.selectors.hard, khot.nn.selectors.soft, khot.nn.selectors.sampled):
        how = {"generator": torch.Generator().manual_seed(0)}
        first, again = select(x, k, **how), select(x, 2, generator=torch.Generator().manual_seed(0))
        assert torch.equal(first, again)
    schedule = Schedule(gate, "budget", integer(8), k, steps=integer(2))
    schedule.step()
    assert int(gate.budget) == 4


def test_forward_does_not_look_signatures_up(monkeypatch):
    """Routes and estimators were inspected at each training forward."""
    x = torch.randn(6, 8)
    router, gate = Router(8, 4, 2, route=partial(routing.sigma_topk, sample=True), biased=True), KHotGate(8, 2)
    monkeypatch.setattr(inspect, "signature", None)
    assert router(x).indices.shape == (6, 2)
    assert gate(x).shape == (6, 8)
