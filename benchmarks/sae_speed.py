"""A training step and decoding of the TopK autoencoder against a straightforward dense one, interleaved.

1024 tokens, 384 → 3072, k = 32, which is that of benchmarks/sae_peers.py; 512 tokens, 384 → 16384, k = 32, and 768 →
16384, k = 64. sparsify's model takes part if it is installed. Times are those of the process's processors. Writes
results/sae_speed.csv and docs/tables/sae-speed.md; some minutes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from khot.bench import markdown_table
from khot.nn import SparseAutoencoder, SparseAutoencoderConfig, selectors

SHAPES = ((1024, 384, 3072, 32), (512, 384, 16384, 32), (512, 768, 16384, 64))  # tokens, d, latents, k
STEP = "training step"
CASES = ("forward", "forward + backward", STEP, "decoding")
HALF = ", bfloat16"  # the product of tokens and encoder; the rest is float32
MODELS = ("dense TopK", "khot, hard", "khot, straight-through", "khot, soft", "khot, sampled")
MODELS += ("khot, hard" + HALF, "khot, straight-through" + HALF)
PEER = "sparsify"
MODELS += (PEER,) * (find_spec(PEER) is not None)


class Dense(nn.Module):
    """A TopK autoencoder as one would write it: two matrix products and `torch.topk`, codes dense."""

    def __init__(self, d: int, latents: int, k: int) -> None:
        super().__init__()
        rows = torch.nn.functional.normalize(torch.randn(latents, d))
        self.W_enc, self.W_dec = nn.Parameter(rows.t().contiguous()), nn.Parameter(rows.clone())
        self.b_enc, self.b_dec, self.k = nn.Parameter(torch.zeros(latents)), nn.Parameter(torch.zeros(d)), k

    def encode(self, x: Tensor) -> Tensor:
        """(tokens, latents)."""
        values, latents = ((x - self.b_dec) @ self.W_enc + self.b_enc).topk(self.k, dim=-1)
        return torch.zeros(*x.shape[:-1], len(self.b_enc)).scatter(-1, latents, values.relu())

    def decode(self, code: Tensor) -> Tensor:
        """(tokens, d)."""
        return code @ self.W_dec + self.b_dec

    def loss(self, x: Tensor) -> Tensor:
        """The fraction of variance unexplained."""
        return (x - self.decode(self.encode(x))).square().sum() / (x - x.mean(0)).square().sum()

    def remove_parallel_gradient(self) -> None:
        """As ours."""
        self.W_dec.grad -= (self.W_dec.grad * self.W_dec).sum(1, keepdim=True) * self.W_dec.data

    def normalize_decoder(self) -> None:
        """As ours."""
        self.W_dec.data /= self.W_dec.data.norm(dim=1, keepdim=True)


class Peer(nn.Module):
    """sparsify's model, with the names of ours."""

    def __init__(self, d: int, latents: int, k: int) -> None:
        super().__init__()
        from sparsify import SparseCoder, SparseCoderConfig

        self.coder = SparseCoder(d, SparseCoderConfig(num_latents=latents, k=k))
        self.encode, self.loss = self.coder.encode, lambda x: self.coder(x).fvu
        self.remove_parallel_gradient = self.coder.remove_gradient_parallel_to_decoder_directions
        self.normalize_decoder = self.coder.set_decoder_norm_to_unit_norm

    def decode(self, code: Any) -> Tensor:
        """(tokens, d)."""
        return self.coder.decode(code.top_acts, code.top_indices)


def actions(name: str, sizes: tuple[int, int, int, int]) -> dict[str, Callable[[], object]]:
    """What is timed, for one model."""
    tokens, d, latents, k = sizes
    torch.manual_seed(0)
    x = torch.randn(tokens, d)
    if name in (MODELS[0], PEER):
        model = (Peer if name == PEER else Dense)(d, latents, k)
        loss = model.loss
    else:
        selector = getattr(selectors, name.removeprefix("khot, ").removesuffix(HALF).replace("-", "_"))
        model = SparseAutoencoder(SparseAutoencoderConfig(d_in=d, latents=latents, k=k), selector=selector).start(x)

        def loss(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=name.endswith(HALF)):
                return model(x).loss

    adam = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    with torch.no_grad():
        model.eval()
        code = model.encode(x)
        model.train()

    def backward() -> None:
        adam.zero_grad()
        loss(x).backward()

    def step() -> None:
        backward()
        model.remove_parallel_gradient()
        with torch.no_grad():
            adam.step()
            model.normalize_decoder()

    quiet = torch.no_grad()
    return dict(zip(CASES, (lambda: loss(x), backward, step, quiet(lambda: model.decode(code))), strict=True))


def measure(sizes: tuple[int, int, int, int], rounds: int) -> list[dict[str, object]]:
    """Medians of the times, models in turn within each round, and their ratios to the dense one."""
    torch.set_num_threads(1)
    shape = f"{sizes[0]} × {sizes[1]} → {sizes[2]}, k = {sizes[3]}"
    todo = {(name, case): act for name in MODELS for case, act in actions(name, sizes).items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in todo}
    for i in range(rounds + 1):
        for case in CASES:
            for name in MODELS:
                start = time.process_time()
                todo[name, case]()
                if i:  # the first round warms up
                    times[name, case].append(time.process_time() - start)
    middle = {key: statistics.median(values) for key, values in times.items()}
    return [
        {
            "shape": shape,
            "model": name,
            "case": case,
            "milliseconds": round(1000 * middle[name, case], 3),
            "ratio": round(middle[name, case] / middle[MODELS[0], case], 4),
        }
        for name, case in middle
    ]


def computes_halves() -> str:
    """With or without: whether the processor multiplies numbers in bfloat16 (Linux)."""
    file = Path("/proc/cpuinfo")
    return "with" if file.exists() and {"avx512_bf16", "amx_bf16", "bf16"} & {*file.read_text().split()} else "without"


def table(rows: list[dict[str, object]]) -> str:
    """Milliseconds, in brackets the ratio to the dense one; the ratio of a step to the hard selector's."""
    lines = []
    for shape, name in dict.fromkeys((row["shape"], row["model"]) for row in rows):
        of = {row["case"]: row for row in rows if (row["shape"], row["model"]) == (shape, name)}
        cells = [f"{of[case]['milliseconds']:.3g} ({of[case]['ratio']:.2g})" for case in CASES]
        hard = next(r for r in rows if (r["shape"], r["model"], r["case"]) == (shape, MODELS[1], STEP))
        lines.append([str(shape), str(name), *cells, f"{of[STEP]['milliseconds'] / hard['milliseconds']:.2f}"])
    return (
        "<!-- Written by benchmarks/sae_speed.py; do not edit. -->\n\n"
        + markdown_table(["", "", *CASES, "step, against hard"], lines)
        + f"\n\nMilliseconds of processor time, medians, and the ratio to the dense one in the same interleaved run; "
        f"one thread, float32 but for what is named{HALF}, on a processor {computes_halves()} instructions for that. "
        "The first number of a shape is that of the tokens. A training step has the backward pass, the gradient's "
        "projection, fused Adam and the normalisation of the decoder, the same for all.\n"
    )


def main() -> int:
    args = common.parser(__doc__, "small sizes").parse_args()
    shapes, rounds = (((64, 32, 256, 4),), 3) if args.quick else (SHAPES, 11)
    rows = [row for sizes in shapes for row in measure(sizes, rounds)]
    places = common.places(args)
    common.write(places.results / "sae_speed.csv", common.to_csv(rows))
    common.write_table(places.tables / "sae-speed.md", table(rows))
    common.show(args, rows, table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
