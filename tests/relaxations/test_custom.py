"""Relaxations of one's own."""

import pytest
import torch

import khot
from khot.testing import check_relaxation

DOUBLE = torch.float64


def student(z):
    """Student's t with two degrees of freedom, without cancellation."""
    root = (2 + z.square()).sqrt()
    return torch.where(z > 0, 0.5 + 0.5 * z / root, 1 / (root * (root - z).clamp(min=1)))


STUDENT = khot.relaxation(student, symmetric=True)
GUMBEL = khot.relaxation(
    lambda z: (-(-z).clamp(max=80).exp()).exp(), survival=lambda z: -torch.expm1(-(-z).clamp(max=80).exp())
)


@pytest.mark.long
@pytest.mark.slow
def test_student_keeps_every_law():
    check_relaxation(STUDENT, symmetric=True)


@pytest.mark.long
@pytest.mark.slow
def test_gumbel_keeps_every_law():
    check_relaxation(GUMBEL, symmetric=False, quantile=lambda p: -(-p.log()).log())


@pytest.mark.long
@pytest.mark.slow
def test_a_formula_that_overflows_in_its_derivative():
    check_relaxation(khot.relaxation(lambda z: torch.exp(-torch.exp(-z))), symmetric=False)


def test_given_and_found_parts_agree():
    def density(z):
        return (2 + z.square()) ** -1.5

    def quantile(p):
        return (2 * p - 1) * (2 / (4 * p * (1 - p))).sqrt()

    given = khot.relaxation(student, symmetric=True, density=density, quantile=quantile)
    x = torch.randn(4, 9, dtype=DOUBLE, requires_grad=True)
    upstream = torch.randn(4, 9, dtype=DOUBLE)
    results = []
    for fn in (given, STUDENT):
        y = fn(x, 2.5)
        results.append((y.detach(), *torch.autograd.grad(y, x, upstream)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_wrong_density_is_found():
    def density(z):
        return 2 * torch.sigmoid(z) * torch.sigmoid(-z) ** 2

    wrong = khot.relaxation(torch.sigmoid, symmetric=True, density=density)
    with pytest.raises(AssertionError, match="first derivatives"):
        check_relaxation(wrong)


@pytest.mark.parametrize("cdf", [torch.tanh, lambda z: torch.sigmoid(-z), lambda z: z.clamp(0, 0.9), torch.sin])
def test_what_is_no_cdf_is_refused(cdf):
    with pytest.raises(ValueError, match="must rise from 0 to 1"):
        khot.relaxation(cdf)
