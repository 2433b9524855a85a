"""The public names of `khot.nn` and its public modules: all of them, and no other."""

from types import ModuleType

import pytest

import khot

PUBLIC = {
    "nn": {
        *("SigmoidTopK", "KHotGate", "Schedule", "geometric", "linear", "Router", "MoE", "MoEOutput"),
        *("SparseAutoencoder", "SparseAutoencoderConfig", "SparseAutoencoderOutput", "SparseAutoencoderMetrics"),
        *("SparseCode", "aux_k_loss", "aux_zipf_loss", "Neighbors", "SoftNeighbors", "neighbors_loss"),
        "SigmoidTopKAttention",
        *("SparkAttention", "SparkCache", "SparkFFN", "PrunedTokens", "TokenBudget", "TokenPruner"),
        *("Choice", "perturbation_scores", "global_budget"),
    },
    "nn.sparsity": {
        *("Flops", "Group", "Known", "Latency", "Masked", "Problem", "Report", "Row", "Score", "Sparsifier"),
        *("PrunedAttention", "drawn"),
        *("best_gradient", "blocks", "by_erdos_renyi", "by_layer", "channels", "choices", "columns", "combine"),
        *("dense_gradient", "globally", "gradient_growth", "hard", "heads", "learned", "magnitude", "n_of_m"),
        *("magnitude_times_learned", "masked_gradient", "parameters", "prunable", "rows", "sampled", "soft"),
        *("soft_gradient", "straight_through", "uniformly", "weights"),
    },
    "nn.neighbors": {
        *("Neighbors", "SoftNeighbors", "neighbors_loss", "squared_euclidean", "euclidean", "cosine"),
    },
    "nn.routing": {
        *("Route", "Routing", "sigma_topk", "balanced_sigma_topk", "softmax_topk", "sigmoid_gates", "noisy_topk"),
        *("expert_choice", "dselect_k", "load", "load_balance_loss", "importance_loss", "cv_squared", "z_loss"),
        *("update_bias", "max_violation", "dead_experts", "routing_entropy"),
    },
    "nn.spark": {"SparkAttention", "SparkCache", "SparkFFN"},
    "nn.tokens": {
        *("PrunedTokens", "TokenBudget", "TokenPruner", "attention_received", "fast_then_slow", "filtering_layers"),
        *("layer_similarity", "weighted_attention"),
    },
    "nn.selectors": {"Selector", "drawn", "hard", "sampled", "soft", "straight_through"},
    "nn.schedules": {"Schedule", "between", "cubic", "geometric", "linear"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_names_of_nn(name):
    module = khot
    for part in name.split("."):
        module = getattr(module, part)
    names = {n for n in dir(module) if not n.startswith("_")}
    rooms = {n for n in names if isinstance(getattr(module, n), ModuleType)}
    assert names - rooms == PUBLIC[name]
    own = {"moe", "neighbors", "routing", "sae", "schedules", "selectors", "sparsity", "spark", "tokens"}
    assert rooms == (own if name == "nn" else set())
    assert all(getattr(module, n).__doc__ for n in PUBLIC[name])


def test_the_old_names_of_schedules_are_the_new_ones():
    for name in ("Schedule", "geometric", "linear"):
        assert getattr(khot.nn, name) is getattr(khot.nn.schedules, name)
