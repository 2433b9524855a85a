"""A control variate from the relaxed sample: REBAR for rankings, and so for their sets."""

import torch
from torch import Generator, Tensor

from .. import _check, ops
from .._math import noise
from ..designs import PlackettLuce
from ..relaxations import hard_topk, sigmoid_topk
from ._loss import Objective, evaluate, evaluate_with_gradient, with_gradient


def rebar(
    design: PlackettLuce,
    fn: Objective,
    *,
    num_samples: int = 1,
    scale: float | Tensor = 1.0,
    temperature: float = 0.5,
    per_row: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Estimate ∇E[f(x)] under Gumbel top-k with a relaxed sample as the control variate: unbiased.

    `ĝ = [f(x) − η c(z̃)] ∇log p(r) + η ∇c(z) − η ∇c(z̃)`, with c(z) = f(σ_k(z/T)): z = θ + Gumbel noise, r the ranking
    of its k largest, x their set, and z̃ drawn anew given r. It varies less than the score function if f of soft samples
    is like f of hard ones, and more if not. Reference: Tucker et al., "REBAR" (2017); for rankings,
    Gadetsky et al., "Low-variance black-box gradient estimates for the Plackett–Luce distribution" (2020).

    Args:
        design: whose samples are of one size k ≥ 1.
        fn: (…, n) → (…), differentiable, and defined for soft samples too.
        num_samples: how many samples; each takes three evaluations.
        scale: η, a number or a tensor that broadcasts to (*batch); 0 is the score function.
        temperature: T > 0 of the relaxed samples.
        per_row, generator: as for `score_function`, and so is what it returns.

    Examples:
        >>> seed, x = torch.Generator().manual_seed(0), torch.zeros(4, requires_grad=True)
        >>> design = khot.designs.PlackettLuce(logits=x, k=2)
        >>> loss = rebar(design, lambda s: s[..., 0] * s[..., 1], num_samples=1000, generator=seed)
        >>> torch.autograd.grad(loss, x)[0]  # about 7/72 · (1, 1, −1, −1)
        tensor([ 0.1017,  0.0954, -0.1028, -0.0942])
    """
    _check.instance("design", design, PlackettLuce)
    _check.at_least("num_samples", num_samples, 1)
    _check.positive("temperature", temperature)
    sizes = torch.as_tensor(design.k).unique()
    if len(sizes) != 1 or not 1 <= int(sizes[0]) < design.event_shape[0]:
        got = sizes.tolist()
        raise ValueError(f"`design` must have one k, 1 ≤ k < {design.event_shape[0]} (number of items); got {got}.")
    k, theta = int(sizes[0]), design.logits
    if not bool(theta.detach().isfinite().all()):
        raise ValueError("`design.logits` must be finite; got −inf, +inf or NaN.")
    shape = torch.Size((num_samples, *theta.shape))
    z = theta + noise.gumbel(shape, theta, generator, ops.uniform)
    ranking = z.detach().topk(k).indices
    again = _drawn_given(theta.expand(shape), ranking, noise.gumbel(shape, theta, generator, ops.uniform))
    losses = evaluate(fn, hard_topk(z, k))
    surrogate, control = losses.new_zeros(()), losses.new_zeros(())
    for sign, noisy in ((1, z), (-1, again)):
        soft = sigmoid_topk(noisy, k, temperature=temperature)
        control, slope = evaluate_with_gradient(fn, soft)
        surrogate = surrogate + sign * scale * (slope.detach() * soft).sum(-1)
    weight = losses.detach() - scale * control.detach()  # of z̃, the last
    return with_gradient(losses, surrogate + weight * design.log_prob_of_ranking(ranking), per_row)


def _drawn_given(theta: Tensor, ranking: Tensor, gumbel: Tensor) -> Tensor:
    """Return z̃ ~ θ + Gumbel noise given that its largest are the ranking (…, k), in order; differentiable in θ.

    e^−z is the time at which a clock of rate e^θ rings. The next one rings after an exponential time whose rate is the
    sum of those left, and the others ring later, by a time of their own.
    """
    late = -gumbel  # the logarithm of an exponential time
    chosen = theta.gather(-1, ranking)
    is_rest = torch.ones_like(theta, dtype=torch.bool).scatter(-1, ranking, False)
    rest = torch.where(is_rest, theta, -torch.inf).logsumexp(-1, keepdim=True)
    rates = torch.cat((rest, chosen.flip(-1)), -1).logcumsumexp(-1)[..., 1:].flip(-1)
    times = (late.gather(-1, ranking) - rates).logcumsumexp(-1)
    after = torch.logaddexp(times[..., -1:], late - theta)
    return -after.scatter(-1, ranking, times)
