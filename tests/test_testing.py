"""Negative controls: each broken relaxation must fail, and the message must name the law it breaks."""

import pytest
import torch

import khot
from khot import sigmoid_topk
from khot.testing import check_relaxation


def unshifted(x, k, *, dim=-1, temperature=1.0, mask=None):
    """Scaled to the sum, as some public code does: entries exceed 1."""
    p = (x / temperature).sigmoid()
    return k * p / p.sum(dim, keepdim=True)


def unmasked(x, k, *, dim=-1, temperature=1.0, mask=None):
    return sigmoid_topk(x, k, dim=dim, temperature=temperature)


def stale_temperature(x, k, *, dim=-1, temperature=1.0, mask=None):
    return sigmoid_topk(x, k, dim=dim, mask=mask)


def no_count_gradient(x, k, *, dim=-1, temperature=1.0, mask=None):
    k = k.detach() if isinstance(k, torch.Tensor) else k
    return sigmoid_topk(x, k, dim=dim, temperature=temperature, mask=mask)


def writes_its_input(x, k, *, dim=-1, temperature=1.0, mask=None):
    y = sigmoid_topk(x, k, dim=dim, temperature=temperature, mask=mask)
    with torch.no_grad():
        x.add_(1)
    return y


class UntrackedIntermediate(torch.autograd.Function):
    """Saves v = p(1 − p) instead of p: the first derivative is right and the second is wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, k):
        p = sigmoid_topk(x, k)
        return p, p * (1 - p)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        ctx.mark_non_differentiable(outputs[1])
        ctx.save_for_backward(outputs[1])

    @staticmethod
    def backward(ctx, g, _):
        (v,) = ctx.saved_tensors
        return v * g - v * (v * g).sum(-1, keepdim=True) / v.sum(-1, keepdim=True), None


def untracked(x, k, *, dim=-1, temperature=1.0, mask=None):
    if x.requires_grad and mask is None and dim == -1:
        scale = temperature if isinstance(temperature, float) else temperature.detach().unsqueeze(-1)
        return UntrackedIntermediate.apply(x / scale, k.detach() if isinstance(k, torch.Tensor) else k)[0]
    return sigmoid_topk(x, k, dim=dim, temperature=temperature, mask=mask)


def detached_threshold(x, k, *, dim=-1, temperature=1.0, mask=None):
    """σ((x − τ)/T) with τ a constant: the right value, a gradient that leaves Δ_k."""
    tau = khot.threshold(x, k, dim=dim, temperature=temperature, mask=mask).detach().unsqueeze(dim)
    z = (x - tau) / (temperature.unsqueeze(dim) if isinstance(temperature, torch.Tensor) else temperature)
    return z.sigmoid() if mask is None else z.sigmoid() * mask


@pytest.mark.parametrize(
    ("fn", "law"),
    [
        (unshifted, "range and sum"),
        (unmasked, "masked"),
        (stale_temperature, "temperature scales"),
        (no_count_gradient, "first derivatives"),
        (writes_its_input, "input untouched"),
        (untracked, "second derivatives"),
        (detached_threshold, "first derivatives"),
    ],
)
def test_broken_relaxations_are_found(fn, law):
    with pytest.raises(AssertionError) as caught:
        check_relaxation(fn)
    assert f"- {law}: " in str(caught.value)


def test_wrong_promises_are_found():
    with pytest.raises(AssertionError, match="inverse: "):
        check_relaxation(sigmoid_topk, quantile=torch.erfinv)


def test_a_crash_is_reported_by_its_type():
    def raises(x, k, *, dim=-1, temperature=1.0, mask=None):
        raise RuntimeError("no such thing")

    with pytest.raises(AssertionError, match="RuntimeError: no such thing"):
        check_relaxation(raises)
