"""Inclusion probabilities from sizes, and rows of tables."""

import math

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from design_cases import generator, scores

import khot
from khot.designs import Sampford, Systematic

# Canada's provinces in 2011; the probabilities are those of R's sampling::inclusionprobabilities
SIZE = [514.5, 140.2, 921.7, 751.2, 7903.0, 12851.8, 1208.3, 1033.4, 3645.3, 4400.1, 33.9, 41.5, 31.9]
OF_R = {
    4: [
        *(0.0808835088822512, 0.0220405596604307, 0.144898600848923, 0.118094639207672, 1, 1, 0.189954409684012),
        *(0.162458732903632, 0.573070271969816, 0.691730859927684, 0.00532935073101713, 0.00652413142587644),
        0.00501493475868574,
    ],
    9: [
        *(0.680015860428232, 0.185302669838752, 1, 0.992862807295797, 1, 1, 1, 1, 1, 1),
        *(0.0448057097541634, 0.0548506476341528, 0.042162305048903),
    ],
}


@pytest.mark.parametrize("k", OF_R)
def test_inclusion_probabilities_are_those_of_r(k):
    size = torch.tensor(SIZE, dtype=torch.float64)
    torch.testing.assert_close(
        khot.inclusion_probs(size, k), torch.tensor(OF_R[k], dtype=torch.float64), rtol=1e-14, atol=0
    )
    naive = (k * size / size.sum()).clamp(max=1)
    assert abs(naive.sum() - k) > 0.1, "capping alone does not sum to k"


def by_definition(size, k):
    """min(1, c · size) with the c found by bisection, in exact integers of the number of steps."""
    low, high = 0.0, k / min(s for s in size if s > 0)
    for _ in range(200):
        c = (low + high) / 2
        total = math.fsum(min(1.0, c * s) for s in size)
        low, high = (c, high) if total < k else (low, c)
    return torch.tensor([min(1.0, high * s) for s in size], dtype=torch.float64)


@pytest.mark.parametrize("k", [0, 0.5, 1, 2.25, 5, 11, 12])
def test_inclusion_probabilities_solve_their_equation(k):
    size = scores(3, 12, seed=3).mul(2).exp()
    size[1, 4:6] = 0
    k = min(k, 10)
    got = khot.inclusion_probs(size, k)
    for row, each in zip(size.tolist(), got, strict=True):
        torch.testing.assert_close(each, by_definition(row, k), rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(got.sum(-1), torch.full((3,), float(k), dtype=torch.float64))
    assert (got[1, 4:6] == 0).all()


def test_inclusion_probabilities_at_the_edges():
    equal = khot.inclusion_probs(torch.full((4,), 1e300, dtype=torch.float64), 2)
    assert equal.tolist() == [0.5] * 4
    assert khot.inclusion_probs(torch.tensor([1e-300, 0.0, 1e300], dtype=torch.float64), 2).tolist() == [1, 0, 1]
    assert khot.inclusion_probs(torch.tensor([3.0, 0.0, 1e-30]), 2).tolist() == [1, 0, 1]
    tiny = khot.inclusion_probs(torch.tensor([1e-300, 3e-300, 1e300], dtype=torch.float64), 2)
    torch.testing.assert_close(tiny, torch.tensor([0.25, 0.75, 1.0], dtype=torch.float64))
    # exactly at the cap: 2 · 2/4
    assert khot.inclusion_probs(torch.tensor([2.0, 1.0, 1.0]), 2).tolist() == [1, 0.5, 0.5]
    size = scores(2, 3, 5).exp()
    k = torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.5, 0.0]]).mT[:, :, None].expand(2, 3, 5)[..., 0]
    rows = khot.inclusion_probs(size, k)
    moved = khot.inclusion_probs(size.movedim(-1, 1), k, dim=1)
    assert torch.equal(moved.movedim(1, -1), rows)
    mask = torch.tensor([True, False, True, True, True])
    masked = khot.inclusion_probs(size, 2, mask=mask)
    assert (masked[..., 1] == 0).all()
    torch.testing.assert_close(masked[..., mask], khot.inclusion_probs(size[..., mask], 2))
    assert khot.inclusion_probs(size.float(), 2).dtype == torch.float32


