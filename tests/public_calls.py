"""One call of every public function and layer that takes tensors, as `call(t, k)`.

`t` is a `Tensors`, which makes tensors of the wanted kind (ordinary, on meta, fake); `k` makes integers of the wanted
kind (int, numpy's).
"""

from functools import partial

import torch
from torch import nn

import khot
from khot import attention, coding, designs, estimators, search, survey
from khot.nn import neighbors as near
from khot.nn import routing, selectors, tokens


class Tensors:
    """Make tensors from one seed, and give them to the test by `kind`: identity, to meta, or to fake tensors."""

    def __init__(self, kind=lambda t: t):
        self.kind, self.generator = kind, torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        return self.kind(torch.randn(shape, generator=self.generator))

    def positive(self, *shape):
        return self.kind(torch.rand(shape, generator=self.generator) + 0.1)

    def of(self, *values, dtype=torch.float32):
        return self.kind(torch.tensor(values, dtype=dtype))

    def module(self, module):
        """A Module with these tensors as its parameters and buffers."""
        for part in module.modules():
            for name, value in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(self.kind(value.detach())))
            for name, value in part.named_buffers(recurse=False):
                setattr(part, name, self.kind(value))
        return module


def law(t, k, design=designs.Pivotal, **options):
    return design(logits=t(6), k=k(2), **options)


def routed(t, k):
    return routing.softmax_topk(t(5, 4), k(2))


def squared(x):
    return x.square().sum(-1)


def layer(make, *shape, **options):
    return lambda t, k: t.module(make(k))(t(*shape), **options)


def coded(t, k):
    signals, atoms = t(7, 5), nn.functional.normalize(t(6, 5), dim=1)
    return signals, atoms, coding.omp(signals, atoms, k(2))


def autoencoder(k, kind):
    config = khot.nn.SparseAutoencoderConfig(d_in=k(8), latents=k(16), k=k(2), kind=kind)
    return khot.nn.SparseAutoencoder(config)


def searched(t, k, select):
    table = t(5, 5)

    def step(last, state):
        return (search.embed(last, table) if last.is_floating_point() else table[last]).log_softmax(-1), state

    start = t.of(0, 1, dtype=torch.long)
    return search.beam_search(step, (), k(2), start=start, length=3, select=select)


def each(room, names, call):
    """The same call of some functions or classes of a room: `call(fn, t, k)`."""
    return {f"{room.__name__}.{name}": partial(call, getattr(room, name)) for name in names}


RELAXATIONS = ("sigmoid", "laplace", "normal", "cauchy", "euclidean", "power", "log_sigmoid", "hard", "statistical")
RELAXATIONS = (*(f"{name}_topk" for name in (*RELAXATIONS, "ordered", "soft")), "statistical_logits")
RELAXATIONS += ("statistical_threshold", "threshold", "sample_khot", "sample_relaxed_khot")
SURROGATES = ("straight_through_sample", "imle", "relaxed", "xie_ermon", "stochastic_times_smooth")
LOSSES = ("score_function", "rloo", "taylor_control_variate", "reinmax")
DESIGNS = ("Pivotal", "Systematic", "ConditionalPoisson", "Sampford", "Brewer", "Pareto", "PlackettLuce")
TAILS = ("tail_mass", "single_gap", "multi_gap", "known_head", "truncation_kl")
ROUTES = ("softmax_topk", "sigmoid_gates", "sigma_topk", "balanced_sigma_topk", "expert_choice")
LOADS = ("load", "load_balance_loss", "importance_loss", "z_loss", "max_violation", "dead_experts", "routing_entropy")
UPDATES = ("gradient_update", "least_squares_update", "power_update", "svd_update")
SELECTORS = ("hard", "soft", "drawn", "sampled", "straight_through")

