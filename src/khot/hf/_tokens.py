"""Token pruning in transformers encoders: layers see fewer and fewer tokens, and the output has its usual shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from .. import _check
from .._extras import require
from ..nn.tokens import TokenBudget, TokenPruner, attention_received, weighted_attention

NAME = "khot_pruning"  # of the attention in transformers' tables


def first(mask: Tensor) -> Tensor:
    """Return the first token of each row (batch, n), as the [CLS] of ViT is."""
    return torch.arange(mask.shape[1], device=mask.device) == mask.int().argmax(-1, keepdim=True)


def first_and_last(mask: Tensor) -> Tensor:
    """Return the first and the last token of each row (batch, n), as [CLS] and [SEP] of BERT are."""
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
    return first(mask) | (torch.arange(mask.shape[1], device=mask.device) == last)


class TokenPruning(nn.Module):
    """Hold the pruning of a model: what `prune_tokens` returns.

    Attributes:
        pruners: a `khot.nn.TokenPruner` for each stage; their temperatures may be scheduled.
        budget: the `khot.nn.TokenBudget`, or None. Give its parameters to the optimiser.
        kept: booleans (layers, batch, n): which tokens each layer saw in the last call.
        weights: (batch, n), 1 for the tokens that the last layer saw, else 0; in training with a gradient. Pool with
            them, not with `kept`, where counts are learned.
    """

    def __init__(
        self,
        model: Any,
        stages: Mapping[int, int | float],
        budget: TokenBudget | None,
        score: Callable[[Tensor], Tensor] | None,
        special: Callable[[Tensor], Tensor],
        temperature: float,
    ) -> None:
        super().__init__()
        self.pruners = nn.ModuleList(TokenPruner(temperature=temperature) for _ in stages)
        self.budget, self.score, self.special = budget, score, special
        self._stages = {layer: (i, keep) for i, (layer, keep) in enumerate(sorted(stages.items()))}
        self._layers = _layers_of(model)
        self._hooks, self._before = [], model.config._attn_implementation
        for i, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_pre_hook(self._enter(i), with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._leave(i)))
            for part in layer.modules():
                part.__dict__[NAME] = self
        self._model = [model]  # in a list, so that it is no submodule
        model.set_attn_implementation(NAME)
        self._kept: list[Tensor] = []

    @property
    def kept(self) -> Tensor:
        if not self._kept:
            raise ValueError("`kept` is known after a call of the model; there was none.")
        return torch.stack(self._kept)

    @property
    def weights(self) -> Tensor:
        return self.kept[-1].float() if self._weights is None else self._weights

    def remove(self) -> None:
        """Give the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            for part in layer.modules():
                part.__dict__.pop(NAME, None)
        self._hooks = []
        self._model[0].set_attn_implementation(self._before)

    def _enter(self, i: int) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, mask, where = _arguments(args, kwargs)
            if i == 0:
                self._start(layer, hidden, mask, kwargs)
            self._i = i
            self._received: Tensor | None = None
            here = torch.zeros(len(hidden), self._n + 1, dtype=torch.bool, device=hidden.device)
            self._kept.append(here.scatter(1, self._slots(), True)[:, : self._n])
            if not self._has_moved:
                return None
            mask = None if bool(self._mask.all()) else self._mask[:, None, None]
            args = (hidden, mask, *args[2:]) if where is None else args
            return args, kwargs if where is None else {**kwargs, where: mask}

        return hook

    def _start(self, layer: nn.Module, hidden: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
        """Begin a call of the model with all tokens."""
        if kwargs.get("position_embeddings") is not None or kwargs.get("past_key_values") is not None:
            raise ValueError("The model must add positions to its inputs once, and keep no cache, to be pruned.")
        batch, n = hidden.shape[:2]
        self._n, self._kept, self._training, self._has_moved = n, [], layer.training, False
        self._mask = torch.ones(batch, n, dtype=torch.bool, device=hidden.device)
        if mask is not None:
            if mask.ndim != 4 or mask.shape[-1] != n:
                raise ValueError(f"The attention mask must be (batch, 1, queries, n); got {tuple(mask.shape)}.")
            allowed = mask if mask.dtype == torch.bool else mask == 0
            self._mask = allowed.flatten(1, 2).any(1).expand(batch, n)
        self._always, self._positions = self.special(self._mask), torch.arange(n, device=hidden.device).expand(batch, n)
        self._counts = None if self.budget is None else self.budget(self._mask.sum(-1))
        self._final = hidden.new_zeros(batch, n + 1, hidden.shape[-1])  # the last is for what is no token
        self._weights: Tensor | None = hidden.new_ones(batch, n) if layer.training else None

    def _slots(self) -> Tensor:
        """Return where each present token belongs in the output, (batch, m); n for what is no token."""
        return torch.where(self._mask, self._positions, self._n)

    def _leave(self, i: int) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            changed = self._prune(hidden, *self._stages[i]) if i in self._stages else hidden
            if i == len(self._layers) - 1:
                changed = self._restored(changed)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    def _prune(self, hidden: Tensor, stage: int, keep: int | float) -> Tensor:
        """Drop tokens after a layer; in training they stay, with the weight 0."""
        if self.score is not None:
            scores = self.score(hidden)
        elif self._received is None:
            raise ValueError(f"Layer {self._i} must attend through transformers' AttentionInterface; it does not.")
        else:
            scores = self._received
        n = self._kept[0].sum(-1)  # without padding
        if self._counts is not None:
            k = self._counts[:, stage]
        else:
            k = (n * keep).round().clamp(min=1) if isinstance(keep, float) else torch.full_like(n, keep)
        pruner = self.pruners[stage].train(self._training)
        at = {"mask": self._mask, "positions": self._positions, "special": self._always.gather(1, self._positions)}
        out = pruner(hidden, scores=scores, k=k, **at)
        if self._weights is not None:
            weights = self._weights * out.weights
            self._final[:, : self._n] += hidden * (self._weights - weights).unsqueeze(-1)
            self._weights = weights
        else:
            self._write(hidden)
            self._has_moved = True
        self._mask, self._positions = out.mask, out.positions
        tokens: Tensor = out.tokens
        return tokens

    def _write(self, hidden: Tensor) -> None:
        index = self._slots().unsqueeze(-1).expand_as(hidden)
        self._final = self._final.scatter(1, index, hidden)

    def _restored(self, hidden: Tensor) -> Tensor:
        """Return (batch, n, d), in which a dropped token has the state it had last."""
        if self._weights is not None:
            return self._final[:, : self._n] + hidden * self._weights.unsqueeze(-1)
        if not self._has_moved:
            return hidden
        self._write(hidden)
        return self._final[:, : self._n]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of the present layer, and note what each token receives if tokens are scored by it."""
        allowed = mask if mask is None or mask.dtype == torch.bool else mask == 0
        is_scored = self._i in self._stages and self.score is None
        attention = None
        if self._weights is not None:
            out, attention = weighted_attention(query, key, value, self._weights, mask=allowed, scale=scale)
            out = drop(attention, dropout) @ value if dropout else out
        else:
            out = scaled_dot_product_attention(query, key, value, attn_mask=allowed, dropout_p=dropout, scale=scale)
            if is_scored:
                ones = torch.ones(self._mask.shape, device=query.device)
                attention = weighted_attention(query, key, value, ones, mask=allowed, scale=scale)[1]
        if is_scored and attention is not None:
            self._received = attention_received(attention, self._mask)
        return out.transpose(1, 2).contiguous(), attention


def prune_tokens(
    model: Any,
    schedule: Mapping[int, int | float] | None = None,
    *,
    budget: float | None = None,
    layers: Sequence[int] | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
    special: Callable[[Tensor], Tensor] | None = None,
    temperature: float = 1.0,
) -> TokenPruning:
    """Let the layers of a BERT-like encoder or a ViT drop tokens, by a schedule or by a budget that it learns.

    The last hidden state has its usual shape: a dropped token has the state it had last, so that pooling and heads
    work as before. Padding is 0. Positions were added to the input, so tokens keep theirs. In training mode all tokens
    are computed, and dropped ones have no effect (`khot.nn.tokens.weighted_attention`), so that scores and counts have
    gradients.

    Args:
        model: an encoder of transformers 5 whose attention is of its AttentionInterface: BERT, RoBERTa, DistilBERT,
            ELECTRA, ViT, DeiT, DINOv2, …
        schedule: how much to keep after which layers, such as `{1: 0.7, 3: 0.5}`: a float is a share of a row's
            tokens, an int a number of them.
        budget: instead, the mean share of tokens that the layers after the first stage see; how much each keeps is
            learned in training (`khot.nn.TokenBudget`).
        layers: with a budget, after which layers to drop; all but the last if None.
        score: hidden states (batch, n, d) → scores (batch, n); if None, the attention that each token receives in
            that layer, the mean over heads and queries.
        special: which tokens are always kept, a function of the padding mask (batch, n), True for tokens; if None, the
            first, and for text the last too.
        temperature: of σ_k in training.

    Returns:
        A `TokenPruning`: `.kept`, `.remove()`, and what may be trained.

    Examples:
        >>> import khot.hf
        >>> pruning = khot.hf.prune_tokens(model, {1: 0.7, 3: 0.5})  # doctest: +SKIP
        >>> model(**inputs).last_hidden_state  # doctest: +SKIP
        >>> pruning.kept.sum(-1)  # doctest: +SKIP
    """
    transformers: Any = require("transformers", extra="hf")
    masks: Any = require("transformers.masking_utils", extra="hf")
    count = len(_layers_of(model))
    if (schedule is None) == (budget is None):
        raise ValueError("Give either `schedule` or `budget`; got both or neither.")
    learned = None
    if budget is not None:
        places = list(range(count - 1)) if layers is None else sorted(layers)
        stages: dict[int, int | float] = dict.fromkeys(places, 1.0)
        spans = torch.tensor([*places, count - 1], dtype=torch.float32).diff()
        learned = TokenBudget(len(places), budget, costs=None if bool((spans == spans[0]).all()) else spans)
    else:
        if layers is not None:
            raise ValueError("`layers` goes with `budget`; a `schedule` names its own.")
        stages = dict(schedule or {})
    if not stages or not all(0 <= layer < count - 1 for layer in stages):
        raise ValueError(f"Layers must satisfy 0 ≤ layer < {count - 1} (the last drops nothing); got {list(stages)}.")
    for layer, keep in stages.items():
        if isinstance(keep, float):
            _check.fraction(f"schedule[{layer}]", keep)
        else:
            _check.at_least(f"schedule[{layer}]", keep, 1)
    if any(NAME in part.__dict__ for part in model.modules()):
        raise ValueError("`model` is pruned already; call `remove()` of its pruning first.")
    if special is None:
        special = first if getattr(model, "main_input_name", "") == "pixel_values" else first_and_last
    transformers.AttentionInterface.register(NAME, _attend)
    masks.AttentionMaskInterface.register(NAME, masks.sdpa_mask)
    return TokenPruning(model, stages, learned, score, special, temperature)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers asks of an implementation."""
    return getattr(module, NAME).attend(query, key, value, attention_mask, dropout, scaling)  # type: ignore[no-any-return]


def _layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of an encoder, or raise with the reason why its tokens cannot be dropped."""
    config = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count and count]
    if not lists:
        raise ValueError(f"`model` must be an encoder with a list of layers; got {type(model).__name__}.")
    if getattr(config, "is_decoder", False) or any(getattr(part, "is_causal", False) for part in lists[0].modules()):
        raise ValueError(f"`model` must be an encoder; {type(model).__name__} attends causally, and keeps a cache.")
    return list(lists[0])


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None, str | None]:
    """Return the hidden states and the mask that a layer is given, and the keyword of the mask, if it has one."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if len(args) > 1:
        return hidden, args[1], None
    return hidden, kwargs.get("attention_mask"), "attention_mask"
