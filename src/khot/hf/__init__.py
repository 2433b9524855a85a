"""Hugging Face models with khot's routers and beams; the models themselves need the extra `hf`."""

from ._beams import beam_search
from ._routers import swap_routers
from ._spark import swap_ffns
from ._tokens import TokenPruning, prune_tokens

__all__ = ["beam_search", "swap_routers"]
__all__ += ["TokenPruning", "prune_tokens", "swap_ffns"]


def __dir__() -> list[str]:
    return __all__
