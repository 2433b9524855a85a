"""Sparse identification of dynamical systems with exactly k terms: an optimizer for pysindy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _check
from ._extras import require
from .coding import Criterion, SplicePath, bic, ebic, splice, splice_path

BaseOptimizer: Any = require("pysindy.optimizers", extra="sindy").BaseOptimizer

__all__ = ["KHotOptimizer", "floored_ebic"]

FLOOR = 0.05  # of ‖ẋ‖, below which residuals are taken for errors of the differentiation
MOST = 10  # terms of an equation up to which k="auto" and `total` look, if `max_k` does not say otherwise


def __dir__() -> list[str]:
    return __all__


def floored_ebic(loss: Tensor, k: Tensor, rows: float, columns: int) -> Tensor:
    """Return the mean of BIC and EBIC of a loss that never gets below (5 %)² of ‖ẋ‖².

    `m·log(loss + 0.0025·‖ẋ‖²) + k·log m + log C(p, k)`. Such criteria take residuals for independent noise. Without
    noise in the data they are errors of the numerical differentiation, which further terms fit well: without the floor,
    as many terms are taken as are offered. With noise, the floor changes next to nothing.
    """
    floored = loss + FLOOR**2 * loss[0]
    return (bic(floored, k, rows, columns) + ebic(floored, k, rows, columns)) / 2


class KHotOptimizer(BaseOptimizer):
    """Choose exactly k library terms for each equation: `min ‖ẋ − Θ·ξ‖²` such that at most k of ξ differ from 0.

    The search is `khot.coding.splice`, which does not depend on the scale of the terms and needs no commercial solver.

    Args:
        k: terms of each equation: a number, one for each equation, or "auto", which chooses by `criterion` along the
            path 0, 1, …, max_k. With `costs`, the budget.
        total: instead of k, the terms of all equations together. They are divided so that Σ log ‖ẋ − Θ·ξ‖² over the
            equations is least, which does not depend on the units of the states.
        costs: what each library term costs, (terms,), > 0; so high powers can be dearer. With a number or numbers k.
        criterion: for k="auto", (loss, k, rows, terms) → what to minimise; also those of `khot.coding`.
        max_k: where paths end; None for 10, or the number of terms if that is lower. `total` looks further if it must.
        ridge: adds ridge·‖ξ‖² to the loss while terms are chosen, for noisy or nearly dependent libraries.
        exchange: how many terms are exchanged at once in the search.
        normalize_columns, initial_guess, copy_X, unbias: as in pysindy. `initial_guess` is only checked, not used.

    Attributes:
        coef_: (equations, terms), 0 where not chosen.
        ind_: which terms are chosen.
        history_: coefficients with 0, 1, … terms where a path was computed, and then the result.
        path_: the `khot.coding.SplicePath`, or None; with `normalize_columns`, that of the normalised terms.

    Examples:
        >>> t = np.linspace(0, 4, 400)
        >>> x = np.stack([np.exp(-t) * np.cos(3 * t), np.exp(-t) * np.sin(3 * t)], 1)
        >>> theta = np.stack([np.ones(400), x[:, 0], x[:, 1], x[:, 0] ** 2], 1)
        >>> KHotOptimizer(2).fit(theta, np.gradient(x, t, axis=0, edge_order=2)).ind_
        array([[False,  True,  True, False],
               [False,  True,  True, False]])
    """

    def __init__(
        self,
        k: int | Sequence[int] | str = "auto",
        *,
        total: int | None = None,
        costs: Any = None,
        criterion: Criterion = floored_ebic,
        max_k: int | None = None,
        ridge: float = 0.0,
        exchange: int = 2,
        normalize_columns: bool = False,
        initial_guess: np.ndarray | None = None,
        copy_X: bool = True,
        unbias: bool = True,
    ) -> None:
        super().__init__(normalize_columns=normalize_columns, initial_guess=initial_guess, copy_X=copy_X, unbias=unbias)
        self.k = k
        self.total = total
        self.costs = costs
        self.criterion = criterion
        self.max_k = max_k
        self.ridge = ridge
        self.exchange = exchange

    def _reduce(self, x: np.ndarray, y: np.ndarray) -> None:
        """Choose the terms; x are the library's values (rows, terms), y the derivatives (rows, equations)."""
        a, b = torch.tensor(np.asarray(x)), torch.tensor(np.asarray(y))
        how: dict[str, Any] = {"ridge": self.ridge, "exchange": self.exchange}
        self.path_: SplicePath | None = None
        if not isinstance(self.k, str):
            if self.total is not None:
                raise ValueError(f"`k` and `total` cannot both be given; got k={self.k} and total={self.total}.")
            found = splice(a, b, self.k, costs=self._prices(a.shape[1]), **how)
            self.history_ = []
        else:
            _check.one_of("k", self.k, ("auto",))
            if self.costs is not None:
                raise ValueError('`costs` need a budget: `k` must be a number, or one for each equation; got "auto".')
            self.path_ = splice_path(a, b, self._most(len(a), a.shape[1], b.shape[1]), **how)
            chosen = self.path_.choose(self.criterion) if self.total is None else _divide(self.path_.loss, self.total)
            found = self.path_.at(chosen)
            self.history_ = list(self.path_.coef.mT.numpy())
        self.coef_ = found.coef.mT.numpy()
        self.history_.append(self.coef_.copy())

    def _unbias(self, x: np.ndarray, y: np.ndarray) -> None:
        """Solve least squares on the chosen terms; without a ridge it is done, and for terms of any scale."""
        if not self.ridge:
            return
        scale = np.linalg.norm(x, axis=0)
        for i, chosen in enumerate(self.ind_):
            part = x[:, chosen] / scale[chosen]
            self.coef_[i, chosen] = np.linalg.lstsq(part, y[:, i], rcond=None)[0] / scale[chosen]

    def _most(self, rows: int, terms: int, equations: int) -> int:
        """Return the number of terms of an equation where paths end."""
        if self.max_k is not None:
            _check.integer_at_most("max_k", self.max_k, terms, "terms of the library")
            return self.max_k
        each = 0 if self.total is None else 2 * math.ceil(self.total / equations)
        return min(max(each, MOST), rows, terms)

    def _prices(self, terms: int) -> Tensor | None:
        """Return the costs, checked."""
        if self.costs is None:
            return None
        costs = np.asarray(self.costs, dtype=np.float64)
        if costs.shape != (terms,) or not (costs > 0).all():
            raise ValueError(f"`costs` must be {terms} numbers > 0, one for each term; got {self.costs}.")
        return torch.tensor(costs)


def _divide(loss: Tensor, total: int) -> Tensor:
    """Divide a number of terms among equations such that Σ log loss is least, given the losses (K + 1, equations).

    Exact, by dynamic programming over the equations.
    """
    most, equations = loss.shape[0] - 1, loss.shape[1]
    _check.integer_at_most("total", total, most * equations, "`max_k` times the number of equations")
    value = loss.clamp(min=1e-300).log().maximum(loss[0].clamp(min=1e-300).log() - 55)  # below, it is rounding
    best, choices = torch.full((total + 1,), torch.inf, dtype=torch.float64), []
    best[0] = 0.0
    for equation in range(equations):
        options = torch.full((most + 1, total + 1), torch.inf, dtype=torch.float64)
        for k in range(min(most, total) + 1):
            options[k, k:] = best[: total + 1 - k] + value[k, equation]
        best, chosen = options.min(0)
        choices.append(chosen)
    sizes, left = [], total
    for chosen in reversed(choices):
        sizes.append(int(chosen[left]))
        left -= sizes[-1]
    return torch.tensor(sizes[::-1])
