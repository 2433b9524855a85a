"""How fast do mixtures of experts learn? The rate of their parameters' error with a top-K gate, exactly specified.

Two Gaussian experts on a line, X uniform in [0, 1]: `y | x ~ Σ_i softmax(TopK(β₁x + β₀, K))_i N(a_i x + b_i, σ_i²)`,
fit by expectation–maximisation from near the truth, all repetitions at once. With K = 2 the gate is a logistic
regression. With K = 1 its softmax is over one score, hence 1: only the border between the experts is identified, and β₁
is fixed to the truth; the border is the best of all cuts. Theory says that the Voronoi loss falls as n^(−1/2).
Writes results/moe_theory.csv and docs/img/moe-theory.svg, and prints the slopes. Ctrl-C ends early, and writes what
there is.

Reference: Nguyen et al., "Statistical perspective of top-K sparse softmax gating mixture of experts" (2023).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks import common
from benchmarks.style import BLUE, INK, ORANGE, panels, styled

ITERATIONS, TOLERANCE = 2000, 1e-6
SIZES = tuple(int(n) for n in np.geomspace(100, 100_000, 20).round())
REPETITIONS = 10
ACTIVE = (1, 2)
"""K"""
COLOURS = {1: ORANGE, 2: BLUE}


class Model(NamedTuple):
    """Parameters of experts, (…, experts) each; those of the gate are 0 for the last expert."""

    intercept: Tensor
    """β₀"""
    slope: Tensor
    """β₁"""
    a: Tensor
    b: Tensor
    variance: Tensor


class Row(NamedTuple):
    """A fit; the fields are the columns of the CSV."""

    active: int
    size: int
    repetition: int
    loss: float
    """Voronoi"""
    border: float
    """How far the border between the experts is from the true one."""
    iterations: int


def truth() -> Model:
    """Two experts with a border at x = 0.32."""
    rows = ((-8.0, 0.0), (25.0, 0.0), (-20.0, 20.0), (15.0, -5.0), (0.09, 0.16))
    return Model(*(torch.tensor(row, dtype=torch.float64) for row in rows))


def sample(model: Model, active: int, shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """x, sorted along the last dim, and y."""
    x = torch.rand(shape, dtype=torch.float64, generator=generator).sort(-1).values
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    scores = model.intercept + model.slope * x[..., None]
    first = scores.softmax(-1)[..., 0] if active == 2 else (scores[..., 0] > scores[..., 1]).double()
    which = (uniform >= first).long()
    return x, model.a[which] * x + model.b[which] + noise * model.variance[which].sqrt()


def start(model: Model, repetitions: int, size: int, generator: torch.Generator) -> Model:
    """Near the truth: N(0, 0.005² n^(−1/6)) away, variances half-normally with 0.0005² n^(−1/2)."""
    eps = torch.randn(5, repetitions, 2, dtype=torch.float64, generator=generator)
    near = [value + 0.005 * size**-0.083 * e for value, e in zip(model, eps, strict=True)]
    intercept, slope = (value - value[..., -1:] for value in near[:2])
    return Model(intercept, slope, near[2], near[3], model.variance + (0.0005 * size**-0.25 * eps[4]).abs())


def likelihood(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Log-densities of y under each expert, (…, n, experts), but for a constant."""
    mean = model.a[..., None, :] * x[..., None] + model.b[..., None, :]
    variance = model.variance[..., None, :]
    return -0.5 * ((y[..., None] - mean).square() / variance + variance.log())


