"""Hugging Face models with khot's routers and beams; the models themselves need the extra `hf`."""

from ._beams import beam_search
from ._routers import swap_routers

__all__ = ["beam_search", "swap_routers"]


def __dir__() -> list[str]:
    return __all__
