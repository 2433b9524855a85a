"""Files of sparsify and dictionary_learning: names and shapes, and the same numbers after a round trip."""

import json

import pytest
import torch
from sae_cases import D, N, data, make, train

from khot.nn import SparseAutoencoder, SparseAutoencoderConfig, selectors
from khot.sae import load_dictionary_learning, load_sparsify, save_dictionary_learning, save_sparsify


def same(ours, theirs, exact=True):
    x = data(50, 3)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(theirs.encode(x).dense(), ours.encode(x).dense(), **tolerance)
    torch.testing.assert_close(theirs.decode(theirs.encode(x)), ours.decode(ours.encode(x)), **tolerance)


def test_sparsify_round_trip_and_form(tmp_path):
    from safetensors.torch import load_file

    sae = train(make())
    save_sparsify(sae, tmp_path)
    tensors = load_file(tmp_path / "sae.safetensors")
    shapes = {"encoder.weight": (N, D), "encoder.bias": (N,), "W_dec": (N, D), "b_dec": (D,)}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == shapes
    about = json.loads((tmp_path / "cfg.json").read_text())
    assert (about["d_in"], about["num_latents"], about["k"], about["transcode"]) == (D, N, 3, False)
    same(sae, load_sparsify(tmp_path))
    x = data(50, 3)  # as sparsify encodes it
    a = (x - tensors["b_dec"]) @ tensors["encoder.weight"].t() + tensors["encoder.bias"]
    top = a.relu().topk(about["k"])
    y = (tensors["W_dec"][top.indices] * top.values[..., None]).sum(1) + tensors["b_dec"]
    torch.testing.assert_close(y, sae(x).reconstruction, rtol=1e-4, atol=1e-4)


def test_a_transcoder_goes_through_sparsify(tmp_path):
    config = SparseAutoencoderConfig(d_in=D, d_out=D, latents=N, k=3)
    sae = SparseAutoencoder(config).start(data(), data().relu()).eval()
    save_sparsify(sae, tmp_path)
    loaded = load_sparsify(tmp_path)
    assert loaded.config.d_out == D
    same(sae, loaded)


@pytest.mark.parametrize("kind", ["topk", "batch", "feature", "jumprelu"])
def test_dictionary_learning_round_trip(kind, tmp_path):
    sae = train(make(selectors.straight_through, kind=kind))
    save_dictionary_learning(sae, tmp_path)
    name = {"topk": "AutoEncoderTopK", "batch": "BatchTopKSAE"}.get(kind, "JumpReluAutoEncoder")
    assert json.loads((tmp_path / "config.json").read_text())["trainer"]["dict_class"] == name
    tensors = torch.load(tmp_path / "ae.pt", weights_only=True)
    if name == "JumpReluAutoEncoder":
        assert {n: tuple(t.shape) for n, t in tensors.items()} == {
            "W_enc": (D, N), "b_enc": (N,), "W_dec": (N, D), "b_dec": (D,), "threshold": (N,)}  # fmt: skip
        a = data() @ tensors["W_enc"] + tensors["b_enc"]  # as the class encodes, without b_dec
        code = a.relu() * (a > tensors["threshold"])
        torch.testing.assert_close(code, sae.encode(data()).dense(), rtol=1e-4, atol=1e-4)
    else:
        assert {n: tuple(t.shape) for n, t in tensors.items()} == {
            "encoder.weight": (N, D), "encoder.bias": (N,), "decoder.weight": (D, N), "b_dec": (D,), "k": (),
            "threshold": ()}  # fmt: skip
    same(sae, load_dictionary_learning(tmp_path), exact=name != "JumpReluAutoEncoder")


