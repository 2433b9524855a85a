"""Which tokens of a transformers model are padding, for the routers in it."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import is_in_backward

ADVICE = "or take a route that looks at each token alone, such as sigma_topk"


class _Call(NamedTuple):
    """What a forward was given."""

    mask: Any
    length: int | None  # of each text, if it is known
    past: Any  # how many tokens are in a cache: a number, a tensor of one, or None if nobody knows


class Padding:
    """Hooks of one tower of a model that keep the padding mask of its forward while it runs.

    A tower is a PreTrainedModel that has routers, such as the text model of a model of text and images: it has tokens,
    and perhaps a mask, of its own.
    """

    def __init__(self, owner: nn.Module) -> None:
        self.names = list(inspect.signature(owner.forward).parameters)
        self.is_tower = _is_tower(owner)
        self.calls: list[_Call] = []  # one in the other
        self.had_mask = False
        self.checkpointed: list[str] = []  # modules that may be computed again in backward, without their hooks
        owner.register_forward_pre_hook(self.enter, with_kwargs=True)
        owner.register_forward_hook(self.leave, always_call=True)
        owner.khot_padding_hook = self  # type: ignore[assignment]

    def enter(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        mask, length = given.get("attention_mask"), getattr(given.get("past_key_values"), "get_seq_length", None)
        past = 0 if length is None else length() + 0  # a copy, since a static cache counts in place
        texts = [given[name] for name in ("input_ids", "inputs_embeds") if isinstance(given.get(name), Tensor)]
        self.calls.append(_Call(mask, texts[0].shape[1] if texts else None, past if self.is_tower else None))
        self.had_mask = self.had_mask or mask is not None
        for name in self.checkpointed:
            module: Any = owner.get_submodule(name)
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if module.gradient_checkpointing and checkpoint is not None and not isinstance(checkpoint, _Keeping):
                module._gradient_checkpointing_func = _Keeping(checkpoint, self)

    def leave(self, owner: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if self.calls:
            self.calls.pop()

    def of(self, tokens: int, device: torch.device) -> Tensor | None:
        """Return which of the tokens of a router are no padding, (tokens,); None if no mask was given."""
        if not self.calls:
            if self.had_mask and is_in_backward():
                raise RuntimeError(
                    "`attention_mask` must be known where a router is computed again in backward; got none, since "
                    "checkpointing runs this layer outside its model. Take the checkpointing of transformers "
                    f"(`activation_checkpointing_enable`), checkpoint the whole model, {ADVICE}."
                )
            return None
        mask, length, past = self.calls[-1]
        if isinstance(mask, dict):  # one for each kind of layer
            mask = mask.get("full_attention", next(iter(mask.values()), None))
        if mask is None or not tokens:
            return None
        if not isinstance(mask, Tensor) or mask.ndim not in (2, 3, 4):
            got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise ValueError(f"`attention_mask` must be a tensor of 2 to 4 dimensions; got {got}. Give one, {ADVICE}.")
        batch, columns = (len(mask) if mask.ndim == 2 or len(mask) > 1 else -1), mask.shape[-1]
        queries = mask.shape[-2] if mask.ndim > 2 else tokens // max(1, batch)
        rows = tokens // max(1, queries) if batch < 0 else batch
        is_known = queries == columns or past is not None or mask.ndim == 2
        if rows * queries != tokens or queries > columns or length not in (None, queries) or not is_known:
            raise ValueError(
                f"`attention_mask` must have one entry for each of {tokens} tokens of a router; got shape "
                f"{tuple(mask.shape)}. Give a mask (batch, tokens) to a whole model, {ADVICE}."
            )
        offset: Any = columns - queries  # of the first of these tokens, among the columns
        if past is not None:
            offset = past.clamp(max=offset).to(mask.device) if isinstance(past, Tensor) else min(past, offset)
        places = torch.arange(queries, device=mask.device) + offset
        if mask.ndim == 2:
            return mask.to(torch.bool).index_select(1, places).reshape(-1).to(device)
        scores = mask if mask.ndim == 3 else mask[:, 0]  # (batch, queries, columns): who looks at whom
        sees = scores > torch.finfo(scores.dtype).min / 2 if scores.is_floating_point() else scores.to(torch.bool)
        itself = sees.gather(-1, places[:, None].expand(len(sees), -1, 1))  # a token looks at itself, and padding not
        return itself[..., 0].expand(rows, -1).reshape(-1).to(device)

    def within(self, call: _Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as a part of an earlier forward."""
        self.calls.append(call)
        try:
            return function(*args, **kwargs)
        finally:
            self.calls.pop()


class _Keeping:
    """A function of gradient checkpointing with which a layer that is computed again has the mask of its forward."""

    def __init__(self, checkpoint: Callable[..., Any], padding: Padding) -> None:
        self.checkpoint, self.padding = checkpoint, padding

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.padding.calls:  # the layer alone
            return self.checkpoint(function, *args, **kwargs)
        call = self.padding.calls[-1]

        def again(*args: Any, **kwargs: Any) -> Any:
            return self.padding.within(call, function, *args, **kwargs)

        return self.checkpoint(again, *args, **kwargs)


def _is_tower(module: nn.Module) -> bool:
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def paddings(model: nn.Module, names: list[str]) -> list[Padding]:
    """Return what knows the padding of each router: the hooks of the smallest tower around it.

    Without a tower, that is the outermost module which takes an `attention_mask`, or else the model.
    """
    found = []
    for name in names:
        parts = name.split(".")
        around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
        towers = [module for module in around if _is_tower(module)][::-1]
        takers = [module for module in around if "attention_mask" in inspect.signature(module.forward).parameters]
        owner = (towers or takers or around)[0]
        padding: Any = getattr(owner, "khot_padding_hook", None) or Padding(owner)
        first = next(depth for depth, module in enumerate(around) if module is owner)
        for depth, module in enumerate(around[first:], first):
            inner = ".".join(parts[first:depth])  # names, since a copy of one router is no copy of the model
            if hasattr(module, "gradient_checkpointing") and inner not in padding.checkpointed:
                padding.checkpointed.append(inner)
        found.append(padding)
    return found
