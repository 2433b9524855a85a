"""Strategies of `KHotSelector`: best subsets of a linear model, of steps and products, of trees; and the portfolio."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression

from ..coding import splice
from ._blocks import Blocks, Units
from ._gate import Gate, by_scores
from ._problem import DIRECTIONS, Choice, Problem, Strategy

SPLICED = 20_000  # columns among which the best subset of a linear model is looked for
WIDE = 1000  # units of a linear search by cross-validation
NARROW = 120  # units of a search with steps and products, or trees
LOGISTIC_ROWS = 20_000  # of a second look with a logistic model
STACKED = 50_000  # rows, with a unit permuted in some of them, that trees predict at once
DECIDE = 3  # folds in which trees decide between candidates
DIRECT = 2  # times as many rows as columns: beyond that, the Gram matrix says it all
SHORT = Gate(max_steps=120, gate_learning_rate=0.06)
WEIGHTS = 0.05, 0.25  # of a logistic model's rows


def splicing(problem: Problem) -> Choice:
    """Choose the best subset of a linear model: `khot.coding.splice`, then exchanges on held-out rows.

    For two classes the squares are also those of a logistic model, reweighted. With groups or several targets, the
    search starts from forward selection alone.
    """
    is_plain = all(len(columns) == 1 for columns in problem.units) and problem.y.shape[1] == 1
    starts = [_spliced(problem)] if is_plain and len(problem.units) <= SPLICED else []
    narrow, kept = problem.narrow(WIDE, starts[0] if starts else ())
    starts = [tuple(np.searchsorted(kept, start).tolist()) for start in starts]
    blocks = narrow.linear
    if is_plain and narrow.classes is not None and starts and not narrow.stopped:
        starts.append(_logistic(narrow.sample(LOGISTIC_ROWS), starts[0]))
    if not starts or len(narrow.units) <= NARROW:
        starts.append(blocks.forward())
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
    tensors = (torch.from_numpy(np.ascontiguousarray(part)) for part in (a, b))
    found = splice(*tensors, purse.budget if not purse.is_count else problem.k, **given)
    return tuple(found.support.nonzero().flatten().tolist())


def _logistic(problem: Problem, units: Units) -> Units:
    """Return the best subset of the squares to which a logistic model on some units is equal near its optimum."""
    x, classes, weight = problem.x[:, problem.columns(units)], problem.classes, problem.weight
    if not units or classes is None or len(np.unique(classes)) < 2:
        return units
    model = LogisticRegression(C=10.0, max_iter=200).fit(x, classes, sample_weight=weight)
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
    return lifted(problem, _best(blocks, [blocks.forward()]), blocks, kept)


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
    found = by_scores(narrow, scores)
    whole = np.full(len(problem.units), -1.0)
    whole[kept] = found.scores
    return Choice(tuple(kept[list(found.units)].tolist()), whole)


def gating(problem: Problem) -> Choice:
    """Choose by a short training of a `Gate`, among the most promising units of a large problem."""
    narrow, kept = problem.sample().narrow(NARROW)
    found = SHORT(narrow)
    scores = np.full(len(problem.units), found.scores.min() - 1.0)
    scores[kept] = found.scores
    return Choice(tuple(kept[list(found.units)].tolist()), scores, found.history)


def _importance(problem: Problem, units: Sequence[int], held: np.ndarray) -> np.ndarray:
    """Return by how much the error of trees on held-out rows rises when a unit is permuted, (units,)."""
    columns = [problem.units[u] for u in units]
    every = np.concatenate(columns)
    x, at = problem.coarse[:, every], np.split(np.arange(len(every)), np.cumsum([len(c) for c in columns])[:-1])
    models, y = _boosted(problem.rows(~held), x[~held])
    judged = held if held.any() else ~held
    new, y, weight = x[judged], y(problem)[judged], problem.weight[judged]
    order = np.random.default_rng(problem.seed).permutation(len(new))
    result = [_errors(models, new, y, weight).sum()]
    step = max(1, STACKED // len(new))
    for start in range(0, len(at), step):
        part = at[start : start + step]
        mixed = np.tile(new, (len(part), 1, 1))
        for i, place in enumerate(part):
            mixed[i][:, place] = new[order][:, place]
        errors = _errors(models, mixed.reshape(-1, new.shape[1]), np.tile(y, (len(part), 1)), np.tile(weight, len(part)))
        result += errors.reshape(len(part), -1).sum(1).tolist()
    return np.array(result[1:]) - result[0]


def _boosted(problem: Problem, x: np.ndarray) -> tuple[Any, Any]:
    """Fit boosted trees to x, and return a predictor of y, and what it predicts of a problem."""
    how: dict[str, Any] = {"max_leaf_nodes": 12, "learning_rate": 0.15, "early_stopping": False, "random_state": problem.seed}
    how["min_samples_leaf"] = int(np.clip(len(x) // 30, 2, 20))
    if problem.classes is not None:
        count = len(np.unique(problem.classes))
        model = HistGradientBoostingClassifier(max_iter=int(np.clip(80 / count, 15, 40)), **how)
        if count < 2:
            return (lambda new: np.zeros((len(new), problem.y.shape[1]))), lambda other: other.y
        model.fit(x, problem.classes, sample_weight=problem.weight)
        first = {int(c): problem.y[problem.classes == c][0] for c in model.classes_}  # the code of a class
        codes = np.stack([first[int(c)] for c in model.classes_])
        return (lambda new: model.predict_proba(new) @ codes), lambda other: other.y
    turn = np.eye(problem.y.shape[1])
    if problem.y.shape[1] > DIRECTIONS - 1:
        turn = np.linalg.eigh(problem.y.T @ problem.y)[1][:, 1 - DIRECTIONS :]
    each = [
        HistGradientBoostingRegressor(max_iter=40, **how).fit(x, target, sample_weight=problem.weight)
        for target in (problem.y @ turn).T
    ]
    return (lambda new: np.stack([model.predict(new) for model in each], 1)), lambda other: other.y @ turn


def _errors(predict: Any, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the weighted squared error of each row."""
    return np.asarray(((predict(x) - y) ** 2).sum(1) * weight)