def test_inclusion_probabilities_of_strata_are_those_of_each():
    size, strata = scores(2, 9).exp(), torch.tensor([5, -1, 5, 5, -1, 7, 7, 5, -1])
    got = khot.inclusion_probs(size, [1, 2, 1], strata=strata)
    for label, k in ((-1, 1), (5, 2), (7, 1)):
        torch.testing.assert_close(got[:, strata == label], khot.inclusion_probs(size[:, strata == label], k))


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("`k` must satisfy 0 ≤ k ≤ 3", lambda s: khot.inclusion_probs(s, 4)),
        ("k = 3 where 2 items", lambda s: khot.inclusion_probs(s * torch.tensor([1.0, 1.0, 0.0]), 3)),
        ("finite and ≥ 0", lambda s: khot.inclusion_probs(-s, 1)),
        ("finite and ≥ 0", lambda s: khot.inclusion_probs(s / 0, 1)),
        ("2 counts, one for each stratum", lambda s: khot.inclusion_probs(s, 2, strata=torch.tensor([0, 0, 1]))),
        ("stratum 1 with k = 2", lambda s: khot.inclusion_probs(s, [1, 2], strata=torch.tensor([0, 0, 1]))),
        ("one label for each of 3", lambda s: khot.inclusion_probs(s, [1, 2], strata=torch.tensor([0, 1]))),
        ("got the shape", lambda s: khot.sample_rows([1, 2, 3], 1, weights=[1.0, 2.0])),
        ("one of the columns", lambda s: khot.sample_rows(pd.DataFrame({"a": [1]}), 1, weights="b")),
        ("0 ≤ k ≤ 3", lambda s: khot.sample_rows([1, 2, 3], 4)),
        ("a count for each of the strata", lambda s: khot.sample_rows([1, 2], {"a": 1}, strata=["a", "b"])),
        ("`strata` must be given", lambda s: khot.sample_rows([1, 2], {"a": 1})),
        ("`weights` must be finite and ≥ 0", lambda s: khot.sample_rows([1, 2], 1, weights=[math.nan, 1.0])),
        ("`strata` must be integers", lambda s: khot.inclusion_probs(s, [1], strata=torch.full((3,), math.nan))),
        ("some are missing", lambda s: khot.sample_rows([1, 2], 1, strata=[math.nan, 1.0])),
        ("some are missing", lambda s: khot.sample_rows([1, 2], 1, strata=[None, "a"])),
        ("some are missing", lambda s: khot.sample_rows([1, 2], 1, strata=pd.array([pd.NA, "a"], dtype=object))),
        ("some are missing", lambda s: khot.sample_rows([1, 2], 1, strata=np.array(["NaT", "2026-01-01"], "M8[D]"))),
        ("at least one row", lambda s: khot.sample_rows([], 0)),
        ("one of `generator` and `seed`", lambda s: khot.sample_rows([1], 1, generator=generator(), seed=1)),
    ],
)
def test_errors_say_the_bound(match, call):
    with pytest.raises(ValueError, match=match):
        call(torch.ones(3))


def test_types_that_are_not_tables():
    with pytest.raises(TypeError, match="must have a length"):
        khot.sample_rows(3, 1)
    for table in ({"a": [1, 2], "b": [3, 4]}, {1, 2}, "ab"):  # the length of a dict is its number of columns
        with pytest.raises(TypeError, match="whose length is not a number of rows"):
            khot.sample_rows(table, 1)
    for weights in (np.array(["a", "b"]), np.array([1.0, 2.0j]), np.array(["2026-01-01"] * 2, "M8[D]")):
        with pytest.raises(TypeError, match="must be real numbers"):
            khot.sample_rows([1, 2], 1, weights=weights)
    with pytest.raises(TypeError, match="`generator` must be a Generator"):
        khot.sample_rows([1, 2], 1, generator=np.random.RandomState(0))
    with pytest.raises(TypeError, match="labels of one kind"):
        khot.sample_rows([1, 2], 1, strata=np.array([1, "a"], dtype=object))
    with pytest.raises(TypeError, match="name of a column"):
        khot.sample_rows([1, 2], 1, weights="size")
    with pytest.raises(TypeError, match="`design` must take `strata`"):
        khot.sample_rows([1, 2], 1, strata=[0, 1], design=Sampford)


