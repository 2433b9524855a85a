"""Activations of a model, computed as they are needed: a tiny random one, made from a config."""

import sys

import kill_sae
import numpy as np
import pytest
import torch
from sae_runs import matrix, stop_at

from khot.nn import SparseAutoencoder, SparseAutoencoderConfig
from khot.sae import Activations, ModelActivations, Pairs, Trainer, Training, features, train

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

WIDTH, LAYER = 16, "encoder.layer.1"
SHORT = Training(steps=30, batch_size=64)
CONFIG = SparseAutoencoderConfig(d_in=WIDTH, latents=48, k=3)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **shape))


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(0)
    return [random.integers(1, 50, size=random.integers(3, 20)).tolist() for _ in range(50)]


def source(model, texts, **how):
    return ModelActivations(model, texts, **{"module": LAYER, "shard": 4, "buffer": 150, **how})


def test_rows_are_the_activations_without_padding(model, texts):
    data = source(model, texts)
    assert (data.tokens, data.d) == (sum(map(len, texts)), WIDTH)
    model.eval()
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[2][0] for ids in texts]
    expected = torch.cat(alone)
    torch.testing.assert_close(torch.cat([part for _, part in data.parts()]), expected, rtol=1e-4, atol=1e-4)
    index = np.array([0, 7, 100, data.tokens - 1])
    torch.testing.assert_close(data.rows(index), expected[index], rtol=1e-4, atol=1e-4)
    assert data.rows(slice(3, 6)).shape == (3, WIDTH)


def test_memory_is_bounded_and_bits_do_not_depend_on_the_order(model, texts):
    data, other = source(model, texts), source(model, texts)
    forth = [data.rows(np.array([i])) for i in range(data.tokens)]
    back = [other.rows(np.array([i])) for i in reversed(range(data.tokens))][::-1]
    assert torch.equal(torch.cat(forth), torch.cat(back))
    assert sum(map(len, data._held.values())) <= 150 + 4 * 20


def test_an_order_has_each_row_once_and_few_shards_at_a_time(model, texts):
    data = source(model, texts)
    rows = np.arange(0, data.tokens, 2)
    order = data.order(rows, torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == rows.tolist()
    assert not np.array_equal(order, data.order(rows, torch.Generator().manual_seed(1)))
    shards = np.searchsorted(data._starts, order[:50], "right")
    assert len(set(shards.tolist())) <= 5 < len(data._starts)


def test_each_shard_is_computed_about_once_an_epoch(model, texts, monkeypatch):
    data, calls = source(model, texts), []
    compute = data._compute
    monkeypatch.setattr(data, "_compute", lambda number: calls.append(number) or compute(number))
    trainer = Trainer(data, CONFIG, Training(steps=8, batch_size=64))
    calls.clear()
    for _ in range(data.tokens * 15 // 16 // 64):
        trainer.advance()
    assert len(calls) <= 2 * (len(data._starts) - 1)


def test_an_interrupted_run_goes_on_to_the_same_bits(model, texts, tmp_path):
    hooks = len(model.get_submodule(LAYER)._forward_hooks)  # transformers may keep one of its own
    whole = train(source(model, texts), CONFIG, SHORT, tmp_path / "whole")
    assert whole.is_complete
    train(source(model, texts), CONFIG, SHORT, tmp_path / "part", on_step=stop_at(13))
    train(source(model, texts), CONFIG, SHORT, tmp_path / "part", resume=True)
    kill_sae.compare(tmp_path / "whole", tmp_path / "part")
    assert len(model.get_submodule(LAYER)._forward_hooks) == hooks
    assert SparseAutoencoder.load(tmp_path / "whole").config == CONFIG


def test_other_texts_and_other_weights_are_another_run(model, texts):
    crc = source(model, texts).crc
    assert crc == source(model, texts).crc
    assert crc != source(model, texts[:-1]).crc
    assert crc != source(model, texts, skip=[1]).crc
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[3, 3] += 1
    assert crc != source(model, texts).crc
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[3, 3] -= 1


def test_two_points_make_a_transcoder(model, texts, tmp_path):
    name = f"{LAYER}.intermediate"
    data = source(model, texts, module=f"{name}:in", target=name)
    assert data.widths == [WIDTH, 32]
    config = SparseAutoencoderConfig(d_in=WIDTH, d_out=32, latents=48, k=3)
    run = train(data, config, SHORT, tmp_path)
    assert run.metrics["fvu"] < 1
    loaded = SparseAutoencoder.load(tmp_path)
    x, y = config.split(data.rows(slice(50)))
    assert loaded(x, y).reconstruction.shape == (50, 32)


def test_two_files_make_a_transcoder(tmp_path):
    x = matrix()
    y = np.maximum(x @ np.random.default_rng(1).standard_normal((16, 5), dtype=np.float32), 0)
    data = Pairs(Activations(x), Activations(y))
    assert data.crc == Pairs(Activations(x), Activations(y)).crc != Pairs(Activations(x), Activations(y + 1)).crc
    config = SparseAutoencoderConfig(d_in=16, d_out=5, latents=48, k=3)
    run = train(data, config, Training(steps=60, batch_size=100, lr=1e-2), tmp_path)
    assert run.metrics["held_out"]["fvu"] < 0.8
    with pytest.raises(ValueError, match="as many rows as `inputs`, 400; got 399"):
        Pairs(Activations(x), Activations(y[:-1]))
    with pytest.raises(ValueError, match=r"must have rows of 16 numbers, as `config` says; got 21"):
        Trainer(data, CONFIG, SHORT)


def test_rows_have_their_tokens(model, texts):
    data = source(model, texts, skip=[7])
    tokens = data.row_tokens([f"word {i}" for i in range(50)])
    expected = [(number, f"word {i}") for number, ids in enumerate(texts) for i in ids if i != 7]
    assert [(int(tokens.documents[row]), tokens.text(row)) for row in range(len(tokens))] == expected
    assert len(tokens) == data.tokens
    with pytest.raises(ValueError, match="`vocabulary` must be given where there is no `tokenizer`"):
        data.row_tokens()


def test_latents_are_looked_at_in_a_stream(model, texts):
    data = source(model, texts)
    sae = SparseAutoencoder(CONFIG, generator=torch.Generator().manual_seed(0)).eval()
    rows = torch.cat([part for _, part in data.parts()])
    streamed, read = features(sae, data), features(sae, rows)
    assert torch.equal(streamed.count, read.count)
    assert torch.equal(streamed.top.rows, read.top.rows)


def test_wrong_names_and_texts(model, texts, monkeypatch):
    with pytest.raises(ValueError, match=r"`model` must have a module 'encoder.layer.9'"):
        source(model, texts, module="encoder.layer.9")
    with pytest.raises(ValueError, match="`tokenizer` must be given for texts that are strings"):
        source(model, ["a text"])
    with pytest.raises(ValueError, match="at least one text"):
        source(model, [])
    with pytest.raises(ValueError, match="at least one token that is not in `skip`"):
        source(model, [[1, 1]], skip=[1])
    with pytest.raises(ValueError, match=r"The model must call pooler.*it called none"):
        source(lambda_model(model), texts, module="pooler")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"transformers is missing: run pip install '\.\[hf\]'"):
        source("some/folder", texts)


def lambda_model(model):
    """The same model without a call of its pooler."""
    shape = model.config
    other = transformers.BertModel(shape, add_pooling_layer=False)
    other.pooler = torch.nn.Linear(WIDTH, WIDTH)
    other.forward = lambda input_ids, attention_mask: other.encoder(other.embeddings(input_ids))
    return other
