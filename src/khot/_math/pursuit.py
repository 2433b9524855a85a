"""Sparse codes of signals (m, d) over atoms (n, d): which atoms, and how much of each.

Every function returns a `Support`: slots (m, k), of which a row uses the first or those that `used` marks.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

NOISE = 64  # correlations below this many roundings of |x||d| are zero: the atoms explain all they can
DEPENDENT = 1e-12  # an atom of which a smaller share (of its square) lies outside the span of others is not added
CLOSE = 0.1  # rows with an atom of which less is outside are solved once more in the end
SWAPS = 3  # a non-negative pursuit may add this many times k atoms, since some leave again


class Support(NamedTuple):
    """Hold the atoms of each signal and their coefficients, (m, k) each."""

    atoms: Tensor
    coefs: Tensor  # 0 where unused
    used: Tensor


def least_squares(x: Tensor, chosen: Tensor, used: Tensor) -> Tensor:
    """Return `argmin ‖x − Σ_j c_j·chosen_j‖²` over the used slots, (m, k); differentiable.

    Args:
        x: (m, d).
        chosen: (m, k, d), the atoms in the slots.
        used: (m, k); the other slots get 0.
    """
    chosen = chosen * used.unsqueeze(-1)
    gram = chosen @ chosen.mT
    size = gram.diagonal(dim1=-2, dim2=-1).detach()
    tiny = torch.finfo(x.dtype).eps * size.amax(-1, keepdim=True)  # keeps dependent atoms solvable
    free = torch.where(used, tiny, 1.0)
    factor = torch.linalg.cholesky(gram + torch.diag_embed(free))

    def solve(residual: Tensor) -> Tensor:
        return torch.cholesky_solve(chosen @ residual.unsqueeze(-1), factor).squeeze(-1)

    coefs = solve(x)
    return coefs + solve(x - (coefs.unsqueeze(-2) @ chosen).squeeze(-2))  # for the digits that the Gram matrix lost


def orthogonal(x: Tensor, atoms: Tensor, gram: Tensor, counts: Tensor, k: int, tolerance: Tensor | None) -> Support:
    """Run orthogonal matching pursuit: add the atom with the largest correlation, solve, repeat.

    The inverse Cholesky factor M of the support's Gram matrix grows by a row a step. With it, the coefficients and the
    correlations of all atoms with the residual are updates, not solutions: c += z·M_t, α −= z·M_t·G_S, z = α_s·M_tt.

    Args:
        x: (m, d) signals.
        atoms: (n, d).
        gram: (n, n), atoms·atomsᵀ.
        counts: (m,) int64, the most atoms of each row; at most k, the number of slots.
        k: the number of slots.
        tolerance: (m,) or None; a row stops once its residual has at most this norm.
    """
    m = len(x)
    support, coefs = torch.zeros(m, k, dtype=torch.long, device=x.device), x.new_zeros(m, k)
    taken, left = torch.zeros_like(counts), x.square().sum(-1)
    size = gram.diagonal()
    noise = relative_noise(x.dtype) * left
    enough = noise if tolerance is None else torch.maximum(tolerance.square().to(x.dtype), noise)
    rows, alpha = torch.arange(m, device=x.device), x @ atoms.mT
    inverse, absolute = x.new_zeros(m, k, k), torch.empty_like(alpha)
    is_close = torch.zeros_like(taken, dtype=torch.bool)
    for t in range(k):
        best = torch.abs(alpha, out=absolute).argmax(-1)
        s = support[rows]
        ahead = gram[s[:, :t], best.unsqueeze(-1)]  # (rows, t)
        lower = (inverse[:, :t, :t] @ ahead.unsqueeze(-1)).squeeze(-1)
        outside = size[best] - lower.square().sum(-1)
        value = alpha.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        goes_on = (t < counts[rows]) & (left[rows] > enough[rows]) & (outside > DEPENDENT * size[best])
        goes_on &= value.square() > noise[rows] * size[best]
        if not bool(goes_on.all()):
            if 2 * int(goes_on.sum()) <= len(rows):  # the rows that are done cost time: leave them
                rows, alpha, inverse, best, lower, outside, value = (
                    v[goes_on] for v in (rows, alpha, inverse, best, lower, outside, value)
                )
                absolute, goes_on = torch.empty_like(alpha), torch.ones_like(rows, dtype=torch.bool)
                if not len(rows):
                    break
            outside, value = torch.where(goes_on, outside, torch.inf), torch.where(goes_on, value, 0.0)
        scale = outside.rsqrt()
        inverse[:, t, :t] = -(lower.unsqueeze(-2) @ inverse[:, :t, :t]).squeeze(-2) * scale.unsqueeze(-1)
        inverse[:, t, t] = scale
        z = value * scale
        change = z.unsqueeze(-1) * inverse[:, t, : t + 1]
        support[rows, t] = best
        coefs[rows, : t + 1] += change
        left[rows] -= z.square()
        taken[rows] += goes_on
        is_close[rows] |= outside < CLOSE * size[best]
        if t + 1 < k:
            alpha -= embedding_bag(support[rows, : t + 1], gram, mode="sum", per_sample_weights=change)
    return finish(x, atoms, Support(support, coefs, first(k, taken)), is_close)


def relative_noise(dtype: torch.dtype) -> float:
    """Return the share of ‖x‖² below which the square of a correlation, or of a residual, is rounding."""
    return (NOISE * torch.finfo(dtype).eps) ** 2


def first(k: int, taken: Tensor) -> Tensor:
    """Return which of k slots are used if `taken` (m,) of them are, (m, k)."""
    return torch.arange(k, device=taken.device) < taken.unsqueeze(-1)


def finish(x: Tensor, atoms: Tensor, found: Support, is_close: Tensor) -> Support:
    """Return the support with the coefficients of those rows solved for once more where the updates lost digits."""
    if bool(is_close.any()):
        support, coefs, used = found
        coefs[is_close] = least_squares(x[is_close], atoms[support[is_close]], used[is_close])
    return found


def non_negative(x: Tensor, atoms: Tensor, gram: Tensor, counts: Tensor, k: int, tolerance: Tensor | None) -> Support:
    """Run orthogonal matching pursuit with coefficients ≥ 0; arguments as for `orthogonal`.

    The active-set method of Lawson and Hanson, stopped at k atoms: add the atom with the largest correlation, solve,
    and while a coefficient would be negative, go as far towards the solution as all stay ≥ 0 and drop what became 0.
    """
    m, n = len(x), len(atoms)
    support, coefs = torch.zeros(m, k, dtype=torch.long, device=x.device), x.new_zeros(m, k)
    used, start, square = torch.zeros_like(support, dtype=torch.bool), x @ atoms.mT, x.square().sum(-1)
    noise = NOISE * torch.finfo(x.dtype).eps * square.sqrt().unsqueeze(-1) * gram.diagonal().sqrt()
    enough = torch.zeros_like(square) if tolerance is None else tolerance.square()
    for _ in range(SWAPS * k):
        alpha = start - embedding_bag(support, gram, mode="sum", per_sample_weights=coefs)
        left = square - (coefs * (start + alpha).gather(-1, support)).sum(-1)
        taken = torch.zeros(m, n + 1, dtype=torch.bool, device=x.device)
        taken.scatter_(-1, torch.where(used, support, n), True)
        value, best = torch.where(taken[:, :n] | (alpha <= noise), 0.0, alpha).max(-1)
        adds = (used.sum(-1) < counts) & (left > enough) & (value > 0)
        if not bool(adds.any()):
            break
        slot = used.int().argmin(-1)
        support[adds, slot[adds]] = best[adds]
        used[adds, slot[adds]] = True
        for _ in range(k + 1):
            target = least_squares(x, atoms[support], used)
            is_bad = used & (target <= 0)
            step = torch.where(is_bad, coefs / (coefs - target), 1.0).amin(-1, keepdim=True).nan_to_num(0.0)
            coefs = torch.lerp(coefs, target, step)
            if not bool(is_bad.any()):
                break
            used &= ~(is_bad & (coefs <= torch.finfo(x.dtype).eps * square.sqrt().unsqueeze(-1)))
            coefs = torch.where(used, coefs, 0.0)
    return Support(support, coefs, used)


def hard_thresholding(x: Tensor, atoms: Tensor, counts: Tensor, k: int, steps: int) -> Support:
    """Run hard thresholding pursuit: take the k largest of |c + μ·atoms·residual|, solve on them, repeat.

    The loss of a row never rises: where it would, its step μ is halved instead. Needs no Gram matrix of all atoms.

    Args:
        x: (m, d) signals.
        atoms: (n, d).
        counts: (m,) int64, the atoms of each row; at most k, the number of slots.
        k: the number of slots.
        steps: the largest number of repetitions; a row is done when its support stays the same at every smaller μ.
    """
    m = len(x)
    used = torch.arange(k, device=x.device) < counts.unsqueeze(-1)

    def solve(rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        support = scores.topk(k, -1).indices
        coefs = least_squares(x[rows], atoms[support], used[rows])
        residual = x[rows] - embedding_bag(support, atoms, mode="sum", per_sample_weights=coefs)
        return support, coefs, residual, residual.square().sum(-1)

    rows, mu = torch.arange(m, device=x.device), x.new_ones(m, 1)
    support, coefs, residual, loss = solve(rows, (x @ atoms.mT).abs())
    for _ in range(steps):
        gradient = residual[rows] @ atoms.mT
        now = torch.zeros_like(gradient).scatter_add_(-1, support[rows], coefs[rows])
        found = solve(rows, (now + mu[rows] * gradient).abs())
        better = found[3] < loss[rows] * (1 - 1e-9)
        for whole, part in zip((support, coefs, residual, loss), found, strict=True):
            whole[rows[better]] = part[better]
        mu[rows] = torch.where(better.unsqueeze(-1), 1.0, mu[rows] / 2)
        # Below this step no atom outside the support can pass the smallest one inside, so nothing changes any more.
        least = torch.where(used[rows], coefs[rows].abs(), torch.inf).amin(-1)
        rows = rows[better | (mu[rows, 0] * gradient.abs().amax(-1) > least)]
        if not len(rows):
            break
    return Support(support, coefs, used)
