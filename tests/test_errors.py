"""Bad input gets a clear error: the bound, what was got, and the fix; and nothing else happens."""

import warnings

import numpy as np
import pytest
import torch

import khot

x = torch.randn(3, 5)
FAMILY = [khot.sigmoid_topk, khot.log_sigmoid_topk, khot.threshold]


@pytest.mark.parametrize("fn", [*FAMILY, khot.hard_topk])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((x, 6), {}, ValueError, "`k` must satisfy 0 ≤ k ≤ 5 (size of dim -1); got 6."),
        ((x, -1), {}, ValueError, "`k` must satisfy 0 ≤ k ≤ 5 (size of dim -1); got -1."),
        ((x, float("nan")), {}, ValueError, "got nan"),
        ((x, 4), {"dim": 0}, ValueError, "`k` must satisfy 0 ≤ k ≤ 3 (size of dim 0); got 4."),
        ((x, "2"), {}, TypeError, "`k` must be a number or a torch.Tensor; got str."),
        ((x, True), {}, TypeError, "got bool"),
        ((x, None), {}, TypeError, "got NoneType"),
        ((x, torch.ones(2)), {}, ValueError, "`k` must broadcast to the batch shape"),
        ((x, torch.ones(3, 5)), {}, ValueError, "`k` must broadcast to the batch shape"),
        ((x, torch.ones(3, dtype=torch.bool)), {}, TypeError, "`k` must be an integer or floating tensor"),
        ((x, torch.ones(3, dtype=torch.complex64)), {}, TypeError, "`k` must be an integer or floating tensor"),
        ((x, torch.ones(3, device="meta")), {}, ValueError, "`k` must be on the device of `x`, cpu; got meta."),
        ((x, 2), {"dim": 2}, IndexError, "`dim` must satisfy -2 ≤ dim < 2 (`x` has 2 dimensions); got 2."),
        ((x, 2), {"dim": -3}, IndexError, "got -3"),
        ((x, 2), {"dim": 1.0}, TypeError, "`dim` must be an int; got float."),
        ((x.long(), 2), {}, TypeError, "got torch.int64. Convert it first, for example with `x.float()`."),
        ((x.to(torch.complex64), 2), {}, TypeError, "got torch.complex64"),
        ((x > 0, 2), {}, TypeError, "got torch.bool"),
        (([1.0, 2.0], 1), {}, TypeError, "`x` must be a torch.Tensor; got list."),
        ((torch.tensor(1.0), 1), {}, ValueError, "`x` must have at least one dimension"),
        ((x, 2), {"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "`mask` must broadcast to the shape of `x`"),
        ((x, 2), {"mask": torch.ones(2, 3, 5, dtype=torch.bool)}, ValueError, "got (2, 3, 5)"),
        (
            (x, 2),
            {"mask": torch.ones(5)},
            TypeError,
            "`mask` must be boolean (True = may be chosen); got torch.float32. Use `mask.bool()` for 0 and 1, or "
            "`mask == 0` for an additive mask (0 = allowed, −inf = not).",
        ),
        ((x, 2), {"mask": torch.ones(5, dtype=torch.int64)}, TypeError, "got torch.int64. Use `mask.bool()`."),
        ((x, 2), {"mask": [True] * 5}, TypeError, "`mask` must be a boolean torch.Tensor or None; got list."),
        ((x, 2), {"mask": torch.ones(5, dtype=torch.bool, device="meta")}, ValueError, "`mask` must be on the device"),
    ],
)
def test_bad_calls(fn, arguments, options, error, message):
    with pytest.raises(error) as caught:
        fn(*arguments, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("fn", FAMILY)
@pytest.mark.parametrize(
    ("temperature", "error", "message"),
    [
        (0, ValueError, "`temperature` must be > 0; got 0. For the limit 0, use `khot.hard_topk`."),
        (-1.0, ValueError, "got -1.0"),
        (float("nan"), ValueError, "got nan"),
        ("1", TypeError, "`temperature` must be a number or a torch.Tensor; got str."),
        (torch.ones(5), ValueError, "`temperature` must broadcast to the batch shape"),
        (torch.ones(3, dtype=torch.long), TypeError, "`temperature` must be a floating tensor; got torch.int64."),
        (torch.ones(3, device="meta"), ValueError, "`temperature` must be on the device"),
    ],
)
def test_bad_temperature(fn, temperature, error, message):
    with pytest.raises(error) as caught:
        fn(x, 2, temperature=temperature)
    assert message in str(caught.value)


def test_hard_topk_refuses_fractions():
    with pytest.raises(ValueError, match="`k` must be an integer"):
        khot.hard_topk(x, 2.5)
    assert khot.hard_topk(x, 2.0).sum() == 6


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((x, torch.ones(3, 4)), {}, ValueError, "`target` must have the shape of `x`, (3, 5); got (3, 4)."),
        ((x, [1, 0]), {}, TypeError, "`target` must be a torch.Tensor; got list."),
        ((x, torch.ones(3, 5, device="meta")), {}, ValueError, "`target` must be on the device of `x`"),
        ((x, x), {"reduction": "avg"}, ValueError, "`reduction` must be one of 'mean', 'sum', 'none'; got 'avg'."),
        ((x, x), {"dim": 5}, IndexError, "`dim` must satisfy"),
        ((x, x), {"temperature": 0}, ValueError, "`temperature` must be > 0"),
    ],
)
def test_bad_losses(arguments, options, error, message):
    with pytest.raises(error) as caught:
        khot.khot_cross_entropy(*arguments, **options)
    assert message in str(caught.value)


def test_bad_straight_through():
    with pytest.raises(ValueError, match="`hard` must have the shape of `soft`"):
        khot.straight_through(torch.ones(3), torch.ones(4))
    with pytest.raises(TypeError, match="`soft` must be"):
        khot.straight_through(torch.ones(3), torch.ones(3, dtype=torch.long))


def test_bad_module():
    with pytest.raises(ValueError, match="`temperature` must be > 0"):
        khot.nn.SigmoidTopK(2, temperature=0.0)


def test_numpy_numbers_are_numbers():
    torch.testing.assert_close(khot.sigmoid_topk(x, np.int64(2)), khot.sigmoid_topk(x, 2))
    torch.testing.assert_close(
        khot.sigmoid_topk(x, np.float32(2.5), temperature=np.float64(1)), khot.sigmoid_topk(x, 2.5)
    )


def test_nothing_is_printed_or_warned(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        khot.sigmoid_topk(torch.full((2, 4), float("nan")), torch.tensor([9.0, -1.0]))
    assert capfd.readouterr() == ("", "")
