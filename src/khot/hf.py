"""Hugging Face models with khot's routers, and with khot's beams; the models themselves need the extra `hf`."""

import copy
import inspect
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from . import search
from ._extras import require
from .nn.moe import BoundRoute, Route, sigma_topk

__all__ = ["beam_search", "swap_routers"]

PROBES = 8  # random tokens that show what a router of a model does
OPTIONS = ("bias", "training", "sample")  # what a swapped router can give to a route


def __dir__() -> list[str]:
    return __all__


def swap_routers(model: nn.Module, route: Route = sigma_topk) -> list[str]:
    """Let every router of a transformers model choose by a function of `khot.nn.routing`, with the weights it has.

    Each router becomes a subclass of its own class, so that `output_router_logits`, `save_pretrained` and `generate`
    work as before; scores are computed as the model does. Swap again with another route to change it; a model loaded
    with `from_pretrained` has its own rule until it is swapped.

    Args:
        model: a model whose routers give (logits, weights, indices), as transformers 5's do.
        route: `(logits, k, …) → Routing`. If it has a `normalize` option that is not set, it is set where the router's
            own weights have a constant sum; and for σ_k with k > 1, since π sums to k, which no model is used to. It
            is given the router's correction bias, if it takes one.

    Returns:
        The names of the routers.

    Examples:
        >>> import khot.hf
        >>> khot.hf.swap_routers(model, khot.nn.routing.sigma_topk)  # doctest: +SKIP
        ['model.layers.0.mlp.gate', 'model.layers.1.mlp.gate']
    """
    found = {name: module for name, module in model.named_modules() if _is_router(module)}
    if not found:
        kind = "Modules of a class named …Router, with `weight`, `top_k`, forward(hidden) → (logits, weights, indices)"
        raise ValueError(f"`model` must have routers: {kind}; got {type(model).__name__}, which has none.")
    changes = [(module, *_swapped(name, module, route)) for name, module in found.items()]
    for module, cls, choice in changes:  # all or none
        module.__class__, module.khot_choice = cls, choice
    return list(found)


class _Choice(NamedTuple):
    """How a swapped router computes its scores and chooses by them."""

    route: BoundRoute
    linear_at: tuple[int, ...]  # ndim of `hidden` where scores are hidden·Wᵀ + bias; else the own forward runs
    is_wide: bool  # whether that is computed in float32, or else in the dtype of `hidden`
    weights_in: torch.dtype | None  # the dtype of the weights; None for the dtype of `hidden`


def _is_router(module: nn.Module) -> bool:
    is_named = any(cls.__name__.endswith("Router") for cls in type(module).__mro__)
    return is_named and hasattr(module, "top_k") and hasattr(module, "weight")


@torch.no_grad()
def _swapped(name: str, router: Any, route: Route) -> tuple[type[nn.Module], _Choice]:
    """Return the class of a router with khot's choice, and the choice; the router does not change."""
    own: Any = getattr(type(router), "khot_own", type(router))
    n, k = len(router.weight), int(router.top_k)
    if (groups := getattr(router, "num_group", None) or 1) > 1:
        raise ValueError(f"{name} must choose among all its experts; it chooses within {groups} groups.")
    width = BoundRoute(route, n, k, OPTIONS).width
    if width != n:
        raise ValueError(f"`route` must take as many scores as {name} gives, {n}; it takes {width}.")
    given = own.forward(router, _probes(router))
    if not (isinstance(given, tuple) and len(given) == 3):
        got = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        raise ValueError(f"{name} must give (logits, weights, indices); it gives {got}.")
    option = inspect.signature(route).parameters.get("normalize")
    if option is not None and "normalize" not in getattr(route, "keywords", {}):
        sums, scale = given[1].float().sum(-1), _scale(router)
        is_constant = bool((sums - scale).abs().max() < 1e-2 * scale)
        route = partial(route, normalize=is_constant or (k > 1 and not option.default))
    choice = _Choice(BoundRoute(route, n, k, OPTIONS), *_how(own, router))
    _route(router, choice, given[0], training=False)  # raises if the route does not fit
    return _subclass(own), choice


def _probes(router: Any) -> Tensor:
    tokens = torch.randn(PROBES, router.weight.shape[1], generator=torch.Generator().manual_seed(0))
    return tokens.to(router.weight)


def _how(own: Any, router: Any) -> tuple[tuple[int, ...], bool, torch.dtype | None]:
    """Return the last three fields of `_Choice`, from what a copy in bfloat16 does."""
    twin = copy.deepcopy(router).to("cpu", torch.bfloat16)  # not every device computes in bfloat16
    tokens = _probes(twin)
    with torch.random.fork_rng(devices=[]):
        found = own.forward(twin, tokens)[1].dtype
        weights_in = None if found == torch.bfloat16 else found
        for is_wide in (False, True):
            fits = tuple(x.ndim for x in (tokens, tokens[None]) if _is_linear(own, twin, x, is_wide))
            if fits:
                return fits, is_wide, weights_in
    return (), False, weights_in


