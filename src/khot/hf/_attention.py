"""Hugging Face models with certified attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _check
from .._extras import require
from ..attention import Certificate, KeyCells, certified_attention, tail_mass

UNSUPPORTED = ("position_bias", "s_aux", "softcap", "sinks")  # scores that are not q·kᵀ·scale


def register_attention(
    epsilon: float | None = 0.01,
    *,
    output_epsilon: float | None = None,
    name: str = "khot_certified",
    certificate: Callable[..., Tensor] = tail_mass,
    cells: int | None = None,
    record: Callable[[nn.Module, Certificate], Any] | None = None,
) -> str:
    """Register `khot.attention.certified_attention` with transformers: `model.set_attn_implementation(name)`.

    It serves causal, padding and sliding-window masks, grouped queries and caches. What changes the scores otherwise
    (position biases, soft caps, sinks) and dropout raise ValueError.

    Args:
        epsilon, output_epsilon, certificate: as for `certified_attention`; one of the first two is None.
        name: what models call it. Register another one for another ε.
        cells: if given, keys are put into `KeyCells` of about this size at each call, and searched; for evaluation.
        record: called as `record(module, certificate)` after each layer, for example `lambda m, c: found.append(c)`.

    Returns:
        The name.

    Examples:
        >>> import khot.hf
        >>> model.set_attn_implementation(khot.hf.register_attention(0.01))  # doctest: +SKIP
    """
    if cells is not None:
        _check.at_least("cells", cells, 1)
    if epsilon is not None:
        _check.fraction("epsilon", epsilon, is_open=True)
        _check.positive("epsilon", epsilon)
    transformers: Any = require("transformers", extra="hf")
    masking: Any = require("transformers.masking_utils", extra="hf")

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        wrong = [option for option in UNSUPPORTED if kwargs.get(option) is not None]
        if wrong or dropout:
            what = f"`{wrong[0]}`" if wrong else f"a dropout of {dropout}: use `model.eval()`"
            raise ValueError(f"Certified attention needs scores q·kᵀ·scale and no dropout; got {what}.")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is None and causal and query.shape[-2] > 1:
            ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
            attention_mask = ones.tril()  # as SDPA aligns it
        elif attention_mask is not None:
            attention_mask = attention_mask[..., : key.shape[-2]]
        options: dict[str, Any] = {"epsilon": epsilon, "output_epsilon": output_epsilon, "scale": scaling}
        options |= {"certificate": certificate} if cells is None else {}
        keys = key if cells is None else KeyCells(key, size=cells)
        output, found = certified_attention(query, keys, value, mask=attention_mask, **options)
        if record is not None:
            record(module, found)
        return output.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, masking.sdpa_mask)
    return name
