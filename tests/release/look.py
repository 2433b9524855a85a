"""Look at the khot that is installed: where it is, which kernel it has, whose OpenMP it uses, whether it is right.

It needs khot and nothing else, so that it can be run in a clean environment and by cibuildwheel. `--native` makes the
native library a must.
"""

import json
import sys
from pathlib import Path

import torch

import khot


def bisected(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return σ_k of each row by bisection: another method than either of khot's."""
    low, high = x.amin(-1, keepdim=True) - 50, x.amax(-1, keepdim=True) + 50
    for _ in range(80):
        middle = (low + high) / 2
        too_many = torch.sigmoid(x - middle).sum(-1, keepdim=True) > k
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return torch.sigmoid(x - (low + high) / 2)


def openmp() -> list[str]:
    """Return the OpenMP libraries in this process (on Linux)."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    return sorted(path for path in paths if any(name in Path(path).name for name in ("libgomp", "libomp", "libiomp")))


def main() -> None:
    """Check the numbers, and print what was found as JSON."""
    x = torch.randn(400, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(2)
    error = (khot.sigmoid_topk(x, 10) - bisected(x, 10)).abs().max().item()
    x.requires_grad_()
    gradient = torch.autograd.grad(khot.sigmoid_topk(x, 10)[:, 0].sum(), x)[0].sum(-1).abs().max().item()
    found = {
        "file": khot.__file__,
        "torch": torch.__version__,
        "cpu": khot.kernels.status()["cpu"],
        "openmp": openmp(),
        "error": error,
        "sum of the gradient": gradient,
    }
    print(json.dumps(found))
    if not (error < 1e-12 and gradient < 1e-12):
        sys.exit("the installed khot computes something else than bisection does")
    if "--native" in sys.argv and not found["cpu"].startswith("native"):
        sys.exit("the native library must be there; it is not")


if __name__ == "__main__":
    main()
