"""Bad input of the rooms outside the core: a clear error that names the argument, and no silent number."""

import pytest
import torch
from torch import nn

import khot
from khot import attention, coding, data, survey
from khot.nn import MoE, Router, SigmoidTopKAttention, SparkAttention, routing, sparsity
from khot.nn.sparsity import Sparsifier

SIGNALS = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
ATOMS = nn.functional.normalize(torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), dim=1)
CODE = coding.omp(SIGNALS, ATOMS, 2)
UPDATES = [coding.svd_update, coding.power_update, coding.least_squares_update, coding.gradient_update]
updates = pytest.mark.parametrize("update", UPDATES, ids=lambda fn: fn.__name__)


def spoiled(x, value=torch.nan):
    x = x.clone()
    x.view(-1)[0] = value
    return x


@updates
@pytest.mark.parametrize(
    ("signals", "atoms", "code", "error", "message"),
    [
        (None, ATOMS, CODE, TypeError, "`signals` must be a torch.Tensor; got NoneType"),
        (SIGNALS.tolist(), ATOMS, CODE, TypeError, "`signals` must be a torch.Tensor; got list"),
        (SIGNALS[0], ATOMS, CODE, ValueError, r"`signals` must have the shape \(m, d\)"),
        (
            SIGNALS[:3],
            ATOMS,
            CODE,
            ValueError,
            r"`code` must have the shape \(3, 6\), \(signals, atoms\); got \(7, 6\)",
        ),
        (SIGNALS[:, :4], ATOMS, CODE, ValueError, r"`dictionary` must have the shape \(atoms, 4\)"),
        (SIGNALS, ATOMS.double(), CODE, TypeError, "`dictionary` must have the dtype of `signals`"),
        (SIGNALS, ATOMS, None, TypeError, "`code` must be a SparseCode; got NoneType"),
        (spoiled(SIGNALS), ATOMS, CODE, ValueError, "`signals` must be finite; got 1 NaN"),
        (SIGNALS, spoiled(ATOMS, torch.inf), CODE, ValueError, "`dictionary` must be finite"),
        (SIGNALS, ATOMS, CODE._replace(values=spoiled(CODE.values)), ValueError, r"`code\.values` must be finite"),
    ],
)
def test_an_update_says_what_does_not_fit(update, signals, atoms, code, error, message):
    """`power_update` took NaN for a direction, and the others failed inside torch."""
    with pytest.raises(error, match=message):
        update(signals, atoms, code)


@updates
def test_updates_of_half_precision_and_of_no_signals(update):
    half = coding.omp(SIGNALS.half(), ATOMS.half(), 2)
    atoms, code = update(SIGNALS.half(), ATOMS.half(), half)
    assert atoms.dtype == code.values.dtype == torch.float16
    wide, _ = update(SIGNALS.half().float(), ATOMS.half().float(), half._replace(values=half.values.float()))
    torch.testing.assert_close(atoms, wide.half())
    none = coding.omp(SIGNALS[:0], ATOMS, 2)
    torch.testing.assert_close(update(SIGNALS[:0], ATOMS, none)[0], ATOMS)


def test_thresholding_pursuit_needs_independent_atoms():
    """k > d ended in a `_LinAlgError`."""
    with pytest.raises(ValueError, match=r"`k` must satisfy 0 ≤ k ≤ 5, the length of a signal.*got 6"):
        coding.thresholding_pursuit(SIGNALS, ATOMS, 6)
    with pytest.raises(ValueError, match="`dictionary` must have k = 2 atoms of norm > 0; got 0"):
        coding.thresholding_pursuit(SIGNALS, torch.zeros_like(ATOMS), 2)
    assert coding.thresholding_pursuit(SIGNALS, ATOMS, 5).dense().shape == (7, 6)
    with pytest.raises(TypeError, match="`temperature` must be a number"):
        coding.soft_pursuit(SIGNALS, ATOMS, 2, temperature=None)


def test_a_path_of_best_subsets_of_nothing():
    """Columns of zeros ended in an error of `amax`."""
    path = coding.splice_path(torch.zeros(20, 6), torch.randn(20), 2)
    assert not path.coef.any()


