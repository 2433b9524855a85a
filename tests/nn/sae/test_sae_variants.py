"""JumpReLU, Matryoshka and transcoders: variants that are an axis, a list of prefixes and a target."""

import json

import pytest
import torch
from sae_cases import KINDS, D, K, N, data, make, train

from khot.nn import SparseAutoencoder, SparseAutoencoderConfig, SparseAutoencoderMetrics, selectors
from khot.nn.sae._axes import _Step

E = 7  # the size of a transcoder's targets
ST = selectors.straight_through


def jump(**changes):
    return make(ST, kind="jumprelu", **changes)


def transcoder(kind="topk", selector=ST, **changes):
    config = SparseAutoencoderConfig(d_in=D, d_out=E, latents=N, k=K, kind=kind, **changes)
    return SparseAutoencoder(config, selector=selector, generator=torch.Generator().manual_seed(1))


def pairs(tokens=100, seed=0):
    x = data(tokens, seed)
    mix = torch.randn(D, E, generator=torch.Generator().manual_seed(9))
    return x, 5 * (x @ mix).relu() + 2


class TestJumpReLU:
    def test_thresholds_have_the_gradient_of_the_kernel(self):
        a = torch.tensor([0.9, 1.04, 1.2, 0.97], requires_grad=True)
        threshold = torch.ones(4, requires_grad=True)
        y = _Step.apply(a, threshold, 0.1)
        assert y.tolist() == [0, 1, 1, 0]
        y.sum().backward()
        assert threshold.grad.tolist() == pytest.approx([0, -10, 0, -10])
        assert a.grad is None

    def test_the_expected_code_has_that_gradient(self):
        """Over scores with a smooth law, d/dθ E[a·1(a > θ)] = −θ·p(θ), which no single score shows."""
        a = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
        threshold = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        (a * _Step.apply(a, threshold.expand_as(a), 0.1)).mean().backward()
        assert threshold.grad.item() == pytest.approx(-0.7 / 2, rel=0.02)

    def test_the_code_is_what_exceeds_the_thresholds(self):
        sae, x = jump(), data()
        with torch.no_grad():
            sae.threshold.copy_(torch.linspace(0.1, 1.5, N))
        a = (x / sae.scale - sae.b_dec) @ sae.W_enc + sae.b_enc
        expected = torch.where(a > sae.threshold, a.relu(), 0.0) * sae.scale
        for mode in (True, False):
            torch.testing.assert_close(sae.train(mode).encode(x).dense(), expected)
        out = sae.train()(x)
        l0 = (expected > 0).sum() / len(x)
        torch.testing.assert_close(out.loss - out.fvu, (l0 / K - 1).square())
        out.loss.backward()
        assert sae.threshold.grad.abs().sum() > 0

    @pytest.mark.parametrize("k", [2, 5])
    def test_training_reaches_the_target(self, k):
        sae = train(jump(k=k), 150)
        metrics = SparseAutoencoderMetrics()
        metrics.update(sae, data(1000, 999))
        assert abs(metrics.result()["l0"] - k) < 0.25 * k
        assert (sae.threshold >= 0).all()
        assert len(set(sae.threshold.tolist())) > N / 2  # each learned its own
        free = train(jump(k=k, l0_weight=0.0), 150)  # a negative control: nothing asks for the target
        other = SparseAutoencoderMetrics()
        other.update(free, data(1000, 999))
        assert abs(other.result()["l0"] - k) > abs(metrics.result()["l0"] - k)

    def test_files(self, tmp_path):
        sae = train(jump())
        sae.save(tmp_path)
        config = json.loads((tmp_path / "cfg.json").read_text())
        assert config["architecture"] == "jumprelu"
        loaded = SparseAutoencoder.load(tmp_path)
        assert torch.equal(loaded(data()).reconstruction, sae(data()).reconstruction)
        assert loaded.threshold.shape == (N,)

    def test_what_it_cannot_do_is_refused(self):
        with pytest.raises(ValueError, match=r'"jumprelu" selects by thresholds.* got the selector hard'):
            make(selectors.hard, kind="jumprelu")
        for changes in ({"learn_k": True}, {"multi_topk": 0.125}):
            with pytest.raises(ValueError, match="choose by counts"):
                jump(**changes)
        with pytest.raises(ValueError, match=r"`latent_group` must be None"):
            SparseAutoencoder(jump().config, latent_group="some")


