"""Estimates from one sample, against enumeration and R's package sampling."""

import functools
import math

import numpy as np
import pytest
import torch
from design_cases import generator, scores

import khot
from khot import survey
from khot.designs import ConditionalPoisson, Cube, Pivotal, Sampford, Systematic

# A sample of six, and what R 4.2's sampling 2.9 says of it: varest, HTestimator, Hajekestimator, calib
Y = [3.2, 1.7, 8.4, 2.2, 5.9, 4.1]
PI = [0.21, 0.34, 0.95, 0.4, 0.62, 0.55]
D = [1 / p for p in PI]
X = [[1, 1.5], [1, 0.7], [1, 4.2], [1, 1.1], [1, 2.2], [1, 2.9]]
TOTALS = [15.0, 31.0]
OF_R = {
    "varest": 62.7190153533585,
    "HT": 51.5508749880566,
    "Hajek": 3.51001460600903,
    "calib linear": [
        *(4.46689159465468, 1.8492987009046, 2.08619620347469, 1.95851099148131, 1.94947129334865, 2.68963121613607),
    ],
    "calib raking": [
        *(4.30673402591675, 2.06174345432797, 2.24957425042467, 1.99058374146416, 1.82304645702802, 2.56831811647519),
    ],
    "calest": 61.800001801794,
    "ratio": 2.04616919402067,
}


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_estimates_are_those_of_r():
    estimate = survey.total(Y, D, variance=survey.deville)
    assert math.isclose(estimate.value, OF_R["HT"], rel_tol=1e-13)
    assert math.isclose(estimate.variance, OF_R["varest"], rel_tol=1e-13)
    other = survey.total(Y, D, variance=survey.hajek).variance
    assert not math.isclose(other, OF_R["varest"], rel_tol=1e-3), "R's is not that of Hájek"
    assert not math.isclose(survey.total(Y, [1.01 * w for w in D]).value, OF_R["HT"], rel_tol=1e-3)
    assert math.isclose(survey.mean(Y, D).value, OF_R["Hajek"], rel_tol=1e-13)
    assert math.isclose(survey.ratio(Y, [row[1] for row in X], D).value, OF_R["ratio"], rel_tol=1e-13)
    assert math.isclose(survey.calibrated_total(Y, D, X, TOTALS).value, OF_R["calest"], rel_tol=1e-12)


@pytest.mark.parametrize("name", ["linear", "raking"])
def test_calibrated_weights_are_those_of_r(name):
    distance = getattr(survey, name)
    got = survey.calibrate(D, X, TOTALS, distance=distance)
    torch.testing.assert_close(got, double(OF_R[f"calib {name}"]), rtol=1e-6, atol=0)  # R's raking stops at 1e-6
    torch.testing.assert_close(got @ double(X), double(TOTALS), rtol=1e-9, atol=0)
    assert ((double(D) @ double(X) / double(TOTALS) - 1).abs() > 0.01).all(), "the weights of the design do not"
    other = survey.calibrate(D, X, TOTALS, distance=survey.raking if name == "linear" else survey.linear)
    assert (got - other).abs().max() > 0.1, "the other distance has other weights"


def test_calibration_reproduces_hard_totals_or_raises():
    x = torch.stack((torch.ones(50), scores(50).exp()), -1).double()
    d = scores(50, seed=1).exp() + 1
    for factor in (0.5, 0.9, 1.2, 3.0):
        wanted = torch.stack((d.sum() * factor, (d @ x)[1]))
        new = survey.calibrate(d, x, wanted, distance=survey.raking)
        torch.testing.assert_close(new @ x, wanted, rtol=1e-8, atol=0)
        assert (new > 0).all()
    with pytest.raises(ValueError, match="No weights of this kind"):  # a mean above the largest value
        survey.calibrate(d, x, torch.stack((d.sum(), d.sum() * 1.1 * x[:, 1].max())), distance=survey.raking)
    twice = survey.calibrate(d, x[:, [0, 1, 1]], double([100.0, 150.0, 150.0]))  # a variable that is there twice
    torch.testing.assert_close(twice, survey.calibrate(d, x, double([100.0, 150.0])), rtol=1e-8, atol=1e-8)
    same = survey.calibrate(d, x, d @ x)
    torch.testing.assert_close(same, d)


