"""Names that doctests of modules may use without importing them; those of pages import what they use, as readers do."""

import pytest
import torch

import khot


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest, doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.clear()
    if request.path.suffix == ".py":
        doctest_namespace.update(torch=torch, khot=khot, **{name: getattr(khot, name) for name in khot.__all__})
