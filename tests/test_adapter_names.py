"""The public names of `khot.sklearn`, `khot.hf` and `khot.sindy`."""

import importlib

import pytest

PUBLIC = {
    "khot.sklearn": {
        "Choice",
        "Discoveries",
        "Gate",
        "KHotNeighborhood",
        "KHotRegressor",
        "KHotSelector",
        "KSVD",
        "Portfolio",
        "Problem",
    }
    | {"gating", "gaussian_knockoffs", "knockoffs", "splicing", "surfaces", "trees"},
    "khot.hf": {"beam_search", "register_attention", "swap_routers", "TokenPruning", "prune_tokens", "swap_ffns"},
    "khot.sindy": {"KHotOptimizer", "floored_ebic"},
}


@pytest.mark.parametrize(("module", "public"), PUBLIC.items())
def test_the_public_names_of_adapters(module, public):
    made = importlib.import_module(module)
    assert {n for n in dir(made) if not n.startswith("_")} == public == set(made.__all__)
    assert all(getattr(made, n).__doc__ for n in public)
