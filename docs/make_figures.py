"""Draw the pictures of the README and the docs.

`python docs/make_figures.py` writes docs/img/*.svg, each for light and for dark grounds, the same bytes each time.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import khot
from benchmarks.common import write_picture
from benchmarks.style import BLUE, FAINT, GOLD, GREEN, INK, ORANGE, PAPER, PINK, SKY, STYLE
from khot.designs import Brewer, ConditionalPoisson, Design, Pareto, Pivotal, PlackettLuce, Sampford, Systematic

OUT = Path(__file__).parent / "img"
MEMBERS = {
    "sigmoid": (khot.sigmoid_topk, BLUE, "-"),
    "Laplace": (khot.laplace_topk, SKY, "--"),
    "normal": (khot.normal_topk, GREEN, "-."),
    "Cauchy": (khot.cauchy_topk, PINK, ":"),
    "Euclidean": (khot.euclidean_topk, ORANGE, "-"),
    "power, p = 4/3": (khot.power_topk, GOLD, "--"),
}
SCORES = torch.tensor([0.9, -0.6, 2.2, 0.3, -2.0, 1.3, 1.8, -1.1, -0.1, -2.6], dtype=torch.float64)
K = 3
SIX = torch.tensor([0.07, 0.17, 0.41, 0.61, 0.83, 0.91], dtype=torch.float64)
ORDERS = 2000  # what is said of random orders is the mean over so many


def hero() -> Figure:
    """Scores on the axis, the sigmoid that lifts them, the threshold, and the heights laid end to end."""
    x = torch.tensor([-2.3, -1.5, -0.7, 0.1, 0.6, 1.4, 2.4], dtype=torch.float64)
    temperature = 0.6
    p, tau = khot.sigmoid_topk(x, K, temperature=temperature), khot.threshold(x, K, temperature=temperature)
    colors = ranked_colors(x)
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5.4), height_ratios=(4, 1), layout="constrained")

    grid = torch.linspace(-3, 3.1, 400, dtype=torch.float64)
    top.plot(grid, torch.sigmoid((grid - tau) / temperature), color=FAINT, zorder=1)
    top.vlines(x, 0, p, colors=colors, linewidth=7, alpha=0.85, zorder=2)
    top.scatter(x, p, s=110, c=colors, edgecolors=PAPER, linewidths=1.5, zorder=3)
    top.scatter(x, torch.zeros_like(x), s=70, c=colors, edgecolors=PAPER, linewidths=1.5, clip_on=False, zorder=4)
    for score, height in zip(x.tolist(), p.tolist(), strict=True):
        place, side = ((11, -11), "left") if score > tau else ((-9, 7), "right")
        top.annotate(f"{height:.2f}", (score, height), place, textcoords="offset points", ha=side, fontsize=11)
    top.axvline(float(tau), color=INK, linewidth=1.5, linestyle=(0, (4, 3)), zorder=1)
    top.annotate("threshold τ", (float(tau), 1.1), (6, 0), textcoords="offset points", va="center", fontweight="bold")
    top.text(-3, 0.98, "$p_i = σ((x_i − τ)\\,/\\,T)$", fontsize=17)
    top.text(-3, 0.83, f"slide τ until the heights add up to k = {K}", fontsize=12.5)
    top.set(xlim=(-3.05, 3.15), ylim=(0, 1.16), yticks=(0, 0.5, 1), xlabel="score x", ylabel="how much of it is chosen")

    stack(bottom, p.flip(0), colors[::-1])
    bottom.set_xlabel(f"the same heights, end to end: they fill {K}")
    return fig


def stack(ax: Axes, parts: Tensor, colors: list[str]) -> None:
    """The parts as one bar."""
    starts = parts.cumsum(0) - parts
    ax.barh([0] * len(parts), parts, left=starts, color=colors, height=0.8, edgecolor=PAPER, linewidth=2, alpha=0.85)
    for start, part in zip(starts.tolist(), parts.tolist(), strict=True):
        if part > 0.2:
            ax.text(start + part / 2, 0, f"{part:.2f}", ha="center", va="center", color=PAPER, fontweight="bold")
    ax.set(xlim=(-0.03, K + 0.03), ylim=(-0.5, 0.5), yticks=(), xticks=range(K + 1))
    ax.spines["left"].set_visible(False)


def ranked_colors(x: Tensor) -> list[str]:
    """From yellow (least score) to violet (greatest), on a map that is safe for colour-blind readers."""
    ranks = x.argsort().argsort() / (len(x) - 1)
    return [mpl.colors.to_hex(mpl.colormaps["viridis_r"](0.1 + 0.82 * float(r))) for r in ranks]


def temperature() -> Figure:
    """Ten scores from hard top-3 to uniform: five snapshots, and the whole sweep beneath."""
    shown = (0.05, 0.3, 1.0, 3.0, 30.0)
    colors = ranked_colors(SCORES)
    fig = plt.figure(figsize=(10, 6.6), layout="constrained")
    boxes = fig.add_gridspec(2, len(shown), height_ratios=(1, 1.35), hspace=0.08)
    for j, t in enumerate(shown):
        ax = fig.add_subplot(boxes[0, j])
        p = khot.sigmoid_topk(SCORES, K, temperature=t)
        ax.bar(range(len(p)), p, color=colors, width=0.82)
        ax.axhline(K / len(p), color=INK, linewidth=1, linestyle=(0, (2, 3)))
        ax.set(title=f"T = {t:g}", ylim=(0, 1.03), xticks=(), yticks=(0, 0.5, 1) if j == 0 else ())
        ax.set_xlabel(f"Σ = {float(p.sum()):.0f}", fontsize=11)
        ax.spines["left"].set_visible(j == 0)

    ax = fig.add_subplot(boxes[1, :])
    sweep = torch.logspace(-2, 2, 400, dtype=torch.float64)
    p = khot.sigmoid_topk(SCORES.expand(400, -1), K, temperature=sweep)
    for i in SCORES.argsort().tolist():
        ax.plot(sweep, p[:, i], color=colors[i])
    for t in shown:
        ax.axvline(t, color=FAINT, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
    ax.text(0.0105, 0.93, f"hard top-{K}", fontweight="bold", va="top")
    ax.text(95, 0.355, f"k/n = {K / len(SCORES):g}", fontweight="bold", ha="right")
    ax.set(xscale="log", xlim=(0.01, 100), ylim=(-0.03, 1.03), yticks=(0, 0.5, 1))
    ax.set_xticks((0.01, 0.1, 1, 10, 100), ("0.01", "0.1", "1", "10", "100"))
    ax.set(xlabel="temperature T", ylabel="$σ_3(x)$, one line per score")
    bar = mpl.cm.ScalarMappable(cmap=mpl.colors.ListedColormap([colors[i] for i in SCORES.argsort().tolist()]))
    fig.colorbar(bar, ax=ax, ticks=(), label="smallest → largest score", pad=0.01, aspect=24, fraction=0.05)
    return fig


def value_gradient() -> Figure:
    """σ_1([t, 0])₁ and its derivative in t, with softmax beside it."""
    t = torch.linspace(-6, 6, 481, dtype=torch.float64, requires_grad=True)
    x = torch.stack([t, torch.zeros_like(t)], dim=-1)  # (481, 2)
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    curves = [
        (f"$σ_1$, T = {temp:g}", color, "-", khot.sigmoid_topk(x, 1, temperature=temp))
        for temp, color in ((0.25, ORANGE), (1.0, BLUE), (4.0, GREEN))
    ]
    curves.append(("softmax, T = 1", INK, "--", x.softmax(-1)))
    for label, color, line, p in curves:
        (slope,) = torch.autograd.grad(p[:, 0].sum(), t, retain_graph=True)
        axes[0].plot(t.detach(), p[:, 0].detach(), color=color, linestyle=line, label=label)
        axes[1].plot(t.detach(), slope, color=color, linestyle=line)
    axes[0].set(title="value: first entry of $σ_1([t, 0])$", xlabel="t", ylim=(-0.03, 1.03), yticks=(0, 0.5, 1))
    axes[1].set(title="gradient: its derivative in t", xlabel="t", ylim=(-0.01, 0.52))
    axes[0].legend(frameon=False, loc="upper left", fontsize=11)
    axes[0].text(6, 0.1, "$σ_1$ = sigmoid(t / 2T)\nsoftmax = sigmoid(t / T)", fontsize=11, linespacing=1.7, ha="right")
    return fig


def family() -> Figure:
    """The value and the derivative of each member at n = 2, k = 1."""
    t = torch.linspace(-6, 6, 961, dtype=torch.float64, requires_grad=True)
    x = torch.stack([t, torch.zeros_like(t)], dim=-1)
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for name, (fn, color, line) in MEMBERS.items():
        y = fn(x, 1)[:, 0]
        (slope,) = torch.autograd.grad(y.sum(), t)
        axes[0].plot(t.detach(), y.detach(), color=color, linestyle=line, label=name)
        axes[1].plot(t.detach(), slope, color=color, linestyle=line)
    axes[0].set(title="value: first entry of f([t, 0], 1), T = 1", xlabel="t", ylim=(-0.03, 1.03), yticks=(0, 0.5, 1))
    axes[1].set(title="gradient: its derivative in t", xlabel="t", ylim=(-0.01, None))
    axes[0].legend(frameon=False, loc="upper left", fontsize=11)
    return fig


def family_temperature() -> Figure:
    """Ten scores from hard to uniform, a panel for each member."""
    sweep = torch.logspace(-2, 2, 400, dtype=torch.float64)
    colors = ranked_colors(SCORES)
    fig, grid = plt.subplots(2, 3, figsize=(10, 6), sharex=True, sharey=True, layout="constrained")
    for ax, (name, (fn, _, _)) in zip(grid.flat, MEMBERS.items(), strict=True):
        y = fn(SCORES.expand(400, -1), K, temperature=sweep)
        for i in SCORES.argsort().tolist():
            ax.plot(sweep, y[:, i], color=colors[i], linewidth=1.8)
        ax.axhline(K / len(SCORES), color=FAINT, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
        ax.set(title=name, xscale="log", xlim=(0.01, 100), ylim=(-0.03, 1.03), yticks=(0, 0.5, 1))
    grid[1, 0].text(0.011, K / len(SCORES) + 0.02, "k/n", fontsize=10)
    for ax in grid[1]:
        ax.set_xticks((0.01, 1, 100), ("0.01", "1", "100"))
        ax.set_xlabel("temperature T")
    for ax in grid[:, 0]:
        ax.set_ylabel("y, one line per score")
    return fig


def design_inclusion() -> Figure:
    """How far inclusion probabilities are from those asked for: six items, forty, and ever more copies of the six."""
    forty = khot.sigmoid_topk(torch.linspace(-4, 4, 40, dtype=torch.float64), 12)
    looks = {
        "Gumbel top-k": (PlackettLuce, ORANGE, "o", (55, 0.22)),
        "Pareto": (Pareto, BLUE, "s", (80, 1.3e-4)),
    }
    fig, axes = plt.subplots(1, 3, figsize=(10, 4.3), layout="constrained")
    for ax, probs, n in zip(axes, (SIX, forty), (6, 40), strict=False):
        for name, (design, color, marker, _) in looks.items():
            ax.plot(probs, design(probs).mean - probs, color=color, marker=marker, linewidth=1.4, label=name)
        seen = Pivotal(probs).sample((1_000_000,), generator=generator()).mean(0) - probs
        ax.scatter(probs, seen, s=42, color=GREEN, marker="x", zorder=3, label="Pivotal, $10^6$ draws")
        ax.set(title=f"{n} items, k = {round(float(probs.sum()))}", xlabel="π asked for", xticks=(0, 0.5, 1))
        ax.set(xlim=(-0.03, 1.03), ylim=(-0.17, 0.15), yticks=(-0.1, 0, 0.1))
    axes[0].set_ylabel("inclusion probability − π")
    axes[0].legend(frameon=False, loc="lower left", fontsize=10, handlelength=1.4, borderpad=0)
    copies = [2**j for j in range(8)]
    for name, (design, color, marker, place) in looks.items():
        worst = [float((design(SIX.repeat(m)).mean - SIX.repeat(m)).abs().max()) for m in copies]
        axes[2].plot([6 * m for m in copies], worst, color=color, marker=marker, linewidth=1.4)
        axes[2].text(*place, name, color=color)
    axes[2].set(title="copies of the six", xlabel="items", ylabel="largest error", xscale="log", yscale="log")
    axes[2].set_xticks((6, 48, 384), ("6", "48", "384"))
    axes[2].minorticks_off()
    axes[2].set_ylim(3e-7, 0.6)
    return fig


def design_pairs() -> Figure:
    """The correlations of all pairs of twenty items, for four designs with the same inclusion probabilities."""
    n, k = 20, 5
    probs = khot.sigmoid_topk(2 * torch.sin(2.4 * torch.arange(n, dtype=torch.float64)), k)
    covariances = {
        "Pivotal, given order": Pivotal(probs, order="given").covariance_matrix,
        "Systematic": Systematic(probs).covariance_matrix,
        "Pivotal, random order": Pivotal(probs).expand((ORDERS,)).fix_order(generator()).covariance_matrix.mean(0),
        "ConditionalPoisson": ConditionalPoisson(probs).covariance_matrix,
    }
    ends = [(*mpl.colors.to_rgb(color), alpha) for color, alpha in ((ORANGE, 1), (ORANGE, 0), (BLUE, 0), (BLUE, 1))]
    places = (0, 0.5, 0.5, 1)  # nothing in the middle: the ground shows, light or dark
    colors = mpl.colors.LinearSegmentedColormap.from_list("khot", list(zip(places, ends, strict=True)), N=49)
    norm = mpl.colors.SymLogNorm(linthresh=0.01, vmin=-1, vmax=1)
    fig, axes = plt.subplots(1, 4, figsize=(10, 3.75), layout="constrained")
    for ax, (name, covariance) in zip(axes, covariances.items(), strict=True):
        deviation = covariance.diagonal().sqrt()
        correlation = (covariance / deviation / deviation[:, None]).fill_diagonal_(torch.nan)
        image = ax.pcolormesh(correlation, cmap=colors, norm=norm)
        ax.set(xticks=(), yticks=(), xlabel="item", ylabel="item" if ax is axes[0] else "", aspect="equal")
        ax.invert_yaxis()
        ax.set_title(name, fontsize=11)
        ax.spines[:].set_visible(False)
    ticks = (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)
    bar = fig.colorbar(image, ax=axes, orientation="horizontal", aspect=50, fraction=0.06, pad=0.06, ticks=ticks)
    bar.ax.set_xticklabels([f"{t:g}".replace("-", "−") for t in ticks])
    bar.minorticks_off()
    bar.set_label("correlation of two items")
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(False)
    return fig


def design_entropy() -> Figure:
    """The entropy of each design, as a share of the greatest there is with the same inclusion probabilities."""
    vectors = {
        "6 items, k = 3": (SIX, ORANGE, "o"),
        "8 equal items, k = 2": (torch.full((8,), 0.25, dtype=torch.float64), GREEN, "s"),
        "10 items, k = 5": (khot.sigmoid_topk(torch.linspace(-2, 2, 10, dtype=torch.float64), 5), BLUE, "D"),
    }
    designs = {
        "ConditionalPoisson": ConditionalPoisson,
        "Brewer": Brewer,
        "Sampford": Sampford,
        "Pareto*": Pareto,
        "Plackett–Luce*": PlackettLuce,
        "Pivotal, random order": Pivotal,
        "Pivotal, given order": lambda probs: Pivotal(probs, order="given"),
        "Systematic": Systematic,
    }
    fig, ax = plt.subplots(figsize=(10, 4.6), layout="constrained")
    least = [100.0] * len(designs)
    for j, (name, (probs, color, marker)) in enumerate(vectors.items()):
        shares = [100 * share_of_entropy(design(probs)) for design in designs.values()]
        least = [min(pair) for pair in zip(least, shares, strict=True)]
        places = [row + 0.2 * (j - 1) for row in range(len(designs))]
        ax.scatter(shares, places, s=58, color=color, marker=marker, label=name, zorder=3)
    for row, share in enumerate(least):
        ax.axhline(row, color=FAINT, linewidth=0.6, zorder=0)
        ax.text(102, row, f"{share:.2f} %", va="center", fontsize=11)
    ax.text(102, -0.8, "smallest", fontsize=11, fontweight="bold")
    ax.set_yticks(range(len(designs)), list(designs))
    ax.set(xlim=(30, 101), ylim=(len(designs) - 0.5, -0.5), xlabel="% of the largest entropy with the same mean")
    ax.tick_params(axis="y", length=0)
    ax.legend(frameon=False, loc="lower center", fontsize=11, ncols=3, bbox_to_anchor=(0.5, 1))
    return fig


def share_of_entropy(design: Design) -> float:
    """What part of the greatest entropy with its mean a design has; random orders as a mixture of fixed ones."""
    greatest = ConditionalPoisson(design.mean).entropy()
    if not isinstance(design, Pivotal) or design.order == "given":
        return float(design.entropy() / greatest)
    subsets = design.enumerate_support()  # (subsets, n)
    chance = design.expand((ORDERS,)).fix_order(generator()).log_prob(subsets[:, None]).exp().mean(1)
    return float(torch.special.entr(chance).sum() / greatest)


def generator() -> torch.Generator:
    """The same for each picture."""
    return torch.Generator().manual_seed(0)


def main() -> None:
    """Draw and write all of them."""
    OUT.mkdir(exist_ok=True)
    relaxations = (hero, temperature, value_gradient, family, family_temperature)
    designs = (design_inclusion, design_pairs, design_entropy)
    with mpl.rc_context(STYLE):
        for draw in relaxations + designs:
            fig, name = draw(), draw.__name__.replace("_", "-")
            write_picture(OUT / f"{name}.svg", fig)
            plt.close(fig)


if __name__ == "__main__":
    mpl.use("svg")
    main()
