import copy
import io
import math

import torch

import khot


def test_matches_the_function():
    x = torch.randn(2, 5, 3)
    mask = torch.rand(2, 5, 3) > 0.1
    layer = khot.nn.SigmoidTopK(2, dim=1, temperature=0.5)
    torch.testing.assert_close(layer(x, mask), khot.sigmoid_topk(x, 2, dim=1, temperature=0.5, mask=mask))


def test_hard_forward_soft_gradient():
    x = torch.randn(4, 6, requires_grad=True)
    layer = khot.nn.SigmoidTopK(2, hard=True)
    y = layer(x)
    assert torch.equal(y, khot.hard_topk(x, 2))
    g = torch.randn(4, 6)
    expected = torch.autograd.grad(khot.sigmoid_topk(x, 2), x, g)
    torch.testing.assert_close(torch.autograd.grad(y, x, g), expected)


def test_temperature_is_a_buffer():
    layer = khot.nn.SigmoidTopK(2, temperature=0.5)
    assert dict(layer.named_buffers())["temperature"].item() == 0.5
    assert not list(layer.parameters())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    other = khot.nn.SigmoidTopK(2)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    x = torch.randn(3, 5)
    torch.testing.assert_close(other(x), layer(x))
    layer.temperature.fill_(3.0)
    torch.testing.assert_close(layer(x), khot.sigmoid_topk(x, 2, temperature=3.0))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


def test_k_can_be_learned():
    layer = khot.nn.SigmoidTopK(torch.nn.Parameter(torch.tensor(2.0)))
    assert [name for name, _ in layer.named_parameters()] == ["k"]
    x = torch.randn(5)
    (layer(x) * torch.arange(5)).sum().backward()
    assert math.isfinite(layer.k.grad)
    assert layer.k.grad != 0


def test_tensor_k_is_a_buffer_and_repr_says_all():
    layer = khot.nn.SigmoidTopK(torch.tensor([1, 2]), hard=True)
    assert {name for name, _ in layer.named_buffers()} == {"k", "temperature"}
    assert layer(torch.randn(2, 5)).sum(-1).tolist() == [1, 2]
    assert repr(khot.nn.SigmoidTopK(2)) == "SigmoidTopK(k=2, dim=-1, temperature=1.0, hard=False)"


def test_temperature_can_be_learned():
    layer = khot.nn.SigmoidTopK(2, temperature=torch.nn.Parameter(torch.tensor(0.5)))
    assert [name for name, _ in layer.named_parameters()] == ["temperature"]
    (layer(torch.randn(5)) * torch.arange(5)).sum().backward()
    assert layer.temperature.grad != 0
