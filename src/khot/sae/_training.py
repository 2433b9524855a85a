"""Training a sparse autoencoder, step by step.

A step is a function of the seed and of its number: the rows it reads, the learning rate, the temperature and the
randomness of a selector. So the state of the model and of the optimiser is the whole state.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _check
from .._shape import Group
from ..nn import SparseAutoencoder, SparseAutoencoderConfig, selectors
from ._streaming import Source

POINTS = 1000  # largest number of points in the training curve
SAMPLES = 2**13  # number of rows from which the initial weights are taken
HELD_OUT = 16  # one row in so many is not trained on: the last of each group
EPSILON = 6.25e-10  # Adam's ε, for gradients as small as those of a mean over many tokens and latents
LARGEST_RATE = 1e30  # Adam raises where its step exceeds float32


class Recipe(NamedTuple):
    """Hold a selector, and the temperatures at which it works well: at the first step, and after 4/5 of the steps."""

    selector: selectors.Selector
    temperature: float
    final: float


RECIPES = {
    "hard": Recipe(selectors.hard, 1.0, 1.0),
    "straight-through": Recipe(selectors.straight_through, 4.0, 4.0),
    "soft": Recipe(selectors.soft, 0.3, 0.03),
    "sampled": Recipe(selectors.sampled, 0.1, 0.01),
}
"""The selectors that `Training.selector` names."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hold the settings of a training run.

    Args:
        selector: a name in `RECIPES`: "hard", "straight-through", "soft" or "sampled".
        steps: the number of steps of Adam.
        batch_size: tokens in a step; never more than the tokens that are trained on.
        lr: the learning rate after a warm-up; it falls to 0 in the last fifth of the steps.
        seed: the same seed gives the same result, bit for bit, on the same machine.
        precision: "float32", or "bfloat16" for the products of activations and encoder; weights stay in float32.
        device: where the model is trained, such as "cpu" or "cuda".
    """

    selector: str = "straight-through"
    steps: int = 4000
    batch_size: int = 1024
    lr: float = 1e-3
    seed: int = 0
    precision: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        _check.one_of("selector", self.selector, tuple(RECIPES))
        _check.at_least("steps", self.steps, 1)
        _check.at_least("batch_size", self.batch_size, 1)
        _check.at_least("seed", self.seed, 0)
        _check.above("lr", self.lr, 0)
        _check.one_of("precision", self.precision, ("float32", "bfloat16"))
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            got = str(error).splitlines()[0]
            raise ValueError(f"`device` must be one that torch has here; got {self.device!r}: {got}") from None
        if self.lr > LARGEST_RATE:
            raise ValueError(f"`lr` must be ≤ {LARGEST_RATE:g}; got {self.lr:g}.")


class Point(NamedTuple):
    """One point of the training curve: the figures of one batch."""

    step: int
    loss: float
    fvu: float
    l0: float
    dead: int
    temperature: float


class Trainer:
    """Hold a model with its optimiser and its data, at some step of training.

    Args:
        data: the activations: `Activations`, `ModelActivations`, or `Pairs` for a transcoder. One row in every
            `HELD_OUT` is not trained on.
        config: of the model.
        training: the settings.
        group: the process group whose processes train one model, each on its part of every batch.

    Attributes:
        sae: the model, a `khot.nn.SparseAutoencoder`.
        step: how many steps were taken.
        curve: at most 1000 points of the training curve.
    """

    def __init__(
        self, data: Source, config: SparseAutoencoderConfig, training: Training, *, group: Group = None
    ) -> None:
        _check.instance("config", config, SparseAutoencoderConfig)
        _check.instance("training", training, Training)
        if not hasattr(data, "spread"):
            got = f"{type(data).__name__}: `khot.sae.Activations` takes a numpy array"
            raise TypeError(f"`data` must be a source of activations, such as `open_activations` returns; got {got}.")
        self.data, self.training = data, training
        self.step, self.curve = 0, list[Point]()
        self._epoch, self._order = -1, np.empty(0)
        self.trained_on = data.tokens - data.tokens // HELD_OUT
        self.batch_size = min(training.batch_size, self.trained_on)
        config.axis.check_tokens(self.batch_size, config.k, config.latents)
        self.recipe = RECIPES[training.selector]
        how = {"selector": self.recipe.selector, "generator": self._generator(0, 0), "group": group}
        wanted = config.d_in + (config.d_out or 0)
        if data.d != wanted:
            raise ValueError(f"`data` must have rows of {wanted} numbers, as `config` says; got {data.d}.")
        self.sae = SparseAutoencoder(config, **how)
        self.ranks = self.sae.ranks
        every = np.arange(self.trained_on)
        self._trained = every + every // (HELD_OUT - 1)  # the rows that are trained on
        samples = data.rows(data.spread(self._trained, SAMPLES))
        self.sae.start(*self._split(samples)).to(training.device)
        self.adam = torch.optim.Adam(self.sae.parameters(), lr=training.lr, eps=EPSILON, fused=True)

    def description(self) -> dict[str, Any]:
        """Return everything the result depends on, to compare with another run."""
        return {**self.settings(), "crc": self.data.crc}

    def settings(self) -> dict[str, Any]:
        """Return the same without what takes a pass over the data."""
        data = {"batch_size": self.batch_size, "tokens": self.data.tokens}
        settings: dict[str, Any] = json.loads(json.dumps({**asdict(self.sae.config), **asdict(self.training), **data}))
        return settings  # as they are read from a file

    def advance(self) -> Point:
        """Take one step and return its figures; raise FloatingPointError if the loss is not finite."""
        t, sae = self.training, self.sae
        done = self.step / t.steps
        _, first, last = self.recipe
        sae.temperature.fill_(first * (last / first) ** min(1.0, done / 0.8))
        warm = (self.step + 1) / (1 + min(100, t.steps // 10))
        for group in self.adam.param_groups:
            group["lr"] = t.lr * min(1.0, warm, (1 - done) / 0.2)
        rows = self._batch().to(t.device)
        with torch.autocast(torch.device(t.device).type, torch.bfloat16, enabled=t.precision == "bfloat16"):
            out = sae(*self._split(rows), generator=self._generator(2, self.step, *self.ranks.seed()))
        if not out.loss.isfinite():
            raise self.diverged()
        self.adam.zero_grad()
        out.loss.backward()
        self.ranks.average(sae.parameters())
        for p in sae.parameters():
            if p.grad is not None and p.grad.stride() != p.stride():  # Adam's kernel reads both in the order of memory
                p.grad = torch.empty_like(p).copy_(p.grad)
        sae.remove_parallel_gradient()
        self.adam.step()
        sae.normalize_decoder()
        self.step += 1
        l0 = float(self.ranks.sum((out.code.values > 0).sum())) / self.batch_size
        loss, fvu, dead = float(out.loss.detach()), float(out.fvu.detach()), int(sae.dead().sum())
        point = Point(self.step, loss, fvu, l0, dead, float(sae.temperature))
        if self.step % max(1, t.steps // POINTS) == 0 or self.step == t.steps:
            self.curve.append(point)
        return point

    def diverged(self) -> FloatingPointError:
        """Return the error for a loss or weights that are not finite; at step 0 only the data can be the cause."""
        fix = f"lower `lr`, now {self.training.lr:g}" if self.step else "divide the activations, which are too large"
        return FloatingPointError(f"the loss must stay finite; it did not after {self.step} steps: {fix}")

    def state(self) -> dict[str, Tensor]:
        """Return everything the next step depends on."""
        tensors = {f"model.{name}": t for name, t in self.sae.state_dict().items()}
        for i, of in self.adam.state_dict()["state"].items():
            tensors.update({f"adam.{i}.{name}": t for name, t in of.items()})
        return {**tensors, "curve": torch.tensor(self.curve, dtype=torch.float64).view(-1, len(Point._fields))}

    def restore(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Go back to a step, from what `state` returned there; raise ValueError for the state of another model."""
        self._check_state(step, tensors)
        model = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        self.sae.load_state_dict(model)
        moments: dict[int, dict[str, Tensor]] = {}
        for i, p in enumerate(self.sae.parameters()):
            if f"adam.{i}.step" in tensors:  # not before the first step
                mean, square = (torch.empty_like(p).copy_(tensors[f"adam.{i}.exp_avg{of}"]) for of in ("", "_sq"))
                moments[i] = {"step": tensors[f"adam.{i}.step"].to(p.device), "exp_avg": mean, "exp_avg_sq": square}
        self.adam.load_state_dict({**self.adam.state_dict(), "state": moments})
        self.curve = [Point(int(s), loss, fvu, l0, int(n), t) for s, loss, fvu, l0, n, t in tensors["curve"].tolist()]
        self.step = step

    def _check_state(self, step: int, tensors: dict[str, Tensor]) -> None:
        if not 0 <= step <= self.training.steps:
            raise ValueError(f"`step` must be from 0 to {self.training.steps}; got {step}.")
        wanted = {f"model.{name}": tuple(t.shape) for name, t in self.sae.state_dict().items()}
        for i, p in enumerate(self.sae.parameters()):
            if any(name.startswith(f"adam.{i}.") for name in tensors):  # not before the first step
                wanted |= {f"adam.{i}.{name}": tuple(p.shape) for name in ("exp_avg", "exp_avg_sq")}
                wanted[f"adam.{i}.step"] = ()
        wanted["curve"] = (len(tensors.get("curve", ())), len(Point._fields))
        for name, shape in wanted.items():
            got = tuple(tensors[name].shape) if name in tensors else "none"
            if got != shape:
                raise ValueError(f"`tensors` must have {name} of the shape {shape}; got {got}.")

    def _batch(self) -> Tensor:
        """Read the next rows of this epoch's order, sorted for the disk; the last incomplete batch is left out."""
        epoch, place = divmod(self.step, self.trained_on // self.batch_size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.data.order(self._trained, self._generator(1, epoch))
        index = np.sort(self._order[place * self.batch_size : (place + 1) * self.batch_size])
        return self.data.rows(index[self.ranks.rows(len(index))])

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs, and the targets if there are any."""
        x, target = self.sae.config.split(rows)
        return (x,) if target is None else (x, target)

    def _generator(self, *stream: int) -> torch.Generator:
        words = np.random.SeedSequence((self.training.seed, *stream)).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(words[0] >> 1))
