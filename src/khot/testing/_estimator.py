"""`check_estimator`: the bias of a gradient estimator, by enumeration."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..designs import ConditionalPoisson, Design
from ..estimators import takes_objective

Estimator = Callable[..., Tensor]
Objective = Callable[[Tensor], Tensor]
EXACT = 1e-10
MOST_TUPLES, MOST_CALLS = 200_000, 100
ALPHA = 1e-6  # the chance, over seeds, that a right estimator fails where its samples cannot be set


def objectives(n: int) -> dict[str, tuple[int, Objective]]:
    """Return test objectives (…, n) → (…) by name, each with its degree (0: none)."""
    g = torch.Generator().manual_seed(0)
    slope = torch.randn(n, dtype=torch.float64, generator=g)
    square = torch.randn(n, n, dtype=torch.float64, generator=g)
    first, second = (torch.randn(*shape, dtype=torch.float64, generator=g) for shape in ((n, 8), (8,)))
    return {
        "affine": (1, lambda x: x @ slope + 0.7),
        "quadratic": (2, lambda x: ((x @ square) * x).sum(-1) + x @ slope),
        "tanh network": (0, lambda x: torch.tanh(x @ first) @ second),
    }


def check_estimator(
    estimator: Estimator,
    *,
    design: Design | None = None,
    degree: int | None = None,
    num_samples: int = 2,
    draws: int = 100_000,
) -> None:
    """Raise AssertionError unless the mean of an estimator is the gradient of E[f(x)].

    The mean is taken over all subsets (pairs of them, if it draws two), which are set in place of the design's samples:
    no chance is left, and a bias of 1e-10 is found. An estimator that does not draw by `design.sample` is averaged over
    `draws` of its own instead, and fails if it is off by 4.9 standard errors. A loss must also be the mean loss, give
    what else f depends on its ordinary gradient, and be right with one sample more and in a batch of two rows.

    Args:
        estimator: either `(design, fn, *, num_samples, generator)` → a scalar whose gradient is the estimate, or
            `(design, sample_shape, *, generator)` → samples with a gradient.
        design: to estimate with, of few items and no batch; by default a `ConditionalPoisson` of five, k = 2.
        degree: of the polynomials in x for which it is exact: 1 for straight-through, 2 for `reinmax`; None for any f.
        num_samples: that a loss estimator is asked for; it is asked for one more, too.
        draws: see above.

    Examples:
        >>> check_estimator(khot.estimators.rloo)
        >>> check_estimator(khot.estimators.straight_through_sample, degree=1)
        >>> check_estimator(khot.estimators.straight_through_sample)
        Traceback (most recent call last):
        AssertionError: biased:
        - quadratic: ...
    """
    if design is None:
        design = ConditionalPoisson(logits=torch.tensor([0.9, -0.4, 0.3, -1.1, 0.2], dtype=torch.float64), k=2)
    biased: list[str] = []
    faults: set[str] = set()
    is_first = is_loss = takes_objective(estimator)
    for name, (of, fn) in objectives(design.event_shape[0]).items():
        if degree is not None and not 0 < of <= degree:
            continue
        own = _with_leaf(design)
        exact = exact_gradient(own, fn, own.parameter)
        means = {"": expected_gradient(estimator, design, fn, num_samples if is_loss else 1, draws, faults)}
        if is_loss:
            more = expected_gradient(estimator, design, fn, num_samples + 1, draws, faults)
            means[f" with {num_samples + 1} samples"] = more
        if is_first:  # it takes many calls
            means[" in a batch of two"] = expected_gradient_of_a_row(estimator, design, fn, num_samples, faults)
        is_first = False
        for where, (mean, error) in means.items():
            bias, size = mean - exact, exact
            if design.parameter is design.probs:  # their sum is fixed, so only differences have a meaning
                bias, size = bias - bias.mean(), exact - exact.mean()
            if not bool((bias.abs() <= error).all()):
                biased.append(f"{name}{where}: relative bias {float(bias.norm() / size.norm()):.3g}")
                break
    if biased or faults:
        raise AssertionError("\n- ".join(("biased:" if biased else "not a right loss:", *biased, *sorted(faults))))


def expected_gradient(
    estimator: Estimator, design: Design, fn: Objective, count: int, draws: int, faults: set[str]
) -> tuple[Tensor, Tensor]:
    """Return the mean of the estimate, and how far off it may be; (n) each."""
    x, generator = _possible(design), torch.Generator().manual_seed(0)
    if len(x) ** count <= MOST_TUPLES:
        tuples = torch.cartesian_prod(*[torch.arange(len(x))] * count).view(-1, count)
        scripted = prescribe(_with_leaf(design.expand((len(tuples),))), x[tuples].movedim(1, 0))
        each = estimates(estimator, scripted, fn, count, generator, faults)
        if scripted.was_used:
            chance = design.log_prob(x).exp()[tuples].prod(-1).detach()
            return (chance[:, None] * each).sum(0), torch.tensor(EXACT)
    each = estimates(estimator, _with_leaf(design.expand((draws,))), fn, count, generator, faults)
    allowed = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - ALPHA, dtype=torch.float64)))
    return each.mean(0), EXACT + allowed * each.std(0) / math.sqrt(draws)


def expected_gradient_of_a_row(
    estimator: Estimator, design: Design, fn: Objective, count: int, faults: set[str]
) -> tuple[Tensor, Tensor]:
    """Return the same of the first of two rows, given the samples of the second; without a limit if it cannot be had.

    Any single sample of the second row will do: what is right on average is so for each, unless rows are mixed.
    """
    x = _possible(design)
    is_small = len(x) ** count <= MOST_CALLS
    mean, log = torch.zeros_like(design.parameter), design.log_prob(x).detach()
    for chosen in torch.cartesian_prod(*[torch.arange(len(x))] * count).view(-1, count) if is_small else ():
        samples = torch.stack((x[chosen], x[:1].expand(count, -1)), 1)  # (count, 2, n)
        scripted = prescribe(_with_leaf(design.expand((2,))), samples)
        mean = mean + log[chosen].sum().exp() * estimates(estimator, scripted, fn, count, torch.Generator(), faults)[0]
        if not scripted.was_used:
            return mean, torch.tensor(torch.inf)
    return mean, torch.tensor(EXACT if is_small else torch.inf)


def _possible(design: Design) -> Tensor:
    """List the subsets that can be drawn, (subsets, n)."""
    x = design.enumerate_support()
    return x[design.log_prob(x) > -torch.inf]


def _with_leaf(design: Design) -> Design:
    """Return the same design with a parameter of its own that takes gradients."""
    return design.with_parameter(design.parameter.detach().requires_grad_())


def prescribe(design: Design, samples: Tensor) -> Any:
    """Return the design with its samples (N, *batch, n) prescribed; `was_used` tells whether they were asked for."""

    def sample(self: Any, sample_shape: Sequence[int] = (), **options: Any) -> Tensor:
        self.was_used = True
        return samples.view(*sample_shape, *samples.shape[1:])

    kind = type(design)
    made: Any = object.__new__(type(kind.__name__, (kind,), {"sample": sample}))
    made.__dict__.update(design.__dict__, was_used=False, samples=samples)
    return made


def estimates(
    estimator: Estimator, design: Any, fn: Objective, count: int, generator: torch.Generator, faults: set[str]
) -> Tensor:
    """Return one estimate for each row of the batch, (rows, n); add to the faults what a loss must not have."""
    each: Tensor
    if not takes_objective(estimator):
        (each,) = torch.autograd.grad(fn(estimator(design, (), generator=generator)).sum(), design.parameter)
        return each
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)  # a parameter of f
    value = estimator(design, lambda x: fn(x) * scale, num_samples=count, generator=generator)
    gradient, own = torch.autograd.grad(value, (design.parameter, scale), allow_unused=True)
    expected = fn(design.samples).mean() if getattr(design, "was_used", False) else value
    if not torch.isclose(value, expected, 1e-9, 1e-9):
        faults.add("the value is not the mean loss of the samples")
    if own is None or not torch.isclose(own, expected, 1e-9, 1e-9):
        faults.add("what else `fn` depends on does not get its ordinary gradient")
    if gradient is None:
        raise AssertionError("there is no gradient in the design's parameter")
    each = gradient * design.batch_shape.numel()  # the loss is a mean over rows
    return each


def exact_gradient(design: Design, fn: Objective, parameter: Tensor) -> Tensor:
    """Return ∇E[f(x)] over all subsets, in a parameter that the design was made from."""
    x = design.enumerate_support()
    return torch.autograd.grad((design.log_prob(x).exp() * fn(x)).sum(), parameter)[0]
