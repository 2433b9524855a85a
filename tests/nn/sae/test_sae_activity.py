"""Which latents are active: budgets, dead latents and their losses, and metrics."""

import json

import pytest
import torch
from sae_cases import K, N, data, make, train

import khot
from khot.nn import aux_k_loss, aux_zipf_loss
from khot.nn.sae._activity import apportion, zipf
from khot.nn.sae._axes import AXES, Encoder, Running


def test_aux_k_trains_the_encoder_of_dead_latents():
    sae = make()
    x = data()
    weights = (sae.W_enc, sae.b_enc, sae.W_dec)
    dead = torch.tensor([1, 5, 7])
    loss = aux_k_loss(x, x.roll(1, 0), dead, weights, 2)
    loss.backward()
    touched = {name: p.grad.abs().sum(dim) for name, p, dim in (("W_enc", sae.W_enc, 0), ("W_dec", sae.W_dec, 1))}
    for name, total in touched.items():
        assert (total[dead] > 0).all(), name
        assert total.sum() == total[dead].sum(), name
    rest = x.roll(1, 0) - (lambda a: a.relu() * khot.hard_topk(a, 2))(x @ sae.W_enc[:, dead]) @ sae.W_dec[dead]
    torch.testing.assert_close(loss, rest.square().sum() / (x - x.mean(0)).square().sum())


def test_aux_k_that_drops_the_gradient_is_found(monkeypatch):
    """A negative control for the test above: without `chosen`, no dead latent's encoder moves."""
    monkeypatch.setattr("khot.nn.sae._code.chosen", lambda x, weight, bias, places, values, **more: values)
    sae = make()
    aux_k_loss(data(), data(), torch.tensor([1, 5, 7]), (sae.W_enc, sae.b_enc, sae.W_dec), 2).backward()
    assert sae.W_enc.grad is None


def test_dead_latents_are_counted_and_revived():
    sae = make(dead_after=99, aux_weight=1 / 32)
    with torch.no_grad():
        sae.b_enc[:5] = -1000.0
        sae.W_enc[:, 5:10] = 0.0
    assert not sae.dead().any()
    sae(data(100))
    assert sae.dead().nonzero().squeeze(1).tolist()[:10] == list(range(10))
    out = sae(data(100, 1))
    assert out.aux_loss > 0
    out.loss.backward()
    assert sae.W_enc.grad[:, 5:10].abs().sum() >= 0
    sae = make(dead_after=99, aux_weight=0.0)
    assert sae(data(100)).aux_loss == 0


def test_aux_zipf_is_aux_k_for_latents_never_active():
    sae, x = make(), data()
    weights = (sae.W_enc, sae.b_enc, sae.W_dec)
    density = torch.linspace(0.5, 0.0, N)
    density[-4:] = 0
    tiny = aux_zipf_loss(x, x, density, weights, 2, k=K, fraction=1e-6)
    torch.testing.assert_close(tiny, aux_k_loss(x, x, torch.arange(N - 4, N), weights, 2))
    assert aux_zipf_loss(x, x, density, weights, 2, k=K, fraction=0.0) == 0
    assert make(kind="feature", zipf=1.0, underused=0.9)(x).aux_loss >= 0


def test_budgets_sum_and_stay_within_bounds():
    shares = zipf(torch.tensor([1.0, 5.0, 3.0]), 1.0)
    torch.testing.assert_close(shares, torch.tensor([1 / 3, 1, 1 / 2], dtype=torch.float64) / (11 / 6))
    for total, most in ((100, 40), (120, 3), (77, 100), (40, 7)):
        budgets = apportion(zipf(torch.randn(40), 1.0), total, most)
        assert budgets.sum() == total
        assert (budgets >= 1).all()
        assert (budgets <= most).all()
    assert apportion(torch.full((4,), 0.25, dtype=torch.float64), 10, 9).tolist() == [3, 3, 2, 2]


def test_zipf_budgets_go_to_who_could_explain_most():
    sae = make(kind="feature", zipf=1.0)
    for seed in range(5):
        sae(data(100, seed))
    budgets = sae.activity.budgets(K, 100)
    assert budgets.sum() == K * 100
    assert budgets[sae.activity.energy.argmax()] == budgets.max() > 5 * budgets.min()


def test_zipf_budgets_do_not_make_all_latents_as_wide_as_the_first():
    encoder = Encoder(torch.randn(500, 4), torch.randn(4, 300), torch.zeros(300), 500, 300)
    budgets = apportion(zipf(torch.randn(300), 1.0), 1000, 500)
    blocks = AXES["feature"].candidates(encoder, 2.0, 1.0, Running(lambda k, count: budgets, torch.zeros(300)))
    assert sum(block.values.numel() for block in blocks) < 2 * 1000
    found = torch.cat([block.latents[:, 0] for block in blocks])
    assert found.sort().values.tolist() == list(range(300))
    assert all(block.values.shape[1] >= block.k.max() for block in blocks)


def test_metrics_are_those_of_all_tokens_at_once():
    sae, x = train(make(kind="batch")), data(300, 8)
    metrics = khot.nn.SparseAutoencoderMetrics()
    for part in x.split(77):
        metrics.update(sae, part)
    got, out = metrics.result(), sae(x)
    y = out.reconstruction.detach()
    active = out.code.dense() > 0
    assert got["fvu"] == pytest.approx(float((x - y).square().sum() / (x - x.mean(0)).square().sum()), rel=1e-5)
    assert got["l0"] == pytest.approx(float(active.sum(1).float().mean()))
    assert got["l0_percentiles"]["50"] == active.sum(1).sort().values[149]
    assert got["alive"] == pytest.approx(float(active.any(0).float().mean()))
    assert got["dead"] == int((~active.any(0)).sum())
    assert got["cosine"] == pytest.approx(float(torch.cosine_similarity(x, y).mean()), rel=1e-5)
    assert got["relative_reconstruction_bias"] == pytest.approx(float(y.square().sum() / (x * y).sum()), rel=1e-5)
    assert sum(got["density_histogram"]["latents"]) == N - got["dead"]
    json.dumps(got)