CALLS = {
    **each(khot, RELAXATIONS, lambda fn, t, k: fn(t(3, 6), k(2))),
    "hard_topk of one row": lambda t, k: khot.hard_topk(t(6), k(2)),
    "sigmoid_topk with a mask": lambda t, k: khot.sigmoid_topk(t(3, 6), k(2), mask=t(3, 6) > -9),
    "sigmoid_topk with costs": lambda t, k: khot.sigmoid_topk(t(3, 6), k(2), costs=t.positive(3, 6)),
    "sample_khot with Systematic": lambda t, k: khot.sample_khot(t(3, 6), k(2), design=designs.Systematic),
    "sample_relaxed_khot hard": lambda t, k: khot.sample_relaxed_khot(t(3, 6), k(2), hard=True),
    "precision_at_k_loss": lambda t, k: khot.precision_at_k_loss(t(3, 6), (t(3, 6) > 0).float(), k(2)),
    "recall_at_k_loss": lambda t, k: khot.recall_at_k_loss(t(3, 6), (t(3, 6) > 0).float(), k(2)),
    "khot_cross_entropy": lambda t, k: khot.khot_cross_entropy(t(3, 6), khot.hard_topk(t(3, 6), k(2))),
    "successive_halving_topk": lambda t, k: khot.successive_halving_topk(t(8, 3), t(8), k(2)),
    "iterative_topk": lambda t, k: khot.iterative_topk(t(8, 3), t(8), k(2)),
    "horvitz_thompson": lambda t, k: khot.horvitz_thompson(t(6), khot.hard_topk(t(6), k(2)), t.positive(6) / 2),
    "inclusion_probs": lambda t, k: khot.inclusion_probs(t.positive(6), k(2)),
    **each(designs, DESIGNS, lambda design, t, k: law(t, k, design).sample((2,))),
    **{f"{name} has a mean": lambda t, k, name=name: law(t, k, getattr(designs, name)).mean for name in DESIGNS},
    "Pivotal of probs": lambda t, k: designs.Pivotal(khot.sigmoid_topk(t(3, 6), k(2)), k(2)).sample(),
    "ConditionalPoisson.log_prob": lambda t, k: law(t, k, designs.ConditionalPoisson, validate_args=False).log_prob(
        t.of(1, 1, 0, 0, 0, 0)
    ),
    "Cube draws": lambda t, k: law(t, k, partial(designs.Cube, balance=t(6, 2))).sample(),
    "LocalPivotal draws": lambda t, k: law(t, k, partial(designs.LocalPivotal, places=t(6, 2))).sample(),
    "Budgeted draws": lambda t, k: designs.Budgeted(t(6), k(2), costs=t.positive(6)).sample(),
    "RelaxedKHot draws": lambda t, k: designs.RelaxedKHot(0.5, logits=t(6), k=k(2)).rsample(),
    "KHotStraightThrough draws": lambda t, k: designs.KHotStraightThrough(logits=t(6), k=k(2)).rsample(),
    **each(estimators, SURROGATES, lambda fn, t, k: fn(law(t, k), (2,))),
    "estimators.simple": lambda t, k: estimators.simple(law(t, k, designs.ConditionalPoisson)),
    **each(estimators, LOSSES, lambda fn, t, k: fn(law(t, k, designs.ConditionalPoisson), squared, num_samples=k(2))),
    **each(attention, TAILS, lambda fn, t, k: fn(t(3, 6), k(2))),
    "attention.smallest_k": lambda t, k: attention.smallest_k(t(3, 6), 0.1),
    "attention.certified_attention": lambda t, k: attention.certified_attention(t(4, 8), t(9, 8), t(9, 8), epsilon=0.1),
    "attention.certified_mask": lambda t, k: attention.certified_mask(t(4, 8), t(9, 8), epsilon=0.1),
    "attention.KeyCells": lambda t, k: attention.certified_attention(
        t(4, 8), attention.KeyCells(t(9, 8), size=k(3)), t(9, 8), epsilon=0.1
    ),
    "attention.output_error": lambda t, k: attention.output_error(t(4, 9), t(9, 8), k(2)),
    "attention.norm_bound": lambda t, k: attention.norm_bound(t.positive(4), t(9, 8)),
    **each(coding, ("omp", "thresholding_pursuit"), lambda fn, t, k: fn(t(7, 5), t(6, 5), k(2))),
    "coding.soft_pursuit": lambda t, k: coding.soft_pursuit(t(7, 5), t(6, 5), k(2)),
    "coding.splice": lambda t, k: coding.splice(t(20, 6), t(20), k(2)),
    "coding.splice_path": lambda t, k: coding.splice_path(t(20, 6), t(20), k(2)),
    **each(coding, UPDATES, lambda fn, t, k: fn(*coded(t, k))),
    **each(search, ("hard", "soft", "sampled"), lambda fn, t, k: searched(t, k, fn)),
    "survey.total": lambda t, k: survey.total(t(6), 1 + t.positive(6)),
    "survey.mean": lambda t, k: survey.mean(t(6), 1 + t.positive(6)),
    "survey.ratio": lambda t, k: survey.ratio(t(6), t.positive(6), 1 + t.positive(6)),
    "survey.calibrate": lambda t, k: survey.calibrate(1 + t.positive(6), t.positive(6, 2), 9 + t.positive(2)),
    **each(routing, ROUTES, lambda fn, t, k: fn(t(5, 4), k(2))),
    "routing.sigma_topk sampled": lambda t, k: routing.sigma_topk(t(5, 4), k(2), sample=True),
    "routing.noisy_topk": lambda t, k: routing.noisy_topk(t(5, 8), k(2)),
    "routing.dselect_k": lambda t, k: routing.dselect_k(t(5, 6), k(2), num_experts=k(4)),
    **each(routing, LOADS, lambda fn, t, k: fn(routed(t, k))),
    **each(selectors, SELECTORS, lambda fn, t, k: fn(t(3, 6), k(2))),
    "nn.SigmoidTopK": layer(lambda k: khot.nn.SigmoidTopK(k(2)), 3, 8),
    "nn.SigmoidTopK hard": layer(lambda k: khot.nn.SigmoidTopK(k(2), hard=True), 3, 8),
    "nn.KHotGate": layer(lambda k: khot.nn.KHotGate(k(8), k(2)), 3, 8),
    "nn.KHotGate in evaluation": layer(lambda k: khot.nn.KHotGate(k(8), k(2)).eval(), 3, 8),
    "nn.Router": layer(lambda k: khot.nn.Router(k(8), k(4), k(2)), 5, 8),
    "nn.MoE": layer(lambda k: khot.nn.MoE(khot.nn.Router(8, 4, k(2)), [nn.Linear(8, 8) for _ in range(4)]), 5, 8),
    "nn.SoftNeighbors": lambda t, k: t.module(khot.nn.SoftNeighbors(k(2)))(t(3, 8), t(6, 8), t(6, 4)),
    "nn.neighbors_loss": lambda t, k: near.neighbors_loss(t(6, 8), t.of(0, 0, 1, 1, 2, 2, dtype=torch.long), k(2)),
    "nn.SigmoidTopKAttention": layer(lambda k: khot.nn.SigmoidTopKAttention(k(8), k(2), k(3)), 2, 5, 8),
    "nn.SparkFFN": layer(lambda k: khot.nn.SparkFFN(k(8), k(16), k(2)), 3, 8),
    "nn.SparkAttention": layer(lambda k: khot.nn.SparkAttention(k(8), k(2), k(3)), 2, 5, 8),
    "nn.TokenPruner": layer(lambda k: khot.nn.TokenPruner(k(2), score=k(8)), 2, 5, 8),
    "nn.TokenPruner in evaluation": layer(lambda k: khot.nn.TokenPruner(k(2), score=k(8)).eval(), 2, 5, 8),
    "nn.Choice": layer(lambda k: khot.nn.Choice([nn.Identity(), nn.Linear(8, 8)], k(1)), 3, 8),
    **{
        f"nn.SparseAutoencoder {kind}": layer(partial(autoencoder, kind=kind), 9, 8)
        for kind in ("topk", "batch", "feature", "jumprelu")
    },
    "nn.global_budget": lambda t, k: khot.nn.global_budget([t(3, 2), t(4)], k(2)),
    "tokens.attention_received": lambda t, k: tokens.attention_received(t(2, 2, 5, 5).softmax(-1)),
    "tokens.weighted_attention": lambda t, k: tokens.weighted_attention(
        t(2, 2, 5, 4), t(2, 2, 5, 4), t(2, 2, 5, 4), t.positive(2, 5)
    ),
    "metrics.chamfer_cosine": lambda t, k: khot.metrics.chamfer_cosine(t(2, 5), t(3, 5)),
    "designs.spatial_order": lambda t, k: designs.spatial_order(t(6, 2)),
}
