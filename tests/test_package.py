import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import khot

PUBLIC = {
    "khot": {
        *("sigmoid_topk", "laplace_topk", "normal_topk", "cauchy_topk", "euclidean_topk", "power_topk", "relaxation"),
        *("log_sigmoid_topk", "threshold", "hard_topk", "straight_through", "ordered_topk", "soft_topk"),
        *("successive_halving_topk", "iterative_topk"),
        *("statistical_logits", "statistical_threshold", "statistical_topk"),
        *("khot_cross_entropy", "precision_at_k_loss", "recall_at_k_loss"),
        *("sample_khot", "sample_relaxed_khot", "horvitz_thompson", "horvitz_thompson_variance"),
        *("inclusion_probs", "sample_rows"),
    },
    "khot.nn": {
        *("SigmoidTopK", "SparseAutoencoder", "SparseAutoencoderConfig", "SparseAutoencoderOutput", "SparseCode"),
        *("aux_k_loss", "aux_zipf_loss", "SparseAutoencoderMetrics"),
        *("KHotGate", "Schedule", "geometric", "linear", "Router", "MoE", "MoEOutput"),
        *("Neighbors", "SoftNeighbors", "neighbors_loss", "SigmoidTopKAttention"),
        *("SparkAttention", "SparkCache", "SparkFFN", "PrunedTokens", "TokenBudget", "TokenPruner"),
        *("Choice", "perturbation_scores"),
        "global_budget",
    },
    "khot.kernels": {"cpu", "cpu_costs", "cpu_logs", "cpu_samplers", "status"},
    "khot.distributed": {"Message", "messages", "spread", "total"},
    "khot.sae": {
        *("train", "Training", "Trainer", "Run", "Point", "Recipe", "RECIPES", "HELD_OUT", "measure"),
        *("Activations", "open_activations", "check_activations", "ModelActivations", "Pairs", "Source", "sweep"),
        *("load_dictionary_learning", "load_sparsify", "save_dictionary_learning", "save_sparsify"),
        *("features", "Features", "Examples", "Ranked", "Tokens", "open_tokens", "open_vocabulary"),
    },
}


def test_public_names():
    public = {name for name, v in vars(khot).items() if not name.startswith("_") and not isinstance(v, ModuleType)}
    assert public == PUBLIC["khot"] == set(khot.__all__)
    for room in [
        "attention",
        "boosts",
        "constraints",
        "designs",
        "estimators",
        "kernels",
        "metrics",
        "nn",
        "search",
        "survey",
        "testing",
    ]:
        assert isinstance(getattr(khot, room), ModuleType)
    assert {n for n, v in vars(khot.nn).items() if not n.startswith("_") and callable(v)} == PUBLIC["khot.nn"]
    for name in ("khot.kernels", "khot.sae", "khot.distributed"):
        assert {n for n in dir(importlib.import_module(name)) if not n.startswith("_")} == PUBLIC[name]


ROOMS = ["attention", "bench", "boosts", "constraints", "data", "designs", "distributed", "estimators", "hf", "kernels"]
ROOMS += ["metrics", "sae", "search", "sindy", "sklearn", "survey", "testing", "nn.neighbors", "nn.schedules"]
ROOMS += ["nn.selectors", "nn.spark", "nn.sparsity", "nn.tokens"]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_shows_its_public_names_and_no_others(room):
    module = importlib.import_module(f"khot.{room}")
    shown = {n for n in dir(module) if not n.startswith("_") and not isinstance(getattr(module, n), ModuleType)}
    assert shown == {n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)}
    assert undeclared(module) == set()


def undeclared(module):
    """What a module defines itself, without an underscore and outside `__all__`; its own `__dir__` would hide that."""
    own = {n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    return {name for name in own if not name.startswith("_")} - set(module.__all__)


def test_what_a_room_hides_is_found(monkeypatch):
    """Rooms with a `__dir__` of their own showed `__all__`, whatever they defined, and the test compared it to that."""
    spark = importlib.import_module("khot.nn.spark")
    monkeypatch.setattr(spark, "extra", type("extra", (), {"__module__": spark.__name__}), raising=False)
    assert "extra" not in dir(spark)
    assert undeclared(spark) == {"extra"}


def test_every_public_function_says_its_shapes_and_has_an_example():
    for name in PUBLIC["khot"]:
        text = getattr(khot, name).__doc__
        assert ">>>" in text, name
        assert re.search(r"\(…, n\)|any shape", text), name


@pytest.mark.slow
def test_import_is_light():
    """Nothing heavier than torch and numpy: what khot adds to the modules that torch and numpy load is khot."""
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import khot; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = set(done.stdout.split()) - {"torch", "numpy"} - set(sys.stdlib_module_names)
    assert added == {"khot"}
    assert done.stderr == ""


def test_is_typed():
    assert (Path(khot.__file__).parent / "py.typed").exists()


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", khot.__version__)
    assert torch.__version__ >= "2.6"
