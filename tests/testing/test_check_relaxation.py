"""Negative controls: each broken relaxation must fail, and the message must name the law it breaks."""

import pytest
import torch

import khot
from khot import sigmoid_topk
from khot.testing import check_relaxation
from khot.testing._laws import laws
from khot.testing._relaxation import Relaxation

pytestmark = pytest.mark.slow


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


def altered(change, result=lambda y, x: y):
    """σ_k with its arguments changed by `change(x, k, temperature, mask, dim)`, and its result."""

    def fn(x, k, *, dim=-1, temperature=1.0, mask=None):
        at, k, temperature, mask = change(x, k, temperature, mask, dim)
        return result(sigmoid_topk(at, k, dim=dim, temperature=temperature, mask=mask), x)

    return fn


def same(x, k, temperature, mask, dim):
    return x, k, temperature, mask


def first_count(x, k, temperature, mask, dim):
    return x, k.flatten()[0] if isinstance(k, torch.Tensor) else k, temperature, mask


def reads_a_value(x, k, temperature, mask, dim):
    return x + 0 * x.sum().item(), k, temperature, mask


def breaks_the_graph(x, k, temperature, mask, dim):
    torch._dynamo.graph_break()
    return x, k, temperature, mask


def through_a_product(x, k, temperature, mask, dim):
    product = x @ torch.eye(x.shape[-1], dtype=x.dtype)
    return product.to(x.dtype), k, temperature, mask


def leak(y, x):
    """The right value, with x's gradient added."""
    return y + torch.where(x.isfinite(), x - x.detach(), 0.0)


def unguarded(y, x):
    """The right value, with 0 divided by the slope in the gradient."""
    return y + 0 * (x - x.detach()) / (y * (1 - y)).sum(-1, keepdim=True).detach()


BROKEN = {
    "count_and_temperature_per_row": altered(first_count),
    "translation": altered(lambda x, k, t, m, d: (x * (1 + x.mean(d, keepdim=True).tanh()), k, t, m)),
    "permutation": altered(lambda x, k, t, m, d: (x + torch.arange(x.shape[d]), k, t, m)),
    "order_preserved": altered(lambda x, k, t, m, d: (-x, k, t, m)),
    "complement": altered(lambda x, k, t, m, d: (x.exp(), k, t, m)),
    "cold_limit": altered(lambda x, k, t, m, d: (x, k, max(t, 1.0), m)),
    "hot_limit": altered(lambda x, k, t, m, d: (x, k, min(t, 1.0), m)),
    "ends": altered(lambda x, k, t, m, d: (x, max(k, 0.1), t, m)),
    "monotone_in_k": altered(lambda x, k, t, m, d: (x, k - 2 * (k == 4), t, m)),
    "forced": altered(lambda x, k, t, m, d: (x.clamp(max=9.0), k, t, m)),
    "bad_rows_are_nan_alone": altered(same, lambda y, x: y.nan_to_num(0.0)),
    "layout": altered(lambda x, k, t, m, d: (x if x.is_contiguous() else x.flip(d), k, t, m)),
    "precision": altered(same, lambda y, x: y + 1e-3 * (x.dtype == torch.float16)),
    "masked_gradient_is_zero": altered(same, leak),
    "saturated_gradient_is_finite": altered(same, unguarded),
    "nan_row_keeps_other_gradients": altered(same, lambda y, x: y * (1 + 0 * x.mean())),
    "transforms_agree": altered(reads_a_value),
    "compiles": altered(breaks_the_graph),
    "autocasts": altered(through_a_product),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_law_can_fail(name):
    law = {law.__name__: law for law in laws(Relaxation)}[name]
    law(Relaxation(sigmoid_topk, torch.logit, True, True))
    with pytest.raises(Exception, match=r".+"):
        law(Relaxation(BROKEN[name], None, True, True))


def test_every_law_has_a_negative_control():
    by_message = {"range_and_sum", "masked", "temperature_scales", "first_derivatives", "input_untouched"}
    by_message |= {"second_derivatives", "inverse"}
    assert {law.__name__ for law in laws(Relaxation)} == by_message | set(BROKEN)


def test_wrong_promises_are_found():
    with pytest.raises(AssertionError, match="inverse: "):
        check_relaxation(sigmoid_topk, quantile=torch.erfinv)


def test_a_crash_is_reported_by_its_type():
    def raises(x, k, *, dim=-1, temperature=1.0, mask=None):
        raise RuntimeError("no such thing")

    with pytest.raises(AssertionError, match="RuntimeError: no such thing"):
        check_relaxation(raises)