def test_post_stratification_is_a_calibration():
    """With indicators of groups, each group's weights are scaled to its known number, by both distances."""
    group = torch.tensor([0, 0, 1, 1, 1, 2])
    x = torch.nn.functional.one_hot(group).double()
    totals = double([10.0, 20.0, 5.0])
    expected = double(D) * (totals / (double(D) @ x))[group]
    for distance in (survey.linear, survey.raking):
        torch.testing.assert_close(survey.calibrate(D, x, totals, distance=distance), expected)


def enumerated(design, y, estimate):
    """All samples of a design: probabilities, estimated totals, and estimated variances."""
    x = design.enumerate_support()
    p = design.log_prob(x).exp()
    index = x.nonzero()[:, 1].view(len(x), -1)
    made = estimate(y[index], 1 / design.mean[index])
    return p, made.value, made.variance


@pytest.mark.parametrize("variance", [survey.hajek, survey.deville])
@pytest.mark.parametrize("design", [Sampford, ConditionalPoisson])
def test_approximate_variances_are_close_to_the_exact_one(design, variance):
    p = khot.inclusion_probs(scores(14).mul(0.5).exp(), 6)
    law, y = design(p), scores(14, seed=1) + 4
    chance, value, estimated = enumerated(law, y, functools.partial(survey.total, variance=variance))
    exact = chance @ (value - y.sum()).square()
    torch.testing.assert_close(exact, law.variance_of_sum(y / p))
    assert abs(chance @ estimated / exact - 1) < 0.1  # 5 to 9 % with six of fourteen
    blind = enumerated(law, y, lambda v, w: survey.total(v, w, variance=lambda a, q: survey.hajek(a, 0.99 + 0 * q)))
    assert (chance @ blind[2]) / exact < 0.5, "other probabilities give another variance"


def test_the_variance_of_equal_probabilities_is_the_textbooks():
    y, k, n = scores(8).abs(), 8, 20
    expected = n**2 * (1 - k / n) * y.var() / k
    for variance in (survey.hajek, survey.deville):
        torch.testing.assert_close(variance(y, torch.full((8,), k / n, dtype=torch.float64)), expected)


def test_the_variance_of_a_ratio_by_enumeration():
    p = khot.inclusion_probs(scores(12).mul(0.3).exp(), 6)
    x = scores(12, seed=1).abs() + 1
    y = 2 * x + 0.2 * scores(12, seed=2)
    law = Sampford(p)
    s = law.enumerate_support()
    index = s.nonzero()[:, 1].view(len(s), -1)
    chance, made = law.log_prob(s).exp(), survey.ratio(y[index], x[index], 1 / p[index])
    truth = y.sum() / x.sum()
    assert abs(chance @ made.value - truth) < 1e-3 * truth
    assert abs(chance @ made.variance / (chance @ (made.value - truth).square()) - 1) < 0.1
    naive = survey.total(y[index], 1 / p[index]).variance / (x.sum() ** 2)
    assert chance @ naive > 2 * (chance @ made.variance), "the ratio varies less than its numerator"


def test_successive_differences_know_that_systematic_samples_are_spread():
    """A smooth y on 2000 items: Hájek's formula says far too much, differences of neighbours nearly the truth."""
    y = torch.linspace(0, 6, 2000, dtype=torch.float64).sin() * 3 + 5 + 0.3 * scores(40, 2000)
    design = Systematic(torch.full((40, 2000), 0.05, dtype=torch.float64))
    exact = design.variance_of_sum(y / 0.05).mean()  # over 40 populations: each has 20 different samples
    index = design.sample_indices((20,), generator=generator())
    drawn, probs = y.expand(20, -1, -1).gather(-1, index), torch.full(index.shape, 0.05, dtype=torch.float64)
    differences, blind = (v(drawn, probs).mean() for v in (survey.successive_differences, survey.hajek))
    assert 0.8 < differences / exact < 1.3
    assert blind > 10 * exact


