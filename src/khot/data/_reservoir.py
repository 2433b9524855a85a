"""A sample of a stream whose length is not known, with the inclusion probabilities of all that has passed."""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _check
from ..designs import Pivotal, inclusion_probs


def numbers(name: str, value: Any) -> Tensor:
    """Return real numbers as a tensor: what is one as it is, all else in float64."""
    try:
        if isinstance(value, Tensor):
            if value.is_complex():
                raise TypeError
            return value
        return torch.from_numpy(np.asarray(value, dtype=np.float64).copy())
    except (TypeError, ValueError):
        got = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"`{name}` must be real numbers; got {got}.") from None


class Reservoir:
    """Keep k items of a stream, one pass, O(k) memory; at any time item i is in it with exactly the probability π_i.

    `π = min(1, c · size)`, `Σπ = k`, over all items that have passed so far: `khot.inclusion_probs` of the whole
    stream, though only k of its sizes are kept. It falls as the stream goes on, and does not depend on what was drawn.
    `items` with `weights` = 1/π estimate every total of the stream without bias. (The keys of Efraimidis and Spirakis
    draw by Plackett–Luce, whose π is not known.) Reference: Cohen, Duffield, Kaplan, Lund and Thorup, "Stream sampling
    for variance-optimal estimation of subset sums" (2009).

    A part of the stream joins the k items, which now count as max(size, τ), and k of them all are drawn. The threshold
    τ = 1/c only rises, so the probabilities of all parts multiply to min(1, size/τ).

    Args:
        k: how many items to keep.
        generator: where the randomness comes from; torch's own if None.

    Examples:
        >>> reservoir = Reservoir(2, generator=torch.Generator().manual_seed(0))
        >>> for part in (["a", "b"], ["c"], ["d"]):
        ...     reservoir.update(part, [{"a": 10.0, "b": 1.0, "c": 2.0, "d": 3.0}[item] for item in part])
        >>> reservoir.items, reservoir.weights
        (['a', 'c'], tensor([1., 3.], dtype=torch.float64))
    """

    def __init__(self, k: int, *, generator: torch.Generator | None = None) -> None:
        _check.at_least("k", k, 1)
        if generator is not None:
            _check.instance("generator", generator, torch.Generator)
        self.k, self._generator = k, generator
        self.items: list[Any] = []
        self.seen = 0
        self.threshold = 0.0
        self._sizes = torch.empty(0, dtype=torch.float64)
        self._places = torch.empty(0, dtype=torch.int64)

    def update(self, items: Sequence[Any], sizes: Any) -> None:
        """Let a part of the stream pass: items, and their sizes ≥ 0. Parts of about k items take the least time."""
        _check.instance("items", items, Sized)
        new = numbers("sizes", sizes)
        new = new.detach().cpu().to(torch.float64)
        if new.shape != (len(items),):
            raise ValueError(f"`sizes` must be one number for each of {len(items)} items; got {tuple(new.shape)}.")
        _check.sizes("sizes", new)
        first, self.seen = self.seen, self.seen + len(items)
        keep = new.nonzero()[:, 0]  # an item of size 0 is never drawn
        held = [*self.items, *(items[i] for i in keep.tolist())]
        places = torch.cat((self._places, first + keep))
        own = torch.cat((self._sizes, new[keep]))
        if len(held) > self.k:
            weights = own.clamp(min=self.threshold)
            weights[len(self.items) :] = new[keep]  # what is new stands for itself alone
            probs = inclusion_probs(weights, self.k)
            x = Pivotal(probs, self.k, validate_args=False).sample(generator=self._generator)
            chosen = x.nonzero()[:, 0]
            is_open = probs < 1
            if bool(is_open.any()):
                at = int((probs * is_open).argmax())
                self.threshold = float(weights[at] / probs[at])
            held, places, own = [held[i] for i in chosen.tolist()], places[chosen], own[chosen]
        self.items, self._places, self._sizes = held, places, own

    @property
    def probs(self) -> Tensor:
        """Return the inclusion probabilities of the items in the reservoir, min(1, size/τ), (≤ k)."""
        return self._sizes / self._sizes.clamp(min=self.threshold)

    @property
    def weights(self) -> Tensor:
        """Return the weights 1/π of the items in the reservoir, (≤ k)."""
        return 1 / self.probs

    @property
    def indices(self) -> Tensor:
        """Return the places of the items in the stream, counted from 0, (≤ k)."""
        return self._places.clone()

    def __len__(self) -> int:
        return len(self.items)
