"""The law p(x) ∝ exp(θ·x) of k-subsets: its normaliser, marginals and covariance, θ for given marginals, and samples.

The caller passes `margins(θ, k)`, which returns the z = θ + λ with Σσ(z) = k (`khot.ops.sigmoid_margins`).
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from . import subsets
from .counts import by_products
from .noise import Uniform

Margins = Callable[[Tensor, Tensor], Tensor]  # (scores (…, n), k (…)) → z (…, n)
AlongTree = Callable[[Tensor, Tensor, Tensor, int, int, int], Tensor]  # as `along_tree`, for one kind of uniforms
STEPS, INNER_STEPS, TRIES, KEPT = 100, 60, 8, 4
TOLERANCE, NEARLY_CERTAIN = 1e-13, 1e-12
STEEP = 300.0  # e^z is not summed beyond
AT_ONCE = 1 << 22  # numbers at a time along the tree
OFF = 0.25  # by how much the mean of the count may miss k before θ is tilted again
FEW = 128  # items, to multiply polynomials of
ROWS_AT_ONCE = 1 << 15  # numbers, in whole rows, to solve for at a time
DIRECT = 16  # up to this length, distributions are convolved term by term; beyond, by FFT


def tilt(theta: Tensor, k: Tensor, margins: Margins) -> tuple[Tensor, Tensor]:
    """Return z = θ + λ with Σσ(z) = k, and λ (…); z has the gradient of θ, because nothing depends on λ.

    z is ±inf where an item is certainly drawn or never; λ is 0 where that holds for all.
    """
    with torch.no_grad():
        z = margins(theta.detach(), k)
        distance = torch.where(z.isfinite(), z.abs(), torch.inf)
        nearest = distance.argmin(-1, keepdim=True)
        is_finite = distance.gather(-1, nearest).isfinite()
        shift = torch.where(is_finite, z.gather(-1, nearest) - theta.gather(-1, nearest), 0.0)
    return torch.where(z.isfinite(), theta + shift, z), shift[..., 0]


def log_normaliser(
    theta: Tensor, k: Tensor, margins: Margins, whole: subsets.Whole = subsets.HERE
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Σ over k-subsets of exp(θ·x) (…), and also z (…, n) and log P(S = k) (…) of independent draws.

    An item with θ = +inf is in every subset, with weight 1.
    """
    z, shift = tilt(theta, k, margins)
    is_forced, is_open = theta == torch.inf, z.isfinite()
    # An item that must be drawn, because k is all that is left, counts with its θ alone.
    taken = torch.where((z == torch.inf) & ~is_forced, theta, 0.0)
    free = -logsigmoid(-torch.where(is_open, z, 0.0)) * is_open
    log_size = subsets.log_size(subsets.counts(z, k, whole=whole))
    return log_size + (free + taken).sum(-1) - (k - is_forced.sum(-1)) * shift, z, log_size


def counts(theta: Tensor, k: Tensor, margins: Margins) -> subsets.Counts:
    """Return the characteristic function of the number drawn, from which moments follow."""
    return subsets.counts(tilt(theta, k, margins)[0], k)


def marginals(theta: Tensor, k: Tensor, margins: Margins, whole: subsets.Whole = subsets.HERE) -> Tensor:
    """Return P(x_i = 1); (…, n)."""
    return subsets.marginals(subsets.counts(tilt(theta, k, margins)[0], k, whole=whole), whole)


