"""Codes of signals over a dictionary with k active atoms each: greedy, by thresholding, and soft."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _check, _shape
from .._math import pursuit
from .._sparse import SparseCode
from .._torch import (
    forward_level,
    require_values,
    transforms_active,
    without_autocast,
)
from ..kernels import cpu
from ..relaxations import hard_topk, sigmoid_topk, straight_through

CHUNK = 2**18  # scores (signals × atoms) that are worked on at a time: they stay in the cache
SQUARES = 2**22  # the squares of all atoms, (n, d·d), are held up to this size
HOT = 0.1  # temperature of the first step of `soft_pursuit`


class SoftCode(NamedTuple):
    """Hold the result of `soft_pursuit`, (…, n) each."""

    values: Tensor
    """The coefficients of all atoms; nearly 0 where the weight is."""
    weights: Tensor
    """How much each atom belongs to the support: in [0, 1], sums to k."""


class Weigh(Protocol):
    """A member of the family, or a sampler: `khot.sigmoid_topk`, `khot.sample_khot`, a `functools.partial` of one."""

    def __call__(self, x: Tensor, k: Any, /, *, temperature: Any) -> Tensor: ...


@without_autocast
def omp(
    signals: Tensor,
    dictionary: Tensor,
    k: int | Tensor,
    *,
    tolerance: float | Tensor | None = None,
    positive: bool = False,
) -> SparseCode:
    """Code signals by orthogonal matching pursuit: add the best atom, solve least squares, k times.

    `argmin ‖x − Σ_j c_j·d_j‖²` over the chosen atoms; the next one is `argmax |⟨d_j, x − Σ c·d⟩|`.

    Args:
        signals: (…, d).
        dictionary: atoms, (n, d), usually of norm 1: a longer atom is chosen more easily.
        k: the most atoms of a signal, 0 ≤ k ≤ n; an int, or an integer tensor that broadcasts to (…).
        tolerance: stop a signal once the norm of its residual is at most this (the square root of scikit-learn's
            `tol`); a number, or a tensor that broadcasts to (…).
        positive: coefficients ≥ 0.

    Returns:
        A `SparseCode` of shape (…, n) with k atoms a signal; fewer where the tolerance is met, or where the atoms
        explain all they can (zero signals, dependent atoms). Coefficients are differentiable in signals and dictionary,
        through the least squares on the support. O(k·n) a signal and step; a Gram matrix (n, n) is held.

    Examples:
        >>> atoms = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> omp(torch.tensor([[0.7, 0.8]]), atoms, 1).dense()
        tensor([[0.0000, 0.0000, 1.0600]])

    Reference: Pati, Rezaiifar and Krishnaprasad (1993); Rubinstein, Zibulevsky and Elad, "Efficient implementation of
    the K-SVD algorithm using batch orthogonal matching pursuit" (2008).
    """
    problem = _Problem(signals, dictionary, k)
    x, atoms, bound = problem.x.detach(), problem.atoms.detach(), None
    if tolerance is not None:  # norms of residuals are differences of squares
        bound, x, atoms = _tolerance(tolerance, signals, problem.counts), x.double(), atoms.double()
    orthogonal = cpu.orthogonal if cpu.serves(x) else pursuit.orthogonal
    method = pursuit.non_negative if positive else orthogonal
    gram = atoms @ atoms.mT

    def code(rows: slice) -> pursuit.Support:
        return method(x[rows], atoms, gram, problem.counts[rows], problem.k, None if bound is None else bound[rows])

    return problem.solve(code)


@without_autocast
def thresholding_pursuit(signals: Tensor, dictionary: Tensor, k: int | Tensor, *, steps: int = 50) -> SparseCode:
    """Code signals by hard thresholding pursuit: take the k largest of |c + μ·D(x − c·D)|, solve on them, repeat.

    A step costs one product of residuals and dictionary whatever k is, and no Gram matrix (n, n) is held. Where that
    matrix fits, `omp` is faster and its error is lower.

    Args:
        signals: (…, d).
        dictionary: atoms, (n, d), of about equal norm.
        k: atoms of a signal, 0 ≤ k ≤ n; an int, or an integer tensor that broadcasts to (…).
        steps: the largest number of repetitions; most signals are done after a few.

    Returns:
        A `SparseCode` of shape (…, n) with k atoms a signal, differentiable as that of `omp`. The loss of a signal
        never rises from one step to the next.

    Examples:
        >>> thresholding_pursuit(torch.tensor([[2.0, 0.1, 1.0]]), torch.eye(3), 2).dense()
        tensor([[2., 0., 1.]])

    Reference: Foucart, "Hard thresholding pursuit" (2011).
    """
    _check.at_least("steps", steps, 1)
    problem = _Problem(signals, dictionary, k)
    x, atoms = problem.x.detach(), problem.atoms.detach()
    if problem.k > x.shape[-1]:
        reason = f"0 ≤ k ≤ {x.shape[-1]}, the length of a signal: more atoms than that are dependent"
        raise ValueError(f"`k` must satisfy {reason}; got {problem.k}. `omp` stops by itself.")
    if (found := int((atoms != 0).any(-1).sum())) < problem.k:
        raise ValueError(f"`dictionary` must have k = {problem.k} atoms of norm > 0; got {found}. Use `omp`.")
    return problem.solve(lambda rows: pursuit.hard_thresholding(x[rows], atoms, problem.counts[rows], problem.k, steps))


@without_autocast
def soft_pursuit(
    signals: Tensor,
    dictionary: Tensor,
    k: float | Tensor,
    *,
    relaxation: Weigh = sigmoid_topk,
    temperature: float | Tensor = 0.0003,
    steps: int = 20,
    ridge: float = 0.003,
    hard: bool = False,
) -> SoftCode:
    """Code signals by a pursuit whose support is soft, for dictionaries that are trained for a task.

    `thresholding_pursuit` with σ_k for the choice: weights `w = σ_k(|c + D(x − c·D)|/(‖x‖·T))`, then coefficients
    `c = argmin ‖x − c·D‖² + ridge·Σ c²/w`, at temperatures that fall geometrically to T.

    Args:
        signals: (…, d).
        dictionary: atoms, (n, d), of about norm 1.
        k: a number or a tensor that broadcasts to (…); fractional, and learned, if you like.
        relaxation: what weighs the atoms: `khot.sigmoid_topk`, another member of the family, or `khot.sample_khot`.
        temperature: of the last step, in units of ‖x‖; larger is softer.
        steps: how many; each costs a linear system (d, d) for every signal.
        ridge: keeps coefficients small while the support is soft; about the share of noise in the square of a signal.
        hard: return the least squares on the k largest weights, with the gradient of the soft code; k is an integer.

    Returns:
        A `SoftCode` (values, weights), both (…, n), differentiable in signals, dictionary, k and temperature.

    Examples:
        >>> code = soft_pursuit(torch.tensor([[2.0, 0.1, 1.0]]), torch.eye(3), 2.0)
        >>> code.values.round(decimals=1), code.weights.round(decimals=1)
        (tensor([[2., 0., 1.]]), tensor([[1., 0., 1.]]))
    """
    check_signals(signals, dictionary)
    _check.temperature(temperature, signals, -1)
    _check.at_least("steps", steps, 1)
    _check.positive("ridge", ridge)
    _check.function("relaxation", relaxation)
    dtype = _shape.compute_dtype(signals.dtype)
    x, atoms = signals.to(dtype), dictionary.to(dtype)
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    unit = torch.eye(x.shape[-1], dtype=dtype, device=x.device)
    shape = (*x.shape, x.shape[-1])  # (…, d, d)
    squares = (atoms.unsqueeze(-1) * atoms.unsqueeze(-2)).flatten(1) if atoms.numel() * shape[-1] <= SQUARES else None
    scores = (x @ atoms.mT).abs()
    for step in range(steps):
        share = (step + 1) / steps
        heat = temperature**share * HOT ** (1 - share)
        weights = relaxation(scores / scale, k, temperature=heat)
        gram = (atoms.mT * weights.unsqueeze(-2)) @ atoms if squares is None else (weights @ squares).view(shape)
        dual = torch.linalg.solve(gram + ridge * unit, x)
        values = weights * (dual @ atoms.mT)
        scores = (values + (x - values @ atoms) @ atoms.mT).abs()
    if hard:
        require_values("A hard pursuit", weights)
        kept = hard_topk(weights, k.detach() if isinstance(k, Tensor) else k)
        flat = kept.reshape(-1, kept.shape[-1])
        most = int(flat.sum(-1).max()) if len(flat) else 0
        used, support = flat.topk(most, -1)
        coefs = pursuit.least_squares(x.reshape(-1, x.shape[-1]), atoms[support], used > 0)
        exact = torch.zeros_like(flat).scatter_add_(-1, support, coefs.detach()).view_as(values)
        values, weights = straight_through(exact, values), straight_through(kept, weights)
    return SoftCode(values.to(signals.dtype), weights.to(signals.dtype))


class _Problem:
    """The arguments of a pursuit, as rows; and their solution, chunk by chunk."""

    def __init__(self, signals: Tensor, dictionary: Tensor, k: int | Tensor) -> None:
        require_values("A hard pursuit", signals)
        check_signals(signals, dictionary)
        n, batch = len(dictionary), signals.shape[:-1]
        if isinstance(k, Tensor):
            if k.is_floating_point() or k.is_complex() or k.dtype == torch.bool:
                raise TypeError(f"`k` must be an int or an integer tensor; got {k.dtype}. Use `k.long()`.")
            _check.broadcasts("k", k, tuple(batch), "the shape of `signals` without its last dim")
            if k.numel() and not 0 <= int(k.min()) <= int(k.max()) <= n:
                raise ValueError(
                    f"`k` must satisfy 0 ≤ k ≤ {n} (atoms); got values from {int(k.min())} to {int(k.max())}."
                )
        else:
            _check.integer_at_most("k", k, n, "atoms")
        dtype = _shape.compute_dtype(signals.dtype)
        self.dtype, self.shape = signals.dtype, (*batch, n)
        self.x, self.atoms = signals.reshape(-1, signals.shape[-1]).to(dtype), dictionary.to(dtype)
        self.counts = torch.as_tensor(k, device=signals.device).long().expand(batch).reshape(-1)
        self.k = int(self.counts.max()) if len(self.counts) else 0

    def solve(self, code: Callable[[slice], pursuit.Support]) -> SparseCode:
        """Code the rows, some at a time; with a gradient, the coefficients are solved for once more, all of them."""
        step = max(1, CHUNK // len(self.atoms))
        if not self.k:
            none = self.counts.new_zeros(0)
            return SparseCode(none.to(self.dtype), none, none, self.shape)
        parts = [code(slice(start, start + step)) for start in range(0, len(self.x), step)]
        atoms, coefs, used = map(torch.cat, zip(*parts, strict=True))
        differentiates = torch.is_grad_enabled() and (self.x.requires_grad or self.atoms.requires_grad)
        if differentiates or transforms_active() or forward_level(forward_ad) >= 0:
            coefs = pursuit.least_squares(self.x, self.atoms[atoms], used)
        rows = torch.arange(len(self.x), device=self.x.device).unsqueeze(-1).expand_as(atoms).contiguous()
        if bool(used.all()):
            return SparseCode(coefs.reshape(-1).to(self.dtype), rows.reshape(-1), atoms.reshape(-1), self.shape)
        return SparseCode(coefs[used].to(self.dtype), rows[used], atoms[used], self.shape)


def check_signals(signals: Any, dictionary: Any) -> None:
    """Raise unless signals (…, d) and dictionary (n, d) are floating tensors that fit, without NaN."""
    _check.scores(signals, -1, "signals")
    _check.vectors("dictionary", dictionary)
    if dictionary.ndim != 2 or dictionary.shape[-1] != signals.shape[-1]:
        raise ValueError(
            f"`dictionary` must have the shape (atoms, {signals.shape[-1]}), one atom of the length of a signal a row; "
            f"got {tuple(dictionary.shape)}."
        )
    if dictionary.dtype != signals.dtype:
        raise TypeError(f"`dictionary` must have the dtype of `signals`, {signals.dtype}; got {dictionary.dtype}.")
    _check.same_device("dictionary", dictionary, signals, "signals")
    for name, value in (("signals", signals), ("dictionary", dictionary)):
        _check.finite(name, value)


def _tolerance(value: float | Tensor, signals: Tensor, counts: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        _check.number("tolerance", value)
        if not value >= 0:
            raise ValueError(f"`tolerance` must be ≥ 0; got {value}.")
        return torch.full_like(counts, value, dtype=torch.float64)
    _check.broadcasts("tolerance", value, tuple(signals.shape[:-1]), "the shape of `signals` without its last dim")
    return value.detach().double().expand(signals.shape[:-1]).reshape(-1)
