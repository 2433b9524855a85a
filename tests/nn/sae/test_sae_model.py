"""`khot.nn.SparseAutoencoder` against a dense one written out, and what keeps it honest."""

import pytest
import torch
from sae_cases import KINDS, SELECTORS, TOKENS, D, K, N, data, make, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import khot
from khot.nn import SparseAutoencoder, SparseAutoencoderConfig, selectors
from khot.nn.sae._code import geometric_median

pytestmark = pytest.mark.slow


def naive(sae, x, seed=0):
    """The same with dense matrices: the loss of a training pass."""
    inputs = x / sae.scale
    a = (inputs - sae.b_dec) @ sae.W_enc + sae.b_enc
    kind, how = sae.config.kind, {"temperature": 4.0, "generator": torch.Generator().manual_seed(seed)}
    if kind == "topk":
        chosen = sae.selector(a, K, **how)
    elif kind == "batch":
        chosen = sae.selector(a.flatten(), K * len(x), **how).view_as(a)
    else:
        chosen = sae.selector(a.t(), sae.activity.budgets(K, len(x)), **how).t()
    out = (a.relu() * chosen) @ sae.W_dec + sae.b_dec
    return (inputs - out).square().sum() / (inputs - inputs.mean(0)).square().sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("selector", SELECTORS[:3], ids=lambda s: s.__name__)
def test_loss_and_every_gradient_are_those_of_the_dense_one(kind, selector):
    sae = make(selector, kind=kind, candidates=N / K * 10, aux_weight=0.0).double()
    x = data().double()
    loss = sae(x).loss
    loss.backward()
    got = {name: p.grad.clone() for name, p in sae.named_parameters()}
    sae.zero_grad()
    dense = naive(sae, x)
    dense.backward()
    torch.testing.assert_close(loss, dense)
    for name, p in sae.named_parameters():
        torch.testing.assert_close(got[name], p.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_the_comparison_finds_a_dropped_gradient(monkeypatch):
    """A negative control: pre-activations without their gradient, the mistake of a fused op."""
    monkeypatch.setattr("khot.nn.sae._model.chosen", lambda x, weight, bias, places, values, **more: values)
    sae = make(aux_weight=0.0).double()
    sae(data().double()).loss.backward()
    assert sae.W_enc.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_selector_keeps_the_budget_and_follows_its_generator(kind):
    sae = make(selectors.sampled, kind=kind)
    codes = [sae.encode(data(), generator=torch.Generator().manual_seed(s)).dense() for s in (0, 0, 1)]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])
    assert (codes[0] > 0).sum() <= K * TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_budgets_of_the_axes(kind):
    active = make(kind=kind).encode(data()).dense() > 0
    if kind == "topk":
        assert (active.sum(1) == K).all()
    if kind == "batch":
        assert active.sum() == K * TOKENS
        assert active.sum(1).unique().numel() > 1
    if kind == "feature":
        assert active.sum() <= K * TOKENS
        assert ((active.sum(0) == 2) | (active.sum(0) == 3)).all()