def experts(model: Model, weight: Tensor, x: Tensor, y: Tensor) -> Model:
    """Weighted least squares; an expert with next to no data stays as it is. Weights are (…, n, experts)."""
    total = weight.sum(-2)
    share = weight / total.clamp(min=1e-300)[..., None, :]
    mx, my = ((share * v[..., None]).sum(-2, keepdim=True) for v in (x, y))
    dx, dy = x[..., None] - mx, y[..., None] - my
    a = (share * dx * dy).sum(-2) / (share * dx * dx).sum(-2).clamp(min=1e-300)
    variance = (share * (dy - a[..., None, :] * dx).square()).sum(-2)
    intercept = my[..., 0, :] - a * mx[..., 0, :]
    kept = total > 3
    return model._replace(
        a=torch.where(kept, a, model.a),
        b=torch.where(kept, intercept, model.b),
        variance=torch.where(kept, variance.clamp(min=1e-6), model.variance),
    )


def softmax_step(model: Model, x: Tensor, y: Tensor) -> tuple[Model, Tensor]:
    """EM for K = 2, with one Newton step for the gate; and the mean log-likelihood before."""
    logit = model.intercept[..., :1] + model.slope[..., :1] * x
    each = likelihood(model, x, y)
    gated = each + torch.stack([logit, torch.zeros_like(logit)], -1) - torch.nn.functional.softplus(logit)[..., None]
    value = gated.logsumexp(-1)
    weight = (gated - value[..., None]).exp()
    p = logit.sigmoid()
    features = torch.stack([torch.ones_like(x), x], -1)  # (…, n, 2)
    gradient = features.mT @ (weight[..., 0] - p)[..., None]
    hessian = features.mT @ (features * (p * (1 - p))[..., None])
    ridge = 1e-3 * torch.eye(2, dtype=x.dtype)  # for rows that a border separates
    move = torch.linalg.solve(hessian + ridge, gradient)[..., 0].clamp(-5, 5)
    padded = torch.nn.functional.pad(move[..., None], (0, 1))  # (…, 2, experts)
    gate = model._replace(intercept=model.intercept + padded[..., 0, :], slope=model.slope + padded[..., 1, :])
    return experts(gate, weight, x, y), value.mean(-1)


def hard_step(model: Model, x: Tensor, y: Tensor) -> tuple[Model, Tensor]:
    """Ascent for K = 1: the best of all borders between two points, then the experts on their sides."""
    each = likelihood(model, x, y)
    difference = each[..., 1] - each[..., 0]  # the second expert is on the left
    gains = torch.nn.functional.pad(difference.cumsum(-1), (1, 0))
    cut = gains.argmax(-1, keepdim=True)
    ends = torch.nn.functional.pad(x, (1, 0))
    ends = torch.nn.functional.pad(ends, (0, 1), value=1.0)
    border = 0.5 * (ends.gather(-1, cut) + ends.gather(-1, cut + 1))
    left = torch.arange(x.shape[-1]) < cut
    value = torch.where(left, each[..., 1], each[..., 0]).mean(-1)
    slope = truth().slope.expand_as(model.slope)
    gate = model._replace(slope=slope, intercept=-slope * border)
    return experts(gate, torch.stack([~left, left], -1).double(), x, y), value


def fit(x: Tensor, y: Tensor, model: Model, active: int) -> tuple[Model, int]:
    """Steps until no repetition's mean log-likelihood moves by more than the tolerance; and how many."""
    step = hard_step if active == 1 else softmax_step
    before = torch.full(x.shape[:-1], -torch.inf, dtype=x.dtype)
    for count in range(1, ITERATIONS + 1):
        model, value = step(model, x, y)
        if bool(((value - before).abs() <= TOLERANCE).all()):
            return model, count
        before = value
    return model, ITERATIONS


