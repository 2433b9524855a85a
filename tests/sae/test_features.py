"""`khot.sae.features`: every field against a dense computation, ties, parts, documents, tokens in files."""

import json

import numpy as np
import pytest
import torch
from sae_runs import matrix

from khot.nn import SparseAutoencoder, SparseAutoencoderConfig
from khot.sae import Activations, Tokens, _features, features, open_tokens, open_vocabulary

LATENTS = 24


def whole(kind="topk", tokens=600, seed=0):
    """An autoencoder and activations of whole numbers: every sum is exact in float32, and many are equal."""
    rng = np.random.default_rng(seed)
    sae = SparseAutoencoder(SparseAutoencoderConfig(d_in=6, latents=LATENTS, k=3, kind=kind)).requires_grad_(False)
    sae.W_enc.copy_(torch.from_numpy(rng.integers(-2, 3, (6, LATENTS)).astype(np.float32)))
    sae.W_dec.copy_(torch.nn.functional.normalize(sae.W_enc.t()))
    sae.W_enc[:, 7] = -sae.W_enc[:, 7].abs()
    sae.b_enc[7] = -1000  # a dead latent
    if kind == "batch":
        sae.activity.threshold.fill_(4.0)
    return sae.eval(), torch.from_numpy(rng.integers(-3, 4, (tokens, 6)).astype(np.float32))


def in_parts(monkeypatch, rows):
    monkeypatch.setattr(_features, "ROWS", rows)


@pytest.mark.parametrize("kind", ["topk", "batch"])
@pytest.mark.parametrize("rows", [600, 64, 7])
def test_figures_are_those_of_the_dense_code(monkeypatch, kind, rows):
    sae, x = whole(kind)
    in_parts(monkeypatch, rows)
    found = features(sae, x, context=2)
    dense = sae.encode(x).dense()
    assert found.positions == len(x)
    assert torch.equal(found.count, (dense > 0).sum(0))
    assert torch.equal(found.maximum, dense.max(0).values)
    assert torch.allclose(found.mean, dense.sum(0) / (dense > 0).sum(0).clamp(min=1), rtol=1e-6)
    assert torch.allclose(found.energy, dense.double().square().sum(0))
    assert torch.allclose(found.density, (dense > 0).double().mean(0))
    for latent in range(LATENTS):
        values = dense[:, latent][dense[:, latent] > 0].numpy()
        edges = found.edges.numpy().copy()
        edges[0], edges[-1] = 0, np.inf
        assert np.array_equal(np.histogram(values, edges)[0], found.histogram[latent].numpy())
    assert found.count[7] == 0, "the dead latent"
    assert found.top.rows[7].tolist() == [-1] * 8


def expected_top(dense, documents, examples):
    """By falling activation, then by row, the first of each document; by a loop."""
    result = []
    for column in dense.t().tolist():
        seen, rows = set(), []
        for row in sorted(range(len(column)), key=lambda i: (-column[i], i)):
            if column[row] > 0 and documents[row] not in seen and len(rows) < examples:
                seen.add(documents[row])
                rows.append(row)
        result.append(rows + [-1] * (examples - len(rows)))
    return result


@pytest.mark.parametrize("rows", [600, 50, 7])
@pytest.mark.parametrize("length", [1, 20, 300])
def test_top_examples_are_of_different_documents_and_ties_go_to_the_first(monkeypatch, rows, length):
    sae, x = whole()
    in_parts(monkeypatch, rows)
    documents = np.arange(len(x)) // length
    found = features(sae, x, documents=documents, examples=5, context=3)
    dense = sae.encode(x).dense()
    assert found.top.rows.tolist() == expected_top(dense, documents, 5)
    wrong = expected_top(dense.flip(0), documents, 5)  # a negative control: ties the other way round
    assert found.top.rows.tolist() != [[len(x) - 1 - r if r >= 0 else -1 for r in rows] for rows in wrong]
    for latent, row in ((latent, row) for latent in range(LATENTS) for row in range(5)):
        at = int(found.top.rows[latent, row])
        if at < 0:
            continue
        assert found.top.values[latent, row] == dense[at, latent]
        for offset in range(-3, 4):
            other = at + offset
            is_inside = 0 <= other < len(x) and documents[other] == documents[at]
            expected = float(dense[other, latent]) if is_inside else -1.0
            assert float(found.top.shades[latent, row, offset + 3]) == expected


