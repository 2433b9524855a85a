"""The benchmark of neighbours runs, its rivals are what they say, and its tables are what it wrote."""

import csv
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import neighbors, neighbors_images, neighbors_memory
from benchmarks.common import COMMITTED
from benchmarks.rivals.neighbors import gumbel_subset, neural_sort

pytestmark = pytest.mark.slow


def permutation(x, temperature):
    """NeuralSort's matrix as the paper writes it."""
    n = x.shape[-1]
    apart = (x.unsqueeze(-1) - x.unsqueeze(-2)).abs().sum(-1)
    rows = torch.arange(1, n + 1, dtype=x.dtype)
    return (((n + 1 - 2 * rows).unsqueeze(-1) * x.unsqueeze(-2) - apart.unsqueeze(-2)) / temperature).softmax(-1)


def test_neural_sort_is_the_sum_of_the_first_rows():
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    expected = permutation(x, 9 * 0.3)[..., :3, :].sum(-2)
    got = neural_sort(x, 3, temperature=0.3)
    torch.testing.assert_close(got, expected)
    g = torch.randn(4, 9, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(got, x, g), torch.autograd.grad(expected, x, g))


@pytest.mark.parametrize("rival", [neural_sort, gumbel_subset])
def test_rivals_leave_out_what_is_masked_and_sum_to_k(rival):
    x = torch.randn(9, 9, dtype=torch.float64)
    mask = ~torch.eye(9, dtype=torch.bool)
    torch.manual_seed(0)
    y = rival(x, 3, temperature=0.3, mask=mask)
    torch.testing.assert_close(y.sum(-1), torch.full((9,), 3.0, dtype=torch.float64))
    assert (y.diagonal() == 0).all()
    if rival is neural_sort:
        others = x[mask].view(9, 8)
        torch.testing.assert_close(y[mask].view(9, 8), rival(others, 3, temperature=0.3))


def test_a_gumbel_subset_is_hard_without_temperature():
    x = torch.randn(5, 9, dtype=torch.float64)
    y = gumbel_subset(x, 3, temperature=1e-4)
    assert (y.round() - y).abs().max() < 1e-6
    assert (y.round().sum(-1) == 3).all()


def test_the_rows_of_a_small_run(monkeypatch):
    sets = neighbors.sets
    monkeypatch.setattr(neighbors, "sets", lambda *how: {name: sets(*how)[name] for name in ("wine", "wave")})
    neighbors.allow_new_sklearn()
    plan = neighbors.QUICK._replace(splits=(0, 1), steps=2)
    rows = list(neighbors.run(plan))
    methods = {row.method for row in rows}
    assert {"raw k-NN", "PCA", "LDA", "NCA", "KHotNeighborhood, network", "NeuralSort, network"} <= methods
    assert all(row.score <= 1 and row.seconds >= 0 for row in rows)
    text = neighbors.report(rows)
    assert "| Accuracy | wine, standardised |" in text
    assert "| R² | wave" in text


def image_files(folder):
    """Forty images in the form of both packages: the class is how bright the first pixels are."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 99, (400, 784), np.uint8), np.arange(400, dtype=np.uint8) % 10
    images[:, :300] = 20 * labels[:, None]
    for part, rows in (("train", slice(0, 300)), ("t10k", slice(300, 400))):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(bytes(16) + images[rows].tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(bytes(8) + labels[rows].tobytes())
    for label in range(10):
        rows = [*images[labels == label].tolist(), []]  # an empty row, as in the package
        (folder / f"{label}.json").write_text(json.dumps({"data": rows}))
    return images, labels


@pytest.mark.long
def test_images_are_read_and_compared(tmp_path, monkeypatch):
    images, labels = image_files(tmp_path)
    x, y = neighbors_images.read_mnist(tmp_path)
    assert np.array_equal(x, images)
    assert np.array_equal(y, labels)
    x, y = neighbors_images.read_fashion(tmp_path)
    assert np.array_equal(x, images[np.argsort(labels, kind="stable")])
    assert np.array_equal(y, np.sort(labels))
    methods = neighbors_images.methods
    kept = ("raw k-NN", "NCA", "KHotNeighborhood, linear")
    monkeypatch.setattr(
        neighbors_images, "methods", lambda plane: {n: m for n, m in methods(plane).items() if n in kept}
    )
    plan = neighbors_images.QUICK._replace(steps=2)
    rows = list(neighbors_images.run({"MNIST": tmp_path, "Fashion-MNIST": tmp_path}, plan, 150))
    assert len(rows) == 2 * 2 * (3 + 2)
    assert all(row.score > 0.5 for row in rows)
    one, other = neighbors_images.Images(x, y, 150).split(0, False), neighbors_images.Images(x, y, 150).split(1, False)
    both = np.concatenate((one.train, one.test))
    assert len(np.unique(both, axis=0)) == 300  # no image on both sides
    assert not np.array_equal(one.train, other.train)


def test_the_table_of_images_is_that_of_the_results():
    rows = neighbors.read(COMMITTED.results / "neighbors_images.csv")
    assert neighbors.report(rows) == (COMMITTED.tables / "neighbors-images.md").read_text(encoding="utf-8")
    assert {row.data for row in rows} == {"MNIST", "Fashion-MNIST"}
    assert len({row.split for row in rows}) == len(neighbors_images.PLAN.splits)


@pytest.mark.long
def test_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["neighbors_memory.py", "--quick", "--json", "--out", str(tmp_path)])
    cases = neighbors_memory.cases
    kept = "SoftNeighbors, 64 candidates"
    monkeypatch.setattr(
        neighbors_memory, "cases", lambda quick: {k: v for k, v in cases(quick).items() if k[0] == kept}
    )
    assert neighbors_memory.main() == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["case"] == kept
    assert row["seconds"] > 0
    assert (tmp_path / "neighbors-memory.md").exists()


def test_the_tables_are_those_of_the_results():
    rows = neighbors.read(COMMITTED.results / "neighbors.csv")
    assert neighbors.report(rows) == (COMMITTED.tables / "neighbors.md").read_text(encoding="utf-8")
    assert len({row.split for row in rows}) == 10
    assert not {row.split for row in rows} & set(neighbors.TUNING)
    with (COMMITTED.results / "neighbors_memory.csv").open(encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    cases = [neighbors_memory.Row(case, size, *map(float, rest)) for case, size, *rest in lines]
    assert neighbors_memory.report(cases) == (COMMITTED.tables / "neighbors-memory.md").read_text(encoding="utf-8")
    assert all(case.peak_mb < 2000 for case in cases if case.size == "4096 × 100000 × 32")
