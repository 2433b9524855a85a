"""Which features? Selection by khot's gate, by other gates and by scikit-learn's methods, on sets of many kinds.

Recovery: on synthetic sets, the share of the true features among the k selected, and whether all are there. Scores: on
digits, breast cancer and (if you have it) MNIST, the test accuracy of plain models on k selected features. Methods run
at one setting each: khot's gate at its defaults, the others at published ones or at the best of `--tune`. One thread.
Writes `feature_selection.csv`, two tables and a figure of the docs. Ctrl-C ends early, and writes what there is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import SelectKBest, mutual_info_classif
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.nn.functional import cross_entropy

from benchmarks import common
from benchmarks.rival_gates import OURS, Concrete, GateSelector, L2XGate, StochasticGates, network
from benchmarks.selection_report import Row, figure, from_csv, recovery_table, scores_table, to_csv
from benchmarks.selection_sets import KNOWN, REAL, Known, mnist
from khot.bench import markdown_table
from khot.jobs.select import methods, plain_model
from khot.nn import KHotGate
from khot.sklearn import Gate, KHotSelector

CONCRETE_RATE, STG_RATE = 0.1, 0.003
"""Learning rates of the gates: the best of `--tune`."""
KNOWN_STRENGTHS, REAL_STRENGTHS = (0.1,), (0.1, 1, 3)
"""STG's λ: the published one, which is the best of `--tune`, too; and more where there is no other data to tune on."""
GATE_RATES = (0.0003, 0.001, 0.003, 0.01)
TUNING_SEEDS = (1000, 1001)
FRESH = 5000
"""Added to the seed of a set for rows to judge on."""
INSTANCE_WISE: dict[str, tuple[Any, float]] = {
    "khot, for each row, relaxed": (partial(KHotGate, design=None), 0.001),
    "khot, for each row, sampled": (KHotGate, 0.001),
    "L2X, for each row": (L2XGate, 0.003),
}
"""Gates whose scores are a network's, and its learning rate: the best of `--tune`."""


def selectors(
    k: int, shape: tuple[int, int], seed: int, steps: int, strengths: Iterable[float] = KNOWN_STRENGTHS
) -> dict[str, Any]:
    """The methods that can be afforded, by name."""
    known = {name: first for name, (first, *_) in methods("classification", k, shape, seed).items()}
    rival = partial(GateSelector, k, max_steps=steps, seed=seed)
    stg = {f"STG, λ = {strength:g}": partial(StochasticGates, strength=strength) for strength in strengths}
    return {
        "khot": KHotSelector(k, strategy=Gate(max_steps=steps), task="classification", random_state=seed),
        "concrete": rival(Concrete, gate_learning_rate=CONCRETE_RATE),
        **{name: rival(gate, gate_learning_rate=STG_RATE) for name, gate in stg.items()},
        "F test": known["SelectKBest"],
        "mutual information": SelectKBest(partial(mutual_info_classif, random_state=seed), k=k),
        **{name: known[name] for name in ("L1", "RFE", "random", "all features") if name in known},
    }