def boosted_losses(problem: Problem, units: Sequence[int]) -> np.ndarray:
    """Return the squared error of boosted trees on some units in each fold, as a share of that of the mean."""
    x, losses, null = problem.coarse[:, problem.columns(units)], [], 0.0
    for f in range(min(int(problem.fold.max()) + 1, DECIDE)):
        held = problem.fold == f
        train = ~held if not held.all() else held
        predict, of = _boosted(problem.rows(train), x[train])
        y = of(problem)[held]
        losses.append(_errors(predict, x[held], y, problem.weight[held]).sum())
        null += float(((y**2).sum(1) * problem.weight[held]).sum())
    return np.array(losses) / max(null, 1e-300)


def _best(blocks: Blocks, starts: Sequence[Units]) -> Units:
    """Return the best set that exchanges lead to."""
    return min((blocks.exchange(start) for start in dict.fromkeys(starts)), key=blocks.loss)


def lifted(problem: Problem, units: Units, blocks: Blocks, kept: np.ndarray) -> Choice:
    """Return the choice of a narrower problem as one of the whole."""
    if len(units) < len(kept):
        blocks.losses(blocks.neighbours(units))
    margins = blocks.margins(units)
    scores = np.full(len(problem.units), margins.min() - 1.0)
    scores[kept] = margins
    return Choice(tuple(kept[list(units)].tolist()), scores)


@dataclass(frozen=True)
class Portfolio:
    """Let several strategies choose, and take the choice that predicts held-out rows best.

    Each choice is also improved by exchanges on held-out rows. All are judged by cross-validation within the rows
    given: the score is the mean of R² of a linear model, and of the better one of boosted trees and least squares with
    steps and products. (For classes, R² is that of their indicators.) So the choice serves models of either kind.

    Args:
        strategies: what takes part; functions of a `Problem` that return a `Choice`.
        n_jobs: strategies that run at the same time, in processes; None for one after the other.

    The `history` of the choice has a dict for each candidate: candidate, units, linear, boosted, surface, score, error.
    """

    _: KW_ONLY
    strategies: tuple[Strategy, ...] = (splicing, surfaces, trees, gating)
    n_jobs: int | None = None

    def __call__(self, problem: Problem) -> Choice:
        """Return the best choice."""
        is_linear = problem.task == "reconstruction"
        skip = (surfaces, trees) if is_linear else ()
        strategies = [strategy for strategy in self.strategies if strategy not in skip]
        found: dict[Units, str] = {}
        part, kept = problem, np.arange(len(problem.units))
        choices = self._run(problem, strategies)
        for strategy, choice in zip(strategies, choices, strict=False):
            found.setdefault(choice.units, getattr(strategy, "__name__", type(strategy).__name__).lower())
        wanted = sorted(set().union(*found))
        if len(problem.units) > NARROW or len(problem.x) > len(problem.sample().x):
            part, kept = problem.sample().narrow(NARROW, wanted)
        place = {int(u): i for i, u in enumerate(kept)}
        judged = {tuple(sorted(place[u] for u in units)): name for units, name in found.items()}
        if not is_linear:
            for units, name in list(judged.items()):
                if name not in ("splicing", "surfaces") and not problem.stopped:
                    judged.setdefault(part.surface.exchange(units, rounds=4), f"{name}, exchanged")
        rows = [self._judge(part, units, name, kept, is_linear) for units, name in judged.items()]
        best = max(rows, key=lambda row: row["score"])
        winner = tuple(sorted(place[u] for u in best["units"]))
        is_curved = not is_linear and max(best["boosted"], best["surface"]) > best["linear"]
        blocks = part.surface if is_curved else part.linear
        choice = lifted(problem, winner, blocks, kept)
        return choice._replace(history=tuple(sorted(rows, key=lambda row: -row["score"])))

    def _run(self, problem: Problem, strategies: Sequence[Strategy]) -> list[Choice]:
        if self.n_jobs not in (None, 1):
            return list(Parallel(self.n_jobs)(delayed(strategy)(problem) for strategy in strategies))
        done: list[Choice] = []
        for i, strategy in enumerate(strategies):
            name = getattr(strategy, "__name__", type(strategy).__name__).lower()
            if problem.tell({"candidate": name, "done": i, "total": len(strategies)}) and done:
                break
            done.append(strategy(problem))
        return done

    @staticmethod
    def _judge(problem: Problem, units: Units, name: str, kept: np.ndarray, is_linear: bool) -> dict[str, Any]:
        """Return the held-out R² of a set by each judge, their mean, and its standard error over folds."""
        losses = [problem.linear.losses([units])[0]]
        if not is_linear:
            losses += [boosted_losses(problem, units), problem.surface.losses([units])[0]]
        skills = [1 - float(each.sum()) for each in losses]
        counted = losses[:1] if is_linear else [losses[0], losses[1 + int(np.argmax(skills[1:]))]]
        score = float(np.mean([max(1 - float(each.sum()), 0.0) for each in counted]))
        spread = [each.std(ddof=1) * len(each) ** 0.5 if len(each) > 1 else 0.0 for each in counted]
        row: dict[str, Any] = {"candidate": name, "units": tuple(kept[list(units)].tolist()), "linear": skills[0]}
        row |= {"boosted": skills[1], "surface": skills[2]} if not is_linear else {}
        return row | {"score": score, "error": float(np.mean(spread))}
