"""The learning studies as a command, a ranking, files and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from textwrap import fill

from matplotlib.figure import Figure

from benchmarks import common
from benchmarks.common import mean_and_error
from benchmarks.learners import LEARNERS
from benchmarks.learning import BUDGET, Row, Study, run
from benchmarks.style import BLUE, GOLD, GREEN, GREY, INK, ORANGE, PINK, SKY, YELLOW, panels, styled
from khot.bench import markdown_table

STYLE = {  # one kind of line for each family
    "straight_through": (BLUE, "-"),
    "simple": (SKY, "-"),
    "imle": (PINK, "-"),
    "relaxed": (YELLOW, "--"),
    "xie_ermon": (ORANGE, "--"),
    "score": (GREY, "-."),
    "rloo": (GREEN, "-."),
    "taylor": (INK, "-."),
    "reinmax": (GOLD, "-."),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an estimator ends up, over all seeds."""

    rank: int
    estimator: str
    mean: float
    """Of the measure that ranks."""
    error: float
    """Its standard error."""
    behind: float
    """The mean difference to the first, seed by seed."""
    behind_error: float
    """Its standard error."""
    wins: int
    """How many seeds no other is better on."""
    evaluations: int
    rate: float
    knob: float
    others: dict[str, float]
    """Means of the other measures."""


def ranking(study: Study, rows: Sequence[Row]) -> list[Place]:
    """The estimators that got to the last step, the best first."""
    last = max((row.step for row in rows), default=0)
    final: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.step == last:
            final.setdefault(row.estimator, {})[row.seed] = row
    first = next(iter(study.panels))
    value = {name: {seed: getattr(r, first) for seed, r in found.items()} for name, found in final.items()}
    names = sorted(value, key=lambda name: fmean(value[name].values()))
    seeds = sorted({seed for found in value.values() for seed in found})
    least = {seed: min(found[seed] for found in value.values()) for seed in seeds}
    result = []
    for rank, name in enumerate(names, 1):
        mean, error = mean_and_error(list(value[name].values()))
        behind, behind_error = mean_and_error([value[name][seed] - value[names[0]][seed] for seed in seeds])
        some = next(iter(final[name].values()))
        others = {m: fmean(getattr(r, m) for r in final[name].values()) for m, _ in study.columns.values()}
        result.append(
            Place(
                rank=rank,
                estimator=name,
                mean=mean,
                error=error,
                behind=behind,
                behind_error=behind_error,
                wins=sum(value[name][seed] <= least[seed] + 1e-9 for seed in seeds),
                evaluations=some.evaluations,
                rate=some.rate,
                knob=some.knob,
                others=others,
            )
        )
    return result


