"""Sparse autoencoders and transcoders: one selection on four axes."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ... import _check
from ..._shape import Group
from ..._sparse import SparseCode, weighted_rows
from ..._torch import require_values, reshard, warn_of_ranks
from .. import selectors
from .._precision import KeepsPrecision, shown, wide_dtype
from . import _axes, _code, _files
from ._activity import Activity
from ._axes import Block, Encoder, Running
from ._code import Places, SparseAutoencoderOutput, by_rising, chosen, decoded, fraction_unexplained, linear_map, middle
from ._files import Folder, SparseAutoencoderConfig
from ._ranks import Ranks

MULTI = 4  # Multi-TopK selects this many times k as well
EPSILON = 1e-5  # added to a token's deviation by `layer_norm`, as SAELens does


class _Pass(NamedTuple):
    """Hold inputs on their way to a code."""

    inputs: Tensor  # (tokens, d_in), normalised if the config says so
    centred: Tensor  # what the encoder sees, of order 1 for each active latent; (tokens, d_in); b_dec is constant in it
    origin: Tensor | None  # b_dec, with its gradient, if inputs are centred by it
    encoder: Encoder
    blocks: list[Block]  # the entries that the selection is among
    preactivations: Tensor  # at those entries, (entries,), with their gradient
    selected: Tensor  # their weights, (entries,)
    code: SparseCode
    places: Places  # of the blocks' entries


class SparseAutoencoder(KeepsPrecision):
    """Encode by few active latents of many: `z = ReLU(a) ⊙ select(a)` with `a = W_enc·(x − b_dec) + b_enc`.

    `x̂ = W_dec·z + b_dec`, where the rows of W_dec have length 1. A selector chooses what is active along the axis
    `config.kind`. Evaluation is hard whatever the selector: the k largest for "topk", else what exceeds a running
    threshold, so that the code of a token does not depend on its batch. In training mode, forward keeps count of what
    is active. With `d_out`, it is a transcoder, which sees x itself and reconstructs a target. Codes are sparse:
    decoding reads the rows of active latents alone, and no pass holds a matrix (tokens, latents).

    Args:
        config: the sizes and the losses.
        selector: one of `khot.nn.selectors`, or a function like them.
        generator: of the initial weights.
        group: the process group over which the tokens of a batch are divided, as under DDP or FSDP2. Losses, thresholds
            and counts are then those of the whole batch. Gradients are such that their mean over the processes, which
            DDP and FSDP2 take, is that of the whole batch. In evaluation each process is on its own.
        latent_group: a process group over which the latents are divided: each process has all tokens of its `group`,
            its part of W_enc, b_enc and W_dec, and its part of the code. Gradients need no reduction over it.

    Examples:
        >>> config = khot.nn.SparseAutoencoderConfig(d_in=8, latents=32, k=2)
        >>> sae = khot.nn.SparseAutoencoder(config, generator=torch.Generator().manual_seed(0)).eval()
        >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
        >>> sae(x).reconstruction.shape, sae.encode(x).dense().count_nonzero(-1)
        (torch.Size([5, 8]), tensor([2, 2, 2, 2, 2]))
    """

    temperature: Tensor
    scale: Tensor
    input_scale: Tensor  # of a transcoder, whose inputs have another scale than its targets

    def __init__(
        self,
        config: SparseAutoencoderConfig,
        *,
        selector: selectors.Selector = selectors.straight_through,
        generator: torch.Generator | None = None,
        group: Group = None,
        latent_group: Group = None,
    ) -> None:
        super().__init__()
        _check.instance("config", config, SparseAutoencoderConfig)
        _check.generator(generator)
        self.config, self.selector, self.ranks = config, selector, Ranks(group, latent_group)
        config.axis.check_selector(selector)
        if config.axis.learns_threshold and latent_group is not None:
            raise ValueError("`latent_group` must be None for learned thresholds, which are not divided.")
        n = config.latents
        rows = nn.functional.normalize(torch.randn(n, config.width, generator=generator))[self.ranks.part(n)].clone()
        # By latent, as its gradient is. FSDP2 takes contiguous parameters only: then each gradient is transposed.
        read = rows.clone() if config.d_out is None else torch.zeros(len(rows), config.d_in)
        self.W_enc = nn.Parameter(read.t() if group is None else read.t().contiguous())
        self.b_enc = nn.Parameter(torch.zeros(len(rows)))
        self.W_dec = nn.Parameter(rows)
        self.b_dec = nn.Parameter(torch.zeros(config.width))
        if config.axis.learns_threshold:
            self.threshold = nn.Parameter(torch.zeros(len(rows)))
        self.k: float | nn.Parameter = nn.Parameter(torch.tensor(float(config.k))) if config.learn_k else config.k
        self.register_buffer("temperature", torch.tensor(float(config.temperature), dtype=wide_dtype()))
        for name in ("scale",) if config.d_out is None else ("scale", "input_scale"):
            self.register_buffer(name, torch.ones((), dtype=wide_dtype()))
        self._least_k = 0.0
        self.activity = Activity(n, config.axis, config.zipf)

    @torch.no_grad()
    def start(self, x: Tensor, target: Tensor | None = None) -> Self:
        """Take the scale of inputs, b_dec (their geometric median) and the size of W_enc from samples (…, d_in).

        A transcoder takes b_dec from samples of its targets, and W_enc from the linear map that predicts them best.
        On many processes, give all of them the same samples; under FSDP2, call it before `fully_shard`.
        """
        inputs, _ = self._inputs(x)
        goals = self._goals(inputs, target)
        for name, rows in (("x", inputs), ("target", goals)):
            if not len(rows):
                raise ValueError(f"`{name}` must have at least one row; got none.")
            if (bad := ~rows.isfinite().all(-1)).any():
                got = f"{int(bad.sum())} of {len(bad)} rows that are not, first {int(bad.nonzero()[0])}"
                raise ValueError(f"`{name}` must be finite in {rows.dtype}; got {got}: leave them out.")
        k = _axes.number(self.k)
        center, size = middle(goals, k, "x" if target is None else "target")
        self.scale.fill_(size)
        self.b_dec.copy_(center / self.scale)
        centred = wanted = goals / self.scale - self.b_dec
        if self.config.d_out is None:
            self.W_enc.copy_(self.W_dec.t())
        else:
            origin, size = middle(inputs, k, "x")
            self.input_scale.fill_(size)
            centred = (inputs - origin) / self.input_scale
            best_map = linear_map(centred.double(), wanted.double())
            self.W_enc.copy_(best_map.to(self.W_dec.dtype) @ self.W_dec.t())
        ranks = self.ranks.only_latents()
        encoder = Encoder(
            centred, self._cast(self.W_enc), self._cast(self.b_enc), len(centred), self.config.latents, ranks
        )
        blocks = self.config.axis.candidates(encoder, max(1, round(k)), 1.0, None)
        tokens, latents, a = by_rising(*_axes.entries(blocks))
        out = weighted_rows(tokens, latents, a.relu(), self._cast(self.W_dec), len(centred))
        out = ranks.total(out, ranks.latents)
        best = (wanted * out).sum() / out.square().sum()  # the multiple that explains most
        if best > 0:
            self.W_enc.mul_(best)
        if self.config.d_out is not None:
            self.b_enc.copy_(-(origin / self.input_scale) @ self._cast(self.W_enc))
        if self.config.axis.learns_threshold:  # where k entries a token are active
            self.threshold.fill_(float((best if best > 0 else 1.0) * a.min().clamp(min=0)))
        return self

    def encode(self, x: Tensor, *, generator: torch.Generator | None = None) -> SparseCode:
        """Encode inputs (…, d_in); the generator is for a random selector."""
        return self._encode(x, generator).code

    def decode(self, code: SparseCode | Tensor) -> Tensor:
        """Decode a code, sparse or dense (…, latents), to (…, d_in), or (…, d_out) of a transcoder."""
        if isinstance(code, Tensor):
            _check.last_dim("code", code, len(self.b_enc))
            rows = code.reshape(-1, code.shape[-1])
            tokens, latents = rows.detach().nonzero(as_tuple=True)
            code = SparseCode(rows[tokens, latents], tokens, latents, tuple(code.shape))
        elif code.shape[-1] != len(self.b_enc):
            raise ValueError(f"`code` must have {len(self.b_enc)} latents in its last dimension; got {code.shape}.")
        return self._restored(self._decoded(code), code)

    def forward(
        self, x: Tensor, target: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> SparseAutoencoderOutput:
        """Return the reconstruction, code and losses of inputs (…, d_in); the generator is for a random selector.

        A transcoder needs its target (…, d_out), like x; without one, use `decode(encode(x))`.
        """
        c = self.config
        inputs, centred, origin, encoder, blocks, a, selected, code, places = self._encode(x, generator)
        goals, ranks = self._goals(inputs, target), encoder.ranks
        *inner, out = self._nested(code) if c.prefixes and self.training else [self._decoded(code, places)]
        fvu = fraction_unexplained(goals - out, goals, ranks)
        loss, aux, multi = fvu, fvu.new_zeros(()), fvu.new_zeros(())
        if self.training:
            if not ranks:
                what = {"batch": "BatchTopK", "feature": "Feature Choice"}.get(c.kind, "`SparseAutoencoder`'s loss")
                warn_of_ranks(what, "Give `SparseAutoencoder` the `group=` that has the tokens of the batch.")
            aux = self._aux_loss(centred, origin, (goals - out) / self.scale)
            if inner:
                loss = (fvu + sum(fraction_unexplained(goals - part, goals, ranks) for part in inner)) / (
                    1 + len(inner)
                )
            if c.axis.learns_threshold:
                l0 = ranks.total(selected.sum(), ranks.everyone) / max(1, encoder.tokens)
                loss = loss + c.l0_weight * (l0 / c.k - 1).square()
            if c.multi_topk:
                more = self._code(places, a, _axes.largest(blocks, MULTI), code.shape)
                multi = fraction_unexplained(goals - self._decoded(more, places), goals, ranks)
            loss = ranks.averaged(loss + c.aux_weight * aux + c.multi_topk * multi)
            if c.learn_k:
                loss = loss + c.k_cost * self.k
            self.activity.update(blocks, encoder)
        return SparseAutoencoderOutput(self._restored(out, code).to(x.dtype), code, loss, fvu, aux, multi)

    @torch.no_grad()
    def remove_parallel_gradient(self) -> None:
        """Take from the gradient of each row of W_dec what would only change its length; call it before a step."""
        reshard(self)
        if self.W_dec.grad is not None:
            along = (self.W_dec.grad * self.W_dec).sum(1, keepdim=True) / self.W_dec.square().sum(1, keepdim=True)
            self.W_dec.grad.addcmul_(along, self.W_dec, value=-1)

    @torch.no_grad()
    def normalize_decoder(self) -> None:
        """Bring the rows of W_dec back to length 1; call it after a step.

        A learned k is raised to where the last batch had an entry for each token ("topk", k ≥ 1), for each latent
        ("feature", k ≥ latents/tokens) or at all ("batch", k ≥ 1/tokens), and lowered to k ≤ latents.
        """
        reshard(self)
        self.W_dec.div_(self.W_dec.norm(dim=1, keepdim=True).clamp(min=torch.finfo(self.W_dec.dtype).tiny))
        if self.config.axis.learns_threshold:
            self.threshold.clamp_(min=0)
        if isinstance(self.k, nn.Parameter):
            self.k.clamp_(self._least_k, self.config.latents)

    def dead(self) -> Tensor:
        """Return which latents were not active in the last `dead_after` tokens of training, (latents,)."""
        return self.activity.since > self.config.dead_after

    def save(self, folder: Folder) -> None:
        """Write cfg.json and sae_weights.safetensors in the form that SAELens loads: what evaluation needs.

        The first process of the `group` writes. If latents are divided, or weights by FSDP2, call it on all processes:
        the parts are gathered.
        """
        config, weights = self.weights()
        selector = getattr(self.selector, "__name__", "")
        self.ranks.write(lambda: _files.save(folder, config, weights, selector), self.b_dec)

    def weights(self) -> tuple[SparseAutoencoderConfig, dict[str, Tensor]]:
        """Return what evaluation needs: the config, and weights in the units of the inputs, as `save` writes them."""
        reshard(self)
        config = self.config
        if config.learn_k:
            config = replace(config, k=config.axis.saved_k(_axes.number(self.k)), learn_k=False)
        s = self.scale  # a power of two: nothing is rounded
        dims = {"W_enc": 1, "b_enc": 0, "W_dec": 0}
        weights = {name: self.ranks.whole(getattr(self, name), config.latents, dim) for name, dim in dims.items()}
        weights["b_dec"] = self.ranks.whole(self.b_dec)
        weights |= {name: s * weights[name] for name in ("b_enc", "b_dec")}
        if config.d_out is not None:
            weights["W_enc"] = weights["W_enc"] * (s / self.input_scale)
        if config.axis.has_threshold:
            weights["threshold"] = (s * self.ranks.whole(self._bounds)).expand(config.latents)
        dtypes = {"threshold": weights.get("threshold", s).dtype}
        return config, {name: t.detach().to(dtypes.get(name, self.W_dec.dtype)) for name, t in weights.items()}

    @classmethod
    def load(
        cls,
        folder: Folder,
        *,
        selector: selectors.Selector = selectors.straight_through,
        group: Group = None,
        latent_group: Group = None,
    ) -> Self:
        """Read what `save` wrote, at any number of processes; the model is in evaluation mode."""
        return cls.from_weights(*_files.read(folder), selector=selector, group=group, latent_group=latent_group)

    @classmethod
    def from_weights(cls, config: SparseAutoencoderConfig, weights: dict[str, Tensor], **how: Any) -> Self:
        """Make a model in evaluation mode of what `weights` returned; `how` is as for `load`."""
        _files.check_shapes("`weights`", config, weights)
        sae = cls(config, **how).to(weights["W_dec"].dtype)
        own = sae.ranks.part(config.latents)
        with torch.no_grad():
            for name, part in (("W_enc", (slice(None), own)), ("b_enc", own), ("W_dec", own), ("b_dec", ...)):
                getattr(sae, name).copy_(weights[name][part])
            if config.axis.has_threshold:
                threshold = sae._bounds
                threshold.copy_(weights["threshold"][: threshold.numel()].view_as(threshold))
        return sae.eval()

    def extra_repr(self) -> str:
        c = self.config
        k = shown(self.k) if isinstance(self.k, Tensor) else f"{self.k:g}"
        return f"d_in={c.d_in}, latents={c.latents}, k={k}, kind={c.kind!r}"

    def _encode(self, x: Tensor, generator: torch.Generator | None) -> _Pass:
        inputs, undo = self._inputs(x)
        ranks = self.ranks if self.training else self.ranks.only_latents()
        if self.config.d_out is None:
            origin: Tensor | None = ranks.spread(self._cast(self.b_dec), ranks.latents)
            centred = ranks.spread(inputs / self.scale, ranks.latents) - self.b_dec.detach()
        else:
            origin, centred = None, ranks.spread(inputs / self.input_scale, ranks.latents)
        weight, bias, count = self._cast(self.W_enc), self._cast(self.b_enc), ranks.count(inputs)
        encoder = Encoder(centred.detach(), weight.detach(), bias.detach(), count, self.config.latents, ranks)
        blocks = self._blocks(encoder)
        tokens, latents, values = _axes.entries(blocks)
        places = Places(tokens, latents, len(bias), rises=self.config.axis.is_by_token or not self.training)
        a = chosen(centred, weight, bias, places, values, origin=origin)
        selected = self._selected(blocks, a, generator)
        code = self._code(places, a, selected, (*x.shape[:-1], len(bias)))._replace(undo=undo)
        return _Pass(inputs, centred, origin, encoder, blocks, a, selected, code, places)

    def _goals(self, inputs: Tensor, target: Tensor | None) -> Tensor:
        """Return what is to be reconstructed, (tokens, d_out): the inputs, or a transcoder's target."""
        if self.config.d_out is None and target is None:
            return inputs
        if self.config.d_out is None:
            raise ValueError("`target` is for a transcoder, which has a `d_out`; an autoencoder has none.")
        if target is None:
            raise ValueError("A transcoder needs `target`; got none: `decode(encode(x))` reconstructs without it.")
        _check.scores(target, -1)
        _check.last_dim("target", target, self.config.width)
        goals = self._cast(target).reshape(-1, self.config.width)
        if len(goals) != len(inputs):
            raise ValueError(f"`target` must have as many tokens as `x`, {len(inputs)}; got {len(goals)}.")
        return goals

    @property
    def _bounds(self) -> Tensor:
        """Return the thresholds of evaluation, learned or running, in model units."""
        return self.threshold if self.config.axis.learns_threshold else self.activity.threshold

    def _inputs(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return (tokens, d_in), each token with mean 0 and deviation 1 if that is wanted; and what undoes that."""
        _check.scores(x, -1)
        require_values("How many latents are active", x)
        _check.last_dim("x", x, self.config.d_in)
        rows = self._cast(x).reshape(-1, self.config.d_in)
        if not self.config.layer_norm or not len(rows):
            return rows, None
        mean = rows.mean(1, keepdim=True)
        deviation = (rows - mean).std(1, keepdim=True)
        return (rows - mean) / (deviation + EPSILON), (mean, deviation)

    def _cast(self, t: Tensor) -> Tensor:
        """Return t in the dtype to compute in, float32 for half precision."""
        return t.to(torch.promote_types(self.W_dec.dtype, torch.float32))

    def _blocks(self, encoder: Encoder) -> list[Block]:
        """Return the entries that the selection is among."""
        c, count = self.config, encoder.tokens
        if not self.training:
            return c.axis.active(encoder, self.k, self._cast(self._bounds.detach()))
        if count:
            self._least_k = min(c.latents, c.axis.least_k(count, c.latents))
        k = self.ranks.shared(self.k, c.axis.groups(self.ranks))
        running = Running(self.activity.budgets, self._cast(self._bounds.detach()), c.bandwidth)
        wanted = max(_axes.ratio(self.selector, c.candidates), MULTI if c.multi_topk else 1.0)
        return c.axis.candidates(encoder, k, wanted, running)

    def _selected(self, blocks: list[Block], a: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the selector's weights, (entries,); all are selected in evaluation, and selectors need an entry."""
        if not self.training or not (len(a) or self.ranks):
            return torch.ones_like(a)
        select = partial(self.selector, temperature=self.temperature.to(a.dtype), generator=generator)
        found, c = [], self.config
        for part, block in zip(a.split([block.values.numel() for block in blocks]), blocks, strict=True):
            scores, bounds = part.view_as(block.values), self._cast(self._bounds)
            found.append(c.axis.select(select, scores, block, bounds, c.bandwidth).flatten())
        return torch.cat(found)

    def _code(self, places: Places, a: Tensor, selected: Tensor, shape: tuple[int, ...]) -> SparseCode:
        tokens, latents, values = places.tokens, places.latents, a.relu() * selected * self.scale
        if not places.rises:
            tokens, latents, values = by_rising(tokens, latents, values)
        return SparseCode(values, tokens, latents, shape)

    def _nested(self, code: SparseCode) -> list[Tensor]:
        """Decode by the latents of each prefix and by all, (tokens, d_out) each; together this costs one decoding."""
        outs, c = list[Tensor](), self.config
        ends, places = (*c.prefixes, c.latents), code.latents + self.ranks.part(c.latents).start
        for low, high in zip((0, *ends), ends, strict=False):
            at = ((places >= low) & (places < high)).nonzero().squeeze(1)
            band = SparseCode(code.values[at], code.tokens[at], code.latents[at], code.shape)
            outs.append(outs[-1] + self._decoded(band) - self.scale * self.b_dec if outs else self._decoded(band))
        return outs

    def _decoded(self, code: SparseCode, places: Places | None = None) -> Tensor:
        """Decode to (tokens, d_out), still normalised if the inputs are; `places` are those of the code, if known."""
        if places is None or not places.rises:
            places = Places(code.tokens, code.latents, len(self.b_enc))
        out = decoded(places, code.values, self._cast(self.W_dec), code.height)
        return self.ranks.total(out, self.ranks.latents) + self.scale * self.b_dec

    def _restored(self, out: Tensor, code: SparseCode) -> Tensor:
        """Undo `layer_norm`, and give decoded tokens the shape of the inputs."""
        if code.undo is not None:
            out = out * code.undo[1] + code.undo[0]
        shape = torch.Size((*code.shape[:-1], self.config.width))
        return out if out.shape == shape else out.view(shape)  # FSDP2 warns of views

    def _aux_loss(self, centred: Tensor, origin: Tensor | None, residual: Tensor) -> Tensor:
        c = self.config
        if not c.aux_weight:
            return residual.new_zeros(())
        is_idle = self.dead()
        if c.underused:
            is_idle = _code.is_underused(self.activity.density, _axes.number(self.k), c.zipf or 1.0, c.underused)
        of, most = is_idle[self.ranks.part(c.latents)].nonzero().squeeze(1), c.aux_k or max(1, c.width // 2)
        count = int(is_idle.sum()) if self.ranks.latents else len(of)
        if not count:
            return residual.new_zeros(())
        weights = self._cast(self.W_enc), self._cast(self.b_enc), self._cast(self.W_dec)
        return _code.explained_by(centred, residual, of, weights, most, count, self.ranks, origin)
