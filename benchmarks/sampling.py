"""What samples cost, in units of `torch.multinomial` without replacement; and conditional Poisson's marginals.

Forward only: samples have no gradient of their own. Medians of one interleaved run a shape, with one thread (process
CPU time) and with all (wall time). Every design is made from float32 probabilities, checked and sampled within the
time; multinomial gets the same numbers as weights. Writes docs/tables/sampling-speed.md and results/sampling.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import khot
from benchmarks import common
from khot.bench import Contender, Report, Settings, environment, markdown_table, measure, records, threads
from khot.designs import Brewer, ConditionalPoisson, Pareto, Pivotal, Sampford, Systematic

CASES = (((1, 1_000_000), 32), ((1, 1_000_000), 100_000), ((64, 1024), 32))
LARGE = (5000, 2000)
QUICK, QUICK_LARGE = (((1, 1000), 32), ((4, 64), 8)), (50, 20)
BASE = "torch.multinomial"


def marginals_by_programme(theta: Tensor, k: int) -> Tensor:
    """P(x_i = 1) of conditional Poisson by the dynamic programme over items, in logarithms, forth and back; O(nk)."""
    rows = [torch.full((k + 1,), -torch.inf, dtype=theta.dtype)]
    rows[0][0] = 0
    for item in theta.unbind():
        row = rows[-1].clone()
        row[1:] = torch.logaddexp(rows[-1][1:], rows[-1][:-1] + item)
        rows.append(row)
    weight = torch.zeros(k + 1, dtype=theta.dtype)
    weight[k] = 1
    result = []
    for i in range(len(theta) - 1, -1, -1):
        with_it = torch.zeros_like(weight)
        with_it[1:] = weight[1:] * (rows[i][:-1] + theta[i] - rows[i + 1][1:]).exp().nan_to_num(0.0)
        result.append(with_it.sum())
        weight = weight - with_it
        weight[:-1] += with_it[1:]
    return torch.stack(result[::-1])


def samplers(shape: tuple[int, ...], k: int) -> dict[str, Contender]:
    """The contenders; the scores that the harness gives them are not used, but these probabilities."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    p = khot.sigmoid_topk(x, k)
    makes: dict[str, Callable[[], Tensor]] = {
        BASE: lambda: torch.multinomial(p, k),
        "Pivotal": lambda: Pivotal(p, k).sample(),
        'Pivotal, order="shared"': lambda: Pivotal(p, k, order="shared").sample(),
        'Pivotal, order="given"': lambda: Pivotal(p, k, order="given").sample(),
        "Systematic": lambda: Systematic(p, k).sample(),
        "Pareto": lambda: Pareto(p, k).sample(),
        "ConditionalPoisson(logits)": lambda: ConditionalPoisson(logits=x, k=k).sample(),
        "Sampford": lambda: Sampford(p, k).sample(),
        **({"Brewer": lambda: Brewer(p, k).sample()} if k <= 100 else {}),
    }
    return {name: _contender(make) for name, make in makes.items()}


def marginals(n: int, k: int) -> dict[str, Contender]:
    """Compute the marginals of conditional Poisson in three ways."""
    theta = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = khot.sigmoid_topk(theta, k)
    return {
        "programme": _contender(lambda: marginals_by_programme(theta, k)),
        "marginals": _contender(lambda: ConditionalPoisson(logits=theta, k=k).mean),
        "θ from π": _contender(lambda: ConditionalPoisson(p, k).logits),
    }


def _contender(make: Callable[[], Tensor]) -> Contender:
    return Contender(fn=lambda x, k: make(), what="", kind="reference")


def table(reports: list[Report], large: list[Report]) -> str:
    """Designs × shapes and threads, times of multinomial's."""

    def times(report: Report) -> dict[str, float]:
        return {result.name: result.forward.median for result in report.results if result.forward}

    columns = [times(report) for report in reports]
    heading = [
        "",
        *(
            f"{'×'.join(map(str, r.settings.shape))}, k = {r.settings.k}, {threads(r.settings.threads)}"
            for r in reports
        ),
    ]
    lines = [
        [f"`{name}`", *(f"{c[name] / c[BASE]:.2f}" if name in c else "–" for c in columns)]
        for name in columns[0]
        if name != BASE
    ]
    said = []
    for report in large:
        t = times(report)
        said.append(f"{t['programme'] / t['marginals']:.0f} times faster with {threads(report.settings.threads)}")
    n, k = large[0].settings.n, large[0].settings.k
    return (
        "<!-- Written by benchmarks/sampling.py; do not edit. -->\n\n"
        + markdown_table(heading, lines)
        + f"\n\nTimes of `{BASE}(p, k)`'s, which draws as many items with other probabilities; less is faster. "
        + "float32, forward, the design made and checked within the time; medians of one interleaved run a column; "
        + f"{environment()['cpu']}; {common.vectors()}.\n\n"
        + f"The marginals of `ConditionalPoisson` at n = {n}, k = {k} are {' and '.join(said)} than the O(nk) dynamic "
        + f"programme in torch (our implementation); θ from given probabilities takes {_share(large[0])} of that "
        + "programme's time.\n"
    )


def _share(report: Report) -> str:
    t = {result.name: result.forward.median for result in report.results if result.forward}
    return f"{t['θ from π'] / t['programme']:.0%}"


def main() -> int:
    parser = common.parser(__doc__, "small shapes, one thread, 0.01 seconds each")
    parser.add_argument("--budget", type=float, default=4.0, metavar="S", help="seconds per design and shape (4)")
    args = parser.parse_args()
    cases, (n, k), budget = (QUICK, QUICK_LARGE, 0.01) if args.quick else (CASES, LARGE, args.budget)
    reports, large = [], []
    for count in [1] if args.quick else sorted({1, torch.get_num_threads()}):
        how = {"threads": count, "backward": False, "budget": budget}
        for shape, chosen in cases:
            reports.append(measure(samplers(shape, chosen), Settings(shape=shape, k=chosen, **how), common.say))
        large.append(measure(marginals(n, k), Settings(shape=(n,), k=k, **how), common.say))
    text, places = table(reports, large), common.places(args)
    rows = [{**row, "vectors": common.vectors()} for report in (*reports, *large) for row in records(report)]
    common.write_table(places.tables / "sampling-speed.md", text)
    common.write(places.results / "sampling.csv", common.to_csv(rows))
    common.show(args, rows, text)
    return 130 if any(report.interrupted for report in (*reports, *large)) else 0


if __name__ == "__main__":
    sys.exit(main())