def test_pieces_do_not_change_the_result(monkeypatch):
    for kind in KINDS:
        whole = make(kind=kind).encode(data()).dense()
        with monkeypatch.context() as m:
            m.setattr("khot.nn.sae._axes.PIECE", 3 * N)
            torch.testing.assert_close(make(kind=kind).encode(data()).dense(), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_as_large_as_tokens_times_latents_is_kept(kind):
    sae = SparseAutoencoder(SparseAutoencoderConfig(d_in=4, latents=3000, k=2, kind=kind, candidates=2))
    sizes = []

    def pack(t):
        sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        sae(torch.randn(2000, 4)).loss.backward()
    assert max(sizes) <= 4 * 3000 < 2000 * 3000 / 100


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_hard_and_does_not_depend_on_the_batch(kind):
    sae = train(make(selectors.straight_through, kind=kind))
    x = data(400, 77)
    code = sae.encode(x).dense()
    alone = torch.cat([sae.encode(row).dense() for row in x.split(1)])
    torch.testing.assert_close(code, alone, rtol=1e-4, atol=1e-4)
    l0 = (code > 0).sum(1).float()
    assert (l0 <= K).all() if kind == "topk" else (l0.mean() - K).abs() < 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_and_thresholds_follow(kind):
    sae = make(selectors.straight_through, kind=kind)
    first = sae(data()).fvu
    train(sae, 150)
    assert sae(data()).fvu < 0.75 * first
    if kind != "topk":
        assert (sae.activity.threshold > 0).all()
        l0 = (sae.encode(data(2000, 5)).values > 0).sum() / 2000
        assert 0.8 * K < l0 < 1.2 * K


@pytest.mark.parametrize("kind", ["batch", "feature"])
def test_a_threshold_forgets_the_beginning(kind):
    sae, before = make(kind=kind), 0.0
    for seed in range(100):
        if seed == 50:
            before = sae.activity.threshold.clone()
            with torch.no_grad():
                sae.W_enc.mul_(2)
        sae(data(100, seed))
    torch.testing.assert_close(sae.activity.threshold.mean(), 2 * before.mean(), rtol=0.03, atol=0)


@pytest.mark.parametrize("kind", ["topk", "batch"])
@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: s.__name__)
def test_an_empty_batch_in_training_changes_nothing(kind, selector):
    sae = make(selector, kind=kind, dead_after=1)
    sae(data())
    before = {name: t.clone() for name, t in sae.state_dict().items()}
    out = sae(torch.empty(0, D))
    out.loss.backward()
    assert out.loss == 0
    assert not [name for name, t in sae.state_dict().items() if not torch.equal(t, before[name])]
    assert not [name for name, p in sae.named_parameters() if p.grad is not None and p.grad.any()]


def test_decoder_stays_of_unit_length_and_its_gradient_orthogonal():
    sae = make()
    sae(data()).loss.backward()
    before = (sae.W_dec.grad * sae.W_dec).sum(1).abs().max()
    sae.remove_parallel_gradient()
    assert (sae.W_dec.grad * sae.W_dec).sum(1).abs().max() < 1e-5 * max(before, 1)
    with torch.no_grad():
        sae.W_dec.mul_(3)
    sae.normalize_decoder()
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(N))


def test_start_ties_the_weights_and_takes_the_median():
    sae, x = make(), data(200)
    across = sae.W_enc.t() / sae.W_enc.norm(dim=0)[:, None]
    torch.testing.assert_close(across, sae.W_dec.detach())
    torch.testing.assert_close(sae.b_dec * sae.scale, geometric_median(x))
    for kind in KINDS[:2]:  # no multiple of the first codes is better
        sae = make(kind=kind)
        out = sae(x).reconstruction - sae.scale * sae.b_dec
        error = x - sae.scale * sae.b_dec - out
        assert (error * out).sum().abs() < 1e-4 * out.square().sum()
    far = torch.cat([torch.zeros(100, 2), torch.full((40, 2), 1e6)])
    assert geometric_median(far).norm() < 1e-6 * far.mean(0).norm()  # where the mean is far off


def test_scale_of_the_inputs_does_not_matter():
    x = data(200)
    small, large = (make() for _ in range(2))
    large.start(1024 * x)
    torch.testing.assert_close(large(1024 * x).reconstruction, 1024 * small(x).reconstruction)
    torch.testing.assert_close(large.encode(1024 * x).values, 1024 * small.encode(x).values)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_no_perfect_reconstruction(value):
    x = data()
    x[3, 4] = value
    out = make()(x)
    assert out.fvu.isnan()
    assert out.loss.isnan()
    assert make()(torch.ones(5, D)).fvu == 0  # no variance is another matter


