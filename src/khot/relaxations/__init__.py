"""The public (x, k) → k-hot functions."""
