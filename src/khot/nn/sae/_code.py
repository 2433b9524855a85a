"""Sparse codes: differentiated where they are used, their losses and their metrics."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cosine_similarity

from ..._shape import Group
from ..._sparse import SparseCode, weighted_rows
from ..._torch import entry_products
from ._activity import zipf
from ._axes import AXES, Encoder, Entries, entries
from ._ranks import HERE, Ranks

RIDGE = 1e-3  # of `linear_map`, in units of the variance
SMALLEST = 1e-150  # a length whose square float64 holds; shorter vectors have no direction
EDGES = torch.arange(-6, 0.01, 0.25, device="cpu")  # of the histogram of densities, log10


class SparseAutoencoderOutput(NamedTuple):
    """Hold the output of a `SparseAutoencoder`.

    Args:
        reconstruction: like the input.
        code: which latents are active, a `SparseCode`.
        loss: `fvu` + aux_weight·`aux_loss` + multi_topk·`multi_fvu`, and + k_cost·k if k is learned. With
            `prefixes`, the mean over them stands for `fvu`; "jumprelu" adds l0_weight·(L0/k − 1)².
        fvu: the fraction of the batch's variance that is left unexplained.
        aux_loss: of the dead or underused latents; 0 where there is none, and in evaluation.
        multi_fvu: the fraction with 4k active latents; 0 if it is not asked for, and in evaluation.
    """

    reconstruction: Tensor
    code: SparseCode
    loss: Tensor
    fvu: Tensor
    aux_loss: Tensor
    multi_fvu: Tensor


class Places:
    """Hold where entries are, and their order by latent, found once: the gradients of both matrices need it.

    Args:
        tokens, latents: of each entry, (entries,).
        count: how many latents there are.
        rises: whether tokens rise.
    """

    def __init__(self, tokens: Tensor, latents: Tensor, count: int, *, rises: bool = True) -> None:
        self.tokens, self.latents, self.count, self.rises = tokens, latents, count, rises

    @cached_property
    def by_latent(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the order of rising latents, and the tokens and latents in it."""
        order = _rising(self.latents, self.count)
        return order, self.tokens.index_select(0, order), self.latents.index_select(0, order)


def by_rising(places: Tensor, others: Tensor, values: Tensor, below: int = 2**31) -> Entries:
    """Return all sorted by `places`, which are below a bound, stably."""
    order = _rising(places, below)
    return places.index_select(0, order), others.index_select(0, order), values.index_select(0, order)


def _rising(places: Tensor, below: int) -> Tensor:
    """Return the stable order of integers below a bound, 2³¹ at most; those of fewer bits are sorted faster."""
    return places.to(torch.int16 if below <= 2**15 else torch.int32).argsort(stable=True)


