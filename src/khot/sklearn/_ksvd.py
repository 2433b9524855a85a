"""Dictionary learning in scikit-learn's terms."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.nn.functional import normalize

from .. import _check
from .._process import interruptible
from ..coding import SoftCode, SparseCode, omp, power_update

ALIKE = 0.99  # two atoms with a larger |cosine| are one atom twice
RARE = 0.6  # of the mean use: in the first turn, atoms that are used less are replaced; the share falls to 0
MEMORY = 50  # in streams, an atom is a mean over about so many signals that use it
STALE = 0.1, 20.0  # in streams: atoms that are used less than this share of the mean, once that is so many signals


class KSVD(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Learn a dictionary in which every signal is a combination of exactly k atoms.

    `min ‖X − C·D‖²` such that each row of C has at most k entries and each row of D has norm 1. Coding and update of
    atoms take turns. Atoms that few signals use, or that are another one twice, are replaced by the signals that are
    represented worst. "Few" falls to none from the first turn to the last, so that the dictionary settles.

    Args:
        n_components: the number of atoms; None for the number of features.
        n_nonzero_coefs: k; None for a tenth of the features, but at least 1.
        tolerance: stop coding a signal once the norm of its residual is at most this; k is then the most, and the
            best dictionary is the one that needs the fewest atoms.
        max_iter: the largest number of turns.
        tol: stop when the error (with `tolerance`, the number of atoms) changes by a smaller share in a turn.
        coder: signals, dictionary and k to a code: `khot.coding.omp`, `thresholding_pursuit`, `soft_pursuit`, or a
            function of yours.
        update: `khot.coding.power_update`, `svd_update`, `least_squares_update`, `gradient_update`, or a function of
            yours.
        dict_init: the first dictionary, (n_components, n_features); None takes random signals.
        random_state: an int, for the same result each time.
        callback: called with (turn, error) after each turn; training stops when it returns True.

    Attributes:
        components_: the dictionary, (n_components, n_features).
        error_: the mean of the squared residuals of a signal, after each turn.
        n_iter_: the number of turns.
        n_components_, n_features_in_, feature_names_in_: as usual.

    Ctrl-C during `fit` keeps the best dictionary so far.

    Examples:
        >>> X = np.random.default_rng(0).standard_normal((300, 8))
        >>> model = KSVD(16, n_nonzero_coefs=2, max_iter=10, random_state=0).fit(X)
        >>> code = model.transform(X)
        >>> code.shape, int((code != 0).sum(1).max())
        ((300, 16), 2)

    Reference: Aharon, Elad and Bruckstein, "K-SVD: An algorithm for designing overcomplete dictionaries" (2006).
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        n_nonzero_coefs: int | None = None,
        tolerance: float | None = None,
        max_iter: int = 100,
        tol: float = 1e-4,
        coder: Callable[..., SparseCode | SoftCode] = omp,
        update: Callable[[Tensor, Tensor, SparseCode], tuple[Tensor, SparseCode]] = power_update,
        dict_init: Any = None,
        random_state: int | np.random.RandomState | None = None,
        callback: Callable[[int, float], bool | None] | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_nonzero_coefs = n_nonzero_coefs
        self.tolerance = tolerance
        self.max_iter = max_iter
        self.tol = tol
        self.coder = coder
        self.update = update
        self.dict_init = dict_init
        self.random_state = random_state
        self.callback = callback

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the dictionary from X (signals, features), numpy or torch; y is ignored."""
        x, atoms = self._start(X)
        self.error_: list[float] = []
        best, before = (np.inf, atoms), np.inf
        with interruptible() as is_interrupted:
            for turn in range(self.max_iter):
                atoms, code, residual = self._turn(x, atoms)
                self.error_.append(float(residual.square().sum(-1).mean()))
                cost = self.error_[-1] if self.tolerance is None else len(code.values) / len(x)
                if cost < best[0]:
                    best = (cost, atoms)
                is_told = self.callback is not None and self.callback(turn, self.error_[-1])
                if is_told or is_interrupted() or abs(before - cost) <= self.tol * before < np.inf:
                    break
                uses = _uses(code)
                is_rare = uses <= RARE * (1 - (turn + 1) / self.max_iter) * uses.mean()
                before, atoms = cost, _replaced(x, atoms, is_rare, residual)[0]
        self._keep(best[1], len(self.error_))
        self.__dict__.pop("_stream", None)
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Do one turn with these signals, starting from the dictionary that is there; for streams.

        An atom becomes the mean of what it was and what these signals make of it, by the squares of its coefficients;
        signals of long ago are forgotten. `error_` gets the error of these signals before they are learned from.
        """
        x, before = self._start(X, getattr(self, "components_", None))
        code = self._code(x, before)
        residual = x - code.decode(before)
        self.error_ = [*getattr(self, "error_", []), float(residual.square().sum(-1).mean())]
        atoms, updated = self.update(x, before, code)
        energy = torch.zeros(len(atoms), dtype=torch.float64).index_add_(0, code.columns, updated.values.double() ** 2)
        span = MEMORY * len(atoms) / max(len(code.values) / len(x), 1)  # in signals
        if not hasattr(self, "_stream"):  # energy, uses, and the mean of all uses, since an atom was last replaced
            known = float(energy.mean()) * span / len(x) if hasattr(self, "components_") else 0.0
            self._stream = torch.stack([torch.full_like(energy, known), *torch.zeros(2, len(energy))])
        kept = self._stream[0] * np.exp(-len(x) / span)
        turned = atoms * torch.where((atoms * before).sum(-1, keepdim=True) < 0, -1.0, 1.0)
        mixed = kept.unsqueeze(-1) * before.double() + energy.unsqueeze(-1) * turned.double()
        atoms = torch.where((kept + energy > 0).unsqueeze(-1), normalize(mixed, dim=-1).to(x.dtype), before)
        uses, mean = self._stream[1] + _uses(code), self._stream[2] + len(code.values) / len(atoms)
        share, enough = STALE
        atoms, is_new = _replaced(x, atoms, (mean > enough) & (uses < share * mean), residual)
        self._stream = torch.stack([kept + energy, uses, mean]) * ~is_new
        self._keep(atoms, getattr(self, "n_iter_", 0) + 1)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the code of X, (signals, n_components), with at most k entries a row that are not 0."""
        check_is_fitted(self)
        x = torch.tensor(validate_data(self, _numpy(X), reset=False, dtype=[np.float64, np.float32]))
        code: np.ndarray = self._code(x, torch.tensor(self.components_).to(x.dtype)).dense().numpy()
        return code

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Return the signals of a code (signals, n_components)."""
        check_is_fitted(self)
        code = check_array(_numpy(X), dtype=[np.float64, np.float32])
        if code.shape[1] != len(self.components_):
            raise ValueError(f"`X` must have {len(self.components_)} columns, one for each atom; got {code.shape[1]}.")
        signals: np.ndarray = code @ self.components_.astype(code.dtype)
        return signals

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _start(self, X: Any, atoms: Any = None) -> tuple[Tensor, Tensor]:
        """Check the parameters and the signals, and make a first dictionary unless there is one."""
        _check.at_least("max_iter", self.max_iter, 1)
        _check.not_negative("tol", self.tol)
        given = validate_data(self, _numpy(X), reset=atoms is None, dtype=[np.float64, np.float32])
        x, n = torch.tensor(given), self.n_components if self.n_components is not None else given.shape[1]
        _check.at_least("n_components", n, 1)
        if self.n_nonzero_coefs is not None:
            _check.at_least("n_nonzero_coefs", self.n_nonzero_coefs, 1)
            _check.integer_at_most("n_nonzero_coefs", self.n_nonzero_coefs, n, "`n_components`")
        self._k = min(self.n_nonzero_coefs or max(1, given.shape[1] // 10), n)
        if atoms is None and self.dict_init is not None:
            atoms = check_array(_numpy(self.dict_init), dtype=given.dtype)
            if atoms.shape != (n, given.shape[1]):
                raise ValueError(f"`dict_init` must have the shape {(n, given.shape[1])}; got {atoms.shape}.")
        if atoms is None:
            random = check_random_state(self.random_state)
            alive = np.flatnonzero((given != 0).any(1))
            chosen = random.permutation(alive)[:n]
            fill = random.standard_normal((n - len(chosen), given.shape[1]))  # fewer signals than atoms
            atoms = np.concatenate([given[chosen], fill]).astype(given.dtype)
        return x, normalize(torch.tensor(atoms).to(x.dtype), dim=-1)

    def _turn(self, x: Tensor, atoms: Tensor) -> tuple[Tensor, SparseCode, Tensor]:
        """Code and update; return the dictionary, the code after it, and the residual."""
        atoms, code = self.update(x, atoms, self._code(x, atoms))
        return atoms, code, x - code.decode(atoms)

    def _code(self, x: Tensor, atoms: Tensor) -> SparseCode:
        options = {} if self.tolerance is None else {"tolerance": self.tolerance}
        with torch.no_grad():
            code = self.coder(x, atoms, self._k, **options)
        if isinstance(code, SparseCode):
            return code
        rows, columns = code.values.nonzero(as_tuple=True)
        return SparseCode(code.values[rows, columns], rows, columns, tuple(code.values.shape))

    def _keep(self, atoms: Tensor, turns: int) -> None:
        self.components_, self.n_iter_, self.n_components_ = atoms.numpy(), turns, len(atoms)


def _uses(code: SparseCode) -> Tensor:
    """Return how many signals use each atom."""
    return torch.bincount(code.columns[code.values != 0], minlength=code.shape[-1]).double()


def _replaced(x: Tensor, atoms: Tensor, is_rare: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Replace atoms that are rare, or another one twice, by the worst represented signals; return which they were."""
    is_alike = (atoms @ atoms.mT).abs().tril(-1).amax(-1) > ALIKE
    size = residual.square().sum(-1)
    worst = size.topk(min(int((is_rare | is_alike).sum()), int((size > 0).sum()))).indices
    useless = (is_rare | is_alike).nonzero().flatten()[: len(worst)]
    atoms, is_new = atoms.clone(), torch.zeros_like(is_rare)
    atoms[useless], is_new[useless] = normalize(x[worst], dim=-1), True
    return atoms, is_new


def _numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value