def test_layer_norm_is_undone():
    sae = train(make(layer_norm=True))
    x = data(50, 9)
    y = sae(x)
    torch.testing.assert_close(sae(10 * x + 7).reconstruction, 10 * y.reconstruction + 7, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(sae.decode(sae.encode(x)), y.reconstruction)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("selector", [selectors.straight_through, selectors.soft], ids=lambda s: s.__name__)
def test_k_can_be_learned(kind, selector):
    sae = make(selector, kind=kind, learn_k=True, candidates=100.0, aux_weight=0.0).double()
    sae(data().double()).loss.backward()
    assert sae.k.grad != 0
    if selector is selectors.soft:  # the loss of the soft code, a step to either side
        with torch.no_grad():
            ends = [sae(data().double()).fvu for sae.k.data in (sae.k + 1e-5, sae.k - 1e-5)]
        torch.testing.assert_close(sae.k.grad, (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=0)
    costly = train(make(selector, kind=kind, learn_k=True, k_cost=10.0), 100)
    assert 1 <= costly.k < 2.5


@pytest.mark.parametrize(("kind", "least"), [("topk", 1.0), ("batch", 1 / TOKENS), ("feature", N / TOKENS)])
def test_a_learned_k_falls_as_far_as_training_goes_on(kind, least):
    sae = make(selectors.straight_through, kind=kind, learn_k=True)
    for k in (0.5, 1e-6):  # the second is below what any kind can do
        with torch.no_grad():
            sae.k.fill_(k)
        sae(data()).loss.backward()
        sae.normalize_decoder()
        torch.testing.assert_close(sae.k.item(), max(k, least), rtol=1e-6, atol=0)
    sae.start(data())
    sae(data()).loss.backward()
    sae(data(7)).loss.backward()
    assert sae.W_enc.grad.isfinite().all()


def test_only_a_learned_k_costs():
    for learn_k, cost in ((False, 0.0), (True, 2.0 * K)):
        out = make(selectors.straight_through, k_cost=2.0, learn_k=learn_k, aux_weight=0.0)(data())
        torch.testing.assert_close(out.loss - out.fvu, torch.tensor(cost))


def test_multi_topk():
    sae = make(multi_topk=0.125, aux_weight=0.0)
    out = sae(data())
    torch.testing.assert_close(out.loss, out.fvu + out.multi_fvu / 8)
    x = data()
    a = (x / sae.scale - sae.b_dec) @ sae.W_enc + sae.b_enc
    more = sae.scale * ((a.relu() * khot.hard_topk(a, 4 * K)) @ sae.W_dec + sae.b_dec)
    torch.testing.assert_close(out.multi_fvu, (x - more).square().sum() / (x - x.mean(0)).square().sum())


def test_codes_sparse_and_dense():
    sae = make().eval()
    x = data().view(5, 6, D)
    code = sae.encode(x)
    assert code.dense().shape == (5, 6, N)
    torch.testing.assert_close(sae.decode(code), sae(x).reconstruction)
    torch.testing.assert_close(sae.decode(code.dense()), sae.decode(code))
    assert (code.tokens[1:] >= code.tokens[:-1]).all()
    assert sae(torch.empty(0, D)).reconstruction.shape == (0, D)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    sae, x = make(selectors.straight_through), data().to(dtype)
    out = sae(x)
    assert out.reconstruction.dtype == dtype
    assert out.fvu.dtype == torch.float32
    out.loss.backward()
    torch.testing.assert_close(out.fvu, make(selectors.straight_through)(x.float()).fvu)
    half = make(selectors.straight_through).to(dtype)
    half(x).loss.backward()
    assert half.W_enc.grad.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert sae(x).loss.isfinite()


@pytest.mark.parametrize("kind", ["batch", "feature"])
def test_running_means_do_not_stop_in_half_precision(kind, tmp_path):
    half, wide = make(kind=kind).to(torch.bfloat16), make(kind=kind)
    wide.load_state_dict(half.state_dict())
    for seed in range(150):
        x = data(100, seed)
        half(x)
        wide(x)
    for name in ("threshold", "density"):
        got, expected = (getattr(sae.activity, name) for sae in (half, wide))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-4)
    before = half.activity.threshold.clone()
    assert torch.equal(half.to(torch.bfloat16).activity.threshold, before)
    assert half.double().activity.threshold.dtype == torch.float64
    assert half.to(torch.float16).activity.threshold.dtype == torch.float32
    half.eval().save(tmp_path)
    assert torch.equal(SparseAutoencoder.load(tmp_path).activity.threshold, half.scale * before)


def test_a_selector_of_ones_own_and_gradients_to_the_input():
    def cauchy(scores, k, *, temperature, generator=None):
        return khot.cauchy_topk(scores, k, temperature=temperature)

    x = data().requires_grad_()
    make(cauchy)(x).loss.backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": N + 1}, rf"0 < k ≤ {N} \(the number of latents\); got {N + 1}"),
        ({"k": 0}, "`k` must be > 0"),
        ({"k": 2.5}, 'an integer for the kind "topk"; got 2.5'),
        ({"kind": "mutual"}, "`kind` must be one of 'topk', 'batch', 'feature', 'jumprelu'; got 'mutual'"),
        ({"latents": 0}, "`latents` must be ≥ 1; got 0"),
        ({"d_in": 1, "layer_norm": True}, "`layer_norm` needs `d_in` ≥ 2"),  # said that a finite x is not finite
        ({"candidates": 0.5}, "`candidates` must be ≥ 1; got 0.5"),
        ({"zipf": 1.0}, '`zipf` is for the kind "feature"'),
        ({"aux_weight": -1.0}, "`aux_weight` must be ≥ 0"),
    ],
)
def test_bad_configs(changes, says):
    with pytest.raises(ValueError, match=says):
        make(**changes)


