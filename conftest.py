"""Names that doctests may use without importing them."""

import pytest
import torch

import khot


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.update(torch=torch, khot=khot, **{name: getattr(khot, name) for name in khot.__all__})
