"""Sparse autoencoders: one selection on three axes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from .. import _check
from . import _sae_axes, _sae_files, selectors
from ._sae_activity import Activity
from ._sae_axes import Block, Encoder
from ._sae_config import SparseAutoencoderConfig, SparseAutoencoderOutput
from ._sae_losses import aux_k_loss, aux_zipf_loss, fraction_unexplained
from ._sae_start import geometric_median, power_of_two, unit_rows
from ._sparse_code import SparseCode, by_rising_token, chosen, from_dense, weighted_rows

MULTI = 4
"""Multi-TopK selects this many times k as well."""
EPSILON = 1e-5
"""Added to a token's deviation by `layer_norm`, as SAELens does."""


class SparseAutoencoder(nn.Module):
    """A wide code of few active latents: `z = ReLU(a) ⊙ select(a)` with `a = W_enc·(x − b_dec) + b_enc`.

    `x̂ = W_dec·z + b_dec`, the rows of W_dec being of length 1. What is active is chosen along the axis `config.kind` by
    a selector. Evaluation is hard whatever the selector: the k greatest for "topk", else what exceeds a running
    threshold, so that the code of a token does not depend on its batch. In training mode, forward keeps count of what
    is active. Codes are sparse: decoding reads the rows of active latents alone, and no pass holds a matrix (tokens,
    latents).

    Args:
        config: the sizes and the losses.
        selector: one of `khot.nn.selectors`, or a function like them.
        generator: of the initial weights.

    Examples:
        >>> config = khot.nn.SparseAutoencoderConfig(d_in=8, latents=32, k=2)
        >>> sae = khot.nn.SparseAutoencoder(config, generator=torch.Generator().manual_seed(0)).eval()
        >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
        >>> sae(x).reconstruction.shape, sae.encode(x).dense().count_nonzero(-1)
        (torch.Size([5, 8]), tensor([2, 2, 2, 2, 2]))
    """

    temperature: Tensor
    scale: Tensor

    def __init__(
        self,
        config: SparseAutoencoderConfig,
        *,
        selector: selectors.Selector = selectors.straight_through,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check.instance("config", config, SparseAutoencoderConfig)
        self.config, self.selector = config, selector
        n = config.latents
        rows = unit_rows(n, config.d_in, generator)
        self.W_enc = nn.Parameter(rows.clone().t())  # stored by latent, as `chosen` wants it
        self.b_enc = nn.Parameter(torch.zeros(n))
        self.W_dec = nn.Parameter(rows)
        self.b_dec = nn.Parameter(torch.zeros(config.d_in))
        self.k: float | nn.Parameter = nn.Parameter(torch.tensor(float(config.k))) if config.learn_k else config.k
        self.register_buffer("temperature", torch.tensor(config.temperature))
        self.register_buffer("scale", torch.ones(()))
        self._least_k = 0.0
        self.activity = Activity(n, config.kind, config.zipf if config.kind == "feature" else 0.0)

    @torch.no_grad()
    def start(self, x: Tensor) -> Self:
        """Take the scale of inputs, b_dec (their geometric median) and the size of W_enc from samples (…, d_in)."""
        inputs, _ = self._inputs(x)
        _check.samples("x", inputs)
        center = geometric_median(inputs.double()).to(inputs.dtype)
        spread = (inputs - center).square().sum(1).mean() / _sae_axes.number(self.k)
        self.scale.fill_(power_of_two(float(spread.sqrt())))
        self.b_dec.copy_(center / self.scale)
        self.W_enc.copy_(self.W_dec.t())
        centred = self._centred(inputs)
        k, encoder = max(1, round(_sae_axes.number(self.k))), self._encoder(centred)
        if self.config.kind == "topk":
            blocks = _sae_axes.by_token(encoder, k, 1.0)
        else:
            blocks = _sae_axes.by_batch(encoder, k * len(centred), 1.0)
        a, tokens, latents = _sae_axes.entries(blocks)
        out = weighted_rows(*by_rising_token(a.relu(), tokens, latents), self._cast(self.W_dec), len(centred))
        size = (centred * out).sum() / out.square().sum()  # of the best multiple
        if size > 0:
            self.W_enc.mul_(size)
        return self

    def encode(self, x: Tensor, *, generator: torch.Generator | None = None) -> SparseCode:
        """Inputs (…, d_in) to their code; the generator is for a random selector."""
        inputs, undo = self._inputs(x)
        centred = self._centred(inputs)
        blocks = self._blocks(self._encoder(centred))
        a = self._preactivations(centred, blocks)
        code = self._code(blocks, a, self._selected(blocks, a, generator), len(inputs))
        return code._replace(shape=(*x.shape[:-1], self.config.latents), undo=undo)

    def decode(self, code: SparseCode | Tensor) -> Tensor:
        """A code, sparse or dense (…, latents), to (…, d_in)."""
        if isinstance(code, Tensor):
            _check.last_dim("code", code, self.config.latents)
            code = from_dense(code)
        out = weighted_rows(code.values, code.tokens, code.latents, self._cast(self.W_dec), code.rows)
        out = out + self.scale * self.b_dec
        if code.undo is not None:
            out = out * code.undo[1] + code.undo[0]
        return out.view(*code.shape[:-1], self.config.d_in)

    def forward(self, x: Tensor, *, generator: torch.Generator | None = None) -> SparseAutoencoderOutput:
        """Inputs (…, d_in) to their reconstruction, code and losses; the generator is for a random selector."""
        inputs, undo = self._inputs(x)
        centred = self._centred(inputs)
        encoder = self._encoder(centred)
        blocks = self._blocks(encoder)
        a = self._preactivations(centred, blocks)
        code = self._code(blocks, a, self._selected(blocks, a, generator), len(inputs))
        out = self.decode(code)
        fvu = fraction_unexplained(inputs - out, inputs)
        loss, aux, multi = fvu, fvu.new_zeros(()), fvu.new_zeros(())
        if self.training:
            aux = self._aux_loss(centred, (inputs - out) / self.scale)
            if self.config.multi_topk:
                more = self.decode(self._code(blocks, a, _sae_axes.greatest(blocks, MULTI), len(inputs)))
                multi = fraction_unexplained(inputs - more, inputs)
            loss = fvu + self.config.aux_weight * aux + self.config.multi_topk * multi
            if self.config.learn_k:
                loss = loss + self.config.k_cost * self.k
            self.activity.update(blocks, encoder)
        if undo is not None:
            out = out * undo[1] + undo[0]
        code = code._replace(shape=(*x.shape[:-1], self.config.latents), undo=undo)
        return SparseAutoencoderOutput(out.view(x.shape).to(x.dtype), code, loss, fvu, aux, multi)

    @torch.no_grad()
    def remove_parallel_gradient(self) -> None:
        """Take from the gradient of each row of W_dec what would only change its length; call it before a step."""
        if self.W_dec.grad is not None:
            along = (self.W_dec.grad * self.W_dec).sum(1, keepdim=True) / self.W_dec.square().sum(1, keepdim=True)
            self.W_dec.grad.addcmul_(along, self.W_dec, value=-1)

    @torch.no_grad()
    def normalize_decoder(self) -> None:
        """Bring the rows of W_dec back to length 1; call it after a step.

        A learned k is brought to where the last batch had an entry for each token ("topk", k ≥ 1), for each latent
        ("feature", k ≥ latents/tokens) or at all ("batch", k ≥ 1/tokens), and to k ≤ latents.
        """
        self.W_dec.div_(self.W_dec.norm(dim=1, keepdim=True).clamp(min=torch.finfo(self.W_dec.dtype).tiny))
        if isinstance(self.k, nn.Parameter):
            self.k.clamp_(self._least_k, self.config.latents)

    def dead(self) -> Tensor:
        """Which latents were not active in the last `dead_after` tokens of training, (latents,)."""
        return self.activity.since > self.config.dead_after

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write cfg.json and sae_weights.safetensors in the form that SAELens loads: what evaluation needs."""
        config, k = self.config, _sae_axes.number(self.k)
        if config.learn_k:
            config = replace(config, k=max(1, round(k)) if config.kind == "topk" else k, learn_k=False)
        _sae_files.save(folder, config, self._weights(), getattr(self.selector, "__name__", ""))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, selector: selectors.Selector = selectors.straight_through) -> Self:
        """Read what `save` wrote; in evaluation mode."""
        config, weights = _sae_files.read(folder)
        sae = cls(config, selector=selector).to(weights["W_dec"].dtype)
        with torch.no_grad():
            for name in ("W_enc", "b_enc", "W_dec", "b_dec"):
                getattr(sae, name).copy_(weights[name])
            if config.kind != "topk":
                sae.activity.threshold.copy_(weights["threshold"][... if config.kind == "feature" else 0])
        return sae.eval()

    def _weights(self) -> dict[str, Tensor]:
        """In the units of the inputs; nothing is rounded, the scale being a power of two."""
        s, n = self.scale, self.config.latents
        weights = {"W_enc": self.W_enc, "b_enc": s * self.b_enc, "W_dec": self.W_dec, "b_dec": s * self.b_dec}
        if self.config.kind != "topk":
            weights["threshold"] = (s * self.activity.threshold).expand(n)
        return weights

    def extra_repr(self) -> str:
        c = self.config
        return f"d_in={c.d_in}, latents={c.latents}, k={_sae_axes.number(self.k):g}, kind={c.kind!r}"

    def _inputs(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """(tokens, d_in), of each token mean 0 and deviation 1 if that is wanted; and what undoes that."""
        _check.scores(x, -1)
        _check.last_dim("x", x, self.config.d_in)
        rows = self._cast(x).reshape(-1, self.config.d_in)
        if not self.config.layer_norm:
            return rows, None
        mean = rows.mean(1, keepdim=True)
        deviation = (rows - mean).std(1, keepdim=True)
        return (rows - mean) / (deviation + EPSILON), (mean, deviation)

    def _centred(self, inputs: Tensor) -> Tensor:
        """What the encoder sees: of order 1 for each active latent."""
        return inputs / self.scale - self.b_dec

    def _cast(self, t: Tensor) -> Tensor:
        """Half precision is computed in float32."""
        wide = self.W_dec.dtype if self.W_dec.dtype == torch.float64 else torch.float32
        return t.to(wide)

    def _encoder(self, centred: Tensor) -> Encoder:
        return Encoder(centred.detach(), self._cast(self.W_enc).detach(), self._cast(self.b_enc).detach())

    def _blocks(self, encoder: Encoder) -> list[Block]:
        """The entries that the selection is among."""
        c, count = self.config, len(encoder.x)
        if not self.training:
            if c.kind == "topk":
                return _sae_axes.by_token(encoder, max(1, round(_sae_axes.number(self.k))), 1.0)
            return _sae_axes.above(encoder, self.activity.threshold)
        if count:
            self._least_k = min(c.latents, {"topk": count, "batch": 1, "feature": c.latents}[c.kind] / count)
        ratio = max(1.0 if self.selector is selectors.hard else c.candidates, MULTI if c.multi_topk else 1.0)
        if c.kind == "topk":
            return _sae_axes.by_token(encoder, self.k, ratio)
        if c.kind == "batch":
            return _sae_axes.by_batch(encoder, self.k * count, ratio)
        _check.enough_tokens(count, c.latents if isinstance(self.k, nn.Parameter) else self.k, c.latents)
        return _sae_axes.by_latent(encoder, self.activity.budgets(self.k, count), ratio)

    def _preactivations(self, centred: Tensor, blocks: list[Block]) -> Tensor:
        """a at those entries, (entries,), with its gradient."""
        values, tokens, latents = _sae_axes.entries(blocks)
        return chosen(centred, self._cast(self.W_enc), self._cast(self.b_enc), values, tokens, latents)

    def _selected(self, blocks: list[Block], a: Tensor, generator: torch.Generator | None) -> Tensor:
        """The selector's weights, (entries,); all are selected in evaluation, and selectors need an entry."""
        if not self.training or not len(a):
            return torch.ones_like(a)
        scores = a.split([block.values.numel() for block in blocks])
        temperature = float(self.temperature)
        weights = [
            self.selector(part.view_as(block.values), block.k, temperature=temperature, generator=generator).flatten()
            for part, block in zip(scores, blocks, strict=True)
        ]
        return torch.cat(weights)

    def _code(self, blocks: list[Block], a: Tensor, selected: Tensor, count: int) -> SparseCode:
        _, tokens, latents = _sae_axes.entries(blocks)
        entries = by_rising_token(a.relu() * selected * self.scale, tokens, latents)
        return SparseCode(*entries, (count, self.config.latents))

    def _aux_loss(self, centred: Tensor, residual: Tensor) -> Tensor:
        c = self.config
        if not c.aux_weight:
            return residual.new_zeros(())
        weights = self._cast(self.W_enc), self._cast(self.b_enc), self._cast(self.W_dec)
        most = c.aux_k or max(1, c.d_in // 2)
        if not c.underused:
            return aux_k_loss(centred, residual, self.dead().nonzero().squeeze(1), weights, most)
        law = {"k": _sae_axes.number(self.k), "exponent": c.zipf or 1.0, "fraction": c.underused}
        return aux_zipf_loss(centred, residual, self.activity.density, weights, most, **law)
