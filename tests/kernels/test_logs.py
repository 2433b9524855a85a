"""The float32 kernels of log σ_k, of the threshold and of the cross-entropy, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

import khot
from khot import ops
from khot._math.cdfs import SIGMOID
from khot.kernels import _logs, _native

pytestmark = pytest.mark.skipif(_native.LIBRARY is None, reason=_native.REASON)
KINDS = {
    "normal": lambda u: torch.special.ndtri(u),
    "cauchy": lambda u: torch.tan(torch.pi * (u - 0.5)),
    "offset": lambda u: 1000 + torch.special.ndtri(u),
    "ties": lambda u: (4 * u).floor(),
    "bimodal": lambda u: torch.where(u < 0.3, 10.0, -10.0) + u,
}
POSED = {
    "seed": st.integers(0, 10**6),
    "n": st.integers(2, 400) | st.sampled_from([5000, 70000]),
    "share": st.floats(0.001, 0.999),
    "kind": st.sampled_from(sorted(KINDS)),
    "temperature": st.sampled_from([1e-3, 1e-2, 0.1, 1.0, 10.0]),
    "path": st.sampled_from([_native.AVX512, _native.AVX2, _native.PORTABLE]),
    "masked": st.booleans(),
}


def posed(seed, n, kind, masked):
    generator = torch.Generator().manual_seed(seed)
    x = KINDS[kind](torch.rand(2, n, generator=generator).clamp(1e-6, 1 - 1e-6))
    mask = torch.rand(2, n, generator=generator) < 0.8 if masked else None
    g = torch.randn(2, n, generator=generator)
    return x, mask, g


def exact_margins(x, k, temperature, mask):
    k = torch.full((len(x),), k, dtype=torch.float64) if isinstance(k, float) else k
    return ops.margin(x.double(), k, temperature, mask, None, SIGMOID)


@settings(max_examples=60, deadline=None)
@given(**POSED)
def test_logarithm_and_threshold(seed, n, share, kind, temperature, path, masked):
    x, mask, g = posed(seed, n, kind, masked)
    k = float(max(1, round(share * n))) if seed % 2 else share * n
    y, roots, is_left = _logs.log_sigmoid(x, k, temperature, mask, path=path)
    _, again, _ = _logs.log_sigmoid(x, k, temperature, mask, only_roots=True, path=path)
    assert torch.equal(roots[:, ~is_left], again[:, ~is_left])
    dx, is_faint = _logs.log_sigmoid_pull(g, x, roots, temperature, mask, path=path)
    z = exact_margins(x, k, temperature, mask)
    expected, tail = logsigmoid(z), torch.sigmoid(-z)
    v = tail * torch.sigmoid(z)
    for r in range(2):
        if is_left[r]:
            continue
        allowed = z[r].isfinite()
        error = (y[r].double() - expected[r]).abs()[allowed]
        assert (error <= 1e-6 * expected[r][allowed].abs() + 1e-37).all()
        assert (y[r][~allowed] == -torch.inf).all()
        tau = (x[r].double() - temperature * z[r])[z[r].abs().argmin()]
        solved = roots[0, r] + temperature * roots[1, r]
        assert abs(solved - tau) <= 4e-7 * max(temperature, 1e-6 * abs(tau))
        if not is_faint[r]:
            h = torch.where(allowed, g[r] * tail[r], 0)
            exact = (h - v[r] * h.sum() / v[r].sum()) / temperature
            scale = h.abs().max() + (v[r] * h.sum() / v[r].sum()).abs().max()
            assert (dx[r] - exact).abs().max() <= 4e-6 * scale / temperature + 1e-30


@settings(max_examples=60, deadline=None)
@given(**POSED, near=st.booleans())
def test_cross_entropy(seed, n, share, kind, temperature, path, masked, near):
    x, mask, g = posed(seed, n, kind, masked)
    count = max(1, min(n - 1, round(share * n)))
    scores = x if near else g
    target = khot.hard_topk(scores if mask is None else scores.masked_fill(~mask, -torch.inf), count)
    loss, dx, is_left = _logs.cross_entropy(x, target, temperature, mask, path=path)
    z = exact_margins(x, float(count), temperature, mask)
    is_wrong = (target > 0) != (z > 0)
    terms = torch.log1p((-z.abs()).exp()) + torch.where(is_wrong, z.abs(), 0)
    exact, tail = temperature * terms.sum(-1), torch.sigmoid(-z.abs())
    slope = torch.where(is_wrong, 1 - tail, tail) * (1 - 2 * target)
    for r in range(2):
        if is_left[r]:
            continue
        assert abs(loss[r] - exact[r]) <= 1e-6 * exact[r]
        assert ((dx[r] - slope[r]).abs() <= 1e-6 * slope[r].abs() + 1e-30).all(), "every digit, also near a target"


@pytest.mark.skipif(_native.PATHS[_native.LIBRARY.khot_path() if _native.LIBRARY else 0] == "portable", reason="no FMA")
@pytest.mark.parametrize("n", [64, 1024, 100_000])
def test_ordinary_rows_are_not_left(n):
    x = torch.randn(4, n)
    assert not _logs.log_sigmoid(x, n / 10, 1.0, None)[2].any()
    assert not _logs.cross_entropy(x, khot.hard_topk(torch.randn(4, n), n // 10), 1.0, None)[2].any()


def test_rows_that_the_kernels_leave_are_solved_with_the_others():
    x = torch.randn(6, 20)
    x[1, 3], x[2], x[3, 5], x[4] = torch.nan, torch.linspace(-1000, 1000, 20), torch.inf, 1.0
    k = torch.tensor([2.0, 2, 2, 2, 2, 20])
    target = khot.hard_topk(torch.randn(6, 20), 2)
    target[0, 0] = 0.25  # soft
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    for fn in (
        lambda x: khot.log_sigmoid_topk(x, k),
        lambda x: khot.threshold(x, k),
        lambda x: khot.khot_cross_entropy(x, target.to(x.dtype), reduction="none"),
    ):
        y, exact = fn(a), fn(b)
        torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
        weight = torch.where(exact.isfinite(), 1.0, 0.0)
        (dx,) = torch.autograd.grad(torch.where(weight > 0, y, 0).sum(), a)
        (dx64,) = torch.autograd.grad(torch.where(weight > 0, exact, 0).sum(), b)
        torch.testing.assert_close(dx.double(), dx64, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("fn", ["log_sigmoid_topk", "threshold", "khot_cross_entropy"])
def test_second_derivatives_are_those_of_float64(fn):
    x, target = torch.randn(3, 6), khot.hard_topk(torch.randn(3, 6), 2)

    def curvature(x):
        x = x.clone().requires_grad_()
        y = khot.khot_cross_entropy(x, target) if fn == "khot_cross_entropy" else getattr(khot, fn)(x, 2)
        (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return torch.autograd.grad((dx * torch.arange(6)).sum(), x)[0]

    torch.testing.assert_close(curvature(x), curvature(x.double()).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float16, torch.float32])
def test_dims_halves_and_targets_of_every_kind(kind):
    x, target = torch.randn(3, 8, 4), khot.hard_topk(torch.randn(3, 8, 4), 3, dim=1)
    exact = khot.khot_cross_entropy(x.double(), target.double(), dim=1, reduction="none", temperature=0.3)
    loss = khot.khot_cross_entropy(x, target.to(kind), dim=1, reduction="none", temperature=0.3)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    half = khot.khot_cross_entropy(x.bfloat16(), target.to(kind), dim=1)
    assert half.dtype == torch.bfloat16
    log_p = khot.log_sigmoid_topk(x, 3, dim=1, temperature=0.3)
    torch.testing.assert_close(
        log_p.double(), khot.log_sigmoid_topk(x.double(), 3, dim=1, temperature=0.3), rtol=1e-6, atol=0
    )