def test_balanced_variances_count_what_the_variables_do_not_explain():
    n, k = 300, 60
    z = torch.stack((scores(n).abs() + 1, scores(n, seed=1) + 3), -1)
    y = z @ double([2.0, 1.0]) + 0.5 * scores(n, seed=2)
    design = Cube(khot.inclusion_probs(z[:, 0], k), balance=z)
    x = design.sample((400,), generator=generator())
    exact = khot.horvitz_thompson(y, x, design.mean).var()
    index = x.nonzero()[:, 1].view(400, k)
    pi = design.mean[index]
    balanced = survey.Balanced(z[index])(y[index], pi).mean()
    assert 0.6 < balanced / exact < 1.3
    assert survey.hajek(y[index], pi).mean() > 2 * exact
    torch.testing.assert_close(  # balanced on the size alone, it is Hájek's
        survey.Balanced(pi[..., None])(y[index], pi), survey.hajek(y[index], pi)
    )


def test_certain_items_have_no_variance():
    assert survey.total([1.0, 2.0], [1.0, 1.0]).variance == 0
    assert survey.total([1.0, 2.0], [1.0, 1.0], variance=survey.deville).variance == 0
    one = survey.total([3.0], [2.0])
    assert one.value == 6
    some = survey.total([1.0, 2.0, 5.0], [2.0, 2.0, 1.0], variance=survey.deville).variance
    torch.testing.assert_close(some, survey.total([1.0, 2.0], [2.0, 2.0], variance=survey.deville).variance)


def test_intervals():
    estimate = survey.total(np.array(Y), np.array(D))
    low, high = estimate.interval()
    torch.testing.assert_close(high - low, 2 * 1.959963984540054 * estimate.error)
    narrow = estimate.interval(0.5)
    assert low < narrow[0] < estimate.value < narrow[1] < high
    with pytest.raises(ValueError, match="0 ≤ level < 1"):
        estimate.interval(1.0)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("finite and ≥ 1, .* from 0.5 to 0.5", lambda: survey.total([1.0, 2.0], [0.5, 0.5])),
        ("finite and ≥ 1", lambda: survey.total([1.0, 2.0], [2.0, float("inf")])),
        ("at least one item", lambda: survey.total([], [])),
        ("`known` and `totals` must be finite", lambda: survey.calibrate([2.0, 2.0], [[1.0], [float("nan")]], [4.0])),
        ("`known` and `totals` must be finite", lambda: survey.calibrate([2.0, 2.0], [[1.0], [1.0]], [float("nan")])),
        (r"finite, of shape \(…, k, q\)", lambda: survey.Balanced(torch.ones(3))),
        (r"finite, of shape \(…, k, q\)", lambda: survey.Balanced([[float("nan")]])),
        (r"\(…, 2, q\).*\(3, 1\)", lambda: survey.total([1.0, 2.0], [2.0, 2.0], variance=survey.Balanced([[1.0]] * 3))),
        (r"shape \(…, k\)", lambda: survey.total([1.0, 2.0, 3.0], [2.0, 2.0])),
        (r"\(k\), \(k, q\) and \(q\)", lambda: survey.calibrate([2.0, 2.0], [[1.0], [1.0]], [1.0, 2.0])),
    ],
)
def test_errors_of_surveys(match, call):
    with pytest.raises(ValueError, match=match):
        call()


def test_words_are_neither_variances_nor_distances():
    with pytest.raises(TypeError, match=r"`variance` must be a function, such as `khot.survey.hajek`; got 'hajek'"):
        survey.mean([1.0, 2.0], [2.0, 2.0], variance="hajek")
    with pytest.raises(TypeError, match="`distance` must be a Distance; got str"):
        survey.calibrate([2.0, 2.0], [[1.0], [1.0]], [5.0], distance="raking")


