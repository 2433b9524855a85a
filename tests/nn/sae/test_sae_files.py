"""Files of sparse autoencoders: exact, in the form of SAELens, and clear errors."""

import json

import pytest
import torch
from sae_cases import KINDS, D, N, data, make, train

import khot
from khot.nn import SparseAutoencoder


class TestFiles:
    @pytest.fixture(params=[(kind, ln) for kind in KINDS for ln in (False, True)], ids=str)
    def sae(self, request):
        return train(make(kind=request.param[0], layer_norm=request.param[1]))

    def test_round_trip_is_exact(self, sae, tmp_path):
        sae.save(tmp_path / "sae")
        loaded = SparseAutoencoder.load(tmp_path / "sae")
        assert torch.equal(loaded(data()).reconstruction, sae(data()).reconstruction)
        assert loaded.config == sae.config
        assert sorted(p.name for p in (tmp_path / "sae").iterdir()) == ["cfg.json", "sae_weights.safetensors"]

    def test_the_form_is_that_of_saelens(self, sae, tmp_path):
        from safetensors.torch import load_file

        sae.save(tmp_path)
        config = json.loads((tmp_path / "cfg.json").read_text())
        weights = load_file(tmp_path / "sae_weights.safetensors")
        is_topk = sae.config.kind == "topk"
        assert config["architecture"] == ("topk" if is_topk else "jumprelu")
        assert (config["d_in"], config["d_sae"], config["dtype"]) == (D, N, "float32")
        assert config["apply_b_dec_to_input"] is True
        assert config["normalize_activations"] == ("layer_norm" if sae.config.layer_norm else "none")
        assert config["metadata"]["sae_lens_version"] >= "6"
        assert set(weights) == {"W_enc", "W_dec", "b_enc", "b_dec", *(() if is_topk else ("threshold",))}
        torch.testing.assert_close(weights["W_dec"].norm(dim=1), torch.ones(N))
        x = data()
        if sae.config.layer_norm:
            x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)
        a = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
        z = a.relu() * (khot.hard_topk(a, config["k"]) if is_topk else a > weights["threshold"])
        torch.testing.assert_close(z, sae.encode(data()).dense(), rtol=1e-4, atol=1e-4)

    @pytest.mark.filterwarnings("ignore")  # its own, and those of what it imports
    def test_saelens_loads_it(self, sae, tmp_path):
        pytest.importorskip("sae_lens", exc_type=ImportError)
        from sae_lens import SAE

        sae.save(tmp_path)
        theirs = SAE.load_from_disk(tmp_path)
        torch.testing.assert_close(theirs.encode(data()), sae.encode(data()).dense())
        torch.testing.assert_close(theirs(data()), sae(data()).reconstruction)


def test_a_learned_k_is_saved_as_it_is_used(tmp_path):
    sae = make(learn_k=True)
    with torch.no_grad():
        sae.k.fill_(4.7)
    sae.eval().save(tmp_path)
    assert json.loads((tmp_path / "cfg.json").read_text())["k"] == 5
    assert torch.equal(SparseAutoencoder.load(tmp_path)(data()).reconstruction, sae(data()).reconstruction)


def test_truncated_foreign_and_missing_files(tmp_path):
    sae = make()
    sae.save(tmp_path)
    weights = tmp_path / "sae_weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        SparseAutoencoder.load(tmp_path)
    make(latents=20).save(tmp_path / "other")
    weights.write_bytes((tmp_path / "other" / "sae_weights.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"must have the tensors of its config; got W_enc \(12, 20\), not \(12, 40\)"):
        SparseAutoencoder.load(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="must be a file; there is none"):
        SparseAutoencoder.load(tmp_path)
    (tmp_path / "cfg.json").write_text("{}")
    with pytest.raises(ValueError, match="must be a config that khot wrote; got KeyError"):
        SparseAutoencoder.load(tmp_path)


def test_missing_safetensors_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[sae\]'"):
        make().save(tmp_path)


def test_a_code_or_weights_of_another_dictionary_are_refused():
    """A code of fewer latents was decoded with the wrong directions, and a b_dec of one number was broadcast."""
    sae, other = make(), make(latents=N - 8)
    with pytest.raises(ValueError, match=f"`code` must have {N} latents"):
        sae.decode(other.eval().encode(data()))
    config, weights = sae.weights()
    with pytest.raises(ValueError, match=r"b_dec \(1,\), not \(12,\)"):
        SparseAutoencoder.from_weights(config, {**weights, "b_dec": weights["b_dec"][:1]})
    with pytest.raises(ValueError, match=r"b_enc of torch\.int32"):
        SparseAutoencoder.from_weights(config, {**weights, "b_enc": weights["b_enc"].int()})