def voronoi_loss(fitted: Model, true: Model, active: int) -> Tensor:
    """The loss of the theory where each true expert has at most one fitted, (…, experts) → (…).

    `Σ_j e^{β₀} (|Δβ₁| + |Δa| + |Δb| + |Δσ²|)` over fitted experts, each with the nearest true one, plus
    `Σ_j |Σ_{i∈j} e^{β₀ᵢ} − e^{β₀ⱼ}|`; with K < 2, the greatest cell instead of the sum.
    """
    parts = [(f[..., :, None] - t).abs() for f, t in zip(fitted[1:], true[1:], strict=True)]
    distance, nearest = sum(parts).min(-1)  # (…, fitted)
    in_cell = torch.nn.functional.one_hot(nearest, len(true.a)).to(distance.dtype)  # (…, fitted, true)
    mass = fitted.intercept.exp()
    cells = ((mass * distance)[..., None] * in_cell).sum(-2)
    cells = cells + ((mass[..., None] * in_cell).sum(-2) - true.intercept.exp()).abs()
    return cells.topk(active, -1).values.sum(-1)


def run(sizes: Sequence[int] = SIZES, repetitions: int = REPETITIONS) -> Iterator[list[Row]]:
    """All repetitions of a size and K at once."""
    true = truth()
    for active in ACTIVE:
        for size in sizes:
            generator = torch.Generator().manual_seed(1000 * size + active)
            x, y = sample(true, active, (repetitions, size), generator)
            fitted, iterations = fit(x, y, start(true, repetitions, size, generator), active)
            loss = voronoi_loss(fitted, true, active)
            border = (fitted.intercept[:, 0] / fitted.slope[:, 0] + 8 / 25).abs()
            yield [
                Row(active, size, i, value, off, iterations)
                for i, (value, off) in enumerate(zip(loss.tolist(), border.tolist(), strict=True))
            ]


def slope(rows: Sequence[Row], field: str = "loss") -> tuple[float, float]:
    """Of ordinary least squares of the logarithm of the mean over repetitions on that of n; and the intercept."""
    sizes = sorted({row.size for row in rows})
    means = [np.mean([getattr(row, field) for row in rows if row.size == n]) for n in sizes]
    return tuple(np.polyfit(np.log(sizes), np.log(means), 1).tolist())


@styled
def figure(rows: Sequence[Row]) -> Figure:
    """The loss against n, its mean ± two standard deviations over repetitions, and the line."""
    active = sorted({row.active for row in rows})
    picture, (grid,) = panels(1, len(active), 4.2, sharey=True)
    for axes, k in zip(grid, active, strict=True):
        of = [row for row in rows if row.active == k]
        sizes = np.array(sorted({row.size for row in of}))
        losses = [[row.loss for row in of if row.size == n] for n in sizes]
        mean, spread = np.array([np.mean(v) for v in losses]), np.array([np.std(v) for v in losses])
        axes.errorbar(sizes, mean, [np.minimum(2 * spread, 0.9 * mean), 2 * spread], fmt="o", ms=4, color=COLOURS[k])
        rate, constant = slope(of)
        label = f"slope {rate:.3f}".replace("-", "−")
        axes.plot(sizes, np.exp(constant) * sizes**rate, "--", color=INK, label=label, linewidth=1.2)
        axes.set(xscale="log", yscale="log", xlabel="n", title=f"K = {k}")
        axes.grid(True)
        axes.legend()
    grid[0].set_ylabel("Voronoi loss")
    return picture


def main() -> int:
    args = common.parser(__doc__, "seven sizes up to 10,000, five repetitions: seconds").parse_args()
    sizes, repetitions = (SIZES[:14:2], 5) if args.quick else (SIZES, REPETITIONS)
    rows: list[Row] = []
    is_interrupted = common.collect((row for found in run(sizes, repetitions) for row in found), rows)
    if not rows:
        return 130
    places = common.places(args)
    common.write(places.results / "moe_theory.csv", common.to_csv(rows))
    common.write_picture(places.images / "moe-theory.svg", figure(rows))
    said = []
    for k in sorted({row.active for row in rows}):
        of = [row for row in rows if row.active == k]
        loss, border = slope(of)[0], slope(of, "border")[0]
        said.append(f"K = {k}: the Voronoi loss falls as n^{loss:.3f}, the border's error as n^{border:.3f}")
    common.show(args, rows, "\n".join(said))
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
