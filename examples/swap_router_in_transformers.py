"""Swap the routers of a Hugging Face model, train it, save it and load it again.

The model is a tiny Mixtral with random weights, made from a config: nothing is downloaded. It learns to predict the
next character of Shakespeare. Run it from the root of the clone. It needs '.[hf]' and takes about ten seconds.
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import khot.hf
from khot.nn.routing import Route, sigma_topk

text = Path("examples/shakespeare.txt").read_text(encoding="utf-8")
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
config = MixtralConfig(vocab_size=len(letters), num_key_value_heads=2, **sizes, **experts)


def batch(start: int, end: int, generator: torch.Generator) -> torch.Tensor:
    """Draw 16 passages of 64 characters from a part of the text, (16, 64)."""
    first = torch.randint(start, end - 64, (16, 1), generator=generator)
    return ids[first + torch.arange(64)]


def train(route: Route | None) -> MixtralForCausalLM:
    """Train for 50 steps, and print the loss on the last tenth of the text, which training never sees."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    names = khot.hf.swap_routers(model, route) if route else []
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(50):
        rows = batch(0, 108_000, draw)
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = model.eval()(unseen := batch(108_000, len(ids), draw), labels=unseen).loss
    print(f"swapped: {', '.join(names) or 'nothing'}; loss on unseen text {loss:.2f}")
    return model


print(f"loss of a guess without a model: {torch.tensor(len(letters)).log():.2f}")
train(None)  # Mixtral's own softmax router
model = train(sigma_topk)

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)  # weights and config, as for any model
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = torch.equal(loaded(ids[None, :64]).logits, model(ids[None, :64]).logits)
    khot.hf.swap_routers(loaded, sigma_topk)  # the files do not hold the route: swap again
    after = torch.equal(loaded(ids[None, :64]).logits, model(ids[None, :64]).logits)
    print(f"same output after loading: {before}; after loading and swapping: {after}")
