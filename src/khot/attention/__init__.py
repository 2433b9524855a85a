"""Certified attention: how many keys each query needs, how much the others could matter, and bounds on the error."""

from ._attend import Certificate, block_mask, certified_attention, certified_mask
from ._cells import Ball, Box, CellBound, KeyCells
from ._certificates import blockwise, known_head, multi_gap, single_gap
from ._tails import (
    diameter_bound,
    gaussian_share,
    norm_bound,
    output_error,
    smallest_k,
    tail_mass,
    truncation_kl,
    variance_bound,
)

__all__ = ["Ball", "Box", "CellBound", "Certificate", "KeyCells", "block_mask", "blockwise", "certified_attention"]
__all__ += ["certified_mask", "diameter_bound", "gaussian_share", "known_head", "multi_gap", "norm_bound"]
__all__ += ["output_error", "single_gap", "smallest_k", "tail_mass", "truncation_kl", "variance_bound"]
