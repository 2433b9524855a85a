"""Numbers on the last dim: sums, roots, selection. No argument checks, no autograd."""
