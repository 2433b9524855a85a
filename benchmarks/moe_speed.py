"""What a mixture of experts costs: khot's sorted dispatch, a loop with masks, and all experts for all tokens.

16 experts of 256 → 512 → 256, k = 2, 4096 tokens, σ_k routing in all, the same weights; the outputs are compared first.
Medians of one interleaved run with one thread (process CPU time) and one with all (wall time): forward without a graph,
and forward and backward with the gradients of all parameters. Writes docs/tables/moe-speed.md and
results/moe_speed.csv. `--beside transformers` compares 64 gated experts, k = 8, with the two ways in which transformers
computes them, its loop and its grouped matrix products, with one thread, and writes docs/tables/moe-speed-64.md and
results/moe_speed_64.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from benchmarks import common
from khot.bench import Contender, Report, Settings, environment, markdown_table, measure, records, threads, to_csv
from khot.nn import MoE, Router

EXPERTS, K, DIM, HIDDEN, TOKENS = 16, 2, 256, 512, 4096
FINE_EXPERTS, FINE_K = 64, 8
OURS = "khot.nn.MoE"
Models = dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]


class Looped(nn.Module):
    """For each expert, the tokens that a mask finds; results are added in place."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) → the same."""
        routing = self.moe.router(x)
        mask = nn.functional.one_hot(routing.indices, len(self.moe.experts)).permute(2, 1, 0)  # (experts, k, tokens)
        result = torch.zeros_like(x)
        for place in mask.sum((1, 2)).nonzero()[:, 0].tolist():
            slot, token = torch.where(mask[place])
            output = self.moe.experts[place](x[token]) * routing.weights[token, slot, None]
            result.index_add_(0, token, output)
        return result


class Dense(nn.Module):
    """All experts for all tokens; those that were not chosen have weight 0."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.router = moe.router
        first, second = ([expert[i] for expert in moe.experts] for i in (0, 2))
        parts = (first, "weight"), (first, "bias"), (second, "weight"), (second, "bias")
        stacked = [torch.stack([getattr(layer, name).detach() for layer in layers]) for layers, name in parts]
        self.w1, self.b1, self.w2, self.b2 = map(nn.Parameter, stacked)  # (experts, …)

    def weights(self, x: Tensor) -> Tensor:
        """Of each expert, (tokens, experts)."""
        routing = self.router(x)
        return torch.zeros_like(routing.probs).scatter(-1, routing.indices, routing.weights)


class Batched(Dense):
    """By batched matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) → the same."""
        hidden = gelu(torch.baddbmm(self.b1[:, None], x.expand(EXPERTS, -1, -1), self.w1.mT))
        outputs = torch.baddbmm(self.b2[:, None], hidden, self.w2.mT)  # (experts, tokens, dim)
        return (outputs * self.weights(x).mT[..., None]).sum(0)


class Joined(Dense):
    """By two matrix products: the weights go to the hidden units, and the second product sums over experts."""

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) → the same."""
        weights = self.weights(x)
        hidden = gelu(linear(x, self.w1.flatten(0, 1), self.b1.flatten())).unflatten(-1, (EXPERTS, HIDDEN))
        hidden = (hidden * weights[..., None]).flatten(-2)
        return torch.addmm(weights @ self.b2, hidden, self.w2.movedim(0, 1).flatten(1).mT)


class Gated(nn.Module):
    """An expert as in Mixtral: down(silu(gate(x))·up(x))."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) → the same."""
        gate, up = linear(x, self.gate_up).chunk(2, -1)
        return linear(silu(gate) * up, self.down)


