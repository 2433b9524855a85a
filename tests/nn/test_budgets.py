"""One budget over many tensors, on one process; `tests/distributed` has it on several."""

import pytest
import torch

import khot


def test_it_is_the_choice_among_all():
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=g) for shape in ((3, 4), (5,), (2, 1, 3))]
    row = torch.cat([t.flatten() for t in tensors])
    for options, fn in (({}, khot.hard_topk), ({"temperature": 0.3}, khot.sigmoid_topk)):
        masks = khot.nn.global_budget(tensors, 7, **options)
        assert [m.shape for m in masks] == [t.shape for t in tensors]
        assert torch.equal(torch.cat([m.flatten() for m in masks]), fn(row, 7, **options))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="at least one tensor"):
        khot.nn.global_budget([], 1)
    with pytest.raises(TypeError, match="one dtype"):
        khot.nn.global_budget([torch.zeros(2), torch.zeros(2).double()], 1)
    with pytest.raises(TypeError, match="floating"):
        khot.nn.global_budget([torch.zeros(2, dtype=torch.int64)], 1)
