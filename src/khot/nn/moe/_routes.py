"""Routes: by σ_k, and as models have them: softmax, sigmoid gates with a bias, noise, expert choice, binary codes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from ... import _check, ops
from ..._math import select
from ..._shape import Group
from ..._torch import require_values
from ...designs import Pivotal
from ...relaxations import hard_topk, sigmoid_topk
from ...relaxations import straight_through as straight
from ._routing import Routing, check_bias, check_capacity, check_mask, checked, count_of, over, present, widened

GAMMA = 1.0  # γ, the width of DSelect-k's smooth step


def sigma_topk(
    logits: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    sample: bool | float | Tensor = False,
    straight_through: bool = False,
    normalize: bool = False,
    margin: bool = False,
    generator: torch.Generator | None = None,
) -> Routing:
    """Choose the k largest of `π = σ_k(logits/T)`, Σπ = k for every token, and weight them by π.

    π_i = σ((x_i − τ)/T), and τ depends on all scores: an expert that was not chosen learns through it, and no other
    expert has to run.

    Args:
        logits: (…, n).
        k: experts for each token.
        temperature: T > 0; larger spreads the gradient over more experts.
        bias: (n), prices of experts with the sign changed, added to the logits; see `update_bias`.
        sample: choose k at random instead, expert i with probability π_i exactly. A number s in [0, 1], or a tensor of
            one, samples less: the probability is then s·π_i, plus 1 − s if expert i is one of the k largest. A `Router`
            with `share=` moves s in training.
        straight_through: weights are 1 forward (1/k normalised), with the gradient of π.
        normalize: weights in proportion to `π·exp(logits/T)`, with sum 1: one expert can have nearly all of it, which
            π, at most 1 and k in total, does not allow, and still all scores get a gradient. With k = 1 the weight is
            1, and nothing is learned by it. Scores of +inf share the whole weight equally.
        margin: normalize over the chosen experts and the best one that was not chosen, which has its part of the weight
            and does not run. With k = 1 the weight is then the margin over that one, `σ((x₁ − x₂)/T + log(π₁/π₂))`, in
            [½, 1] if there is no sample. Not with `straight_through`; `normalize` changes nothing then.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        `Routing`, with `probs` π.

    Examples:
        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0], requires_grad=True)
        >>> routing = sigma_topk(x, 2)
        >>> routing.indices, routing.probs.detach().sum().round()
        (tensor([0, 1]), tensor(2.))
        >>> torch.autograd.grad(routing.weights[0], x)[0]  # nothing is 0
        tensor([ 0.1202, -0.0456, -0.0456, -0.0290])
    """
    logits, k = checked(logits, k)
    check_bias(bias, logits.shape[-1])
    if margin and straight_through:
        raise ValueError("`margin` must be False with `straight_through`, whose weights are all equal; got True.")
    probs = sigmoid_topk(logits if bias is None else logits + bias.detach(), k, temperature=temperature)
    indices = probs.detach().topk(k, -1).indices
    if sample is not False and probs.numel():
        wanted = probs.detach().to(torch.float64).nan_to_num(k / probs.shape[-1])  # the weights will tell of NaN
        if sample is not True:
            wanted = torch.zeros_like(wanted).scatter(-1, indices, 1.0).lerp(wanted, _share(sample, wanted))
        indices = select.order(Pivotal(wanted, k, validate_args=False).sample(generator=generator))[..., :k]
    if margin and k < probs.shape[-1]:  # the best of the rest is the last
        best = probs.detach().scatter(-1, indices, -1.0).argmax(-1, keepdim=True)
        both = torch.cat([indices, best], -1)
        weights = _normalized(logits.gather(-1, both), probs.gather(-1, both), temperature)[..., :k]
        return Routing(logits, weights, indices, probs)
    weights = probs.gather(-1, indices)
    if straight_through:
        weights = straight(torch.ones_like(weights), weights)
        weights = weights / k if normalize else weights
    elif normalize or margin:
        weights = _normalized(logits.gather(-1, indices), weights, temperature)
    return Routing(logits, weights, indices, probs)


def _share(sample: float | Tensor, like: Tensor) -> Tensor:
    """Return how much of the choice is sampled, a number in [0, 1], as a tensor."""
    if isinstance(sample, Tensor):
        _check.floating("sample", sample)
        if sample.numel() != 1:
            raise ValueError(f"`sample` must be one number; got a tensor of shape {tuple(sample.shape)}.")
    else:
        _check.fraction("sample", sample)
    return torch.as_tensor(sample, dtype=like.dtype, device=like.device).detach().reshape(())


def _normalized(x: Tensor, probs: Tensor, temperature: float | Tensor) -> Tensor:
    """Return weights in proportion to `π·exp(x/T)`, (…, k); in their limit where scores are +inf."""
    heat = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    is_infinite = x == torch.inf
    has_infinite = is_infinite.any(-1, keepdim=True)
    log_probs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()  # 0 would make the gradient NaN
    exponent = x.masked_fill(has_infinite, 0.0) / heat + log_probs
    limit = torch.zeros_like(x).masked_fill(~is_infinite, -torch.inf)
    return torch.where(has_infinite, limit, exponent).softmax(-1)


def balanced_sigma_topk(
    logits: Tensor,
    k: int,
    *,
    capacity: float | None = None,
    temperature: float | Tensor = 1.0,
    sample: bool | float | Tensor = False,
    straight_through: bool = False,
    normalize: bool = False,
    margin: bool = False,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    group: Group = None,
) -> Routing:
    """Route by σ_k with prices: rows of π sum to k, and no column to more than the capacity.

    `max ⟨logits, π⟩ − T·ΣΩ(π)` with Σ_i π_ti = k and Σ_t π_ti ≤ c: a threshold for each token, and a price ≥ 0 for each
    expert, by Newton's method. The prices are constants to the gradient.

    Args:
        logits: (…, n); all leading dimensions are tokens.
        k: experts for each token.
        capacity: the expected load of an expert at most, ≥ k·tokens/n; None for just that, an equal load for all.
        temperature: T > 0, one for all tokens.
        sample: as for `sigma_topk`; then loads are met in expectation, otherwise by π.
        straight_through, normalize, margin, generator: as for `sigma_topk`.
        mask: (…), True for tokens, False for padding, which goes to no expert and counts for no load.
        group: the process group whose processes hold the tokens of one batch, as under DDP; then capacity and prices
            are those of all its tokens.

    Returns:
        `Routing`, with `probs` π. It looks at all tokens of the call at once, so it is not causal.

    Examples:
        >>> balanced_sigma_topk(torch.tensor([[2.0, 1.0, 0.0], [3.0, 1.0, 0.0]]), 1, capacity=1.0).probs.sum(0)
        tensor([1.0000, 0.6796, 0.3204])
    """
    logits, k = checked(logits, k)
    _check.positive("temperature", temperature)
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        raise ValueError(f"`temperature` must be one number; got a tensor of shape {tuple(temperature.shape)}.")
    n = logits.shape[-1]
    check_mask(mask, logits)
    counted = logits.detach().to(torch.float64).reshape(-1, n)
    total = over(group, "`balanced_sigma_topk`")
    if capacity is not None:
        capacity = check_capacity(capacity, count_of(counted, mask, total), n, k)
    if mask is not None:
        counted = counted.masked_fill(~mask.reshape(-1, 1), torch.nan)  # which prices leave out
    heat = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device).detach().reshape(())
    price = ops.prices(counted, k, capacity, heat, total)
    how: Any = {"sample": sample, "straight_through": straight_through, "normalize": normalize, "margin": margin}
    bias = -price.to(logits.dtype)
    return present(sigma_topk(logits, k, temperature=temperature, bias=bias, generator=generator, **how), mask)


def softmax_topk(logits: Tensor, k: int, *, bias: Tensor | None = None, normalize: bool = True) -> Routing:
    """Choose the k largest of a softmax, as in Mixtral; normalised, it is a softmax over the chosen alone.

    Then scores of experts that are not chosen get no gradient: `w = softmax(KeepTopK(logits))`.

    Args:
        logits: (…, n).
        k: experts for each token.
        bias: (n), added to the softmax for the choice, and not to the weights, as in Ernie 4.5; see `update_bias`.
        normalize: divide the weights by their sum, as `norm_topk_prob` does; with k = 1 they are 1 then.

    Returns:
        `Routing`, with `probs` the softmax over all.

    Examples:
        >>> softmax_topk(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2).weights
        tensor([0.7311, 0.2689])
    """
    logits, k = checked(logits, k)
    probs = logits.softmax(-1)
    wanted = logits.detach() if bias is None else _with_bias(logits, probs, bias)  # probabilities may underflow
    return _weighted(logits, logits, probs, wanted.topk(k, -1).indices, normalize)


def sigmoid_gates(logits: Tensor, k: int, *, bias: Tensor | None = None, normalize: bool = True) -> Routing:
    """Choose by sigmoid gate plus bias and weight by the gate alone: loss-free balancing, as in DeepSeek-V3.

    This is what "sigmoid top-k" means in mixture-of-experts code, not σ_k: gates do not know of each other.

    Args:
        logits: (…, n).
        k: experts for each token.
        bias: (n), see `update_bias`; None for zeros.
        normalize: divide the weights by their sum.

    Returns:
        `Routing`, with `probs` the gates.

    Examples:
        >>> sigmoid_gates(torch.tensor([2.0, 1.0, 0.0]), 1, bias=torch.tensor([0.0, 0.5, 0.0])).indices
        tensor([1])
    """
    logits, k = checked(logits, k)
    gates = logits.sigmoid()
    return _weighted(logits, logsigmoid(logits), gates, _with_bias(logits, gates, bias).topk(k, -1).indices, normalize)


def _with_bias(logits: Tensor, probs: Tensor, bias: Tensor | None) -> Tensor:
    """Return what to choose by: probabilities plus the bias, and −inf where the score is, whatever the bias."""
    check_bias(bias, logits.shape[-1])
    wanted = probs.detach() if bias is None else probs.detach() + bias.detach()
    return wanted.masked_fill(logits == -torch.inf, -torch.inf)


def _weighted(logits: Tensor, log_probs: Tensor, probs: Tensor, indices: Tensor, normalize: bool) -> Routing:
    """Weigh the chosen; normalised by their logarithms, since all of them may underflow."""
    weights = log_probs.gather(-1, indices).softmax(-1) if normalize else probs.gather(-1, indices)
    return Routing(logits, weights, indices, probs)


def noisy_topk(
    logits: Tensor, k: int, *, normalize: bool = True, training: bool = True, generator: torch.Generator | None = None
) -> Routing:
    """Apply `softmax_topk` to noisy scores, `h = x + ε·softplus(s)`, ε ~ N(0, 1).

    Reference: Shazeer et al., "Outrageously large neural networks" (2017).

    Args:
        logits: (…, 2n): scores x, then the raw scales s of the noise.
        k: experts for each token.
        normalize: divide the weights by their sum.
        training: whether there is noise.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        `Routing` with n experts and noisy `logits`.

    Examples:
        >>> noisy_topk(torch.tensor([2.0, 1.0, 0.0, 0.0]), 1, generator=torch.Generator().manual_seed(0)).indices
        tensor([0])
    """
    _check.scores(logits, -1, "logits")
    if logits.shape[-1] % 2:
        raise ValueError(f"`logits` must have 2n entries, scores and scales; got {logits.shape[-1]}.")
    x, raw = widened(logits).chunk(2, -1)
    if training:
        _check.generator(generator)
        x = x + torch.empty_like(x).normal_(generator=generator) * softplus(raw)
    return softmax_topk(x, k, normalize=normalize)


vars(noisy_topk)["width"] = lambda n, k: 2 * n


def expert_choice(logits: Tensor, k: int, *, mask: Tensor | None = None, group: Group = None) -> Routing:
    """Let every expert take the k·tokens/n tokens (rounded up) that want it most: the load is equal.

    A token may be taken by no expert, or by all. It looks at all tokens of the call at once, so it is not causal.
    Reference: Zhou et al., "Mixture-of-experts with expert choice routing" (2022).

    Args:
        logits: (…, n); all leading dimensions are tokens.
        k: experts for each token on average.
        mask: (…), True for tokens, False for padding, which no expert takes.
        group: the process group whose processes hold the tokens of one batch, as under DDP; an expert then chooses
            among all of them.

    Returns:
        `Routing`, with `probs` the softmax over experts, and as many slots as the busiest token needs.

    Examples:
        >>> khot.nn.routing.load(expert_choice(torch.tensor([[2.0, 1.0], [3.0, 1.0]]), 1))
        tensor([1, 1])
    """
    logits, k = checked(logits, k)
    n = logits.shape[-1]
    check_mask(mask, logits)
    require_values("How many experts a token has", logits)
    probs = logits.softmax(-1)
    flat = probs.reshape(-1, n)  # (tokens, n)
    tokens = count_of(flat, mask, over(group, "`expert_choice`"))
    count = min(tokens, -(-k * tokens // n))
    wanted = flat.detach() if mask is None else flat.detach().masked_fill(~mask.reshape(-1, 1), -1.0)
    if group is None:
        taken = torch.zeros_like(flat, dtype=torch.bool).scatter_(0, wanted.topk(count, 0).indices, True)
    else:
        taken = hard_topk(wanted, count, dim=0, group=group) > 0
    slots = int(taken.sum(-1).max()) if len(flat) else k
    order = torch.where(taken, flat.detach(), -1.0).topk(max(1, slots), -1).indices
    is_taken = taken.gather(-1, order)
    indices, weights = torch.where(is_taken, order, n), flat.gather(-1, order) * is_taken
    shape = (*logits.shape[:-1], order.shape[-1])
    return present(Routing(logits, weights.reshape(shape), indices.reshape(shape), probs), mask)


def _bits(n: int) -> int:
    """Return how many binary digits number n experts."""
    return max(1, (n - 1).bit_length())


def dselect_k(logits: Tensor, k: int, *, num_experts: int) -> Routing:
    """Mix k slots, each a smooth binary code of an expert, by a softmax: at most k experts once codes are sharp.

    `g = Σ_s softmax(w)_s r(z_s)`, `r(z)_i = Π_b S(z_b)` or `1 − S(z_b)` by the binary digits of i, where S is a smooth
    step, exactly 0 and 1 outside [−½, ½]. Reference: Hazimeh et al., "DSelect-k" (2021).

    Args:
        logits: (…, k·m + k): codes z of m = ⌈log₂ n⌉ digits for each slot, then the slots' weights w.
        k: slots.
        num_experts: n.

    Returns:
        `Routing` with the n gates as `probs` and `logits`, and as many slots as have a positive gate: until codes are
        sharp, that may be all experts. Gates sum to 1 if n is a power of two; else to less, because the codes that
        number no expert take their part.

    Examples:
        >>> dselect_k(torch.tensor([1.0, -1.0, 0.0]), 1, num_experts=4).indices  # the code 01, lowest digit first
        tensor([1])
    """
    _check.at_least("num_experts", num_experts, 1)
    _check.at_least("k", k, 1)
    k, m = int(k), _bits(int(num_experts))
    _check.last_dim("logits", logits, k * m + k)
    x = widened(logits)
    t = x[..., : k * m].unflatten(-1, (k, m)).clamp(-GAMMA / 2, GAMMA / 2)
    codes = -2 * t**3 / GAMMA**3 + 3 * t / (2 * GAMMA) + 0.5  # a cubic between 0 below −γ/2 and 1 above γ/2; (…, k, m)
    digits = torch.arange(num_experts, device=x.device)[:, None] >> torch.arange(m, device=x.device) & 1  # (n, m)
    each = torch.where(digits.bool(), codes[..., None, :], 1 - codes[..., None, :]).prod(-1)  # (…, k, n)
    gates = (x[..., k * m :].softmax(-1)[..., None] * each).sum(-2)
    require_values("How many experts a token has", gates)
    slots = max(1, int((gates > 0).sum(-1).max())) if gates.numel() else k
    weights, indices = gates.topk(slots, -1)
    return Routing(gates, weights, torch.where(weights > 0, indices, num_experts), gates)


vars(dselect_k)["width"] = lambda n, k: k * _bits(n) + k