def test_the_k_of_a_jumprelu_is_that_of_its_config(tmp_path):
    """It was 1 after loading, which further training would aim at."""
    save_dictionary_learning(train(make(selectors.straight_through, kind="jumprelu", k=2.5)), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert load_dictionary_learning(tmp_path).config.k == 2.5
    del about["trainer"]["k"]
    for more, k in (({"target_l0": 3.0}, 3), ({}, 1)):
        (tmp_path / "config.json").write_text(json.dumps({"trainer": {**about["trainer"], **more}}))
        assert load_dictionary_learning(tmp_path).config.k == k


def test_what_the_others_lack_or_khot_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sparsify has TopK alone"):
        save_sparsify(make(kind="batch"), tmp_path)
    with pytest.raises(ValueError, match="no transcoders and no `layer_norm`"):
        save_dictionary_learning(make(layer_norm=True), tmp_path)
    save_sparsify(make(), tmp_path)
    about = json.loads((tmp_path / "cfg.json").read_text())
    for change, said in (({"skip_connection": True}, "skip_connection"), ({"activation": "groupmax"}, "groupmax")):
        (tmp_path / "cfg.json").write_text(json.dumps({**about, **change}))
        with pytest.raises(ValueError, match=said):
            load_sparsify(tmp_path)
    save_dictionary_learning(make(), tmp_path)
    (tmp_path / "config.json").write_text('{"trainer": {"dict_class": "GatedAutoEncoder"}}')
    with pytest.raises(ValueError, match="got GatedAutoEncoder"):
        load_dictionary_learning(tmp_path)
    with pytest.raises(ValueError, match="must be a JSON file"):
        load_dictionary_learning(tmp_path / "none")


def test_no_pickle_is_executed(tmp_path):
    save_dictionary_learning(make(), tmp_path)

    class Bad:
        def __reduce__(self):
            return print, ("executed",)

    torch.save({"k": Bad()}, tmp_path / "ae.pt")
    with pytest.raises(Exception, match=r"weights_only|Unsupported|Weights only"):
        load_dictionary_learning(tmp_path)


def test_weights_that_do_not_fit_are_named_and_never_broadcast(tmp_path):
    """A b_dec of one number was spread over all inputs in silence; other shapes and names raised torch's errors."""
    from safetensors.torch import load_file, save_file

    folders = [tmp_path / name for name in ("sparsify", "topk", "batch", "jumprelu")]
    save_sparsify(make(), folders[0])
    for folder in folders[1:]:
        save_dictionary_learning(train(make(selectors.straight_through, kind=folder.name)), folder)

    def attack(folder, name, change):
        is_ours = folder.name == "sparsify"
        path = folder / ("sae.safetensors" if is_ours else "ae.pt")
        whole = path.read_bytes()
        tensors = load_file(path) if is_ours else torch.load(path, weights_only=True)
        tensors[name] = None if change is None else change(tensors[name]).contiguous()
        tensors = {of: t for of, t in tensors.items() if t is not None}
        save_file(tensors, path) if is_ours else torch.save(tensors, path)
        with pytest.raises(ValueError, match=r"must hold|must have|must satisfy"):
            (load_sparsify if is_ours else load_dictionary_learning)(folder)
        path.write_bytes(whole)

    cases = {
        "sparsify": ("encoder.weight", "encoder.bias", "W_dec", "b_dec"),
        "topk": ("encoder.weight", "encoder.bias", "decoder.weight", "b_dec"),
        "batch": ("encoder.weight", "encoder.bias", "decoder.weight", "b_dec"),
        "jumprelu": ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"),
    }
    for folder in folders:
        for name in cases[folder.name]:
            for change in (None, lambda t: t[:1], lambda t: t[:5], lambda t: t.sum(-1), lambda t: t.int()):
                if name == "threshold" and change is not None and change(torch.ones(N)).ndim == 0:
                    continue  # one threshold for all latents is a form of theirs
                attack(folder, name, change)
    attack(tmp_path / "topk", "k", None)
    attack(tmp_path / "batch", "threshold", None)


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_file_of_tensors_is_named(content, tmp_path):
    save_dictionary_learning(make(), tmp_path)
    path = tmp_path / "ae.pt"
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    with pytest.raises(ValueError, match=r"ae\.pt must be a whole file of tensors"):
        load_dictionary_learning(tmp_path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="tensors by name; got list"):
        load_dictionary_learning(tmp_path)
    for text in ('{"trainer": null}', '{"trainer": {"dict_class": [1]}}', '"trainer"'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"must hold one of|must have trainer"):
            load_dictionary_learning(tmp_path)
