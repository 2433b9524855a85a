"""Samplers for torch's DataLoader that draw k of n items without replacement, with exact inclusion probabilities."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from .. import _check
from .._math import systematic
from ..designs import MakesDesign, Pivotal, inclusion_probs
from ._reservoir import numbers


class _Draws:
    """Hold what both samplers share: probabilities, replicas, and a number of draws that can be resumed."""

    def __init__(
        self,
        sizes: Any,
        k: int,
        design: MakesDesign | None,
        seed: int,
        num_replicas: int | None,
        rank: int | None,
    ) -> None:
        size = numbers("sizes", sizes)
        is_kept = size.dtype in (torch.float32, torch.float64)  # π of half precision would be off by 0.4 %
        size = size.detach() if is_kept else size.to(torch.float64)
        if size.ndim != 1 or not len(size):
            raise ValueError(f"`sizes` must have the shape (n), n ≥ 1; got {tuple(size.shape)}.")
        _check.sizes("sizes", size)
        _check.integer_at_most("k", k, len(size), "number of items")
        _check.integer("seed", seed)
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.num_replicas: int = (
            (torch.distributed.get_world_size() if is_distributed else 1) if num_replicas is None else num_replicas
        )
        self.rank: int = (torch.distributed.get_rank() if is_distributed else 0) if rank is None else rank
        _check.at_least("num_replicas", self.num_replicas, 1)
        _check.integer_at_most("rank", self.rank, self.num_replicas - 1, "`num_replicas` − 1")
        if k % self.num_replicas:
            fix = "so that every replica has as many items, and none is left out or repeated"
            raise ValueError(f"`k` must be a multiple of `num_replicas` = {self.num_replicas}, {fix}; got {k}.")
        self.k, self.seed = int(k), int(seed)
        probs = inclusion_probs(size, k)
        self._law = None if design is None else design(probs, k, validate_args=False)
        self.probs: Tensor = probs if self._law is None else self._law.mean.detach()
        self.epoch, self._handed, self._resumed, self._has_begun = 0, 0, 0, False
        self._sums: tuple[float, float] | None = None

    @property
    def weights(self) -> Tensor:
        """Return the weight 1/π of each item, (n); inf for an item that is never drawn."""
        return 1 / self.probs

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws. Right after `load_state_dict` its position stays."""
        _check.at_least("epoch", epoch, 0)
        if self._has_begun or epoch != self.epoch:
            self.epoch, self._handed, self._resumed, self._has_begun = epoch, 0, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler is; the same on all replicas that have handed out as many items."""
        is_done = self._handed == self._of_epoch()
        return {
            "seed": self.seed,
            "epoch": self.epoch + is_done,
            "handed": 0 if is_done else self._handed,
            "of": self._of_epoch(),
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what a state must share with this sampler: k, the number of items, and two sums over them."""
        if self._sums is None:
            p = self.probs.to(torch.float64)
            place = torch.arange(1, len(p) + 1, dtype=torch.float64, device=p.device) / len(p)
            self._sums = float(p @ place), float(p @ p)
        return {"k": self.k, "items": len(self.probs), "sums": list(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler was, with its seed; the number of replicas may differ, k and sizes may not."""
        _check.instance("state", state, Mapping)
        if missing := {"seed", "epoch", "handed", "of", "k", "items", "sums"} - set(state):
            raise ValueError(f"The state must be one of `state_dict`; {sorted(missing)} are missing.")
        for name in ("seed", "epoch", "handed", "of", "k", "items"):
            _check.integer(name, state[name])
        own = self._identity()
        for name, what in (("k", "samples of k"), ("items", "a number of items")):
            if state[name] != own[name]:
                raise ValueError(f"The state must be of {what} = {own[name]}; got {state[name]}.")
        if not np.allclose(state["sums"], own["sums"], rtol=1e-5):  # roundings differ between machines
            got = f"Σ π i/n and Σ π² are {_digits(own['sums'])} here, and {_digits(state['sums'])} in the state"
            raise ValueError(f"The state must be of a sampler with the same sizes; {got}.")
        self._check_rest(state["of"] - state["handed"])
        if state["of"] != self._of_epoch():
            raise ValueError(f"The state must be of epochs of {self._of_epoch()}; got epochs of {state['of']}.")
        _check.at_least("epoch", state["epoch"], 0)
        _check.integer_at_most("handed", state["handed"], self._of_epoch(), "what an epoch hands out")
        self.seed, self.epoch, self._handed = state["seed"], state["epoch"], state["handed"]
        self._resumed, self._has_begun = self._handed, False

    def _of_epoch(self) -> int:
        """Return how many items or batches an epoch hands out, over all replicas."""
        raise NotImplementedError

    def _check_rest(self, left: int) -> None:
        """Raise if the replicas cannot share what is left of an epoch."""

    def _begin(self) -> int:
        """Begin an iteration, of the next epoch if this one was begun, and return how much was handed out before."""
        self.epoch += self._has_begun
        self._handed, self._resumed, self._has_begun = self._resumed, 0, True
        return self._handed

    def _sample(self, number: int) -> Tensor:
        """Return the items of a draw in random order, (k); a function of the seed and the number of the draw."""
        generator = _generator(self.seed, number)
        chosen = self._chosen(generator)
        return chosen[torch.randperm(len(chosen), generator=generator)]

    def _chosen(self, generator: torch.Generator) -> Tensor:
        assert self._law is not None
        return self._law.sample(generator=generator).nonzero()[:, 0]


def _digits(sums: Any) -> str:
    return " and ".join(f"{float(s):.7g}" for s in sums)


def _generator(seed: int, *numbers: int) -> torch.Generator:
    """Return a generator of its own for each draw: neighbours would not do, as seed 1, draw 0 is not seed 0, draw 1."""
    state = np.random.SeedSequence((seed % 2**64, *numbers)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    return torch.Generator().manual_seed(int(state))


class DesignSampler(_Draws, Sampler[int]):
    """Draw k of n items for each epoch, without replacement, item i with exactly the probability π_i.

    `π = min(1, c · size)`, `Σπ = k`. A loss weighted by 1/π is, on average over epochs, the sum over all n items.
    `WeightedRandomSampler(replacement=False)` has other probabilities, which are not known.

    Args:
        sizes: how much of each item is wanted, (n) numbers ≥ 0: a tensor or an array.
        k: how many for each epoch, over all replicas.
        design: the law, a class of `khot.designs` or a `functools.partial` of one.
        seed: of all epochs; the same on all replicas.
        num_replicas, rank: of a distributed run, each of which gets k/num_replicas items; by default those of
            `torch.distributed`, or one.

    Each iteration draws the next epoch, or the one that `set_epoch` says, as in torch's `DistributedSampler`. With
    `state_dict` and `load_state_dict` a run resumes in the middle of an epoch, with other replicas if need be. The
    state counts what was handed out: a DataLoader with workers takes items ahead.

    Examples:
        >>> sampler = DesignSampler([10.0, 1.0, 2.0, 3.0], k=2)
        >>> list(sampler), list(sampler), sampler.weights[:2]
        ([2, 0], [0, 1], tensor([1., 6.], dtype=torch.float64))
    """

    def __init__(
        self,
        sizes: Any,
        k: int,
        *,
        design: MakesDesign = Pivotal,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(sizes, k, design, seed, num_replicas, rank)

    def __len__(self) -> int:
        return self.k // self.num_replicas

    def _of_epoch(self) -> int:
        return self.k

    def _check_rest(self, left: int) -> None:
        if left % self.num_replicas:
            raise ValueError(
                f"{left} items are left of the epoch, no multiple of `num_replicas` = {self.num_replicas}."
            )

    def __iter__(self) -> Iterator[int]:
        start = self._begin()
        for item in self._sample(self.epoch)[start + self.rank :: self.num_replicas].tolist():
            self._handed += self.num_replicas
            yield item


class DesignBatchSampler(_Draws, Sampler[list[int]]):
    """Draw k of n items for each batch, without replacement within it, item i with exactly the probability π_i.

    Each batch by itself is a sample of the whole, so the loss weighted by 1/π is unbiased for every step. A batch takes
    O(k log n): the items of an epoch have one random order, and each batch is a pivotal sample along it. Neighbours of
    that order are rarely drawn together in this epoch; with a `design`, no such thing holds, but a batch takes O(n).

    Args:
        sizes, seed, num_replicas, rank: as for `DesignSampler`.
        k: items of a batch, over all replicas.
        num_batches: in an epoch.
        design: another law, drawn anew for each batch.

    Examples:
        >>> batches = DesignBatchSampler([10.0, 1.0, 2.0, 3.0], k=2, num_batches=3)
        >>> list(batches)
        [[3, 0], [0, 3], [0, 2]]
    """

    def __init__(
        self,
        sizes: Any,
        k: int,
        *,
        num_batches: int,
        design: MakesDesign | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        _check.at_least("num_batches", num_batches, 1)
        super().__init__(sizes, k, design, seed, num_replicas, rank)
        self.num_batches = num_batches
        size = torch.tensor(float(k), dtype=torch.float64)
        self._quantised = systematic.quantised(self.probs.cpu(), size) if design is None else None
        self._along: tuple[int, int, Tensor, Tensor] | None = None  # seed, epoch, the order and running sums in it

    def __len__(self) -> int:
        return self.num_batches

    def _of_epoch(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        start, epoch = self._begin(), self.epoch
        self._prepare(epoch)
        for batch in range(start, self.num_batches):
            items = self._sample(epoch * self.num_batches + batch)[self.rank :: self.num_replicas].tolist()
            self._handed = batch + 1
            yield items

    def _prepare(self, epoch: int) -> None:
        """Draw the order of an epoch; O(n)."""
        if self._quantised is not None and (self._along is None or self._along[:2] != (self.seed, epoch)):
            order = torch.randperm(len(self.probs), generator=_generator(self.seed, epoch, 1))
            self._along = self.seed, epoch, order, self._quantised[order].cumsum(-1)

    def _chosen(self, generator: torch.Generator) -> Tensor:
        if self._along is None:
            return super()._chosen(generator)
        *_, order, passed = self._along
        u = torch.rand(2, self.k, dtype=torch.float64, generator=generator)
        return order[systematic.draw_pivotal(passed, self.k, u)]


class WeightedDataset(Dataset[tuple[Any, Any]]):
    """Give each item of a data set together with its weight: `(item, weight)`.

    Args:
        dataset: any data set with a length.
        weights: one number for each item, such as `sampler.weights`, (n).

    Examples:
        >>> sampler = DesignSampler([10.0, 1.0, 2.0, 3.0], k=2)
        >>> data = WeightedDataset(["a", "b", "c", "d"], sampler.weights)
        >>> [data[i] for i in sampler]
        [('c', 3.0), ('a', 1.0)]
    """

    def __init__(self, dataset: Any, weights: Tensor) -> None:
        _check.instance("dataset", dataset, Sized)
        _check.instance("weights", weights, Tensor)
        if weights.ndim != 1 or len(dataset) != len(weights):
            raise ValueError(f"`weights` must be {len(dataset)}, one for each item; got {tuple(weights.shape)}.")
        self.dataset, self.values = dataset, weights

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.dataset[index], float(self.values[index])
