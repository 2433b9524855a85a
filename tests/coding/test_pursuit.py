import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from sklearn.linear_model import orthogonal_mp

import khot
from khot.coding import omp, soft_pursuit, thresholding_pursuit

PURSUITS = [omp, thresholding_pursuit]


def problem(seed, *, signals=7, d=8, n=20, shared=0.0):
    """Signals and atoms of norm 1; `shared` is the part that all atoms have in common."""
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.randn(n, d, generator=generator, dtype=torch.float64)
    atoms = atoms + shared / (1 - shared) * torch.randn(1, d, generator=generator, dtype=torch.float64)
    x = torch.randn(signals, d, generator=generator, dtype=torch.float64)
    return x, torch.nn.functional.normalize(atoms, dim=-1)


def sparse_signals(seed, noise, n=128, d=64, k=5, count=400):
    generator = torch.Generator().manual_seed(seed)
    _, atoms = problem(seed, d=d, n=n)
    places = torch.stack([torch.randperm(n, generator=generator)[:k] for _ in range(count)])
    amounts = torch.randn(count, k, 1, generator=generator, dtype=torch.float64)
    x = (amounts * atoms[places]).sum(1)
    return x + noise / d**0.5 * torch.randn(x.shape, generator=generator, dtype=torch.float64), atoms


def scikit(x, atoms, k):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it stopped early, where atoms are dependent
        found = orthogonal_mp(atoms.mT.numpy(), x.mT.numpy(), n_nonzero_coefs=k, precompute=False)
    return torch.as_tensor(found).reshape(len(atoms), -1).mT


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9, 0.99])
def test_omp_is_scikit_learns(shared):
    rng = np.random.default_rng(round(100 * shared))
    for seed in range(250):
        d, n = int(rng.integers(3, 40)), int(rng.integers(2, 60))
        k = int(rng.integers(1, min(d, n) + 1))
        x, atoms = problem(seed, signals=1, d=d, n=n, shared=shared)
        ours, theirs = omp(x, atoms, k).dense(), scikit(x, atoms, k)
        assert torch.equal(ours != 0, theirs != 0), (seed, d, n, k)
        assert (ours - theirs).abs().max() <= 1e-8 * theirs.abs().max().clamp(min=1), (seed, d, n, k)


@pytest.mark.parametrize("pursuit", PURSUITS)
def test_k_for_each_row_is_a_call_for_each_row(pursuit):
    x, atoms = problem(0, signals=6)
    k = torch.tensor([0, 1, 2, 3, 8, 5])
    code = pursuit(x, atoms, k)
    assert torch.bincount(code.rows, minlength=6).tolist() == k.tolist()
    for row, count in enumerate(k.tolist()):
        torch.testing.assert_close(code.dense()[row], pursuit(x[row], atoms, count).dense())


@pytest.mark.parametrize("pursuit", PURSUITS)
def test_batches_and_edges(pursuit):
    x, atoms = problem(1, signals=12)
    whole = pursuit(x.view(3, 4, 8), atoms, 3)
    assert whole.shape == (3, 4, 20)
    torch.testing.assert_close(whole.dense().view(12, 20), pursuit(x, atoms, 3).dense())
    torch.testing.assert_close(whole.decode(atoms), whole.dense() @ atoms)
    assert pursuit(x[:0], atoms, 3).dense().shape == (0, 20)
    assert pursuit(x, atoms, 0).values.numel() == 0
    assert pursuit(torch.zeros_like(x), atoms, 3).dense().abs().max() == 0
    if pursuit is omp:
        torch.testing.assert_close(omp(x, torch.eye(8, dtype=x.dtype), 8).dense(), x)


def test_ties_go_to_the_first_atom():
    eye = torch.eye(4, dtype=torch.float64)
    assert omp(torch.ones(4, dtype=torch.float64), eye, 2).columns.tolist() == [0, 1]
    twice = torch.cat([eye, eye])
    assert omp(torch.tensor([0.0, 3.0, 0.0, 2.0], dtype=torch.float64), twice, 8).columns.tolist() == [1, 3]


