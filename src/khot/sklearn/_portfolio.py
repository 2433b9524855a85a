"""Strategies of `KHotSelector`: best subsets of a linear model, of steps and products, of trees; and the portfolio."""

import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from .._process import threads_for
from ..coding import splice
from ._blocks import Blocks, Units
from ._gate import Gate, by_scores
from ._judges import boosted, fitted, judged, squared_errors
from ._problem import Choice, Problem, Strategy

SPLICED = 20_000  # columns among which the best subset of a linear model is looked for
WIDE = 1000  # units of a linear search by cross-validation
NARROW = 120  # units of a search with steps and products, or trees
LOGISTIC_ROWS = 20_000  # of a second look with a logistic model
STACKED = 50_000  # rows, with a unit permuted in some of them, that trees predict at once
DIRECT = 2  # times as many rows as columns: beyond that, the Gram matrix says it all
SHORT = Gate(max_steps=120, gate_learning_rate=0.06)
WEIGHTS = 0.05, 0.25  # of a logistic model's rows
TELLING = 10  # features by which it is decided whose choices a curve shows
LEAD = 0.02  # of R², by which another strategy must be ahead of the first, which chooses with less noise


def splicing(problem: Problem) -> Choice:
    """Choose the best subset of a linear model: `khot.coding.splice`, then exchanges on held-out rows.

    For two classes the squares are also those of a logistic model, reweighted. With groups or several targets, the
    search starts from forward selection alone.
    """
    is_plain = all(len(columns) == 1 for columns in problem.units) and problem.y.shape[1] == 1
    starts = [_spliced(problem)] if is_plain and len(problem.units) <= SPLICED else []
    narrow, kept = problem.narrow(WIDE, starts[0] if starts else ())
    blocks = narrow.linear
    starts = [blocks.forward(np.searchsorted(kept, start).tolist()) for start in starts]  # full, if it was not
    if is_plain and narrow.classes is not None and starts and not narrow.stopped:
        starts.append(blocks.forward(_logistic(narrow.sample(LOGISTIC_ROWS), starts[0])))
    if not starts or len(narrow.units) <= NARROW:
        starts += blocks.starts()
    return lifted(problem, _best(blocks, starts), blocks, kept)


def _spliced(problem: Problem, z: np.ndarray | None = None, weight: np.ndarray | None = None) -> Units:
    """Return the best subset of least squares for one target."""
    rows, columns = problem.x.shape
    order = problem.columns(range(columns))
    given: dict[str, Any] = {"exchange": 2 if columns <= NARROW else 1}
    if rows > DIRECT * columns and z is None:
        total, q = problem.linear.total, problem.linear.q
        root = np.linalg.cholesky(total[:q, :q] + np.eye(q) * 1e-6 * rows)
        a, b = root.T, np.linalg.solve(root, total[:q, q + 1])
    else:
        a, b = problem.x[:, order], problem.y[:, 0] if z is None else z
        given["weights"] = torch.from_numpy(problem.weight if weight is None else weight)
    purse = problem.purse
    if not purse.is_count:
        given["costs"] = torch.from_numpy(purse.costs)
    left, right = (torch.from_numpy(np.ascontiguousarray(part)) for part in (a, b))
    found = splice(left, right, problem.k if purse.is_count else purse.budget, **given)
    return tuple(found.support.nonzero().flatten().tolist())


def _logistic(problem: Problem, units: Units) -> Units:
    """Return the best subset of the squares to which a logistic model on some units is equal near its optimum."""
    x, classes, weight = problem.x[:, problem.columns(units)], problem.classes, problem.weight
    if not units or classes is None or len(np.unique(classes)) < 2:
        return units
    model = fitted(LogisticRegression(C=10.0, max_iter=200), x, classes, weight)
    p = model.predict_proba(x)[:, 1]
    curve = np.clip(p * (1 - p), *WEIGHTS)
    z = np.clip(model.decision_function(x), -4, 4) + (classes - p) / curve
    return _spliced(problem, z - np.average(z, weights=curve * weight), curve * weight)


def surfaces(problem: Problem) -> Choice:
    """Choose the best subset of an additive model with steps, and with products of two and three columns.

    So it finds effects that are not linear, and features that matter only together: every pair of up to 2000 columns,
    and every triple of up to 64, is looked at.
    """
    narrow, kept = problem.sample().narrow(NARROW)
    blocks = narrow.surface
    return lifted(problem, _best(blocks, blocks.starts()), blocks, kept)