class _Decoded(torch.autograd.Function):
    """Compute `weighted_rows` where many values are 0: those cost nothing but the products of their gradients."""

    @staticmethod
    def forward(ctx: Any, places: Places, values: Tensor, weight: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.places = places
        used = values.nonzero().squeeze(1)
        rows, columns = places.tokens.index_select(0, used), places.latents.index_select(0, used)
        return weighted_rows(rows, columns, values.index_select(0, used), weight, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        order, rows, columns = ctx.places.by_latent  # each row of the weight is then read once
        grad_values = grad_weight = None
        if ctx.needs_input_grad[1]:
            products = entry_products(g, weight, rows, columns)
            grad_values = torch.empty_like(products).index_copy_(0, order, products)
        if ctx.needs_input_grad[2]:
            values = values.index_select(0, order)
            used = values.nonzero().squeeze(1)
            rows, columns, values = (t.index_select(0, used) for t in (rows, columns, values))
            grad_weight = weighted_rows(columns, rows, values, g, len(weight))
        return None, grad_values, grad_weight, None


def decoded(places: Places, values: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return `weighted_rows`, faster where many values are 0 and have a gradient; once differentiable."""
    y: Tensor = _Decoded.apply(places, values.to(weight.dtype), weight, count)
    return y


class _Chosen(torch.autograd.Function):
    """Give entries of x·W + b, already computed, their gradient; x has an origin with a gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, origin: Tensor | None, places: Places, values: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places = places
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        places, count = ctx.places, weight.shape[1]
        grad_x = grad_weight = grad_origin = None
        grad_bias = g.new_zeros(count).index_add_(0, places.latents, g)
        if ctx.needs_input_grad[0]:
            rising: Entries = places.tokens, places.latents, g
            rising = rising if places.rises else by_rising(*rising)
            grad_x = weighted_rows(*rising, weight.t().contiguous(), len(x))
        if ctx.needs_input_grad[1]:  # the same with tokens and latents exchanged
            order, tokens, latents = places.by_latent
            grad_weight = weighted_rows(latents, tokens, g.index_select(0, order), x, count).t()
        if ctx.needs_input_grad[3]:  # Σ over the tokens of −grad_x, without it
            grad_origin = -(weight @ grad_bias)
        return grad_x, grad_weight, grad_bias, grad_origin, None, None


def chosen(
    x: Tensor, weight: Tensor, bias: Tensor, places: Places, values: Tensor, *, origin: Tensor | None = None
) -> Tensor:
    """Return entries of x·weight + bias, as given, with their gradient; neither pass makes a matrix (tokens, latents).

    x is taken as some inputs − origin (d,), where the origin is a constant in x: its gradient costs a product of the
    weight with a vector.
    """
    return _Chosen.apply(x, weight, bias, origin, places, values)  # type: ignore[no-any-return]


def fraction_unexplained(error: Tensor, target: Tensor, ranks: Ranks = HERE) -> Tensor:
    """Return ‖error‖² / ‖target − its mean‖², over all tokens (FVU); 0 if the target does not vary."""
    if ranks.tokens:
        center = ranks.total(target.sum(0), ranks.tokens) / max(1, ranks.count(target))
        deviation = target - ranks.spread(center, ranks.tokens)
        sums = torch.stack((error.square().sum(), deviation.square().sum()))
        unexplained, variance = ranks.total(sums, ranks.tokens).unbind()
    else:
        unexplained, variance = error.square().sum(), (target - target.mean(0)).square().sum()
    return torch.where(variance == 0, 0.0, unexplained / variance.clamp(min=torch.finfo(error.dtype).tiny))


def aux_k_loss(x: Tensor, residual: Tensor, of: Tensor, weights: tuple[Tensor, Tensor, Tensor], most: int) -> Tensor:
    """Return how far the latents `of`, each token's `most` largest of them, are from explaining what the others left.

    `‖e − W_dec·TopK(W_enc·x + b_enc)‖² / ‖e − ē‖²`, over those latents alone; a scalar, 0 if there are none. Reference:
    Gao et al., "Scaling and evaluating sparse autoencoders" (2024).

    Args:
        x: what the encoder sees, (tokens, d).
        residual: e, (tokens, d); taken as constant.
        of: the dead latents, (m,), rising.
        weights: W_enc (d, n), b_enc (n,) and W_dec (n, d); each gets a gradient.
        most: how many of them for a token.

    Examples:
        >>> x, weights = torch.eye(2), (torch.eye(2), torch.zeros(2), torch.eye(2))
        >>> khot.nn.aux_k_loss(x, x, torch.tensor([1]), weights, 1)  # latent 1 explains one token of two
        tensor(1.)
    """
    return explained_by(x, residual, of, weights, most, len(of), HERE) if len(of) else residual.new_zeros(())


def explained_by(
    x: Tensor,
    residual: Tensor,
    of: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    most: int,
    count: int,
    ranks: Ranks,
    origin: Tensor | None = None,
) -> Tensor:
    """Return `aux_k_loss`, where `of` and `weights` are those of this process, and `count` the dead on all of them."""
    residual = residual.detach()
    w_enc, b_enc, w_dec = weights[0].t()[of].t(), weights[1][of], weights[2][of]
    with torch.no_grad():
        encoder = Encoder(x, w_enc, b_enc, len(x), count, ranks)  # a row is a token, whatever their number elsewhere
        blocks = AXES["topk"].candidates(encoder, min(most, count), 1.0, None)
    tokens, latents, values = entries(blocks)
    places = Places(tokens, latents, len(of))
    values = chosen(x, w_enc, b_enc, places, values, origin=origin).relu()
    out = ranks.total(decoded(places, values, w_dec, len(x)), ranks.latents)
    return fraction_unexplained(residual - out, residual, ranks)


def aux_zipf_loss(
    x: Tensor,
    residual: Tensor,
    density: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    most: int,
    *,
    k: float,
    exponent: float = 1.0,
    fraction: float = 0.5,
) -> Tensor:
    """Return `aux_k_loss` of the latents that are active less than `fraction` of what Zipf's law gives their rank.

    Reference: Ayonrinde, "Adaptive sparse allocation with mutual choice and feature choice" (2024).

    Args:
        x, residual, weights, most: as for `aux_k_loss`.
        density: how often each latent is active, (n,).
        k: what the densities of the law sum to.
        exponent: of the law, r^−exponent.
        fraction: 0 leaves none; a tiny one the latents that are never active, which is AuxK.

    Examples:
        >>> x, weights = torch.eye(2), (torch.eye(2), torch.zeros(2), torch.eye(2))
        >>> khot.nn.aux_zipf_loss(x, x, torch.tensor([0.5, 0.0]), weights, 1, k=1.0)
        tensor(1.)
    """
    of = is_underused(density, k, exponent, fraction).nonzero().squeeze(1)
    return aux_k_loss(x, residual, of, weights, most)


def is_underused(density: Tensor, k: float, exponent: float, fraction: float) -> Tensor:
    """Return which latents are active less than `fraction` of what Zipf's law gives their rank; (n,)."""
    return density < fraction * zipf(density, exponent) * k


class SparseAutoencoderMetrics:
    """Measure L0, FVU, cosine, bias of size and activity of an autoencoder in evaluation mode, batch by batch.

    Sums are in float64, and the batches may be of any size: the result is that of all tokens at once.

    Args:
        group: the process group over which tokens are divided; then `result` and `density` are those of all tokens, and
            all processes call them.
        latent_group: that of the autoencoder, if its latents are divided.

    Examples:
        >>> metrics = khot.nn.SparseAutoencoderMetrics()
        >>> config = khot.nn.SparseAutoencoderConfig(d_in=8, latents=32, k=2)
        >>> sae = khot.nn.SparseAutoencoder(config).eval()
        >>> for x in torch.randn(100, 8).split(30):
        ...     metrics.update(sae, x)
        >>> metrics.result()["l0"]
        2.0
    """

    def __init__(self, *, group: Group = None, latent_group: Group = None) -> None:
        self.tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._ranks = Ranks(group, latent_group)

    @torch.no_grad()
    def update(self, sae: Callable[..., Any], x: Tensor, target: Tensor | None = None) -> None:
        """Add a batch (…, d_in) and what an autoencoder, or a function like one, makes of it; a transcoder's target."""
        out, ranks = sae(x) if target is None else sae(x, target), self._ranks
        x = x if target is None else target
        code = out.code
        if getattr(getattr(sae, "ranks", ranks), "latents", []) != ranks.latents:
            raise ValueError("`latent_group` must be that of the autoencoder, whose latents are divided.")
        n, d = code.shape[-1], x.shape[-1]
        whole = int(ranks.sum(torch.tensor(n, device=x.device), ranks.latents))
        x, y = x.reshape(-1, d).double(), out.reconstruction.reshape(-1, d).double()
        is_active = code.values > 0
        per_token = ranks.sum(torch.bincount(code.tokens[is_active], minlength=len(x)), ranks.latents).clamp(max=whole)
        active = torch.bincount(code.latents[is_active], minlength=n).double()
        found = {
            "error": (x - y).square().sum(),
            "mean": x.sum(0),
            "square": x.square().sum(),
            "size": y.square().sum(),
            "product": (x * y).sum(),
            "cosine": cosine_similarity(x, y, dim=1, eps=SMALLEST).sum(),
            "active": ranks.whole(active, whole, 0),
            "l0": torch.bincount(per_token, minlength=whole + 1).double(),
        }
        self.tokens += len(x)
        self._sums = {name: self._sums.get(name, 0) + value for name, value in found.items()}

    def result(self) -> dict[str, Any]:
        """Return numbers and lists, as JSON takes them.

        `fvu` and `explained_variance` (1 − fvu); `l0`, active latents a token, with percentiles; `cosine`, the mean
        over tokens; `relative_reconstruction_bias`, E‖x̂‖²/E⟨x, x̂⟩, below 1 where reconstructions are too small;
        `alive`, the fraction of latents that were active at all; `density_histogram`, latents by log10 of the fraction
        of tokens they are active for, dead ones left out.
        """
        sums, tokens = self._whole()
        density = sums["active"] / tokens
        variance = sums["square"] - sums["mean"].square().sum() / tokens
        fvu = float(sums["error"] / variance)
        logs, up_to = density[density > 0].log10().float(), sums["l0"].cumsum(0)  # tokens with an L0 up to each number
        return {
            "tokens": tokens,
            "fvu": fvu,
            "explained_variance": 1 - fvu,
            "l0": float(sums["active"].sum() / tokens),
            "l0_percentiles": {str(p): int((up_to < p / 100 * up_to[-1]).sum()) for p in (5, 50, 95)},
            "cosine": float(sums["cosine"] / tokens),
            "relative_reconstruction_bias": float(sums["size"] / sums["product"]),
            "alive": float((density > 0).double().mean()),
            "dead": int((density == 0).sum()),
            "density_histogram": {
                "log10_edges": EDGES.tolist(),
                "latents": torch.histogram(logs.clamp(min=EDGES[0].item()), EDGES).hist.long().tolist(),
            },
        }

    def density(self) -> Tensor:
        """Return the fraction of tokens for which each latent is active, (latents,)."""
        sums, tokens = self._whole()
        return sums["active"] / tokens

    def _whole(self) -> tuple[dict[str, Tensor], int]:
        """Return the sums over the tokens of all processes, and how many tokens that are."""
        sums, tokens, ranks = self._sums, self.tokens, self._ranks
        if ranks.tokens and sums:
            sums = {name: ranks.sum(value, ranks.tokens) for name, value in sums.items()}
            tokens = int(sums["l0"].sum())  # every token has one
        if not tokens:
            raise ValueError("Metrics need at least one token; got none: call `update` first.")
        return sums, tokens


def geometric_median(points: Tensor, steps: int = 100) -> Tensor:
    """Return the point with the least sum of distances to (points, d); (d,). Weiszfeld's iteration."""
    center: Tensor = points.mean(0)
    for _ in range(steps):
        distance = (points - center).norm(dim=1).clamp(min=1e-12)
        new: Tensor = (points / distance[:, None]).sum(0) / (1 / distance).sum()
        if (new - center).norm() <= 1e-6 * distance.mean():
            return new
        center = new
    return center


def middle(rows: Tensor, k: float, name: str) -> tuple[Tensor, float]:
    """Return the geometric median, and the power of two (it rounds nothing) that brings k latents to order 1.

    Raises ValueError if the rows differ by so little that the squares of their dtype are 0: the loss would be 0 too.
    """
    center = geometric_median(rows.double()).to(rows.dtype)
    size = float(((rows - center).double().square().sum(1).mean() / k).sqrt())
    least = torch.finfo(rows.dtype).tiny ** 0.5
    if 0 < size < least:
        raise ValueError(f"`{name}` must differ by {least:.2g} or more from row to row; got {size:.2g}: multiply it.")
    return center, 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0


def linear_map(x: Tensor, y: Tensor) -> Tensor:
    """Return the matrix (d, e) that predicts y (n, e) best from x (n, d), by ridge regression."""
    square = x.t() @ x
    square.diagonal().add_(RIDGE * square.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    best: Tensor = torch.linalg.solve(square, x.t() @ y)
    return best
