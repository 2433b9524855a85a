"""Beams: the k best continuations at each step, hard, sampled with exact inclusion probabilities, or soft."""

from ._beams import beam_search
from ._beams import search as search
from ._expectation import Expectation, expectation
from ._select import Choice, Select, hard, proportional, sampled, soft
from ._steps import Beams, embed

__all__ = ["Beams", "Choice", "Expectation", "Select", "beam_search", "embed", "expectation", "hard", "proportional"]
__all__ += ["sampled", "soft"]


def __dir__() -> list[str]:
    return __all__
