"""What R's package `sampling` says of the same numbers. Needs `Rscript` with that package.

Probabilities, estimates and calibrated weights are compared number by number, on random cases. Balanced samples are
compared in law: how far the estimated totals of balanced variables are from the truth, under `samplecube` and `Cube`.
Writes docs/tables/r-agreement.md and results/r_agreement.csv.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import khot
from benchmarks import common
from khot import survey
from khot.designs import Cube

CASES, SAMPLES = 12, 200


class Row(NamedTuple):
    """One quantity, on all cases."""

    what: str
    of_r: str
    cases: int
    difference: float
    unit: str


def in_r(script: str, **arrays: Tensor) -> np.ndarray:
    """Run R with arrays as variables; what it assigns to `result` comes back."""
    with tempfile.TemporaryDirectory() as place:
        lines = ["suppressMessages(library(sampling))"]
        for name, value in arrays.items():
            path = Path(place) / name
            np.savetxt(path, np.atleast_2d(value.numpy()), fmt="%.17g")
            lines.append(f"{name} <- as.matrix(read.table('{path}')); if (nrow({name}) == 1) {name} <- c({name})")
        out = Path(place) / "out"
        lines += [script, f"write(formatC(c(result), digits=17, format='g'), '{out}', ncolumns=1)"]
        (Path(place) / "script.R").write_text("\n".join(lines))
        done = subprocess.run(["Rscript", str(Path(place) / "script.R")], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"R failed: {done.stderr[-500:]}")
        return np.loadtxt(out, ndmin=1)


def drawn(*shape: int, seed: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numbers(cases: int) -> Iterator[Row]:
    """Compare what is a number, case by case; relative differences."""
    scripts = {
        ("inclusion_probs", "inclusionprobabilities"): "result <- inclusionprobabilities(size, k)",
        ("survey.total", "HTestimator"): "result <- HTestimator(y, p)",
        ("survey.mean", "Hajekestimator"): "result <- suppressWarnings(Hajekestimator(y, p, type='mean'))",
        ("survey.deville", "varest"): "result <- varest(y, pik=p)",
        ("survey.calibrate, linear", "calib, linear"): "result <- calib(x, 1/p, totals, method='linear')/p",
        ("survey.calibrate, raking", "calib, raking"): "result <- calib(x, 1/p, totals, method='raking')/p",
    }
    worst = dict.fromkeys(scripts, 0.0)
    for case in range(cases):
        n = 30 + 10 * case
        size, k = (1.5 * drawn(n, seed=case)).exp(), torch.tensor([float(n // 4)])
        probs = khot.inclusion_probs(size, int(k))
        index = khot.designs.Pivotal(probs).sample_indices(generator=torch.Generator().manual_seed(case))
        p, y = probs[index], 5 + drawn(len(index), seed=100 + case)
        x = torch.stack((torch.ones(len(index), dtype=torch.float64), drawn(len(index), seed=200 + case).exp()), -1)
        totals = (1 / p) @ x * torch.tensor([1.05, 0.97], dtype=torch.float64)
        ours = (
            probs,
            survey.total(y, 1 / p).value,
            survey.mean(y, 1 / p).value,
            survey.deville(y, p),
            survey.calibrate(1 / p, x, totals),
            survey.calibrate(1 / p, x, totals, distance=survey.raking),
        )
        together = "\n".join(f"{script}; all <- c(all, result)" for script in scripts.values())
        theirs = in_r(f"all <- c()\n{together}\nresult <- all", size=size, k=k, p=p, y=y, x=x, totals=totals)
        parts = np.split(theirs, np.cumsum([mine.numel() for mine in ours])[:-1])
        for key, mine, other in zip(scripts, ours, parts, strict=True):
            off = np.abs(np.atleast_1d(mine.numpy()) / other - 1).max()
            worst[key] = max(worst[key], float(off))
    for (what, of_r), off in worst.items():
        yield Row(what, of_r, cases, off, "largest relative difference")


def laws(samples: int) -> Iterator[Row]:
    """Compare balanced samples: the root mean square error of the totals of the variables, ours over R's."""
    for n, q in ((200, 1), (600, 2), (600, 5)):
        p = khot.sigmoid_topk(0.5 * drawn(n, seed=n), n // 5)
        z = drawn(n, q, seed=n + q).exp()
        script = (
            f"set.seed(1); X <- cbind(p, z); e <- replicate({samples}, "
            "colSums(z * samplecube(X, p, order=1, comment=FALSE, method=METHOD) / p) / colSums(z) - 1); "
            "result <- sqrt(rowMeans(matrix(e^2, nrow=ncol(z))))"
        )
        x = Cube(p, balance=z).sample((samples,), generator=torch.Generator().manual_seed(0))
        mine = (khot.horvitz_thompson(z.mT[:, None], x, p) / z.sum(0)[:, None] - 1).square().mean(-1).sqrt().numpy()
        simple = khot.designs.Pivotal(p).sample((samples,), generator=torch.Generator().manual_seed(0))
        free = (khot.horvitz_thompson(z.mT[:, None], simple, p) / z.sum(0)[:, None] - 1).square().mean(-1).sqrt()
        for method, landing in ((1, "linear programme"), (2, "dropped variables")):
            if method == 1 and q > 2:
                continue  # R lists all samples of the landing: minutes
            theirs = in_r(script.replace("METHOD", str(method)), p=p, z=z if q > 1 else z.mT.contiguous().mT)
            name = f"`Cube`, n = {n}, q = {q}"
            yield Row(name, f"samplecube, {landing}", samples, float((mine / theirs).mean()), "error, ours over R's")
        ratio = float((mine / free.numpy()).mean())
        yield Row(f"`Cube`, n = {n}, q = {q}", "none: `Pivotal`", samples, ratio, "error, over that of `Pivotal`")


def table(rows: list[Row]) -> str:
    """What was compared, and how far it is apart."""
    lines = ["| khot | R | cases or samples | what | value |", "| :--- | :--- | ---: | :--- | ---: |"]
    for r in rows:
        value = f"{r.difference:.2f}" if "over" in r.unit else f"{r.difference:.0e}"
        what = r.what if r.what.startswith("`") else f"`{r.what}`"
        of_r = r.of_r if "`" in r.of_r else f"`{r.of_r.partition(',')[0]}`{''.join(r.of_r.partition(',')[1:])}"
        lines.append(f"| {what} | {of_r} | {r.cases} | {r.unit} | {value} |")
    note = "R 4.2's `sampling` 2.9. Its `calib` stops raking at 1e-6, and ends `linear` with a generalised inverse."
    return "<!-- Written by benchmarks/r_agreement.py; do not edit. -->\n\n" + "\n".join(lines) + f"\n\n{note}\n"


def main() -> int:
    args = common.parser(__doc__, "2 cases, 20 samples").parse_args()
    if shutil.which("Rscript") is None:
        print("Rscript is missing: install R and its package sampling (Debian: r-cran-sampling).", file=sys.stderr)
        return 2
    cases, samples = (2, 20) if args.quick else (CASES, SAMPLES)
    rows: list[Row] = []
    is_broken = common.collect(numbers(cases), rows) or common.collect(laws(samples), rows)
    text, places = table(rows), common.places(args, is_broken)
    common.write_table(places.tables / "r-agreement.md", text)
    common.write(places.results / "r_agreement.csv", common.to_csv(rows, digits=4))
    common.show(args, rows, text)
    return 130 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
