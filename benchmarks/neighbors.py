"""How well hard k-NN predicts after learned maps: `KHotNeighborhood` beside NCA, LMNN, MLKR, PCA, LDA and two rivals.

Accuracy on digits, wine and breast cancer; R² on diabetes and two synthetic sets. Ten splits, 70 % for training. The
k of the final k-NN, temperature, learning rate and the like are the best on two other splits; so is whether features
are standardised, for raw k-NN, and then the same for all methods. NeuralSort's and Xie and Ermon's relaxations are
our re-implementations (rivals/neighbors.py), inside the same network, loss, optimiser and steps. LMNN and MLKR need
metric-learn (pip install '.[bench]'), and are left out without it. `--npz FILE` adds a data set of yours, with arrays
X and y; images are in neighbors_images.py. Writes results/neighbors.csv, docs/tables/neighbors.md and
docs/img/neighbors.svg; about ten minutes on one thread. Times are those of the processor.
"""

from __future__ import annotations

import argparse
import csv
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine, make_friedman1
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, NeighborhoodComponentsAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from benchmarks import common
from benchmarks.rivals.neighbors import gumbel_subset, neural_sort
from benchmarks.style import panels, styled
from khot.bench import markdown_table
from khot.sklearn import KHotNeighborhood

try:
    from metric_learn import LMNN, MLKR
    from metric_learn import _util as metric_learn_checks
except ModuleNotFoundError:
    LMNN = MLKR = metric_learn_checks = None

MOST = 32  # dimensions, if there are not fewer features
SHARE = 0.3  # of the rows are tested on
TUNING = (100, 101)
KS = {"accuracy": (1, 3, 5, 9, 15), "R²": (3, 5, 9, 15, 25)}
TEMPERATURES = (0.3, 1.0, 3.0)
RATES = (0.03, 0.1)
NETWORK = (128,)


class Plan(NamedTuple):
    """How much to do."""

    splits: tuple[int, ...] = tuple(range(10))
    tuning: tuple[int, ...] = TUNING
    steps: int = 200
    rows: int = 100_000


QUICK = Plan(splits=(0, 1), tuning=(100,), steps=10, rows=120)


class Row(NamedTuple):
    """One method on one split of one set; the fields are the columns of the CSV."""

    data: str
    dims: int
    method: str
    split: int
    measure: str
    score: float
    seconds: float
    k: int
    setting: str


class Method(NamedTuple):
    """A map to learn, and the settings to choose from."""

    make: Callable[..., Any]
    settings: dict[str, tuple[Any, ...]]


def identity(c: int, steps: int) -> Any:
    return FunctionTransformer()