def test_dependent_atoms_do_not_break_it():
    x, atoms = problem(2)
    low = atoms * torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0], dtype=torch.float64)
    code = omp(x, low, 10)
    assert torch.bincount(code.rows).tolist() == [3] * 7
    torch.testing.assert_close(code.decode(low), x * (low.abs().sum(0) > 0))
    for pursuit in (omp, thresholding_pursuit):
        doubled = pursuit(x, torch.cat([atoms, atoms[:5]]), 6)
        assert doubled.values.isfinite().all()
        assert doubled.values.abs().max() < 100


def test_many_rows_in_chunks_are_one_row_at_a_time(monkeypatch):
    x, atoms = problem(3, signals=50)
    whole = omp(x, atoms, 4).dense()
    monkeypatch.setattr(khot.coding._pursuit, "CHUNK", 60)
    torch.testing.assert_close(omp(x, atoms, 4).dense(), whole)


@pytest.mark.parametrize("tolerance", [2.0, 0.5, 1e-3])
def test_tolerance_stops_each_signal_at_the_first_step_that_reaches_it(tolerance):
    x, atoms = problem(4, signals=40)
    code = omp(x, atoms, 8, tolerance=tolerance)
    counts = torch.bincount(code.rows, minlength=40)
    assert ((x - code.decode(atoms)).norm(dim=-1) <= tolerance * (1 + 1e-9)).all()
    for row in range(40):
        if counts[row]:
            before = omp(x[row], atoms, int(counts[row]) - 1)
            assert (x[row] - before.decode(atoms)).norm() > tolerance
    each = torch.linspace(0.1, 2, 40, dtype=torch.float64)
    assert ((x - omp(x, atoms, 8, tolerance=each).decode(atoms)).norm(dim=-1) <= each * (1 + 1e-9)).all()


def test_positive_with_all_atoms_is_non_negative_least_squares():
    x, atoms = problem(5, signals=60, n=6)
    code = omp(x, atoms.abs(), 6, positive=True).dense()
    wanted = [nnls(atoms.abs().mT.numpy(), row.numpy())[0] for row in x]
    torch.testing.assert_close(code, torch.tensor(np.array(wanted)), atol=1e-10, rtol=1e-10)
    few = omp(x, atoms, 2, positive=True)
    assert (few.values > 0).all()
    assert torch.bincount(few.rows, minlength=60).max() <= 2


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
def test_thresholding_and_soft_pursuit_reach_the_loss_of_omp(noise):
    x, atoms = sparse_signals(6, noise)

    def loss(values):
        return float((x - values @ atoms).square().sum())

    reference = loss(omp(x, atoms, 5).dense())
    assert loss(thresholding_pursuit(x, atoms, 5).dense()) <= 1.01 * reference + 1e-12
    soft = soft_pursuit(x, atoms, 5, hard=True)
    assert ((soft.values != 0).sum(-1) == 5).all()
    assert loss(soft.values) <= 1.01 * reference + 1e-6 * float(x.square().sum())
    first = (x @ atoms.mT).abs().topk(5, -1).indices  # a control: the first guess alone is far from it
    guess = torch.linalg.lstsq(atoms[first].mT, x.unsqueeze(-1)).solution
    assert float((x - (atoms[first].mT @ guess).squeeze(-1)).square().sum()) > 1.2 * reference + 1e-3


@pytest.mark.parametrize("pursuit", PURSUITS)
def test_gradients_of_the_coefficients(pursuit):
    x, atoms = problem(7, signals=4)
    x.requires_grad_()
    atoms.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, d: pursuit(x, d, 3).values, (x, atoms))
    assert torch.autograd.gradcheck(lambda x, d: pursuit(x, d, 3).decode(d), (x, atoms))


