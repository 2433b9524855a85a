import functools
from itertools import pairwise

import pytest
import torch

import khot
from khot.coding import (
    gradient_update,
    least_squares_update,
    omp,
    power_update,
    soft_pursuit,
    svd_update,
)

UPDATES = (svd_update, power_update, least_squares_update, gradient_update)


def coded(seed=0, m=200, n=15, d=8, k=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, d, generator=generator, dtype=torch.float64)
    atoms = torch.nn.functional.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=-1)
    return x, atoms, omp(x, atoms, k)


def error(x, atoms, code):
    return float((x - code.decode(atoms)).square().sum())


def test_svd_update_of_the_first_atom_is_the_svd():
    x, atoms, code = coded()
    better, again = svd_update(x, atoms, code)
    users = code.rows[code.columns == 0]
    others = code.dense()
    others[:, 0] = 0
    u, s, v = torch.linalg.svd(x[users] - (others @ atoms)[users])
    sign = torch.sign(v[0] @ better[0])
    torch.testing.assert_close(better[0], sign * v[0])
    torch.testing.assert_close(again.values[code.columns == 0], sign * s[0] * u[:, 0])


@pytest.mark.parametrize("update", [svd_update, power_update])
def test_the_error_falls_with_every_atom(update):
    """Atoms are updated one after another, so the state after j of them is the first j new ones and the old others."""
    x, atoms, code = coded(1)
    better, again = update(x, atoms, code)
    errors = [
        error(
            x,
            torch.cat([better[:j], atoms[j:]]),
            code._replace(values=torch.where(code.columns < j, again.values, code.values)),
        )
        for j in range(len(atoms) + 1)
    ]
    assert all(after < before for before, after in pairwise(errors))
    assert errors[-1] < 0.9 * errors[0]


@pytest.mark.parametrize("update", [svd_update, power_update])
def test_updates_of_single_atoms_lower_the_error_and_keep_the_support(update):
    x, atoms, code = coded(2)
    better, again = update(x, atoms, code)
    assert error(x, better, again) < error(x, atoms, code)
    assert torch.equal(again.columns, code.columns)
    torch.testing.assert_close(better.norm(dim=-1), torch.ones(15, dtype=torch.float64))
    assert error(x, *svd_update(x, atoms, code)) < error(x, *power_update(x, atoms, code))


def test_repeated_power_updates_reach_a_fixed_point_of_the_svd():
    x, atoms, code = coded(3)
    for _ in range(2000):
        atoms, code = power_update(x, atoms, code)
    settled, again = svd_update(x, atoms, code)
    torch.testing.assert_close(error(x, settled, again), error(x, atoms, code), rtol=1e-6, atol=0)


def test_least_squares_update_is_least_squares():
    x, atoms, code = coded(4)
    better, again = least_squares_update(x, atoms, code)
    wanted = torch.linalg.lstsq(code.dense(), x).solution
    torch.testing.assert_close(again.decode(better), code.dense() @ wanted)
    torch.testing.assert_close(better, torch.nn.functional.normalize(wanted, dim=-1))


@pytest.mark.parametrize("update", UPDATES)
def test_atoms_that_no_signal_uses_stay_finite(update):
    x, atoms, _ = coded(5, k=1)
    atoms[7] = 0
    code = omp(x, atoms, 1)
    assert 7 not in code.columns
    better, again = update(x, atoms, code)
    assert better.isfinite().all()
    assert again.values.isfinite().all()
    if update is not gradient_update:
        assert torch.equal(better[7], atoms[7])


@pytest.mark.parametrize("update", UPDATES)
def test_updates_leave_their_arguments_alone(update):
    x, atoms, code = coded(6)
    before = [t.clone() for t in (x, atoms, code.values)]
    update(x, atoms, code)
    assert all(torch.equal(a, b) for a, b in zip((x, atoms, code.values), before, strict=True))


@pytest.mark.parametrize("relaxation", [khot.sigmoid_topk, khot.laplace_topk])
def test_gradient_update_trains(relaxation):
    """Signals that are made of atoms: turns of coding and gradient lower the error of the coding."""
    generator = torch.Generator().manual_seed(7)
    truth = torch.nn.functional.normalize(torch.randn(15, 8, generator=generator, dtype=torch.float64), dim=-1)
    chosen = torch.stack([torch.randperm(15, generator=generator)[:2] for _ in range(300)])
    x = (torch.randn(300, 2, 1, generator=generator, dtype=torch.float64) * truth[chosen]).sum(1)
    atoms = torch.nn.functional.normalize(x[:15], dim=-1)
    update = functools.partial(
        gradient_update, pursuit=functools.partial(soft_pursuit, relaxation=relaxation, temperature=0.003, steps=2)
    )
    first = error(x, atoms, omp(x, atoms, 2))
    for _ in range(30):
        atoms, _ = update(x, atoms, omp(x, atoms, 2))
    assert error(x, atoms, omp(x, atoms, 2)) < 0.5 * first
    torch.testing.assert_close(atoms.norm(dim=-1), torch.ones(15, dtype=torch.float64))


def test_gradient_update_solves_on_the_old_support():
    x, atoms, _ = coded(8)
    code = omp(x, atoms, torch.arange(200) % 4)
    better, again = gradient_update(x, atoms, code)
    assert torch.equal(again.columns, code.columns)
    residual = x - again.decode(better)
    assert (residual[code.rows] * better[code.columns]).sum(-1).abs().max() < 1e-10


def test_a_bad_rate_is_said():
    with pytest.raises(ValueError, match="`rate` must be > 0"):
        gradient_update(*coded(9), rate=0.0)
