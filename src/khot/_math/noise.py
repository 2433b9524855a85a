"""Random numbers by counter: number i of a stream is a function of (seed, stream, i), on every device and kernel."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
UNIT = 2.0**-53


def seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """The one number taken from the generator; 0-dimensional int64 on `device`."""
    source = device if generator is None else generator.device
    return torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=source).to(device)


def bits(key: Tensor, count: int) -> Tensor:
    """SplitMix64: `count` words of 64 bits for each key; (…) int64 → (…, count) int64."""
    place = torch.arange(1, count + 1, device=key.device)
    return mixed(key[..., None] + place * _signed(GOLDEN))


def mixed(word: Tensor) -> Tensor:
    """A bijection of 64-bit words that spreads every bit (Stafford's thirteenth, of SplitMix64)."""
    word = (word ^ _shifted(word, 30)) * _signed(_FIRST)
    word = (word ^ _shifted(word, 27)) * _signed(_SECOND)
    return word ^ _shifted(word, 31)


def uniform(seed: Tensor, stream: int, count: int) -> Tensor:
    """`count` uniforms of [0, 1), multiples of 2⁻⁵³; (count,) float64."""
    return unit(bits(stream_key(seed, stream), count))


def row_keys(seed: Tensor, draws: int, rows: int, is_paired: bool) -> Tensor:
    """A key for each draw of each row, (draws · rows); the same one for both draws of a pair."""
    if not is_paired:
        return bits(seed, draws * rows)
    return bits(seed, draws // 2 * rows).view(-1, 1, rows).expand(-1, 2, -1).flatten()


def is_second(draws: int, rows: int, device: torch.device) -> Tensor:
    """Whether a draw of a row is the second of its pair, (draws · rows)."""
    return (torch.arange(draws, device=device) % 2 == 1).repeat_interleave(rows)


def stream_key(seed: Tensor, stream: int) -> Tensor:
    """The key of one of the independent streams under a seed."""
    return mixed(seed ^ _signed(stream * GOLDEN & (2**64 - 1)))


def unit(word: Tensor) -> Tensor:
    """The upper 53 bits as a number of [0, 1)."""
    return _shifted(word, 11).to(torch.float64) * UNIT


def inside(u: Tensor) -> Tensor:
    """From [0, 1) to (0, 1): the middle of each cell, so that both logarithms are finite."""
    return (u + UNIT / 2).clamp(max=1 - UNIT)


def order(key: Tensor, n: int) -> Tensor:
    """A random order of 0, …, n − 1 for each key: its words sorted, the lowest bits replaced by the index; (…, n)."""
    width = max(n - 1, 1).bit_length()
    low = (1 << width) - 1
    words = (bits(key, n) & ~low) | torch.arange(n, device=key.device)
    return words.sort(-1).values & low


def _shifted(word: Tensor, by: int) -> Tensor:
    """A logical shift to the right; torch's keeps the sign."""
    return (word >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