def test_soft_pursuit_is_differentiable_in_everything():
    x, atoms = problem(8, signals=3, n=9, d=5)
    k = torch.tensor([1.3, 2.0, 2.7], dtype=torch.float64, requires_grad=True)
    heat = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    arguments = (x.requires_grad_(), atoms.requires_grad_(), k, heat)
    assert torch.autograd.gradcheck(lambda x, d, k, t: soft_pursuit(x, d, k, temperature=t, steps=3), arguments)
    code = soft_pursuit(x, atoms, k)
    torch.testing.assert_close(code.weights.sum(-1), k)


@pytest.mark.parametrize("relaxation", [khot.laplace_topk, khot.euclidean_topk, khot.sample_khot])
def test_soft_pursuit_takes_the_family_and_samples(relaxation):
    x, atoms = sparse_signals(9, 0.0, count=50)
    torch.manual_seed(0)
    code = soft_pursuit(x, atoms, 5, relaxation=relaxation)
    torch.testing.assert_close(code.weights.sum(-1), torch.full((50,), 5.0, dtype=torch.float64))
    assert (x - code.values @ atoms).square().sum() < 0.5 * x.square().sum()


def test_hard_soft_pursuit_has_the_gradient_of_the_soft_one():
    x, atoms = problem(10, signals=3)
    x.requires_grad_()
    soft, hard = (soft_pursuit(x, atoms, 3, temperature=0.1, hard=hard).values for hard in (False, True))
    weights = torch.randn_like(soft)
    ours, theirs = (torch.autograd.grad((code * weights).sum(), x)[0] for code in (hard, soft))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    x, atoms = problem(11)
    code = omp(x.to(dtype), atoms.to(dtype), 3)
    assert code.values.dtype == dtype
    assert len(code.values) == 21
    assert soft_pursuit(x.to(dtype), atoms.to(dtype), 3).values.dtype == dtype


X, ATOMS = problem(12)
BAD = {
    "too many": (lambda: omp(X, ATOMS, 21), ValueError, r"0 ≤ k ≤ 20 \(atoms\); got 21"),
    "fraction": (lambda: omp(X, ATOMS, 2.5), TypeError, "`k` must be an int"),
    "float k": (lambda: omp(X, ATOMS, torch.ones(7)), TypeError, r"Use `k.long\(\)`"),
    "negative rows": (lambda: omp(X, ATOMS, torch.full((7,), -1)), ValueError, "from -1 to -1"),
    "rows": (lambda: omp(X, ATOMS, torch.tensor([1, 2])), ValueError, "must broadcast"),
    "length": (lambda: omp(X, ATOMS[:, :3], 2), ValueError, r"\(atoms, 8\)"),
    "dtype": (lambda: omp(X.float(), ATOMS, 2), TypeError, "dtype of `signals`"),
    "NaN": (lambda: omp(X * torch.nan, ATOMS, 2), ValueError, "`signals` must be finite; got 56"),
    "inf": (lambda: thresholding_pursuit(X, ATOMS / 0, 2), ValueError, "`dictionary` must be finite"),
    "list": (lambda: omp([1.0], ATOMS, 2), TypeError, "must be a torch.Tensor"),
    "no atoms": (lambda: omp(X, ATOMS[:0], 0), ValueError, "m, d ≥ 1"),
    "tolerance": (lambda: omp(X, ATOMS, 2, tolerance=-1), ValueError, "≥ 0; got -1"),
    "steps": (lambda: thresholding_pursuit(X, ATOMS, 2, steps=0), ValueError, "`steps` must be ≥ 1"),
    "ridge": (lambda: soft_pursuit(X, ATOMS, 2, ridge=0), ValueError, "`ridge` must be > 0"),
    "soft k": (lambda: soft_pursuit(X, ATOMS, 21), ValueError, "0 ≤ k ≤ 20"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said(name):
    call, error, words = BAD[name]
    with pytest.raises(error, match=words):
        call()
