"""The root of a monotone function of one number."""

from collections.abc import Callable


def falling_root(fn: Callable[[float], float], low: float, high: float, tolerance: float, most: int = 200) -> float:
    """Return a point of [low, high] where a falling function is at most 0 and at least −tolerance, or nearly so.

    fn(low) > 0 ≥ fn(high). False position with the Illinois rule, and a halving where that is slow.

    Returns:
        The best point with fn ≤ 0 that was found; where no float is better, the nearest one.
    """
    above, below = fn(low), fn(high)
    side, best = 0, high
    for turn in range(most):
        if -tolerance <= below <= 0:
            break
        guess = low + (high - low) * above / (above - below) if turn % 4 != 3 else (low + high) / 2
        if not low < guess < high:
            guess = (low + high) / 2
            if not low < guess < high:
                break
        value = fn(guess)
        if value > 0:
            low, above = guess, value
            below = below / 2 if side == 1 else below
            side = 1
        else:
            high = best = guess
            below = value
            above = above / 2 if side == -1 else above
            side = -1
            if value >= -tolerance:
                break
    return best
