"""Routes of mixtures of experts, as functions of scores; losses and measures of their load."""

from .moe import *  # noqa: F403 (all that the room lists is public here)