def test_a_document_that_comes_again_is_another():
    sae, x = whole(tokens=40)
    again = features(sae, x, documents=np.array([0] * 10 + [1] * 10 + [0] * 20), context=15)
    apart = features(sae, x, documents=np.array([0] * 10 + [1] * 10 + [2] * 20), context=15)
    assert torch.equal(again.top.rows, apart.top.rows)
    assert torch.equal(again.top.shades, apart.top.shades)


def test_the_sample_is_uniform_and_does_not_depend_on_the_parts(monkeypatch):
    sae, x = whole(tokens=2000)
    at_once = features(sae, x, examples=6).sampled
    in_parts(monkeypatch, 33)
    assert torch.equal(features(sae, x, examples=6).sampled.rows, at_once.rows)
    dense = sae.encode(x).dense()
    places, top = [], []
    for latent in range(LATENTS):
        active = dense[:, latent].nonzero().squeeze(1)
        if len(active) >= 50:
            rows = at_once.rows[latent]
            assert (dense[rows, latent] > 0).all()
            assert len(set(rows.tolist())) == 6
            assert (at_once.values[latent].diff() <= 0).all()
            places += (torch.searchsorted(active, rows).double() / len(active)).tolist()
            top += (torch.searchsorted(active, active[:6]).double() / len(active)).tolist()
    assert len(places) > 60
    bound = 4 / (12 * len(places)) ** 0.5  # four standard errors of a mean of uniform places
    assert abs(np.mean(places) - 0.5) < bound
    assert abs(np.mean(top) - 0.5) > bound, "the first rows are no sample"


def test_neighbors_and_logits_are_those_of_all_products(monkeypatch):
    sae, x = whole()
    sae.W_dec[3] = sae.W_dec[5]  # equal cosines with all others
    monkeypatch.setattr(_features, "BLOCK", 100)
    unembedding = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    unembedding[9] = unembedding[4]
    found = features(sae, x, neighbors=4, unembedding=unembedding)
    cosines = torch.nn.functional.normalize(sae.W_dec) @ torch.nn.functional.normalize(sae.W_dec).t()
    cosines.fill_diagonal_(-2)
    for latent in range(LATENTS):
        order = sorted(range(LATENTS), key=lambda i: (-round(float(cosines[latent, i]), 5), i))[:4]
        assert [round(float(cosines[latent, i]), 5) for i in order] == pytest.approx(
            found.neighbors.values[latent].tolist(), abs=2e-5
        )
    assert int(found.neighbors.index[3, 0]) == 5
    effects = torch.nn.functional.normalize(sae.W_dec) @ unembedding.t()
    assert torch.allclose(found.promoted.values, effects.topk(4).values, atol=1e-6)
    assert torch.allclose(found.suppressed.values, effects.topk(4, largest=False).values, atol=1e-6)
    assert torch.allclose(effects.gather(1, found.promoted.index), found.promoted.values, atol=1e-6)
    for row in found.promoted.index.tolist():
        if 9 in row:
            assert row.index(4) == row.index(9) - 1, "of equal effects, the smaller number first"


def test_a_limit_reads_parts_and_says_how_many(monkeypatch):
    sae, x = whole()
    in_parts(monkeypatch, 50)
    seen = []
    found = features(sae, Activations(x.numpy()), limit=200, on_rows=lambda done, total: seen.append((done, total)))
    assert found.positions == 200
    assert seen[-1] == (200, 200)
    assert int(found.top.rows.max()) >= 400, "the last part too"
    assert features(sae, x, limit=10**6).positions == len(x)


def test_it_leaves_the_mode_of_the_model_as_it_was():
    sae, x = whole()
    features(sae.train(), x)
    assert sae.training


def test_errors_say_what_is_wrong():
    sae, x = whole()
    with pytest.raises(ValueError, match="one for each of the 600 rows"):
        features(sae, x, tokens=Tokens.of(["a"]))
    with pytest.raises(ValueError, match="must have 6 columns"):
        features(sae, torch.from_numpy(matrix()))
    with pytest.raises(ValueError, match=r"shape \(600,\)"):
        features(sae, x, documents=np.zeros(3))
    with pytest.raises(ValueError, match=r"\(vocabulary, 6\)"):
        features(sae, x, unembedding=torch.zeros(6, 5))
    with pytest.raises(ValueError, match="examples"):
        features(sae, x, examples=0)


