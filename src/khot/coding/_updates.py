"""Updates of a dictionary, given signals and their code. Each returns the dictionary and the code after it.

An update of your own is a function `(signals (m, d), dictionary (n, d), code) → (dictionary, code)`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .._sparse import SparseCode

Update = Callable[[Tensor, Tensor, SparseCode], tuple[Tensor, SparseCode]]


def svd_update(signals: Tensor, dictionary: Tensor, code: SparseCode) -> tuple[Tensor, SparseCode]:
    """Replace each atom and its coefficients by the best rank-one fit of what the other atoms leave: K-SVD.

    Examples:
        >>> x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
        >>> atoms = torch.nn.functional.normalize(x[:12], dim=-1)
        >>> code = khot.coding.omp(x, atoms, 2)
        >>> better, again = khot.coding.svd_update(x, atoms, code)
        >>> bool((x - again.decode(better)).norm() < (x - code.decode(atoms)).norm())
        True

    Reference: Aharon, Elad and Bruckstein, "K-SVD" (2006).
    """

    def rank_one(left: Tensor, weights: Tensor) -> Tensor:
        best: Tensor = torch.linalg.eigh(left.mT @ left).eigenvectors[:, -1]
        return best if float(weights @ (left @ best)) >= 0 else -best

    return _each_atom(signals, dictionary, code, rank_one)


def power_update(signals: Tensor, dictionary: Tensor, code: SparseCode) -> tuple[Tensor, SparseCode]:
    """Do `svd_update` with one step of the power method instead of an SVD: as good in the end, and faster.

    Reference: Rubinstein, Zibulevsky and Elad, "Efficient implementation of the K-SVD algorithm" (2008).
    """
    return _each_atom(signals, dictionary, code, lambda left, weights: weights @ left)


def least_squares_update(signals: Tensor, dictionary: Tensor, code: SparseCode) -> tuple[Tensor, SparseCode]:
    """Solve for all atoms at once, `argmin_D ‖X − C·D‖²`, then give them norm 1: the method of optimal directions.

    Reference: Engan, Aase and Husøy (1999).
    """
    dense = code.dense()
    gram = dense.mT @ dense
    tiny = torch.finfo(gram.dtype).eps * gram.diagonal().amax().clamp(min=torch.finfo(gram.dtype).tiny)
    atoms = torch.linalg.solve(gram + tiny * torch.eye(len(gram)).to(gram), dense.mT @ signals)
    size = torch.linalg.vector_norm(atoms, dim=-1)
    is_used = size > 0
    atoms = torch.where(is_used.unsqueeze(-1), atoms / torch.where(is_used, size, 1.0).unsqueeze(-1), dictionary)
    return atoms, code._replace(values=code.values * size[code.columns])


def _each_atom(
    signals: Tensor, dictionary: Tensor, code: SparseCode, direction: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, SparseCode]:
    """Update atom after atom: its direction from what the others leave, then its coefficients. Unused atoms stay."""
    atoms, values = dictionary.clone(), code.values.clone()
    residual = signals - code.decode(dictionary)
    order = code.columns.argsort(stable=True)
    for j, at in enumerate(order.split(torch.bincount(code.columns, minlength=len(atoms)).tolist())):
        if not len(at):
            continue
        rows, weights = code.rows[at], values[at]
        left = residual[rows] + weights.unsqueeze(-1) * atoms[j]
        atom = direction(left, weights)
        size = torch.linalg.vector_norm(atom)
        if not bool(size > 0):
            continue
        atoms[j], values[at] = atom / size, left @ (atom / size)
        residual[rows] = left - values[at].unsqueeze(-1) * atoms[j]
    return atoms, code._replace(values=values)