def table(study: Study, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A header, and a line for each estimator, the best first; below, the references."""
    places = ranking(study, rows)
    header = ["", study.ranked, "behind", "best on", *study.columns, "settings"]
    lines = [
        [
            place.estimator,
            _plus_minus(place.mean, place.error),
            _plus_minus(place.behind, place.behind_error) if place.rank > 1 else "–",
            f"{place.wins}",
            *(f"{place.others[measure]:{form}}" for measure, form in study.columns.values()),
            f"{place.rate:g}" + (f", {place.knob:g}" if place.knob else ""),
        ]
        for place in places
    ]
    for name, of in study.references(sorted({row.seed for row in rows})).items():
        mean = _plus_minus(*mean_and_error(of[next(iter(study.panels))].tolist()))
        means = [f"{float(of[measure].mean()):{form}}" for measure, form in study.columns.values()]
        lines.append([name, mean, "–", "–", *means, "–"])
    return header, lines


def _plus_minus(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}"


def verdict(study: Study, rows: Sequence[Row]) -> str:
    """Who is first, and who cannot be told from it."""
    places = ranking(study, rows)
    if len(places) < 2 or len({row.seed for row in rows}) < 2:
        return "Nothing to compare: that takes two estimators and two seeds."
    first, *rest = places
    near = [f"`{place.estimator}`" for place in rest if place.behind <= 2 * place.behind_error]
    others = "all others are behind it by more than two standard errors of the difference"
    told = f"within two standard errors of the difference: {', '.join(near)}"
    return f"First is `{first.estimator}`; {told if near else others}."


def protocol(study: Study, rows: Sequence[Row]) -> str:
    """How the table came about."""
    seeds, steps = len({row.seed for row in rows}), max((row.step for row in rows), default=0)
    how = study.tuned if seeds == len(study.full.seeds) else "not tuned"
    return (
        f"Means over {seeds} seeds ± standard error after {steps} steps of Adam, {BUDGET} evaluations of the objective "
        f"each for all (`taylor`: {BUDGET - 1} samples and π); “behind” is the difference to the first, seed by seed. "
        f"The last column is the learning rate and, where there is one, λ or the temperature: {how}. {study.notes}"
    )


def to_markdown(study: Study, rows: Sequence[Row]) -> str:
    """The table, the verdict and the protocol."""
    header, lines = table(study, rows)
    text = markdown_table(header, [[f"`{name}`" if name in STYLE else name, *line] for name, *line in lines])
    return f"{text}\n\n{verdict(study, rows)}\n\n{protocol(study, rows)}\n"


def records(study: Study, rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the ranking, a record for each estimator."""
    flat = [asdict(place) for place in ranking(study, rows)]
    return [{**place.pop("others"), **place} for place in flat]


@styled
def figure(study: Study, rows: Sequence[Row]) -> Figure:
    """A panel for each measure: means over seeds and their standard errors against evaluations; the references."""
    picture, (grid,) = panels(1, len(study.panels), 4.6)
    lines = study.references(sorted({row.seed for row in rows}))
    names = [place.estimator for place in ranking(study, rows)]
    names += [name for name in dict.fromkeys(row.estimator for row in rows) if name not in names]
    for axes, (measure, label) in zip(grid, study.panels.items(), strict=True):
        shown: list[float] = []  # what the axis must hold: the first point is far off, and the same for all
        for name in names:
            points: dict[int, list[float]] = {}
            for row in rows:
                if row.estimator == name:
                    points.setdefault(row.evaluations, []).append(getattr(row, measure))
            mean, error = zip(*(mean_and_error(values) for values in points.values()), strict=True)
            colour, line = STYLE[name]
            axes.plot(list(points), mean, line, color=colour, label=name)
            low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
            axes.fill_between(list(points), low, high, color=colour, alpha=0.15, linewidth=0)
            shown += [*low[1:], *high[1:]]
        for (name, of), dash in zip(lines.items(), ((0, (1, 1)), (0, (1, 4))), strict=False):
            level = float(of[measure].mean())
            axes.axhline(level, color=INK, linestyle=dash, linewidth=1.4, label=name)
            shown.append(level)
        if shown:
            margin = 0.03 * (max(shown) - min(shown))
            axes.set_ylim(min(shown) - margin, max(shown) + margin)
        axes.set(xlabel="evaluations of the objective", title=fill(label, 28))
        axes.grid(True)
    handles, labels = grid[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4)
    return picture


def main(study: Study, doc: str | None) -> int:
    """Run a study: the command of benchmarks/regression.py and benchmarks/vae.py."""
    parser = common.parser(doc, "fewer seeds and steps, settings not tuned: half a minute or so")
    common.add_study_options(parser, LEARNERS)
    args = parser.parse_args()
    files = common.study_files(parser, args, study.name)
    names = tuple(dict.fromkeys(args.estimator)) if args.estimator else tuple(LEARNERS)
    effort = study.quick if args.quick else study.full
    rows = run(study, names, effort, common.say)
    if not rows:
        return 130
    common.write_if(files.csv, lambda: common.to_csv(rows, digits=6))
    common.write_if(files.markdown, lambda: to_markdown(study, rows))
    if files.plot:
        common.write_picture(files.plot, figure(study, rows))
    common.show(args, records(study, rows), to_markdown(study, rows))
    return 130 if {row.estimator for row in rows if row.step == effort.steps} < set(names) else 0