class TestMatryoshka:
    @pytest.mark.parametrize("kind", [*KINDS, "jumprelu"])
    def test_the_loss_is_the_mean_over_prefixes(self, kind):
        changes = {"kind": kind, "aux_weight": 0.0, "l0_weight": 0.0}
        sae, x = make(ST, prefixes=(8, 20), **changes), data()
        out = sae(x)
        dense, total = out.code.dense().detach(), 0.0
        for m in (8, 20, N):
            part = sae.decode(torch.where(torch.arange(N) < m, dense, 0.0))
            total = total + (x - part).square().sum() / (x - x.mean(0)).square().sum()
        torch.testing.assert_close(out.loss, total / 3)
        torch.testing.assert_close(out.fvu, make(ST, **changes)(x).fvu)
        out.loss.backward()
        assert sae.W_dec.grad.isfinite().all()

    def test_the_first_latents_explain_more_than_without(self):
        def first(sae):
            x = data(500, 77)
            dense = sae.encode(x).dense().detach()
            rest = (x - sae.decode(torch.where(torch.arange(N) < 10, dense, 0.0))).detach()
            return float(rest.square().sum() / (x - x.mean(0)).square().sum())

        nested, plain = (first(train(make(prefixes=prefixes), 150)) for prefixes in ((10,), ()))
        assert nested < plain

    def test_prefixes_are_checked_and_saved(self, tmp_path):
        for bad in ((0, 3), (5, 5), (N,), (9, 3)):
            with pytest.raises(ValueError, match="`prefixes` must rise"):
                make(prefixes=bad)
        make(prefixes=[4, 9]).save(tmp_path)
        assert SparseAutoencoder.load(tmp_path).config.prefixes == (4, 9)


class TestTranscoder:
    @pytest.mark.parametrize("kind", [*KINDS, "jumprelu"])
    def test_it_learns_to_predict_and_its_files_are_exact(self, kind, tmp_path):
        sae = transcoder(kind).start(*pairs(500))
        adam, first = torch.optim.Adam(sae.parameters(), lr=1e-2), None
        for step in range(100):
            out = sae(*pairs(100, step))
            first = first or float(out.fvu.detach())
            adam.zero_grad()
            out.loss.backward()
            sae.remove_parallel_gradient()
            adam.step()
            sae.normalize_decoder()
        x, y = pairs(300, 999)
        out = sae.eval()(x, y)
        assert out.reconstruction.shape == (300, E)
        assert out.fvu < 0.6 * first
        torch.testing.assert_close(sae.decode(sae.encode(x)), out.reconstruction)
        sae.save(tmp_path)
        loaded = SparseAutoencoder.load(tmp_path)
        assert torch.equal(loaded(x, y).reconstruction, out.reconstruction)
        assert torch.equal(loaded.encode(x).values, sae.encode(x).values)
        config = json.loads((tmp_path / "cfg.json").read_text())
        assert config["architecture"] == ("topk" if kind == "topk" else "jumprelu") + "_transcoder"
        assert (config["d_out"], config["apply_b_dec_to_input"]) == (E, False)
        metrics = SparseAutoencoderMetrics()
        metrics.update(sae, x, y)
        assert metrics.result()["fvu"] == pytest.approx(out.fvu.item(), rel=1e-4)

    def test_start_explains_more_than_the_mean(self):
        sae = transcoder().start(*pairs(500)).eval()
        assert sae(*pairs(300, 5)).fvu < 0.9

    def test_the_encoder_sees_inputs_as_they_are(self):
        sae, (x, _) = transcoder(selector=selectors.hard).start(*pairs()), pairs()
        sae.train()
        _, weights = sae.weights()
        a = x @ weights["W_enc"] + weights["b_enc"]
        torch.testing.assert_close(sae.encode(x).dense().amax(1), a.amax(1).relu(), rtol=1e-4, atol=1e-4)

    def test_targets_are_checked(self):
        x, y = pairs()
        with pytest.raises(ValueError, match="A transcoder needs `target`"):
            transcoder()(x)
        with pytest.raises(ValueError, match=r"`target` must have as many tokens as `x`, 100; got 99"):
            transcoder()(x, y[:-1])
        with pytest.raises(ValueError, match="`target` is for a transcoder"):
            make()(x, x)
        with pytest.raises(ValueError, match="`layer_norm` must be False with `d_out`"):
            transcoder(layer_norm=True)