def drawn(name: str, seed: int, less: int = 1, after: int = 0) -> Known:
    """A set with its columns in an order that depends on the seed; `after` is for other rows of it."""
    make, rows = KNOWN[name]
    known = make(seed + after, rows // less)
    return known.in_order(np.random.default_rng(seed).permutation(known.x.shape[1]))


def judge(chosen: np.ndarray, scores: np.ndarray | None, truth: np.ndarray) -> dict[str, float]:
    """Measures of a choice, bool (n) or (rows, n); the median rank of true features where they differ between rows."""
    found = (chosen & truth).sum(-1) / truth.sum(-1)
    result = {"found": float(np.mean(found)), "whole": float(np.mean(found == 1))}
    if truth.ndim == 2 and scores is not None:
        rank = np.broadcast_to((-scores).argsort(-1).argsort(-1) + 1, truth.shape)
        result["median rank"] = float(np.median(rank[truth].reshape(len(truth), -1), axis=1).mean())
    return result


def recovery(seeds: Iterable[int], less: int = 1, names: Iterable[str] = tuple(KNOWN)) -> Iterator[Row]:
    """Every set, seed and method; with `less`, rows and steps are divided by it."""
    for name, seed in product(names, seeds):
        known, steps = drawn(name, seed, less), OURS["max_steps"] // less
        x = StandardScaler().fit_transform(known.x)
        for method, selector in selectors(known.k, x.shape, seed, steps).items():
            if method != "all features":
                fitted = selector.fit(x, known.y)
                measures = judge(fitted.get_support(), getattr(fitted, "scores_", None), known.truth)
                yield from (Row(name, known.k, method, seed, *measure) for measure in measures.items())
        if known.truth.ndim == 2:
            fresh = drawn(name, seed, less, FRESH)
            for method, (gate, rate) in INSTANCE_WISE.items():
                measures = judge(*instance_wise(gate, rate, known, fresh, steps, seed), fresh.truth)
                yield from (Row(name, known.k, method, seed, *measure) for measure in measures.items())


def instance_wise(
    make: Any, rate: float, known: Known, fresh: Known, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """A choice for each fresh row by a gate whose scores are a network's, and those scores; (rows, n) both.

    The budget is k from the first step on, and the gate's network learns at the rate given.
    """
    n, hidden, scaler = known.x.shape[1], OURS["hidden"], StandardScaler().fit(known.x)
    x, new = (torch.from_numpy(scaler.transform(part.x)).float() for part in (known, fresh))
    gate = make(network(n, hidden, n, seed + 1), known.k)
    net, y, generator = network(n, hidden, 2, seed), torch.from_numpy(known.y), torch.Generator().manual_seed(seed)
    groups = [(net, OURS["learning_rate"]), (gate, rate)]
    optimizer = torch.optim.Adam([{"params": part.parameters(), "lr": lr} for part, lr in groups])
    for _ in range(steps):  # rows are drawn as `Gate` draws them
        at = torch.rand(OURS["batch_size"], dtype=torch.float64, generator=generator) * len(x)
        batch = at.long().clamp_(max=len(x) - 1)
        optimizer.zero_grad()
        cross_entropy(net(gate(x[batch], generator=generator)), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return gate.eval().mask(new).bool().numpy(), gate.scores_of(new).numpy()


def scores(seeds: Iterable[int], directory: Path | None = None, less: int = 1) -> Iterator[Row]:
    """Test accuracy on a quarter of the rows, held out, after selection on the others."""
    steps = OURS["max_steps"] // less
    real = REAL | ({"MNIST": (partial(mnist, directory), (20, 50))} if directory else {})
    for name, (load, ks) in real.items():
        x, y = (part[:: 1 if less == 1 else 3] for part in load())
        for k, seed in product(ks, seeds):
            train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.25, stratify=y, random_state=seed)
            for method, selector in selectors(k, train_x.shape, seed, steps, REAL_STRENGTHS).items():
                chosen = make_pipeline(StandardScaler(), selector).fit(train_x, train_y)
                for kind in ("linear", "forest"):
                    model = plain_model("classification", kind, seed).fit(chosen.transform(train_x), train_y)
                    yield Row(name, k, method, seed, kind, model.score(chosen.transform(test_x), test_y))


def tune(less: int = 1) -> str:
    """The share of true features found on other seeds by each setting of the rivals, and of gates for each row."""
    rivals = {f"concrete, rate {rate}": (Concrete, rate) for rate in (0.003, 0.02, 0.1, 0.3)} | {
        f"STG, rate {rate}, λ = {strength}": (partial(StochasticGates, strength=strength), rate)
        for rate, strength in product((0.003, 0.02), (0.03, 0.1, 0.3, 1.0))
    }
    names = [name for name in KNOWN if name != "switch"]
    lines = []
    for label, (gate, rate) in rivals.items():
        found = [_tried(name, partial(_rival, gate, rate), less) for name in names]
        lines.append([label, *(f"{share:.2f}" for share in found), f"{np.mean(found):.2f}"])
        print(*lines[-1], file=sys.stderr, flush=True)
    rows = {
        f"{method}, rate {rate}": (gate, rate) for method, (gate, _) in INSTANCE_WISE.items() for rate in GATE_RATES
    }
    switch = [[label, f"{_tried('switch', partial(_of_rows, *how), less):.2f}"] for label, how in rows.items()]
    return markdown_table(["", *names, "mean"], lines) + "\n" + markdown_table(["", "switch"], switch)


def _tried(name: str, choose: Any, less: int) -> float:
    """The mean share found on the tuning seeds; `choose` gives the choice and the truth."""
    shares = [judge(*choose(name, seed, less, OURS["max_steps"] // less))["found"] for seed in TUNING_SEEDS]
    return float(np.mean(shares))


def _rival(gate: Any, rate: float, name: str, seed: int, less: int, steps: int) -> tuple[np.ndarray, None, np.ndarray]:
    known = drawn(name, seed, less)
    selector = GateSelector(known.k, gate, gate_learning_rate=rate, max_steps=steps, seed=seed)
    return selector.fit(known.x, known.y).get_support(), None, known.truth


def _of_rows(
    gate: Any, rate: float, name: str, seed: int, less: int, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    fresh = drawn(name, seed, less, FRESH)
    return *instance_wise(gate, rate, drawn(name, seed, less), fresh, steps, seed), fresh.truth


def main() -> int:
    parser = common.parser(__doc__, "2 seeds, less rows and steps: under a minute")
    parser.add_argument("--seeds", type=int, metavar="N", help="default: 10 for recovery, 5 for scores")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="with MNIST's raw idx files; left out without it")
    parser.add_argument("--tune", action="store_true", help="only the rivals' settings, on other seeds, to the screen")
    parser.add_argument("--redraw", action="store_true", help="only the tables and the figure, from the CSV there is")
    args = parser.parse_args()
    if args.seeds is not None and args.seeds < 1:
        parser.error(f"--seeds must be ≥ 1; got {args.seeds}")
    torch.set_num_threads(1)
    if args.tune:
        print(tune())
        return 0
    places, is_interrupted = common.places(args), False
    results = places.results / "feature_selection.csv"
    if not args.redraw:
        measured: list[Row] = []
        is_interrupted = measure(measured, args.seeds, args.mnist, args.quick)
        if not measured:
            return 130
        common.write(results, to_csv(measured))
    rows = from_csv(results.read_text(encoding="utf-8"))
    common.write_table(places.tables / "feature-selection-recovery.md", recovery_table(rows))
    common.write_table(places.tables / "feature-selection-scores.md", scores_table(rows))
    common.write_picture(places.images / "feature-selection.svg", figure(rows))
    common.show(args, rows, recovery_table(rows) + "\n" + scores_table(rows))
    return 130 if is_interrupted else 0


def measure(rows: list[Row], count: int | None, directory: Path | None, is_quick: bool) -> bool:
    """Append the rows; return whether Ctrl-C ended it early."""
    if directory is None:
        print("MNIST is left out: no --mnist DIR with its raw idx files was given", file=sys.stderr)
    counts, less = (2, 2) if is_quick else (count or 10, count or 5), 10 if is_quick else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # L1's, as in `khot select`
        warnings.simplefilter("ignore", RuntimeWarning)  # F scores of constant columns
        warnings.filterwarnings("ignore", message="(?s)Features .* are constant")
        return common.collect(chain(recovery(range(counts[0]), less), scores(range(counts[1]), directory, less)), rows)


if __name__ == "__main__":
    sys.exit(main())