def _is_linear(own: Any, router: Any, hidden: Tensor, is_wide: bool) -> bool:
    """Return whether `_logits` are the scores of a router, in training and in evaluation."""
    expected = _logits(router, hidden, is_wide)
    try:
        given = [own.forward(router.train(mode), hidden)[0] for mode in (True, False)]
    except (IndexError, RuntimeError, ValueError):  # it takes another number of dimensions
        return False
    return all(torch.equal(logits, expected) for logits in given)


def _logits(router: Any, hidden: Tensor, is_wide: bool) -> Tensor:
    """Return the scores of tokens (…, d), (tokens, n), as a linear router computes them."""
    weight, bias = router.weight, getattr(router, "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]:
        bias = None
    rows = hidden.reshape(-1, weight.shape[1])
    if is_wide:
        rows, weight, bias = rows.float(), weight.float(), None if bias is None else bias.float()
    return linear(rows, weight, bias)


def _route(router: Any, choice: _Choice, logits: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
    """Return weights and indices, (tokens, slots); where there is no expert, the weight is 0."""
    bias = getattr(router, "e_score_correction_bias", None)
    routing = choice.route(logits, int(router.top_k), training=training, bias=bias)
    indices = torch.where(routing.indices < logits.shape[-1], routing.indices, 0)
    return routing.weights * _scale(router), indices


def _scale(router: Any) -> float:
    return float(getattr(router, "routed_scaling_factor", 1.0))


@cache
def _subclass(own: Any) -> type[nn.Module]:
    """Return the class with khot's choice."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        choice: _Choice = self.khot_choice
        is_plain = len(args) == 1 and not kwargs and args[0].ndim in choice.linear_at
        if is_plain and not torch.is_autocast_enabled(args[0].device.type):  # which has rules of its own
            logits, dtype = _logits(self, args[0], choice.is_wide), choice.weights_in or args[0].dtype
        else:
            logits, weights, _ = own.forward(self, *args, **kwargs)
            dtype = weights.dtype
        weights, indices = _route(self, choice, logits, training=self.training)
        return logits, weights.to(dtype), indices

    def reduce(self: Any) -> tuple[Any, ...]:
        return _empty, (own,), self.__dict__

    return type(f"KHot{own.__name__}", (own,), {"forward": forward, "khot_own": own, "__reduce__": reduce})


def _empty(own: Any) -> Any:
    """Make an instance for pickle, which finds a class by its name."""
    cls = _subclass(own)
    return cls.__new__(cls)


def beam_search(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    select: search.Select = search.hard,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode a transformers model with khot's beams: `model.generate(…, custom_generate=khot.hf.beam_search)`.

    With `khot.search.hard` the result is that of transformers' own beam search (`num_beams`, `length_penalty`,
    `early_stopping`, `eos_token_id`, processors and criteria); the prompt is read once, not once for each beam.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: given by `generate`.
        select: `khot.search.hard` or `khot.search.sampled`, or a `functools.partial` of one; give it to `generate`.
            Sampled beams draw from the distribution after all processors, which need not sum to 1.
        generator: of what is random; give it to `generate`.

    Returns:
        Sequences (batch · num_return_sequences, length), padded; or with `return_dict_in_generate=True` transformers'
        output with `sequences`, `sequences_scores`, and `beams`, a `khot.search.Beams` of all beams, for
        `khot.search.expectation`.

    Examples:
        >>> import khot.hf
        >>> options = {"custom_generate": khot.hf.beam_search, "num_beams": 4, "max_new_tokens": 20}
        >>> model.generate(**prompt, **options, select=khot.search.sampled)  # doctest: +SKIP
    """
    generation: Any = require("transformers.generation", extra="hf")
    config, k, prompt = generation_config, int(generation_config.num_beams), input_ids.shape[1]
    known = (generation.MaxLengthCriteria, generation.EosTokenCriteria)
    others = generation.StoppingCriteriaList(c for c in stopping_criteria or () if not isinstance(c, known))
    ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.flatten().tolist()
    decoder = _Decoder(model, input_ids, logits_processor, config, model_kwargs, k)
    first, length = input_ids[::k, -1], int(config.max_length) - prompt
    kind = getattr(select, "func", select)  # of a functools.partial
    if getattr(kind, "is_soft", False):
        raise ValueError("`select` must not be soft: models take tokens. Use `khot.search.hard` or `.sampled`.")
    if not getattr(kind, "is_random", False):

        def is_ended(tokens: Tensor) -> Tensor:
            ids = torch.cat((input_ids[::k, None].expand(-1, tokens.shape[1], -1), tokens), -1)
            done: Tensor = others(ids.flatten(0, 1), None)
            return done.view(tokens.shape[:2])

        most = torch.full_like(first, length)
        early = None if config.early_stopping == "never" else bool(config.early_stopping)
        options: dict[str, Any] = {"is_ended": is_ended if others else None, "early_stopping": early}
        fixed = ([k] * length, first, select, ends, most, config.length_penalty, decoder.reorder)
        beams = search.search(decoder.step, None, *fixed, **options)
    else:
        if others:
            names = ", ".join(type(c).__name__ for c in others)
            raise ValueError(f"`stopping_criteria` must be lengths and end tokens for sampled beams; got {names}.")
        options = {"select": select, "generator": generator, "end": ends or None, "reorder": decoder.reorder}
        beams = search.beam_search(decoder.step, None, k, start=first, length=length, **options)
    pad = config._pad_token_tensor if config._pad_token_tensor is not None else ends[0] if ends else -1
    chosen = slice(int(config.num_return_sequences))
    tokens = beams.tokens[:, chosen, : int(beams.lengths[:, chosen].max())].flatten(0, 1)
    again = input_ids[::k].repeat_interleave(len(tokens) // len(first), 0)
    sequences = torch.cat((again, torch.where(tokens < 0, pad, tokens)), -1)
    if not config.return_dict_in_generate:
        return sequences
    is_pair = model.config.is_encoder_decoder
    output = generation.GenerateBeamEncoderDecoderOutput if is_pair else generation.GenerateBeamDecoderOnlyOutput
    result = output(sequences=sequences, sequences_scores=beams.scores[:, chosen].flatten())
    result["beams"] = beams
    return result


class _Decoder:
    """A transformers model as a step of a search, with its cache and the tokens so far."""

    def __init__(self, model: Any, ids: Tensor, processor: Any, config: Any, kwargs: dict[str, Any], k: int) -> None:
        self.model, self.processor, self.config, self.kwargs, self.k = model, processor, config, kwargs, k
        self.ids, self.rows, self.is_begun, self.apart = ids, len(ids), False, 1

    def step(self, tokens: Tensor, state: None) -> tuple[Tensor, None]:
        """Return the log-probabilities of the next token, (rows, V)."""
        if self.is_begun:
            self.ids = torch.cat((self.ids, tokens[:, None]), -1)
            length = 1 if self.kwargs["use_cache"] else None
            inputs = self.model.prepare_inputs_for_generation(self.ids, next_sequence_length=length, **self.kwargs)
            outputs = self.model(**inputs, return_dict=True)
        else:
            outputs = self._begin()
        is_pair = self.model.config.is_encoder_decoder
        self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs, is_encoder_decoder=is_pair)
        log_probs = log_softmax(outputs.logits[:: self.apart, -1].to(self.ids.device, torch.float32), -1)
        times = self.rows // len(log_probs)  # processors know the number of rows
        ids, log_probs = (t.repeat_interleave(times, 0) for t in (self.ids, log_probs))
        return (self.processor(ids, log_probs) if self.processor else log_probs)[::times], None

    def _begin(self) -> Any:
        """Read the prompts: one row for each, or all of them if the cache has room for all of them only."""
        cache = self.kwargs.get("past_key_values")
        self.is_begun, wide = True, self.ids
        self.ids, kwargs = _thinned((wide, self.kwargs), self.k)
        if cache is None or (type(cache).__name__ in GROWING and not cache.get_seq_length()):
            return self.model._prefill(self.ids, self.config, kwargs)
        self.apart = self.k
        return self.model._prefill(wide, self.config, self.kwargs)

    def reorder(self, state: None, index: Tensor) -> None:
        """Let each row go on from another one, (rows) in the order of the last step."""
        self.ids = self.ids[index]
        name = next((name for name in CACHES if self.kwargs.get(name) is not None), None)
        if name is not None:
            cache, rows = self.kwargs[name], index * self.apart
            if hasattr(self.model, "_reorder_cache"):
                self.kwargs[name] = self.model._reorder_cache(cache, rows)
            else:
                cache.reorder_cache(rows)
        self.apart = 1


CACHES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")  # what models call it
GROWING = ("DynamicCache", "EncoderDecoderCache")  # their rows are those of the first call


def _thinned(value: Any, k: int) -> Any:
    """Return every k-th row of the tensors in tuples and dicts; anything else as it is."""
    if isinstance(value, Tensor):
        return value[::k] if value.ndim else value
    if isinstance(value, tuple):
        return tuple(_thinned(each, k) for each in value)
    if isinstance(value, dict):
        return type(value)(**{name: _thinned(each, k) for name, each in value.items()})
    return value
