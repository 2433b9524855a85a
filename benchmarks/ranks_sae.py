"""`khot sae` on 1, 2 and 4 processes: the same curves, and the same weights after 50 steps.

Sums of few of 128 directions in 32 dimensions, 8192 tokens; 256 latents, k = 4, batches of 256; gloo, one thread a
process. Each kind of autoencoder is trained for 50 steps at each number of processes, and BatchTopK for 300 more to
draw its curve. Writes results/ranks-sae.csv, docs/tables/ranks-sae.md and docs/img/ranks-sae.svg; two minutes.
"""

from __future__ import annotations

import json
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from benchmarks import common
from benchmarks.style import BLUE, GREEN, ORANGE, panels, styled
from khot.bench import markdown_table
from khot.nn import SparseAutoencoderConfig
from khot.sae import Training, open_activations, train

RANKS = {1: BLUE, 2: ORANGE, 4: GREEN}
KINDS = {"topk": "TopK", "batch": "BatchTopK", "feature": "Feature Choice"}
SHORT, LONG = 50, 300


class Row(NamedTuple):
    """One figure."""

    part: str
    """"curve" (the FVU of a step), "weights" or "fvu" (the largest difference from one process)."""
    case: str
    ranks: int
    step: int
    value: float


def activations(path: Path) -> None:
    """Write the activations."""
    rng = np.random.default_rng(0)
    code = np.maximum(rng.standard_normal((8192, 128)) - 1.5, 0)
    np.save(path, (code @ rng.standard_normal((128, 32))).astype(np.float32))


def run(rank: int, ranks: int, folder: str, steps: dict[str, int]) -> None:
    """Train each kind as one of the processes."""
    torch.set_num_threads(1)
    group = None
    if ranks > 1:
        meeting = {"init_method": f"file://{folder}/meeting-{ranks}", "timeout": timedelta(seconds=300)}
        dist.init_process_group("gloo", rank=rank, world_size=ranks, **meeting)
        group = dist.group.WORLD
    for name, count in steps.items():
        config = SparseAutoencoderConfig(d_in=32, latents=256, k=4, kind=name.split()[0])
        training = Training(steps=count, batch_size=256)
        train(open_activations(f"{folder}/acts.npy"), config, training, f"{folder}/{name}-{ranks}", group=group)
    if group is not None:
        dist.destroy_process_group()


def measured(folder: str, steps: dict[str, int]) -> list[Row]:
    """Compare the results in a folder with those of one process."""
    rows = []
    for name, count in steps.items():
        curves, weights = {}, {}
        for ranks in RANKS:
            found = Path(folder, f"{name}-{ranks}")
            curves[ranks] = {point[0]: point[2] for point in json.loads((found / "metrics.json").read_text())["curve"]}
            weights[ranks] = load_file(found / "sae_weights.safetensors")
        if count == max(steps.values()):
            rows += [Row("curve", name, r, s, value) for r, each in curves.items() for s, value in each.items()]
            continue
        for ranks in list(RANKS)[1:]:
            off = max(float((t - weights[ranks][key]).abs().max()) for key, t in weights[1].items())
            rows.append(Row("weights", name, ranks, count, off))
            rows.append(Row("fvu", name, ranks, count, max(abs(v - curves[ranks][s]) for s, v in curves[1].items())))
    return rows


@styled
def figure(rows: list[Any]) -> Any:
    """Draw the curves on top of each other, and how far they are apart."""
    drawn, ((left, right),) = panels(1, 2, 3.6)
    curves = {r: {int(x.step): float(x.value) for x in rows if x.part == "curve" and int(x.ranks) == r} for r in RANKS}
    for width, (ranks, color) in zip((7.0, 4.0, 1.5), RANKS.items(), strict=True):
        label = f"{ranks} process{'es' if ranks > 1 else ''}"
        left.plot(list(curves[ranks]), list(curves[ranks].values()), color=color, linewidth=width, label=label)
        if ranks > 1:
            apart = [1e7 * abs(v - curves[1][s]) for s, v in curves[ranks].items()]
            right.plot(list(curves[ranks]), apart, ".", color=color, markersize=8 / ranks**0.5, label=label)
    left.set(title="BatchTopK: FVU of each batch", xlabel="step", ylim=(0, None))
    right.set(title="Distance from one process, in units of $10^{-7}$", xlabel="step", ylim=(0, 3))
    for axes in (left, right):
        axes.legend()
        axes.grid(axis="y")
    return drawn


def report(rows: list[Row]) -> str:
    """Return the table."""
    at = {(row.part, row.case, row.ranks): row.value for row in rows}
    lines = [
        [title, f"{ranks}", *(f"{at[part, kind, ranks]:.1e}" for part in ("weights", "fvu"))]
        for kind, title in KINDS.items()
        for ranks in list(RANKS)[1:]
    ]
    header = ["", "processes", "weights, largest difference", "FVU of a batch, largest difference"]
    return f"Against one process, after {SHORT} steps; float32.\n\n{markdown_table(header, lines)}\n"


def main() -> int:
    """Run the script."""
    args = common.parser(__doc__, "few steps").parse_args()
    at = common.places(args)
    steps = {**dict.fromkeys(KINDS, 4 if args.quick else SHORT), "batch again": 8 if args.quick else LONG}
    with tempfile.TemporaryDirectory() as folder:
        activations(Path(folder, "acts.npy"))
        for ranks in RANKS:
            mp.spawn(run, (ranks, folder, steps), nprocs=ranks)
        rows = measured(folder, steps)
    common.write(at.results / "ranks-sae.csv", common.to_csv(rows))
    common.write_table(at.tables / "ranks-sae.md", report(rows))
    common.write_picture(at.images / "ranks-sae.svg", figure(rows))
    common.show(args, rows, report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
