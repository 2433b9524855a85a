"""Hugging Face models with khot's beams."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from .. import search
from .._extras import require


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
    """Use a transformers model as a step of a search, with its cache and the tokens so far."""

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
