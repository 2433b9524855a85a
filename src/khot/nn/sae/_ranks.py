"""Sparse autoencoders on many processes: the one file here that knows of process groups.

Tokens may be divided over processes (DDP, FSDP2), and so may latents. What all processes hold alike stays so: losses,
thresholds and counts are those of the whole batch. Gradients are scaled such that the mean over the processes of
`tokens`, which DDP and FSDP2 take, is that of one process.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import _check
from ..._shape import Group

T = TypeVar("T")


class Ranks:
    """Name the processes that hold the other tokens of a batch, and those that hold the other latents, by group names.

    Args:
        tokens: the group over which the tokens of a batch are divided, or None.
        latents: the group over which the latents are divided, or None.
    """

    def __init__(self, tokens: Group = None, latents: Group = None) -> None:
        self.tokens, self.latents = _names(tokens), _names(latents)

    def __bool__(self) -> bool:
        return bool(self.everyone)

    @property
    def everyone(self) -> list[str]:
        """Return the groups over which tokens or latents are divided."""
        return self.tokens + self.latents

    def only_latents(self) -> "Ranks":
        """Return the same for tokens that all processes have."""
        return Ranks(None, self.latents or None)

    # ── numbers that all hold alike ────────────────────────────────────────────────────────────────────────────────
    def sum(self, t: Tensor, groups: list[str] | None = None) -> Tensor:
        """Return Σ over the processes, of all groups if none are named."""
        groups = self.everyone if groups is None else groups
        return _over(groups).sum(t) if groups else t

    def least(self, t: Tensor) -> Tensor:
        """Return the minimum over all processes."""
        return -_over(self.everyone).max(-t) if self else t

    def count(self, x: Tensor) -> int:
        """Return how many tokens a batch has, given this process's (tokens, d)."""
        return int(self.sum(torch.tensor(len(x), device=x.device), self.tokens)) if self.tokens else len(x)

    def part(self, n: int) -> slice:
        """Return which of n latents are here."""
        return _share(n, self.latents)

    def rows(self, n: int) -> slice:
        """Return which of the n tokens of a batch this process should take."""
        return _share(n, self.tokens)

    def seed(self) -> tuple[int, ...]:
        """Return what makes the seed of this process's tokens its own."""
        return (_over(self.tokens).rank,) if self.tokens else ()

    def any(self, is_so: bool) -> bool:
        """Return whether it is so on any process."""
        return bool(_over(self.everyone).max(torch.tensor(float(is_so)))) if self else is_so

    # ── with derivatives ───────────────────────────────────────────────────────────────────────────────────────────
    def total(self, t: Tensor, groups: list[str]) -> Tensor:
        """Return Σ over the processes, of which each has its own terms."""
        return _distributed().total(t, groups) if groups else t

    def spread(self, t: Tensor, groups: list[str]) -> Tensor:
        """Return what all hold alike, for each process's own terms."""
        return _distributed().spread(t, groups) if groups else t

    def averaged(self, loss: Tensor) -> Tensor:
        """Return a loss of the whole batch, whose gradients are right in the mean over the processes of `tokens`."""
        return _scaled(loss, _over(self.tokens).size) if self.tokens else loss

    def shared(self, k: float | Tensor, groups: list[str]) -> float | Tensor:
        """Return k for rows that are divided over `groups`: each process finds its whole gradient there."""
        if not isinstance(k, Tensor) or not self:
            return k
        k = _scaled(k, 1 / _over(self.tokens).size) if self.tokens and self.tokens[0] in groups else k
        return k if not self.latents or self.latents[0] in groups else self.spread(k, self.latents)

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """Replace gradients by their means over the processes of `tokens`, as DDP does."""
        for p in parameters if self.tokens else ():
            if p.grad is not None:
                p.grad = self.sum(p.grad, self.tokens) / _over(self.tokens).size

    # ── whole tensors, and what one process does for all ───────────────────────────────────────────────────────────
    def whole(self, t: Tensor, n: int = 0, dim: int | None = None) -> Tensor:
        """Return a tensor of all n latents along `dim`, if that is given; FSDP2's parameters are gathered too."""
        if _check.is_dtensor(t):
            t = t.full_tensor()  # type: ignore[attr-defined]
        if not self.latents or dim is None:
            return t
        padded = t.detach().new_zeros([n if i == dim else size for i, size in enumerate(t.shape)])
        padded.narrow(dim, self.part(n).start, t.shape[dim]).copy_(t.detach())
        return self.sum(padded, self.latents)

    def on_first(self, fn: Callable[[], T]) -> T:
        """Return what a function gives on the first process, which alone calls it; all wait, and see its error."""
        result: T = _distributed().on_first(fn, self.everyone)
        return result

    def write(self, fn: Callable[[], None], parameter: Any) -> None:
        """Call a function on the first process. If parts were gathered, of latents or by FSDP2, all wait for it."""
        groups: list[Any] = list(self.latents)
        if _check.is_dtensor(parameter):
            mesh = parameter.device_mesh
            groups = [*(mesh.get_group(i) for i in range(mesh.ndim)), *groups]
        if groups:
            _distributed().on_first(fn, groups)
        elif not self.tokens or _over(self.tokens).rank == 0:
            fn()


def _names(group: Group) -> list[str]:
    if group is None:
        return []
    names: list[str] = _distributed().names_of(group)
    return names


def _distributed() -> Any:
    from ... import distributed  # it imports torch.distributed

    return distributed


def _over(groups: list[str]) -> Any:
    return _distributed().Over(groups)


def _share(n: int, groups: list[str]) -> slice:
    """Return this process's share of n things in a row."""
    if not groups:
        return slice(0, n)
    over = _over(groups)
    return slice(n * over.rank // over.size, n * (over.rank + 1) // over.size)


def _scaled(t: Tensor, factor: float) -> Tensor:
    """Return t with its gradient times a factor."""
    mine = factor * t
    return t.detach() + (mine - mine.detach())


HERE = Ranks()