def solve(p: Tensor, k: Tensor, margins: Margins, whole: subsets.Whole = subsets.HERE) -> Tensor:
    """Return θ such that the marginals are p, with Σσ(θ) = k; ±inf where p is 0 or 1.

    The odds of item i are e^θ times P(others: k − 1)/P(others: k). A step adds to θ what the logits of the marginals
    lack, which shrinks the error by about 1/Σp(1 − p), and more with what the last steps have shown (Anderson mixing).
    Where it shrinks by less than 4, the step is Newton's for those logits, which are nearly linear in θ however close
    to 0 or 1 the marginals are.
    """
    n = p.shape[-1]
    width = max(ROWS_AT_ONCE // n, 1)
    parts = zip(p.reshape(-1, n).split(width), k.expand(p.shape[:-1]).reshape(-1).split(width), strict=True)

    def tilted(theta: Tensor, k: Tensor) -> Tensor:
        return tilt(theta, k, margins)[0]

    return torch.cat([solve_parts(rows, sizes, tilted, n, whole) for rows, sizes in parts]).view(p.shape)


def solve_parts(p: Tensor, k: Tensor, tilted: Margins, n: int, whole: subsets.Whole) -> Tensor:
    """Solve for a part (rows, m) of each row of n items, each row until it is done; `tilted(θ, k)` returns z."""
    goal = torch.logit(p)
    theta, is_open = goal.clone(), goal.isfinite().any(-1)
    left = (is_open if whole.is_one else torch.ones_like(is_open)).nonzero()[:, 0]  # all parts go on with the same rows
    last, is_newton = torch.full_like(k[left], torch.inf), torch.zeros_like(left, dtype=torch.bool)
    past: list[tuple[Tensor, Tensor]] = []
    for _ in range(STEPS if len(left) else 0):
        z, size = theta[left], k[left]
        if not past or bool(((whole.add(z.sigmoid().sum(-1)) - size).abs() > OFF).any()):
            z = tilted(z, size)
        others = whole.is_one and n <= FEW
        at = None if others else subsets.counts(z, size, n, whole)
        less, same = _others(z, size) if at is None else subsets.without(at, whole)
        lack = torch.where(goal[left].isfinite(), goal[left] - z - (less / same).log(), 0.0)
        spread = z.sigmoid() * less * torch.sigmoid(-z) * same
        pulled, mass = (whole.add(t.sum(-1, keepdim=True)) for t in (spread * lack, spread))
        lack = lack - pulled / mass.clamp(min=1e-300)
        error = whole.largest(lack.abs().amax(-1))
        is_rounding = is_newton & (error > last / 2) & (error < 1e-9)
        goes_on = ((error > torch.where(is_newton, TOLERANCE / 10, TOLERANCE)) & ~is_rounding).nonzero()[:, 0]
        is_near = (error <= TOLERANCE) & ~is_newton  # by a step that contracts: one more costs nothing
        theta[left] = torch.where(goal[left].isfinite() & is_near[:, None], z + lack, theta[left])
        if len(goes_on) == 0:
            break
        is_newton = (error > last / 4)[goes_on]
        left, last, z, lack, spread = (t[goes_on] for t in (left, error, z, lack, spread))
        past = [(z, lack), *((a[goes_on], b[goes_on]) for a, b in past[:KEPT])]
        from_here, step = _mixed(past, whole)
        if is_newton.any():
            hard = goes_on[is_newton]
            counts = (
                subsets.counts(z[is_newton], size[hard], n, whole)
                if at is None
                else subsets.Counts(*(t[hard] for t in at))
            )
            step[is_newton] = covariance_solve(counts, (spread * lack)[is_newton], whole)
            from_here[is_newton] = z[is_newton]
        theta[left] = torch.where(goal[left].isfinite(), from_here + step, goal[left])
    return torch.where(goal.isfinite(), tilted(theta, k), goal)


def _others(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(others: k − 1) and P(others: k) for each of few items, relative to P(all: k); (rows, n)."""
    up, down = z.mT.sigmoid(), z.mT.neg().sigmoid()
    less, same = (by_products(up, down, place, int(place.max()) + 1) for place in (k - 1, k))
    total = up[0] * less[0] + down[0] * same[0]
    return (less / total).mT, (same / total).mT


def _mixed(past: list[tuple[Tensor, Tensor]], whole: subsets.Whole) -> tuple[Tensor, Tensor]:
    """Return where to step from, and how far, from the last places and their steps (rows, m), the newest first.

    The place is a mean of the last ones whose steps, by the same mean, are the shortest.
    """
    z, step = past[0]
    used: list[tuple[Tensor, Tensor]] = []
    for (a, f), (b, g) in pairwise(past):
        moved, change = a - b, f - g
        for other_moved, other in used:
            share = _share(change, other, whole)
            moved, change = moved - share * other_moved, change - share * other
        used.append((moved, change))
        share = _share(step, change, whole)
        z, step = z - share * moved, step - share * change
    return z, step


def _share(a: Tensor, b: Tensor, whole: subsets.Whole) -> Tensor:
    """Return how much of b is in a; 0 if there is no b; (rows, 1)."""
    size = whole.add((b * b).sum(-1, keepdim=True))
    return torch.where(size > 0, whole.add((a * b).sum(-1, keepdim=True)) / size.clamp(min=1e-300), 0.0)


def covariance_solve(counts: subsets.Counts, r: Tensor, whole: subsets.Whole = subsets.HERE) -> Tensor:
    """Return the v with Cov(x) v = r and Σv = 0, by conjugate gradients; items that are certain have v = 0.

    Cov is singular along 1, so the residuals are kept at a sum of 0; a row stops once it is solved to rounding. Items
    that are certain but for 1e-12 are solved alone: what joins them to others is below the rounding of Cov v.
    """

    def total(t: Tensor) -> Tensor:
        return whole.add(t.sum(-1, keepdim=True))

    less, same = subsets.without(counts, whole)
    spread = subsets.spread(counts, less, same)
    is_open = spread > NEARLY_CERTAIN
    scale = torch.where(spread > 0, 1 / torch.where(spread > 0, spread, 1.0), 0.0)
    alone = torch.where(is_open, 0.0, scale * r)
    share = torch.where(is_open, spread, 0.0)
    share = share / total(share).clamp(min=1e-300)

    def balanced(t: Tensor) -> Tensor:
        t = torch.where(is_open, t, 0.0)
        return t - share * total(t)

    r, v = balanced(r), torch.zeros_like(r)
    direction = scale * r  # r is 0 where it is not open
    power = start = total(r * direction)
    is_live = power > 0
    for _ in range(INNER_STEPS):
        if not is_live.any():
            break
        image = subsets.covariance_product(counts, direction, whole)
        curvature = total(direction * image)
        is_live = is_live & (curvature > 0)
        size = torch.where(is_live, power / torch.where(is_live, curvature, 1.0), 0.0)
        v = v + size * direction
        r = balanced(r - size * image)
        y = scale * r
        next_power = total(r * y)
        is_live = is_live & (next_power > 1e-29 * start)
        ratio = torch.where(is_live, next_power / torch.where(is_live, power, 1.0), 0.0)
        direction, power = y + ratio * direction, next_power
    return torch.where(is_open, v - total(v) / total(is_open.to(v.dtype)).clamp(min=1), alone)


def draw(z: Tensor, k: Tensor, seed: Tensor, draws: int, uniform: Uniform, along_tree: AlongTree) -> Tensor:
    """Draw `draws` k-hot samples of each row of z (rows, n), tilted: Σσ(z) = k; (draws, rows, n) float64.

    Few of many items are drawn one by one, with replacement, until they differ, `TRIES` times. All others, and what
    failed, are drawn along the tree of counts. The law is the same.
    """
    (rows, n), most = z.shape, int(k.max())
    result = z.new_zeros(draws, rows, n)
    is_left = torch.ones(draws, rows, dtype=torch.bool, device=z.device)
    if 0 < 4 * most * most <= n:
        chosen, is_left = _one_by_one(z, k, most, seed, draws, uniform)
        result = z.new_zeros(draws, rows, n + 1).scatter_(-1, chosen, 1.0)[..., :n]  # n stands for none
    width, stream = max(AT_ONCE // (n * n.bit_length()), 1), TRIES
    for first in range(0, rows, width):
        part = slice(first, first + width)
        if not bool(is_left[:, part].any()):
            continue
        needed, group = is_left[:, part].any(-1).nonzero()[:, 0], max(AT_ONCE // (n * len(z[part])), 1)
        sample = along_tree(z[part].sigmoid(), k[part], seed, stream, len(needed), group)
        stream += -(-len(needed) // group) * (n - 1).bit_length()
        if width >= rows and bool(is_left.all()):
            return sample
        result[needed, part] = torch.where(is_left[needed, part][..., None], sample, result[needed, part])
    return result


def _one_by_one(z: Tensor, k: Tensor, most: int, seed: Tensor, draws: int, uniform: Uniform) -> tuple[Tensor, Tensor]:
    """Return indices (draws, rows, most), n where there is none; and whether no try succeeded (draws, rows)."""
    rows, n = z.shape
    is_steep = z.amax(-1) > STEEP
    running = z.masked_fill(is_steep[:, None], 0.0).exp().cumsum(-1)
    is_left = torch.ones(draws, rows, dtype=torch.bool, device=z.device)
    result = torch.full((draws, rows, most), n, device=z.device)
    is_used = torch.arange(most, device=z.device) < k[:, None]
    for stream in range(TRIES):
        u = uniform(seed, stream, draws * rows * most).view(rows, draws * most)
        place = torch.searchsorted(running, u * running[:, -1:], right=True).clamp(max=n - 1)
        chosen = torch.where(is_used, place.view(rows, draws, most).transpose(0, 1), n)
        ranked = chosen.sort(-1).values
        is_new = is_left & ((ranked.diff() != 0) | (ranked[..., 1:] == n)).all(-1) & ~is_steep
        result = torch.where(is_new[..., None], chosen, result)
        is_left = is_left & ~is_new
        if not bool(is_left.any()):
            break
    return result, is_left


def along_tree(p: Tensor, k: Tensor, seed: Tensor, stream: int, draws: int, group: int, uniform: Uniform) -> Tensor:
    """Draw from p (rows, n) along the tree of counts, a group of draws at a time; (draws, rows, n)."""
    levels, parts = build_tree(p, int(k.max())), []
    for first in range(0, draws, group):
        some = min(group, draws - first)
        sample, stream = sample_tree(levels, k.expand(some, -1), seed, stream, uniform)
        parts.append(sample[..., : p.shape[-1]].to(p.dtype))
    return torch.cat(parts)


class Node(NamedTuple):
    """Hold the nodes of one level of the tree of counts; each has the distribution of its number of ones."""

    mass: Tensor  # (…, nodes, size + 1) P(number of ones), within [least, most]
    least: Tensor  # (…, nodes) how many are certainly ones
    most: Tensor  # (…, nodes) how many can be


def build_tree(p: Tensor, most: int) -> list[Node]:
    """Return the levels from the leaves (…, n), filled up to a power of two, to the root, for counts up to `most`."""
    n = p.shape[-1]
    p = pad(p, (0, (1 << max(n - 1, 0).bit_length()) - n))
    return grow([Node(torch.stack((1 - p, p), -1), (p == 1).long(), (p > 0).long())], most)


def grow(levels: list[Node], most: int) -> list[Node]:
    """Add the levels up to the root to one of 2^m nodes, for counts up to `most`."""
    while levels[-1].mass.shape[-2] > 1:
        below = levels[-1]
        left, right = below.mass.unflatten(-2, (-1, 2)).unbind(-2)
        least, greatest = (bound.unflatten(-1, (-1, 2)).sum(-1) for bound in (below.least, below.most))
        mass = _convolved(left, right)[..., : most + 1]
        place = torch.arange(mass.shape[-1], device=mass.device)
        is_possible = (place >= least[..., None]) & (place <= greatest[..., None])  # which an FFT does not know
        levels.append(Node(torch.where(is_possible, mass.clamp(min=0), 0.0), least, greatest))
    return levels


def sample_tree(levels: list[Node], k: Tensor, seed: Tensor, stream: int, uniform: Uniform) -> tuple[Tensor, int]:
    """Return counts of the leaves (draws, …, n filled up) for integers `k` (draws, …), and the next unused stream.

    A node with c ones gives j of them to its left child with probability ∝ P_left(j) P_right(c − j). O(n log n).
    """
    count = k.long()[..., None]
    for below in reversed(levels[:-1]):
        left, right = below.mass.unflatten(-2, (-1, 2)).unbind(-2)  # (…, nodes, size + 1)
        least, least_right = below.least.unflatten(-1, (-1, 2)).unbind(-1)
        most, most_right = below.most.unflatten(-1, (-1, 2)).unbind(-1)
        size = left.shape[-1]
        rest = count[..., None] - torch.arange(size, device=k.device)  # (draws, …, nodes, size + 1)
        is_possible = (rest >= 0) & (rest < size)
        other = right.expand(rest.shape).gather(-1, rest.clamp(0, size - 1))
        running = (left * torch.where(is_possible, other, 0.0)).cumsum(-1)
        coin = uniform(seed, stream, count.numel()).view(count.shape) * running[..., -1]
        stream += 1
        first = (running <= coin[..., None]).sum(-1)
        first = torch.maximum(torch.minimum(first, torch.minimum(most, count - least_right)), least)
        first = torch.maximum(first, count - most_right)
        count = torch.stack((first, count - first), -1).flatten(-2)
    return count, stream


def _convolved(a: Tensor, b: Tensor) -> Tensor:
    size, length = a.shape[-1], 2 * a.shape[-1] - 1
    if size > DIRECT + 1:
        product: Tensor = torch.fft.irfft(torch.fft.rfft(a, n=length) * torch.fft.rfft(b, n=length), n=length)
        return product
    result = a.new_zeros(*a.shape[:-1], length)
    for j in range(size):
        result[..., j : j + size] += a[..., j : j + 1] * b
    return result
