"""Hugging Face models with khot's routers, beams, attention and sparse layers; models need the extra `hf`."""

from ._attention import register_attention
from ._beams import beam_search
from ._routers import swap_routers
from ._spark import swap_ffns
from ._tokens import TokenPruning, prune_tokens

__all__ = ["TokenPruning", "beam_search", "prune_tokens", "register_attention", "swap_ffns", "swap_routers"]


def __dir__() -> list[str]:
    return __all__
