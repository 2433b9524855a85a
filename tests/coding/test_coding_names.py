"""The public names of `khot.coding`."""

from types import ModuleType

import torch

import khot.coding
import khot.nn

PUBLIC = {
    *("omp", "thresholding_pursuit", "soft_pursuit", "SparseCode", "SoftCode"),
    *("splice", "splice_path", "Splice", "SplicePath", "Criterion", "aicc", "bic", "ebic", "gcv"),
    *("svd_update", "power_update", "least_squares_update", "gradient_update"),
}


def test_the_public_names():
    names = {n for n, v in vars(khot.coding).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert names == PUBLIC
    assert all(getattr(khot.coding, name).__doc__ for name in PUBLIC - {"Criterion"})  # an alias of Callable


def test_there_is_one_sparse_code():
    assert khot.nn.SparseCode is khot.coding.SparseCode
    code = khot.coding.omp(torch.eye(3), torch.eye(3), 1)
    assert code.tokens is code.rows
    assert code.latents is code.columns
