"""Do confidence intervals cover? A survey of firms, drawn 2000 times by each design.

A population of 2000 firms whose staff is known and whose turnover is asked of 200 of them. Each design is drawn 2000
times; of each estimate of the total, the table has its bias and spread, the mean of its standard error as a share of
that spread, and how often the interval of 95 % holds the truth. Writes docs/tables/survey-coverage.md and
results/survey.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import khot
from benchmarks import common
from khot import survey
from khot.designs import Cube, Design, Pivotal, Sampford, Systematic, spatial_order

N, K, SAMPLES = 2000, 200, 2000
FIRST_SEED = 7


class Firms(NamedTuple):
    """A population: what is known of all firms, and the turnover, which is asked."""

    staff: Tensor
    region: Tensor
    place: Tensor
    turnover: Tensor


class Row(NamedTuple):
    """What was measured of one design and estimate."""

    design: str
    estimate: str
    bias: float
    spread: float
    said: float
    coverage: float
    samples: int


def firms(n: int = N, seed: int = FIRST_SEED) -> Firms:
    """Make a population in which turnover grows with staff, and differs by region and smoothly by place."""
    random = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, n, dtype=torch.float64, generator=random)
    staff = (1.2 * normal() + 2).exp().ceil()
    place = torch.rand(n, 2, dtype=torch.float64, generator=random)
    region = (place[:, 0] * 5).long()
    level = torch.tensor([60.0, 90.0, 110.0, 80.0, 140.0], dtype=torch.float64)[region] * (1 + 0.3 * place[:, 1])
    return Firms(staff, region, place, staff * level * (0.25 * normal()).exp())


Estimator = Callable[[Tensor, Tensor, Tensor], survey.Estimate]
"""(indices (S, k), values, weights) → estimates of the total."""


def known_of(people: Firms) -> Tensor:
    """Return the variables whose totals are known: the staff of each region, (n, 5)."""
    return people.staff[:, None] * torch.nn.functional.one_hot(people.region).double()


def cases(people: Firms, k: int) -> Iterator[tuple[str, Any, list[tuple[str, Estimator]]]]:
    """Yield the designs, each with the estimates that suit it."""
    n, known = len(people.staff), known_of(people)
    equal, sized = torch.full((n,), k / n, dtype=torch.float64), khot.inclusion_probs(people.staff, k)

    def plain(name: str, variance: survey.Variance) -> tuple[str, Estimator]:
        return name, lambda index, y, w: survey.total(y, w, variance=variance)

    def each(index: Tensor, y: Tensor, w: Tensor, distance: survey.Distance) -> survey.Estimate:
        made = [
            survey.calibrated_total(a, b, known[i], known.sum(0), distance=distance)
            for i, a, b in zip(index, y, w, strict=True)
        ]
        return survey.Estimate(torch.stack([e.value for e in made]), torch.stack([e.variance for e in made]))

    def by_pairs(design: Design) -> tuple[str, Estimator]:
        joint, probs = design.joint_probs(), design.mean

        def estimate(index: Tensor, y: Tensor, w: Tensor) -> survey.Estimate:
            pi, pairs = probs[index], joint[index[..., :, None], index[..., None, :]]
            less = pi[..., :, None] * pi[..., None, :] / pairs - 1
            apart = (y * w)[..., :, None] - (y * w)[..., None, :]
            return survey.Estimate((y * w).sum(-1), (less * apart.square()).sum((-1, -2)) / 2)

        return "total, Sen–Yates–Grundy by pairs", estimate

    hajek, deville = plain("total, Hájek", survey.hajek), plain("total, Deville", survey.deville)
    differences = plain("total, successive differences", survey.successive_differences)
    balanced = ("total, balanced", lambda i, y, w: survey.total(y, w, variance=survey.Balanced(known[i])))
    shares = torch.nn.functional.one_hot(people.region) * sized[:, None]
    within = ("total, within strata", lambda i, y, w: survey.total(y, w, variance=survey.Balanced(shares[i])))
    raked = ("raked total, Hájek of residuals", partial(each, distance=survey.raking))
    regressed = ("regression total, Hájek of residuals", partial(each, distance=survey.linear))
    yield "equal probabilities", Pivotal(equal), [hajek, regressed]
    yield "∝ staff, `Pivotal`", Pivotal(sized), [hajek, deville, regressed, raked]
    sampford = Sampford(sized)
    yield "∝ staff, `Sampford`", sampford, [hajek, by_pairs(sampford)]
    yield "∝ staff, `Pivotal(strata=region)`", Pivotal(sized, strata=people.region), [hajek, within]
    order = (people.region * 10.0 + people.place[:, 1]).argsort()
    yield "∝ staff, `Systematic`, by region", _Sorted(Systematic, sized, order), [hajek, differences]
    order = spatial_order(people.place)
    tree = _Sorted(partial(Pivotal, order="given"), sized, order)
    yield "∝ staff, `Pivotal(order=spatial_order)`", tree, [hajek, differences]
    yield "∝ staff, `Cube`", Cube(sized, balance=known), [hajek, balanced]


class _Sorted:
    """A design along an order, whose indices are those of the population, in that order."""

    def __init__(self, make: Callable[..., Design], probs: Tensor, order: Tensor) -> None:
        self.design, self.order, self.mean = make(probs[order]), order, probs

    def sample_indices(self, shape: tuple[int, ...], *, generator: torch.Generator) -> Tensor:
        return self.order[self.design.sample_indices(shape, generator=generator)]


def measure(people: Firms, k: int, samples: int) -> Iterator[Row]:
    """Draw every design, and see what its estimates say of the truth."""
    truth = people.turnover.sum()
    for name, design, estimators in cases(people, k):
        random = torch.Generator().manual_seed(1)
        parts = [design.sample_indices((50,), generator=random) for _ in range(samples // 50)]
        for label, estimator in estimators:
            made = [estimator(index, people.turnover[index], 1 / design.mean[index]) for index in parts]
            estimate = survey.Estimate(*(torch.cat(t) for t in zip(*made, strict=True)))
            low, high = estimate.interval()
            spread = (estimate.value - truth).square().mean().sqrt()
            yield Row(
                name,
                label,
                float(estimate.value.mean() / truth - 1),
                float(spread / truth),
                float(estimate.variance.mean().sqrt() / spread),
                float(((low <= truth) & (truth <= high)).double().mean()),
                samples,
            )


def table(rows: list[Row], n: int, k: int) -> str:
    """Designs and estimates; errors as a share of the total."""
    lines = ["| design | estimate | bias | root mean square error | said/true | coverage of 95 % |"]
    lines += ["| :--- | :--- | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {r.design} | {r.estimate} | {r.bias:+.2%} | {r.spread:.2%} | {r.said:.2f} | {r.coverage:.1%} |"
        for r in rows
    ]
    error = (0.95 * 0.05 / rows[0].samples) ** 0.5
    return (
        "<!-- Written by benchmarks/survey.py; do not edit. -->\n\n"
        + "\n".join(lines)
        + f"\n\n{rows[0].samples} samples of {k} of {n} firms for each design. said/true: the root of the mean "
        + "estimated variance, over the root mean square error. A coverage of 95 % is measured with "
        + f"an error of {error:.1%}.\n"
    )


def main() -> int:
    args = common.parser(__doc__, "600 firms, 100 samples").parse_args()
    n, k, samples = (600, 80, 100) if args.quick else (N, K, SAMPLES)
    rows: list[Row] = []
    is_broken = common.collect(measure(firms(n), k, samples), rows)
    text, places = table(rows, n, k), common.places(args, is_broken)
    common.write_table(places.tables / "survey-coverage.md", text)
    common.write(places.results / "survey.csv", common.to_csv(rows, digits=5))
    common.show(args, rows, text)
    return 130 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
