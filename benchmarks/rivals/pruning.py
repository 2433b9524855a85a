"""Ways to train a sparse network, re-implemented for comparison: from random masks to Spartan.

A method holds the weights of one model: all parameters of two or more dims. `weights()` gives what the forward pass
uses, `penalty()` what the loss adds; `after_backward()` and `after_step()` are called around the optimiser's step, and
`final()` returns the sparse weights. Each has one knob of its own, with the values to choose from in `knobs`. All are
our re-implementations from the papers' formulas, with the papers' settings except where a docstring says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import khot

Weights = dict[str, Tensor]
Loss = Callable[[Weights], Tensor]
"""The loss on a batch of training data, for the given weights."""


def prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are pruned, by name: those of two or more dims."""
    return {name: p for name, p in model.named_parameters() if p.dim() >= 2}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the entries of tensors as one vector."""
    return torch.cat([each.reshape(-1) for each in tensors])


def top(scores: Tensor, k: int) -> Tensor:
    """Return the mask of the k largest entries: exactly k, also if some are equal."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(k, sorted=False).indices, True)


class Dense:
    """Train all weights: what the others are compared with. The knob multiplies the weights at the start."""

    knobs: tuple[Any, ...] = (1.0, 0.5, 2.0)

    def __init__(self, model: nn.Module, density: float, *, steps: int, knob: Any, loss: Loss) -> None:
        self.params = prunable(model)
        self.sizes = [p.numel() for p in self.params.values()]
        self.k = int(density * sum(self.sizes) + 1e-9)  # within the budget
        self.density, self.steps, self.knob, self.done = density, steps, knob, 0
        self.start(loss)

    def start(self, loss: Loss) -> None:
        """Prepare masks and parameters of the method."""
        with torch.no_grad():
            for p in self.params.values():
                p.mul_(self.knob)

    def extra(self, rate: float) -> list[dict[str, Any]]:
        """Return parameter groups of the method's own, for the optimiser."""
        return []

    def weights(self) -> Weights:
        """Return the weights of the forward pass."""
        return dict(self.params)

    def penalty(self) -> Tensor | float:
        """Return what is added to the loss."""
        return 0.0

    def after_backward(self) -> None:
        """Change gradients, if need be."""

    def after_step(self) -> None:
        """Count the step, and change masks, if need be."""
        self.done += 1

    def final(self) -> Weights:
        """Return the sparse weights at the end of training."""
        return {name: w.detach() for name, w in self.weights().items()}

    def flat_weights(self) -> Tensor:
        return flat(self.params.values())

    def shaped(self, vector: Tensor) -> Weights:
        """Return a vector of all weights as tensors in the parameters' shapes."""
        parts = vector.split(self.sizes)
        return {name: part.view_as(p) for (name, p), part in zip(self.params.items(), parts, strict=True)}


class Masked(Dense):
    """A mask multiplies the weights; what it hides gets no gradient. The base of those with hard masks."""

    mask: Tensor | None = None

    def weights(self) -> Weights:
        if self.mask is None:
            return dict(self.params)
        masks = self.shaped(self.mask)
        return {name: p * masks[name] for name, p in self.params.items()}


def layer_counts(shapes: list[tuple[int, ...]], k: int, power: float) -> list[int]:
    """Share k among layers: density in proportion to (Σ dims / Π dims)^power, at most 1, summing to k exactly.

    With power 1 this is Erdős–Rényi-kernel (Evci et al. 2020), with power 0 the same density everywhere.
    """
    sizes = [math.prod(shape) for shape in shapes]
    raw = [(sum(shape) / math.prod(shape)) ** power for shape in shapes]
    low, high = 0.0, 1 / min(raw)
    for _ in range(100):
        scale = (low + high) / 2
        total = sum(size * min(1.0, scale * each) for size, each in zip(sizes, raw, strict=True))
        low, high = (scale, high) if total < k else (low, scale)
    exact = [size * min(1.0, high * each) for size, each in zip(sizes, raw, strict=True)]
    counts = [int(value) for value in exact]
    order = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])  # the largest remainders first
    for i in order[: k - sum(counts)]:
        counts[i] += 1
    return counts