VALUES, TAIL = torch.randn(9, 8), torch.rand(4)
HEAD, WEIGHTS = torch.ones(4, 9, dtype=torch.bool), torch.rand(4, 9).softmax(-1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attention.norm_bound(None, VALUES), TypeError, "`tail` must be a floating torch.Tensor"),
        (lambda: attention.norm_bound(TAIL, VALUES[:0]), ValueError, "`values` must have the shape"),
        (lambda: attention.norm_bound(TAIL, VALUES.tolist()), TypeError, "`values` must be a floating"),
        (lambda: attention.diameter_bound(TAIL[:3], VALUES, HEAD), ValueError, "batch shapes of `tail`, `values`"),
        (lambda: attention.diameter_bound(TAIL, VALUES, HEAD.float()), TypeError, "`head` must be a boolean tensor"),
        (
            lambda: attention.diameter_bound(TAIL, VALUES, HEAD[:, :8]),
            ValueError,
            r"`head` must have the shape \(…, 9\)",
        ),
        (lambda: attention.variance_bound(TAIL, VALUES, WEIGHTS[:, :8]), ValueError, "`weights` must have the shape"),
        (lambda: attention.variance_bound(TAIL, VALUES, None), TypeError, "`weights` must be a floating"),
        (lambda: attention.blockwise(TAIL, TAIL, counts=None), TypeError, "`counts` must be a torch.Tensor"),
        (lambda: attention.blockwise(VALUES, WEIGHTS, counts=TAIL), ValueError, "batch shapes of `head`, `upper`"),
        (lambda: attention.output_error(WEIGHTS, VALUES, None), TypeError, "`k` must be a number"),
        (lambda: attention.gaussian_share(-1, 0.1), ValueError, "`spread` must be ≥ 0; got -1"),
        (lambda: attention.gaussian_share(float("nan"), 0.1), ValueError, "`spread` must be ≥ 0; got nan"),
        (lambda: khot.statistical_logits(torch.tensor(1.0), 1), ValueError, "`x` must have at least one dimension"),
        (lambda: khot.statistical_logits([1.0, 2.0], 1), TypeError, "`x` must be a torch.Tensor; got list"),
        (lambda: data.DesignSampler([], 0), ValueError, r"`sizes` must have the shape \(n\), n ≥ 1"),
        (lambda: data.WeightedDataset([1, 2], None), TypeError, "`weights` must be a torch.Tensor"),
        (lambda: data.WeightedDataset([1, 2], torch.tensor(1.0)), ValueError, "`weights` must be 2, one for each item"),
        (lambda: sparsity.combine(), ValueError, "`combine` must be given at least one unit"),
        (lambda: survey.hajek(TAIL, TAIL[:3]), ValueError, r"the same k ≥ 1 items; got \(4,\) and \(3,\)"),
        (lambda: survey.deville(TAIL, None), TypeError, "`probs` must be a torch.Tensor"),
        (lambda: survey.successive_differences(TAIL[:0], TAIL[:0]), ValueError, "the same k ≥ 1 items"),
        (
            lambda: routing.update_bias(TAIL[:3], routing.softmax_topk(WEIGHTS, 2)),
            ValueError,
            "`bias` must have the shape",
        ),
        (lambda: routing.update_bias(None, routing.softmax_topk(WEIGHTS, 2)), TypeError, "`bias` must be a floating"),
        (
            lambda: MoE(Router(8, 2, 1), [nn.Identity()] * 2)(None),
            TypeError,
            "`x` must be a torch.Tensor; got NoneType",
        ),
        (lambda: SigmoidTopKAttention(8, 2, 3)(WEIGHTS), ValueError, "`query` must have 8 features"),
    ],
)
def test_the_argument_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_tokens_at_all():
    assert khot.statistical_logits(torch.zeros(3, 0), 2).shape == (3, 0)
    assert SparkAttention(8, 2, 3)(torch.zeros(2, 0, 8)).shape == (2, 0, 8)


def test_one_nan_weight_does_not_make_every_mask_nan():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sparsifier = Sparsifier(model, 0.5, steps=3)
    with torch.no_grad():
        model[1].parametrizations.weight.original.view(-1)[3] = torch.nan
    with pytest.raises(ValueError, match=r"`1\.weight` must be finite; got 1 NaN"):
        sparsifier.step()
    other = nn.Linear(8, 8)
    nn.init.constant_(other.weight, torch.inf)
    with pytest.raises(ValueError, match="`weight` must be finite; got 64 NaN or infinite"):
        Sparsifier(other, 0.5, steps=3)
    assert type(other) is nn.Linear, "a model that is refused stays as it was"


def test_knockoffs_of_nan():
    np = pytest.importorskip("numpy")
    knockoffs = pytest.importorskip("khot.sklearn")
    with pytest.raises(ValueError, match="contains NaN"):
        knockoffs.gaussian_knockoffs(np.full((20, 3), np.nan))