def test_tokens_from_files(tmp_path):
    for name, text in {
        "strings.jsonl": '"to"\n"be</script>"\n"\\n"\n',
        "documents.jsonl": '["to", "be</script>"]\n["\\n"]\n',
        "lines.txt": "to\nbe</script>\n\nor",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert [open_tokens(tmp_path / "strings.jsonl").text(i) for i in range(3)] == ["to", "be</script>", "\n"]
    assert open_tokens(tmp_path / "strings.jsonl").documents is None
    assert open_tokens(tmp_path / "documents.jsonl").documents.tolist() == [0, 0, 1]
    assert open_tokens(tmp_path / "lines.txt").documents.tolist() == [0, 0, 1]
    np.save(tmp_path / "ids.npy", np.array([[0, 2], [1, 1]]))
    (tmp_path / "vocabulary.json").write_text(json.dumps({"a": 0, "b": 1, "c": 2}))
    (tmp_path / "vocabulary.txt").write_text("a\nb\nc\n")
    for name in ("vocabulary.json", "vocabulary.txt"):
        tokens = open_tokens(tmp_path / "ids.npy", open_vocabulary(tmp_path / name))
        assert [tokens.text(i) for i in range(4)] == ["a", "c", "b", "b"]
        assert tokens.documents.tolist() == [0, 0, 1, 1]


def test_files_that_are_no_tokens(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([0, 5]))
    with pytest.raises(ValueError, match="give the vocabulary"):
        open_tokens(tmp_path / "ids.npy")
    with pytest.raises(ValueError, match="numbers below 2"):
        open_tokens(tmp_path / "ids.npy", ["a", "b"])
    for text, problem in (("{", "line 1 is not"), ("3", "line 1 has neither"), ('"a"\n["b"]', "not both")):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ValueError, match=problem):
            open_tokens(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match=r"jsonl, \.txt or \.npy"):
        open_tokens(tmp_path / "tokens.csv")


def test_a_vocabulary_of_odd_numbers_is_refused(tmp_path):
    """A number of 1e9 took all memory, and others raised a TypeError."""
    path = tmp_path / "v.json"
    for text in ('{"a": 1000000000}', '{"a": -1}', '{"a": 1.5}', '{"a": true}', '{"a": "x"}', '{"a": null}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"v\.json must have token numbers from 0 to"):
            open_vocabulary(path)
    for content in (b"{", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"v\.json must be a JSON file"):
            open_vocabulary(path)


def test_damaged_files_of_token_numbers_are_named(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(100))
    np.savez(tmp_path / "ids.npz", a=np.arange(100))
    whole = (tmp_path / "ids.npy").read_bytes()
    for content in (b"", b"no numpy", whole[:20], whole[:-8], (tmp_path / "ids.npz").read_bytes()):
        (tmp_path / "ids.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"ids\.npy must be a complete \.npy file"):
            open_tokens(tmp_path / "ids.npy", list(map(str, range(100))))


def test_rows_that_are_not_finite_are_not_counted_as_silent():
    """A latent looked dead where the rows were NaN; an unembedding of NaN raised an error of torch."""
    sae, x = whole()
    with pytest.raises(ValueError, match=r"must be finite; got NaN or infinite values in row 7"):
        features(sae, torch.where(torch.arange(len(x))[:, None] == 7, torch.nan, x))
    with pytest.raises(ValueError, match="`unembedding` must be finite"):
        features(sae, x, unembedding=torch.full((3, x.shape[1]), torch.nan))
    with pytest.raises(ValueError, match=r"shape \(tokens, d\); got \(6,\)"):
        features(sae, x[0])


def test_tensors_of_any_form_are_read():
    sae, x = whole()
    expected = features(sae, x.bfloat16().float())
    for same in (x.bfloat16(), x.bfloat16().double(), x.bfloat16().float().requires_grad_()):
        assert torch.equal(features(sae, same).count, expected.count)