class Random(Masked):
    """A random mask, drawn once. The knob is the power of `layer_counts`: 0 uniform, 1 Erdős–Rényi-kernel."""

    knobs = (0.0, 0.5, 1.0)

    def start(self, loss: Loss) -> None:
        shapes = [tuple(p.shape) for p in self.params.values()]
        self.counts = layer_counts(shapes, self.k, self.knob)
        noise = [torch.rand(size) for size in self.sizes]
        self.mask = flat(top(u, count) for u, count in zip(noise, self.counts, strict=True))


class OneShot(Masked):
    """Magnitude pruning at one moment by `torch.nn.utils.prune.global_unstructured`, then fine-tuning.

    The knob is the moment, as a share of the steps.
    """

    knobs = (0.25, 0.5, 0.75)

    def start(self, loss: Loss) -> None:
        pass

    def after_step(self) -> None:
        self.done += 1
        if self.done == round(self.knob * self.steps):
            with torch.no_grad():
                holders = []
                for p in self.params.values():
                    holder = nn.Module()
                    holder.weight = nn.Parameter(p.clone())
                    holders.append(holder)
                pairs = [(holder, "weight") for holder in holders]
                prune.global_unstructured(pairs, prune.L1Unstructured, amount=sum(self.sizes) - self.k)
                self.mask = flat(holder.weight_mask.bool() for holder in holders)


class Gradual(Masked):
    """Gradual magnitude pruning, over all layers at once: the pruned share is s·(1 − (1 − t/t₁)³).

    Zhu and Gupta, "To prune, or not to prune" (2017). The knob is t₁, as a share of the steps. Masks are set at every
    step; the paper's wait of 100 steps between two changes is for longer training.
    """

    knobs = (0.5, 0.75, 0.9)

    def start(self, loss: Loss) -> None:
        self.mask = torch.ones(sum(self.sizes), dtype=torch.bool)

    def after_step(self) -> None:
        self.done += 1
        left = max(0.0, 1 - self.done / (self.knob * self.steps)) ** 3
        if self.mask.sum() > self.k:
            k = round(self.k + (sum(self.sizes) - self.k) * left)
            scores = self.flat_weights().detach().abs().masked_fill(~self.mask, -1.0)  # what is gone stays gone
            self.mask = top(scores, k)


class Snip(Masked):
    """Keep the weights of the largest |g·w| before training.

    Lee, Ajanthan and Torr, "SNIP: single-shot network pruning based on connection sensitivity" (2019). The knob is the
    number of batches that g is the mean of.
    """

    knobs = (1, 4, 16)

    def start(self, loss: Loss) -> None:
        total = sum(loss(dict(self.params)) for _ in range(self.knob))
        g = flat(torch.autograd.grad(total, list(self.params.values())))
        self.mask = top((g * self.flat_weights().detach()).abs(), self.k)