def first(c: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda z: z[:, :c]


def khot_map(c: int, steps: int, **options: Any) -> Any:
    return KHotNeighborhood(c, max_steps=steps, random_state=0, **options)


def classifiers(is_plane: bool) -> dict[str, Method]:
    """Return the methods for classes; in two dimensions those that can."""
    soft = {"temperature": TEMPERATURES, "learning_rate": RATES}
    found = {
        "raw k-NN": Method(identity, {}),
        "PCA": Method(
            lambda c, steps, n=None: PCA(min(n or c, c), random_state=0), {} if is_plane else {"n": (8, 16, None)}
        ),
        "LDA": Method(lambda c, steps: make_pipeline(LinearDiscriminantAnalysis(), FunctionTransformer(first(c))), {}),
        "NCA": Method(lambda c, steps: NeighborhoodComponentsAnalysis(c, random_state=0), {}),
        "LMNN (metric-learn)": Method(
            lambda c, steps, n: LMNN(n_neighbors=n, n_components=c, init="pca", max_iter=100, random_state=0),
            {"n": (3, 5)},
        ),
        "KHotNeighborhood, linear": Method(khot_map, soft),
        "KHotNeighborhood, network": Method(partial(khot_map, hidden=NETWORK), soft),
        "NeuralSort, network": Method(partial(khot_map, hidden=NETWORK, relaxation=neural_sort), soft),
        "Xie–Ermon, network": Method(partial(khot_map, hidden=NETWORK, relaxation=gumbel_subset), soft),
    }
    left_out = {"raw k-NN", "NeuralSort, network", "Xie–Ermon, network"} if is_plane else set()
    left_out |= set() if LMNN else {"LMNN (metric-learn)"}
    return {name: method for name, method in found.items() if name not in left_out}


def regressors() -> dict[str, Method]:
    """Return the methods for numbers."""
    soft = {"temperature": (0.1, 0.3, 1.0), "learning_rate": RATES}
    found = {
        "raw k-NN": Method(identity, {}),
        "PCA": Method(lambda c, steps, n=None: PCA(min(n or c, c), random_state=0), {"n": (2, 5, None)}),
        "KHotNeighborhood, linear": Method(khot_map, soft),
        "KHotNeighborhood, network": Method(partial(khot_map, hidden=NETWORK), soft),
    }
    if MLKR:
        make = Method(lambda c, steps: MLKR(n_components=c, init="pca", max_iter=100, random_state=0), {})
        found["MLKR (metric-learn)"] = make
    return found


def synthetic(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return 1000 rows of ten features, of which some matter: Friedman's function, or a wave over a plane."""
    if kind == "friedman":
        return make_friedman1(1000, 10, noise=1.0, random_state=0)
    random = np.random.default_rng(0)
    x = random.standard_normal((1000, 10))
    y = np.sin(2 * (x[:, 0] + x[:, 1])) + 0.5 * x[:, 2] + 0.1 * random.standard_normal(1000)
    return x, y


def sets(extra: Path | None, rows: int) -> dict[str, tuple[np.ndarray, np.ndarray, str]]:
    """Return features, targets and the measure of each data set."""
    found = {
        "digits": (*load_digits(return_X_y=True), "accuracy"),
        "wine": (*load_wine(return_X_y=True), "accuracy"),
        "breast cancer": (*load_breast_cancer(return_X_y=True), "accuracy"),
        "diabetes": (*load_diabetes(return_X_y=True), "R²"),
        "friedman": (*synthetic("friedman"), "R²"),
        "wave": (*synthetic("wave"), "R²"),
    }
    if extra is not None:
        arrays = np.load(extra)
        found[extra.stem] = (arrays["X"].reshape(len(arrays["X"]), -1).astype(float), arrays["y"], "accuracy")
    return {name: (x[:rows], y[:rows], measure) for name, (x, y, measure) in found.items()}


class Split(NamedTuple):
    """Rows to learn from and rows to test on."""

    train: np.ndarray
    test: np.ndarray
    train_y: np.ndarray
    test_y: np.ndarray


def split_of(x: np.ndarray, y: np.ndarray, measure: str, seed: int, is_scaled: bool) -> Split:
    labels = y if measure == "accuracy" else None
    train, test, train_y, test_y = train_test_split(x, y, test_size=SHARE, random_state=seed, stratify=labels)
    if is_scaled:
        scaler = StandardScaler().fit(train)
        train, test = scaler.transform(train), scaler.transform(test)
    return Split(train, test, train_y, test_y)


def scores(model: Any, data: Split, measure: str) -> tuple[dict[int, float], float]:
    """Fit a map; return the score of hard k-NN after it by k, and the seconds of the processor that the map took."""
    torch.manual_seed(0)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rival that did not converge says so
        model.fit(data.train, data.train_y)
    seconds = time.process_time() - start
    train, test = model.transform(data.train), model.transform(data.test)
    kind = KNeighborsClassifier if measure == "accuracy" else KNeighborsRegressor
    ks = [k for k in KS[measure] if k <= len(train)]
    return {k: kind(k).fit(train, data.train_y).score(test, data.test_y) for k in ks}, seconds


def measure_method(
    name: str, method: Method, split: Callable[[int], Split], kind: str, dims: int, plan: Plan
) -> Iterator[Row]:
    """Choose setting and k on the tuning splits, and yield a row for each split to report, by its seed."""
    choices = [dict(zip(method.settings, values, strict=True)) for values in product(*method.settings.values())]
    totals: dict[tuple[int, int], float] = {}
    for i, choice in enumerate(choices):
        for seed in plan.tuning:
            found, _ = scores(method.make(dims, plan.steps, **choice), split(seed), kind)
            for k, score in found.items():
                totals[i, k] = totals.get((i, k), 0.0) + score
    best, k = max(totals, key=totals.__getitem__)
    setting = ", ".join(f"{key}={value}" for key, value in choices[best].items())
    for seed in plan.splits:
        model = method.make(dims, plan.steps, **choices[best])
        found, seconds = scores(model, split(seed), kind)
        yield Row("", dims, name, seed, kind, found[k], seconds, k, setting)


def better_scaled(x: np.ndarray, y: np.ndarray, kind: str, plan: Plan) -> bool:
    """Return whether raw k-NN is better on standardised features, by the tuning splits."""
    best = []
    for is_scaled in (False, True):
        each = [scores(FunctionTransformer(), split_of(x, y, kind, s, is_scaled), kind)[0] for s in plan.tuning]
        best.append(max(sum(found[k] for found in each) for k in each[0]))
    return best[1] > best[0]


def run(plan: Plan, extra: Path | None = None) -> Iterator[Row]:
    """Yield the rows of every data set and method."""
    for name, (x, y, kind) in sets(extra, plan.rows).items():
        is_scaled = better_scaled(x, y, kind, plan)
        many, split = min(MOST, x.shape[1]), partial(split_of, x, y, kind, is_scaled=is_scaled)
        jobs = [(many, classifiers(False)), (2, classifiers(True))] if kind == "accuracy" else [(many, regressors())]
        for dims, methods in jobs:
            for label, method in methods.items():
                for row in measure_method(label, method, split, kind, dims, plan):
                    yield row._replace(data=f"{name}, standardised" if is_scaled else name)


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    kinds = get_type_hints(Row)
    with path.open(encoding="utf-8") as file:
        return [Row(**{key: kinds[key](value) for key, value in row.items()}) for row in csv.DictReader(file)]


def report(rows: Iterable[Row]) -> str:
    """Return a table for each number of dimensions and measure: means ± standard errors, and seconds."""
    rows, parts = list(rows), []
    for title, wanted in (
        ("Accuracy", lambda row: row.measure == "accuracy" and row.dims != 2),
        ("Accuracy in two dimensions", lambda row: row.measure == "accuracy" and row.dims == 2),
        ("R²", lambda row: row.measure == "R²"),
    ):
        chosen = [row for row in rows if wanted(row)]
        names = list(dict.fromkeys(row.data for row in chosen))
        table = []
        for method in dict.fromkeys(row.method for row in chosen):
            cells = []
            for name in names:
                mine = [row for row in chosen if (row.method, row.data) == (method, name)]
                mean, error = common.mean_and_error([100 * row.score for row in mine]) if mine else (np.nan, 0.0)
                seconds = np.mean([row.seconds for row in mine]) if mine else np.nan
                took = f"{seconds:.2g} s" if seconds >= 0.01 else "< 0.01 s"
                cells.append(f"{mean:.1f} ± {error:.1f} ({took})" if mine else "–")
            table.append([method, *cells])
        if table:
            parts.append(f"{title}, in per cent:\n\n{markdown_table([title.split(' ')[0], *names], table)}")
    return "\n\n".join(parts) + "\n"


@styled
def draw(plan: Plan) -> Figure:
    """Return digits in two dimensions: the test rows of the first split under three maps."""
    x, y = load_digits(return_X_y=True)
    data = split_of(x[: plan.rows], y[: plan.rows], "accuracy", plan.splits[0], False)
    maps = {
        "raw (PCA)": PCA(2, random_state=0),
        "NCA": NeighborhoodComponentsAnalysis(2, random_state=0),
        "KHotNeighborhood, linear": khot_map(2, plan.steps),
        "KHotNeighborhood, network": khot_map(2, plan.steps, hidden=NETWORK),
    }
    figure, grid = panels(2, 2, 9.0)
    for axis, (name, model) in zip(grid.flat, maps.items(), strict=True):
        accuracy = scores(model, data, "accuracy")[0][5]
        z = model.transform(data.test)
        low, high = np.quantile(z, 0.01, axis=0), np.quantile(z, 0.99, axis=0)
        axis.scatter(*z.T, c=data.test_y, cmap="tab10", s=5, linewidths=0)
        for digit in range(10):
            middle = np.median(z[data.test_y == digit], axis=0)
            axis.text(*middle, str(digit), ha="center", va="center", fontweight="bold", fontsize=15)
        axis.set(xticks=[], yticks=[], xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        axis.set_title(f"{name}: 5-NN {accuracy:.1%}")
    return figure


def allow_new_sklearn() -> None:
    """Let metric-learn 0.7 run with a scikit-learn that renamed `force_all_finite`."""

    def renamed(check: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, force_all_finite: Any = True, **options: Any) -> Any:
            return check(*args, ensure_all_finite=force_all_finite, **options)

        return call

    if metric_learn_checks is not None and not hasattr(metric_learn_checks, "is_renamed"):
        metric_learn_checks.check_X_y = renamed(metric_learn_checks.check_X_y)
        metric_learn_checks.check_array = renamed(metric_learn_checks.check_array)
        metric_learn_checks.is_renamed = True


def main() -> int:
    parser: argparse.ArgumentParser = common.parser(__doc__, "two splits, ten steps, 120 rows of each set")
    parser.add_argument("--npz", type=Path, metavar="FILE", help="another data set, with arrays X and y")
    args = parser.parse_args()
    plan, at = QUICK if args.quick else Plan(), common.places(args, args.npz is not None)
    torch.set_num_threads(1)
    allow_new_sklearn()
    rows: list[Row] = []
    is_interrupted = common.collect(run(plan, args.npz), rows)
    if rows:
        common.write(at.results / "neighbors.csv", common.to_csv(rows, digits=6))
        rows = read(at.results / "neighbors.csv")  # as rounded there, so that the table is that of the file
        common.write_table(at.tables / "neighbors.md", report(rows))
    if not is_interrupted:
        common.write_picture(at.images / "neighbors.svg", draw(plan))
    common.show(args, rows, report(rows) if rows else "")
    return 130 if is_interrupted else 0


if __name__ == "__main__":
    raise SystemExit(main())