def test_bad_calls():
    with pytest.raises(ValueError, match=r"12 features in its last dimension; got \(3, 5\)"):
        make()(torch.randn(3, 5))
    with pytest.raises(ValueError, match=r"at least latents/k = 13.3333 tokens in a training batch.*got 5"):
        make(kind="feature")(data(5))
    with pytest.raises(ValueError, match="`x` must have at least one row; got none"):
        make().start(torch.empty(0, D))
    bad = data()
    bad[[3, 7], 2] = torch.tensor([torch.nan, torch.inf])
    with pytest.raises(ValueError, match=r"finite in torch.float32; got 2 of 30 rows that are not, first 3"):
        make().start(bad)
    with pytest.raises(ValueError, match=r"`code` must have 40 features in its last dimension; got \(3, 41\)"):
        make().decode(torch.zeros(3, 41))
    metrics = khot.nn.SparseAutoencoderMetrics()
    for read in (metrics.result, metrics.density):
        with pytest.raises(ValueError, match="at least one token; got none: call `update` first"):
            read()
    with pytest.raises(TypeError, match="`config` must be a SparseAutoencoderConfig"):
        SparseAutoencoder({"d_in": 3})


def test_repr_and_state_dict():
    sae = train(make(kind="batch"))
    assert repr(sae).startswith("SparseAutoencoder(\n  d_in=12, latents=40, k=3, kind='batch'")
    other = make(kind="batch").eval()
    other.load_state_dict(sae.state_dict())
    assert torch.equal(other(data()).reconstruction, sae(data()).reconstruction)
    assert {name for name, p in sae.named_parameters()} == {"W_enc", "b_enc", "W_dec", "b_dec"}
    assert isinstance(sae.W_enc, nn.Parameter)
    assert (sae.W_enc.shape, sae.W_dec.shape) == ((D, N), (N, D))


class Reads(TorchDispatchMode):
    """Count how often a value of a tensor is read on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_reads_nothing_on_the_host(kind):
    """Temperature and count of batches were read at each step. Feature Choice reads the width of each block."""
    sae = make(selectors.straight_through, kind=kind, multi_topk=0.125)
    with Reads() as reads:
        sae(data()).loss.backward()
    assert reads.count == (1 if kind == "feature" else 0)
    with Reads() as reads:
        float(sae.temperature)
    assert reads.count == 1  # a negative control


def test_a_selector_that_says_it_is_hard_gets_k_candidates():
    seen = []

    def own(scores, k, *, temperature, generator=None):
        seen.append(tuple(scores.shape))
        return khot.hard_topk(scores, k)

    make(own)(data())
    own.is_hard = True
    make(own)(data())
    assert seen == [(TOKENS, 4 * K), (TOKENS, K)]