class RigL(Masked):
    """Drop the smallest weights and grow where the gradient is largest, again and again; Erdős–Rényi-kernel layers.

    Evci et al., "Rigging the lottery" (2020). The share dropped falls as α/2·(1 + cos(πt/t₁)) until t₁, 75 % of the
    steps; new weights start at 0. There are 30 updates: the paper's 100 steps between two are for longer training. The
    knob is α, the paper's 0.3 among them.
    """

    knobs = (0.1, 0.3, 0.5)
    updates = 30

    def start(self, loss: Loss) -> None:
        self.counts = layer_counts([tuple(p.shape) for p in self.params.values()], self.k, 1.0)
        self.mask = flat(top(torch.rand(size), count) for size, count in zip(self.sizes, self.counts, strict=True))
        self.end = round(0.75 * self.steps)
        self.every = max(1, self.end // self.updates)
        self.hide()

    def hide(self) -> None:
        with torch.no_grad():
            for p, mask in zip(self.params.values(), self.shaped(self.mask).values(), strict=True):
                p.mul_(mask)

    def weights(self) -> Weights:
        return dict(self.params)  # zero outside the mask, so that gradients there are known

    def after_backward(self) -> None:
        self.gradient = flat(p.grad for p in self.params.values())
        for p, mask in zip(self.params.values(), self.shaped(self.mask).values(), strict=True):
            p.grad.mul_(mask)

    def after_step(self) -> None:
        self.done += 1
        self.hide()  # an optimiser with momentum also moves weights whose gradient is 0
        if self.done % self.every == 0 and self.done <= self.end:
            share = self.knob / 2 * (1 + math.cos(math.pi * self.done / self.end))
            w = self.flat_weights().detach()
            parts = [part.split(self.sizes) for part in (self.mask, w.abs(), self.gradient.abs())]
            masks = []
            for mask, size, gradient, count in zip(*parts, self.counts, strict=True):
                moved = min(round(share * count), len(mask) - count)
                kept = top(size.masked_fill(~mask, -1.0), count - moved)
                masks.append(kept | top(gradient.masked_fill(kept, -1.0), moved))
            grown = flat(masks) & ~self.mask
            self.mask = flat(masks)
            self.hide()
            with torch.no_grad():
                for p, new in zip(self.params.values(), self.shaped(grown).values(), strict=True):
                    p.mul_(~new)


class TopKast(Dense):
    """The k largest weights of each layer forward, gradients to some more of them, and a penalty on both.

    Jayakumar et al., "Top-KAST: top-k always sparse training" (2020). The loss adds λ(Σ_A |w| + Σ_{B∖A} |w|/D), with
    λ = 1e-4; A is used forward, B ⊇ A gets gradients, D is the density. Layers have the densities of
    Erdős–Rényi-kernel. The knob is the size of B, in units of A.
    """

    knobs = (2.0, 5.0, 20.0)
    strength = 1e-4

    def start(self, loss: Loss) -> None:
        self.counts = layer_counts([tuple(p.shape) for p in self.params.values()], self.k, 1.0)

    def sets(self, widened: float) -> Tensor:
        sizes = [min(round(widened * k), size) for k, size in zip(self.counts, self.sizes, strict=True)]
        return flat(top(p.detach().abs().view(-1), k) for p, k in zip(self.params.values(), sizes, strict=True))

    def weights(self) -> Weights:
        self.used, self.learned = self.sets(1.0), self.sets(self.knob)
        w = self.flat_weights()
        seen = torch.where(self.learned, w, w.detach())
        return self.shaped(seen + (seen * self.used - seen).detach())  # the value of A, the gradient of B

    def penalty(self) -> Tensor:
        w = self.flat_weights().abs()
        return self.strength * (w[self.used].sum() + w[self.learned & ~self.used].sum() / self.density)


class Str(Dense):
    """A learned soft threshold for each layer: sign(w)·relu(|w| − σ(s)), with weight decay on s and w.

    Kusupati et al., "Soft threshold weight reparameterization" (2020). The density cannot be given: the decay sets it.
    The knob is the decay λ. s starts at −6, and weights are cut to the k largest at the end if there are more.
    `own_density` is the density before. The decay is a term of the loss, as in the paper, with no rate of its own.
    """

    knobs = (3e-3, 1e-2, 2e-2)
    begin = -6.0

    def start(self, loss: Loss) -> None:
        self.s = [nn.Parameter(torch.tensor(self.begin)) for _ in self.params]

    def extra(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": self.s, "lr": 10 * rate}]

    def weights(self) -> Weights:
        pairs = zip(self.params.items(), self.s, strict=True)
        return {name: p.sign() * (p.abs() - s.sigmoid()).relu() for (name, p), s in pairs}

    def penalty(self) -> Tensor:
        s = torch.stack(self.s)
        return self.knob / 2 * (self.flat_weights().square().sum() + s.square().sum())

    def final(self) -> Weights:
        w = flat(self.weights().values()).detach()
        self.own_density = float((w != 0).double().mean())
        return self.shaped(w * top(w.abs(), self.k))


def projected(s: Tensor, k: float) -> Tensor:
    """Return the point of [0, 1]ⁿ with sum at most k that is nearest to s; the shift by bisection, as published."""
    low, high = 0.0, float(s.max())
    if s.clamp(0, 1).sum() <= k:
        return s.clamp(0, 1)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if (s - middle).clamp(0, 1).sum() > k else (low, middle)
    return (s - high).clamp(0, 1)


class ProbMask(Dense):
    """Learned probabilities of keeping, projected on a global budget; masks are drawn by Gumbel-sigmoid.

    Zhou et al., "Effective sparsification of neural networks with global sparsity constraint" (2021). The budget falls
    with the cube of time to the end of the first 60 % of the steps, the temperature from 1 to 0.03 over all steps. The
    knob is the rate of the probabilities, the paper's 6e-3 and larger ones for fewer steps. At the end the k most
    probable stay, where the paper draws: the number is then exact.
    """

    knobs = (6e-3, 2e-2, 6e-2)

    def start(self, loss: Loss) -> None:
        self.s = nn.Parameter(torch.ones(sum(self.sizes)))

    def extra(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": [self.s], "lr": self.knob}]

    def weights(self) -> Weights:
        temperature = 0.03 ** (self.done / self.steps)
        s = self.s.clamp(1e-6, 1 - 1e-6)
        u = torch.rand_like(s).clamp_(1e-6, 1 - 1e-6)
        noise = u.log() - (-u).log1p()
        return self.shaped(self.flat_weights() * ((s.log() - (-s).log1p() + noise) / temperature).sigmoid())

    def after_step(self) -> None:
        self.done += 1
        left = max(0.0, 1 - self.done / (0.6 * self.steps)) ** 3
        with torch.no_grad():
            self.s.copy_(projected(self.s, self.k + (sum(self.sizes) - self.k) * left))

    def final(self) -> Weights:
        return self.shaped((self.flat_weights() * top(self.s, self.k)).detach())


class Spartan(Dense):
    """A soft top-k mask of |w| over all layers, sharper and sharper, with its hard cut forward; then frozen.

    Tai, Tian and Lim, "Spartan: differentiable sparsity via regularized transportation" (2022), with the schedule of
    their code: the budget falls linearly in the first 20 % of the steps, the sharpness β rises linearly from 1 until
    the last 20 %, in which the mask is frozen. The soft top-k is σ_k(β|w|), to which their Sinkhorn iteration
    converges. The knob is the last β: theirs is 20.
    """

    knobs = (5.0, 20.0, 80.0)
    frozen: Tensor | None = None

    def start(self, loss: Loss) -> None:
        pass

    def weights(self) -> Weights:
        w = self.flat_weights()
        if self.frozen is not None:
            return self.shaped(w * self.frozen)
        n = len(w)
        kept = 1 + (self.k / n - 1) * min(1.0, self.done / (0.2 * self.steps))
        if self.done == 0:
            return dict(self.params)
        beta = 1 + (self.knob - 1) * min(1.0, self.done / (0.8 * self.steps))
        soft = khot.sigmoid_topk(w.abs(), k := round(kept * n), temperature=1 / beta)
        self.cut = soft.detach() * top(w.detach().abs(), k)
        return self.shaped(w * soft + (w * (self.cut - soft)).detach())  # cut forward, as if not cut backward

    def after_step(self) -> None:
        self.done += 1
        if self.done == round(0.8 * self.steps):
            with torch.no_grad():
                self.weights()
                self.frozen = self.cut


METHODS: dict[str, type[Dense]] = {
    "dense": Dense,
    "random": Random,
    "one-shot magnitude": OneShot,
    "gradual magnitude": Gradual,
    "SNIP": Snip,
    "RigL": RigL,
    "Top-KAST": TopKast,
    "STR": Str,
    "ProbMask": ProbMask,
    "Spartan": Spartan,
}
"""The rivals, by the name in the tables."""