def trees(problem: Problem) -> Choice:
    """Choose by boosted trees: half of the units go at a time, those whose permutation harms held-out rows least."""
    narrow, kept = problem.sample().narrow(NARROW)
    left, scores = list(range(len(narrow.units))), np.zeros(len(narrow.units))
    held = narrow.fold == 0
    if held.all():
        held = np.zeros_like(held)
    turn = 0
    while narrow.purse.room(left) < 0 or not turn:
        turn += 1
        importance = _importance(narrow, left, held)
        scores[left] = turn + importance / (1 + np.abs(importance).max())
        order = np.array(left)[np.argsort(-importance / narrow.purse.costs[left], kind="stable")]
        most, fit = max(len(left) // 2, 1), list(by_scores(narrow.of(order), -np.arange(len(order))).units)
        left = sorted(order[: max(most, len(fit))].tolist() if narrow.purse.room(order[:most]) < 0 else order[fit])
        if narrow.stopped:
            break
    return improved(problem, narrow, kept, by_scores(narrow, scores))


def gating(problem: Problem) -> Choice:
    """Choose by a short training of a `Gate`, among the most promising units of a large problem."""
    narrow, kept = problem.sample().narrow(NARROW)
    return improved(problem, narrow, kept, SHORT(narrow))


def _importance(problem: Problem, units: Sequence[int], held: np.ndarray) -> np.ndarray:
    """Return by how much the error of trees on held-out rows rises when a unit is permuted, (units,)."""
    columns = [problem.units[u] for u in units]
    every = np.concatenate(columns)
    x, at = problem.x[:, every], np.split(np.arange(len(every)), np.cumsum([len(c) for c in columns])[:-1])
    predict, turn = boosted(problem.rows(~held), x[~held])
    judging = held if held.any() else ~held
    new, y, weight = x[judging], (problem.y @ turn)[judging], problem.weight[judging]
    order = np.random.default_rng(problem.seed).permutation(len(new))
    result = [squared_errors(predict, new, y, weight).sum()]
    step = max(1, STACKED // len(new))
    for start in range(0, len(at), step):
        part = at[start : start + step]
        mixed = np.tile(new, (len(part), 1, 1))
        for i, place in enumerate(part):
            mixed[i][:, place] = new[order][:, place]
        stacked = np.tile(y, (len(part), 1)), np.tile(weight, len(part))
        errors = squared_errors(predict, mixed.reshape(-1, new.shape[1]), *stacked)
        result += errors.reshape(len(part), -1).sum(1).tolist()
    return np.asarray(np.array(result[1:]) - result[0])


def _best(blocks: Blocks, starts: Sequence[Units]) -> Units:
    """Return the best set that exchanges lead to."""
    return min((blocks.exchange(start) for start in dict.fromkeys(starts)), key=blocks.loss)


def improved(problem: Problem, narrow: Problem, kept: np.ndarray, found: Choice) -> Choice:
    """Return a choice after exchanges on held-out rows, by least squares with steps and products."""
    blocks = narrow.linear if problem.task == "reconstruction" else narrow.surface
    return lifted(problem, blocks.exchange(found.units), blocks, kept)


def lifted(problem: Problem, units: Units, blocks: Blocks, kept: np.ndarray) -> Choice:
    """Return the choice of a narrower problem as one of the whole."""
    if len(units) < len(kept):
        blocks.losses(blocks.neighbours(units))
    margins = blocks.margins(units)
    scores, losses, errors = np.full((3, len(problem.units)), np.nan)
    scores[:] = margins.min() - 1.0
    scores[kept] = margins
    losses[kept], errors[kept] = blocks.missed(units)
    unknown = np.isnan(losses)  # below all others, in the order of their scores
    place = np.argsort(np.argsort(scores[unknown], kind="stable"), kind="stable")
    losses[unknown] = np.nanmin(losses, initial=0.0) - 1.0 + place / max(len(place), 1)
    losses[list(kept[list(units)])] += 1e-12  # above others that are as good
    return Choice(tuple(kept[list(units)].tolist()), scores, losses=losses, errors=errors)


@dataclass(frozen=True)
class Portfolio:
    """Let several strategies choose, and take the one whose choice predicts held-out rows best.

    In cross-validation within the rows given, each strategy chooses from the training rows. A linear model and boosted
    trees are fitted to its columns there, and score the rows held out; the mean of their R² decides, so that the choice
    serves models of either kind. (For classes, R² is that of their indicators.) The best strategy then chooses from all
    rows; the first one, if none is ahead of it by 0.02, or none is better than chance by a standard error. With more
    columns than rows, another must be ahead of the first by a standard error of the difference, too.

    Args:
        strategies: what takes part; functions of a `Problem` that return a `Choice`.
        n_jobs: choices that are made at the same time, in processes; None for one after the other.

    The `history` of the choice has a dict for each strategy, the winner first: candidate (its name), linear, boosted
    (R²), score (their mean, where R² below 0 counts as 0), error (standard error over folds; 0 for one fold).
    """

    _: KW_ONLY
    strategies: tuple[Strategy, ...] = (splicing, surfaces, trees, gating)
    n_jobs: int | None = None

    def __post_init__(self) -> None:
        given = self.strategies
        if isinstance(given, str) or not np.iterable(given) or not all(map(callable, given)):
            said = "functions of a Problem, such as (khot.sklearn.splicing, khot.sklearn.trees)"
            raise TypeError(f"`strategies` must be {said}; got {given!r}.")
        if not tuple(given):
            raise ValueError("`strategies` must have at least 1 strategy; got none.")
        if self.n_jobs is not None and (not isinstance(self.n_jobs, Integral) or self.n_jobs == 0):
            raise ValueError(f"`n_jobs` must be None, an int ≥ 1, or −1 for all cores; got {self.n_jobs!r}.")

    def __call__(self, problem: Problem) -> Choice:
        """Return the choice of the best strategy."""
        with threads_for(0), threadpool_limits(1):
            winner, rows = self.decide(problem)
            return winner(problem)._replace(history=tuple(rows))

    def decide(self, problem: Problem) -> tuple[Strategy, list[dict[str, Any]]]:
        """Return the best strategy, and the history of how it was found."""
        skip = (surfaces, trees) if problem.task == "reconstruction" else ()
        strategies = [strategy for strategy in self.strategies if strategy not in skip]
        folds = [] if len(strategies) < 2 else range(min(_outer(len(problem.x)), int(problem.fold.max())))
        tasks = [(fold, strategy) for fold in folds for strategy in strategies]
        skills: dict[Strategy, list[dict[str, float]]] = {strategy: [] for strategy in strategies}
        for (_, strategy), found in zip(tasks, self._tried(problem, tasks), strict=False):
            skills[strategy].append(found)
        rows = [_row(strategy, found) for strategy, found in skills.items() if found]
        is_wide = problem.x.shape[1] > len(problem.x)
        ahead = [_evidence(row) - _lead(skills, strategy, is_wide) for row, strategy in zip(rows, skills, strict=False)]
        ahead[:1] = [row["score"] if is_wide else _evidence(row) for row in rows[:1]]  # the first one leads by nothing
        winner = strategies[int(np.argmax(ahead))] if rows else strategies[0]
        return winner, sorted(rows, key=lambda row: (row["candidate"] != _name(winner), -row["score"]))

    def _tried(self, problem: Problem, tasks: Sequence[tuple[int, Strategy]]) -> Iterable[dict[str, float]]:
        return self._in_turn(problem, tasks) if self.n_jobs in (None, 1) else self._at_once(problem, tasks)

    def _at_once(self, problem: Problem, tasks: Sequence[tuple[int, Strategy]]) -> Iterator[dict[str, float]]:
        """Yield results of other processes, which Ctrl-C does not reach; if one dies, go on without them."""
        quiet, done = replace(problem, callback=None, stopped=[], made={}), 0
        if problem.tell(_progress(tasks, done)):
            return
        try:
            with _deaf():
                found = Parallel(self.n_jobs, return_as="generator")(delayed(_trial)(quiet, *task) for task in tasks)
            for result in found:
                yield result
                done += 1
                if problem.tell(_progress(tasks, done)):
                    with warnings.catch_warnings():
                        warnings.filterwarnings("ignore", message=".* tasks which")  # that the rest is not done
                        found.close()
                    return
        except BrokenExecutor:  # a process was killed
            yield from self._in_turn(problem, tasks, done)

    @staticmethod
    def _in_turn(problem: Problem, tasks: Sequence[tuple[int, Strategy]], first: int = 0) -> Iterator[dict[str, float]]:
        parts: dict[int, Problem] = {}
        for i, (fold, strategy) in enumerate(tasks[first:], first):
            if problem.tell(_progress(tasks, i)):
                return
            if fold not in parts:
                parts = {fold: problem.rows(problem.fold != fold)}
            yield judged(problem, fold, strategy(parts[fold]).units)


def _progress(tasks: Sequence[tuple[int, Strategy]], done: int) -> dict[str, Any]:
    """Return what a callback is told: the candidate that is tried next, and how many were."""
    return {"candidate": _name(tasks[min(done, len(tasks) - 1)][1]), "done": done, "total": len(tasks) + 1}


@contextmanager
def _deaf() -> Iterator[None]:
    """Let processes that start meanwhile never see Ctrl-C: they inherit that it is ignored.

    One that comes meanwhile waits, and reaches this process afterwards.
    """
    own = signal.getsignal(signal.SIGINT)
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if own is None else own)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _trial(problem: Problem, fold: int, strategy: Strategy) -> dict[str, float]:
    with threads_for(0), threadpool_limits(1):
        return judged(problem, fold, strategy(problem.rows(problem.fold != fold)).units)


def _evidence(row: dict[str, Any]) -> float:
    """Return a score, or 0 if it is within a standard error of 0, as it is where one fold is predicted by chance."""
    return float(row["score"]) if row["score"] > 1.001 * row["error"] else 0.0


def _lead(skills: dict[Strategy, list[dict[str, float]]], strategy: Strategy, is_wide: bool) -> float:
    """Return by how much a strategy must be ahead of the first one.

    With more columns than rows it is a standard error of the difference, too: a search that succeeds with all rows may
    fail with those of a fold, and then others lead by chance.
    """
    first, found = (_means(skills[each]) for each in (next(iter(skills)), strategy))
    if not is_wide or len(found) < 2 or len(found) < len(first):
        return LEAD
    return float(max(LEAD, np.std(np.subtract(found, first), ddof=1) / len(found) ** 0.5))


def _means(found: Sequence[dict[str, float]]) -> list[float]:
    return [float(np.mean([max(value, 0.0) for value in fold.values()])) for fold in found]


def _name(strategy: Strategy) -> str:
    return getattr(strategy, "__name__", type(strategy).__name__)


def _outer(rows: int) -> int:
    """Return how many folds decide between strategies: more for few rows."""
    return 3 if rows <= 600 else 2 if rows <= 1500 else 1


def _row(strategy: Strategy, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return an entry of the history."""
    each = _means(found)
    error = float(np.std(each, ddof=1)) / len(each) ** 0.5 if len(each) > 1 else 0.0
    means = {name: float(np.mean([fold[name] for fold in found])) for name in found[0]}
    return {"candidate": _name(strategy), **means, "score": float(np.mean(each)), "error": error}


def curve(problem: Problem, strategy: Strategy) -> list[dict[str, float]]:
    """Return the held-out score against k, up to the budget: choices are made, and cut down, on other rows.

    In each fold, the strategy (of a portfolio, the best for ten units) chooses as many units as it may from the
    other folds. Then the unit without which least is lost there goes, again and again.
    """
    with threads_for(0), threadpool_limits(1):
        if isinstance(strategy, Portfolio):  # strategies differ by what they find first
            strategy = strategy.decide(problem.spending(min(problem.k, TELLING)))[0]
        return _curve(problem, strategy)


def _curve(problem: Problem, strategy: Strategy) -> list[dict[str, float]]:
    sizes = [k for k in (*range(1, 11), 12, 15, 20, 25, 30, 40, 50, 70, 100) if k < problem.k] + [problem.k]
    scores: dict[int, list[float]] = {k: [] for k in sizes}
    folds = min(int(problem.fold.max()) + 1, 5 if len(problem.x) <= 1500 else 3)
    for fold in range(folds if folds > 1 else 0):
        if problem.tell({"candidate": "how many", "done": fold, "total": folds}):
            break
        part = problem.rows(problem.fold != fold)
        units = list(strategy(part).units)
        small = part.sample().of(units)
        blocks, left = small.linear if problem.task == "reconstruction" else small.surface, list(range(len(units)))
        while left:
            if len(left) in scores:
                found = judged(problem, fold, [units[u] for u in left])
                scores[len(left)].append(float(np.mean([max(value, 0.0) for value in found.values()])))
            without = [[v for v in left if v != u] for u in left]
            left = without[int(blocks.losses(without).sum(1).argmin())]
    rows = []
    for k, each in scores.items():
        if each:
            error = float(np.std(each, ddof=1)) / len(each) ** 0.5 if len(each) > 1 else 0.0
            rows.append({"k": k, "score": float(np.mean(each)), "error": error})
    return rows or [{"k": problem.k, "score": 0.0, "error": 0.0}]


def within_error(rows: Sequence[dict[str, float]]) -> int:
    """Return the smallest k whose score is within a standard error of the best."""
    best = max(rows, key=lambda row: row["score"])
    return int(min(row["k"] for row in rows if row["score"] >= best["score"] - best["error"]))