def test_rows_of_every_kind_of_table_are_the_same():
    size = np.exp(scores(40).numpy())
    group = np.array(["north", "south"])[np.arange(40) % 2]
    pandas = pd.DataFrame({"size": size, "group": group}, index=np.arange(100, 140))
    tables = [size, torch.from_numpy(size), pandas, pandas["size"], pl.DataFrame({"size": size, "group": group})]
    expected = khot.sample_rows(size, 12, weights=size, strata=group, seed=5)
    assert isinstance(expected.indices, np.ndarray)
    probs = khot.inclusion_probs(torch.from_numpy(size), 12)
    np.testing.assert_allclose(expected.weights, 1 / probs[expected.indices])
    for table in tables:
        named = hasattr(table, "columns")
        weights, strata = ("size", "group") if named else (size, group)
        got = khot.sample_rows(table, 12, weights=weights, strata=strata, seed=5)
        assert isinstance(got.indices, torch.Tensor) == isinstance(table, torch.Tensor)
        assert [list(map(float, t)) for t in got] == [list(map(float, t)) for t in expected]
    assert list(pandas.iloc[expected.indices]["size"]) == list(tables[-1][expected.indices]["size"])


def test_series_in_another_order_are_not_matched_by_position():
    """pandas matches by index: taking them by position drew the wrong rows without a word."""
    table = pd.DataFrame({"a": [1, 2, 3]}, index=[7, 8, 9])
    size = pd.Series([0.0, 0.0, 1.0], index=[9, 8, 7])
    with pytest.raises(ValueError, match="the same index as `data`"):
        khot.sample_rows(table, 1, weights=size)
    with pytest.raises(ValueError, match="the same index as `data`"):
        khot.sample_rows(table, 1, strata=size)
    assert khot.sample_rows(table, 1, weights=size.reindex(table.index)).indices == [0]
    assert khot.sample_rows(table, 1, weights=size.to_numpy()).indices == [2]
    assert khot.sample_rows(table["a"], 1, weights=list(size)).indices == [2]


def test_rows_have_the_probabilities_that_multinomial_has_not():
    """One row of half the weight, k = 2: it is certain. Drawn one after another, it is left out in one of ten."""
    size = np.array([5.0, 1, 1, 1, 1, 1])
    counts = np.zeros(6)
    random = generator(1)
    for _ in range(4000):
        rows = khot.sample_rows(size, 2, weights=size, generator=random)
        counts[rows.indices] += 1
        assert rows.weights.tolist() == [1.0, 5.0]
    assert counts[0] == 4000
    assert np.abs(counts[1:] / 4000 - 0.2).max() < 0.03  # 4.7 standard errors
    other = np.random.default_rng(0)
    left_out = sum(0 not in other.choice(6, 2, replace=False, p=size / 10) for _ in range(4000))
    assert left_out > 800, "the usual way leaves it out in a quarter of the samples"


def test_rows_of_strata_have_the_counts_asked_for():
    group = np.array(list("aaaaabbbbbbbbbbcc"))
    for seed in range(20):
        rows = khot.sample_rows(group, {"a": 2, "b": 3, "c": 2}, strata=group, seed=seed)
        assert sorted(group[rows.indices]) == list("aabbbcc")
        np.testing.assert_allclose(rows.weights, [2.5] * 2 + [10 / 3] * 3 + [1.0] * 2)
        rows = khot.sample_rows(group, 5, strata=group, seed=seed)  # expects 1.47, 2.94 and 0.59
        counts = [(group[rows.indices] == label).sum() for label in "abc"]
        assert counts[0] in (1, 2)
        assert counts[1] in (2, 3)
        assert counts[2] in (0, 1)


def test_the_seed_decides_and_designs_differ():
    first, again, other = (khot.sample_rows(range(100), 10, seed=s).indices.tolist() for s in (1, 1, 2))
    assert first == again != other
    spread = khot.sample_rows(range(100), 10, design=Systematic, seed=1).indices
    assert np.diff(spread).tolist() == [10] * 9


def test_tables_of_pyarrow_and_no_items():
    """A name of a column was compared with the columns themselves; no items were an error of torch."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"size": SIZE, "half": ["a"] * 6 + ["b"] * 7})
    rows = khot.sample_rows(table, 4, weights="size", strata="half", seed=0)
    frame = pd.DataFrame({"size": SIZE, "half": ["a"] * 6 + ["b"] * 7})
    assert rows.indices.tolist() == khot.sample_rows(frame, 4, weights="size", strata="half", seed=0).indices.tolist()
    with pytest.raises(ValueError, match=r"one of the columns \['size', 'half'\]"):
        khot.sample_rows(table, 4, weights="wrong")
    assert khot.inclusion_probs(torch.empty(2, 0), 0).shape == (2, 0)
    with pytest.raises(ValueError, match="0 ≤ k ≤ 0"):
        khot.inclusion_probs(torch.empty(0), 1)
