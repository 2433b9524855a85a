"""Hugging Face models with khot's routers, beams and attention; the models themselves need the extra `hf`."""

from ._attention import register_attention
from ._beams import beam_search
from ._routers import swap_routers

__all__ = ["beam_search", "register_attention", "swap_routers"]


def __dir__() -> list[str]:
    return __all__