@pytest.mark.parametrize("variance", [survey.hajek, survey.deville, survey.successive_differences])
def test_no_variance_from_one_open_item(variance):
    """It was said to be 0, with an interval of no width."""
    assert survey.total([5.0], [10.0], variance=variance).variance.isnan()
    assert survey.total([5.0, 3.0, 7.0], [10.0, 1.0, 1.0], variance=variance).variance.isnan()
    assert survey.total([5.0, 3.0, 7.0], [10.0, 2.0, 1.0], variance=variance).variance > 0
    assert survey.total([5.0], [1.0], variance=variance).variance == 0
    rows = survey.total([[5.0, 3.0], [5.0, 3.0]], [[10.0, 1.0], [10.0, 2.0]], variance=variance).variance
    assert rows.isnan().tolist() == [True, False]


def test_no_variance_from_as_many_variables_as_items():
    y, w = [5.0, 3.0, 7.0], [10.0, 5.0, 4.0]
    assert survey.total(y, w, variance=survey.Balanced(np.eye(3))).variance.isnan()  # one item in each stratum
    assert survey.total(y, w, variance=survey.Balanced([[1.0], [2.0], [4.0]])).variance > 0
    x = [[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]]
    assert survey.calibrated_total(y[:2], w[:2], x[:2], [15.0, 21.0]).variance.isnan()
    assert survey.calibrated_total(y, w, x, [19.0, 35.0]).variance > 0
    assert survey.calibrated_total(y[:2], [1.0, 1.0], x[:2], [2.0, 3.0]).variance == 0  # of a census


@pytest.mark.slow
def test_intervals_of_a_small_survey_cover():
    """1000 samples of 80 of 800: 95 % intervals of totals cover in 93 to 97 % (2.9 standard errors)."""
    size = scores(800).mul(0.7).exp()
    y = size * (2 + 0.5 * scores(800, seed=1))
    p = khot.inclusion_probs(size, 80)
    index = Pivotal(p).sample_indices((1000,), generator=generator())
    low, high = survey.total(y[index], 1 / p[index]).interval()
    covered = ((low <= y.sum()) & (y.sum() <= high)).double().mean()
    assert 0.93 < covered < 0.97
    naive = survey.total(y[index], 1 / p[index], variance=lambda v, q: survey.hajek(v, q) / 2).interval()
    assert ((naive[0] <= y.sum()) & (y.sum() <= naive[1])).double().mean() < 0.9


@pytest.mark.parametrize("variance", [survey.hajek, survey.deville, survey.successive_differences])
@pytest.mark.parametrize(
    ("values", "probs"),
    [
        (None, torch.ones(3)),
        ([1.0, 2.0], torch.ones(2)),
        (torch.ones(2), torch.ones(3)),
        (torch.tensor(1.0), torch.ones(1)),
        (torch.ones(3), torch.tensor([0.0, 0.5, 0.5])),
        (torch.ones(3), torch.tensor([-1.0, 0.5, 0.5])),
        (torch.ones(3), torch.tensor([2.0, 0.5, 0.5])),
        (torch.ones(3), torch.tensor([float("nan"), 0.5, 0.5])),
    ],
)
def test_variances_refuse_what_is_no_sample(variance, values, probs):
    """Probabilities of −1, 0 and 2 gave a number, and lists an error about shapes."""
    with pytest.raises((TypeError, ValueError), match=r"`values`|`probs`"):
        variance(values, probs)


def test_numbers_that_are_none():
    with pytest.raises(TypeError, match="`values` must be real numbers in a tensor, an array or a list; got str"):
        survey.total("abc", [2.0])
    for make in (khot.data.DesignSampler, khot.data.DesignBatchSampler):
        more = {} if make is khot.data.DesignSampler else {"num_batches": 1}
        for sizes in ("abc", ["a", "b"], torch.ones(3).cfloat()):
            with pytest.raises(TypeError, match="`sizes` must be real numbers"):
                make(sizes, 1, **more)
    with pytest.raises(TypeError, match="`sizes` must be real numbers"):
        khot.data.Reservoir(2).update(range(2), torch.ones(2).cfloat())