class Theirs(nn.Module):
    """Mixtral's experts as transformers computes them, behind khot's router."""

    def __init__(self, router: Router, gate_up: Tensor, down: Tensor, implementation: str) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        sizes = {"hidden_size": down.shape[1], "intermediate_size": down.shape[2], "num_local_experts": len(down)}
        config = MixtralConfig(**sizes)
        config._experts_implementation = implementation
        self.router, self.experts = router, MixtralExperts(config)
        with torch.no_grad():
            self.experts.gate_up_proj.copy_(gate_up)
            self.experts.down_proj.copy_(down)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) → the same."""
        routing = self.router(x)
        return self.experts(x, routing.indices, routing.weights)


def beside_transformers() -> Models:
    """The contenders with 64 experts, with the same weights."""
    torch.manual_seed(0)
    gate_up = torch.randn(FINE_EXPERTS, 2 * HIDDEN, DIM) / DIM**0.5
    down = torch.randn(FINE_EXPERTS, DIM, HIDDEN) / HIDDEN**0.5
    router = Router(DIM, FINE_EXPERTS, FINE_K)
    moe = MoE(router, [Gated(*each) for each in zip(gate_up, down, strict=True)])
    loop, grouped = (Theirs(router, gate_up, down, how) for how in ("eager", "grouped_mm"))
    return {
        OURS: (moe, lambda x: moe(x).output),
        "transformers, grouped_mm": (grouped, grouped),
        "transformers, loop": (loop, loop),
    }


def models() -> Models:
    """The contenders, with the same weights."""
    torch.manual_seed(0)
    experts = [nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)) for _ in range(EXPERTS)]
    moe = MoE(Router(DIM, EXPERTS, K), experts)
    looped, joined, batched = Looped(moe), Joined(moe), Batched(moe)
    return {
        OURS: (moe, lambda x: moe(x).output),
        "a loop with masks": (looped, looped),
        "all experts, two products": (joined, joined),
        "all experts, batched": (batched, batched),
    }


def contenders(of: Models) -> dict[str, Contender]:
    """Each twice: forward, and both with the gradients of parameters and tokens."""
    result = {}
    for name, (module, call) in of.items():

        def forward(x: Tensor, k: float, call: Callable[[Tensor], Tensor] = call) -> Tensor:
            with torch.no_grad():
                return call(x)

        def both(x: Tensor, k: float, module: nn.Module = module, call: Callable[[Tensor], Tensor] = call) -> Tensor:
            leaf = x.detach().requires_grad_()
            output = call(leaf)
            torch.autograd.grad(output, [leaf, *module.parameters()], torch.ones_like(output), allow_unused=True)
            return output.detach()

        result[f"{name}, forward"] = Contender(fn=forward, what="", kind="reference")
        result[f"{name}, both"] = Contender(fn=both, what="", kind="reference")
    return result


def table(reports: list[Report], names: Iterable[str], about: str) -> str:
    """Times of khot's, less is faster."""
    times = [{r.name: r.forward.median for r in report.results if r.forward} for report in reports]
    heading, columns = [""], []
    for report, of in zip(reports, times, strict=True):
        for part, what in (("forward", "forward"), ("both", "forward and backward")):
            heading.append(f"{what}, {threads(report.settings.threads)}")
            columns.append({name: of.get(f"{name}, {part}") for name in names})
    lines = [
        [f"`{name}`" if name == OURS else name, *(_cell(column[name], column[OURS]) for column in columns)]
        for name in names
    ]
    return (
        "<!-- Written by benchmarks/moe_speed.py; do not edit. -->\n\n"
        + markdown_table(heading, lines)
        + f"\n\nTimes of `{OURS}`'s; more than 1 is slower than khot. {about} Medians of one interleaved run for each "
        + f"number of threads; {environment()['cpu']}.\n"
    )


def _cell(time: float | None, ours: float | None) -> str:
    if time is None or ours is None:
        return "–"
    return f"1 ({1e3 * ours:.0f} ms)" if time == ours else f"{time / ours:.2f}"


ABOUT = (
    f"{TOKENS} tokens, {EXPERTS} experts of {DIM} → {HIDDEN} → {DIM}, k = {K}, float32; all experts do {EXPERTS // K} "
    "times the arithmetic."
)
FINE = f"{TOKENS} tokens, {FINE_EXPERTS} gated experts of {DIM} → {HIDDEN} → {DIM}, k = {FINE_K}, float32."


def main() -> int:
    parser = common.parser(__doc__, "64 tokens, one thread, 0.1 seconds each")
    parser.add_argument("--budget", type=float, default=20.0, metavar="S", help="seconds for each column's cell (20)")
    parser.add_argument("--beside", choices=["transformers"], help="64 experts, beside transformers' own ways")
    args = parser.parse_args()
    tokens, budget = (64, 0.1) if args.quick else (TOKENS, args.budget)
    of, k, about, name = (beside_transformers, FINE_K, FINE, "-64") if args.beside else (models, K, ABOUT, "")
    reports = []
    for count in [1] if args.quick or args.beside else sorted({1, torch.get_num_threads()}):
        settings = Settings(shape=(tokens, DIM), k=k, threads=count, backward=False, budget=budget)
        reports.append(measure(contenders(of()), settings, common.say))
    text, places = table(reports, of(), about), common.places(args)
    rows = [row for report in reports for row in records(report)]
    common.write_table(places.tables / f"moe-speed{name}.md", text)
    common.write(places.results / f"moe_speed{name.replace('-', '_')}.csv", to_csv(rows))
    common.show(args, rows, text)
    return 130 if any(report.interrupted for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
