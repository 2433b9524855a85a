"""Random numbers by counter: number i of a stream is a function of (seed, stream, i), on every device and kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _check

# (seed, stream, count) → (count,) uniforms of [0, 1): `khot.ops.uniform`, given to samplers by their callers
Uniform = Callable[[Tensor, int, int], Tensor]
UNIT = 2.0**-53
SORTED, ROUNDS = 512, 6  # an order of more items is a bijection, of so many rounds
GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STEP = GOLDEN - 2**64  # the same 64 bits, signed


def seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Take one number from the generator (torch's own if None); 0-dimensional int64 on `device`."""
    _check.generator(generator)  # every sampler comes here for its seed
    source = device if generator is None else generator.device
    return torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=source).to(device)


def bits(key: Tensor, count: int) -> Tensor:
    """Return `count` words of 64 bits for each key, by SplitMix64; (…) int64 → (…, count) int64."""
    return mixed(key[..., None] + torch.arange(1, count + 1, device=key.device) * STEP)


def mixed(word: Tensor) -> Tensor:
    """Map 64-bit words one to one, spreading every bit (Stafford's 13th mixer, of SplitMix64)."""
    word = (word ^ _shifted(word, 30)) * _signed(_FIRST)
    word = (word ^ _shifted(word, 27)) * _signed(_SECOND)
    return word ^ _shifted(word, 31)


def uniform(seed: Tensor, stream: int, count: int) -> Tensor:
    """Return `count` uniforms of [0, 1), multiples of 2⁻⁵³; (count,) float64."""
    return unit(bits(stream_key(seed, stream), count))


def row_keys(seed: Tensor, draws: int, rows: int, is_paired: bool) -> Tensor:
    """Return a key for each draw of each row, (draws · rows); the same one for both draws of a pair."""
    if not is_paired:
        return bits(seed, draws * rows)
    return bits(seed, draws // 2 * rows).view(-1, 1, rows).expand(-1, 2, -1).flatten()


def is_second(draws: int, rows: int, device: torch.device) -> Tensor:
    """Tell whether a draw of a row is the second of its pair, (draws · rows)."""
    return (torch.arange(draws, device=device) % 2 == 1).repeat_interleave(rows)


def stream_key(seed: Tensor, stream: int) -> Tensor:
    """Return the key of one of the independent streams under a seed."""
    return mixed(seed ^ _signed(stream * GOLDEN & (2**64 - 1)))


def unit(word: Tensor) -> Tensor:
    """Return the upper 53 bits as a number of [0, 1)."""
    return _shifted(word, 11).to(torch.float64) * UNIT


def inside(u: Tensor) -> Tensor:
    """Map [0, 1) to (0, 1): the middle of each cell, so that both logarithms are finite."""
    return (u + UNIT / 2).clamp(max=1 - UNIT)


def gumbel_quantile(u: Tensor) -> Tensor:
    """Return F⁻¹(u) of the Gumbel law; finite for u in (0, 1], as (j + ½)·2⁻⁵³ may round to 1."""
    return -torch.log(-torch.log(u.clamp(max=1 - UNIT)))


def gumbel(shape: torch.Size, like: Tensor, generator: torch.Generator | None, uniform: Uniform) -> Tensor:
    """Draw Gumbel noise in the dtype and on the device of `like`."""
    u = inside(uniform(seed(generator, like.device), 0, shape.numel()))
    return gumbel_quantile(u).view(shape).to(like.dtype)


def order(key: Tensor, n: int) -> Tensor:
    """Return a random order of 0, …, n − 1 for each key, (…, n).

    A short one is the key's words sorted, with the index as lowest bits. A long one is a bijection of [0, 2^m) that
    depends on the key: where it leaves [0, n), it is followed until it comes back. It takes no sorting.
    """
    if n > SORTED:
        return _shuffled(key, n)
    low = (1 << max(n - 1, 1).bit_length()) - 1
    words = (bits(key, n) & ~low) | torch.arange(n, device=key.device)
    return words.sort(-1).values & low


def _shuffled(key: Tensor, n: int) -> Tensor:
    m = (n - 1).bit_length()
    rounds = [(word & 0xFFFFFFFF, _shifted(word, 32) | 1) for word in bits(key, ROUNDS)[..., None, :].unbind(-1)]
    x = torch.arange(n, device=key.device).expand(*key.shape, n)
    is_out = torch.ones_like(x, dtype=torch.bool)
    while bool(is_out.any()):
        y = x
        for add, times in rounds:  # each maps [0, 2^m) one to one
            y = (y + add) * times & ((1 << m) - 1)
            y = y ^ (y >> (m + 1) // 2)
        x = torch.where(is_out, y, x)
        is_out = x >= n
    return x


def _shifted(word: Tensor, by: int) -> Tensor:
    """Shift to the right, filling with zeros; torch's own shift keeps the sign."""
    return (word >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
